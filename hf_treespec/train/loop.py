"""The training loop: processes and precision by accelerate, checkpoints, an end when held-out texts gain no more."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_treespec.errors import TrainError
from hf_treespec.train.batches import batches, share, stacked
from hf_treespec.train.checkpoints import Checkpoints, Progress
from hf_treespec.train.features import Examples
from hf_treespec.train.lessons import Lesson
from hf_treespec.train.optimizers import OPTIMIZERS, make_optimizers, set_rate
from hf_treespec.train.processes import check_accelerator

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["LoopSettings", "Progress", "fit", "held_out_length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """How a draft is trained.

    Args:
        epochs: over all texts, at most.
        batch_tokens: of each step, shared by all processes, so that their number changes nothing.
        optimizer: ``"adamw"``, or ``"muon"`` for the matrices between hidden states, with AdamW for all else.
        learning_rate: highest, of AdamW; matrices under Muon have three times as much. It rises over the first
            `warmup` of the steps and falls to zero as a cosine.
        warmup: share of the steps.
        weight_decay: of all weights.
        clip: largest norm of the gradient.
        judge_every: steps between looks at the held-out texts; None for a quarter of an epoch, and 20 at least.
        patience: end after so many looks without a longer accepted length.
        minutes: end after so many minutes of training; None without a bound.
        seed: of the order of the texts.

    Raises:
        TrainError: for values that cannot work.
    """

    epochs: int = 10
    batch_tokens: int = 4096
    optimizer: str = "adamw"
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
        if self.optimizer not in OPTIMIZERS:
            raise TrainError(f"optimizer={self.optimizer!r}: expected one of {', '.join(OPTIMIZERS)}")
        for name, value in (("judge_every", self.judge_every), ("minutes", self.minutes)):
            if value is not None and not value > 0:
                raise TrainError(f"{name}={value}: expected more than 0, or None")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise TrainError(f"{name}={getattr(self, name)}: expected more than 0")
        if not 0 <= self.warmup <= 1 or not self.weight_decay >= 0:
            raise TrainError(
                f"warmup={self.warmup}, weight_decay={self.weight_decay}: expected a share of the steps, and 0 or more"
            )


def held_out_length(lesson: Lesson, held_out: Examples, batch_tokens: int, accelerator: Accelerator) -> float:
    """Tokens a round that a greedy chain as deep as the lesson would bring: accepted ones, and the target's own.

    Over all places at which a round could begin. Exact for texts that the target decoded greedily.
    """
    counts = torch.zeros((1, 2), dtype=torch.long)
    looked = batches(held_out, batch_tokens, seed=0, epoch=0)[accelerator.process_index :: accelerator.num_processes]
    with accelerator.autocast():
        for batch in looked:
            hits, roots = lesson.accepted(stacked([held_out[index] for index in batch]).to(accelerator.device))
            counts += torch.tensor([hits, roots])
    hits, roots = accelerator.gather(counts.to(accelerator.device)).sum(0).tolist()
    return float(1 + hits / max(1, roots))


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

    A killed run goes on from its last look when it is called again with the same settings and texts, and comes to what
    it would have come to. The draft stays in evaluation mode: what it is shown is a law, no sample of one, so that
    dropout would only blur it.

    Args:
        lesson: with the draft, whose weights are float32 whatever the precision of the accelerator.
        examples: to learn from.
        held_out: to judge by; the target decoded them greedily.
        folder: of the checkpoints and of `progress.jsonl`; it exists.
        settings: how.
        accelerator: of all processes.
        report: called at each look, the first of which comes before the first step.

    Returns:
        All looks, those before a resumption included.

    Raises:
        TrainError: if the loss is no number any more, or the accelerator trains in a way that is not supported.
    """
    check_accelerator(accelerator)
    sizes = [
        len(batches(examples, settings.batch_tokens, seed=settings.seed, epoch=epoch))
        for epoch in range(settings.epochs)
    ]
    steps = sum(sizes)
    every = settings.judge_every or max(20, sizes[0] // 4)
    lesson.float().eval()
    weights = [p for p in lesson.parameters() if p.requires_grad]
    made = make_optimizers(
        lesson, settings.optimizer, learning_rate=settings.learning_rate, weight_decay=settings.weight_decay
    )
    model, *optimizers = accelerator.prepare(lesson, *made)
    checkpoints = Checkpoints(folder, lesson.draft, optimizers, accelerator)
    looks = checkpoints.resume()

    def look(step: int, tokens: int, seconds: float, loss: float | None) -> None:
        if loss is not None and not math.isfinite(loss):
            raise TrainError(f"the loss is {loss} after {step} steps: expected a number. Try a lower learning_rate")
        length = held_out_length(lesson, held_out, settings.batch_tokens, accelerator)
        best = length > max((one.accepted_length for one in looks), default=-math.inf)
        looks.append(Progress(step, steps, tokens, seconds, loss, length, best))
        checkpoints.save(looks)
        report(looks[-1])

    if not looks:
        look(0, 0, 0.0, None)
    step, tokens, before = looks[-1].step, looks[-1].tokens, looks[-1].seconds
    start = time.monotonic()
    total, count = torch.zeros((), device=accelerator.device), 0
    for batch in _from(step, examples, settings, sizes):
        if count == 0 and _ended(looks, settings, accelerator):
            break
        mine = share(examples, batch, accelerator.process_index, accelerator.num_processes).to(accelerator.device)
        for optimizer in optimizers:
            set_rate(optimizer, _rate(step, steps, settings.warmup))
        with accelerator.autocast():
            loss, weight = model(mine)
        # Gradients are averaged over the processes; so each has its part of the whole batch's mean.
        mean = accelerator.reduce(weight.detach()).clamp(min=1.0) / accelerator.num_processes
        accelerator.backward(loss / mean)
        accelerator.clip_grad_norm_(weights, settings.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        tokens += sum(map(examples.new_tokens, batch))
        total, count, step = total + loss.detach() / mean, count + 1, step + 1
        if step % every == 0 or step == steps:
            mean_loss = float(accelerator.reduce(total, reduction="mean")) / count
            look(step, tokens, before + time.monotonic() - start, mean_loss)
            total, count = torch.zeros_like(total), 0
    accelerator.wait_for_everyone()
    checkpoints.take_best(looks)
    return looks


def _rate(step: int, steps: int, warmup: float) -> float:
    """Share of the learning rate: a rise, and half a cosine down."""
    rise = max(1, round(warmup * steps))
    fallen = (step - rise) / max(1, steps - rise)
    return (step + 1) / rise if step < rise else 0.5 * (1 + math.cos(math.pi * min(1.0, fallen)))


def _from(step: int, examples: Examples, settings: LoopSettings, sizes: list[int]) -> Iterator[list[int]]:
    """The batches of all epochs from a step on."""
    for epoch, size in enumerate(sizes):
        if step < size:
            yield from batches(examples, settings.batch_tokens, seed=settings.seed, epoch=epoch)[step:]
        step = max(0, step - size)


def _ended(looks: list[Progress], settings: LoopSettings, accelerator: Accelerator) -> bool:
    """Whether the last look was one too many."""
    since = len(looks) - 1 - max(place for place, look in enumerate(looks) if look.best)
    late = settings.minutes is not None and looks[-1].seconds >= 60 * settings.minutes
    # Clocks of processes differ: one that is late is enough.
    return bool(accelerator.reduce(torch.tensor(float(late or since >= settings.patience), device=accelerator.device)))
