"""Refusals by the call's arguments. All are raised before any forward and before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_treespec import _compat
from hf_treespec.cache import TreeCache, check_cache, needs_equal_rows
from hf_treespec.errors import UnsupportedCallError
from hf_treespec.routes import Route
from hf_treespec.verify import are_pure

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

__all__ = [
    "check_cache_of",
    "check_independent",
    "check_inputs",
    "check_path_settings",
    "check_processors",
    "check_senses",
    "check_settings",
]

_OTHER_SENSES = ("pixel_values", "mm_encoder_outputs", "cross_attention_states", "cross_attention_mask")
# The last ones are old names of "static".
_CACHE_KINDS = (None, "dynamic", "quantized", "static", "sliding_window", "hybrid", "hybrid_chunked")


def check_settings(
    generation_config: GenerationConfig,
    *,
    synced_gpus: bool,
    encoder_decoder: bool = False,
    attention: str = "auto",
    own_attention: str = "",
) -> None:
    """Refuse settings that cannot be right with a tree, before `generate` prepares anything.

    Args:
        generation_config: of the call.
        synced_gpus: as passed.
        encoder_decoder: whether the target has an encoder, which has run by the time that decoding begins.
        attention: of the tree config.
        own_attention: that of the target.

    Raises:
        UnsupportedCallError: naming the argument and what to do.
    """
    if generation_config.use_cache is False:
        raise UnsupportedCallError("use_cache=False with tree_config: a tree needs the cache; leave use_cache at True")
    if synced_gpus and encoder_decoder:
        raise UnsupportedCallError(
            "synced_gpus=True with tree_config: ranks that wait run forwards of one token, which an encoder-decoder "
            "model does not take; generate without tree_config"
        )
    if synced_gpus and not _compat.has_process_group():
        raise UnsupportedCallError(
            "synced_gpus=True with tree_config: ranks agree through the default process group, and there is none; "
            "call torch.distributed.init_process_group first, or leave synced_gpus out"
        )
    _check_cache_implementation(generation_config)
    if (
        generation_config.return_dict_in_generate
        and generation_config.output_attentions
        and own_attention == "eager"
        and attention not in ("auto", "eager")
    ):
        raise UnsupportedCallError(
            f"output_attentions=True with TreeConfig(attention={attention!r}): only eager attention gives its "
            "weights; leave attention at 'auto', or leave out output_attentions"
        )


def _check_cache_implementation(generation_config: GenerationConfig) -> None:
    kind = generation_config.cache_implementation
    if kind in _CACHE_KINDS:
        return
    if kind is not None and "offloaded" in kind:
        raise UnsupportedCallError(
            f"cache_implementation={kind!r} with tree_config: its layers move between devices during the forward and "
            "cannot take a tree; leave cache_implementation out, or use 'static'"
        )
    raise UnsupportedCallError(
        f"cache_implementation={kind!r} with tree_config: expected 'dynamic', 'static' or 'quantized'; leave "
        "cache_implementation out"
    )


def check_inputs(input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Refuse inputs that cannot be right with a tree, before the prefill.

    Raises:
        UnsupportedCallError: naming the argument and what to do.
    """
    if input_ids.shape[1] == 0 and model_kwargs.get("inputs_embeds") is None:
        raise UnsupportedCallError("input_ids are empty: pass at least one token, for example the bos token")


def _impure(processors: Sequence[object]) -> str:
    """Names of the classes that are not known to be functions of their arguments; empty if there are none."""
    return ", ".join(sorted({type(p).__name__ for p in processors if not are_pure([p])}))


def check_processors(processors: Sequence[object], on_stateful: str) -> None:
    """Refuse processors that may keep a state, if the `TreeConfig` says so.

    Args:
        processors: the list that `generate` prepared.
        on_stateful: "in_step" or "error".

    Raises:
        UnsupportedCallError: naming their classes.
    """
    if on_stateful == "in_step":
        return
    if odd := _impure(processors):
        raise UnsupportedCallError(
            f"TreeConfig(on_stateful_processor='error') with logits processors of class {odd}, which are "
            "not known to be functions of their arguments; with on_stateful_processor='in_step' they are called once "
            "a token, in order, as plain decoding calls them"
        )


def check_independent(processors: Sequence[object], verification: str) -> None:
    """Refuse processors that must be called once a token, for rules that need the law at all nodes of a tree.

    Args:
        processors: the list that `generate` prepared.
        verification: name of the rule.

    Raises:
        UnsupportedCallError: naming their classes.
    """
    if odd := _impure(processors):
        raise UnsupportedCallError(
            f"TreeConfig(verification={verification!r}) with logits processors of class {odd}, which are "
            "not known to be functions of their arguments: this rule needs the law at nodes that the text may never "
            "visit. Leave verification at 'coupled', which calls them once a token"
        )


def check_path_settings(generation_config: GenerationConfig) -> None:
    """Refuse settings that only the mask route can serve, for a model that reads trees path by path.

    Raises:
        UnsupportedCallError: naming the argument and what to do.
    """
    kind = generation_config.cache_implementation
    if kind not in (None, "dynamic"):
        raise UnsupportedCallError(
            f"cache_implementation={kind!r} with tree_config: this model reads a tree path by path, which repeats the "
            "rows of a dynamic cache; leave cache_implementation out"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(generation_config, name) and generation_config.return_dict_in_generate:
            raise UnsupportedCallError(
                f"{name}=True with tree_config: this model reads a tree path by path, in other rows than plain "
                f"decoding; leave {name} out, or generate without tree_config"
            )


def check_senses(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> None:
    """Refuse pictures and the like for a model whose cache would keep them in layers of their own length.

    Raises:
        UnsupportedCallError: naming the arguments.
    """
    cross = _compat.cross_attention_layers(model)
    if not cross:
        return
    given = [name for name in _OTHER_SENSES if model_kwargs.get(name) is not None]
    layers = getattr(_compat.passed_cache(model_kwargs), "layers", [])
    if any(len(layers) > layer and layers[layer].is_initialized for layer in cross):
        given.append("a cache that has read them")
    if given:
        raise UnsupportedCallError(
            f"{', '.join(given)} with tree_config: layers {cross} of {type(model).__name__} keep states of another "
            "sense in the cache, which are no part of the text; pass a text alone, or generate without tree_config"
        )


def check_cache_of(model: PreTrainedModel, cache: Any, route: Route) -> None:
    """Refuse a passed-in cache that cannot hold a tree of this model.

    Args:
        model: the target.
        cache: as passed, or None.
        route: how trees enter the model.

    Raises:
        UnsupportedCallError: naming the class that was expected.
    """
    if cache is None:
        return
    check_cache(cache, as_a_whole=route.by_paths)
    pair = _compat.is_encoder_decoder(model)
    # Of the other kind plain decoding would mix up what the two attentions have read.
    if isinstance(cache, _compat.EncoderDecoderCache) != pair:
        wanted = "EncoderDecoderCache" if pair else "DynamicCache"
        raise UnsupportedCallError(
            f"cache of type {type(cache).__name__} for {type(model).__name__}: expected {wanted}"
        )
    in_place = isinstance(cache, TreeCache) or _compat.has_fixed_size(cache)
    if route.by_paths and (needs_equal_rows(cache) or in_place):
        raise UnsupportedCallError(
            f"cache of type {type(cache).__name__} with layers that are written in place or quantized: "
            f"{type(model).__name__} reads a tree path by path, which repeats rows of the cache; pass dynamic caches"
        )
