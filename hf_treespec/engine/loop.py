"""One call of `generate` with a tree: checks, prefill, rounds, output."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor

from hf_treespec import _compat
from hf_treespec.attention import attention_for_drafts, attention_for_trees, counted_by_depth, tree_masks, within_reach
from hf_treespec.cache import (
    check_readable,
    check_windows,
    is_order_bound,
    needs_equal_rows,
    restored_on_error,
    restored_state_on_error,
)
from hf_treespec.control import SizePolicy
from hf_treespec.draft import AssistantHead, BorrowingDraft, FeatureDraft, LearningDraft, WeighingDraft, skippable
from hf_treespec.engine.checks import (
    check_cache_of,
    check_independent,
    check_inputs,
    check_processors,
    check_senses,
)
from hf_treespec.engine.choice import Choice, make_draft
from hf_treespec.engine.costs import draft_name, known_costs, setting_of, way_of
from hf_treespec.engine.features import FeatureTaps, tapped
from hf_treespec.engine.forward import TargetForward
from hf_treespec.engine.guidance import Guidance
from hf_treespec.engine.kv_cache import put_kv_cache
from hf_treespec.engine.ordered import only_plain, settled
from hf_treespec.engine.outputs import KeptStates
from hf_treespec.engine.prompt import Prompt
from hf_treespec.engine.request import Request
from hf_treespec.engine.round import RoundRunner
from hf_treespec.engine.shares import ConfidenceNotice
from hf_treespec.engine.state import GrowingText, StopRules
from hf_treespec.engine.synced import in_lockstep, refused_together
from hf_treespec.engine.target import cache_of, make_target, positions_of
from hf_treespec.engine.trial import current_trial
from hf_treespec.errors import UnsupportedCallError
from hf_treespec.routes import Route
from hf_treespec.stats import TreeStats
from hf_treespec.tree import TokenTree
from hf_treespec.verify import (
    NodeScorer,
    are_length_free,
    are_pure,
)

if TYPE_CHECKING:
    from transformers import (
        PreTrainedModel,
    )
    from transformers.generation.utils import GenerateOutput

__all__ = ["generate_with_tree"]


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
    put_kv_cache(model, request.tree_config.kv_cache, request.model_kwargs)
    start = time.perf_counter()
    with refused_together(request.input_ids.device) if request.synced_gpus else nullcontext():
        prompt = _checked(model, request)
    refused = False
    try:
        with _prepared(model, request), tapped(model, request.features) as taps:
            return _decode(model, request, prompt, stats, start, taps)
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
    check_senses(model, request.model_kwargs)
    # The caller's, which was checked before, or the one that `generate` has made.
    passed = _compat.passed_cache(request.model_kwargs)
    check_cache_of(model, passed, request.route)
    if isinstance(request.head, AssistantHead):
        check_readable(passed, request.head.layers.values(), request.head.kind)
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
    if request.route is not Route.MASK:
        _check_pure(processors, request)
    else:
        # Guidance becomes a second stream; if it turns out that it cannot, that is judged when it is known.
        _check_pure([p for p in processors if type(p) is not _compat.GuidanceProcessor], request)
        Guidance.check(model, processors, request.input_ids, prompt.last_positions)
    return prompt


def _check_pure(processors: Sequence[object], request: Request) -> None:
    check_processors(processors, request.tree_config.on_stateful_processor)
    if request.rule is not None:
        check_independent(processors, request.tree_config.verification)


@contextmanager
def _prepared(model: PreTrainedModel, request: Request) -> Iterator[None]:
    """Everything that is changed for the length of a call, and given back on every exit."""
    with ExitStack() as stack:
        if request.route.masked or request.tree_config.attention != "auto":
            stack.enter_context(attention_for_trees(model, request.tree_config.attention))
        if request.assistant_model is not None and request.assistant_model is not model:
            stack.enter_context(attention_for_drafts(request.assistant_model, request.tree_config.attention))
        if request.head is not None and request.head.drafter is not None:
            stack.enter_context(attention_for_drafts(request.head.drafter, request.tree_config.attention))
        stack.enter_context(tree_masks())
        if request.layers is not None:
            stack.enter_context(skippable(model, request.layers, request.skipped))
        stack.enter_context(counted_by_depth(model, request.route, request.position_modules))
        if request.assistant_model is not None:
            names = request.assistant_position_modules
            stack.enter_context(counted_by_depth(request.assistant_model, request.assistant_route, names))
        if request.synced_gpus:
            models = dict.fromkeys(m for m in (model, request.assistant_model) if m is not None)
            stack.enter_context(in_lockstep(list(models), request.input_ids.device))
        yield


def _decode(
    model: PreTrainedModel,
    request: Request,
    prompt: Prompt,
    stats: TreeStats,
    start: float,
    taps: FeatureTaps | None,
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
    _check_pure(processors, request)
    # Rows may run apart only if nothing outside their own text can tell (or ask for whole steps).
    # A gap would shift the positions of a model that counts them by its cache.
    in_step = batch == 1 or not (
        request.route.told_positions
        and not request.traits.in_step
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
    barred = only_plain(model, request.route, request.traits, prompt)
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
    whole = request.route.by_paths and passed is not None and is_order_bound(passed)
    with restored_state_on_error(passed) if whole else restored_on_error(passed):
        with nullcontext() if taps is None else taps.watched():
            outputs = _compat.prefill(model, request.input_ids, generation, request.model_kwargs)
        cache, carried = cache_of(model, request.route, request.model_kwargs, outputs)
    device = request.input_ids.device
    last_logits = outputs.logits[:, -1].to(device, copy=True)
    states = KeptStates(wanted_states, outputs, cache.layers) if wanted_states else None
    model_kwargs = _compat.continued_kwargs(model, outputs, request.model_kwargs)
    del outputs
    vocab = int(last_logits.shape[-1])
    choice = Choice.of(request, NodeScorer(processors, batch), vocab, prompt.known_tokens)
    choice.show(text.draft_rows)
    trial = current_trial()
    given = None if trial is None else trial.source
    draft = make_draft(request, vocab, choice.sampler) if given is None else given
    if request.rule is not None:
        stats.verification, stats.lossless = request.rule.name, request.rule.lossless
    stats.draft = draft.name
    # Where no tree is grown nothing needs to be learnt.
    grows = config.max_nodes > 0 and not barred
    taps = taps if grows else None
    if taps is not None and isinstance(draft, FeatureDraft):
        draft.read(taps.of_prompt(prompt))
    observe = draft.observe if grows and isinstance(draft, LearningDraft) and draft.learns else None
    if observe is not None and all(prompt.known_tokens):
        # Of the prefill plain decoding makes the logits of the last position only.
        roots = [TokenTree.root_only(known[-1]) for known in prompt.known_tokens]
        observe(roots, last_logits[:, None], [[0]] * batch)
    tokens, scores = choice.decider.choose(text, dict(enumerate(last_logits)))
    text.emit(tokens, scores, dict(enumerate(last_logits)))
    stats.new_tokens += batch
    stats.prefill_seconds = time.perf_counter() - start

    rows, forward = make_target(model, request.route, request.traits, model_kwargs, cache, carried, prompt, states)
    if isinstance(draft, BorrowingDraft) and isinstance(forward, TargetForward):
        draft.borrow(forward, text.draft_rows)
    longest = None if rules.max_length is None else prompt.slots(rules.max_length)
    rows.roots_only = request.route.masked and not within_reach(model.config, longest, alone=guidance is None)
    last_positions, position_limit = positions_of(model, request.route, prompt)
    if guidance is not None:
        last_positions = [max(pair) for pair in zip(last_positions, guidance.last_positions, strict=True)]
    named, way = draft_name(draft.name, request), way_of(request.route, cache, guided=guidance is not None)
    chooses = config.fallback == "auto" and request.limits.max_nodes > 0 and not barred
    # The window of lookahead is read for what the target says of it.
    confident = "lookahead" not in config.sources
    policy = SizePolicy(
        request.limits,
        fallback=config.fallback,
        cheap=draft.cheap,
        in_step=in_step,
        batch=batch,
        barred=barred,
        measure=forward.measure,
        costs=known_costs(request, named, way, chooses=chooses or trial is not None),
        draft=named,
        context=max(prompt.real_tokens),
        learns=trial is not None,
        confident=confident,
        depth_control=config.depth_control,
        depth_options=config.depth_settings,
    )
    if trial is not None:
        trial.policies.append(policy)
        trial.setting = setting_of(model, way, model.device)
    if isinstance(draft, WeighingDraft):
        draft.promise = policy.promise
    runner = RoundRunner(
        text=text,
        forward=forward,
        last_positions=last_positions,
        cache=rows,
        draft=draft,
        observe=observe,
        policy=policy,
        decider=choice.decider,
        noise=choice.noise,
        stats=stats,
        in_step=in_step,
        position_limit=position_limit,
        by_slots=request.route.masked and not request.route.told_positions,
        readable=_compat.embedding_rows(model),
        states=states,
        batched_choice=device.type != "cpu" and not keep_scores and are_length_free(processors),
        guidance=guidance,
        independent=choice.independent,
        taps=taps,
        shares=choice.shares(request) if policy.wants_shares and confident else None,
        notice=ConfidenceNotice(config.depth_control, confident),
    )
    wanted = wants_dict or _compat.is_user_defined(cache)
    try:
        with _compat.decode_context(model), settled(forward, wanted=wanted):
            while not all(text.finished):
                runner.run()
            if wanted:
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
