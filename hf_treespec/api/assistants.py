"""What a call says about its assistant: whether it can draft, in whose tokens, and how far ahead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_treespec import _compat
from hf_treespec.api.draft_support import require_draft_support
from hf_treespec.api.vocabulary import check_vocabulary
from hf_treespec.cache import REPLAYED, layer_kind
from hf_treespec.config import TreeConfig
from hf_treespec.draft import open_corpus_index, tokenizer_fingerprint
from hf_treespec.errors import TreeConfigError, UnsupportedCallError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "check_draft",
    "check_prompt_learning",
    "check_sources",
    "differing_tokenizers",
    "warn_of_unused_options",
    "with_assistant_settings",
]

# Settings of stock assisted decoding that a tree has no use for, the value that asks for nothing, and what rules here.
_GOVERNED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_assistant_tokens_schedule": (
        (None, "constant"),
        "TreeConfig sizes the trees, and its fallback decodes plainly while they do not pay",
    ),
    "assistant_confidence_threshold": (
        (None, 0),
        "TreeConfig sizes the trees, and its growth keeps the nodes that are most likely to be accepted",
    ),
}


def check_draft(
    model: PreTrainedModel, config: TreeConfig, assistant: PreTrainedModel | None, mode_kwargs: Mapping[str, Any]
) -> None:
    """Refuse a draft that contradicts the config or cannot take a tree.

    Raises:
        UnsupportedCallError: if `TreeConfig(draft=...)` and the call do not fit together, or the corpus that it names
            cannot be read or is of another vocabulary.
        UnsupportedModelError: if the assistant cannot take a tree, or cannot draft with the vocabulary that it is to
            be reduced to.
    """
    check_sources(model, config, mode_kwargs, assistant=assistant is not None)
    if assistant is None:
        return
    if not require_draft_support(assistant).route.masked:
        raise UnsupportedCallError(
            f"assistant_model is a {type(assistant).__name__}, which takes no tree mask and cannot draft trees; pass "
            "a draft model that does, or leave assistant_model out to draft from the text by n-grams"
        )
    layers = _compat.make_cache(assistant.config).layers
    if odd := sorted({type(layer).__name__ for layer in layers if layer_kind(layer) == REPLAYED}):
        raise UnsupportedCallError(
            f"assistant_model is a {type(assistant).__name__} with cache layers of class {', '.join(odd)}, whose rows "
            "cannot grow apart; pass a draft model with dynamic layers, or leave assistant_model out to draft from "
            "the text by n-grams"
        )
    kind = _prompt_learning(mode_kwargs.get("assistant_model"))
    if kind is not None:
        _compat.warn_once(
            f"assistant_model is a PEFT model of type {kind}: it drafts without its virtual tokens. The text is right "
            "all the same"
        )
    sizes = _compat.vocabulary_size(model), _compat.vocabulary_size(assistant)
    both = mode_kwargs.get("tokenizer") is not None and mode_kwargs.get("assistant_tokenizer") is not None
    if sizes[0] != sizes[1] and not both:
        _compat.warn_once(
            f"target and assistant_model have vocabularies of {sizes[0]} and {sizes[1]} ids; they are taken to agree "
            "on the common ones. The text is right either way, but a draft with another tokenizer is of no use so. "
            "Pass tokenizer and assistant_tokenizer to have its tokens translated where they differ"
        )
    tokenizers = differing_tokenizers(mode_kwargs.get("tokenizer"), mode_kwargs.get("assistant_tokenizer"))
    check_vocabulary(model, config, assistant, mode_kwargs, translated=tokenizers is not None)


def check_sources(
    model: PreTrainedModel, config: TreeConfig, mode_kwargs: Mapping[str, Any], *, assistant: bool
) -> None:
    """Refuse sources that contradict the call, and a corpus that is not the model's.

    Args:
        model: the target.
        config: of the call.
        mode_kwargs: of the call.
        assistant: whether there is an assistant.

    Raises:
        UnsupportedCallError: naming the sources, or the corpus.
    """
    if config.with_model and not assistant:
        raise UnsupportedCallError(
            f"TreeConfig(draft={config.draft!r}) without assistant_model: pass a loaded draft model (on the command "
            "line: --draft-model), or use draft='ngram'"
        )
    if config.sources and assistant and not (config.with_model or config.with_mtp):
        raise UnsupportedCallError(
            f"TreeConfig(draft={config.draft!r}) with an assistant_model: leave one out, or use draft='auto' or "
            f"'model', or {('model', *config.sources)!r} for one tree of all"
        )
    index = config.options_of("suffix")["index"] if "suffix" in config.sources else None
    if index is not None:
        tokenizer = mode_kwargs.get("tokenizer")
        try:
            open_corpus_index(
                index,
                vocab_size=_compat.vocabulary_size(model),
                fingerprint=None if tokenizer is None else tokenizer_fingerprint(tokenizer),
            )
        except TreeConfigError as error:
            raise UnsupportedCallError(f"TreeConfig(draft_options=...): suffix['index']={index!r}: {error}") from error


def warn_of_unused_options(config: TreeConfig, *, assistant: bool, head: str | None) -> None:
    """Say which options are of sources that do not draft in a call.

    Args:
        config: of the call.
        assistant: whether there is a draft model.
        head: kind of the draft head, if there is one.
    """
    used = {*config.sources, *([config.layer_draft] if config.layer_draft else [])}
    used |= {"model"} if assistant else {head} if head else set()
    used = used or {"ngram"}
    unused = [source for source, options in config.draft_options.items() if options and source not in used]
    if unused:
        _compat.warn_once(
            f"TreeConfig(draft={config.draft!r}, draft_options=...): the options of {', '.join(unused)} have no "
            f"effect in a call whose trees come from {', '.join(sorted(used))}"
        )


def check_prompt_learning(model: PreTrainedModel) -> None:
    """Refuse a call that comes through a PEFT model with virtual tokens, which no tree forward would see right.

    Raises:
        UnsupportedCallError: naming the type of adapter.
    """
    # PEFT puts its own preparation on the base model for the length of such a call.
    prepare = vars(model).get("prepare_inputs_for_generation")
    kind = _prompt_learning(getattr(prepare, "__self__", None))
    if kind is not None:
        raise UnsupportedCallError(
            f"tree_config with a PEFT model of type {kind}: its virtual tokens lie in the cache in front of the text, "
            "where a tree does not reckon with them; use an adapter without virtual tokens, such as LoRA, or generate "
            "without tree_config"
        )


def _prompt_learning(model: Any) -> str | None:
    """The type of a PEFT model with virtual tokens (prompt, prefix and P-tuning), or None."""
    config = getattr(model, "active_peft_config", None)
    if config is None or not config.is_prompt_learning:
        return None
    return str(getattr(config.peft_type, "value", config.peft_type))


def differing_tokenizers(
    tokenizer: Any, assistant_tokenizer: Any
) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None:
    """Both tokenizers if the draft's tokens must be translated: they are given, and their vocabularies differ."""
    if tokenizer is None or assistant_tokenizer is None or tokenizer.get_vocab() == assistant_tokenizer.get_vocab():
        return None
    return tokenizer, assistant_tokenizer


