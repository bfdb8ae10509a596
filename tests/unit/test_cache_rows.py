"""Cache transactions against lists of the states that each row accepted."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hf_treespec.cache import RowCache, restored_on_error
from hf_treespec.cache.states import _STATES, states_of
from hf_treespec.errors import TreeSpecError

HEADS, DIM = 2, 3
WINDOWS = (2, 4, 9)


def layers() -> list[Any]:
    return [DynamicLayer(), *map(DynamicSlidingWindowLayer, WINDOWS)]


def states(numbers: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Keys and values `[B, H, Q, D]` that spell out a number per row and slot."""
    base = torch.tensor(numbers, dtype=torch.float32)[:, None, :, None]
    lanes = torch.arange(HEADS * DIM).view(1, HEADS, 1, DIM) / 8
    return base + lanes, -base - lanes - 0.5


class Mirror:
    """A cache and, per row, the numbers of the states that it should hold."""

    def __init__(self, rng: random.Random, batch: int, prompt: int) -> None:
        self.rng = rng
        self.cache = Cache(layers=layers())
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self.next = 1
        if prompt:
            first = self.numbers(prompt)
            self.update(first)
            self.rows = first
        self.row_cache = RowCache(self.cache, [prompt] * batch)

    def numbers(self, count: int) -> list[list[int]]:
        batch = len(self.rows)
        start, self.next = self.next, self.next + batch * count
        return [list(range(start + row * count, start + (row + 1) * count)) for row in range(batch)]

    def update(self, numbers: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
        return [self.cache.update(*states(numbers), layer) for layer in range(len(self.cache.layers))]

    @property
    def physical(self) -> int:
        return max(map(len, self.rows))

    def aligned(self) -> list[list[int]]:
        """Rows right-aligned; 0 in the gaps."""
        return [[0] * (self.physical - len(row)) + row for row in self.rows]

    def check_stored(self) -> None:
        assert self.row_cache.lengths == [len(row) for row in self.rows]
        for layer, fresh in zip(self.cache.layers, layers(), strict=True):
            if not self.physical:
                assert not layer.is_initialized
                continue
            numbers = self.aligned()
            fresh.update(*states(numbers))
            assert vars(layer).keys() == vars(fresh).keys()
            assert layer.keys.shape == fresh.keys.shape and layer.values.shape == fresh.values.shape
            assert layer.get_seq_length() == self.physical
            assert [layer.get_mask_sizes(q) for q in (1, 6)] == [fresh.get_mask_sizes(q) for q in (1, 6)]
            stored = fresh.keys.shape[2]
            real = torch.tensor(numbers)[:, -stored:].ne(0)
            for found, right in ((layer.keys, fresh.keys), (layer.values, fresh.values)):
                assert torch.equal(found.transpose(1, 2)[real], right.transpose(1, 2)[real])

    def tree(self, widths: list[int]) -> list[list[int]]:
        """Updates of a tree; checks what the attention of each layer is given. Returns the numbers of the slots."""
        slots: list[list[int]] = [[] for _ in self.rows]
        for width in widths:
            sizes = [layer.get_mask_sizes(width) for layer in self.cache.layers]
            fresh = self.numbers(width)
            for row, new in zip(slots, fresh, strict=True):
                row.extend(new)
            whole = [row + new for row, new in zip(self.aligned(), slots, strict=True)]
            for layer, (length, offset), (keys, values) in zip(
                self.cache.layers, sizes, self.update(fresh), strict=True
            ):
                assert keys.shape[2] == values.shape[2] == length
                assert offset + length == len(whole[0]) == layer.get_seq_length()
                # A sliding layer must still offer what the first query of the tree can see.
                window = getattr(layer, "sliding_window", 10**6)
                assert offset <= max(0, self.physical - window + 1)
                wanted = states([row[offset:] for row in whole])
                real = torch.tensor([row[offset:] for row in whole]).ne(0)
                for found, right in zip((keys, values), wanted, strict=True):
                    assert torch.equal(found.transpose(1, 2)[real], right.transpose(1, 2)[real])
        return slots

    def round(self, *, uniform: bool, abort: bool) -> None:
        widths = [self.rng.randrange(1, 4) for _ in range(self.rng.randrange(1, 4))]
        picks = []
        for _ in self.rows:
            keep = self.rng.random() if self.rng.random() < 0.8 else 1.0
            picks.append([slot for slot in range(sum(widths)) if self.rng.random() < keep])
        if uniform:
            picks = [picks[0]] * len(picks)
        before = [copy.deepcopy(layer) for layer in self.cache.layers]
        held = [(layer.keys, layer.values) for layer in self.cache.layers if layer.is_initialized]
        copies = [(keys.clone(), values.clone()) for keys, values in held]
        with self.row_cache.transaction() as transaction:
            slots = self.tree(widths)
            if not abort:
                transaction.commit(picks)
                self.rows = [
                    row + [mine[slot] for slot in pick]
                    for row, mine, pick in zip(self.rows, slots, picks, strict=True)
                ]
        if not abort and len({tuple(pick) for pick in picks}) == 1:
            for layer, old in zip(self.cache.layers, before, strict=True):
                if picks[0]:
                    old.update(*(part[:, :, picks[0]] for part in states(slots)))
                assert_same(layer, old)
        # Whoever still holds the tensors of earlier rounds must find them unchanged.
        for now, then in zip(held, copies, strict=True):
            assert torch.equal(now[0], then[0]) and torch.equal(now[1], then[1])


def assert_same(layer: Any, other: Any) -> None:
    """Equal in every attribute, tensors bit for bit (a shape and a gap's content included)."""
    assert vars(layer).keys() == vars(other).keys()
    for name, value in vars(layer).items():
        if isinstance(value, Tensor):
            assert torch.equal(value, vars(other)[name]), name
        else:
            assert value == vars(other)[name], name


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 3),
    prompt=st.integers(0, 12),
    uniform=st.booleans(),
    rounds=st.integers(1, 5),
)
@example(seed=1, batch=3, prompt=0, uniform=False, rounds=5)
@example(seed=2, batch=2, prompt=12, uniform=False, rounds=5)
def test_rounds_leave_exactly_the_accepted_states(
    seed: int, batch: int, prompt: int, uniform: bool, rounds: int
) -> None:
    rng = random.Random(seed)
    mirror = Mirror(rng, batch, prompt)
    mirror.check_stored()
    for _ in range(rounds):
        mirror.round(uniform=uniform, abort=rng.random() < 0.2)
        mirror.check_stored()


