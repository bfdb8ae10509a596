"""The training loop: stopped anywhere it comes to the same weights, and it ends when held-out texts gain no more."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from heads import CYCLE, FOLLOWS, perfect_head, periodic
from hf_treespec import _compat
from hf_treespec.draft import Borrowed
from hf_treespec.errors import TrainError
from hf_treespec.train import LoopSettings, Progress
from hf_treespec.train.batches import batches
from hf_treespec.train.features import Example
from hf_treespec.train.fresh import fresh_eagle, fresh_medusa, fresh_mlp
from hf_treespec.train.lessons import Lesson, ModelLesson, head_lesson
from hf_treespec.train.loop import _from, fit, held_out_length
from hf_treespec.train.optimizers import make_optimizers, set_rate
from tiny import build

DEPTHS = 3
SETTINGS = LoopSettings(epochs=3, batch_tokens=40, learning_rate=1e-2, judge_every=4)


class Listed:
    """Examples in memory."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]

    def length(self, index: int) -> int:
        return len(self[index].tokens_T)

    def new_tokens(self, index: int) -> int:
        return self.length(index) - self[index].prompt


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return periodic().float()


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True, mixed_precision="no")


def make(kind: str, target: PreTrainedModel) -> Lesson:
    torch.manual_seed(1)
    ids = torch.tensor(sorted(CYCLE))
    head: Any = {
        "medusa": lambda: fresh_medusa(target, ids, heads=DEPTHS),
        "mlp": lambda: fresh_mlp(target, ids, stages=DEPTHS, inner_size=16),
        "eagle3": lambda: fresh_eagle(target, ids, layers=(0,), intermediate_size=16),
    }[kind]()
    return head_lesson(head, Borrowed.of(target), len(_compat.decoder_layers(target)), depths=DEPTHS)


def texts(lesson: Lesson, target: PreTrainedModel, count: int) -> Listed:
    found = []
    for number in range(count):
        tokens = [CYCLE[number % 7]]
        while len(tokens) < 8 + 3 * (number % 5):
            tokens.append(FOLLOWS[tokens[-1]])
        with torch.no_grad():
            out = target(torch.tensor([tokens]), output_hidden_states=True)
        states = [out.hidden_states[layer][0] for layer in lesson.features.layers]
        states += [out.hidden_states[-1][0]] * lesson.features.last
        logp, likely = out.logits[0].float().log_softmax(-1).topk(8)
        found.append(Example(torch.tensor(tokens), 2, torch.cat(states, dim=-1), likely, logp))
    return Listed(found)


class Killed(Exception):
    pass


def run(
    kind: str,
    target: PreTrainedModel,
    folder: Path,
    accelerator: Accelerator,
    *,
    kill: int | None = None,
    **changes: Any,
) -> tuple[dict[str, Tensor], list[Progress]]:
    folder.mkdir(exist_ok=True)
    lesson = make(kind, target)

    def report(look: Progress) -> None:
        if kill is not None and look.step >= kill:
            raise Killed

    settings = LoopSettings(**{**{name: getattr(SETTINGS, name) for name in SETTINGS.__slots__}, **changes})
    examples = texts(lesson, target, 17)
    looks = fit(lesson, examples, texts(lesson, target, 5), folder, settings, accelerator, report=report)  # type: ignore[arg-type]
    return lesson.draft.state_dict(), looks


def told(looks: Sequence[Progress]) -> list[tuple[Any, ...]]:
    return [(look.step, look.tokens, look.loss, look.accepted_length, look.best) for look in looks]


