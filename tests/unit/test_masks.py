"""Tree masks against a brute-force mask, and the registry that they go through."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.masking_utils import (
    AttentionMaskInterface,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from hf_treespec.attention import TreeContext, tree_forward_context, tree_masks
from hf_treespec.errors import TreeSpecError
from hf_treespec.tree import TokenTree, layout_trees

NAMES = ("sdpa", "eager")


def registered() -> dict[str, Any]:
    return {name: AttentionMaskInterface()[name] for name in NAMES}


@pytest.fixture(autouse=True)
def _registry_is_left_as_it_was() -> Iterator[None]:
    before = registered()
    yield
    for name, function in before.items():
        found = AttentionMaskInterface()[name]
        AttentionMaskInterface.register(name, function)
        assert found is function


@dataclass
class Scene:
    """A committed prefix with left padding, and a tree per row, read in one forward or level by level."""

    base: int
    padding: list[int]
    trees: list[TokenTree]
    queries: int  # nodes of the last forward
    shorter: list[int] | None = None  # rows whose text, and the tree behind it, ends so much earlier

    @property
    def slots(self) -> int:
        return max(map(len, self.trees))

    @property
    def context(self) -> TreeContext:
        layout = layout_trees(self.trees)
        return TreeContext(
            base=self.base,
            depths_BQ=layout.depths_BN[:, -self.queries :],
            slot_depths_BM=layout.depths_BN,
            visible_BQM=layout.ancestors_BNN()[:, -self.queries :],
            shorter_B=None if self.shorter is None else torch.tensor(self.shorter),
        )

    @property
    def attention_mask(self) -> Tensor | None:
        if not any(self.padding):
            return None
        width = self.base + self.slots
        return torch.tensor([[slot >= pad for slot in range(width)] for pad in self.padding])

    def brute(self, may: Callable[[int, int, int], bool], offset: int, keys: int) -> list[list[list[bool]]]:
        """`may(row, query position, key position)` is what the layer alone would allow."""
        out = []
        for row, tree in enumerate(self.trees):
            nodes = range(self.slots)[-self.queries :]
            out.append(
                [[self.sees(row, tree, node, key, may) for key in range(offset, offset + keys)] for node in nodes]
            )
        return out

    def sees(self, row: int, tree: TokenTree, node: int, key: int, may: Callable[[int, int, int], bool]) -> bool:
        depth = tree.depths[node] if node < len(tree) else 0
        base = self.base - (0 if self.shorter is None else self.shorter[row])
        if key < base:
            return key >= self.padding[row] and may(row, base + depth, key)
        slot = key - base
        if slot >= self.slots:  # spare room of a cache behind the tree
            return False
        if node >= len(tree):
            return slot == node and may(row, base, base)
        above = node
        while above > slot:
            above = tree.parents[above]
        return above == slot and may(row, base + depth, base + tree.depths[slot])


def random_scene(seed: int) -> Scene:
    rng = random.Random(seed)
    batch, base = rng.randrange(1, 4), rng.randrange(1, 12)
    trees = []
    for _ in range(batch):
        nodes = rng.randrange(1, 9)
        parents = (-1, *(rng.randrange(max(0, n - rng.choice((1, 9))), n) for n in range(1, nodes)))
        trees.append(TokenTree(tuple(range(nodes)), parents))
    padding = [rng.randrange(base) if rng.random() < 0.5 else 0 for _ in range(batch)]
    slots = max(map(len, trees))
    shorter = [rng.randrange(base - pad) for pad in padding] if rng.random() < 0.5 else None
    return Scene(base, padding, trees, rng.randrange(1, slots + 1), shorter)


def layer_kinds(padding: list[int]) -> dict[str, tuple[Any, Callable[[int, int, int], bool]]]:
    """Mask functions of transformers next to what they mean."""
    return {
        "full": (causal_mask_function, lambda row, q, k: k <= q),
        "sliding": (sliding_window_causal_mask_function(4), lambda row, q, k: q - 4 < k <= q),
        "chunked": (
            chunked_causal_mask_function(5, torch.tensor(padding)),
            lambda row, q, k: k <= q and (q - padding[row]) // 5 == (k - padding[row]) // 5,
        ),
    }


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(("full", "sliding", "chunked")),
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    skip=st.integers(0, 8),
    spare=st.integers(0, 3),
)
def test_mask_is_the_brute_force_mask(
    seed: int, kind: str, name: str, dtype: torch.dtype, skip: int, spare: int
) -> None:
    scene = random_scene(seed)
    predicate, may = layer_kinds(scene.padding)[kind]
    offset = min(skip, scene.base - 1)  # a sliding cache begins later
    keys = scene.base + scene.slots + spare - offset
    with tree_masks(), tree_forward_context(scene.context):
        mask = AttentionMaskInterface()[name](
            batch_size=len(scene.trees),
            q_length=scene.queries,
            kv_length=keys,
            q_offset=scene.base,
            kv_offset=offset,
            mask_function=predicate,
            attention_mask=scene.attention_mask,
            dtype=dtype,
            device="cpu",
            allow_is_causal_skip=True,
            local_size=4,
        )
    allowed = torch.tensor(scene.brute(may, offset, keys))[:, None]
    if name == "sdpa":
        assert mask.dtype == torch.bool and torch.equal(mask, allowed)
    else:
        # Eager attention adds the mask: a bool one would add 0 and 1.
        assert mask.dtype == dtype
        assert torch.equal(mask, torch.where(allowed, 0.0, torch.finfo(dtype).min).to(dtype))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padding", [[0, 0], [0, 3]])
def test_a_chain_gets_the_mask_of_ordinary_decoding(name: str, padding: list[int]) -> None:
    scene = Scene(7, padding, [TokenTree.chain(range(4))] * 2, 4)
    request: dict[str, Any] = {
        "batch_size": 2, "q_length": 4, "kv_length": 8, "q_offset": 7, "kv_offset": 3, "dtype": torch.float32,
        "mask_function": sliding_window_causal_mask_function(5), "attention_mask": scene.attention_mask,
    }  # fmt: skip
    wanted = AttentionMaskInterface()[name](**{**request, "allow_is_causal_skip": False})
    with tree_masks(), tree_forward_context(scene.context):
        found = AttentionMaskInterface()[name](**request)
    assert torch.equal(found, wanted)


CONTEXT = Scene(3, [0], [TokenTree.chain((1, 2))], 2).context
REQUEST: dict[str, Any] = {"batch_size": 1, "q_length": 2, "kv_length": 5, "q_offset": 3, "dtype": torch.float32}
REQUEST["allow_is_causal_skip"] = False  # else plain decoding may get None


def ask(name: str, **changes: Any) -> Tensor:
    return AttentionMaskInterface()[name](**{**REQUEST, "mask_function": causal_mask_function, **changes})


@pytest.mark.parametrize("name", NAMES)
def test_without_a_tree_the_call_falls_through(name: str) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    original = AttentionMaskInterface()[name]
    AttentionMaskInterface.register(name, lambda *args, **kwargs: calls.append((args, kwargs)) or "theirs")
    try:
        with tree_masks():
            assert AttentionMaskInterface()[name](1, key=2) == "theirs"
            with tree_forward_context(CONTEXT), tree_forward_context(None):
                assert AttentionMaskInterface()[name](3) == "theirs"
            with tree_forward_context(CONTEXT):
                assert isinstance(ask(name), Tensor)
            assert AttentionMaskInterface()[name](4) == "theirs"
    finally:
        AttentionMaskInterface.register(name, original)
    assert calls == [((1,), {"key": 2}), ((3,), {}), ((4,), {})]


def test_the_tree_ends_with_its_context_after_an_exception_too() -> None:
    with tree_masks():
        for error in (None, KeyError):
            with ExitStack() as stack:
                if error is not None:
                    stack.enter_context(pytest.raises(error))
                stack.enter_context(tree_forward_context(CONTEXT))
                with pytest.raises(TreeSpecError):
                    ask("sdpa", batch_size=2, q_length=1)
                if error is not None:
                    raise error
            assert ask("sdpa", batch_size=2, q_length=1).shape == (2, 1, 1, 5)


def test_another_thread_sees_no_tree() -> None:
    found: list[Any] = []
    with tree_masks(), tree_forward_context(CONTEXT):
        thread = threading.Thread(target=lambda: found.append(ask("eager", batch_size=4, q_length=1)))
        thread.start()
        thread.join()
    assert len(found) == 1 and found[0].shape == (4, 1, 1, 5)


def test_the_registry_is_wrapped_once_and_given_back_by_the_last_user() -> None:
    before = registered()
    with tree_masks():
        inner = registered()
        assert all(inner[name] is not before[name] for name in NAMES)
        with pytest.raises(KeyError), tree_masks():
            assert registered() == inner
            raise KeyError
        assert registered() == inner
        with tree_forward_context(CONTEXT):
            assert isinstance(ask("sdpa"), Tensor)
    assert all(registered()[name] is before[name] for name in NAMES)


def test_who_registers_meanwhile_keeps_the_place() -> None:
    before = registered()

    def theirs(*args: Any, **kwargs: Any) -> str:
        return "theirs"

    try:
        with tree_masks():
            AttentionMaskInterface.register("eager", theirs)
        assert registered() == {"sdpa": before["sdpa"], "eager": theirs}
        # The next user wraps what it finds then.
        with tree_masks():
            assert AttentionMaskInterface()["eager"]() == "theirs"
            assert registered()["eager"] is not theirs
        assert registered()["eager"] is theirs
    finally:
        AttentionMaskInterface.register("eager", before["eager"])


@pytest.mark.parametrize("wrong", [{"batch_size": 2}, {"q_length": 3}, {"q_length": 1}])
@pytest.mark.parametrize("name", NAMES)
def test_a_request_for_other_sizes_than_the_tree_is_refused(name: str, wrong: dict[str, int]) -> None:
    with (
        tree_masks(),
        tree_forward_context(CONTEXT),
        pytest.raises(TreeSpecError, match="during a tree forward of batch 1 and 2 nodes"),
    ):
        ask(name, **wrong)


def test_positional_arguments_are_refused_during_a_tree() -> None:
    with tree_masks(), tree_forward_context(CONTEXT), pytest.raises(TreeSpecError, match="1 positional arguments"):
        AttentionMaskInterface()["sdpa"](1, q_length=2)