def snapshot(cache: Cache) -> list[dict[str, Any]]:
    return [dict(vars(layer)) for layer in cache.layers]


def assert_identical(cache: Cache, before: list[dict[str, Any]]) -> None:
    for layer, then in zip(cache.layers, before, strict=True):
        assert vars(layer).keys() == then.keys()
        assert not {"update", "get_mask_sizes"} & vars(layer).keys()
        for name, value in vars(layer).items():
            assert value is then[name] or (not isinstance(value, Tensor) and value == then[name]), name


@pytest.mark.parametrize("prompt", [0, 3, 11])
def test_an_exception_gives_back_the_very_same_tensors(prompt: int) -> None:
    mirror = Mirror(random.Random(0), 2, prompt)
    before = snapshot(mirror.cache)
    with pytest.raises(KeyboardInterrupt), mirror.row_cache.transaction():
        mirror.tree([3, 2])
        raise KeyboardInterrupt
    assert_identical(mirror.cache, before)
    mirror.check_stored()


@pytest.mark.parametrize("picks", [[[0, 1], [0, 1]], [[1, 3], [1, 3]], [[0, 2], [2, 3]]])
def test_rows_that_accept_equally_many_keep_the_storage_of_the_tree(picks: list[list[int]]) -> None:
    """Moving a few slots is the point of it: no copy of the whole cache."""
    mirror = Mirror(random.Random(0), 2, 11)
    with mirror.row_cache.transaction() as transaction:
        mirror.tree([4])
        dense = mirror.cache.layers[0]
        before = dense.keys.data_ptr(), dense.values.data_ptr()
        transaction.commit(picks)
    assert (dense.keys.data_ptr(), dense.values.data_ptr()) == before and dense.keys.shape[2] == 13


@pytest.mark.parametrize("prompt", [0, 3, 11])
def test_nothing_accepted_is_nothing_changed(prompt: int) -> None:
    mirror = Mirror(random.Random(0), 2, prompt)
    before = snapshot(mirror.cache)
    with mirror.row_cache.transaction() as transaction:
        mirror.tree([2])
        transaction.commit([[], []])
    assert_identical(mirror.cache, before)
    assert mirror.row_cache.lengths == [prompt] * 2


