"""The hooks on `generate`: where `tree_config` is taken off the call, checked, and acted on.

`generate` itself is not overridden. Each hook gets the original bound method and hands everything without a
`tree_config` to it untouched; `tree_config=None` counts as without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hf_treespec import _compat
from hf_treespec.api.assistants import (
    check_draft,
    check_prompt_learning,
    differing_tokenizers,
    warn_of_unused_options,
    with_assistant_settings,
)
from hf_treespec.api.draft_support import draft_support
from hf_treespec.api.heads import check_head, drafts_blocks, find_head, is_head
from hf_treespec.api.kernel_probe import check_kernel
from hf_treespec.api.kv_probe import kv_cache_fault
from hf_treespec.api.layer_drafts import check_layer_draft, draft_layers, with_early_exit
from hf_treespec.api.modes import refuse_modes, refuse_paged
from hf_treespec.api.mtp import with_mtp
from hf_treespec.api.outliers import has_shared_outliers
from hf_treespec.api.support import is_supported, path_traits, require_support, routed, unwrap
from hf_treespec.attention import KERNEL, check_attention
from hf_treespec.config import TreeConfig
from hf_treespec.engine import (
    Request,
    check_cache_of,
    check_kv_cache,
    check_no_cache_beside,
    check_path_settings,
    check_settings,
    generate_with_tree,
)
from hf_treespec.errors import TreeConfigError, UnsupportedCallError
from hf_treespec.routes import Route
from hf_treespec.rules import COUPLED, rule_named

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

__all__ = ["HOOKS"]

_MODES = (
    _compat.GenerationMode.GREEDY_SEARCH,
    _compat.GenerationMode.SAMPLE,
    _compat.GenerationMode.ASSISTED_GENERATION,
)
_CUSTOM = "custom_generate with tree_config: both are a way to decode; pass one of the two"
# Other speculation of transformers that the call cannot mean at the same time.
_RIVALS = (
    "prompt_lookup_num_tokens",
    "speculation_type",
    "assistant_ensemble_weight",
)


def _extract_mode_kwargs(
    original: Callable[..., dict[str, Any]],
    model: PreTrainedModel,
    custom_generate: Any,
    kwargs: dict[str, Any],
    *args: Any,
    **named: Any,
) -> dict[str, Any]:
    config = kwargs.pop("tree_config", None)
    if config is not None:
        if not isinstance(config, TreeConfig):
            raise TreeConfigError(
                f"tree_config={config!r}: expected a TreeConfig, such as TreeConfig(draft='ngram'); for a dict use "
                "TreeConfig.from_dict(...)"
            )
        if custom_generate is not None:
            raise UnsupportedCallError(_CUSTOM)
        # Before transformers asks for `trust_remote_code` to load a mode that takes no tree.
        own = model.generation_config
        refuse_modes(lambda name: kwargs.get(name, own.do_sample if name == "do_sample" else None))
        # Nothing of an earlier call may pass for the statistics of this one, should it be refused.
        model.__dict__.pop("treespec_stats", None)
        cache = _compat.passed_cache(kwargs)
        check_no_cache_beside(config.kv_cache, cache)
        if cache is not None:
            # Here, because an encoder runs before the decoding hook.
            check_cache_of(model, cache, require_support(model, "the model").route)
    mode_kwargs = original(custom_generate, kwargs, *args, **named)
    if config is not None:
        mode_kwargs["tree_config"] = config
    return mode_kwargs


def _validate_mode(
    original: Callable[..., None],
    model: PreTrainedModel,
    generation_mode: Any,
    generation_config: GenerationConfig,
    mode_kwargs: dict[str, Any],
) -> None:
    config: TreeConfig | None = mode_kwargs.get("tree_config")
    configs = (generation_config, model.generation_config)
    if config is None and any(getattr(one, "tree_config", None) is not None for one in configs):
        raise UnsupportedCallError(
            "tree_config in a GenerationConfig: it is an argument of the call; pass generate(..., tree_config=...)"
        )
    if config is None:
        return original(generation_mode, generation_config, mode_kwargs)
    refuse_modes(
        lambda name: getattr(generation_config, name, None),
        None if generation_mode in _MODES else str(generation_mode.value),
    )
    passed = mode_kwargs.get("assistant_model")
    for name in _RIVALS:
        value = getattr(generation_config, name, None)
        # That names the kind of the assistant, which says so itself.
        if value and not (name == "speculation_type" and value == "dflash" and drafts_blocks(passed)):
            raise UnsupportedCallError(
                f"{name}={value!r} with tree_config: both say how to speculate; leave {name} out (trees from an "
                "assistant_model or n-grams of the text take its place), or leave tree_config out"
            )
    check_settings(
        generation_config,
        synced_gpus=bool(mode_kwargs.get("synced_gpus")),
        encoder_decoder=_compat.is_encoder_decoder(model),
        attention=config.attention,
        own_attention=_compat.attention_implementation(model),
    )
    assistant = None if is_head(passed) else unwrap(passed)
    if assistant is not None and not isinstance(assistant, _compat.PreTrainedModel):
        require_support(assistant, "assistant_model")
    config = with_mtp(with_early_exit(config, generation_config), generation_config)
    mode_kwargs["tree_config"] = with_assistant_settings(config, generation_config, unwrap(passed))
    check_prompt_learning(model)
    route = require_support(model, "the model").route
    check_kv_cache(model, config.kv_cache, route, generation_config.cache_implementation)
    if config.kv_cache != "auto" and (fault := kv_cache_fault(model, config.kv_cache)):
        raise UnsupportedCallError(f"TreeConfig(kv_cache={config.kv_cache!r}) for {type(model).__name__}: {fault}")
    if config.attention == KERNEL:
        check_kernel(model, route)
    if route.by_paths:
        check_path_settings(generation_config)
    else:
        check_attention(model, config.attention)
    if assistant is not None and not draft_support(assistant).route.by_paths:
        check_attention(assistant, config.attention)
    check_layer_draft(model, config, passed, mode_kwargs)
    head = find_head(model, config, passed)
    if head is not None:
        check_head(model, config, head, mode_kwargs)
    else:
        check_draft(model, config, assistant, mode_kwargs)
    warn_of_unused_options(config, assistant=assistant is not None, head=None if head is None else head.kind)
    if generation_config.do_sample and config.verification != COUPLED and "recycle" in config.sources:
        raise UnsupportedCallError(
            f"TreeConfig(draft={config.draft!r}, verification={config.verification!r}): the table of 'recycle' is "
            "learnt from texts that may have been drawn with the coins of this call, and is shared by the rows; an "
            "independent rule would not keep the target's law. Leave 'recycle' out, or use verification='coupled'"
        )
    if generation_config.do_sample and config.verification != COUPLED and config.joins:
        raise UnsupportedCallError(
            f"TreeConfig(draft={config.draft!r}, verification={config.verification!r}): nodes of a joint tree are not "
            "drawn from one law, which an independent rule asks for. Use one source, or verification='coupled'"
        )
    if generation_config.do_sample and config.verification != COUPLED and not rule_named(config.verification).lossless:
        _compat.warn_once(
            f"TreeConfig(verification={config.verification!r}) accepts tokens that the target finds typical: the text "
            "does not follow the target's law. Every other rule does"
        )
    if has_shared_outliers(model):
        _compat.warn_once(
            f"{type(model).__name__} has 8-bit layers with llm_int8_threshold > 0: tokens of one forward change each "
            "other's logits, so that the text may differ from plain decoding's where two tokens are close. Load it "
            "with BitsAndBytesConfig(llm_int8_threshold=0.0), or in 4 bits, for the same text"
        )
    plain = _compat.GenerationMode.SAMPLE if generation_config.do_sample else _compat.GenerationMode.GREEDY_SEARCH
    rest = {k: v for k, v in mode_kwargs.items() if k not in ("tree_config", "assistant_model", "assistant_tokenizer")}
    return original(plain, generation_config, rest)


def _decode(
    original: Callable[..., Any],
    model: PreTrainedModel,
    input_ids: Any,
    *args: Any,
    tree_config: TreeConfig | None = None,
    **kwargs: Any,
) -> Any:
    if tree_config is None:
        return original(input_ids, *args, **kwargs)
    tokenizers = differing_tokenizers(kwargs.pop("tokenizer", None), kwargs.pop("assistant_tokenizer", None))
    kwargs.pop("inputs_tensor", None)
    passed = kwargs.pop("assistant_model", None)
    head = find_head(model, tree_config, passed)
    assistant = unwrap(passed) if head is None else None
    route, names = routed(model, is_supported(model))
    layers, skipped = draft_layers(model, tree_config)
    draft_route, draft_names = (Route.MASK, ()) if assistant is None else routed(assistant, draft_support(assistant))
    request = Request(
        target=model,
        input_ids=input_ids,
        logits_processor=kwargs.pop("logits_processor"),
        stopping_criteria=kwargs.pop("stopping_criteria"),
        generation_config=kwargs.pop("generation_config"),
        tree_config=tree_config,
        assistant_model=assistant,
        head=head,
        streamer=kwargs.pop("streamer", None),
        tokenizers=tokenizers,
        synced_gpus=bool(kwargs.pop("synced_gpus", False)),
        model_kwargs=kwargs,
        route=route,
        position_modules=names,
        assistant_route=draft_route,
        assistant_position_modules=draft_names,
        traits=path_traits(model),
        layers=layers,
        skipped=skipped,
    )
    return generate_with_tree(model, request, lambda stats: setattr(model, "treespec_stats", stats))


def _load_custom_generate(original: Callable[..., Any], model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("tree_config") is not None:
        raise UnsupportedCallError(_CUSTOM)
    return original(*args, **kwargs)


def _generate_batch(original: Callable[..., Any], model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    refuse_paged(kwargs)
    kwargs.pop("tree_config", None)
    return original(*args, **kwargs)


HOOKS: dict[str, Callable[..., Any]] = {
    "_extract_generation_mode_kwargs": _extract_mode_kwargs,
    "_validate_generation_mode": _validate_mode,
    "_assisted_decoding": _decode,
    "_sample": _decode,
    # Where `generate(cache_implementation="paged")` goes before any other hook.
    "generate_batch": _generate_batch,
    # Where `generate(custom_generate="a folder or a repository")` goes.
    "load_custom_generate": _load_custom_generate,
}
