"""`TreeCache` alone: rounds against lists of the states that each row accepted, storage, and what a cache must do."""

from __future__ import annotations

import copy
import io
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, T5Config
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, QuantizedCache, StaticCache

from hf_treespec import TreeCache, UnsupportedCallError, _compat
from hf_treespec.cache import RowCache, moves, restored_on_error
from hf_treespec.cache.slots import Scratch, dequantize, quantize
from hf_treespec.cache.tree_layer import TreeLayer

HEADS, DIM = 2, 16
WINDOW = 5
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": HEADS, "head_dim": DIM, "num_hidden_layers": 2,
    "vocab_size": 32,
}  # fmt: skip
FULL = LlamaConfig(**_SIZES)
SLIDING = MistralConfig(**_SIZES, sliding_window=WINDOW)
CONFIGS = {"full": FULL, "sliding": SLIDING}
storages = pytest.mark.parametrize("storage", ["dense", "int8", "fp8"])
everywhere = pytest.mark.parametrize(
    ("storage", "buffers"), [("dense", "shared"), *((s, b) for s in ("int8", "fp8") for b in ("shared", "per_layer"))]
)
configs = pytest.mark.parametrize("kind", CONFIGS)


def states(numbers: list[list[int]], dim: int = DIM) -> tuple[Tensor, Tensor]:
    """Keys and values `[B, H, Q, D]` that spell out a number per row and slot, another in each lane."""
    base = torch.tensor(numbers, dtype=torch.float32)[:, None, :, None]
    lanes = torch.arange(1, HEADS * dim + 1).view(1, HEADS, 1, dim) / 8
    return base * lanes, -base - lanes


def rounded(storage: str, values: Tensor) -> Tensor:
    """States as they come back from storage."""
    if storage == "dense":
        return values
    return dequantize(*quantize(values, storage), torch.empty_like(values))


def filled(storage: str = "dense", *, kind: str = "full", rows: int = 2, length: int = 7, **more: Any) -> TreeCache:
    cache = TreeCache(CONFIGS[kind], storage=storage, **more)
    numbers = [[row * 100 + slot + 1 for slot in range(length)] for row in range(rows)]
    for layer in range(2):
        cache.update(*states(numbers), layer)
    return cache


def parts_of(layer: Any) -> list[Tensor]:
    return [part.float() for slots in layer.slots.values() for part in slots.parts.values()]


def assert_clear_behind(cache: TreeCache) -> None:
    for layer in cache.layers:
        for part in parts_of(layer):
            for row, length in enumerate(layer.lengths):
                assert not part[row, :, length - layer.dropped :].any(), "what lies behind a row must be zero"


# --- rounds --------------------------------------------------------------------------------------------------------


@everywhere
@configs
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32), rows=st.integers(1, 3), prompt=st.integers(1, 9), rounds=st.integers(1, 5),
)  # fmt: skip
def test_rounds_keep_what_each_row_accepts(
    storage: str, buffers: str, kind: str, seed: int, rows: int, prompt: int, rounds: int
) -> None:
    rng = random.Random(seed)
    numbers = iter(range(1, 10**6))
    cache = TreeCache(CONFIGS[kind], storage=storage, buffers=buffers)
    kept = [[next(numbers) for _ in range(prompt)] for _ in range(rows)]
    for layer in range(2):
        cache.update(*states(kept), layer)
    row_cache = RowCache(cache, [prompt] * rows)
    for _ in range(rounds):
        before = [list(row) for row in kept]
        new: list[list[int]] = [[] for _ in range(rows)]
        abort = rng.random() < 0.2
        with row_cache.transaction() as transaction:
            for width in [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]:
                level = [[next(numbers) for _ in range(width)] for _ in range(rows)]
                new = [mine + more for mine, more in zip(new, level, strict=True)]
                longest = max(map(len, kept)) + len(new[0])
                for layer in range(2):
                    size, first = cache.get_mask_sizes(width, layer)
                    shown = cache.update(*states(level), layer)
                    assert first + size == longest == cache.get_seq_length(layer)
                    assert first == (0 if kind == "full" else max(0, min(map(len, kept)) + len(new[0]) - width - 4))
                    for found, right in zip(
                        shown,
                        states([[*a, *b] for a, b in zip(kept, new, strict=True)])
                        if len({*map(len, kept)}) == 1
                        else (None, None),
                        strict=True,
                    ):
                        if right is not None:
                            assert torch.equal(found, rounded(storage, right)[:, :, first:])
                        assert found.shape[2] == size
            picks = [sorted(rng.sample(range(len(new[0])), rng.randint(0, len(new[0])))) for _ in range(rows)]
            if not abort:
                transaction.commit(picks)
                for row, pick in enumerate(picks):
                    kept[row] += [new[row][slot] for slot in pick]
        if abort:
            assert kept == before
        assert row_cache.lengths == [len(row) for row in kept]
        assert_clear_behind(cache)
        for layer in cache.layers:
            assert layer.lengths == tuple(map(len, kept))
            for row, mine in enumerate(kept):
                for found, right in zip((layer.keys, layer.values), states([mine]), strict=True):
                    assert torch.equal(found[row, :, : len(mine)], rounded(storage, right)[0])
    # Padding brings all rows to one length, and the cache is rectangular again.
    gap = row_cache.shorter("cpu")
    assert (gap is None) == (len({*map(len, kept)}) == 1)


