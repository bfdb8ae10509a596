"""Training of drafts for a user's target, on the target's own texts."""

from hf_treespec.train.cut import cut_model, spaced_layers
from hf_treespec.train.loop import LoopSettings, Progress
from hf_treespec.train.mark import weights_mark
from hf_treespec.train.result import TrainResult
from hf_treespec.train.run import Stage, train_draft
from hf_treespec.train.settings import KINDS, TrainSettings
from hf_treespec.train.shards import BrokenRunError, OtherRunError, ShardWriter, claim, read_shards
from hf_treespec.train.texts import Text, TextSettings, count_units, read_texts, write_texts

__all__ = [
    "KINDS",
    "BrokenRunError",
    "LoopSettings",
    "OtherRunError",
    "Progress",
    "ShardWriter",
    "Stage",
    "Text",
    "TextSettings",
    "TrainResult",
    "TrainSettings",
    "claim",
    "count_units",
    "cut_model",
    "read_shards",
    "read_texts",
    "spaced_layers",
    "train_draft",
    "weights_mark",
    "write_texts",
]
