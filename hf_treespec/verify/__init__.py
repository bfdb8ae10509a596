"""Choosing tokens as the target alone would: noise, processors, the walk."""

from hf_treespec.verify.draw import draw, expected_accepted, post_order, taken, winners
from hf_treespec.verify.guidance import NodeGuidance
from hf_treespec.verify.independent import IndependentDecider, Outcome, follow_paths
from hf_treespec.verify.noise import GumbelNoise, RoundNoise, text_streams
from hf_treespec.verify.plan import DraftLaws, Plan, plan
from hf_treespec.verify.processors import NodeScorer, are_length_free, are_pure
from hf_treespec.verify.walk import Decider, TextState, walk_trees

__all__ = [
    "Decider",
    "DraftLaws",
    "GumbelNoise",
    "IndependentDecider",
    "NodeGuidance",
    "NodeScorer",
    "Outcome",
    "Plan",
    "RoundNoise",
    "TextState",
    "are_length_free",
    "are_pure",
    "draw",
    "expected_accepted",
    "follow_paths",
    "plan",
    "post_order",
    "taken",
    "text_streams",
    "walk_trees",
    "winners",
]