def test_a_commit_in_place_moves_nothing_and_keeps_the_storage() -> None:
    cache = filled(length=70)
    layer = cache.layers[0]
    storage = layer.slots["keys"].parts["states"].data_ptr()
    rows = RowCache(cache, [70, 70])
    for _ in range(10):
        with rows.transaction() as transaction:
            for number in range(2):
                cache.update(*states([[1, 2, 3]] * 2), number)
            transaction.commit([[0, 2]] * 2)
    assert layer.lengths == (90, 90) and layer.slots["keys"].parts["states"].data_ptr() == storage


def test_an_error_in_a_prefill_leaves_the_cache_as_it_was() -> None:
    for cache in (filled(), TreeCache(FULL)):
        before = cache.get_seq_length()
        with pytest.raises(KeyError), restored_on_error(cache):
            cache.update(*states([[5, 6]] * 2), 0)
            raise KeyError
        assert [layer.get_seq_length() for layer in cache.layers] == [before] * 2
        assert_clear_behind(cache)
        cache.update(*states([[5, 6]] * 2), 0)


# --- room ----------------------------------------------------------------------------------------------------------


def test_room_doubles_and_then_grows_by_4096() -> None:
    layer = TreeLayer()
    rooms = []
    for count in (1, 63, 1, 64, 4000, 4096, 1, 9000):
        layer.update(torch.ones(1, 1, count, 1), torch.ones(1, 1, count, 1))
        rooms.append(layer.capacity)
    assert rooms == [64, 64, 192, 192, 8256, 8256, 8256, 21376]
    assert all(part[:, :, : layer.physical].all() for part in parts_of(layer))


def test_room_can_be_reserved_before_and_after_the_first_tokens() -> None:
    early, late = TreeCache(FULL), filled(rows=1)
    early.reserve(1000)
    early.update(*states([[1]]), 0)
    late.reserve(1000)
    for cache in (early, late):
        layer = cache.layers[0]
        assert layer.capacity == 1024
        place = layer.slots["keys"].parts["states"].data_ptr()
        for _ in range(9):
            cache.update(*states([list(range(100))]), 0)
        assert layer.slots["keys"].parts["states"].data_ptr() == place


@storages
def test_a_cache_of_an_inference_mode_goes_on_outside_of_it(storage: str) -> None:
    cache = TreeCache(FULL, storage=storage)
    with torch.inference_mode():
        cache.update(*states([[1, 2]]), 0)
        cache.reorder_cache(torch.tensor([0]))
    cache.update(*states([[3]]), 0)
    assert torch.equal(cache.layers[0].keys, rounded(storage, states([[1, 2, 3]])[0]))


def test_states_that_need_a_graph_are_refused() -> None:
    keys, values = states([[1]])
    with pytest.raises(ValueError, match="keeps no graph: run the model under torch.no_grad"):
        TreeCache(FULL).update(keys.requires_grad_(), values, 0)


def test_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="states of 3 rows for a TreeCache of 2"):
        filled().update(*states([[1]] * 3), 0)


