"""Choosing tokens as the target alone would: noise, processors, the walk."""

from hf_treespec.verify.guidance import NodeGuidance
from hf_treespec.verify.noise import GumbelNoise, text_streams
from hf_treespec.verify.processors import NodeScorer, are_length_free, are_pure
from hf_treespec.verify.walk import Decider, TextState, walk_trees

__all__ = [
    "Decider",
    "GumbelNoise",
    "NodeGuidance",
    "NodeScorer",
    "TextState",
    "are_length_free",
    "are_pure",
    "text_streams",
    "walk_trees",
]
