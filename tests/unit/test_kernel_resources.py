"""What the attention kernels take of the devices that they are compiled for, without one at hand."""

import csv
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET", "0") != "0":
    pytest.skip("TRITON_INTERPRET is set: an interpreted function cannot be compiled", allow_module_level=True)

from kernel_scripts import GPU, load_script
from treespec_kernels._attention_kernel import merge_parts_kernel, tree_attention_kernel

RESOURCES = load_script("attention_resources")
VARIANTS = {variant.name: variant for variant in RESOURCES.variants()}
# Those that every run compiles.
FEW = ("sm80-bf16-bits-d128-64x64w8", "sm90-bf16-int8-d128-64x64w8")
# Both ends of the supported range.
VERSIONS = {"3.6.0", "3.9.0"}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    yield


def assert_fits(variant, found: dict) -> None:
    """Two spilled registers of a thread are let through; gfx9 is only compiled."""
    assert int(found["shared"]) <= RESOURCES.SHARED_LIMIT[variant.family], found
    if variant.family != "gfx9":
        assert int(found["spills"]) <= 2, found
        assert int(found["stack"]) <= 16, found
    if variant.query == "fp32":
        expected = "none"
    else:
        large = variant.tile.block_m >= 64
        expected = {"sm90": "wgmma", "sm100": "tcgen05"}.get(variant.family, "mma") if large else "mma"
        expected = "mfma" if variant.family == "gfx9" else expected
    assert found["unit"] == expected, found


@pytest.mark.parametrize("name", FEW)
def test_compiled_tile_fits_its_device(name: str) -> None:
    variant = VARIANTS[name]
    assert_fits(variant, RESOURCES.resources(RESOURCES.compile_variant(variant)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in FEW])
def test_every_compiled_tile_fits_its_device(name: str) -> None:
    variant = VARIANTS[name]
    assert_fits(variant, RESOURCES.resources(RESOURCES.compile_variant(variant)))


@pytest.mark.parametrize("head_dim", [128, pytest.param(512, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["sm90", pytest.param("sm80", marks=pytest.mark.slow)])
def test_compiled_merge_spills_nothing(family: str, head_dim: int) -> None:
    found = RESOURCES.resources(RESOURCES.compile_merge(family, head_dim))
    assert (found["spills"], found["stack"]) == (0, 0), found
    assert found["shared"] <= RESOURCES.SHARED_LIMIT[family]


def test_the_report_holds_the_whole_table_and_every_row_fits() -> None:
    with (GPU / "attention_resources.csv").open() as file:
        rows = list(csv.DictReader(file))
    for version in VERSIONS:
        of_version = {row["variant"]: row for row in rows if row["triton"] == version}
        assert set(of_version) == set(VARIANTS)
        for name, row in of_version.items():
            assert_fits(VARIANTS[name], row)


def test_what_changes_from_call_to_call_is_not_compiled_in() -> None:
    kept = {"n_nodes", "group", "heads_kv", "window", "words_stride_b", "words_stride_n", "depth_stride_b"}
    for kernel, names in ((tree_attention_kernel, kept), (merge_parts_kernel, {"n_nodes", "splits"})):
        assert names <= {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
        constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
        assert not constants & names
