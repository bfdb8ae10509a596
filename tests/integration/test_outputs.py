"""Hidden states, attentions, scores and logits are those of plain decoding: nesting, shapes, types and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_treespec import TreeConfig, UnsupportedCallError, _compat, enable
from hf_treespec.engine import outputs as kept
from sources import MAKERS, Source, drafting
from tiny import FAMILIES, WIDTH, assert_lively, build, prompt, real_texts, reference, stock, treed, vocabulary

SEED = 11
CONFIG = TreeConfig(max_nodes=16, max_depth=6, max_children=3, seed=SEED, fallback="off")
ENDS = [5, 6, 7, 9, 14, 23, 31, 40, 52]
NEW = 18
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 20}
EVERYTHING = {
    "return_dict_in_generate": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_scores": True,
    "output_logits": True,
}
EAGER = {family: (build(family, attention="eager"), enable(build(family, attention="eager"))) for family in FAMILIES}


def both(
    family: str,
    batch: int,
    maker: str,
    *,
    models: Any = None,
    config: TreeConfig = CONFIG,
    width: int = WIDTH,
    **call: Any,
) -> Any:
    """Outputs of plain and of ours for one call, and the source that drafted."""
    plain, ours = models or EAGER[family]
    ids, mask = prompt(family, batch, seed=5, width=width)
    call = {"max_new_tokens": NEW, **EVERYTHING, **call}
    expected = reference(plain, ids, mask, seed=SEED, **call)
    truth = real_texts(expected.sequences, mask)
    with drafting(Source(MAKERS[maker], seed=2, vocab=vocabulary(family), truth=truth)) as source:
        actual = ours.generate(ids, attention_mask=mask, tree_config=config, **{"do_sample": False, **call})
    assert torch.equal(actual.sequences, expected.sequences)
    return expected, actual, source


def assert_same_states(expected: Any, actual: Any, tolerance: float = 1e-4) -> None:
    """Equal tuples of equal tensors, however deep; empty tuples and None where plain has them."""
    assert type(actual) is type(expected)
    if isinstance(expected, tuple):
        assert len(actual) == len(expected)
        for one, two in zip(expected, actual, strict=True):
            assert_same_states(one, two, tolerance)
    elif isinstance(expected, Tensor):
        assert (actual.shape, actual.dtype, actual.device) == (expected.shape, expected.dtype, expected.device)
        assert torch.allclose(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)
        # A padded key has a weight of exactly zero; so must it in ours.
        assert torch.equal(actual == 0, expected == 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("maker", ["half_right", "deep", "random_tree"])
def test_every_output_is_plain(family: str, batch: int, maker: str) -> None:
    expected, actual, source = both(family, batch, maker)
    assert_lively(expected.sequences)
    assert len(actual.hidden_states) == len(actual.attentions) == NEW
    for name in ("hidden_states", "attentions"):
        assert_same_states(getattr(expected, name), getattr(actual, name))
    for name in ("scores", "logits"):
        assert_same_states(getattr(expected, name), getattr(actual, name), tolerance=1e-3)
    if batch == 1 and maker != "random_tree":
        assert max(len(paths[0]) for paths in source.paths) > 3, "no path was long enough to be cut out of a tree"


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
@pytest.mark.parametrize("width", range(2, 7))
def test_path_that_grows_past_a_window(family: str, width: int) -> None:
    expected, actual, source = both(family, 1, "chain", width=width, output_hidden_states=False)
    assert_same_states(expected.attentions, actual.attentions)
    window = int(EAGER[family][0].config.sliding_window)
    starts = [width + sum(len(paths[0]) for paths in source.paths[:done]) for done in range(len(source.paths))]
    ends = [start + len(paths[0]) for start, paths in zip(starts, source.paths, strict=True)]
    assert any(start < window <= end for start, end in zip(starts, ends, strict=True))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("eos", [None, ENDS], ids=["no_end", "ends"])
@pytest.mark.parametrize("maker", ["half_right", "chain"])
def test_rows_that_end_early_give_the_states_of_their_padding(family: str, eos: Any, maker: str) -> None:
    expected, actual, _ = both(family, 3, maker, eos_token_id=eos, **SAMPLED)
    assert_same_states(expected.hidden_states, actual.hidden_states)
    assert_same_states(expected.attentions, actual.attentions)


@pytest.mark.parametrize("name", ["hidden_states", "attentions"])
def test_only_what_is_asked_for_is_given(name: str) -> None:
    call = dict.fromkeys(EVERYTHING, False) | {"return_dict_in_generate": True, f"output_{name}": True}
    expected, actual, _ = both("llama", 1, "deep", **call)
    assert set(actual.keys()) == set(expected.keys())
    assert_same_states(getattr(expected, name), getattr(actual, name))


def test_without_a_dict_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept.KeptStates, "__init__", None)
    ids, mask = prompt("llama", 3)
    call = {"max_new_tokens": 6, "do_sample": False, "output_hidden_states": True, "output_attentions": True}
    plain, ours = EAGER["llama"]
    expected = reference(plain, ids, mask, **call)
    assert torch.equal(ours.generate(ids, attention_mask=mask, tree_config=CONFIG, **call), expected)


def test_sdpa_gives_no_attentions_as_in_plain() -> None:
    expected, actual, _ = both("llama", 1, "deep", models=(stock("llama"), treed("llama")))
    assert_same_states(expected.attentions, actual.attentions)
    assert_same_states(expected.hidden_states, actual.hidden_states)


def test_selected_hidden_states() -> None:
    expected, actual, _ = both("llama", 1, "deep", output_hidden_states=[0, -1])
    assert_same_states(expected.hidden_states, actual.hidden_states)


def test_chunked_prefill_gives_the_states_of_the_last_chunk() -> None:
    expected, actual, _ = both("llama", 1, "deep", prefill_chunk_size=4)
    assert_same_states(expected.hidden_states, actual.hidden_states)
    assert_same_states(expected.attentions, actual.attentions)


@pytest.mark.parametrize("implementation", ["static", "quantized"])
@pytest.mark.parametrize("batch", [1, 3])
def test_states_over_other_caches(implementation: str, batch: int) -> None:
    call: dict[str, Any] = {"cache_implementation": implementation}
    if implementation == "quantized":
        if not _compat.FP8_LAYERS:
            pytest.skip("this transformers has no fp8 cache")
        call["cache_config"] = {"backend": "fp8"}
    expected, actual, _ = both("llama", batch, "half_right", **call)
    assert_same_states(expected.hidden_states, actual.hidden_states)
    assert_same_states(expected.attentions, actual.attentions)


def test_layers_that_share_a_cache_are_read_without_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    made = kept.KeptStates.__init__
    monkeypatch.setattr(
        kept.KeptStates, "__init__", lambda self, wanted, prefill, layers: made(self, wanted, prefill, layers[:1])
    )
    monkeypatch.setattr(_compat.warning, "_WARNED", set())
    with pytest.warns(match="2 attentions and 1 cache layers"):
        expected, actual, source = both("llama", 1, "deep")
    assert_same_states(expected.attentions, actual.attentions)
    assert not any(tree.drafted for trees in source.rounds for tree in trees)


def test_attentions_need_the_attention_that_gives_them() -> None:
    _, ours = EAGER["llama"]
    ids, mask = prompt("llama", 1)
    config = TreeConfig(attention="sdpa")
    call = {"attention_mask": mask, "tree_config": config, "max_new_tokens": 4, "do_sample": False}
    with pytest.raises(UnsupportedCallError, match=r"output_attentions=True with TreeConfig\(attention='sdpa'\)"):
        ours.generate(ids, output_attentions=True, return_dict_in_generate=True, **call)
    # Hidden states do not depend on it, and without a dict nobody gets to see the weights.
    ours.generate(ids, output_hidden_states=True, return_dict_in_generate=True, **call)
    ours.generate(ids, output_attentions=True, **call)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("normalize", [False, True])
def test_transition_scores(batch: int, sampling: dict[str, Any], normalize: bool) -> None:
    expected, actual, _ = both("llama", batch, "half_right", repetition_penalty=1.2, eos_token_id=ENDS, **sampling)
    one, two = (
        stock("llama").compute_transition_scores(out.sequences, out.scores, normalize_logits=normalize)
        for out in (expected, actual)
    )
    assert one.shape == two.shape and one.dtype == two.dtype
    assert torch.allclose(one, two, atol=1e-3)


@pytest.mark.parametrize("batch", [1, 3])
def test_scores_and_logits_of_a_bfloat16_model_are_float32(batch: int) -> None:
    plain = build("llama").to(torch.bfloat16)
    ours = enable(build("llama").to(torch.bfloat16))
    ids, mask = prompt("llama", batch)
    call = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, **EVERYTHING, "output_attentions": False}
    expected, actual = plain.generate(ids, **call), ours.generate(ids, tree_config=CONFIG, **call)
    for name in ("scores", "logits"):
        assert {step.dtype for step in getattr(expected, name)} == {torch.float32}
        assert {step.dtype for step in getattr(actual, name)} == {torch.float32}
    assert {state.dtype for step in actual.hidden_states for state in step} == {torch.bfloat16}
    # The first step is the prefill, which trees do not touch.
    assert torch.equal(actual.logits[0], expected.logits[0])
