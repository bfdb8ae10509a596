"""Models that do not look past padding behind their cache: rows of a batch grow in step."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from conformance.zoo import checks, models, results
from conformance.zoo.expected import REFUSED_IN
from hf_treespec import _compat, enable, is_supported
from hf_treespec.api.gaps import heeds_gaps

git = pytest.mark.skipif("git" in REFUSED_IN.get(results.release(), {}), reason="refused in this release")


@pytest.mark.parametrize(
    ("name", "heeds"),
    [("llama", True), ("gpt2", True), ("mistral", True), pytest.param("git", False, marks=git)],
)
def test_who_looks_past_a_gap(name: str, heeds: bool) -> None:
    model = models.build(name)
    assert heeds_gaps(model) is heeds
    assert ("in step" in is_supported(model).reason) is not heeds


def test_the_attention_is_that_of_trees() -> None:
    """One that takes no tree masks is not run: it may not run here at all, and calls with trees replace it."""

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("not on this device")

    model = models.build("llama")
    with _compat.custom_attention(model, "hf_treespec_broken", broken, "sdpa"):
        assert heeds_gaps(model)
        assert _compat.attention_implementation(model) == "hf_treespec_broken"


@git
@pytest.mark.parametrize("sampled", [False, True], ids=["t0", "t0.9"])
@pytest.mark.parametrize("number", range(4))
def test_rows_that_accept_unequally(number: int, sampled: bool) -> None:
    model = models.build("git")
    found = checks.Finding("git", "")
    cell = checks.Cell("eager", 5, 3, sampled)
    checks._check_cell(model, enable(copy.deepcopy(model)), cell, number, is_supported(model).route, found)
    assert found.calls == 2 and found.accepted
