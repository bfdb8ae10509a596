"""Functions that make a bias by distance: found by name, corrected by depth."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_treespec.attention import TreeContext, has_bias_functions, tree_forward_context
from hf_treespec.attention.biases import bias_functions, biases_by_depth
from hf_treespec.errors import TreeSpecError

SLOPES = torch.tensor([0.5, 0.25])


class Method(nn.Module):
    """Bloom's way: a bias over the keys of the mask, rows and heads in one axis."""

    def build_alibi_tensor(self, mask: Tensor) -> Tensor:
        place = ((mask.cumsum(-1) - 1) * mask)[:, None]
        return (SLOPES[:, None] * place).reshape(-1, 1, mask.shape[1])

    def get_alibi_slopes(self) -> Tensor:
        return SLOPES


class Table(nn.Module):
    """MPT's way: a table for the longest text, its end taken."""

    def build_mpt_alibi_tensor(self, size: int) -> Tensor:
        return SLOPES[:, None, None] * torch.arange(1 - size, 1)


def tree(*depths: int, keys: int, base: int = 4) -> TreeContext:
    both = torch.tensor([depths, depths])
    eye = torch.eye(len(depths), dtype=torch.bool).expand(2, -1, -1)
    return TreeContext(base=base, depths_BQ=both, slot_depths_BM=both, visible_BQM=eye, keys=keys)


def test_functions_are_found_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Method())
    assert bias_functions(model) == [(model[1], "build_alibi_tensor")]
    assert not has_bias_functions(nn.Linear(2, 2))


def test_a_method_counts_by_depth_under_a_tree_only() -> None:
    model = Method()
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :2] = 0
    plain = model.build_alibi_tensor(mask)
    with biases_by_depth(model):
        assert torch.equal(model.build_alibi_tensor(mask), plain)
        with tree_forward_context(tree(0, 1, 1, keys=7)), biases_by_depth(model):
            bias = model.build_alibi_tensor(mask).view(2, 2, 7)
    assert (bias[0, 0] / 0.5).tolist() == [0, 0, 0, 1, 2, 3, 3]
    assert (bias[1, 1] / 0.25).tolist() == [0, 1, 2, 3, 4, 5, 5]
    assert "build_alibi_tensor" not in vars(model)


def test_a_table_is_cut_to_the_keys() -> None:
    model = Table()
    with biases_by_depth(model), tree_forward_context(tree(0, 1, 1, 2, keys=10)):
        bias = model.build_mpt_alibi_tensor(16)
    # Ten keys, of which two are spare; the tree has slots 4 to 7.
    assert (bias[0, 0] / 0.5).tolist() == [-9, -8, -7, -6, -5, -4, -4, -3, -1, 0]


def test_a_function_beside_the_class() -> None:
    file = types.ModuleType("a_modeling_file")
    code = """
from torch import nn
def build_alibi_tensor(keys):
    import torch
    return torch.arange(keys)[None, None] * 1.0
class Model(nn.Module):
    def forward(self, keys):
        return build_alibi_tensor(keys)
"""
    sys.modules[file.__name__] = file
    try:
        exec(code, vars(file))
        model, original = file.Model(), file.build_alibi_tensor
        with biases_by_depth(model), tree_forward_context(tree(0, 1, 1, keys=7)):
            assert model(7)[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 5]
        assert file.build_alibi_tensor is original

        def somebody_elses(keys: Any) -> Tensor:
            return original(keys)

        with biases_by_depth(model):
            file.build_alibi_tensor = somebody_elses
        assert file.build_alibi_tensor is somebody_elses
    finally:
        del sys.modules[file.__name__]


def test_a_bias_that_is_too_short_is_refused() -> None:
    model = Table()
    refused = pytest.raises(TreeSpecError, match=r"bias by distance of shape \(2, 1, 5\) .* over 6 keys")
    with biases_by_depth(model), tree_forward_context(tree(0, 1, keys=6)), refused:
        model.build_mpt_alibi_tensor(5)
