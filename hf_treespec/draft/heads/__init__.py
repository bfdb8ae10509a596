"""Draft heads: small modules that read hidden states of the target, and the drafts around them."""

from hf_treespec.draft.heads.base import Borrowed, DraftHead, Source
from hf_treespec.draft.heads.dflash import DFlashHead
from hf_treespec.draft.heads.drafts import head_draft
from hf_treespec.draft.heads.eagle import EagleHead
from hf_treespec.draft.heads.formats import LAYOUTS, is_head, load_draft, save_draft
from hf_treespec.draft.heads.medusa import MedusaHead
from hf_treespec.draft.heads.mlp import MLPHead
from hf_treespec.draft.heads.mtp import MtpHead, check_states
from hf_treespec.draft.heads.shared_states import AssistantHead

__all__ = [
    "LAYOUTS",
    "AssistantHead",
    "Borrowed",
    "DFlashHead",
    "DraftHead",
    "EagleHead",
    "MLPHead",
    "MedusaHead",
    "MtpHead",
    "Source",
    "check_states",
    "head_draft",
    "is_head",
    "load_draft",
    "save_draft",
]
