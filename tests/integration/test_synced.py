"""`synced_gpus`: two processes whose forwards need each other, with calls of unequal length. A hang is a failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from transformers import T5Config, T5ForConditionalGeneration

from calls import BUSHES
from hf_treespec import UnsupportedCallError, enable
from ranks import CASES
from tiny import draft, fingerprint, prompt, reference, stock, treed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [sys.executable, ROOT / "tests" / "ranks.py", str(rank), "2", folder],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", list(CASES))
def test_ranks_run_the_same_forwards_and_return_their_own_text(name: str, outcomes: list[dict[str, Any]]) -> None:
    one, two = (outcome[name] for outcome in outcomes)
    for rank in (one, two):
        assert rank["actual"] == rank["expected"]
        assert rank["hooks"] == 0
    assert one["gathered"] == two["gathered"]
    assert len(one["gathered"]) >= max(one["rounds"], two["rounds"]) + 1
    assert max(one["drafted"], two["drafted"]) > 0


def test_cases_differ_between_ranks(outcomes: list[dict[str, Any]]) -> None:
    rounds = [(outcomes[0][name]["rounds"], outcomes[1][name]["rounds"]) for name in CASES]
    assert sum(one != two for one, two in rounds) >= 4, rounds
    drafts = {name: outcomes[0][name]["gathered"].count(10) for name in CASES}
    assert drafts["model"] > 0 and drafts["ngram"] == drafts["own_draft"] == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mask", "attention_mask is 25 wide"),
        ("guidance", "guidance_scale with negative_prompt_ids of shape (2, 4)"),
        ("embeddings", "inputs_embeds has shape (1, 3, 4, 5)"),
    ],
)
def test_a_refusal_on_one_rank_is_one_on_all(name: str, reason: str, outcomes: list[dict[str, Any]]) -> None:
    right, wrong = (outcome["refusals"][name] for outcome in outcomes)
    assert reason in wrong
    assert "the call of another rank was refused" in right


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def test_a_single_rank_is_plain(tmp_path: Path) -> None:
    ids, mask = prompt("llama", 3)
    expected = reference(stock("llama"), ids, mask, max_new_tokens=12)
    before = fingerprint(treed("llama"))
    with alone(tmp_path):
        call = {"max_new_tokens": 12, "do_sample": False, "assistant_model": draft("llama"), "synced_gpus": True}
        actual = treed("llama").generate(ids, attention_mask=mask, tree_config=BUSHES, **call)
    assert torch.equal(actual, expected)
    assert fingerprint(treed("llama")) == before


def test_hooks_are_gone_after_an_exception(tmp_path: Path) -> None:
    def fails(ids: Any, scores: Any) -> Any:
        raise KeyError("stop here")

    ids, mask = prompt("llama", 1)
    before = fingerprint(treed("llama"))
    with alone(tmp_path), pytest.raises(KeyError, match="stop here"):
        treed("llama").generate(
            ids, attention_mask=mask, tree_config=BUSHES, synced_gpus=True, logits_processor=[fails], max_new_tokens=4
        )
    assert fingerprint(treed("llama")) == before


def test_without_a_process_group_it_is_refused() -> None:
    ids, mask = prompt("llama", 1)
    with pytest.raises(UnsupportedCallError, match="synced_gpus=True.*init_process_group"):
        treed("llama").generate(ids, attention_mask=mask, tree_config=BUSHES, synced_gpus=True, max_new_tokens=4)


def test_an_encoder_decoder_is_refused_before_its_encoder_runs() -> None:
    config = T5Config(
        vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0, eos_token_id=1
    )
    model = enable(T5ForConditionalGeneration(config).eval())
    ran: list[int] = []
    hook = model.get_encoder().register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(UnsupportedCallError, match="synced_gpus=True with tree_config: ranks that wait"):
        model.generate(torch.tensor([[3, 4, 5]]), tree_config=BUSHES, synced_gpus=True, max_new_tokens=4)
    hook.remove()
    assert ran == []
