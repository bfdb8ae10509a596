"""Which layers of a config stay in its tiny twin, and what its lists say of these."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["LAYER_COUNT", "by_layer", "kept_layers", "layer_count"]

MOST_LAYERS = 6

LAYER_COUNT = re.compile(r"num_(hidden_)?layers|n_layers?|decoder_layers")
# Lists with an entry a layer; others are told by their length.
_BY_LAYER = re.compile(r"layer_types|mlp_layer_types|layers_block_type|indexer_types|no_rope_layers")
# Lists of the numbers of layers that are of a kind.
_CHOSEN = re.compile(r"(?!.*token).*(_indices|_indexes|_idxs?|layer_ids|_layers)")
# How many layers at the end read the cache of those before.
_SHARED = "num_kv_shared_layers"


def layer_count(fields: Mapping[str, Any]) -> int | None:
    """How many layers a config has, if it says so or lists them."""
    told = next((int(v) for k, v in fields.items() if LAYER_COUNT.fullmatch(k) and isinstance(v, int)), None)
    listed = (len(v) for k, v in fields.items() if _BY_LAYER.fullmatch(k) and isinstance(v, list))
    return next(listed, None) if told is None else told


def kept_layers(fields: Mapping[str, Any], first: int | None = None) -> list[int]:
    """Numbers of the layers that stay, ascending; none if the config says nothing about single layers.

    Args:
        fields: of a config.
        first: how many of the first ones, instead of one of each kind and two at least.
    """
    count = layer_count(fields)
    if not count:
        return []
    if first is not None:
        return list(range(min(first, count)))
    kinds = [_flags(name, value, count) for name, value in fields.items()]
    told = [flags for flags in kinds if flags]
    if not told:
        return []
    seen: dict[tuple[str, ...], int] = {}
    for layer in range(min(len(flags) for flags in told)):
        seen.setdefault(tuple(str(flags[layer]) for flags in told), layer)
    kept = sorted(seen.values())[:MOST_LAYERS]
    return kept if len(kept) > 1 or count == 1 else [kept[0], kept[0] + 1]


def by_layer(name: str, value: Any, fields: Mapping[str, Any], kept: list[int]) -> Any:
    """What a field says of the kept layers: a list of as many entries, numbers among them or a count; None else."""
    count = layer_count(fields)
    if not kept or not count or not _flags(name, value, count):
        return None
    if name == _SHARED:
        return sum(layer >= count - value for layer in kept)
    if _lists_numbers(name, value, count):
        return [place for place, layer in enumerate(kept) if layer in value]
    return [value[layer] for layer in kept if layer < len(value)]


def _flags(name: str, value: Any, count: int) -> list[Any]:
    """What a field says of each layer, or nothing."""
    if name == "per_layer_config":
        special = {int(layer): fields for layer, fields in value.items()}
        return [special.get(layer) for layer in range(count)] if special else []
    if name == _SHARED and value:
        return [layer >= count - value for layer in range(count)]
    if not isinstance(value, list) or not value or isinstance(value[0], list):
        return []
    if _lists_numbers(name, value, count):
        return [layer in value for layer in range(count)]
    return value if len(value) == count or _BY_LAYER.fullmatch(name) else []


def _lists_numbers(name: str, value: Any, count: int) -> bool:
    if not isinstance(value, list) or _BY_LAYER.fullmatch(name) or not _CHOSEN.fullmatch(name):
        return False
    return all(type(layer) is int and 0 <= layer < count for layer in value) and len(set(value)) == len(value)
