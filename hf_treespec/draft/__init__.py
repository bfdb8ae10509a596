"""Draft sources: each proposes one tree per row."""

from hf_treespec.draft.base import (
    CreditedDraft,
    Draft,
    DraftRow,
    FeatureDraft,
    Features,
    LearningDraft,
    WeighingDraft,
)
from hf_treespec.draft.corpus import CorpusIndex, build_corpus_index, open_corpus_index, tokenizer_fingerprint
from hf_treespec.draft.heads import (
    AssistantHead,
    Borrowed,
    DFlashHead,
    DraftHead,
    EagleHead,
    MedusaHead,
    MLPHead,
    MtpHead,
    check_states,
    head_draft,
)
from hf_treespec.draft.joined import JoinedDraft
from hf_treespec.draft.layers import BorrowingDraft, LayerDraft
from hf_treespec.draft.levels import LevelReader
from hf_treespec.draft.lookahead import LookaheadPredictor
from hf_treespec.draft.model import ModelDraft
from hf_treespec.draft.ngram import ContextPredictor, NgramDraft, SuffixDraft, ngram_predictor, suffix_predictor
from hf_treespec.draft.ranking import Ranker
from hf_treespec.draft.recycle import RecyclePredictor, RecycleTable, forget_tables, table_of
from hf_treespec.draft.retokenize import RetokenizedDraft
from hf_treespec.draft.sampling import ChildSampler
from hf_treespec.draft.skipping import LayerPlan, skippable, skipping
from hf_treespec.draft.text import Predictor, TextDraft
from hf_treespec.draft.vocabulary import Rows, asked_vocabulary, reduced_rows, with_rows

__all__ = [
    "AssistantHead",
    "Borrowed",
    "BorrowingDraft",
    "ChildSampler",
    "ContextPredictor",
    "CorpusIndex",
    "CreditedDraft",
    "DFlashHead",
    "Draft",
    "DraftHead",
    "DraftRow",
    "EagleHead",
    "FeatureDraft",
    "Features",
    "JoinedDraft",
    "LayerDraft",
    "LayerPlan",
    "LearningDraft",
    "LevelReader",
    "LookaheadPredictor",
    "MLPHead",
    "MedusaHead",
    "ModelDraft",
    "MtpHead",
    "NgramDraft",
    "Predictor",
    "Ranker",
    "RecyclePredictor",
    "RecycleTable",
    "RetokenizedDraft",
    "Rows",
    "SuffixDraft",
    "TextDraft",
    "WeighingDraft",
    "asked_vocabulary",
    "build_corpus_index",
    "check_states",
    "forget_tables",
    "head_draft",
    "ngram_predictor",
    "open_corpus_index",
    "reduced_rows",
    "skippable",
    "skipping",
    "suffix_predictor",
    "table_of",
    "tokenizer_fingerprint",
    "with_rows",
]
