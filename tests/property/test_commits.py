"""Every way to commit a tree against the universal one, which calls the layer again with the accepted tokens alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticIndexedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from hf_treespec import TreeSpecError
from hf_treespec.cache import CallTrial, PathCache, ReplayRecorder, RowCache, forget, layer_kind
from hf_treespec.cache.accepted import Accepted
from hf_treespec.cache.calls import call_plan

SIZE, HEADS, DIM = 64, 2, 3


class BlockLayer(DynamicLayer):
    """A growing layer with one more tensor than its parent, the newest slots first in it."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: Tensor | None = None

    def add_marks(self, marks: Tensor) -> Tensor:
        self.marks = marks if self.marks is None else torch.cat([self.marks, marks], dim=1)
        return self.marks


class CountingLayer(DynamicLayer):
    """Keeps a sum over all tokens, a list, and a counter in a tensor that it writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Tensor | None = None
        self.parts: list[Tensor] = []
        self.count = torch.zeros((), dtype=torch.long)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new = key_states.sum(-2)
        self.total = new if self.total is None else self.total * 0.5 + new
        self.parts.append(value_states.sum(-1))
        self.count.add_(key_states.shape[-2])
        return super().update(key_states, value_states)


def spelled(numbers: list[list[int]], *lanes: int) -> Tensor:
    """`[B, Q, *lanes]` that spells out a number per row and slot."""
    base = torch.tensor(numbers, dtype=torch.float32).reshape(len(numbers), -1, *[1] * len(lanes))
    size = 1
    for lane in lanes:
        size *= lane
    return base + torch.arange(size).reshape(1, 1, *lanes) / 16


def feed(layer: Any, numbers: list[list[int]]) -> None:
    """What a forward over these tokens does with the layer."""
    states = spelled(numbers, HEADS, DIM).transpose(1, 2)
    layer.update(states, -states)
    if hasattr(layer, "update_indexer"):
        layer.update_indexer(spelled(numbers, 5))
    if isinstance(layer, BlockLayer):
        layer.add_marks(spelled(numbers, 4))


FAST: dict[str, Callable[[], Any]] = {
    "dense": DynamicLayer,
    "window 2": lambda: DynamicSlidingWindowLayer(2),
    "window 5": lambda: DynamicSlidingWindowLayer(5),
    "indexed": DynamicIndexedLayer,
    "learned": BlockLayer,
}
FIXED: dict[str, Callable[[], Any]] = {
    "static": lambda: StaticLayer(SIZE),
    "static window": lambda: StaticSlidingWindowLayer(SIZE, SIZE),
    "static indexed": lambda: StaticIndexedLayer(SIZE),
}


@contextmanager
def tried(make: Callable[[], Any]) -> Iterator[None]:
    """What a trial finds about the class is known inside."""
    trial = CallTrial()
    for batch, widths in ((3, [5]), (1, [7, 4])):
        layer = make()
        for width in widths:
            with trial.watching([layer], batch=batch, tokens=width):
                feed(layer, [list(range(width))] * batch)
    assert trial.conclude() is None
    try:
        yield
    finally:
        forget(type(make()))


def attributes(layer: Any) -> dict[str, Any]:
    return {
        name: value.tolist()
        if isinstance(value, Tensor)
        else [v.tolist() for v in value]
        if name == "parts"
        else value
        for name, value in vars(layer).items()
    }


class Numbers:
    """Fresh numbers for every slot of every row."""

    def __init__(self, batch: int) -> None:
        self.batch, self.next = batch, 1

    def take(self, count: int) -> list[list[int]]:
        first, self.next = self.next, self.next + self.batch * count
        return [list(range(first + row * count, first + (row + 1) * count)) for row in range(self.batch)]


@st.composite
def rounds(draw: st.DrawFn, *, ragged: bool) -> tuple[int, int, list[tuple[list[int], list[list[int]]]]]:
    """Batch, prompt, and per round the widths of its levels and the accepted slots of every row."""
    batch, prompt = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    out = []
    for _ in range(draw(st.integers(1, 3))):
        widths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        slots = st.sets(st.integers(0, sum(widths) - 1))
        picks = [sorted(draw(slots)) for _ in range(batch)]
        if not ragged:
            count = min(map(len, picks))
            picks = [row[:count] for row in picks]
            if draw(st.booleans()):
                picks = [picks[0]] * batch
        out.append((widths, picks))
    return batch, prompt, out


@pytest.mark.parametrize("name", [*FAST, *FIXED])
@settings(max_examples=40, deadline=None)
@given(case=rounds(ragged=False))
@example(case=(2, 4, [([3, 2], [[0, 3], [1, 4]]), ([4], [[1, 2, 3], [1, 2, 3]])]))
@example(case=(3, 1, [([2], [[], [], []]), ([3], [[1], [0], [2]])]))
def test_a_fast_path_equals_the_universal_commit(name: str, case: tuple[int, int, Any]) -> None:
    make = {**FAST, **FIXED}[name]
    batch, prompt, steps = case
    numbers = Numbers(batch)
    with tried(make):
        layer, reference = make(), make()
        for one in (layer, reference):
            feed(one, numbers.take(prompt))
            numbers.next = 1
        numbers.next = 1000
        rows = RowCache(Cache(layers=[layer]), [prompt] * batch)
        plan = call_plan(type(layer))
        for widths, picks in steps:
            if rows.room is not None and rows.room < sum(widths):
                break
            recorder = ReplayRecorder(reference, plan)
            length = rows.physical
            with rows.transaction() as transaction:
                for width in widths:
                    fresh = numbers.take(width)
                    feed(layer, fresh)
                    feed(reference, fresh)
                transaction.commit(picks)
            recorder.commit(Accepted(picks, length, [length] * batch))
            assert attributes(layer) == attributes(reference)
            for width in (1, 6):
                assert layer.get_mask_sizes(width) == reference.get_mask_sizes(width)


@pytest.mark.parametrize("name", FAST)
@settings(max_examples=40, deadline=None)
@given(case=rounds(ragged=True))
@example(case=(2, 4, [([3, 2], [[0, 3], []]), ([4], [[1], [1, 2, 3]])]))
def test_ragged_rows_equal_the_universal_commit_row_by_row(name: str, case: tuple[int, int, Any]) -> None:
    make = FAST[name]
    batch, prompt, steps = case
    numbers = Numbers(batch)
    with tried(make):
        layer, alone = make(), [make() for _ in range(batch)]
        first = numbers.take(prompt)
        feed(layer, first)
        for row, one in enumerate(alone):
            feed(one, [first[row]])
        rows = RowCache(Cache(layers=[layer]), [prompt] * batch)
        for widths, picks in steps:
            recorders = [ReplayRecorder(one) if call_plan(type(one)) else None for one in alone]
            lengths = list(rows.lengths)
            with rows.transaction() as transaction:
                for width in widths:
                    fresh = numbers.take(width)
                    feed(layer, fresh)
                    for row, one in enumerate(alone):
                        feed(one, [fresh[row]])
                transaction.commit(picks)
            for row, recorder in enumerate(recorders):
                assert recorder is not None
                recorder.commit(Accepted([picks[row]], lengths[row], [lengths[row]]))
            for name, token_axis in (("keys", -2), ("values", -2), ("indexer_keys", 1), ("marks", 1)):
                whole = getattr(layer, name, None)
                for row, one in enumerate(alone):
                    if whole is not None:
                        right = getattr(one, name)
                        held = min(right.shape[token_axis], whole.shape[token_axis])
                        mine = whole[row : row + 1]
                        mine = mine.narrow(token_axis, mine.shape[token_axis] - held, held)
                        assert torch.equal(mine, right.narrow(token_axis, right.shape[token_axis] - held, held))
            assert layer.get_seq_length() == rows.physical


@settings(max_examples=40, deadline=None)
@given(case=rounds(ragged=False))
def test_a_layer_that_only_replays_equals_token_by_token(case: tuple[int, int, Any]) -> None:
    batch, prompt, steps = case
    numbers = Numbers(batch)
    with tried(CountingLayer):
        layer, plain = CountingLayer(), CountingLayer()
        assert layer_kind(layer) == "replayed"
        first = numbers.take(prompt)
        feed(layer, first)
        feed(plain, first)
        rows = RowCache(Cache(layers=[layer]), [prompt] * batch)
        for widths, picks in steps:
            count = layer.count
            with rows.transaction() as transaction:
                slots: list[list[int]] = [[] for _ in range(batch)]
                for width in widths:
                    for row, new in zip(slots, fresh := numbers.take(width), strict=True):
                        row.extend(new)
                    feed(layer, fresh)
                transaction.commit(picks)
            for step in range(len(picks[0])):
                feed(plain, [[row[pick[step]]] for row, pick in zip(slots, picks, strict=True)])
            assert attributes(layer) == attributes(plain)
            assert layer.count is count
            with pytest.raises(KeyboardInterrupt), rows.transaction():
                feed(layer, numbers.take(3))
                raise KeyboardInterrupt
            assert attributes(layer) == attributes(plain)


class RepeatedLayer(CountingLayer):
    """Can be repeated as a whole."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        assert self.total is not None
        self.total = self.total.index_select(0, beam_idx)
        self.parts = [part.index_select(0, beam_idx) for part in self.parts]


