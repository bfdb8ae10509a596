"""Every causal-LM model type of the installed transformers; docs/models.md says what came of it."""

from __future__ import annotations

import pytest

from conformance.zoo import checks, models, results
from conformance.zoo.core import CORE
from conformance.zoo.expected import REFUSED, REFUSED_IN
from conformance.zoo.overrides import DULL, KINDS, UNBUILT, VARIANTS
from conformance.zoo.page import PAGE, page
from hf_treespec.twin import OVERRIDES

TYPES = models.types()
HERE = [name for name in CORE if name in TYPES]


def assert_expected(found: checks.Finding) -> None:
    print("\n".join(found.excused))
    refused = {**REFUSED, **REFUSED_IN.get(results.release(), {})}
    wanted = "refused" if models.base_type(found.name) in refused else "equal"
    assert found.verdict == wanted, found
    assert found.reason or wanted == "equal"
    assert all(why.startswith("as its own assistant") for why in found.refused_calls), found.refused_calls
    recorded = results.read(results.release()).get(found.name)
    if recorded is not None:
        assert (recorded["route"], recorded["verdict"]) == (found.route, found.verdict), "run `make conformance`"


@pytest.mark.parametrize("name", HERE)
def test_core(name: str) -> None:
    assert_expected(checks.check(name, whole=False))


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_model_type(name: str) -> None:
    assert_expected(checks.check(name))


def test_page_is_that_of_the_results() -> None:
    assert PAGE.read_text() == page(), "run `make conformance`"


def test_page_names_every_type() -> None:
    if results.release() not in results.RELEASES:
        pytest.skip(f"the page describes {results.RELEASES}")
    assert set(results.read(results.release())) == set(TYPES), "run `make conformance`"
    text = PAGE.read_text()
    assert all(f"| {name} |" in text for name in TYPES)
    assert all(f"- {name}: " in text for name in models.unbuilt())


def test_tables_name_types() -> None:
    known = set(models.CAUSAL_TYPES)
    if results.release() == results.RELEASES[0]:
        assert {*REFUSED, *KINDS, *OVERRIDES, *UNBUILT, *DULL} <= known
        assert set(CORE) <= set(TYPES)
    assert {base for base, _, _ in VARIANTS.values()} <= known
    assert all(reason for _, reason in (*KINDS.values(), *OVERRIDES.values()))
