"""A tiny model of the same kind as one without weights, so that what holds for it can be tried."""

from hf_treespec.twin.build import TwinError, is_twin, tiny_twin
from hf_treespec.twin.overrides import OVERRIDES
from hf_treespec.twin.shrink import VOCAB, WINDOW, shrunk, tiny_config
from hf_treespec.twin.weights import SCALES, enliven

__all__ = [
    "OVERRIDES",
    "SCALES",
    "VOCAB",
    "WINDOW",
    "TwinError",
    "enliven",
    "is_twin",
    "shrunk",
    "tiny_config",
    "tiny_twin",
]
