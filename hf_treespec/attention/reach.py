"""Attention with a structure of its own: windows, blocks and choices of keys that a short probe cannot see.

Windows and chunks that transformers knows are part of the masks that the registry makes, at tree positions. Others
may count in cache slots, where the nodes of a tree do not stand at their positions. A probe of a few tokens is shorter
than they are, so they are told by the names and values of the config's fields.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["chooses_keys", "own_structure", "within_reach"]

_STRUCTURE = re.compile(r"(^|_)(window|local|block|chunk|span|segment|stride|band|topk|top_k|dilat|compress|landmark)")
# Fields that are no structure of that kind, and why.
_KNOWN: tuple[tuple[str, str], ...] = (
    (r"sliding_window(_size)?|attention_chunk_size", "part of the masks from the registry"),
    (r"local_attention", "the width of sliding layers, whose masks come from the registry"),
    (r"index_topk", "chosen among the keys that the layer's mask lets through, by a score that knows positions"),
    (r"keep_window_size", "chosen among the keys that the layer's mask lets through; see _CHOSEN"),
    (r".*(_layers?|_layer_freq|_types?|_pattern|_method)", "says which layers are of a kind"),
    (r".*chunk_?size(_feed_forward|_lm_head)?", "how a computation is divided"),
    (r".*(expert|moe|topk_group|router).*", "experts"),
    (r"num_(mem_)?blocks|.*_res_block|block_multiple_of|top_k|max_window_layers", "counts, widths, sampling"),
)
_HARMLESS = re.compile("|".join(pattern for pattern, _ in _KNOWN))
# BigBird's blocks are its encoder's: a forward behind a cache is too short for them.
_ENCODER_BLOCKS = ("block_sparse", "original_full")
# With more slots than that, keys are left out by a score that repeated tokens share. Which of equals it is hangs on
# the last bit of their states, and plain decoding's bits come from forwards of one token.
_CHOSEN = ("keep_window_size",)


def own_structure(config: Any) -> dict[str, int]:
    """Fields of a text config that name a structure which is not known to follow the masks, with their values.

    Args:
        config: of a model or of its text part.
    """
    text = config.get_text_config(decoder=True)
    if getattr(text, "attention_type", None) in _ENCODER_BLOCKS:
        return {}
    found = {}
    for name, value in text.to_dict().items():
        numbers = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
        sizes = [number for number in numbers if type(number) is int and number > 1]
        if sizes and _STRUCTURE.search(name) and not _HARMLESS.fullmatch(name):
            found[name] = min(sizes)
    return found


def chooses_keys(config: Any) -> bool:
    """Whether the attention leaves out keys by a rule of its own, which an attention function in its place would miss.

    Args:
        config: of a model or of its text part.
    """
    names = config.get_text_config(decoder=True).to_dict()
    return bool(own_structure(config)) or any(re.search("index_topk|keep_window", name) for name in names)


def within_reach(config: Any, longest: int | None, *, alone: bool = True) -> bool:
    """Whether a text stays below the length at which the model chooses among keys of equal scores, if it does.

    Args:
        config: of a model or of its text part.
        longest: cache slots of the text at its end, or None if it has none.
        alone: whether no second text of another length is decoded beside it.
    """
    fields = config.get_text_config(decoder=True)
    reach = min((int(getattr(fields, name)) for name in _CHOSEN if getattr(fields, name, None)), default=None)
    return reach is None or (alone and longest is not None and longest <= reach)
