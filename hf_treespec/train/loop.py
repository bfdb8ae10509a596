"""The training loop: accelerate's processes and precision, checkpoints, and an end when held-out texts gain no more."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_treespec.errors import TrainError
from hf_treespec.train.batches import batches, stacked
from hf_treespec.train.features import Examples
from hf_treespec.train.lessons import Lesson

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["LoopSettings", "Progress", "fit", "held_out_length"]

_KEPT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """How a draft is trained.

    Args:
        epochs: over all texts, at most.
        batch_tokens: of each process and step.
        learning_rate: highest; it rises over the first `warmup` of the steps and falls to zero as a cosine.
        warmup: share of the steps.
        weight_decay: of AdamW.
        clip: largest norm of the gradient.
        judge_every: steps between looks at the held-out texts; None for four an epoch.
        patience: end after so many looks without a longer accepted length.
        minutes: end after so many minutes of training; None without a bound.
        seed: of the order of the texts.

    Raises:
        TrainError: for values that cannot work.
    """

    epochs: int = 10
    batch_tokens: int = 4096
    learning_rate: float = 1e-3
    warmup: float = 0.03
    weight_decay: float = 0.01
    clip: float = 1.0
    judge_every: int | None = None
    patience: int = 8
    minutes: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_tokens", "patience"):
            if getattr(self, name) < 1:
                raise TrainError(f"{name}={getattr(self, name)}: expected at least 1")
        if not self.learning_rate > 0:
            raise TrainError(f"learning_rate={self.learning_rate}: expected more than 0")


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands when it looks at its held-out texts.

    Attributes:
        step: steps done.
        steps: of the whole run.
        tokens: of the target's own that were learnt from so far, those of each epoch counted.
        seconds: of training.
        loss: mean of the steps since the last look.
        accepted_length: tokens a round of a greedy chain on the held-out texts.
        best: whether that is the longest so far.
    """

    step: int
    steps: int
    tokens: int
    seconds: float
    loss: float
    accepted_length: float
    best: bool


def held_out_length(lesson: Lesson, held_out: Examples, batch_tokens: int, accelerator: Accelerator) -> float:
    """Tokens a round that a greedy chain as deep as the lesson would bring on these texts: accepted ones and the bonus.

    Over all places at which a round could begin. Exact for texts that the target decoded greedily.
    """
    counts = torch.zeros(2, dtype=torch.float64)
    lesson.train(False)
    mine = batches(held_out, batch_tokens, seed=0, epoch=0)[accelerator.process_index :: accelerator.num_processes]
    with accelerator.autocast():
        for batch in mine:
            hits, roots = lesson.accepted(stacked([held_out[index] for index in batch]).to(accelerator.device))
            counts += torch.tensor([hits, roots], dtype=torch.float64)
    lesson.train(True)
    total = accelerator.reduce(counts.float().to(accelerator.device))
    hits, roots = total.tolist()
    return 1 + hits / max(1.0, roots)


