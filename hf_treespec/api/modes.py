"""Generation modes that take no tree, by the settings that ask for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hf_treespec.errors import UnsupportedCallError

__all__ = ["mode_settings", "refuse_modes", "refuse_paged"]


def _above(least: float) -> Callable[[Any], bool]:
    # Nonsense of another type is for transformers to complain about.
    return lambda value: isinstance(value, int | float) and value > least


def _given(value: Any) -> bool:
    return value is not None


# What each setting must be to ask for another mode than greedy decoding or sampling.
_SETTINGS: dict[str, Callable[[Any], bool]] = {
    "num_beams": _above(1),
    "num_beam_groups": _above(1),
    "penalty_alpha": _above(0),
    "constraints": _given,
    "force_words_ids": _given,
    "dola_layers": _given,
}


def mode_settings(value_of: Callable[[str], Any]) -> dict[str, Any]:
    """The settings that ask for a mode without trees, with their values.

    Args:
        value_of: gives the value of a generation setting by its name.
    """
    found = {name: value for name, asks in _SETTINGS.items() if asks(value := value_of(name))}
    if "num_beams" not in found:
        # Groups are groups of beams.
        found.pop("num_beam_groups", None)
    if "penalty_alpha" in found and (value_of("do_sample") or value_of("top_k") in (0, 1)):
        # Contrastive search is a greedy mode over several candidates; otherwise the setting is not looked at.
        del found["penalty_alpha"]
    return found


def refuse_modes(value_of: Callable[[str], Any], mode: str | None = None) -> None:
    """Refuse beams, contrastive search, constraints and DoLa.

    Args:
        value_of: gives the value of a generation setting by its name.
        mode: the mode that transformers has made of the settings, if it has and it takes no tree.

    Raises:
        UnsupportedCallError: naming the settings.
    """
    found = mode_settings(value_of)
    if not found and mode is None:
        return
    given = ", ".join(f"{name}={value!r}" for name, value in found.items()) or f"generation mode {mode!r}"
    others = [name for name in found if name != "num_beams"]
    remedy = ["use num_beams=1"] if "num_beams" in found else []
    remedy += [f"leave {' and '.join(others)} out"] if others else []
    raise UnsupportedCallError(
        f"{given} with tree_config: trees serve greedy decoding and sampling; "
        f"{' and '.join(remedy)}{', ' if remedy else ''}or leave tree_config out"
    )


def refuse_paged(kwargs: Mapping[str, Any]) -> None:
    """Refuse continuous batching, which would drop `tree_config` without a word.

    Raises:
        UnsupportedCallError: if there is a tree config.
    """
    if kwargs.get("tree_config") is not None:
        raise UnsupportedCallError(
            "cache_implementation='paged' (or generate_batch) with tree_config: continuous batching has a loop of "
            "its own; leave cache_implementation out, or leave tree_config out"
        )
