"""Drafts that are the target without some of its layers: what a call asks for, and whether the model can do it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hf_treespec import _compat
from hf_treespec.api.layer_plan import find_layers
from hf_treespec.api.layer_trial import read_behind
from hf_treespec.api.probe import Sample, compare
from hf_treespec.api.support import require_support, routed
from hf_treespec.attention import attention_for_trees, counted_by_depth, in_this_thread, tree_masks
from hf_treespec.cache import RowCache
from hf_treespec.config import TreeConfig
from hf_treespec.draft import DraftRow, LayerDraft, LayerPlan, LevelReader, skippable
from hf_treespec.engine import TargetForward
from hf_treespec.errors import UnsupportedCallError, UnsupportedModelError
from hf_treespec.tree import Candidate, TreeBuilder

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

__all__ = ["check_layer_draft", "draft_layers", "layers_of", "with_early_exit"]

# Per model: its layers, and what the probe said of each set of skipped ones.
_Answers = dict[tuple[Any, ...], LayerPlan | str]
_ANSWERS: WeakKeyDictionary[nn.Module, _Answers] = WeakKeyDictionary()
_INSTEAD = "use draft='ngram', which needs no model, or pass an assistant_model"


def with_early_exit(config: TreeConfig, generation_config: GenerationConfig) -> TreeConfig:
    """The config with the layer that `assistant_early_exit` of the call names, as transformers spells it.

    Raises:
        UnsupportedCallError: if it is no layer, or the config says otherwise.
    """
    layer = getattr(generation_config, "assistant_early_exit", None)
    if layer is None:
        return config
    if isinstance(layer, bool) or not isinstance(layer, int) or layer < 1:
        raise UnsupportedCallError(
            f"assistant_early_exit={layer!r}: expected how many of the first layers draft, an integer of at least 1"
        )
    if config.draft != "auto" and config.layer_draft != "early_exit":
        raise UnsupportedCallError(
            f"assistant_early_exit={layer} with TreeConfig(draft={config.draft!r}): both say what drafts; leave "
            "assistant_early_exit out, or use draft='auto', 'early_exit', or a tuple such as ('early_exit', 'ngram')"
        )
    own = config.options_of("early_exit")["layer"]
    if own not in (None, layer):
        raise UnsupportedCallError(
            f"assistant_early_exit={layer} with TreeConfig(draft_options={{'early_exit': {{'layer': {own}}}}}): "
            "expected one layer; leave one of the two out"
        )
    options = {**config.draft_options, "early_exit": {"layer": layer}}
    draft = "early_exit" if config.draft == "auto" else config.draft
    return config.replace(draft=draft, draft_options=options)


def check_layer_draft(
    model: PreTrainedModel, config: TreeConfig, assistant: Any, mode_kwargs: Mapping[str, Any]
) -> None:
    """Refuse a draft of the target's own layers that the call or the model does not allow; other drafts pass.

    Raises:
        UnsupportedCallError: naming the argument and what to do.
        UnsupportedModelError: if the model cannot be read without those layers, with the reason.
    """
    if config.layer_draft is None:
        return
    asked = f"TreeConfig(draft={config.draft!r})"
    if assistant is not None:
        raise UnsupportedCallError(
            f"{asked} with an assistant_model: the target drafts itself; leave assistant_model out, or use "
            "draft='model'"
        )
    if mode_kwargs.get("synced_gpus"):
        raise UnsupportedCallError(
            f"synced_gpus=True with {asked}: a rank that skips layers would not gather their weights with the other "
            f"ranks; {_INSTEAD}"
        )
    support = require_support(model, "the model")
    if not support.route.masked:
        raise UnsupportedCallError(
            f"{asked}: {type(model).__name__} takes no tree mask, and a draft of its layers reads its tree under one; "
            "use draft='ngram'"
        )
    draft_layers(model, config)


def draft_layers(model: PreTrainedModel, config: TreeConfig) -> tuple[LayerPlan | None, tuple[int, ...]]:
    """The layers of a model and the numbers of those that its draft skips; (None, ()) for other drafts.

    A probe compares, on the model itself, a tree read without these layers behind a cache that was read with all of
    them with a forward that runs them and drops what they return. The answer is kept as long as the model lives.

    Raises:
        UnsupportedCallError: if the config names no layers of this model.
        UnsupportedModelError: if it cannot be read without them.
    """
    if config.layer_draft is None:
        return None, ()
    plan = layers_of(model)
    skipped = _skipped(config, type(model).__name__, len(plan.names))
    return (_right(model, _remembered(model, skipped, plan)) if skipped else plan), skipped


def layers_of(model: PreTrainedModel) -> LayerPlan:
    """The layers of a model.

    Raises:
        UnsupportedModelError: if it cannot be read without any of them, with the reason.
    """
    return _right(model, _remembered(model, ()))


def _right(model: PreTrainedModel, plan: LayerPlan | str) -> LayerPlan:
    if isinstance(plan, str):
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot draft without some of its layers: {plan}; {_INSTEAD}"
        )
    return plan


def _skipped(config: TreeConfig, model: str, count: int) -> tuple[int, ...]:
    name = str(config.layer_draft)
    option = "layer" if name == "early_exit" else "skip"
    value = config.options_of(name)[option]
    shown = list(value) if isinstance(value, tuple) else value
    where = f"TreeConfig(draft_options={{{name!r}: {{{option!r}: {shown}}}}})"
    if value is None:
        also = ", or assistant_early_exit of the call" if option == "layer" else "; treespec skips finds some"
        example = "8" if option == "layer" else "[10, 11, 14]"
        raise UnsupportedCallError(
            f"TreeConfig(draft={config.draft!r}) names no layers: set draft_options={{{name!r}: "
            f"{{{option!r}: {example}}}}}{also}"
        )
    if option == "layer":
        if value > count:
            raise UnsupportedCallError(f"{where}: {model} has {count} layers; expected 1 to {count}")
        return tuple(range(value, count))
    if value[-1] >= count or len(value) == count:
        raise UnsupportedCallError(
            f"{where}: {model} has {count} layers; expected some, not all, of the numbers 0 to {count - 1}"
        )
    return tuple(value)


def _remembered(model: PreTrainedModel, skipped: tuple[int, ...], plan: LayerPlan | None = None) -> LayerPlan | str:
    """The answer for a set of layers, given the plan for none."""
    if _compat.has_compiled_parts(model):
        # It may have been compiled since.
        return find_layers(model)
    answers = _ANSWERS.setdefault(model, {})
    key = skipped, model.config.to_json_string(use_diff=False), _compat.attention_implementation(model), model.dtype
    if key not in answers:
        # In inference mode tensors do not tell that they were written to.
        with torch.inference_mode(False), torch.no_grad():
            if plan is None:
                answers[key] = find_layers(model)
            else:
                error, final = _probe(model, plan, skipped)
                if error is not None and not final:
                    return error
                answers[key] = plan if error is None else error
    return answers[key]


def _probe(model: PreTrainedModel, plan: LayerPlan, skipped: Sequence[int]) -> tuple[str | None, bool]:
    """None if a tree reads right without the layers, else the reason; and whether that is final."""
    attention = _compat.attention_implementation(model)
    wanted = "auto" if attention in _compat.MASK_IMPLEMENTATIONS else "sdpa"
    route, names = routed(model, require_support(model, "the model"))
    with ExitStack() as stack:
        stack.enter_context(attention_for_trees(model, wanted))
        stack.enter_context(tree_masks())
        stack.enter_context(counted_by_depth(model, route, names))
        stack.enter_context(skippable(model, plan, skipped))

        def tree_logits(sample: Sample) -> Tensor:
            cache = _compat.make_cache(model.config)
            read_behind(model, sample.prompt, cache, first=0)
            rows = RowCache(cache, [len(sample.prompt)])
            last = torch.tensor([[len(sample.prompt) - 1]], device=model.device)
            vocab = _compat.vocabulary_size(model)
            draft = _Recorded(model, plan, skipped, name="probe", growth="static", vocab_size=vocab, route=route)
            row = DraftRow(index=0, tokens=[*sample.prompt, sample.tree.tokens[0]])
            draft.borrow(TargetForward(model, rows, last, None, {"use_cache": True}, route=route), [row])
            return draft.last_logits(row, rows, sample)

        def plain_logits(sample: Sample, path: tuple[int, ...]) -> Tensor:
            cache = _compat.make_cache(model.config)
            read_behind(model, sample.prompt, cache, first=0)
            with _ignored(model, plan, skipped):
                for place, token in enumerate(path, len(sample.prompt)):
                    logits = read_behind(model, (token,), cache, first=place)
            return logits[0, -1:].double()

        excuse = "something else than hidden states goes from one layer to another"
        return compare(model, tree_logits, plain_logits, excuse)


class _Recorded(LayerDraft):
    """Keeps the logits that children would be ranked by, and ranks none."""

    def last_logits(self, row: DraftRow, rows: RowCache, sample: Sample) -> Tensor:
        """Logits `[1, V]` at the last node of the sample's tree, whose levels above are read one by one."""
        self._ahead = [1]
        tree, builder = sample.tree, TreeBuilder(sample.tree.tokens[0])
        place = {0: 0}
        with self._transaction(rows) as transaction:
            reader = LevelReader(self, [row], rows, transaction, 1, by_slots=self._by_slots)
            for depth in range(tree.depths[-1] + 1):
                level = [node for node in range(len(tree)) if tree.depths[node] == depth]
                for node in level if depth else ():
                    place[node] = builder.add(place[tree.parents[node]], tree.tokens[node], 0.0)
                reader.expand([builder], [[place[node] for node in level]])
        return self.seen[-1:].double()

    def rank(self, logits_RV: Tensor, noise: Sequence[Tensor | None], count: int) -> list[list[Candidate]]:
        """No candidates."""
        self.seen = logits_RV
        return [[] for _ in logits_RV]


@contextmanager
def _ignored(model: PreTrainedModel, plan: LayerPlan, skipped: Sequence[int]) -> Iterator[None]:
    """Run all layers, and have what some of them return be what they were given."""

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        hidden = args[plan.given] if isinstance(plan.given, int) else kwargs[plan.given]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    mine = in_this_thread(hook)
    handles = [layer.register_forward_hook(mine, with_kwargs=True) for layer in plan.layers(model, skipped)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
