"""Modules that make embeddings of positions: found by what their outputs depend on, corrected by depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_treespec.attention import TreeContext, position_modules, recorded_calls, tree_forward_context
from hf_treespec.attention.by_slots import counted_by_depth
from hf_treespec.attention.sites import positions_by_depth
from hf_treespec.errors import TreeSpecError
from hf_treespec.routes import Route

DEPTHS = (0, 1, 2, 1, 2)


class Angles(nn.Module):
    def forward(self, past: int, width: int) -> tuple[Tensor, Tensor]:
        angle = torch.arange(past, past + width)[None, :, None] * torch.tensor([0.1, 0.3])
        return angle.cos(), angle.sin()


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Angles()
        self.scale = nn.Linear(2, 2)

    def forward(self, past: int, width: int) -> Tensor:
        return self.scale(self.inner(past, width)[0])


class Model(nn.Module):
    """Tokens plus positions of several makes, behind `past` slots."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 2)
        self.table = nn.Embedding(30, 2)
        self.angles = Angles()
        self.wrapped = Wrapped()
        self.mixed = nn.Linear(2, 2)

    def forward(self, ids: Tensor, past: int) -> Tensor:
        width = ids.shape[1]
        where = self.table(torch.arange(past, past + width))
        cos, _ = self.angles(past, width)
        # Linear layers that read positions, or tokens and positions, make none.
        return self.mixed(self.words(ids) * cos + where + self.wrapped(past, width))


def record(model: nn.Module, ids: tuple[int, ...], past: int) -> Any:
    with recorded_calls(model, len(ids)) as calls, torch.no_grad():
        model(torch.tensor([ids]), past)
    return calls


def found(model: nn.Module) -> tuple[str, ...]:
    return position_modules(
        *(record(model, ids, past) for ids, past in (((1, 2, 3), 4), ((5, 2, 6), 4), ((1, 2, 3), 7)))
    )


def tree() -> TreeContext:
    depths = torch.tensor([DEPTHS])
    return TreeContext(
        base=4, depths_BQ=depths, slot_depths_BM=depths, visible_BQM=torch.eye(5, dtype=torch.bool)[None]
    )


def test_the_innermost_makers_are_found() -> None:
    assert found(Model()) == ("table", "angles", "wrapped.inner")


def test_a_maker_that_reads_tokens_too_is_none() -> None:
    class Skipping(Model):
        """Positions that do not count padding, id 2."""

        def forward(self, ids: Tensor, past: int) -> Tensor:
            return self.words(ids) + self.table(ids.ne(5).cumsum(-1) + past)

    assert found(Skipping()) == ()


def test_a_module_with_a_second_task_is_none() -> None:
    class Tied(Model):
        def forward(self, ids: Tensor, past: int) -> Tensor:
            return self.table(ids) + self.table(torch.arange(past, past + ids.shape[1]))

    assert found(Tied()) == ()


def test_nothing_is_left_on_the_model() -> None:
    model = Model()
    found(model)
    assert not any(module._forward_hooks for module in model.modules())


@torch.no_grad()
def test_outputs_are_taken_by_depth_under_a_tree_only() -> None:
    model, ids = Model(), torch.tensor([[1, 2, 3, 4, 5]])
    plain = model(ids, 4)
    names = found(model)
    # One forward a token, as deep as its node lies.
    wanted = torch.cat([model(ids[:, i : i + 1], 4 + depth) for i, depth in enumerate(DEPTHS)], 1)
    assert not torch.allclose(wanted, plain)
    with positions_by_depth(model, names):
        assert torch.equal(model(ids, 4), plain)
        with tree_forward_context(tree()):
            torch.testing.assert_close(model(ids, 4), wanted)
            # A second call over the same model does not take depths of depths.
            with positions_by_depth(model, names):
                torch.testing.assert_close(model(ids, 4), wanted)
            torch.testing.assert_close(model(ids, 4), wanted)
    assert not any(module._forward_hooks for module in model.modules())


@torch.no_grad()
def test_a_tree_in_several_forwards() -> None:
    model, whole = Model(), tree()
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    with positions_by_depth(model, found(model)):
        with tree_forward_context(whole):
            wanted = model(ids, 4)
        parts, seen = [], {}
        for first, last in ((0, 2), (2, 3), (3, 5)):
            depths = whole.depths_BQ
            context = TreeContext(
                4, depths[:, first:last], depths[:, :last], torch.ones(1, last - first, last) > 0, seen=seen
            )
            with tree_forward_context(context):
                parts.append(model(ids[:, first:last], 4 + first))
    torch.testing.assert_close(torch.cat(parts, 1), wanted)


def test_a_later_forward_alone_is_refused() -> None:
    model, whole = Model(), tree()
    later = TreeContext(
        base=4,
        depths_BQ=whole.depths_BQ[:, 3:],
        slot_depths_BM=whole.depths_BQ,
        visible_BQM=torch.ones(1, 2, 5).bool(),
    )
    refused = pytest.raises(TreeSpecError, match="not seen in an earlier forward")
    with positions_by_depth(model, ["table"]), tree_forward_context(later), refused:
        model(torch.tensor([[1, 2]]), 7)
    with pytest.raises(TreeSpecError, match="no module is known"):
        counted_by_depth(model, Route.POSITION_HOOK, ())
