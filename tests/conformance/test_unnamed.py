"""Models that nobody has named get their route, or a refusal, by what they do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from conformance.unnamed import unnamed
from conformance.zoo import checks
from conformance.zoo.weights import is_lively
from hf_treespec import enable, is_supported
from hf_treespec.routes import Route
from hf_treespec.twin import enliven

SWITCHES: dict[str, tuple[dict[str, Any], Route]] = {
    "attention by the registry": ({}, Route.MASK),
    "attention with a mask of its own": ({"masks": "own"}, Route.PATHS),
    "positions counted by the cache": ({"told": False}, Route.PATHS),
    "convolution in a cache layer": ({"conv": "layer"}, Route.PATHS),
    "convolution on the cache object": ({"conv": "cache"}, Route.REFUSE),
    "convolution on the module": ({"conv": "module"}, Route.REFUSE),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_route_by_what_it_does(name: str) -> None:
    switches, route = SWITCHES[name]
    model = unnamed(**switches)
    enliven(model, 0)
    assert is_lively(model)
    support = is_supported(model)
    assert support.route is route, support
    if not support.ok:
        assert support.reason
        return
    tree_model = enable(copy.deepcopy(model))
    found = checks.Finding(name, str(route))
    for number, (width, batch, sampled) in enumerate([(5, 1, False), (13, 3, False), (13, 1, True), (5, 3, True)]):
        cell = checks.Cell("sdpa", width, batch, sampled)
        checks._check_cell(model, tree_model, cell, number, support.route, found)
    assert found.calls == 8 and found.accepted and not found.plain and not found.refused_calls
    assert torch.is_grad_enabled()
