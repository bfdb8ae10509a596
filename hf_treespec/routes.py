"""The ways in which a tree can enter a model."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Route"]


class Route(StrEnum):
    """How a model takes a tree; compares equal to its name.

    Attributes:
        MASK: one row under a tree mask, with the positions told.
        POSITION_HOOK: the same for a model that counts its positions itself: its position embeddings are corrected.
        ALIBI: the same for a model with a bias by distance, which is corrected.
        PATHS: a batch row for each root-to-leaf path.
        OWN_STATE: the same for a model that keeps its state elsewhere than in a cache of transformers.
        REFUSE: not at all.
    """

    MASK = "mask"
    POSITION_HOOK = "mask+positions"
    ALIBI = "mask+alibi"
    PATHS = "paths"
    OWN_STATE = "paths+own-state"
    REFUSE = "refuse"

    @property
    def masked(self) -> bool:
        """Whether all nodes are read in one row under a tree mask."""
        return self in (Route.MASK, Route.POSITION_HOOK, Route.ALIBI)

    @property
    def by_paths(self) -> bool:
        """Whether each path is read as a row of its own."""
        return self in (Route.PATHS, Route.OWN_STATE)

    @property
    def told_positions(self) -> bool:
        """Whether the model takes the position of every token, so that gaps in its cache do not shift them."""
        return self is Route.MASK
