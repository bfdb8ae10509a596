"""Draft sources: each proposes one tree per row."""

from hf_treespec.draft.base import Draft, DraftRow
from hf_treespec.draft.model import ModelDraft
from hf_treespec.draft.ngram import NgramDraft
from hf_treespec.draft.retokenize import RetokenizedDraft

__all__ = ["Draft", "DraftRow", "ModelDraft", "NgramDraft", "RetokenizedDraft"]
