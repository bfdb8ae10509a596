"""`TreeConfig`: everything a call can say about its trees."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import yaml

from hf_treespec.errors import TreeConfigError, warn
from hf_treespec.options import DEPTH_OPTIONS, FrozenDict, Option, checked_ids, checked_options, did_you_mean
from hf_treespec.rules import COUPLED, RULES
from hf_treespec.tree import GROWTH_POLICIES, TreeLimits

__all__ = ["CONFIG_NAME", "LAYER_DRAFTS", "SCHEMA_VERSION", "SOURCES", "TreeConfig"]

CONFIG_NAME = "tree_config.json"
SCHEMA_VERSION = 1

# Sources that need no second model; several may draft together.
SOURCES = ("ngram", "suffix", "recycle", "lookahead")
# The target itself without some of its layers.
LAYER_DRAFTS = ("early_exit", "layer_skip")
# Those that cost forwards, of which a joint tree has one: the assistant, the modules that came with the target, or
# the target itself.
_COSTLY = ("model", "mtp", *LAYER_DRAFTS)
_JOINABLE = (*_COSTLY, *SOURCES)
_DRAFTS = ("auto", *_JOINABLE)
_CHOICES: dict[str, tuple[str, ...]] = {
    "growth": GROWTH_POLICIES,
    "depth_control": tuple(DEPTH_OPTIONS),
    "verification": (COUPLED, *RULES),
    "kv_cache": ("auto", "dense", "int8", "fp8"),
    "attention": ("auto", "sdpa", "eager", "treespec"),
    "fallback": ("auto", "off"),
    "on_stateful_processor": ("in_step", "error"),
}
_INTEGERS: dict[str, tuple[int, int]] = {
    "max_nodes": (0, 4096),
    "max_depth": (1, 512),
    "max_children": (1, 512),
    "random_children": (0, 2),
}
_SEED_LIMIT = 1 << 63
_T = TypeVar("_T")
_OPTIONS: dict[str, dict[str, Option]] = {
    "model": {"vocabulary": (None, checked_ids), "vocabulary_size": (None, (1, 1 << 24))},
    "mtp": {"depth": (None, (1, 512))},
    "ngram": {"max_match": (8, (1, 64))},
    "suffix": {"index": (None, Path)},
    "recycle": {"candidates": (8, (1, 64)), "keep": (True, bool)},
    "lookahead": {"window": (3, (1, 64)), "ngram": (3, (2, 16)), "candidates": (8, (1, 256))},
    "early_exit": {"layer": (None, (1, 4096))},
    "layer_skip": {"skip": (None, list)},
}


def _with_hints(cls: type[_T]) -> type[_T]:
    """Have the class name the field that a misspelt one may mean."""
    plain = cls.__init__
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]

    @wraps(plain)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                raise TypeError(
                    f"TreeConfig({name}={given[name]!r}): no such field; expected one of {', '.join(known)}"
                    + did_you_mean(name, known)
                )
        plain(self, *args, **given)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


@_with_hints
@dataclass(frozen=True, slots=True, kw_only=True)
class TreeConfig:
    """How `generate(..., tree_config=...)` speculates. Greedy text depends on no field, sampled text on `seed` alone.

    That is so for the default `verification`; other rules say of themselves what they keep.

    Args:
        draft: where trees come from: ``"model"`` (the `assistant_model` of the call); ``"mtp"`` (the multi-token
            prediction modules of the target's checkpoint, as `use_mtp` of the call); ``"early_exit"`` (the target's
            own first layers under its norm and head); ``"layer_skip"`` (the target without a set of its layers; see
            `hf_treespec.find_layer_skip`); ``"ngram"`` (what followed the same few tokens in the prompt and the text
            so far); ``"suffix"`` (the same with contexts of any length, and a corpus on disk if one is named);
            ``"recycle"`` (the target's own top candidates at earlier nodes); ``"lookahead"`` (n-grams that the target
            makes up in a Jacobi window, which takes part of the nodes); or ``"auto"``: the assistant if one is given,
            n-grams otherwise. Several of ngram, suffix, recycle and lookahead, and one of the others that have a name,
            such as ``("ngram", "recycle")`` or ``("model", "ngram")``, grow one tree together; that other one then
            drafts in the rounds in which it is worth its time (with ``fallback="off"`` in all).
        max_nodes: drafted nodes of a tree, the root not counted. 0 is plain decoding on the same noise: the reference
            that every tree must equal.
        max_depth: edges from the root to the deepest leaf. A round emits at most `max_depth + 1` tokens.
        max_children: children of one node.
        growth: ``"best_first"`` keeps the nodes most likely to be accepted, ``"static"`` fills a shape by rank, the
            best by measured acceptance (with ``fallback="off"`` by a prior), ``"dynamic"`` expands a few nodes a level
            and re-ranks at the end (EAGLE-2).
        verification: how sampled tokens are verified; greedy decoding is the same for all. ``"coupled"``: one Gumbel
            noise per position shared by draft and target, so that the text is that of plain decoding with the same
            seed. The other rules of `hf_treespec.rules.RULES` draw and test independently: the text follows the
            target's law, but is another one for other trees (and with ``fallback="auto"`` trees go by the clock).
            ``"typical-lossy"`` does not follow it, and says so in a warning and in the statistics.
        random_children: random ones among the children of a node, for the hybrid rules.
        kv_cache: ``"auto"``: the cache of the call, or the dynamic one that `generate` makes. ``"dense"``, ``"int8"``
            and ``"fp8"``: a `hf_treespec.TreeCache` of that storage, which the call returns in place of a
            `DynamicCache`; the text over 8 bits is that of plain decoding over the same storage.
        attention: ``"auto"`` uses the model's own sdpa or eager attention; ``"sdpa"`` or ``"eager"`` switches the
            model for the call and back, for models loaded with an attention that takes no tree mask; ``"treespec"``
            reads the target's trees by the kernel of `treespec_kernels` (on a GPU with the extra ``kernels``; by its
            torch reference elsewhere), and all else by the model's own. A switch is in the model's config: no other
            thread may run the model during such a call.
        seed: integer in [0, 2**63) that fixes the noise under `do_sample=True`; None draws one from torch's global
            generator, so `torch.manual_seed` governs it.
        fallback: ``"auto"`` measures rounds and scores the size of tree, up to `max_nodes`, that brings the most
            tokens a second, or none while none pays; ``"off"`` always scores whole trees.
        on_stateful_processor: what to do about logits processors that are not known to be functions of their arguments
            (SynthID, grammar objects, `prefix_allowed_tokens_fn`, classes of the caller's own). ``"in_step"`` lets all
            rows of a batch advance together, so that each is called exactly as plain decoding calls it: once a token,
            in order, with the committed text only. ``"error"`` refuses the call before any forward.
        draft_options: options by source, such as ``{"recycle": {"candidates": 12}}``; copied, and unchangeable from
            then on. Those of sources that do not draft in a call have no effect, and a warning says so. ``model``:
            `vocabulary`, the only token ids that the draft's LM head is evaluated for, the most frequent first: a
            sequence, a mapping of ids to counts, or the path of a .json file of either (None: all), and
            `vocabulary_size`, at most so many of them (None: all). ``mtp``: `depth`, how far ahead to draft (None: one
            level a module); behind the last module that is run again on what it made itself. ``early_exit``: `layer`,
            how many of the first layers draft (as the call's `assistant_early_exit`). ``layer_skip``: `skip`, the
            numbers of the layers left out. ``ngram``: `max_match`, longest context in tokens (8). ``suffix``: `index`,
            path of a corpus index that `treespec index` made (None). ``recycle``: `candidates`, kept of each token
            (8), and `keep`, whether what is learnt in a call serves the next calls of the model too (True).
            ``lookahead``: `window`, columns guessed ahead (3), `ngram`, tokens of an n-gram (3), and `candidates`,
            n-grams kept of each first token (8); the window takes `window * (ngram - 1)` nodes, at most half of
            `max_nodes`.
        depth_control: how deep drafts go: ``"cost"``, while a level's gain pays for its measured time; ``"pid"``, to
            hold the share of accepted levels; ``"confidence"``, while the best path is confident; ``"kl"``, by the
            divergence of draft and target of late. See docs/sizes.md.
        depth_options: options by controller. ``pid``: `setpoint` (0.6), `kp` (4), `ki` (0.5), `kd` (0) and
            `window`, in rounds (8). ``confidence``: `threshold` (0.3). ``kl``: `threshold` (0.1) and `decay` (0.8).

    Raises:
        TreeConfigError: if a field has a value that cannot work.
    """

    draft: str | tuple[str, ...] = "auto"
    max_nodes: int = 16
    max_depth: int = 8
    max_children: int = 4
    growth: str = "best_first"
    verification: str = COUPLED
    random_children: int = 1
    kv_cache: str = "auto"
    attention: str = "auto"
    seed: int | None = None
    fallback: str = "auto"
    on_stateful_processor: str = "in_step"
    draft_options: Mapping[str, Mapping[str, Any]] = field(default_factory=FrozenDict)
    depth_control: str = "cost"
    depth_options: Mapping[str, Mapping[str, Any]] = field(default_factory=FrozenDict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft", _checked_draft(self.draft))
        object.__setattr__(self, "draft_options", checked_options(self.draft_options, _OPTIONS))
        depth = checked_options(self.depth_options, DEPTH_OPTIONS, "depth_options", "controller")
        object.__setattr__(self, "depth_options", depth)
        model = self.options_of("model")
        if model["vocabulary"] is None and model["vocabulary_size"] is not None:
            raise TreeConfigError(
                f"TreeConfig(draft_options=...): model['vocabulary_size']={model['vocabulary_size']}: most frequent "
                "ones of which ids? Set model['vocabulary'] too"
            )
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise TreeConfigError(f"TreeConfig({name}={value!r}): expected one of {', '.join(map(repr, choices))}")
        for name, (low, high) in _INTEGERS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise TreeConfigError(f"TreeConfig({name}={value!r}): expected an integer in [{low}, {high}]")
        seed = self.seed
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < _SEED_LIMIT):
            raise TreeConfigError(f"TreeConfig(seed={seed!r}): expected None or an integer in [0, 2**63)")

    def __hash__(self) -> int:
        # A mapping has no hash of its own.
        return hash(json.dumps(asdict(self), sort_keys=True))

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of those that draft from the text or what the target said; what runs a forward is not among them."""
        return tuple(name for name in self._drafts if name in SOURCES)

    @property
    def with_model(self) -> bool:
        """Whether an assistant is asked for by name."""
        return "model" in self._drafts

    @property
    def with_mtp(self) -> bool:
        """Whether the target's multi-token prediction modules are asked for."""
        return "mtp" in self._drafts

    @property
    def joins(self) -> bool:
        """Whether a costly draft and sources of the text grow one tree together."""
        return bool(self.sources) and any(name in _COSTLY for name in self._drafts)

    @property
    def layer_draft(self) -> str | None:
        """Which of `LAYER_DRAFTS` is asked for, if one is."""
        return next((name for name in self._drafts if name in LAYER_DRAFTS), None)

    @property
    def _drafts(self) -> tuple[str, ...]:
        return (self.draft,) if isinstance(self.draft, str) else self.draft

    def options_of(self, source: str) -> dict[str, Any]:
        """All options of a source, with defaults for those that are not set."""
        defaults = {name: default for name, (default, _) in _OPTIONS[source].items()}
        return {**defaults, **self.draft_options.get(source, {})}

    @property
    def depth_settings(self) -> dict[str, Any]:
        """All options of the depth controller, with defaults for those that are not set."""
        defaults = {name: default for name, (default, _) in DEPTH_OPTIONS[self.depth_control].items()}
        return {**defaults, **self.depth_options.get(self.depth_control, {})}

    @property
    def limits(self) -> TreeLimits:
        """The size budget as one value."""
        return TreeLimits(max_nodes=self.max_nodes, max_depth=self.max_depth, max_children=self.max_children)

    def replace(self, **changes: Any) -> TreeConfig:
        """A copy with some fields changed, validated again."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """All fields and the schema version."""
        data = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        for name in ("draft_options", "depth_options"):
            data[name] = {
                source: {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
                for source, options in getattr(self, name).items()
            }
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TreeConfig:
        """Inverse of `to_dict`. Unknown keys are dropped with one warning that names them.

        Raises:
            TreeConfigError: if `data` is no mapping, was written by a newer schema, or holds a bad value.
        """
        if not isinstance(data, Mapping):
            raise TreeConfigError(f"expected a mapping of TreeConfig fields, got {type(data).__name__}")
        known = {f.name for f in fields(cls)}
        version = data.get("schema_version", SCHEMA_VERSION)
        if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= SCHEMA_VERSION:
            raise TreeConfigError(
                f"schema_version={version!r}: this release reads 1 to {SCHEMA_VERSION}; upgrade hf-treespec to read it"
            )
        unknown = sorted(str(key) for key in data if key not in known and key != "schema_version")
        if unknown:
            hints = (did_you_mean(key, known - data.keys()) for key in unknown)
            warn(f"TreeConfig: unknown keys dropped: {', '.join(unknown)}{''.join(hints)}")
        values = {key: value for key, value in data.items() if key in known}
        if values.get("fallback") is False:
            # YAML reads a bare `off` as false.
            values["fallback"] = "off"
        return cls(**values)

    def to_json_string(self) -> str:
        """The config as indented JSON."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def to_yaml_string(self) -> str:
        """The config as YAML."""
        return str(yaml.safe_dump(self.to_dict(), sort_keys=False))

    def save_pretrained(self, save_directory: str | Path) -> Path:
        """Write `tree_config.json` into a folder, which is made if needed.

        Args:
            save_directory: a folder; or a file name ending in .json, .yaml or .yml to write just that.

        Returns:
            The path of the file.
        """
        target = Path(save_directory)
        if target.suffix not in _READERS:
            target = target / CONFIG_NAME
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.to_json_string() if target.suffix == ".json" else self.to_yaml_string())
        return target

    @classmethod
    def from_pretrained(cls, path: str | Path) -> TreeConfig:
        """Read a config written by `save_pretrained`, or any .json, .yaml or .yml file of its fields.

        Raises:
            FileNotFoundError: if there is no such file, or the folder has no `tree_config.json`.
            TreeConfigError: if the file does not parse or holds a bad value.
        """
        source = Path(path)
        if source.is_dir():
            source = source / CONFIG_NAME
        if not source.is_file():
            raise FileNotFoundError(
                f"{source}: no such file; expected {CONFIG_NAME} in a folder, or a .json/.yaml file"
            )
        reader = _READERS.get(source.suffix)
        if reader is None:
            raise TreeConfigError(f"{source}: expected a name ending in one of {', '.join(_READERS)}")
        try:
            data = reader(source.read_text())
        except (ValueError, yaml.YAMLError) as error:
            raise TreeConfigError(f"{source}: cannot be parsed: {error}") from error
        return cls.from_dict(data)


def _checked_draft(value: Any) -> str | tuple[str, ...]:
    """One name, or a tuple of several."""
    if isinstance(value, str) and value in _DRAFTS:
        return value
    if isinstance(value, (tuple, list)):
        names = tuple(value)
        several = sum(name in _COSTLY for name in names) > 1
        if names and all(name in _JOINABLE for name in names) and len(set(names)) == len(names) and not several:
            return str(names[0]) if len(names) == 1 else names
    joinable = ", ".join(map(repr, _JOINABLE))
    raise TreeConfigError(
        f"TreeConfig(draft={value!r}): expected one of {', '.join(map(repr, _DRAFTS))}, or a tuple of different "
        f"ones of {joinable}, one of the first four at most"
    )


_READERS: dict[str, Callable[[str], Any]] = {".json": json.loads, ".yaml": yaml.safe_load, ".yml": yaml.safe_load}