# --- eight bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("storage", "share"), [("int8", 0.5 / 127), ("fp8", 2**-4)])
def test_states_come_back_within_half_a_step(storage: str, share: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # float16 holds no more.
    for size in (1e-3, 1.0, 3e4):
        values = (torch.randn(3, 2, 5, 64).clamp(-2, 2) * size / 2).to(dtype)
        codes, scales = quantize(values, storage)
        back = dequantize(codes, scales, torch.empty_like(values))
        largest = values.abs().amax(-1, keepdim=True).double()
        room = scales[..., None].double() * (127 if storage == "int8" else 448) / largest
        assert room.min() >= 1 - 1e-6 and room.max() < 1 + 2**-6, "a scale is rounded up, so that nothing is clipped"
        near = largest * share if storage == "int8" else values.double().abs() * share + largest / 448 * 2**-9
        # The scale is rounded up to 8 bits, and the state to its dtype.
        slack = 1.01 * near + largest * torch.finfo(dtype).eps
        assert ((back.double() - values.double()).abs() <= slack).all()
        assert not torch.equal(back, values)


@pytest.mark.parametrize("storage", ["int8", "fp8"])
def test_vectors_at_the_edges(storage: str) -> None:
    zero, nan, endless = torch.zeros(8), torch.full((8,), torch.nan), torch.tensor([torch.inf] + [1.0] * 7)
    # Between two steps of bfloat16: a scale that was rounded down would clip, or overflow e4m3 into a NaN.
    edge = torch.tensor([1.00390625 * 448, -1.00390625 * 448, 1, 0, 0, 0, 0, 0])
    values = torch.stack([zero, nan, endless, edge, torch.full((8,), 1e-30)])
    codes, scales = quantize(values, storage)
    back = dequantize(codes, scales, torch.empty_like(values))
    assert torch.equal(back[0], zero) and not back[1].isfinite().any() and not back[2, 0].isfinite()
    assert back[3:].isfinite().all()
    assert (back[3, :2].abs() - 1.00390625 * 448).abs().max() < 4 * 1.01
    assert (back[4] / 1e-30 - 1).abs().max() < 0.02
    empty = quantize(torch.empty(2, 3, 0), storage)
    assert empty[0].shape == (2, 3, 0) and not empty[1].any()


def test_a_vector_does_not_depend_on_those_beside_it() -> None:
    torch.manual_seed(0)
    values = torch.randn(2, 3, 7, 16)
    for storage in ("int8", "fp8"):
        whole = quantize(values, storage)
        for slot in range(7):
            one = quantize(values[:, :, slot : slot + 1], storage)
            assert torch.equal(one[0].float(), whole[0][:, :, slot : slot + 1].float())
            assert torch.equal(one[1], whole[1][:, :, slot : slot + 1])


def test_buffers_give_the_same_states_and_the_shared_one_is_one() -> None:
    shared, own = (filled("int8", buffers=buffers) for buffers in ("shared", "per_layer"))
    seen = [cache.update(*states([[9], [8]]), layer) for cache in (shared, own) for layer in range(2)]
    assert torch.equal(seen[0][0], seen[2][0])
    assert seen[0][0].data_ptr() == seen[1][0].data_ptr() != seen[2][0].data_ptr() != seen[3][0].data_ptr()
    # What a user looks at is nobody's buffer.
    looked = shared.layers[0].keys
    before = looked.clone()
    shared.update(*states([[1], [2]]), 0)
    assert torch.equal(looked, before)


def test_head_sizes_of_keys_and_values_may_differ() -> None:
    for storage in ("dense", "int8", "fp8"):
        layer = TreeLayer(storage, scratch=Scratch())
        keys, values = states([[1, 2]])[0], states([[1, 2]], dim=4)[1]
        for _ in range(2):
            shown = layer.update(keys, values)
        assert [one.shape[2:] for one in shown] == [(4, DIM), (4, 4)]
        assert torch.equal(shown[1][:, :, :2], rounded(storage, values))


# --- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["int8", "fp8"])
def test_eight_bits_take_at_most_053_of_bfloat16(storage: str) -> None:
    layers = 12
    config = LlamaConfig(**{**_SIZES, "num_hidden_layers": layers})
    cache = TreeCache(config, storage=storage)
    dense = TreeCache(config)
    like = torch.zeros(2, 3, 1000, 64, dtype=torch.bfloat16)
    for layer in range(layers):
        cache.update(like, like, layer)
        dense.update(like, like, layer)
    report, beside = cache.memory_report(), dense.memory_report()
    assert beside.used == report.dense == beside.dense == layers * 2 * like.numel() * 2
    assert report.used / report.dense == (64 + 2) / 128 <= 0.53
    assert report.reserved / beside.reserved <= 0.53
    # The buffers of keys and values, half again as large as one layer's states, serve all layers.
    assert report.shared == 2 * 1.5 * like.numel() * 2 and not any(layer.copied for layer in report.layers)
    assert report.total == report.reserved + report.shared < 0.7 * beside.total
    assert len(report.layers) == layers and report.layers[0].used * layers == report.used
    held = sum(
        part.numel() * part.element_size()
        for layer in cache.layers
        for slots in layer.slots.values()
        for part in slots.parts.values()
    )
    assert held == report.reserved


def test_copies_of_all_layers_are_counted() -> None:
    report = filled("int8", buffers="per_layer").memory_report()
    assert report.shared == 0 and report.buffers == 2 * 2 * 2 * HEADS * DIM * 4 * 64
    assert filled().memory_report().buffers == 0


# --- what a cache must do ------------------------------------------------------------------------------------------


def same_text(one: Any, two: Any, *, exact: bool = True) -> None:
    assert len(one.layers) == len(two.layers)
    for mine, other in zip(one.layers, two.layers, strict=True):
        assert mine.get_seq_length() == other.get_seq_length()
        for a, b in ((mine.keys, other.keys), (mine.values, other.values)):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == b.dtype and torch.equal(a, b) if exact else torch.allclose(a, b, rtol=0.1)


@everywhere
@configs
def test_users_of_a_dynamic_cache_find_what_they_expect(storage: str, buffers: str, kind: str) -> None:
    cache = filled(storage, kind=kind, buffers=buffers, length=4)
    other = DynamicCache()
    numbers = [[row * 100 + slot + 1 for slot in range(4)] for row in range(2)]
    for layer in range(2):
        other.update(*(rounded(storage, s) for s in states(numbers)), layer)
    assert isinstance(cache, Cache) and len(cache) == 2 and cache.is_croppable and not cache.is_compileable
    assert cache.get_max_length() == -1 and cache.is_sliding == [kind == "sliding"] * 2
    same_text(cache, other)
    for change in (
        lambda c: c.crop(-1),
        lambda c: c.crop(0),
        lambda c: c.reorder_cache(torch.tensor([1, 0])),
        lambda c: c.batch_repeat_interleave(3),
        lambda c: c.batch_select_indices(torch.tensor([0, 4, 2])),
        lambda c: c.reorder_cache(torch.tensor([2, 2, 1])),
        lambda c: c.crop(-1),
    ):
        change(cache)
        change(other)
        same_text(cache, other)
        assert_clear_behind(cache)
    for (keys, values, _), layer in zip(cache, other.layers, strict=True):
        assert torch.equal(keys, layer.keys) and torch.equal(values, layer.values)
    cache.reset()
    assert cache.get_seq_length() == 0
    cache.update(*states([[1]]), 0)
    assert cache.get_seq_length() == 1


@configs
def test_a_positive_crop_keeps_the_first_tokens(kind: str) -> None:
    cache, other = filled(kind=kind), filled(kind=kind)
    cache.crop(9)
    assert cache.get_seq_length() == 7
    cache.crop(3)
    other.crop(-4)
    same_text(cache, other)
    assert cache.get_seq_length() == 3
    assert_clear_behind(cache)
    late = TreeCache.from_cache(filled(kind="sliding", length=12).to_dynamic())
    late.crop(12)
    with pytest.raises(ValueError, match=r"crop\(9\).*forgotten its first 8 tokens"):
        late.crop(9)


@everywhere
def test_copies_and_pickles_are_caches_of_their_own(storage: str, buffers: str) -> None:
    cache = filled(storage, buffers=buffers)
    pickled = io.BytesIO()
    pickle.dump(cache, pickled)
    pickled.seek(0)
    for other in (copy.deepcopy(cache), pickle.load(pickled)):
        assert other.memory_report().shared == 0, "buffers are not copied"
        same_text(other, cache)
        seen = [other.update(*states([[9], [8]]), layer) for layer in range(2)]
        assert cache.get_seq_length() == 7 and other.get_seq_length() == 8
        if storage != "dense" and buffers == "shared":
            assert seen[0][0].data_ptr() == seen[1][0].data_ptr(), "one buffer for all layers, in a copy too"


# --- to and from others --------------------------------------------------------------------------------------------


@everywhere
@configs
@pytest.mark.parametrize("length", [3, 12])
def test_from_a_dynamic_cache_and_back(storage: str, buffers: str, kind: str, length: int) -> None:
    other = DynamicCache(config=CONFIGS[kind])
    numbers = [[row * 100 + slot + 1 for slot in range(length)] for row in range(2)]
    for layer in range(2):
        other.update(*states(numbers), layer)
    cache = TreeCache.from_cache(other, storage=storage, buffers=buffers)
    back = cache.to_dynamic()
    assert type(back) is DynamicCache and [type(layer) for layer in back.layers] == [type(x) for x in other.layers]
    # Both go on alike, also where a window has forgotten its first tokens.
    for step in range(2):
        new = states([[7 + step], [9]])
        for layer in range(2):
            assert cache.get_mask_sizes(1, layer) == other.get_mask_sizes(1, layer) == back.get_mask_sizes(1, layer)
            shown, right, again = (c.update(*new, layer) for c in (cache, other, back))
            assert torch.equal(shown[0], rounded(storage, right[0])) and shown[0].shape == again[0].shape
            if storage == "dense":
                assert torch.equal(shown[1], right[1]) and torch.equal(again[1], right[1])
    assert all(vars(a).keys() == vars(b).keys() for a, b in zip(back.layers, other.layers, strict=True))
    if kind == "sliding" and length == 12:
        with pytest.raises(ValueError, match="forgotten its first 8 tokens"):
            cache.crop(-3)
    else:
        cache.crop(-3)
        assert cache.get_seq_length() == length - 1


def test_from_and_to_static_caches() -> None:
    other = StaticCache(config=FULL, max_cache_len=20)
    numbers = [[1, 2, 3, 4]]
    for layer in range(2):
        other.update(*states(numbers), layer)
    cache = TreeCache.from_cache(other)
    assert torch.equal(cache.layers[1].keys, states(numbers)[0])
    again = cache.to_static(FULL, 9)
    assert type(again) is StaticCache and int(again.get_seq_length()) == 4
    assert torch.equal(again.layers[0].values[:, :, :4], states(numbers)[1]) and again.layers[0].max_cache_len == 9
    with pytest.raises(UnsupportedCallError, match="layer 0 has 4 tokens, and the room is 3; use to_dynamic"):
        cache.to_static(FULL, 3)


@pytest.mark.parametrize("length", [3, 9])
def test_from_static_windows(length: int) -> None:
    other, right = StaticCache(config=SLIDING, max_cache_len=20), DynamicCache(config=SLIDING)
    numbers = [list(range(1, length + 1))]
    for layer in range(2):
        other.update(*states(numbers), layer)
        right.update(*states(numbers), layer)
    with pytest.raises(UnsupportedCallError, match="pass config too"):
        TreeCache.from_cache(other)
    cache = TreeCache.from_cache(other, SLIDING)
    for layer in range(2):
        assert cache.get_mask_sizes(1, layer) == right.get_mask_sizes(1, layer)
        found, wanted = (c.update(*states([[77]]), layer) for c in (cache, right))
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    if length > WINDOW:
        with pytest.raises(UnsupportedCallError, match="the first 4 of them forgotten"):
            cache.to_static(SLIDING, 30)


@pytest.mark.skipif(not _compat.FP8_LAYERS, reason="this transformers has no fp8 cache")
def test_from_and_to_quantized_caches() -> None:
    other = QuantizedCache("fp8", FULL)
    for layer in range(2):
        other.update(*states([[1, 2, 3]]), layer)
        other.update(*states([[4]]), layer)
    cache = TreeCache.from_cache(other)
    assert torch.equal(cache.layers[0].keys, _compat.dequantized(other.layers[0])[0])
    again = cache.to_quantized(FULL, "fp8")
    assert type(again) is QuantizedCache and again.get_seq_length() == 4


@everywhere
def test_codes_of_the_same_storage_are_taken_as_they_are(storage: str, buffers: str) -> None:
    cache = filled(storage, buffers=buffers)
    for to in ("shared", "per_layer"):
        other = TreeCache.from_cache(cache, storage=storage, buffers=to)
        same_text(cache, other)
        held = [layer.held()["keys"] for layer in (cache.layers[0], other.layers[0])]
        assert all(torch.equal(held[0][name].float(), held[1][name].float()) for name in held[0])
        other.update(*states([[1], [2]]), 0)
        assert other.get_seq_length() == 8 and cache.get_seq_length() == 7


@everywhere
@configs
def test_a_file_gives_the_cache_back(storage: str, buffers: str, kind: str, tmp_path: Path) -> None:
    cache = TreeCache.from_cache(filled(kind=kind, length=12).to_dynamic(), storage=storage, buffers=buffers)
    path = cache.save(tmp_path / "deep" / "chat.safetensors")
    other = TreeCache.load(path)
    assert (other.storage, other.buffers) == (storage, buffers)
    same_text(cache, other)
    for layer in range(2):
        assert other.get_mask_sizes(3, layer) == cache.get_mask_sizes(3, layer)
        assert torch.equal(*(c.update(*states([[5], [6]]), layer)[0].clone() for c in (cache, other)))
    if storage != "dense" and kind == "full":
        assert path.stat().st_size < 0.5 * filled(length=12).save(tmp_path / "dense").stat().st_size
    empty = TreeCache.load(TreeCache(CONFIGS[kind], storage=storage).save(tmp_path / "empty"))
    assert empty.get_seq_length() == 0 and len(empty.layers) == 2


def test_other_files_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(ValueError, match=r"no file of TreeCache\.save"):
        TreeCache.load(tmp_path / "other")
    for about in ('{"version": 2, "storage": "int8"}', '{"version": 1, "storage": "int3"}'):
        save_file({"a": torch.zeros(1)}, tmp_path / "newer", metadata={"hf_treespec.tree_cache": about})
        with pytest.raises(ValueError, match="upgrade hf-treespec"):
            TreeCache.load(tmp_path / "newer")


@pytest.mark.parametrize(
    "about",
    [
        "no json",
        "[1]",
        "{}",
        '{"version": 1, "storage": "int8", "layers": []}',
        '{"version": 1, "storage": "int8", "buffers": "odd", "layers": []}',
        '{"version": 1, "storage": "int8", "buffers": "shared", "layers": [{}]}',
        '{"version": 1, "storage": "int8", "buffers": "shared", "layers": [{"window": "a"}]}',
        '{"version": 1, "storage": "int8", "buffers": "shared", "layers": [{"window": null, "length": 4}]}',
        '{"version": 1, "storage": "int8", "buffers": "shared", "layers": [{"window": null, "length": 4, '
        '"dtypes": {"keys": "float32", "values": "float32"}}]}',
    ],
)
def test_damaged_files_are_named(about: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"layers.0.odd.codes": torch.zeros(1)}, tmp_path / "bad", metadata={"hf_treespec.tree_cache": about})
    with pytest.raises(ValueError, match="bad: damaged metadata of a TreeCache"):
        TreeCache.load(tmp_path / "bad")


