"""Building the tiny twin of a model without weights.

The parts of a config that say which layers are of which kind differ from model to model, and so do the sizes that hang
together. So several tiny configs are tried, until a model of one runs and has all kinds of modules of the large one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from hf_treespec import _compat
from hf_treespec.errors import TreeSpecError
from hf_treespec.twin.kinds import kinds
from hf_treespec.twin.overrides import OVERRIDES
from hf_treespec.twin.shrink import DROP, tiny_config
from hf_treespec.twin.weights import enliven

__all__ = ["TwinError", "is_twin", "tiny_twin"]

# Layers that are tried: one of each kind, or else so many of the first.
_FIRST = (None, 4, 8, 12, 16, 20, 24, 32)
# More weights than that are not tiny: a size was overlooked.
_MOST_WEIGHTS = 2**25
# As often as that layers are added in vain to what always raises the same.
_ENOUGH = 3
_SEED = 0
_MARK = "_treespec_twin"
_TOKENS = (4, 3, 1, 2, 5)


class TwinError(TreeSpecError):
    """No tiny twin of a model can be built. The message says why."""


@contextmanager
def tiny_twin(model: _compat.PreTrainedModel) -> Iterator[_compat.PreTrainedModel]:
    """A small model with random weights that is in all but its sizes like one without weights.

    It is of the same class and runs the same attention, or sdpa in place of one that may need an accelerator. Its
    config says the same of kinds of layers, positions, windows, experts and heads. It is float32, in evaluation and on
    the CPU. What is run inside the context runs there too, and leaves the random numbers of the caller as they were.

    Args:
        model: its parameters are not read, and it is not changed.

    Raises:
        TwinError: if the code of the model cannot make a small one of it, or none with all kinds of its modules.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if torch.empty(0).device.type != "cpu":
            # The caller may be building its model under another device.
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        # The twin is no model of the caller's, whose rounding would be looked past.
        stack.enter_context(torch.autocast("cpu", enabled=False))
        with _compat.quiet_transformers():
            twin = _built(model)
        yield twin


def is_twin(model: _compat.PreTrainedModel) -> bool:
    """Whether a model stands in for another one, so that nothing found out about it holds for a user's own."""
    return _MARK in vars(model)


def _built(model: _compat.PreTrainedModel) -> _compat.PreTrainedModel:
    base = getattr(type(model), "_treespec_base", type(model))
    raised: list[str] = []
    lacking: list[str] = []
    fallen_back: _compat.PreTrainedModel | None = None
    for first in _FIRST:
        try:
            attention = _attention(model)
            config = tiny_config(model.config, _changes(model.config), first_layers=first)
            with torch.device("meta"):
                small = base._from_config(config, attn_implementation=attention, dtype=torch.float32)
            weights = sum(parameter.numel() for parameter in small.parameters())
            if weights > _MOST_WEIGHTS:
                raise TwinError(f"{weights} weights are left in it")
            lacking = sorted({kind.__name__ for kind, _ in kinds(model) - kinds(small)})
            if not lacking:
                twin = _drawn(base, config, attention)
                # One that runs without a cache only is for the probes to judge, if there is no better.
                fallen_back = fallen_back or twin
                _decode(twin)
                return twin
        except (MemoryError, torch.OutOfMemoryError):
            # Says nothing about the model.
            raise
        # Whatever the code of a model raises on sizes that nobody has tried.
        except Exception as error:
            told = str(error) if isinstance(error, TwinError) else f"{type(error).__name__}: {error}"
            raised.append(" ".join(told.split()))
            if raised.count(raised[-1]) == _ENOUGH:
                break
    if fallen_back is not None:
        return fallen_back
    raise TwinError(raised[0] if raised else f"not all kinds of {', '.join(lacking)} are left in it")


def _drawn(base: Any, config: _compat.PreTrainedConfig, attention: str | dict[str, str]) -> _compat.PreTrainedModel:
    """A model with random weights that runs."""
    # The seeds of accelerators, which `torch.manual_seed` would set as well, are the caller's.
    torch.default_generator.manual_seed(_SEED)
    twin: _compat.PreTrainedModel = base._from_config(config, attn_implementation=attention, dtype=torch.float32)
    module: torch.nn.Module = twin
    module.eval()
    setattr(twin, _MARK, True)
    if any(parameter.device.type != "cpu" for parameter in twin.parameters()):
        raise TwinError("its weights do not come to lie on the CPU")
    enliven(twin, _SEED)
    ids = torch.tensor([_TOKENS])
    twin(**_compat.prepare_inputs(twin, ids, use_cache=False, **_compat.encoder_states(twin)), return_dict=True)
    return twin


def _decode(twin: _compat.PreTrainedModel) -> None:
    """A step of plain decoding behind a prompt: more than the layers may have to agree with the cache."""
    if _compat.is_encoder_decoder(twin):
        return
    ids = torch.tensor([_TOKENS])
    kwargs = _compat.start_kwargs(twin, ids, None)
    outputs = _compat.prefill(twin, ids, _compat.default_config(), kwargs)
    _compat.plain_step(twin, outputs, torch.cat([ids, ids[:, :1]], dim=1), kwargs)


def _attention(model: _compat.PreTrainedModel) -> str | dict[str, str]:
    """By parts of the model, if they differ; those that need an accelerator are replaced."""
    plain = "sdpa" if model._supports_sdpa else "eager"
    own = _compat.attention_implementations(model)
    names = {part: name if name in _compat.MASK_IMPLEMENTATIONS else plain for part, name in own.items()}
    # The configs of some models take one name only.
    return names if len(set(names.values())) > 1 else names[""]


def _changes(config: _compat.PreTrainedConfig) -> dict[str, Any]:
    """Sizes that the rules do not get right, of all parts; what a config leaves open stays so."""
    table = OVERRIDES.get(config.model_type, ({}, ""))[0]
    own = {name: size for name, size in table.items() if size is DROP or vars(config).get(name) is not None}
    parts = {name: part for name, part in vars(config).items() if isinstance(part, _compat.PreTrainedConfig)}
    return own | {name: _changes(part) for name, part in parts.items()}
