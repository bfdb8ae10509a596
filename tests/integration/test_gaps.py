"""Models that do not look past padding behind their cache: rows of a batch grow in step."""

from __future__ import annotations

import copy

import pytest

from conformance.zoo import checks, models
from hf_treespec import enable, is_supported
from hf_treespec.api.gaps import heeds_gaps

# In some releases Git cannot decode behind its own cache, and is refused for that.
git_decodes = pytest.mark.skipif(not is_supported(models.build("git")).ok, reason="Git is refused in this release")
FAMILIES = [("llama", True), ("gpt2", True), ("mistral", True), pytest.param("git", False, marks=git_decodes)]


@pytest.mark.parametrize(("name", "heeds"), FAMILIES)
def test_who_looks_past_a_gap(name: str, heeds: bool) -> None:
    model = models.build(name)
    assert heeds_gaps(model) is heeds
    assert ("in step" in is_supported(model).reason) is not heeds


@git_decodes
@pytest.mark.parametrize("sampled", [False, True], ids=["t0", "t0.9"])
@pytest.mark.parametrize("number", range(4))
def test_rows_that_accept_unequally(number: int, sampled: bool) -> None:
    model = models.build("git")
    found = checks.Finding("git", "")
    cell = checks.Cell("eager", 5, 3, sampled)
    checks._check_cell(model, enable(copy.deepcopy(model)), cell, number, is_supported(model).route, found)
    assert found.calls == 2 and found.accepted
