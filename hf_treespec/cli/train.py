"""`treespec train`: a draft for a model, learnt from what the model makes of the user's prompts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_treespec.cli.faults import UsageFault, faults_reported, one_line
from hf_treespec.cli.options import AttnOption, ChatOption, DtypeOption, JsonOption, ModelArgument, to_json

if TYPE_CHECKING:
    from accelerate import Accelerator
    from tqdm import tqdm

    from hf_treespec.train import Progress, Stage, TrainSettings

__all__ = ["train"]

# Fields that errors of the library name and that are options of the same name; others go by another one.
_FIELDS = (
    "kind", "depths", "vocabulary", "layers", "inner_size", "init", "tokens", "held_out", "measured", "new_tokens",
    "batch", "temperatures", "passes", "epochs", "minutes", "patience", "batch_tokens", "optimizer", "learning_rate",
)  # fmt: skip
_OTHERS = {"prompts": "--set", "mixed_precision": "--precision"}


def train(
    model: ModelArgument,
    sets: Annotated[
        list[str], typer.Option("--set", metavar="NAME=FILE", help="Prompts, as for bench; may be given again.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder of the run; the draft comes to be in draft/ inside.")],
    kind: Annotated[str, typer.Option("--kind", help="eagle3, medusa, mlp (heads), or model.")] = "eagle3",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Prompts of each set.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=1, help="Of the model's own to learn from.")] = None,
    passes: Annotated[int, typer.Option("--passes", min=1, help="Texts of each prompt.")] = 1,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Of each text at most.")] = 160,
    temperatures: Annotated[
        str, typer.Option("--temperatures", help="Of the texts, a batch each in turn; 0 is greedy.")
    ] = "0,0.7,1",
    batch: Annotated[int, typer.Option("--batch", min=1, help="Prompts decoded together.")] = 32,
    depths: Annotated[int, typer.Option("--depths", min=1, help="Tokens ahead to train for.")] = 5,
    vocabulary: Annotated[int, typer.Option("--vocabulary", min=1, help="Frequent ids that a head knows.")] = 8192,
    layers: Annotated[
        str | None, typer.Option("--layers", help="Hidden states that eagle3 reads, or layers that a model keeps.")
    ] = None,
    inner_size: Annotated[
        int | None, typer.Option("--inner-size", min=1, help="Width inside of an eagle3 or mlp head.")
    ] = None,
    init: Annotated[
        str | None, typer.Option("--init", metavar="DRAFT", help="Trained draft of the kind to begin from.")
    ] = None,
    held_out: Annotated[int | None, typer.Option("--held-out", min=1, help="Prompts kept for judging.")] = None,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Over the texts, at most.")] = 10,
    minutes: Annotated[float | None, typer.Option("--minutes", help="Of training, at most.")] = None,
    patience: Annotated[int, typer.Option("--patience", min=1, help="Looks without a gain before it ends.")] = 8,
    batch_tokens: Annotated[int | None, typer.Option("--batch-tokens", min=1, help="Of a training step.")] = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer", help="muon (with adamw) or adamw.")] = None,
    learning_rate: Annotated[float | None, typer.Option("--learning-rate", help="Highest, of adamw.")] = None,
    precision: Annotated[str, typer.Option("--precision", help="Of training: auto, no (float32) or bf16.")] = "auto",
    measured: Annotated[int, typer.Option("--measured", min=0, help="Prompts of calls counted at the end.")] = 16,
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder of texts and states that several runs share.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Drop what an earlier run left in --out.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of texts and training.")] = 0,
    chat: ChatOption = None,
    dtype: DtypeOption = "auto",
    device: Annotated[str, typer.Option("--device", help="auto (an accelerator if there is one) or cpu.")] = "auto",
    attn: AttnOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a draft for the model on its own texts, and write it with a card. Once more, it resumes a stopped run."""
    # Of several processes the first speaks, before accelerate is asked too.
    with faults_reported(quiet=int(os.environ.get("RANK", "0")) > 0):
        from hf_treespec.errors import TrainError, TreeConfigError

        loop = {
            "epochs": epochs, "minutes": minutes, "patience": patience, "batch_tokens": batch_tokens,
            "optimizer": optimizer, "learning_rate": learning_rate, "seed": seed,
        }  # fmt: skip
        texts = {"new_tokens": new_tokens, "batch": batch, "passes": passes, "seed": seed}
        whole = {
            "kind": kind, "depths": depths, "vocabulary": vocabulary, "inner_size": inner_size, "tokens": tokens,
            "init": init, "held_out": held_out, "measured": measured,
        }  # fmt: skip
        try:
            settings = _settings(whole, texts, loop, temperatures, layers)
            facts = _train(
                model,
                sets,
                out,
                settings,
                limit=limit,
                chat=chat,
                load={"dtype": dtype, "attention": attn},
                device=device,
                precision=precision,
                data=data,
                fresh=fresh,
            )
        except (TrainError, TreeConfigError) as error:
            raise UsageFault(_argument(error, data), str(error)) from error
        if facts is None:
            return
        if as_json:
            typer.echo(to_json(facts))
            return
        lengths = facts["accepted_length"]
        rounds = " and ".join(
            f"{one['tokens_per_round']:.2f} at T={one['temperature']:g}" for one in facts["measured"]
        )
        typer.echo(
            f"{facts['draft']}: {facts['kind']}, {facts['parameters'] / 1e6:.1f} million weights, learnt from "
            f"{facts['tokens']} tokens; accepted length {lengths['untrained']:.2f} before and {lengths['best']:.2f} "
            f"after{f'; tokens a round {rounds}' if rounds else ''}"
        )


