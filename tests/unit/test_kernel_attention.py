"""`treespec_kernels.tree_attention`: what can be proven without a GPU, and its reference.

Shapes: B batch rows, H query heads, G key heads, N tree nodes, S slots, D head dimension.
"""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import treespec_kernels
from kernel_scripts import child_environment, interpreted_records, load_script
from treespec_kernels import tree_attention, tree_attention_reference

CASES = load_script("attention_cases")
MUTANTS = (
    *("ancestor_lost", "stranger_seen", "padding_seen", "padding_too_long", "prefix_too_long"),
    *("values_without_mask", "value_scales_without_mask", "value_scales_missing", "no_gain", "key_scales_missing"),
    *("prefix_window", "window_bound", "tree_window", "last_tiles_lost", "tile_read_twice", "high_words_ignored"),
    *("later_words_ignored", "beyond_the_prefix", "before_the_prefix", "bits_of_the_sign", "softcap_missing"),
    *("sink_missing_in_merge", "row_without_keys", "one_head_for_all"),
)


# -- the kernel in Triton's interpreter ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    records = interpreted_records("attention_device", tmp_path_factory.mktemp("attention"))
    return {record["name"]: record for record in records}


@pytest.mark.parametrize("name", [case.name for case in CASES.CASES if not case.slow])
def test_interpreted_kernel_is_as_exact_as_its_dtype(interpreted: dict, name: str) -> None:
    assert interpreted[name]["ok"], interpreted[name]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_kernel_or_input_does_not_pass(interpreted: dict, name: str) -> None:
    kind = "input" if name in MUTANTS[:5] else "mutant"
    assert interpreted[f"{kind}_{name}"]["ok"], interpreted[f"{kind}_{name}"]


def test_every_record_is_asked_for(interpreted: dict) -> None:
    kinds = {"input": MUTANTS[:5], "mutant": MUTANTS[5:]}
    broken = {f"{kind}_{name}" for kind, names in kinds.items() for name in names}
    assert set(interpreted) == broken | {case.name for case in CASES.CASES if not case.slow}


@pytest.mark.slow
def test_interpreted_kernel_at_real_sizes(tmp_path: Path) -> None:
    records = interpreted_records("attention_device", tmp_path, "--slow")
    assert len(records) == 12
    assert not [record for record in records if not record["ok"]]


# -- the reference ------------------------------------------------------------------------------------------------


