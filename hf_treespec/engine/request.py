"""What a call of `generate` has come to when its decoding begins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_treespec import _compat
from hf_treespec.config import TreeConfig
from hf_treespec.draft import DraftHead, Features, LayerPlan
from hf_treespec.routes import PathTraits, Route
from hf_treespec.rules import COUPLED, Rule, rule_named
from hf_treespec.tree import TreeLimits

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        LogitsProcessorList,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        StoppingCriteriaList,
    )
    from transformers.generation.streamers import BaseStreamer

__all__ = ["Request"]


@dataclass(slots=True, kw_only=True)
class Request:
    """What `generate` prepared for its decoding loop.

    Args:
        target: the model of the call.
        input_ids: int64 `[B, P]`, already expanded for `num_return_sequences`.
        logits_processor: prepared list.
        stopping_criteria: prepared list.
        generation_config: prepared config of this call.
        model_kwargs: the other arguments of the model.
        tree_config: how to speculate.
        assistant_model: draft model, if one was passed.
        head: draft that reads the target's hidden states, if one was passed.
        assistant_route: how trees enter the draft model.
        assistant_position_modules: as `position_modules`, of the draft model.
        streamer: already holds the prompt.
        tokenizers: those of target and draft, if they differ.
        synced_gpus: whether all ranks of the default process group must run the same forwards.
        route: how trees enter the model.
        position_modules: names of those that make embeddings of positions, for `Route.POSITION_HOOK`.
        traits: what else is known of a model that reads trees path by path.
        layers: how the target's layers are called, if it drafts itself without some of them.
        skipped: numbers of the layers that it drafts without.
    """

    target: PreTrainedModel
    input_ids: Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    model_kwargs: dict[str, Any]
    tree_config: TreeConfig
    assistant_model: PreTrainedModel | None = None
    head: DraftHead | None = None
    streamer: BaseStreamer | None = None
    tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None = None
    synced_gpus: bool = False
    route: Route = Route.MASK
    position_modules: tuple[str, ...] = ()
    assistant_route: Route = Route.MASK
    assistant_position_modules: tuple[str, ...] = ()
    traits: PathTraits = PathTraits()
    layers: LayerPlan | None = None
    skipped: tuple[int, ...] = ()

    @property
    def rule(self) -> Rule | None:
        """The rule of independent draws that the call asks for; None for the coupled one and for greedy decoding."""
        name = self.tree_config.verification
        return None if name == COUPLED or not self.generation_config.do_sample else rule_named(name)

    @property
    def features(self) -> Features | None:
        """The hidden states of the target that the draft reads; None if it reads none, or there are no trees."""
        if self.head is None or not self.tree_config.max_nodes:
            return None
        return self.head.features(len(_compat.decoder_layers(self.target)))

    @property
    def limits(self) -> TreeLimits:
        """The configured size of trees, as the rule allows it."""
        limits, rule = self.tree_config.limits, self.rule
        return replace(limits, max_children=1) if rule is not None and rule.chain else limits
