"""`treespec train` from prompts to a draft: what it gains, what it leaves, how it goes on, and what it refuses."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from hf_treespec import TreeConfig, UnsupportedModelError, enable, load_draft
from hf_treespec.api.enable import is_enabled
from hf_treespec.cli.app import app
from hf_treespec.errors import TrainError
from hf_treespec.train import (
    KINDS,
    LoopSettings,
    OtherRunError,
    Progress,
    Stage,
    TextSettings,
    TrainSettings,
    train_draft,
)
from learnable import FIRST, VOCAB, learnable, prompts
from seq2seq import stock as stock_pair
from tiny import build

ROOT = Path(__file__).parents[2]
SMALL = TrainSettings(
    kind="medusa", depths=3, vocabulary=50, held_out=4, measured=2, measured_tokens=20,
    texts=TextSettings(new_tokens=16, batch=8), loop=LoopSettings(epochs=2, batch_tokens=256, learning_rate=3e-3),
)  # fmt: skip


def words() -> Any:
    """A tokenizer whose words are the target's ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", unk_token="w0")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    learnable().save_pretrained(folder)
    words().save_pretrained(folder)
    texts = [" ".join(f"w{token}" for token in prompt) for prompt in prompts(90)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return folder


def command(target: Path, out: Path, *more: object) -> list[str]:
    return [
        "train", str(target), "--set", f"mine={target / 'prompts.jsonl'}", "--out", str(out), "--device", "cpu",
        *map(str, more),
    ]  # fmt: skip


QUICK = (
    "--depths", 4, "--vocabulary", 50, "--new-tokens", 32, "--batch", 16, "--epochs", 12, "--batch-tokens", 512,
    "--learning-rate", 0.003, "--held-out", 8, "--measured", 4,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns(kind: str, target: Path, tmp_path: Path) -> None:
    """At least one more token a round than an untrained one, in less than two minutes."""
    # Medusa heads have to unlearn what they begin with.
    longer = ("--epochs", 40) if kind == "medusa" else ()
    result = CliRunner().invoke(app, command(target, tmp_path / "run", "--kind", kind, "--json", *QUICK, *longer))
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["accepted_length"]["best"] >= facts["accepted_length"]["untrained"] + 1, facts
    assert facts["seconds"] < 120
    greedy, sampled = facts["measured"]
    assert greedy["equal"] == greedy["prompts"] == 4 and sampled["temperature"] == 1
    assert greedy["tokens_per_round"] > 2 and sampled["tokens_per_round"] > 1.3
    saved = tmp_path / "run" / "draft"
    card = (saved / "README.md").read_text()
    assert f"{facts['accepted_length']['best']:.2f}" in card and (saved / "accepted-length.svg").exists()
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    ids = torch.tensor([prompts(91)[-1]])
    call: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "do_sample": False}
    expected = model.generate(ids, **call)
    if kind == "model":
        draft: Any = AutoModelForCausalLM.from_pretrained(saved)
        assert torch.equal(model.generate(ids, assistant_model=draft, **call), expected)
        known = json.loads((saved / "vocabulary.json").read_text())
        assert len(known) == len(set(known)) == 50 and all(token >= FIRST for token in known[:8])
    else:
        draft = load_draft(saved)
        assert draft.draft_vocab == 50
    treed = enable(model)
    out = treed.generate(ids, assistant_model=draft, tree_config=TreeConfig(fallback="off"), **call)
    assert torch.equal(out, expected) and treed.treespec_stats.tokens_per_round > 2


@pytest.mark.slow
def test_two_processes_come_to_what_one_comes_to(target: Path, tmp_path: Path) -> None:
    options = (*QUICK, "--kind", "mlp", "--epochs", 3, "--tokens", 1000, "--json")
    one = CliRunner().invoke(app, command(target, tmp_path / "one", *options))
    assert one.exit_code == 0, one.stderr
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, "-m", "hf_treespec.cli", *command(target, tmp_path / "two", *options)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    # Only the first one speaks.
    alone, shared = json.loads(one.stdout), json.loads(done.stdout)
    assert len(list((tmp_path / "two" / "data" / "texts").glob("shard-*.jsonl"))) == 2
    for name in ("texts", "tokens", "held_out", "parameters", "tokens_trained", "steps"):
        assert alone[name] == shared[name], name
    weights = [load_draft(tmp_path / name / "draft").state_dict() for name in ("one", "two")]
    for name, weight in weights[0].items():
        # Gradients are summed in another order.
        torch.testing.assert_close(weight, weights[1][name], rtol=1e-2, atol=1e-3)
    for name in ("untrained", "best"):
        assert alone["accepted_length"][name] == pytest.approx(shared["accepted_length"][name], abs=0.02)
    assert alone["measured"][0]["equal"] == shared["measured"][0]["equal"] == 4
    # A fault is told once.
    wrong = subprocess.run(
        [*launch, "-m", "hf_treespec.cli", *command(target, tmp_path / "two", *options, "--depths", "3")],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert wrong.returncode != 0 and wrong.stderr.count("treespec: error: ") == 1
    assert "depths was 4 there and is 3 now" in wrong.stderr


# -- one small run of the library --


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True, mixed_precision="no")


Train = Callable[..., Any]


@pytest.fixture(scope="module")
def small(accelerator: Accelerator) -> Train:
    def run(folder: Path, report: Any = None, **changes: Any) -> Any:
        model = changes.pop("model", None) or learnable()
        settings = changes.pop("settings", SMALL)
        return train_draft(
            model, changes.pop("prompts", prompts(30)), folder, settings, accelerator, report, **changes
        )

    return run


@pytest.fixture(scope="module")
def begun(small: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Medusa head."""
    return Path(small(tmp_path_factory.mktemp("begun"), settings=replace(SMALL, measured=0)).draft)


class Killed(Exception):
    pass


def event_name(event: Stage | Progress) -> str:
    return event.name if isinstance(event, Stage) else "training"


def event_step(event: Stage | Progress) -> int:
    return event.step if isinstance(event, Progress) else -1


def test_a_run_that_is_killed_at_any_stage_goes_on(tmp_path: Path, small: Train) -> None:
    events: list[Any] = []
    whole = small(tmp_path / "whole", events.append)
    stages = [event.name for event in events if isinstance(event, Stage)]
    assert list(dict.fromkeys(stages)) == ["held-out texts", "texts", "features", "calls of generate"]
    assert all(0 <= event.done <= event.total for event in events if isinstance(event, Stage))
    of = {name: [event for event in events if event_name(event) == name] for name in (*stages, "training")}
    for kill in (of["held-out texts"][0], *of["texts"][:2], of["training"][1], events[-1]):

        def report(event: Any, kill: Any = kill) -> None:
            if event == kill or event_step(event) == event_step(kill) >= 0:
                raise Killed

        with pytest.raises(Killed):
            small(tmp_path / "cut", report)
    again = small(tmp_path / "cut")
    one, other = ({**found.to_dict(), "draft": "", "seconds": 0.0} for found in (whole, again))
    assert one == other
    weights = [load_draft(tmp_path / name / "draft").state_dict() for name in ("whole", "cut")]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    # A run that is done says so again, and does nothing.
    quiet: list[Any] = []
    assert small(tmp_path / "cut", quiet.append) == again and not quiet


def test_the_target_is_left_as_it_was(tmp_path: Path, small: Train) -> None:
    model = build("llama").train(True)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    state = torch.get_rng_state()
    result = small(tmp_path / "plain", model=model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and not is_enabled(model)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())
    assert result.measured[0].equal == 2
    small(tmp_path / "shared", model=model, data_folder=tmp_path / "plain" / "data")
    assert not (tmp_path / "shared" / "data").exists()


def test_the_target_is_not_frozen_while_it_writes(tmp_path: Path, small: Train) -> None:
    """Torch would copy the LM head for each row of a prefill."""
    model = copy.deepcopy(learnable())
    flags: list[bool] = []
    model.lm_head.register_forward_pre_hook(lambda head, _: flags.append(head.weight.requires_grad))
    small(tmp_path / "run", model=model)
    assert len(flags) > 16 and all(flags)


@pytest.mark.parametrize("ended", [True, False])
def test_an_enabled_target_keeps_what_calls_have_left_in_it(ended: bool, tmp_path: Path, small: Train) -> None:
    from hf_treespec.draft.recycle import table_of

    model = enable(copy.deepcopy(learnable()))
    ids = torch.tensor([prompts(1)[0]])
    model.generate(ids, tree_config=TreeConfig(draft="recycle"), max_new_tokens=9, do_sample=False)
    stats, candidates = model.treespec_stats, TreeConfig(draft="recycle").options_of("recycle")["candidates"]
    table = table_of(model, VOCAB, candidates)
    model.train()
    model.model.layers[1].eval()
    model.model.norm.weight.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    flags = [weight.requires_grad for weight in model.parameters()]

    def report(event: Any) -> None:
        if not ended and event_step(event) > 0:
            raise Killed

    settings = replace(SMALL, kind="eagle3", layers=(1, 2), measured=1)
    with nullcontext() if ended else pytest.raises(Killed):
        small(tmp_path / "run", report, model=model, settings=settings)
    assert is_enabled(model) and model.treespec_stats is stats and table_of(model, VOCAB, candidates) is table
    assert modes == [module.training for module in model.modules()]
    assert flags == [weight.requires_grad for weight in model.parameters()]
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_begins_from_a_trained_draft(kind: str, tmp_path: Path, small: Train) -> None:
    settings = replace(SMALL, kind=kind, measured=0, layers=(1, 2) if kind == "eagle3" else None)
    first = small(tmp_path / "first", settings=settings)
    further = replace(settings, init=first.draft, layers=None, vocabulary=9)
    # Texts of other prompts, of which other ids are the most frequent.
    more = small(tmp_path / "more", settings=further, prompts=prompts(40)[30:])
    if kind == "model":
        begun: Any = AutoModelForCausalLM.from_pretrained(first.draft)
        ended: Any = AutoModelForCausalLM.from_pretrained(more.draft)
    else:
        begun, ended = load_draft(first.draft), load_draft(more.draft)
        assert ended.draft_vocab == 50 and torch.equal(ended.ids, begun.ids)
    assert ended.state_dict().keys() == begun.state_dict().keys()
    # The first look, before any step, is at the draft that was given.
    other: list[Any] = []
    same = replace(further, init=first.draft, loop=LoopSettings(epochs=1, batch_tokens=256, learning_rate=1e-9))
    small(tmp_path / "same", other.append, settings=same)
    assert next(event for event in other if isinstance(event, Progress)).accepted_length == pytest.approx(
        first.accepted_length["best"], abs=1e-6
    )
    # Where the draft lies is no setting; what it is, is one.
    moved = shutil.copytree(first.draft, tmp_path / "moved")
    assert small(tmp_path / "more", settings=replace(further, init=str(moved)), prompts=prompts(40)[30:]) == more
    (file,) = moved.glob("*.safetensors")
    save_file({name: weight + weight.is_floating_point() for name, weight in load_file(file).items()}, file)
    with pytest.raises(OtherRunError, match="init was"):
        small(tmp_path / "more", settings=replace(further, init=str(moved)), prompts=prompts(40)[30:])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "mlp"}, "it is of kind 'medusa', and kind='mlp' is to be trained"),
        ({"depths": 4}, "it drafts 3 tokens ahead, and depths=4"),
        ({"kind": "model"}, "init="),
        ({"init": "nothing"}, "init='nothing': "),
        ({"kind": "eagle3", "layers": (1, 2)}, "a draft to begin from has its own"),
        ({"kind": "mlp", "inner_size": 8}, "a draft to begin from has its own"),
    ],
    ids=["kind", "depths", "head as model", "missing", "layers", "inner size"],
)
def test_drafts_that_a_run_cannot_begin_from(
    changes: dict[str, Any], said: str, tmp_path: Path, small: Train, begun: Path
) -> None:
    with pytest.raises(TrainError) as error:
        small(tmp_path / "run", settings=replace(SMALL, **{"init": str(begun), **changes}))
    told = str(error.value)
    assert told.startswith("init=") and told.count("init=") == 1 and said in told
    assert not (tmp_path / "run").exists()


def test_a_draft_of_another_target_is_none_to_begin_from(tmp_path: Path, small: Train, begun: Path) -> None:
    with pytest.raises(TrainError, match="^init=.*medusa head for"):
        small(tmp_path / "run", settings=replace(SMALL, init=str(begun)), model=build("llama"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["mlp", "model"])
def test_the_card_says_how_to_draft(kind: str, target: Path, tmp_path: Path, small: Train) -> None:
    settings = replace(SMALL, kind=kind, measured=0)
    result = small(tmp_path / "run", settings=settings, name=str(target), tokenizer=words())
    card = (Path(result.draft) / "README.md").read_text()
    code = card.partition("```python\n")[2].partition("```")[0]
    told: dict[str, Any] = {}
    exec(code.replace("this folder", result.draft).replace('"..."', '"w9 w20 w31"'), told)
    assert told["model"].treespec_stats.drafted_nodes
    ids = told["config"].options_of("model")["vocabulary"]
    assert ids == (f"{result.draft}/vocabulary.json" if kind == "model" else None)


def test_another_run_is_refused_by_what_differs(tmp_path: Path, small: Train) -> None:
    out = tmp_path / "run"
    small(out)
    with pytest.raises(OtherRunError, match="depths was 3 there and is 2 now"):
        small(out, settings=replace(SMALL, depths=2))
    with pytest.raises(OtherRunError, match="loop.epochs was 2 there and is 3 now; pass --fresh or another --out"):
        small(out, settings=replace(SMALL, loop=replace(SMALL.loop, epochs=3)))
    with pytest.raises(OtherRunError, match="target was"):
        small(out, model=build("llama"))
    with pytest.raises(OtherRunError, match="prompts was"):
        small(out, prompts=prompts(31))
    # How long it may take is no matter of what it is.
    assert small(out, settings=replace(SMALL, loop=replace(SMALL.loop, minutes=9.0, patience=3))).kind == "medusa"
    told = small(out, settings=replace(SMALL, depths=2), fresh=True)
    assert told.settings["depths"] == 2 and load_draft(out / "draft").max_depth == 2
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "thesis.txt").write_text("mine")
    for fresh in (False, True):
        with pytest.raises(OtherRunError, match="holds files of something else"):
            small(tmp_path / "else", fresh=fresh)


def test_prompts_that_cannot_be_used_are_left_out(tmp_path: Path, small: Train) -> None:
    given = prompts(12)
    result = small(tmp_path / "run", prompts=[*given, given[3], [], [9] * 230])
    assert (result.prompts, result.left_out) == (12, 3)
    with pytest.raises(TrainError, match="prompts: 1 of 3 can be used: expected at least 2 different ones, of 1 to"):
        small(tmp_path / "few", prompts=[[5], [5], [9] * 999])


def test_targets_that_cannot_be_served_are_refused_first(
    tmp_path: Path, small: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no(*_: Any, **__: Any) -> None:
        pytest.fail("texts were written")

    monkeypatch.setattr("hf_treespec.train.data.write_texts", no)
    with pytest.raises(UnsupportedModelError, match="has an encoder"):
        small(tmp_path / "a", model=stock_pair("t5"))
    deep = replace(SMALL, kind="eagle3", layers=(0, 1, 9))
    with pytest.raises(TrainError, match=r"layers=\(0, 1, 9\) .* hidden states from 1 to 2"):
        small(tmp_path / "b", settings=deep)
    with pytest.raises(TrainError, match="layers="):
        small(tmp_path / "c", settings=replace(SMALL, kind="model", layers=(9,)))
    # Right ones find the folder free.
    assert not (tmp_path / "b").exists() and not (tmp_path / "c").exists()


# -- the command --


def one_error(result: Any, *parts: str) -> None:
    assert (result.exit_code, result.stdout) == (2, ""), result
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("treespec: error: "), result.stderr
    assert all(part in lines[0] for part in parts), lines


def test_the_command_and_its_faults(target: Path, tmp_path: Path) -> None:
    def run(*more: object) -> Any:
        tiny = ("--limit", 14, "--new-tokens", 9, "--epochs", 1, "--held-out", 3, "--measured", 1, "--depths", 2)
        return CliRunner().invoke(app, command(target, tmp_path / "run", "--kind", "mlp", *tiny, *more))

    done = run()
    assert done.exit_code == 0 and f"{tmp_path / 'run' / 'draft'}: mlp, " in done.stdout, done.stderr
    assert "step 0 of" in done.stderr and "accepted length" in done.stdout
    one_error(run("--depths", 3), "--out: ", "depths was 2 there and is 3 now; pass --fresh or another --out")
    one_error(run("--kind", "eagle"), "--kind: ", "expected one of eagle3, medusa, mlp, model")
    one_error(run("--temperatures", "0,x"), "--temperatures: '0,x'")
    one_error(run("--layers", "1,2"), "--layers: ")
    one_error(run("--kind", "eagle3", "--layers", "0"), "--layers: ", "from 1 to 2")
    one_error(run("--held-out", 14), "--held-out: held_out=14 of 14 prompts")
    one_error(run("--device", "cuda:1"), "--device: ")
    one_error(run("--precision", "fp16"), "--precision: ")
    one_error(run("--dtype", "int3"), "--dtype: ")
    one_error(run("--set", "b=nowhere.jsonl"), "--set b=nowhere.jsonl: ")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("a file")
    one_error(run(), "--out: ")


def test_a_folder_of_texts_of_another_target(tmp_path: Path, small: Train) -> None:
    small(tmp_path / "a")
    other: PreTrainedModel = build("llama")
    with pytest.raises(OtherRunError, match="target was"):
        small(tmp_path / "b", model=other, data_folder=tmp_path / "a" / "data")
