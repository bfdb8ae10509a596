"""The public surface is frozen: to change it, change it here too, and say so in the changelog."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import hf_treespec
from hf_treespec import TreeConfig, TreeStats


def test_public_names() -> None:
    assert sorted(hf_treespec.__all__) == [
        "AutoTreeSpecModelForCausalLM",
        "Calibration",
        "LayerSkip",
        "Support",
        "TreeCache",
        "TreeConfig",
        "TreeConfigError",
        "TreeSpecError",
        "TreeSpecWarning",
        "TreeStats",
        "UnsupportedCallError",
        "UnsupportedModelError",
        "__version__",
        "calibrate",
        "disable",
        "enable",
        "find_layer_skip",
        "install",
        "is_supported",
        "load_draft",
        "save_draft",
        "uninstall",
    ]
    assert all(hasattr(hf_treespec, name) for name in hf_treespec.__all__)
    assert set(hf_treespec.__all__) <= set(dir(hf_treespec))
    with pytest.raises(AttributeError, match="'hf_treespec' has no attribute 'enabel'"):
        hf_treespec.enabel  # noqa: B018


def test_fields_of_a_config_in_order() -> None:
    assert list(inspect.signature(TreeConfig).parameters) == [
        "draft",
        "max_nodes",
        "max_depth",
        "max_children",
        "growth",
        "verification",
        "random_children",
        "kv_cache",
        "attention",
        "seed",
        "fallback",
        "on_stateful_processor",
        "draft_options",
        "depth_control",
        "depth_options",
    ]


def test_keys_of_the_statistics() -> None:
    assert list(TreeStats().to_dict()) == [
        "draft",
        "verification",
        "lossless",
        "batch_size",
        "prompt_tokens",
        "new_tokens",
        "rounds",
        "row_rounds",
        "round_tokens",
        "drafted_nodes",
        "expected_accepted",
        "accepted_by_depth",
        "drafted_by_depth",
        "drafted_by_source",
        "accepted_by_source",
        "plain_rounds",
        "fallback_rounds",
        "prefill_seconds",
        "target_seconds",
        "draft_seconds",
        "draft_forward_seconds",
        "verify_seconds",
        "commit_seconds",
        "total_seconds",
        "tokens_per_round",
        "acceptance_rate",
        "overhead_fraction",
        "tokens_per_second",
    ]


def test_support_is_a_triple() -> None:
    assert hf_treespec.Support._fields == ("ok", "route", "reason")


@pytest.mark.parametrize(
    ("name", "parents"),
    [
        ("TreeConfigError", (hf_treespec.TreeSpecError, ValueError)),
        ("UnsupportedCallError", (hf_treespec.TreeSpecError, ValueError)),
        ("UnsupportedModelError", (hf_treespec.TreeSpecError, NotImplementedError)),
        ("TreeSpecWarning", (UserWarning,)),
    ],
)
def test_errors_are_the_builtins_that_callers_expect(name: str, parents: tuple[type, ...]) -> None:
    assert all(issubclass(getattr(hf_treespec, name), parent) for parent in parents)


def test_every_field_of_a_config_is_documented() -> None:
    documented = TreeConfig.__doc__ or ""
    for field in dataclasses.fields(TreeConfig):
        assert f"\n        {field.name}: " in documented