def with_assistant_settings(
    config: TreeConfig,
    generation_config: GenerationConfig,
    assistant: PreTrainedModel | None,
) -> TreeConfig:
    """The config with what the call and the assistant's `generation_config` say about drafting.

    `num_assistant_tokens` bounds how far ahead a round drafts, so it lowers `max_depth`; 0 drafts nothing. The value
    of the call goes before the assistant's, unless it is the default of transformers, which cannot be told from none.
    The other settings are ignored with one warning. No config is changed.

    Args:
        config: of the call.
        generation_config: as `generate` prepared it, with the defaults of transformers filled in.
        assistant: draft model, or None.

    Raises:
        UnsupportedCallError: if `num_assistant_tokens` is no number of tokens.
    """
    defaults = _compat.generation_defaults(generation_config)
    own = None if assistant is None else getattr(assistant, "generation_config", None)
    for name, (idle, instead) in _GOVERNED.items():
        for value in (getattr(generation_config, name), getattr(own, name, None)):
            if value not in idle and value != defaults[name]:
                _compat.warn_once(f"{name}={value!r} has no effect together with tree_config: {instead}")
    ahead = getattr(generation_config, "num_assistant_tokens", None)
    if ahead is None or ahead == defaults["num_assistant_tokens"]:
        ahead = getattr(own, "num_assistant_tokens", None)
    if ahead is None:
        return config
    # The heuristic schedule of transformers leaves floats behind.
    if isinstance(ahead, bool) or not isinstance(ahead, int | float) or not 0 <= ahead < float("inf"):
        raise UnsupportedCallError(f"num_assistant_tokens={ahead!r}: expected an integer of at least 0")
    if ahead < 1:
        return config.replace(max_nodes=0)
    return config.replace(max_depth=min(config.max_depth, int(ahead)))