def test_an_exception_after_the_commit_keeps_it() -> None:
    mirror = Mirror(random.Random(0), 2, 5)
    with pytest.raises(ValueError, match="later"), mirror.row_cache.transaction() as transaction:
        slots = mirror.tree([3])
        transaction.commit([[0, 2], [1]])
        raise ValueError("later")
    mirror.rows = [mirror.rows[0] + [slots[0][0], slots[0][2]], mirror.rows[1] + [slots[1][1]]]
    mirror.check_stored()


@pytest.mark.parametrize("picks", [[[1, 2], [1, 2]], [[0, 2], [1, 2]], [[0, 2], [1]]])
@pytest.mark.parametrize("broken", range(len(WINDOWS) + 1))
def test_a_commit_that_is_interrupted_is_undone_in_every_layer(
    picks: list[list[int]], broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = Mirror(random.Random(0), 2, 11)
    before = snapshot(mirror.cache)
    interrupted = mirror.cache.layers[broken]
    cls = type("Layer", (type(interrupted),), {"__setattr__": lambda layer, name, value: interrupt()})
    monkeypatch.setitem(_STATES, cls, states_of(type(interrupted)))
    with pytest.raises(KeyboardInterrupt), mirror.row_cache.transaction() as transaction:
        mirror.tree([3])
        interrupted.__class__ = cls
        transaction.commit(picks)
    object.__setattr__(interrupted, "__class__", cls.__base__)
    assert_identical(mirror.cache, before)
    mirror.check_stored()


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("lazy", [False, True])
def test_a_prefill_that_fails_half_way_leaves_the_cache_as_it_was(lazy: bool) -> None:
    cache = DynamicCache() if lazy else Mirror(random.Random(0), 2, 5).cache
    before = snapshot(cache)
    with restored_on_error(cache):
        pass
    assert_identical(cache, before)
    with pytest.raises(KeyboardInterrupt), restored_on_error(cache):
        for layer in range(2):
            cache.update(*states([[1, 2], [3, 4]]), layer)
        raise KeyboardInterrupt
    assert_identical(cache, before)
    with restored_on_error(cache):
        cache.update(*states([[1, 2], [3, 4]]), 0)
    assert cache.get_seq_length(0) == (2 if lazy else 7)
    with restored_on_error(None):
        pass


def test_a_transaction_commits_once_and_only_while_it_is_open() -> None:
    mirror = Mirror(random.Random(0), 2, 5)
    early = mirror.row_cache.transaction()
    with pytest.raises(TreeSpecError, match="outside of an open cache transaction"):
        early.commit([[0], [0]])
    with mirror.row_cache.transaction() as transaction:
        slots = mirror.tree([2])
        transaction.commit([[0], [0]])
        with pytest.raises(TreeSpecError, match="outside of an open cache transaction"):
            transaction.commit([[1], [1]])
    mirror.rows = [row + [mine[0]] for row, mine in zip(mirror.rows, slots, strict=True)]
    mirror.check_stored()
    with pytest.raises(TreeSpecError, match="outside of an open cache transaction"):
        transaction.commit([[1], [1]])


# -- the 2D mask --


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 5), st.integers(0, 4))
def test_the_mask_hides_gaps_and_prompt_padding_and_nothing_else(
    seed: int, batch: int, prompt: int, extra: int
) -> None:
    rng = random.Random(seed)
    padding = [rng.randrange(prompt) if rng.random() < 0.6 else 0 for _ in range(batch)]
    grown = [rng.randrange(4) for _ in range(batch)]
    lengths = [prompt + more for more in grown]
    given_mask = torch.tensor([[0] * pad + [1] * (prompt - pad) for pad in padding])
    rows = RowCache(Cache(layers=layers()), lengths)
    mask = rows.mask(extra, given_mask if any(padding) else None, "cpu")
    width = max(lengths)
    wanted = [
        [0] * (width - length + pad) + [1] * (length - pad + extra)
        for length, pad in zip(lengths, padding, strict=True)
    ]
    if not any(padding) and len(set(lengths)) == 1:
        # None lets a model take its fast way.
        assert mask is None
    else:
        assert mask is not None and mask.dtype == torch.int64 and mask.tolist() == wanted
    assert rows.gaps == [width - length for length in lengths] and rows.physical == width
