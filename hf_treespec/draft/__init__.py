"""Draft sources: each proposes one tree per row."""

from hf_treespec.draft.base import Draft, DraftRow
from hf_treespec.draft.model import ModelDraft
from hf_treespec.draft.ngram import NgramDraft
from hf_treespec.draft.retokenize import RetokenizedDraft
from hf_treespec.draft.sampling import ChildSampler

__all__ = ["ChildSampler", "Draft", "DraftRow", "ModelDraft", "NgramDraft", "RetokenizedDraft"]