@pytest.mark.parametrize(
    ("kind", "optimizer"), [("medusa", "adamw"), ("mlp", "adamw"), ("eagle3", "adamw"), ("eagle3", "muon")]
)
def test_a_stopped_run_comes_to_what_it_would_have_come_to(
    kind: str, optimizer: str, target: PreTrainedModel, tmp_path: Path, accelerator: Accelerator
) -> None:
    whole, looks = run(kind, target, tmp_path / "whole", accelerator, optimizer=optimizer)
    steps = [look.step for look in looks]
    assert steps[0] == 0 and steps[1:-1] == list(range(4, steps[-1], 4)) and looks[-1].step == looks[-1].steps
    assert max(look.accepted_length for look in looks) > looks[0].accepted_length + 0.3
    for kill in (steps[0], steps[2], steps[-2]):
        with pytest.raises(Killed):
            run(kind, target, tmp_path / "cut", accelerator, kill=kill, optimizer=optimizer)
    weights, again = run(kind, target, tmp_path / "cut", accelerator, optimizer=optimizer)
    assert told(again) == told(looks)
    assert weights.keys() == whole.keys() and all(torch.equal(weights[name], whole[name]) for name in whole)
    lines = (tmp_path / "cut" / "progress.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == steps
    # The weights of the best look, the last state, and nothing older.
    assert len(list((tmp_path / "cut").glob("best-*.pt"))) == 1 and len(list((tmp_path / "cut").iterdir())) == 3


def test_the_draft_gets_the_weights_of_the_best_look(
    target: PreTrainedModel, tmp_path: Path, accelerator: Accelerator
) -> None:
    weights, looks = run("medusa", target, tmp_path, accelerator)
    lesson = make("medusa", target)
    lesson.draft.load_state_dict(weights)
    best = max(look.accepted_length for look in looks)
    assert held_out_length(lesson, texts(lesson, target, 5), 40, accelerator) == pytest.approx(best)  # type: ignore[arg-type]


def test_it_ends_when_nothing_is_gained(target: PreTrainedModel, tmp_path: Path, accelerator: Accelerator) -> None:
    _, looks = run("medusa", target, tmp_path, accelerator, learning_rate=1e-9, patience=2, judge_every=1)
    assert [look.step for look in looks] == [0, 1, 2] and looks[-1].steps > 3
    # It has ended: there is nothing to go on with.
    _, again = run("medusa", target, tmp_path, accelerator, learning_rate=1e-9, patience=2, judge_every=1)
    assert again == looks
    _, more = run("medusa", target, tmp_path, accelerator, learning_rate=1e-9, patience=4, judge_every=1)
    assert [look.step for look in more] == [0, 1, 2, 3, 4]


def test_a_time_limit(target: PreTrainedModel, tmp_path: Path, accelerator: Accelerator) -> None:
    _, looks = run("medusa", target, tmp_path, accelerator, minutes=1e-9, judge_every=1)
    assert [look.step for look in looks] == [0, 1]


def test_the_order_of_all_epochs_from_any_step_on(target: PreTrainedModel) -> None:
    """Epochs may have unequal numbers of batches."""
    examples: Any = texts(make("medusa", target), target, 60)
    settings = LoopSettings(epochs=6, batch_tokens=30)
    sizes = [len(batches(examples, 30, seed=0, epoch=epoch)) for epoch in range(6)]
    assert len(set(sizes)) > 1
    whole = list(_from(0, examples, settings, sizes))
    assert len(whole) == sum(sizes)
    for epoch, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
        assert sorted(index for batch in whole[epoch : epoch + size] for index in batch) == list(range(60))
    for step in range(len(whole) + 1):
        assert list(_from(step, examples, settings, sizes)) == whole[step:]


def test_an_oracle_on_held_out_texts(target: PreTrainedModel, accelerator: Accelerator) -> None:
    double = target.double()
    lesson = head_lesson(perfect_head("medusa", double), Borrowed.of(double), 1, depths=6)
    assert held_out_length(lesson, texts(lesson, double, 5), 40, accelerator) == 1 + 6  # type: ignore[arg-type]
    target.float()


def test_a_loss_that_is_no_number_is_told(target: PreTrainedModel, tmp_path: Path, accelerator: Accelerator) -> None:
    with pytest.raises(TrainError, match="the loss is (nan|inf) after 2 steps"):
        run("medusa", target, tmp_path, accelerator, learning_rate=1e30, clip=1e30, judge_every=1, epochs=9)


def test_settings_that_cannot_work() -> None:
    wrongs: list[dict[str, Any]] = [
        {"epochs": 0}, {"learning_rate": 0.0}, {"minutes": 0.0}, {"warmup": 2.0}, {"judge_every": 0},
        {"optimizer": "sgd"},
    ]  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(TrainError, match=next(iter(wrong))):
            LoopSettings(**wrong)


def by_optimizer(lesson: Lesson, name: str) -> dict[str, tuple[str, float]]:
    """Of each weight of the draft the optimizer that moves it, and its highest learning rate."""
    names = {id(weight): name for name, weight in lesson.draft.named_parameters()}
    made = make_optimizers(lesson, name, learning_rate=0.5, weight_decay=0.25)
    found: dict[str, tuple[str, float]] = {}
    for optimizer in made:
        set_rate(optimizer, 0.5)
        for group in optimizer.param_groups:
            assert group["weight_decay"] == 0.25
            for weight in group["params"]:
                assert names[id(weight)] not in found
                found[names[id(weight)]] = type(optimizer).__name__, group["lr"]
    assert found.keys() == set(names.values())
    return found


def test_muon_moves_the_matrices_between_hidden_states(target: PreTrainedModel) -> None:
    eagle = by_optimizer(make("eagle3", target), "muon")
    layer = "decoder.layers.0."
    matrices = {f"{layer}self_attn.{name}_proj.weight" for name in "qkvo"}
    matrices |= {f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up", "down")} | {"fc.weight"}
    assert {name for name, told in eagle.items() if told == ("Muon", 0.75)} == matrices
    assert {name for name, told in eagle.items() if told == ("AdamW", 0.25)} == eagle.keys() - matrices
    assert {"lm_head.weight", "norm.weight"} <= eagle.keys() - matrices
    assert set(by_optimizer(make("eagle3", target), "adamw").values()) == {("AdamW", 0.25)}
    heads = by_optimizer(make("medusa", target), "muon")
    assert {name for name, told in heads.items() if told[0] == "AdamW" and name.endswith("weight")} == {
        f"heads.{number}.weight" for number in range(DEPTHS)
    }


def test_muon_leaves_the_embeddings_and_the_lm_head_of_a_model(target: PreTrainedModel) -> None:
    """Also where they are one weight, and have more rows than the target knows ids."""
    model = build("llama", vocab_size=40)
    model.lm_head.weight = model.model.embed_tokens.weight
    found = by_optimizer(ModelLesson(model, depths=2, vocab_size=37), "muon")
    moved = {name for name, told in found.items() if told[0] == "Muon"}
    assert moved == {name for name, weight in model.named_parameters() if weight.ndim == 2 and "proj" in name}
    assert found["model.embed_tokens.weight"][0] == "AdamW"
