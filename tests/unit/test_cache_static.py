"""Static layers: trees are written behind the committed slots and leave nothing there."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticLayer, StaticSlidingWindowLayer

from hf_treespec import TreeSpecError, UnsupportedCallError, _compat
from hf_treespec.cache import RowCache, check_windows, restored_on_error
from hf_treespec.cache.accepted import keep_slots
from hf_treespec.cache.static import capacity

SIZE, HEADS, DIM = 24, 2, 3


def states(*shape: int) -> Tensor:
    return torch.randn(*shape[:1], HEADS, *shape[1:], DIM, generator=torch.Generator().manual_seed(sum(shape)))


def new_layers() -> list[Any]:
    return [StaticLayer(SIZE), StaticSlidingWindowLayer(SIZE + 9, SIZE), *(cls() for cls in _compat.FP8_LAYERS)]


def held(layer: Any) -> list[Any]:
    """Everything a layer holds, copied."""
    if type(layer) in _compat.FP8_LAYERS:
        parts = [*layer._quantized_keys, *layer._quantized_values] if layer.is_initialized else []
        return [layer.cumulative_length, *(part.float().tolist() for part in parts)]
    if not layer.is_initialized:
        return [int(layer.cumulative_length), getattr(layer, "cumulative_length_int", None)]
    values = [int(layer.cumulative_length), getattr(layer, "cumulative_length_int", None)]
    return [*values, layer.keys.tolist(), layer.values.tolist()]


def filled(batch: int, length: int) -> Cache:
    cache = Cache(layers=new_layers())
    for index in range(len(cache.layers)):
        cache.update(states(batch, length), -states(batch, length), index)
    return cache


@pytest.mark.parametrize("seed", range(20))
def test_rounds_leave_what_token_by_token_decoding_leaves(seed: int) -> None:
    rng = random.Random(seed)
    batch, prompt = rng.randint(1, 3), rng.randint(1, 8)
    ours, plain = filled(batch, prompt), filled(batch, prompt)
    rows = RowCache(ours, [prompt] * batch)
    storage = [layer.keys.data_ptr() for layer in ours.layers[:2]]
    for _ in range(3):
        count = rng.randint(1, 3)
        nodes = rng.randint(count, min(7, SIZE - rows.physical))
        keys, values = torch.randn(batch, HEADS, nodes, DIM), torch.randn(batch, HEADS, nodes, DIM)
        picks = [sorted(rng.sample(range(nodes), count)) for _ in range(batch)]
        with rows.transaction() as transaction:
            given = [[part.clone() for part in ours.update(keys, values, i)] for i in range(len(ours.layers))]
            transaction.commit(picks)
        for step in range(count):
            at = torch.tensor([pick[step] for pick in picks])
            token = keys[torch.arange(batch), :, at][:, :, None], values[torch.arange(batch), :, at][:, :, None]
            seen = [plain.update(*token, index) for index in range(len(plain.layers))]
        assert [held(layer) for layer in ours.layers] == [held(layer) for layer in plain.layers]
        # Attention was given for a node just what it is given for the token in plain decoding.
        last = torch.tensor([pick[-1] for pick in picks])
        for layer, mine, right in zip(ours.layers, given, seen, strict=True):
            base = rows.physical - count
            for one, two in zip(mine, right, strict=True):
                assert torch.equal(one[torch.arange(batch), :, base + last], two[:, :, rows.physical - 1])
            assert vars(layer).keys() == vars(plain.layers[ours.layers.index(layer)]).keys()
        assert rows.room == SIZE - rows.physical
    assert storage == [layer.keys.data_ptr() for layer in ours.layers[:2]], "compiled code keeps the address"


@pytest.mark.parametrize("prompt", [0, 5])
def test_an_exception_takes_the_tree_back(prompt: int) -> None:
    cache = filled(2, prompt) if prompt else Cache(layers=new_layers())
    before = [held(layer) for layer in cache.layers]
    lengths = [getattr(layer, "cumulative_length", None) for layer in cache.layers]
    with pytest.raises(KeyboardInterrupt), RowCache(cache, [prompt] * 2).transaction():
        # In the middle of a forward: the last layer has not been updated.
        for index in range(len(cache.layers) - 1):
            cache.update(states(2, 4), states(2, 4), index)
        raise KeyboardInterrupt
    assert [held(layer) for layer in cache.layers] == before
    for layer, length in zip(cache.layers, lengths, strict=True):
        assert not isinstance(length, Tensor) or layer.cumulative_length is length
    with pytest.raises(KeyboardInterrupt), restored_on_error(cache):
        cache.update(states(2, 4), states(2, 4), 0)
        raise KeyboardInterrupt
    assert [held(layer) for layer in cache.layers] == before


def test_a_commit_that_is_interrupted_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(2, 5)
    before = [held(layer) for layer in cache.layers]
    calls: list[int] = []

    def burst(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        keep_slots(*args)

    monkeypatch.setattr("hf_treespec.cache.rows.keep_slots", burst)
    with pytest.raises(KeyboardInterrupt), RowCache(cache, [5, 5]).transaction() as transaction:
        for index in range(len(cache.layers)):
            cache.update(states(2, 4), states(2, 4), index)
        transaction.commit([[0, 2], [1, 3]])
    assert [held(layer) for layer in cache.layers] == before


@pytest.mark.parametrize("index", range(len(new_layers())))
def test_rows_out_of_step_are_an_error(index: int) -> None:
    cache = Cache(layers=[new_layers()[index]])
    cache.update(states(2, 5), states(2, 5), 0)
    before = held(cache.layers[0])
    with pytest.raises(TreeSpecError, match="equally many"), RowCache(cache, [5, 5]).transaction() as transaction:
        cache.update(states(2, 4), states(2, 4), 0)
        transaction.commit([[0, 2], [1]])
    assert held(cache.layers[0]) == before


def test_room_is_that_of_the_smallest_layer() -> None:
    cache = Cache(layers=[StaticLayer(30), StaticSlidingWindowLayer(30, 20)])
    assert capacity(cache.layers) == 20
    assert RowCache(cache, [0]).room == 20
    assert RowCache(Cache(layers=[]), [0]).room is None


def test_windows_that_could_wrap() -> None:
    cache = Cache(layers=[StaticLayer(30), StaticSlidingWindowLayer(30, 20)])
    check_windows(cache, 20)
    for tokens, named in ((21, "21"), (None, "any number of")):
        with pytest.raises(UnsupportedCallError, match=f"hold 20 tokens and the call may write {named}: "):
            check_windows(cache, tokens)
    for other in (None, Cache(layers=[StaticLayer(4)])):
        check_windows(other, None)
