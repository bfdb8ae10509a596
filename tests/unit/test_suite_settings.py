"""The settings in tests/conftest.py do what they say: parts of the slow tests, deprecations that fail."""

from __future__ import annotations

import logging
import warnings
from types import ModuleType

import pytest


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> ModuleType:
    (module,) = (plugin for plugin in request.config.pluginmanager.get_plugins() if hasattr(plugin, "in_part"))
    return module


def test_parts_cover_every_test_once_and_evenly(settings: ModuleType) -> None:
    tests = [f"tests/unit/test_x.py::test_y[{number}]" for number in range(700)]
    parts = [[test for test in tests if settings.in_part(test, part, 7)] for part in range(7)]
    assert sorted(test for part in parts for test in part) == sorted(tests)
    assert all(70 < len(part) < 130 for part in parts)


def test_part_of_a_test_never_changes(settings: ModuleType) -> None:
    assert [settings.in_part("tests/a.py::test_b", part, 7) for part in range(7)].index(True) == 6


@pytest.mark.parametrize("text", ["7/7", "1", "-1/7", "1/0", "a/b", ""])
def test_bad_parts_are_refused(settings: ModuleType, text: str) -> None:
    with pytest.raises(pytest.UsageError, match="expected K/N"):
        settings.parse_part(text)


def call_as(module: str, code: str) -> None:
    """Run code in a namespace that carries the module's name, as its own lines would be seen."""
    exec(code, {"__name__": module, "logging": logging, "warnings": warnings})


LOGGED = "logging.getLogger('transformers.cache').warning('`a` is deprecated, use `b`')"
WARNED = "warnings.warn('a is deprecated', DeprecationWarning, stacklevel=1)"


def test_logged_deprecation_of_our_use_fails() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"hf_treespec\.engine uses something deprecated"):
        call_as("hf_treespec.engine", LOGGED)


def test_logged_deprecation_of_others_passes() -> None:
    call_as("tests.something", LOGGED)
    call_as("hf_treespec.engine", "logging.getLogger('transformers.cache').warning('hello')")


def test_warned_deprecation_of_our_use_fails() -> None:
    with pytest.raises(DeprecationWarning):
        call_as("hf_treespec.engine", WARNED)


def test_warned_deprecation_of_others_passes() -> None:
    # Recorded under the filters of the suite.
    with warnings.catch_warnings(record=True) as caught:
        call_as("elsewhere", WARNED)
    assert [str(warning.message) for warning in caught] == ["a is deprecated"]