@pytest.mark.parametrize(("name", "value"), [("storage", "int4"), ("buffers", "none")])
def test_wrong_choices_are_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"TreeCache\({name}='{value}'\): expected one of"):
        TreeCache(FULL, **{name: value})


def test_caches_and_configs_without_plain_layers_are_refused() -> None:
    from transformers import Qwen3NextConfig

    with pytest.raises(UnsupportedCallError, match="keep more than keys and values"):
        TreeCache(Qwen3NextConfig(**_SIZES))
    with pytest.raises(UnsupportedCallError, match="has no layers of keys and values"):
        TreeCache.from_cache(DynamicCache())
    pair = EncoderDecoderCache(DynamicCache(config=T5Config()), DynamicCache(config=T5Config()))
    with pytest.raises(UnsupportedCallError, match="EncoderDecoderCache"):
        TreeCache.from_cache(pair)


def test_layers_share_the_index_tensors_of_a_round_that_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(length=3)
    rows = RowCache(cache, [3, 3])
    with rows.transaction() as transaction:
        for layer in range(2):
            cache.update(*states([[1, 2], [3, 4]]), layer)
        transaction.commit([[0, 1], [0]])
    made: list[int] = []
    index = moves._index
    monkeypatch.setattr(moves, "_index", lambda *args: made.append(1) or index(*args))
    moves.behind.cache_clear()
    moves._between.cache_clear()
    with rows.transaction():
        for layer in range(2):
            cache.update(*states([[1, 2, 3], [4, 5, 6]]), layer)
    assert len(made) == 2, "one for what is written, one for what is cleared"
    assert rows.lengths == [5, 4]
    assert_clear_behind(cache)
