"""One call of `generate` with a tree: checks, prefill, rounds, output."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.attention import attention_for_trees, learned_position_limit, tree_masks
from hf_treespec.cache import PathCache, RowCache, check_cache, check_windows, needs_equal_rows, restored_on_error
from hf_treespec.config import TreeConfig
from hf_treespec.control import SizePolicy
from hf_treespec.draft import ChildSampler, Draft, ModelDraft, NgramDraft, RetokenizedDraft
from hf_treespec.engine.checks import check_cache_of, check_independent, check_inputs, check_processors
from hf_treespec.engine.forward import TargetForward
from hf_treespec.engine.guidance import Guidance
from hf_treespec.engine.outputs import KeptStates
from hf_treespec.engine.paths import PathForward, path_length_limit
from hf_treespec.engine.prompt import Prompt
from hf_treespec.engine.round import RoundRunner
from hf_treespec.engine.state import GrowingText, StopRules
from hf_treespec.engine.synced import in_lockstep, refused_together
from hf_treespec.errors import UnsupportedCallError
from hf_treespec.routes import Route
from hf_treespec.rules import COUPLED, Rule, rule_named
from hf_treespec.stats import TreeStats
from hf_treespec.tree import TreeLimits
from hf_treespec.verify import (
    Decider,
    GumbelNoise,
    IndependentDecider,
    NodeScorer,
    RoundNoise,
    are_length_free,
    are_pure,
    text_streams,
)

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        LogitsProcessorList,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        StoppingCriteriaList,
    )
    from transformers.generation.streamers import BaseStreamer
    from transformers.generation.utils import GenerateOutput

__all__ = ["Request", "generate_with_tree"]


@dataclass(slots=True, kw_only=True)
class Request:
    """What `generate` prepared for its decoding loop.

    Args:
        input_ids: int64 `[B, P]`, already expanded for `num_return_sequences`.
        logits_processor: prepared list.
        stopping_criteria: prepared list.
        generation_config: prepared config of this call.
        model_kwargs: the other arguments of the model.
        tree_config: how to speculate.
        assistant_model: draft model, if one was passed.
        streamer: already holds the prompt.
        tokenizers: those of target and draft, if they differ.
        synced_gpus: whether all ranks of the default process group must run the same forwards.
        route: how trees enter the model.
    """

    input_ids: Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    model_kwargs: dict[str, Any]
    tree_config: TreeConfig
    assistant_model: PreTrainedModel | None = None
    streamer: BaseStreamer | None = None
    tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None = None
    synced_gpus: bool = False
    route: Route = Route.MASK


def generate_with_tree(
    model: PreTrainedModel, request: Request, report: Callable[[TreeStats], None]
) -> GenerateOutput | Tensor:
    """Decode with trees.

    Args:
        model: the target.
        request: the prepared call.
        report: receives the statistics, also when the call ends by an exception, unless it is refused.

    Returns:
        What plain decoding would return for the same call.

    Raises:
        UnsupportedCallError: before any forward, for calls that cannot be right with a tree.
    """
    stats = TreeStats(batch_size=int(request.input_ids.shape[0]))
    start = time.perf_counter()
    with refused_together(request.input_ids.device) if request.synced_gpus else nullcontext():
        prompt = _checked(model, request)
    refused = False
    try:
        with _prepared(model, request):
            return _decode(model, request, prompt, stats, start)
    except UnsupportedCallError:
        refused = True
        raise
    finally:
        stats.total_seconds = time.perf_counter() - start
        if not refused:
            report(stats)


def _checked(model: PreTrainedModel, request: Request) -> Prompt:
    """The prompt of the call, once nothing speaks against it."""
    check_inputs(request.input_ids, request.model_kwargs)
    # The caller's, which was checked before, or the one that `generate` has made.
    passed = _compat.passed_cache(request.model_kwargs)
    check_cache_of(model, passed, request.route)
    limit = StopRules.of(request.stopping_criteria).max_length
    prompt = Prompt.of(
        request.input_ids,
        request.model_kwargs,
        request.generation_config,
        encoder_decoder=_compat.is_encoder_decoder(model),
    )
    # The last token is never written.
    check_windows(passed, None if limit is None else prompt.slots(limit) - 1)
    processors = request.logits_processor
    # Guidance that turns out to be no second stream is judged when that is known.
    others = [p for p in processors if type(p) is not _compat.GuidanceProcessor]
    check_processors(others, request.tree_config.on_stateful_processor)
    if _rule(request) is not None:
        check_independent(others, request.tree_config.verification)
    if request.route is Route.MASK:
        Guidance.check(model, processors, request.input_ids, prompt.last_positions)
    return prompt


@contextmanager
def _prepared(model: PreTrainedModel, request: Request) -> Iterator[None]:
    """Everything that is changed for the length of a call, and given back on every exit."""
    with ExitStack() as stack:
        if request.route.masked or request.tree_config.attention != "auto":
            stack.enter_context(attention_for_trees(model, request.tree_config.attention))
        if request.assistant_model is not None and request.assistant_model is not model:
            stack.enter_context(attention_for_trees(request.assistant_model, request.tree_config.attention))
        stack.enter_context(tree_masks())
        if request.synced_gpus:
            models = dict.fromkeys(m for m in (model, request.assistant_model) if m is not None)
            stack.enter_context(in_lockstep(list(models), request.input_ids.device))
        yield


def _decode(
    model: PreTrainedModel, request: Request, prompt: Prompt, stats: TreeStats, start: float
) -> GenerateOutput | Tensor:
    config, generation = request.tree_config, request.generation_config
    batch = int(request.input_ids.shape[0])
    wants_dict = bool(generation.return_dict_in_generate)
    keep_scores = wants_dict and bool(generation.output_scores)
    keep_logits = wants_dict and bool(generation.output_logits)
    wanted_states = KeptStates.wanted(generation)
    passed = _compat.passed_cache(request.model_kwargs)
    rules = StopRules.of(request.stopping_criteria)
    stats.prompt_tokens = sum(prompt.real_tokens)
    guidance, processors = None, request.logits_processor
    if request.route is Route.MASK:
        guidance, processors = Guidance.start(model, processors, request.input_ids, prompt.last_positions)
    check_processors(processors, config.on_stateful_processor)
    # Rows may run apart only if nothing outside their own text can tell (or ask for whole steps).
    # A gap would shift the positions of a model that counts them by its cache.
    in_step = batch == 1 or not (
        request.route.told_positions
        and rules.rowwise
        and (rules.has_eos or not rules.others)
        and are_pure(processors)
        and request.streamer is None
        # Rows of unequal length leave gaps in the cache; the caller's own must be whole even after an exception.
        and not _compat.is_user_defined(passed)
        and not needs_equal_rows(passed)
        # The states of a step are one tensor over all rows.
        and not wanted_states
    )
    text = GrowingText(
        request.input_ids,
        real_tokens=prompt.real_tokens,
        prompt_tokens=prompt.known_tokens,
        rules=rules,
        pad=_compat.pad_token_id(generation),
        in_step=in_step,
        streamer=request.streamer,
        keep_scores=keep_scores,
        keep_logits=keep_logits,
    )
    with restored_on_error(passed):
        outputs = _compat.prefill(model, request.input_ids, generation, request.model_kwargs)
        cache = check_cache(_compat.cache_from_outputs(outputs))
    device = request.input_ids.device
    last_logits = outputs.logits[:, -1].to(device, copy=True)
    states = KeptStates(wanted_states, outputs, cache.layers) if wanted_states else None
    del outputs
    vocab = int(last_logits.shape[-1])
    noise = _noise(config, vocab, device, prompt.known_tokens) if generation.do_sample else None
    rule = _rule(request)
    draws = None if rule is None or noise is None else RoundNoise(noise)
    if noise is not None and rule is None:
        for row in text.draft_rows:
            row.noise = _row_noise(noise, row.index)
    scorer = NodeScorer(processors, batch)
    decider = Decider(scorer, noise)
    sampler = None if rule is None or draws is None else ChildSampler(rule, config.random_children, draws)
    draft = _make_draft(request, vocab, sampler)
    if rule is not None:
        stats.verification, stats.lossless = rule.name, rule.lossless
    stats.draft = draft.name
    tokens, scores = decider.choose(text, dict(enumerate(last_logits)))
    text.emit(tokens, scores, dict(enumerate(last_logits)))
    stats.new_tokens += batch
    stats.prefill_seconds = time.perf_counter() - start

    rows, forward = _target(model, request, cache, prompt, states)
    last_positions, position_limit = _positions(model, request, cache, prompt)
    if guidance is not None:
        last_positions = [max(pair) for pair in zip(last_positions, guidance.last_positions, strict=True)]
    runner = RoundRunner(
        text=text,
        forward=forward,
        last_positions=last_positions,
        cache=rows,
        draft=draft,
        policy=SizePolicy(_limits(request), fallback=config.fallback, cheap=draft.cheap, in_step=in_step, batch=batch),
        decider=decider,
        noise=noise,
        stats=stats,
        in_step=in_step,
        position_limit=position_limit,
        readable=_compat.embedding_rows(model),
        states=states,
        batched_choice=device.type != "cpu" and not keep_scores and are_length_free(processors),
        guidance=guidance,
        independent=None if rule is None or draws is None else IndependentDecider(rule, scorer, draws),
    )
    try:
        with _compat.decode_context(model):
            while not all(text.finished):
                runner.run()
            if wants_dict or _compat.is_user_defined(cache):
                runner.fill(max(text.new_lengths))
    finally:
        stats.draft_forward_seconds = getattr(draft, "forward_seconds", 0.0)
    if request.streamer is not None:
        _compat.end_stream(request.streamer)
    sequences = text.sequences()
    if not wants_dict:
        return sequences
    output: GenerateOutput = _compat.decoder_output(
        sequences=sequences,
        scores=text.steps("scores"),
        logits=text.steps("logits"),
        cache=cache,
        **(states.fields() if states else {}),
        encoder_decoder=_compat.is_encoder_decoder(model),
    )
    return output


def _target(
    model: PreTrainedModel, request: Request, cache: _compat.Cache, prompt: Prompt, states: KeptStates | None
) -> tuple[RowCache, TargetForward | PathForward]:
    """The cache of the rounds and their forward, by the route of the call."""
    lengths = [_compat.cache_length(cache)] * int(request.input_ids.shape[0])
    if request.route.by_paths:
        paths = PathCache(cache, lengths)
        return paths, PathForward(model, paths, prompt, request.model_kwargs)
    rows = RowCache(cache, lengths)
    return rows, TargetForward(model, rows, prompt.last_positions, prompt.mask_BP, request.model_kwargs, states)


def _positions(
    model: PreTrainedModel, request: Request, cache: _compat.Cache, prompt: Prompt
) -> tuple[list[int], int | None]:
    """Per row the position of the last prompt token, and the first position that the model cannot read."""
    batch = int(request.input_ids.shape[0])
    if request.route.by_paths:
        # Padding counts: it takes up slots of the cache.
        return [_compat.cache_length(cache) - 1] * batch, path_length_limit(model)
    limit = learned_position_limit(model, _compat.max_positions(model))
    return prompt.last_positions.reshape(-1, batch).amax(0).tolist(), limit


def _noise(config: TreeConfig, vocab: int, device: torch.device, prompts: list[list[int]]) -> GumbelNoise:
    # Drawn once from the global generator, so that `torch.manual_seed` governs the text.
    seed = config.seed if config.seed is not None else int(torch.randint(2**63 - 1, ()))
    return GumbelNoise(seed, vocab, device, text_streams(prompts))


def _row_noise(noise: GumbelNoise, row: int) -> Callable[[int], Tensor]:
    return lambda position: noise.at(row, position)


def _rule(request: Request) -> Rule | None:
    """The rule of independent draws that the call asks for; None for the coupled one and for greedy decoding."""
    name = request.tree_config.verification
    return None if name == COUPLED or not request.generation_config.do_sample else rule_named(name)


def _limits(request: Request) -> TreeLimits:
    limits, rule = request.tree_config.limits, _rule(request)
    return replace(limits, max_children=1) if rule is not None and rule.chain else limits


def _make_draft(request: Request, vocab: int, sampler: ChildSampler | None) -> Draft:
    config = request.tree_config
    assistant = request.assistant_model
    if config.draft == "ngram" or assistant is None:
        return NgramDraft(growth=config.growth)
    if request.tokenizers is not None:
        own = ModelDraft(assistant, growth=config.growth, vocab_size=_compat.vocabulary_size(assistant))
        return RetokenizedDraft(own, *request.tokenizers, vocab_size=vocab)
    processors = None
    if request.generation_config.do_sample:
        # The draft's law is shaped by the processors that need no prefix; the others only cost acceptance.
        shaping = [p for p in request.logits_processor if are_length_free([p])]
        processors = type(request.logits_processor)(shaping)
    return ModelDraft(
        assistant,
        growth=config.growth,
        vocab_size=vocab,
        processors=processors,
        device=request.input_ids.device,
        sampler=sampler,
    )
