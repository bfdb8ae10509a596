"""The demo's draft: the best weights of a run, in half precision."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_treespec import load_draft
from hf_treespec.train import LoopSettings, TextSettings, TrainSettings, train_draft
from learnable import prompts
from ship_draft import ship
from tiny import build

SETTINGS = TrainSettings(
    kind="eagle3", depths=2, vocabulary=50, held_out=4, measured=0, texts=TextSettings(new_tokens=12, batch=8),
    loop=LoopSettings(epochs=2, batch_tokens=128, judge_every=4),
)  # fmt: skip


def test_best_weights_are_written_in_half_precision_with_their_card(tmp_path: Path) -> None:
    target = build("llama").to(torch.bfloat16)
    train_draft(target, prompts(12), tmp_path / "run", SETTINGS, name="/somewhere/tiny")
    ship(tmp_path / "run", tmp_path / "out", "org/tiny")
    (best,) = (tmp_path / "run" / "checkpoints").glob("best-*.pt")
    weights = torch.load(best, weights_only=True)
    head = load_draft(tmp_path / "out")
    own = dict(head.named_parameters())
    assert own and all(torch.equal(weight, weights[name].half()) for name, weight in own.items())
    # bfloat16, in which the run wrote them, has lost some of that.
    coarse = load_draft(tmp_path / "run" / "draft")
    assert any(not torch.equal(weight, own[name].float()) for name, weight in coarse.float().named_parameters())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float16"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model: org/tiny" in card and "(float16)" in card and "/somewhere" not in card
    assert "accepted-length.svg" in card and (tmp_path / "out" / "accepted-length.svg").stat().st_size > 500
    best.unlink()
    with pytest.raises(FileNotFoundError, match=r"no checkpoints/best-\*\.pt"):
        ship(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()


def test_nothing_of_a_run_is_lost_to_its_draft(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    (run / "draft").mkdir(parents=True)
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "best-3.pt").write_bytes(b"weights")
    (run / "draft" / "README.md").write_text("a card of something else")
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"an earlier draft")
    for inside in (run, run / "draft", tmp_path):
        with pytest.raises(ValueError, match="--out .*pass a folder beside the run"):
            ship(run, inside)
    with pytest.raises(ValueError, match="README.md: no line 'base_model"):
        ship(run, out)
    (run / "draft" / "README.md").unlink()
    with pytest.raises(FileNotFoundError, match=r"README.md"):
        ship(run, out)
    assert (out / "model.safetensors").read_bytes() == b"an earlier draft"
    assert (run / "checkpoints" / "best-3.pt").read_bytes() == b"weights"
