"""The hooks on `generate`: where `tree_config` is taken off the call, checked, and acted on.

`generate` itself is not overridden. Each hook gets the original bound method and hands everything without a
`tree_config` to it untouched; `tree_config=None` counts as without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hf_treespec import _compat
from hf_treespec.api.support import is_supported, require_support, unwrap
from hf_treespec.attention import check_attention
from hf_treespec.config import TreeConfig
from hf_treespec.engine import Request, check_path_settings, check_settings, generate_with_tree
from hf_treespec.errors import TreeConfigError, UnsupportedCallError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

__all__ = ["HOOKS"]

_MODES = (
    _compat.GenerationMode.GREEDY_SEARCH,
    _compat.GenerationMode.SAMPLE,
    _compat.GenerationMode.ASSISTED_GENERATION,
)
# Other speculation of transformers that the call cannot mean at the same time.
_RIVALS = (
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
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
                f"tree_config={config!r}: expected a TreeConfig; for a dict use TreeConfig.from_dict(...)"
            )
        if custom_generate is not None:
            raise UnsupportedCallError("custom_generate with tree_config: pass one of the two")
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
    if config is None:
        return original(generation_mode, generation_config, mode_kwargs)
    if generation_mode not in _MODES:
        raise UnsupportedCallError(
            f"tree_config with generation mode {generation_mode.value!r} (num_beams={generation_config.num_beams}): "
            "trees serve greedy decoding and sampling; use num_beams=1, or leave tree_config out"
        )
    for name in _RIVALS:
        value = getattr(generation_config, name, None)
        if value:
            raise UnsupportedCallError(f"{name}={value!r} with tree_config: pass one of the two")
    # Nothing of an earlier call may pass for the statistics of this one, should it be refused.
    model.__dict__.pop("treespec_stats", None)
    check_settings(generation_config, synced_gpus=bool(mode_kwargs.get("synced_gpus")))
    assistant = unwrap(mode_kwargs.get("assistant_model"))
    require_support(model, "the model")
    if is_supported(model).route == "paths":
        check_path_settings(generation_config)
    for part in filter(None, (model, assistant)):
        if is_supported(part).route == "mask":
            check_attention(part, config.attention)
    _check_draft(model, config, assistant, mode_kwargs)
    plain = _compat.GenerationMode.SAMPLE if generation_config.do_sample else _compat.GenerationMode.GREEDY_SEARCH
    rest = {k: v for k, v in mode_kwargs.items() if k not in ("tree_config", "assistant_model", "assistant_tokenizer")}
    return original(plain, generation_config, rest)


def _check_draft(
    model: PreTrainedModel, config: TreeConfig, assistant: PreTrainedModel | None, mode_kwargs: dict[str, Any]
) -> None:
    if config.draft == "model" and assistant is None:
        raise UnsupportedCallError("TreeConfig(draft='model') without assistant_model: pass the draft model")
    if config.draft == "ngram" and assistant is not None:
        raise UnsupportedCallError(
            "TreeConfig(draft='ngram') with an assistant_model: leave one out, or use draft='auto' or 'model'"
        )
    if assistant is None:
        return
    require_support(assistant, "assistant_model")
    if is_supported(assistant).route != "mask":
        raise UnsupportedCallError(
            f"assistant_model is a {type(assistant).__name__}, which takes no tree mask and cannot draft trees; pass "
            "a draft model that does, or leave assistant_model out to draft from the text by n-grams"
        )
    ours, theirs = mode_kwargs.get("tokenizer"), mode_kwargs.get("assistant_tokenizer")
    if ours is not None and theirs is not None and ours.get_vocab() != theirs.get_vocab():
        raise UnsupportedCallError(
            "assistant_tokenizer has another vocabulary than tokenizer: the draft must share the target's token ids"
        )
    sizes = _compat.vocabulary_size(model), _compat.vocabulary_size(assistant)
    if sizes[0] != sizes[1] and (ours is None or theirs is None):
        _compat.warn_once(
            f"target and assistant_model have vocabularies of {sizes[0]} and {sizes[1]} ids; they are taken to agree "
            "on the common ones. The text is right either way, but a draft of another tokenizer is of no use. Pass "
            "tokenizer and assistant_tokenizer to have it checked"
        )


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
    for name in ("tokenizer", "assistant_tokenizer", "inputs_tensor", "synced_gpus"):
        kwargs.pop(name, None)
    request = Request(
        input_ids=input_ids,
        logits_processor=kwargs.pop("logits_processor"),
        stopping_criteria=kwargs.pop("stopping_criteria"),
        generation_config=kwargs.pop("generation_config"),
        tree_config=tree_config,
        assistant_model=unwrap(kwargs.pop("assistant_model", None)),
        streamer=kwargs.pop("streamer", None),
        model_kwargs=kwargs,
        route=is_supported(model).route,
    )
    return generate_with_tree(model, request, lambda stats: setattr(model, "treespec_stats", stats))


HOOKS: dict[str, Callable[..., Any]] = {
    "_extract_generation_mode_kwargs": _extract_mode_kwargs,
    "_validate_generation_mode": _validate_mode,
    "_assisted_decoding": _decode,
    "_sample": _decode,
}
