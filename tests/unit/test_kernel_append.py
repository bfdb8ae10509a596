"""`treespec_kernels.append_quantized_`: what can be proven without a GPU, and how rows are quantized.

Shapes: B batch rows, G heads, T rows to append, S slots of the storage, D head dimension.
"""

from functools import partial

import pytest
import torch

from kernel_scripts import interpreted_records, load_script
from treespec_kernels import append_quantized_, quantize_rows
from treespec_kernels.append import _append

SCRIPT = load_script("append_device")
STORAGES = SCRIPT.STORAGES


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], dict]:
    records = interpreted_records("append_device", tmp_path_factory.mktemp("append"))
    return {(record["name"], record["dtype"], record["storage"]): record for record in records}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", [case.name for case in SCRIPT.CASES])
def test_interpreted_kernel_equals_the_reference_bit_for_bit(interpreted: dict, name: str, storage: str) -> None:
    records = [record for key, record in interpreted.items() if key[::2] == (name, storage)]
    assert len(records) >= 2
    assert not any(record["wrong"] for record in records), records


@pytest.mark.parametrize("name", SCRIPT.MUTANTS)
def test_a_broken_kernel_does_not_pass(interpreted: dict, name: str) -> None:
    storage = SCRIPT.MUTANTS[name][-1]
    assert interpreted[f"mutant_{name}", "fp32", storage]["wrong"] > 0


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("case", SCRIPT.CASES, ids=lambda case: case.name)
def test_torch_backend_writes_where_it_should(case, storage: str) -> None:
    append = partial(append_quantized_, backend="torch")
    for dtype in SCRIPT.DTYPES.values():
        assert SCRIPT.count_mismatches(case, dtype, STORAGES[storage], "cpu", append) == 0


@pytest.mark.parametrize(("dtype", "half_step"), [(torch.int8, 0.5), (torch.float8_e4m3fn, 16.0)])
def test_rows_come_back_within_half_a_step_of_their_largest_value(dtype: torch.dtype, half_step: float) -> None:
    rows = torch.randn(3, 2, 5, 64) * 2.0 ** torch.randint(-20, 20, (3, 2, 5, 1))
    values, scales = quantize_rows(rows, dtype)
    back = values.float() * scales[..., None]
    assert ((back - rows).abs() <= half_step * 1.0001 * scales[..., None]).all()
    # The largest value of a row is kept, with its sign, whatever its size.
    at = rows.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(back.gather(-1, at), rows.gather(-1, at), rtol=1e-6, atol=0.0)
    again, scales_again = quantize_rows(back, dtype)
    assert torch.equal(again.float(), values.float())
    torch.testing.assert_close(scales_again, scales)


def test_operator_says_the_truth_about_itself() -> None:
    storage, scales = torch.zeros(2, 2, 8, 16, dtype=torch.int8), torch.zeros(2, 2, 8)
    arguments = (storage, scales, torch.randn(2, 2, 3, 16), torch.tensor([[1, 2, 5]]), "torch")
    torch.library.opcheck(_append, arguments, test_utils=("test_schema", "test_faketensor"))


def test_compiles_without_breaks() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(partial(append_quantized_, backend="torch"), fullgraph=True, backend="eager")
    rows, slots = torch.randn(1, 1, 2, 4), torch.tensor([[1, 3]])
    storages = [torch.zeros(1, 1, 5, 4, dtype=torch.int8) for _ in range(2)]
    compiled(storages[0], torch.zeros(1, 1, 5), rows, slots)
    append_quantized_(storages[1], torch.zeros(1, 1, 5), rows, slots)
    torch._dynamo.reset()
    assert storages[0].any()
    assert torch.equal(*storages)


GOOD = {
    "storage": torch.zeros(2, 2, 8, 4, dtype=torch.int8),
    "scales": torch.zeros(2, 2, 8),
    "rows": torch.randn(2, 2, 3, 4),
    "slots": torch.tensor([[1, 2, 3]]),
}
REFUSED = {
    "storage_dtype": ({"storage": torch.zeros(2, 2, 8, 4)}, TypeError, "`storage` has dtype torch.float32"),
    "scales_dtype": ({"scales": torch.zeros(2, 2, 8).half()}, TypeError, "`scales` has dtype torch.float16"),
    "rows_dtype": ({"rows": torch.zeros(2, 2, 3, 4).double()}, TypeError, "`rows` has dtype torch.float64"),
    "slots_dtype": ({"slots": torch.zeros(1, 3)}, TypeError, "`slots` has dtype torch.float32; expected int32"),
    "scales_shape": ({"scales": torch.zeros(2, 2, 7)}, ValueError, r"expected \[2, 2, 8\]"),
    "rows_shape": ({"rows": torch.zeros(2, 1, 3, 4)}, ValueError, r"expected \[2, 2, 3, 4\]"),
    "rows_stride": (
        {"rows": torch.zeros(2, 2, 4, 3).transpose(2, 3)},
        ValueError,
        "`rows` has .* last one contig",
    ),
    "slots_shape": ({"slots": torch.zeros(3, 3).long()}, ValueError, r"expected \[2, 3\] or \[1, 3\]"),
    "elsewhere": ({"slots": torch.zeros(1, 3, device="meta").long()}, ValueError, "`slots` is on meta"),
    "backend": ({"backend": "cuda"}, ValueError, "`backend` is 'cuda'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused_before_any_write(name: str) -> None:
    changed, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        append_quantized_(**{**GOOD, **changed})
    assert not GOOD["storage"].any()


def test_another_storage_is_refused() -> None:
    with pytest.raises(TypeError, match="`dtype` is torch.uint8; expected int8 or float8_e4m3fn"):
        quantize_rows(torch.ones(2), torch.uint8)
