"""The ways in which a tree can enter a model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["PathTraits", "Route"]


@dataclass(frozen=True, slots=True)
class PathTraits:
    """What a probe found out about a model besides its route.

    Args:
        attributes: modules that keep state themselves: name of the module, name of the buffer or attribute.
        axes: tensors of the state whose first axis is not that of the rows: name of the place, and the axis, or None.
        alone: whether several tokens a forward are right for a single row without padding only.
        in_step: whether rows must grow by equally many tokens, because the model does not look past a gap.
    """

    attributes: tuple[tuple[str, str], ...] = ()
    axes: tuple[tuple[str, int | None], ...] = ()
    alone: bool = False
    in_step: bool = False


class Route(StrEnum):
    """How a model takes a tree; compares equal to its name.

    Attributes:
        MASK: one row under a tree mask, with the positions told.
        POSITION_HOOK: the same for a model that counts its positions itself: its position embeddings are corrected.
        ALIBI: the same for a model with a bias by distance, which is corrected.
        PATHS: a batch row for each root-to-leaf path.
        OWN_STATE: the same for a model that keeps its state elsewhere than in a cache of transformers.
        STEPS: not at all, but the model reads one token a forward only, so that no tree could be sooner than plain
            decoding, which a call with trees then is.
        REFUSE: not at all.
    """

    MASK = "mask"
    POSITION_HOOK = "mask+positions"
    ALIBI = "mask+alibi"
    PATHS = "paths"
    OWN_STATE = "paths+own-state"
    STEPS = "token-by-token"
    REFUSE = "refuse"

    @property
    def masked(self) -> bool:
        """Whether all nodes are read in one row under a tree mask."""
        return self in (Route.MASK, Route.POSITION_HOOK, Route.ALIBI)

    @property
    def by_paths(self) -> bool:
        """Whether each path is read as a row of its own."""
        return self in (Route.PATHS, Route.OWN_STATE, Route.STEPS)

    @property
    def told_positions(self) -> bool:
        """Whether the model takes the position of every token, so that gaps in its cache do not shift them."""
        return self is Route.MASK