def fit(
    lesson: Lesson,
    examples: Examples,
    held_out: Examples,
    folder: Path,
    settings: LoopSettings,
    accelerator: Accelerator,
    *,
    report: Callable[[Progress], None],
) -> list[Progress]:
    """Train; the draft of the lesson then has the weights of the longest accepted length.

    A killed run goes on from its last checkpoint when it is called again with the same settings and texts.

    Args:
        lesson: with the draft.
        examples: to learn from.
        held_out: to judge by; the target decoded them greedily.
        folder: of the checkpoints and of `progress.jsonl`.
        settings: how.
        accelerator: of all processes.
        report: called at each look.

    Returns:
        All looks, those before a resumption included.
    """
    share = {"rank": accelerator.process_index, "world": accelerator.num_processes}
    per_epoch = len(batches(examples, settings.batch_tokens, seed=settings.seed, epoch=0, **share))
    # Batches are cut anew each epoch, so that there may be one more or less; the schedule goes by the first.
    steps = per_epoch * settings.epochs
    every = settings.judge_every or max(1, per_epoch // 4)
    weights = [p for p in lesson.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.AdamW(
        weights, settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay, fused=True
    )
    rise = max(1, round(settings.warmup * steps))

    def rate(step: int) -> float:
        fallen = (step - rise) / max(1, steps - rise)
        return (step + 1) / rise if step < rise else 0.5 * (1 + math.cos(math.pi * min(1.0, fallen)))

    model, optimizer = accelerator.prepare(lesson, optimizer)
    state = _State(folder, accelerator)
    looks, step = state.resume()
    best = max((look.accepted_length for look in looks), default=-math.inf)
    tokens, before = (looks[-1].tokens, looks[-1].seconds) if looks else (0, 0.0)
    start, losses = time.monotonic(), [0.0, 0.0]
    done = False
    lesson.train(True)
    for epoch in range(step // max(1, per_epoch), settings.epochs):
        if done:
            break
        order = batches(examples, settings.batch_tokens, seed=settings.seed, epoch=epoch, **share)[:per_epoch]
        for index in order[step - epoch * per_epoch :]:
            batch = stacked([examples[one] for one in index]).to(accelerator.device)
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * rate(step)
            with accelerator.autocast():
                loss = model(batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(weights, settings.clip)
            optimizer.step()
            optimizer.zero_grad()
            tokens += int(batch.new_BT.sum()) * accelerator.num_processes
            losses = [losses[0] + float(loss.detach()), losses[1] + 1]
            step += 1
            if step % every and step != steps:
                continue
            length = held_out_length(lesson, held_out, settings.batch_tokens, accelerator)
            seconds = before + time.monotonic() - start
            looks.append(Progress(step, steps, tokens, seconds, losses[0] / losses[1], length, best=length > best))
            best, losses = max(best, length), [0.0, 0.0]
            state.save(looks, lesson)
            report(looks[-1])
            since = len(looks) - 1 - max(n for n, look in enumerate(looks) if look.best)
            late = settings.minutes is not None and seconds >= 60 * settings.minutes
            # Of all processes the first decides, since their clocks differ.
            done = bool(accelerator.reduce(torch.tensor([float(late)], device=accelerator.device)) > 0)
            done = done or since >= settings.patience
            if done:
                break
    accelerator.wait_for_everyone()
    state.take_best(lesson)
    return looks


class _State:
    """Checkpoints of a run in a folder: the last two, and the weights of the best."""

    def __init__(self, folder: Path, accelerator: Accelerator) -> None:
        self._folder = folder
        self._accelerator = accelerator
        self._looks = folder / "progress.jsonl"

    def _steps(self) -> list[Path]:
        found = [path for path in self._folder.glob("step-*") if (path / "whole").exists()]
        return sorted(found, key=lambda path: int(path.name.partition("-")[2]))

    def resume(self) -> tuple[list[Progress], int]:
        """Load the last checkpoint; the looks up to it and its step."""
        found = self._steps()
        if not found:
            return [], 0
        step = int(found[-1].name.partition("-")[2])
        self._accelerator.load_state(str(found[-1]))
        looks = [Progress(**json.loads(line)) for line in self._looks.read_text().splitlines()]
        return [look for look in looks if look.step <= step], step

    def save(self, looks: list[Progress], lesson: Lesson) -> None:
        """A checkpoint at the last look."""
        last = looks[-1]
        path = self._folder / f"step-{last.step}"
        if self._accelerator.is_main_process:
            shutil.rmtree(path, ignore_errors=True)
        self._accelerator.wait_for_everyone()
        # Drafts may hold one tensor under several names, which safetensors would not.
        self._accelerator.save_state(str(path), safe_serialization=False)
        if self._accelerator.is_main_process:
            self._looks.write_text("".join(json.dumps(asdict(look)) + "\n" for look in looks))
            if last.best:
                unfinished = self._folder / "best.unfinished"
                torch.save(lesson.draft.state_dict(), unfinished)
                unfinished.replace(self._folder / "best.pt")
            (path / "whole").touch()
            for old in self._steps()[:-_KEPT]:
                shutil.rmtree(old)
        self._accelerator.wait_for_everyone()

    def take_best(self, lesson: Lesson) -> None:
        """Load the best weights."""
        path = self._folder / "best.pt"
        if path.exists():
            lesson.draft.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