def _by_loops(call) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention as its definition says it, one query and one key at a time."""
    tensors, numbers = call.tensors, call.numbers
    q, k, v = (tensors[name].double() for name in ("q", "k", "v"))
    B, H, N, D = q.shape
    out, lse = torch.zeros(B, N, H, D).double(), torch.full((B, H, N), -math.inf).double()
    for b, h, i in ((b, h, i) for b in range(B) for h in range(H) for i in range(N)):
        g = h * k.shape[1] // H
        length = int(tensors["prefix_len"][b])
        tree = b if len(tensors["tree_words"]) > 1 else 0
        depth = None if tensors["depth"] is None else tensors["depth"][tree].tolist()
        first = 0 if tensors["kv_start"] is None else int(tensors["kv_start"][b])
        slots = [s for s in range(first, length) if depth is None or length + depth[i] - s < numbers["window"]]
        for j in range(N):
            seen = int(tensors["tree_words"][tree, i, j // 64]) >> (j % 64) & 1
            if seen and (depth is None or depth[i] - depth[j] < numbers["window"]):
                slots.append(length + j)
        scores, values = [], []
        for s in slots:
            factors = [1.0 if tensors[f"{x}_scale"] is None else float(tensors[f"{x}_scale"][b, g, s]) for x in "kv"]
            score = float(q[b, h, i] @ k[b, g, s]) * factors[0] * numbers["scale"]
            cap = numbers["softcap"]
            scores.append(cap * math.tanh(score / cap) if cap else score)
            values.append(v[b, g, s] * factors[1])
        if tensors["sinks"] is not None:
            scores.append(float(tensors["sinks"][h]))
            values.append(torch.zeros(D).double())
        if scores:
            lse[b, h, i] = torch.logsumexp(torch.tensor(scores, dtype=torch.float64), 0)
            weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
            out[b, i, h] = (weights[:, None] * torch.stack(values)).sum(0)
    return out, lse


REFERENCE_CASES = (
    *("all_fp32_dense", "all_fp16_int8", "all_bf16_fp8", "window_in_the_tree", "bare_and_nothing_else"),
    *("bare_sinks", "shared_tree_window", "nodes_65_by_16", "all_padding", "group_3", "softcap_low"),
)


@pytest.mark.parametrize("name", REFERENCE_CASES)
def test_reference_equals_the_definition(name: str) -> None:
    case = next(case for case in CASES.CASES if case.name == name)
    call = CASES.make_call(case, 1, "cpu")
    out, lse = CASES.expected(call)
    want_out, want_lse = _by_loops(call)
    torch.testing.assert_close(out, want_out, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-10, atol=1e-12)


def test_public_function_on_a_cpu_is_the_reference_in_the_dtype_of_the_queries() -> None:
    case = next(case for case in CASES.CASES if case.name == "all_bf16_int8")
    call = CASES.make_call(case, 1, "cpu")
    out, lse = tree_attention(**call.tensors, **call.numbers, return_lse=True, backend="torch", max_len=40)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    judged = CASES.judge(case, (out, lse), CASES.expected(call))
    assert judged["ok"]
    assert torch.equal(tree_attention(**call.tensors, **call.numbers, backend="torch"), out)
    call.tensors.update({name: call.tensors[name].double() for name in ("q",)})
    exact, lse = tree_attention(**call.tensors, **call.numbers, return_lse=True)
    assert (exact.dtype, lse.dtype) == (torch.float64, torch.float64)
    torch.testing.assert_close(exact, CASES.expected(call)[0], rtol=1e-12, atol=1e-12)


# -- torch.compile ------------------------------------------------------------------------------------------------


def test_compiles_without_breaks_into_one_graph_for_each_number_of_nodes() -> None:
    graphs = []

    def backend(module, example):
        graphs.append(module)
        return module.forward

    def step(q, k, v, words, prefix):
        return tree_attention(q, k, v, words, prefix, max_len=64, backend="torch")

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend=backend)
    k = v = torch.randn(1, 2, 96, 16)
    for nodes, length in ((8, 10), (8, 11), (8, 40), (16, 11), (8, 20), (16, 64)):
        q = torch.randn(1, 4, nodes, 16)
        words = (1 << torch.arange(nodes)).reshape(1, nodes, 1)
        prefix = torch.tensor([length], dtype=torch.int32)
        assert torch.equal(compiled(q, k, v, words, prefix), step(q, k, v, words, prefix))
    torch._dynamo.reset()
    assert len(graphs) == 2


@pytest.mark.parametrize("name", ["all_fp16_int8", "nodes_65_by_16", "plain_fp32_dense"])
def test_operator_says_the_truth_about_itself(name: str) -> None:
    call = CASES.make_call(next(case for case in CASES.CASES if case.name == name), 1, "cpu")
    order = ("q", "k", "v", "tree_words", "prefix_len", "kv_start", "depth", "k_scale", "v_scale", "sinks")
    numbers = [call.numbers[key] for key in ("scale", "window", "softcap")]
    operator = treespec_kernels.attention._tree_attention
    arguments = (*(call.tensors[key] for key in order), *numbers, None, "torch")
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


# -- arguments ----------------------------------------------------------------------------------------------------

Q = torch.randn(2, 4, 3, 16)
K = torch.randn(2, 2, 20, 16)
GOOD = {
    "q": Q,
    "k": K,
    "v": K,
    "tree_words": torch.tensor([[[1], [3], [5]]]),
    "prefix_len": torch.tensor([7, 17], dtype=torch.int32),
}
INT8 = K.to(torch.int8)
REFUSED = {
    "q_rank": ({"q": Q[0]}, ValueError, r"`q` has shape \[4, 3, 16\]; expected \[B, H, N, D\]"),
    "q_empty": ({"q": Q[:, :, :0]}, ValueError, "`q` has shape .* expected at least one node"),
    "q_stride": ({"q": Q.repeat(1, 1, 1, 2)[..., ::2]}, ValueError, "`q` has strides .* expected 1 for the last axis"),
    "q_dtype": ({"q": Q.int()}, TypeError, "`q` has dtype torch.int32; expected one of float16"),
    "k_dtype": ({"k": K.half()}, TypeError, "`k` and `v` have dtypes torch.float16 and torch.float32"),
    "kv_dtype": ({"k": K.half(), "v": K.half()}, TypeError, "expected both torch.float32, as `q`, or"),
    "v_shape": ({"v": K[..., :8]}, ValueError, "`v` has shape .* expected that of `k`"),
    "k_heads": ({"k": K[:, :1].repeat(1, 3, 1, 1), "v": K[:, :1].repeat(1, 3, 1, 1)}, ValueError, "a divisor of 4"),
    "k_batch": ({"k": K[:1], "v": K[:1]}, ValueError, r"`k` has shape \[1, 2, 20, 16\]; expected \[2,"),
    "k_slots": ({"k": K[:, :, :2], "v": K[:, :, :2]}, ValueError, "`k` has 2 slots; expected at least the 3"),
    "words_dtype": ({"tree_words": GOOD["tree_words"].int()}, TypeError, "`tree_words` has dtype torch.int32"),
    "words_shape": ({"tree_words": GOOD["tree_words"][:, :2]}, ValueError, r"expected \[2 or 1, 3, 1\]"),
    "prefix_dtype": ({"prefix_len": torch.ones(2)}, TypeError, "`prefix_len` has dtype torch.float32"),
    "prefix_shape": ({"prefix_len": torch.ones(1).int()}, ValueError, r"`prefix_len` has shape \[1\]; expected"),
    "prefix_beyond": ({"prefix_len": torch.tensor([7, 18])}, ValueError, r"`prefix_len` is \[7, 18\]; expected 0..17"),
    "prefix_negative": ({"prefix_len": torch.tensor([7, -1])}, ValueError, r"`prefix_len` is \[7, -1\]"),
    "start_beyond": ({"kv_start": torch.tensor([8, 0])}, ValueError, r"`kv_start` is \[8, 0\]; expected 0 to"),
    "bound_too_low": ({"max_len": 16}, ValueError, "`max_len` is 16; expected at least `prefix_len`"),
    "bound_negative": ({"max_len": -1}, ValueError, "`max_len` is -1"),
    "window_negative": ({"window": -1}, ValueError, "`window` is -1"),
    "window_without_depth": ({"window": 4}, ValueError, "`depth` is None; .* with window=4"),
    "depth_shape": ({"depth": torch.zeros(1, 2).int()}, ValueError, r"`depth` has shape \[1, 2\]; expected"),
    "softcap_negative": ({"softcap": -1.0}, ValueError, "`softcap` is -1.0"),
    "softcap_nan": ({"softcap": math.nan}, ValueError, "`softcap` is nan"),
    "scale_dtype": ({"k": INT8, "v": INT8, "k_scale": torch.ones(1).half()}, TypeError, "`k_scale` has dtype"),
    "scale_shape": ({"k": INT8, "v": INT8, "v_scale": torch.ones(2, 2, 19)}, ValueError, "`v_scale` has shape"),
    "sinks_shape": ({"sinks": torch.ones(2)}, ValueError, r"`sinks` has shape \[2\]; expected \[4\]"),
    "elsewhere": ({"prefix_len": torch.ones(2, device="meta").int()}, ValueError, "`prefix_len` is on meta"),
    "backend": ({"backend": "cuda"}, ValueError, "`backend` is 'cuda'; expected one of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused(name: str) -> None:
    changed, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        tree_attention(**{**GOOD, **changed})


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
outside_interpreter = pytest.mark.skipif(
    "TRITON_INTERPRET" in os.environ, reason="TRITON_INTERPRET is set: a call runs on a CPU"
)


@needs_triton
@outside_interpreter
def test_the_kernel_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(ValueError, match="backend='triton' was given tensors on cpu, where no kernel runs"):
        tree_attention(**GOOD, backend="triton")
    double = {name: GOOD[name].double() for name in "qkv"}
    with pytest.raises(ValueError, match="was given float64"):
        tree_attention(**{**GOOD, **double}, backend="triton")
    assert tree_attention(**GOOD).shape == (2, 3, 4, 16)


def test_reference_takes_head_dimensions_that_no_tile_holds() -> None:
    assert (
        tree_attention(
            torch.randn(1, 1, 1, 600), *[torch.randn(1, 1, 4, 600)] * 2, torch.ones(1, 1, 1).long(), torch.tensor([2])
        )
        .isfinite()
        .all()
    )


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it now raises ModuleNotFoundError
import torch, treespec_kernels
storage = torch.randn(1, 1, 4, 16)
arguments = storage[:, :, :1], storage, storage, torch.ones(1, 1, 1).long(), torch.tensor([2])
print(treespec_kernels.tree_attention(*arguments).isfinite().all())
try:
    treespec_kernels.tree_attention(*arguments, backend="triton")
except ImportError as error:
    print(error)
"""


def test_without_triton_auto_runs_torch_and_triton_names_the_extra() -> None:
    child = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    finite, message = child.stdout.splitlines()
    assert finite == "tensor(True)"
    assert "`hf-treespec[kernels]`" in message


def test_reference_can_be_called_without_a_bound() -> None:
    out, _ = tree_attention_reference(**GOOD)
    assert torch.equal(out, tree_attention(**GOOD, max_len=17, backend="torch"))