@pytest.mark.parametrize("name", [*FAST, "replayed"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_accepted_path_behind_a_root_equals_token_by_token(name: str, data: st.DataObject) -> None:
    """Roots are read with their paths, or by a call before them, once for each row."""
    make = {**FAST, "replayed": RepeatedLayer}[name]
    batch, prompt = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    numbers = Numbers(batch)
    with tried(make):
        layer, plain = make(), make()
        first = numbers.take(prompt)
        feed(layer, first)
        feed(plain, first)
        rows = PathCache(Cache(layers=[layer]), [prompt] * batch)
        for _ in range(data.draw(st.integers(1, 3))):
            stem, below = data.draw(st.booleans()), data.draw(st.integers(1, 3))
            each = [data.draw(st.integers(1, 3)) for _ in range(batch)]
            sources = [row for row, count in enumerate(each) for _ in range(count)]
            roots = numbers.take(1)
            tokens = [[1000 * numbers.next + 10 * path + depth for depth in range(below)] for path in range(sum(each))]
            # Nodes of a row: the root, then those of its paths one after the other.
            home = []
            for row, count in enumerate(each):
                start = sum(each[:row])
                home.append([start, *(start + path for path in range(count) for _ in range(below))])
            keep = data.draw(st.integers(1, 1 + below))
            chosen = [data.draw(st.integers(0, count - 1)) for count in each]
            with rows.transaction() as transaction:
                if stem:
                    feed(layer, roots)
                rows.spread(sources, home)
                feed(layer, [([] if stem else roots[row]) + path for row, path in zip(sources, tokens, strict=True)])
                transaction.commit([[0, *range(1 + path * below, path * below + keep)] for path in chosen])
            texts = [roots[row] + tokens[home[row][0] + chosen[row]] for row in range(batch)]
            for step in range(keep):
                feed(plain, [[text[step]] for text in texts])
            assert attributes(layer) == attributes(plain)
            with pytest.raises(KeyboardInterrupt), rows.transaction():
                feed(layer, roots)
                rows.spread(sources, home)
                feed(layer, tokens)
                raise KeyboardInterrupt
            assert attributes(layer) == attributes(plain)


def test_positions_of_an_indexer_are_kept_with_its_keys() -> None:
    """The model joins them itself, on one layer; they are planes of `[dims, B, L]`."""
    layer, other = DynamicIndexedLayer(), DynamicIndexedLayer()
    if not hasattr(layer, "indexer_position_ids"):
        layer.indexer_position_ids = None
    rows = RowCache(Cache(layers=[layer, other]), [4, 4])

    def read(positions: list[list[int]]) -> None:
        new = torch.tensor(positions).expand(3, -1, -1)
        feed(layer, positions)
        feed(other, positions)
        held = layer.indexer_position_ids
        layer.indexer_position_ids = new if held is None else torch.cat([held, new], dim=-1)

    read([[0, 1, 2, 3], [5, 6, 7, 8]])
    with rows.transaction() as transaction:
        read([[4, 5, 5, 6], [9, 10, 10, 11]])
        transaction.commit([[0, 2], [0, 1]])
    assert layer.indexer_position_ids[1].tolist() == [[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 10]]
    with rows.transaction() as transaction:
        read([[6, 7], [11, 12]])
        transaction.commit([[0, 1], [0]])
    assert layer.indexer_position_ids[2, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert layer.indexer_position_ids[2, 1, 1:].tolist() == [5, 6, 7, 8, 9, 10, 11]
    assert layer.indexer_keys.shape[1] == layer.keys.shape[2] == 8


class TwiceLayer(DynamicLayer):
    """Stands for a layer that is given tokens in two calls of one forward."""


class FlatLayer(DynamicLayer):
    def flat(self, states: Tensor) -> None:
        self.last = states


class OpaqueLayer(DynamicLayer):
    def __init__(self) -> None:
        super().__init__()
        self.store = object()


def test_what_a_trial_cannot_know_is_a_reason() -> None:
    def conclusion(make: Any, *calls: Any) -> str | None:
        trial = CallTrial()
        for batch, width in ((3, 5), (1, 7)):
            layer = make()
            with trial.watching([layer], batch=batch, tokens=width):
                for call in calls:
                    call(layer, [list(range(width))] * batch)
        return trial.conclude()

    assert "are given tokens by update more than once in a forward" in str(conclusion(TwiceLayer, feed, feed))

    def flat(layer: Any, numbers: list[list[int]]) -> None:
        layer.flat(spelled(numbers, 2).flatten(0, 1))

    assert "changes its shape with something else than the tokens" in str(conclusion(FlatLayer, flat))
    assert "keep an object of class object, whose content cannot be seen" in str(conclusion(OpaqueLayer, feed))
    assert all(layer_kind(cls()) is None for cls in (TwiceLayer, FlatLayer, OpaqueLayer))


def test_a_replayed_layer_stays_in_step_and_in_its_plan() -> None:
    with tried(CountingLayer):
        layer = CountingLayer()
        feed(layer, [[1, 2], [3, 4]])
        before = attributes(copy.deepcopy(layer))
        with (
            pytest.raises(TreeSpecError, match="must all accept equally many"),
            RowCache(Cache(layers=[layer]), [2, 2]).transaction() as transaction,
        ):
            feed(layer, [[5, 6], [7, 8]])
            transaction.commit([[0, 1], [0]])
        assert attributes(layer) == before
    with pytest.raises(TreeSpecError, match="CountingLayer have not been tried"):
        ReplayRecorder(CountingLayer())


def test_the_states_of_an_unknown_class_are_learned() -> None:
    with tried(BlockLayer):
        assert layer_kind(BlockLayer()) == "dense"
    assert layer_kind(BlockLayer()) is None
