"""The path batch on state that cannot drop a token: rows of a state, and tokens that it has yet to read.

A round repeats the state per path. Where the accepted path was read to its end without padding, the state of that
path stays. Otherwise the state goes back to what it was and the accepted tokens become *pending*: the next round's
forward reads them before its root, so that no forward need be spent on them alone. Or a forward before the paths reads
them and the root, once for each row: then the state goes back to what it was behind the root.

Shapes: B rows, P paths, T tokens of the longest path with the root, N pending tokens of each row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from hf_treespec.cache.state import OrderBoundState, Saved
from hf_treespec.errors import TreeSpecError

__all__ = ["OrderBoundRows", "OrderBoundTransaction", "Read"]


@dataclass(frozen=True, slots=True)
class Read:
    """What a forward reads of the trees of a round.

    Args:
        tokens: per row the tokens of the nodes of its tree, root first.
        home: per row and node the index of a path through the node.
        sources: per path its batch row.
        width: T.
    """

    tokens: Sequence[Sequence[int]]
    home: Sequence[Sequence[int]]
    sources: Sequence[int]
    width: int


class OrderBoundRows:
    """The state of B rows of equal length.

    Args:
        carried: the model's state as arguments of its forward, by name; each forward may put other objects there.
        attributes: modules that keep state themselves, with the names of the attributes.
        lengths: per row the tokens of its text that the state has read, the prompt's padding included.
        axes: see `OrderBoundState`.
        protected: whether the state outlives the call, so that it is given back whole even after an exception.
    """

    room = None
    path_limit = None
    roots_only = False

    def __init__(
        self,
        carried: dict[str, Any],
        attributes: Sequence[tuple[nn.Module, str]],
        lengths: Sequence[int],
        *,
        axes: Mapping[str, int | None] | None = None,
        protected: bool,
    ) -> None:
        self.carried = carried
        self.state = OrderBoundState(carried, attributes, axes)
        self.lengths = list(lengths)
        self.pending: list[list[int]] = [[] for _ in lengths]
        self.protected = protected
        self._current: OrderBoundTransaction | None = None

    @property
    def ahead(self) -> int:
        """N: tokens of each row's text that the state has not read."""
        return len(self.pending[0])

    def mask(self, width: int, prompt_mask_BP: Tensor | None, device: torch.device | str) -> Tensor | None:
        """int64 `[B, read + width]` with 0 at the prompt's padding; None if there is none.

        Args:
            width: tokens that are read next, the pending ones first.
            prompt_mask_BP: int64 `[B, P]`, or None.
            device: device of the mask.
        """
        if prompt_mask_BP is None:
            return None
        columns = self.lengths[0] - self.ahead + width
        mask = torch.ones((len(self.lengths), columns), dtype=torch.long, device=device)
        mask[:, : prompt_mask_BP.shape[1]] = prompt_mask_BP.to(mask)
        return mask

    def transaction(self) -> OrderBoundTransaction:
        """A context: one forward inside reads paths; what is not committed is undone on exit."""
        self._current = OrderBoundTransaction(self)
        return self._current

    @contextmanager
    def reading_pending(self) -> Iterator[None]:
        """A context for a forward that reads the pending tokens and nothing else."""
        saved = self.state.save() if self.protected else None
        if saved is not None:
            self.state.take(None, len(self.lengths))
        try:
            yield
        except BaseException:
            if saved is not None:
                self.state.restore(saved)
            raise
        self.pending = [[] for _ in self.lengths]

    @property
    def current(self) -> OrderBoundTransaction:
        """The open transaction.

        Raises:
            TreeSpecError: if none is open.
        """
        if self._current is None or not self._current.open:
            raise TreeSpecError("paths are read inside of an open transaction only")
        return self._current


class OrderBoundTransaction:
    """One round: a forward over paths, then the commit of one path per row, or nothing at all."""

    def __init__(self, rows: OrderBoundRows) -> None:
        self._rows = rows
        self.open = False
        # What to go back to, where nothing is committed: of a state that outlives the call, that before the round.
        self._before: tuple[Saved, list[list[int]], list[int]] | None = None
        self._saved: Saved | None = None
        self._read: Read | None = None
        # Whether the roots have been read before the paths.
        self._rooted = False

    def __enter__(self) -> OrderBoundTransaction:
        self.open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.open:
            self.open = False
            rows = self._rows
            if self._before is not None:
                saved, rows.pending, rows.lengths = self._before
                rows.state.restore(saved)
            elif self._saved is not None:
                rows.state.restore(self._saved)

    @contextmanager
    def reading_stem(self) -> Iterator[None]:
        """A context for a forward that reads the pending tokens of every row and its root, before those of the paths.

        Roots are always accepted: only what outlives the call is kept, for the case of an exception.

        Raises:
            TreeSpecError: if the transaction is not open, or has read before.
        """
        if not self.open or self._rooted or self._read is not None:
            raise TreeSpecError("a transaction reads roots once, before its paths, while it is open")
        rows = self._rows
        if rows.protected:
            self._before = rows.state.save(), rows.pending, rows.lengths
            rows.state.take(None, len(rows.lengths))
        yield
        self._rooted = True
        rows.pending = [[] for _ in rows.lengths]
        rows.lengths = [length + 1 for length in rows.lengths]

    def spread(self, read: Read) -> None:
        """Make the state ready for a forward that reads the pending tokens of a row and then a path, P times.

        If the roots have been read, it is to read the paths without them.

        Args:
            read: what it reads.

        Raises:
            TreeSpecError: if the transaction is not open, or has read before.
        """
        if not self.open or self._read is not None:
            raise TreeSpecError("a transaction reads paths once, while it is open")
        rows, self._read = self._rows, read
        same = list(read.sources) == list(range(len(rows.lengths)))
        # What only roots would change nobody needs again.
        if read.width > 1 or rows.protected or not same:
            self._saved = rows.state.save()
            rows.state.take(None if same else read.sources, len(rows.lengths))

    def commit(self, slots: Sequence[Sequence[int]]) -> None:
        """Keep the accepted path of every row.

        Args:
            slots: per row equally many visited nodes of its tree, root first.

        Raises:
            TreeSpecError: outside of an open transaction, before a forward, or for rows that part.
        """
        read = self._read
        if not self.open or read is None:
            raise TreeSpecError("commit outside of an open transaction that has read paths")
        if len({len(row) for row in slots}) != 1:
            raise TreeSpecError("rows of an order-bound state must all accept equally many nodes")
        rows, count, read_before = self._rows, len(slots[0]), int(self._rooted)
        if not count:
            if self._rooted and self._before is None:
                raise TreeSpecError(
                    "roots that were read before their paths must be accepted: no state is kept for more"
                )
            self.__exit__(None, None, None)
            return
        if count == read.width:
            chosen = [home[row[-1]] for home, row in zip(read.home, slots, strict=True)]
            rows.state.choose(chosen, len(read.sources))
            rows.pending = [[] for _ in slots]
        else:
            assert self._saved is not None
            rows.state.restore(self._saved)
            rows.pending = [
                [*pending, *(tokens[node] for node in row[read_before:])]
                for pending, tokens, row in zip(rows.pending, read.tokens, slots, strict=True)
            ]
        rows.lengths = [length + count - read_before for length in rows.lengths]
        self.open = False
