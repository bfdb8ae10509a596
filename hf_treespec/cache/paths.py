"""A cache for the path batch: repeated to one row per path of a tree, then cut back to the accepted path.

For models that take no tree mask a round's forward reads every root-to-leaf path as a batch row of its own. The
committed states are repeated per path, cross-attention included, with those of a root that was read alone before; the
commit keeps the states of one path per row.

Shapes: B rows, P paths, T tokens of the longest path.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch

from hf_treespec import _compat
from hf_treespec.cache.layers import cache_parts
from hf_treespec.cache.rows import CacheTransaction, RowCache
from hf_treespec.cache.snapshot import LayerState
from hf_treespec.cache.states import take_rows
from hf_treespec.errors import TreeSpecError

__all__ = ["PathCache", "PathTransaction"]


class PathCache(RowCache):
    """A transformers cache, or a pair of them behind an encoder, whose transactions read paths.

    Args:
        cache: the cache, which stays the same object.
        lengths: slots of each row that are not gap; the prompt's own padding counts as slots.

    Raises:
        UnsupportedCallError: if a layer cannot take a tree.
    """

    def __init__(self, cache: _compat.Cache, lengths: Sequence[int]) -> None:
        super().__init__(cache, lengths)
        self._current: PathTransaction | None = None

    def transaction(self) -> PathTransaction:
        """A context: one forward inside reads paths; what is not committed is undone on exit."""
        self._current = PathTransaction(self)
        return self._current

    def spread(self, sources: Sequence[int], home: Sequence[Sequence[int]]) -> None:
        """Make the open transaction ready for a forward of P paths.

        Args:
            sources: per path the batch row whose tree it is of.
            home: per row and tree node the index of a path that runs through the node.

        Raises:
            TreeSpecError: without an open transaction, or if it has read paths already.
        """
        if self._current is None:
            raise TreeSpecError("paths are read inside of an open cache transaction only")
        self._current.spread(sources, home)


class PathTransaction(CacheTransaction):
    """Snapshot, one forward over paths, then commit of one path per row, or nothing at all.

    Before the paths a forward may read the roots of all rows: its slots are the first of the tree.
    """

    def __init__(self, rows: RowCache) -> None:
        super().__init__(rows)
        self._cross: list[LayerState] = []
        self._home: Sequence[Sequence[int]] | None = None
        self._paths = 0

    def __enter__(self) -> PathTransaction:
        super().__enter__()
        # Cross-attention reads the encoder once; a round only borrows its states.
        self._cross = [LayerState(layer) for part in cache_parts(self._rows.cache)[1:] for layer in part.layers]
        return self

    def spread(self, sources: Sequence[int], home: Sequence[Sequence[int]]) -> None:
        """See `PathCache.spread`."""
        if not self._open or self._home is not None:
            raise TreeSpecError("a path transaction reads paths once, while it is open")
        self._home, self._paths = home, len(sources)
        if list(sources) == list(range(len(self._rows.lengths))):
            return
        for state in (*self._dense, *self._cross):
            take_rows(state.layer, sources)
        for recorder in self._recorders:
            recorder.spread(torch.tensor(list(sources)))

    def commit(self, slots: Sequence[Sequence[int]]) -> None:
        """Keep the states of the accepted path of every row, and drop all others.

        Args:
            slots: per row the visited nodes of its tree, root first; empty for a row that keeps nothing.
        """
        if not self._open or self._home is None:
            raise TreeSpecError("commit outside of an open cache transaction that has read paths")
        chosen = [home[nodes[-1] if nodes else 0] for home, nodes in zip(self._home, slots, strict=True)]
        if any(slots) and chosen != list(range(self._paths)):
            for state in self._dense:
                take_rows(state.layer, chosen)
            for recorder in self._recorders:
                recorder.gather(torch.tensor(chosen))
        self._give_back_cross()
        # What is left is a chain per row.
        super().commit([range(len(nodes)) for nodes in slots])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self._give_back_cross()
        super().__exit__(kind, error, trace)

    def _give_back_cross(self) -> None:
        for state in self._cross:
            state.restore()