def _argument(error: Exception, data: Path | None) -> str:
    """The option that an error is about."""
    from hf_treespec.train import BrokenRunError, OtherRunError

    if isinstance(error, BrokenRunError | OtherRunError):
        return "--data" if data is not None and str(error).startswith(str(data)) else "--out"
    name = str(error).partition("=")[0].partition(":")[0]
    return f"--{name.replace('_', '-')}" if name in _FIELDS else _OTHERS.get(name, "MODEL")


def _settings(
    whole: dict[str, Any], texts: dict[str, Any], loop: dict[str, Any], temperatures: str, layers: str | None
) -> TrainSettings:
    from dataclasses import replace

    from hf_treespec.train import TextSettings, TrainSettings

    texts["temperatures"] = _numbers("--temperatures", temperatures, float)
    whole["layers"] = None if layers is None else _numbers("--layers", layers, int)
    settings = TrainSettings(texts=TextSettings(**texts), **whole)
    told = {name: value for name, value in loop.items() if value is not None}
    return replace(settings, loop=replace(settings.loop_settings(), **told))


def _numbers(argument: str, text: str, kind: type) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise UsageFault(argument, f"{text!r}: expected numbers with commas between") from error


def _train(
    name: str,
    sets: list[str],
    out: Path,
    settings: TrainSettings,
    *,
    limit: int | None,
    chat: bool | None,
    load: dict[str, Any],
    device: str,
    precision: str,
    data: Path | None,
    fresh: bool,
) -> dict[str, Any] | None:
    """What the run came to; None on all processes but the first."""
    from hf_treespec.cli.environment import describe_environment
    from hf_treespec.cli.models import LoadOptions, encode_sets, load_model, load_tokenizer
    from hf_treespec.cli.promptsets import load_set
    from hf_treespec.train import train_draft

    LoadOptions(**load)
    accelerator = _accelerator(device, precision)
    prompts = [load_set(spec, limit) for spec in sets]
    tokenizer = load_tokenizer(name, "MODEL")
    inputs = [one["input_ids"][0].tolist() for one in encode_sets(tokenizer, prompts, chat)]
    model = load_model(name, "MODEL", LoadOptions(**load, device=str(accelerator.device)))
    progress = _Progress()
    try:
        result = train_draft(
            model,
            inputs,
            out,
            settings,
            accelerator,
            progress.show,
            name=name,
            tokenizer=tokenizer,
            data_folder=data,
            made_with=describe_environment(),
            fresh=fresh,
        )
    except OSError as error:
        raise UsageFault("--out", f"{out}: {one_line(error)}") from error
    finally:
        progress.close()
        first = accelerator.is_main_process
    accelerator.end_training()
    return result.to_dict() if first else None


def _accelerator(device: str, precision: str) -> Accelerator:
    import torch

    from hf_treespec.train.processes import patient_accelerator

    if device not in ("auto", "cpu"):
        raise UsageFault("--device", f"{device!r}: expected auto or cpu; CUDA_VISIBLE_DEVICES chooses among several")
    if precision not in ("auto", "no", "bf16"):
        raise UsageFault("--precision", f"{precision!r}: expected auto, no or bf16")
    asked = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    # Without this, accelerate takes processes on CPUs for one process each.
    cpu = device == "cpu" or asked or not torch.accelerator.is_available()
    chosen = os.environ.get("ACCELERATE_MIXED_PRECISION") or ("no" if cpu else "bf16")
    try:
        return patient_accelerator(cpu=cpu, mixed_precision=chosen if precision == "auto" else precision)
    except ValueError as error:
        raise UsageFault("--precision", one_line(error)) from error


class _Progress:
    """A bar for each stage, and a line for each look where no bar is seen."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._stage = ""

    def show(self, event: Stage | Progress) -> None:
        """Take what a run reports."""
        from hf_treespec.train import Progress

        if isinstance(event, Progress):
            bar = self._of("training", event.steps)
            bar.set_postfix_str(f"accepted length {event.accepted_length:.2f}")
            if bar.disable:
                loss = "" if event.loss is None else f", loss {event.loss:.3f}"
                best = ", best so far" if event.best else ""
                typer.echo(
                    f"step {event.step} of {event.steps}: accepted length {event.accepted_length:.3f}{loss}{best}",
                    err=True,
                )
            bar.update(event.step - bar.n)
            return
        new = event.name != self._stage
        bar = self._of(event.name, event.total)
        if new and bar.disable:
            typer.echo(f"{event.name}: {event.done} of {event.total} at most", err=True)
        bar.update(event.done - bar.n)

    def _of(self, stage: str, total: int) -> tqdm[Any]:
        from hf_treespec.cli.progress import progress_bar

        if self._bar is None or stage != self._stage:
            self.close()
            self._bar, self._stage = progress_bar(total, stage), stage
        return self._bar

    def close(self) -> None:
        """End the bar that is there."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
