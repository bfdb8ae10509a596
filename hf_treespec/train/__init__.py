"""Training of drafts for a user's target, on the target's own texts."""

from hf_treespec.train.shards import BrokenRunError, OtherRunError, ShardWriter, claim, read_shards
from hf_treespec.train.texts import Text, TextSettings, read_texts, write_texts

__all__ = [
    "BrokenRunError",
    "OtherRunError",
    "ShardWriter",
    "Text",
    "TextSettings",
    "claim",
    "read_shards",
    "read_texts",
    "write_texts",
]
