"""How tokens are chosen and drafted in a call: its noise, its rule, its draft source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from hf_treespec import _compat
from hf_treespec.draft import (
    ChildSampler,
    Draft,
    DraftHead,
    DraftRow,
    JoinedDraft,
    LayerDraft,
    LookaheadPredictor,
    ModelDraft,
    Predictor,
    Ranker,
    RecyclePredictor,
    RecycleTable,
    RetokenizedDraft,
    TextDraft,
    asked_vocabulary,
    head_draft,
    ngram_predictor,
    open_corpus_index,
    suffix_predictor,
    table_of,
)
from hf_treespec.engine.request import Request
from hf_treespec.engine.shares import TargetShares
from hf_treespec.engine.state import StopRules
from hf_treespec.verify import (
    Decider,
    GumbelNoise,
    IndependentDecider,
    NodeScorer,
    RoundNoise,
    are_length_free,
    text_streams,
)

if TYPE_CHECKING:
    from transformers import LogitsProcessorList, PreTrainedModel

__all__ = ["Choice", "make_draft"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What chooses tokens.

    Args:
        decider: chooses at single nodes: by arg-max, or by the noise that draft and target share.
        noise: that noise; None under greedy decoding.
        independent: decides whole rounds by independent draws; None under the coupled rule.
        sampler: draws children for it.
    """

    decider: Decider
    noise: GumbelNoise | None
    independent: IndependentDecider | None = None
    sampler: ChildSampler | None = None

    @classmethod
    def of(cls, request: Request, scorer: NodeScorer, vocab: int, prompts: Sequence[Sequence[int]]) -> Choice:
        """What the call asks for.

        Args:
            request: the call.
            scorer: its processors.
            vocab: width of the logits.
            prompts: known tokens of each row.
        """
        if not request.generation_config.do_sample:
            return cls(Decider(scorer, None), None)
        seed = request.tree_config.seed
        # Drawn once from the global generator, so that `torch.manual_seed` governs the text.
        seed = int(torch.randint(2**63 - 1, ())) if seed is None else seed
        noise = GumbelNoise(seed, vocab, request.input_ids.device, text_streams(prompts))
        decider, rule = Decider(scorer, noise), request.rule
        if rule is None:
            return cls(decider, noise)
        draws = RoundNoise(noise)
        sampler = ChildSampler(rule, request.tree_config.random_children, draws)
        ends = StopRules.of(request.stopping_criteria).eos
        return cls(decider, noise, IndependentDecider(rule, scorer, draws, ends), sampler)

    def shares(self, request: Request) -> TargetShares:
        """What the target makes of children, as comparable with what the draft makes of them as can be."""
        return TargetShares(_shaping(request), self.noise if self.independent is None else None)

    def show(self, rows: Sequence[DraftRow]) -> None:
        """Let drafts see the noise, unless what they draw must be independent of it."""
        if self.noise is not None and self.independent is None:
            for row in rows:
                row.noise = partial(self.noise.at, row.index)
                row.noise_of = partial(self.noise.of, row.index)


def _predictor(name: str, request: Request, vocab: int) -> Predictor:
    """The source of that name, with the options of the call."""
    options = request.tree_config.options_of(name)
    if name == "ngram":
        return ngram_predictor(**options)
    if name == "suffix":
        path = options["index"]
        # It was compared with the model when the call was checked.
        return suffix_predictor(corpus=None if path is None else open_corpus_index(path))
    if name == "lookahead":
        return LookaheadPredictor(**options, readable=min(vocab, _compat.embedding_rows(request.target)))
    temperature = request.generation_config.temperature if request.generation_config.do_sample else None
    size = vocab, options["candidates"]
    return RecyclePredictor(
        table_of(request.target, *size) if options["keep"] else RecycleTable(*size),
        readable=_compat.embedding_rows(request.target),
        temperature=1.0 if temperature is None else float(temperature),
    )


def _shaping(request: Request) -> LogitsProcessorList | None:
    """The processors that shape the draft's law: those that need no prefix. The others only cost acceptance."""
    if not request.generation_config.do_sample:
        return None
    return type(request.logits_processor)(p for p in request.logits_processor if are_length_free([p]))


def make_draft(request: Request, vocab: int, sampler: ChildSampler | None) -> Draft:
    """The draft source of the call.

    Args:
        request: the call.
        vocab: width of the target's logits.
        sampler: draws children of a draft model at random; None ranks them.
    """
    config, assistant, head = request.tree_config, request.assistant_model, request.head
    alone = assistant is None and head is None and request.layers is None
    names = config.sources or ("ngram",) if alone else config.sources
    predictors = [_predictor(name, request, vocab) for name in names]
    own: Draft
    if head is not None:
        own = _of_head(head, request, vocab, sampler)
    elif request.layers is not None:
        own = LayerDraft(
            request.target,
            request.layers,
            request.skipped,
            name=str(config.layer_draft),
            growth=config.growth,
            vocab_size=vocab,
            processors=_shaping(request),
            device=request.input_ids.device,
            route=request.route,
            sampler=sampler,
        )
    elif assistant is not None:
        own = _of_assistant(assistant, request, vocab, sampler)
    else:
        return TextDraft(predictors, growth=config.growth, vocab_size=vocab)
    return JoinedDraft(own, predictors, growth=config.growth, vocab_size=vocab) if predictors else own


def _of_head(head: DraftHead, request: Request, vocab: int, sampler: ChildSampler | None) -> Draft:
    device = request.input_ids.device
    ranker = Ranker(vocab, processors=_shaping(request), device=device, sampler=sampler, ids_V=head.ids)
    return head_draft(head, request.target, ranker, growth=request.tree_config.growth)


def _of_assistant(
    assistant: PreTrainedModel, request: Request, vocab: int, sampler: ChildSampler | None
) -> ModelDraft | RetokenizedDraft:
    config, ids = request.tree_config, asked_vocabulary(request.tree_config)
    if request.tokenizers is not None:
        vocab_size = _compat.vocabulary_size(assistant)
        own = ModelDraft(
            assistant, growth=config.growth, vocab_size=vocab_size, route=request.assistant_route, ids=ids
        )
        return RetokenizedDraft(own, *request.tokenizers, vocab_size=vocab)
    return ModelDraft(
        assistant,
        growth=config.growth,
        vocab_size=vocab,
        processors=_shaping(request),
        device=request.input_ids.device,
        route=request.assistant_route,
        sampler=sampler,
        ids=ids,
    )
