"""Where a run of training stands, on disk: the last look, and the best weights so far."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_treespec.train.processes import on_first
from hf_treespec.train.shards import BrokenRunError

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["Checkpoints", "Progress"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands when it looks at its held-out texts.

    Attributes:
        step: steps done.
        steps: of the whole run.
        tokens: of the target's own that were learnt from so far, those of each epoch counted.
        seconds: of training.
        loss: mean of the steps since the last look; None before the first step.
        accepted_length: tokens a round of a greedy chain on the held-out texts.
        best: whether that is the longest so far.
    """

    step: int
    steps: int
    tokens: int
    seconds: float
    loss: float | None
    accepted_length: float
    best: bool


class Checkpoints:
    """The last state and the best weights of a run, each file written whole or not at all.

    All processes have the same state, so the first one writes it.

    Args:
        folder: of the files; it exists.
        draft: what is trained.
        optimizers: of it.
        accelerator: of all processes.
    """

    def __init__(self, folder: Path, draft: nn.Module, optimizers: Sequence[Any], accelerator: Accelerator) -> None:
        self._folder = folder
        self._draft = draft
        self._optimizers = optimizers
        self._accelerator = accelerator

    def resume(self) -> list[Progress]:
        """Load the last state; the looks up to it."""
        path = self._folder / "last.pt"
        if not path.exists():
            return []
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, OSError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise BrokenRunError(f"{path} cannot be read: {error}; pass --fresh or another --out") from error
        self._draft.load_state_dict(state["draft"])
        for optimizer, kept in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        return [Progress(**look) for look in state["looks"]]

    def save(self, looks: Sequence[Progress]) -> None:
        """The state at the last look."""
        on_first(self._accelerator, lambda: self._save(looks))

    def _save(self, looks: Sequence[Progress]) -> None:
        best = [self._folder / f"best-{look.step}.pt" for look in looks if look.best]
        if looks[-1].best:
            _write(self._draft.state_dict(), best[-1])
        told = [asdict(look) for look in looks]
        kept = [optimizer.state_dict() for optimizer in self._optimizers]
        state = {"draft": self._draft.state_dict(), "optimizers": kept, "looks": told}
        _write(state, self._folder / "last.pt")
        lines = self._folder / "progress.part"
        lines.write_text("".join(json.dumps(look) + "\n" for look in told))
        lines.replace(self._folder / "progress.jsonl")
        # Only now: the state before this one named it.
        for old in best[:-1]:
            old.unlink(missing_ok=True)

    def take_best(self, looks: Sequence[Progress]) -> None:
        """Load the weights of the best look."""
        step = next(look.step for look in reversed(looks) if look.best)
        path = self._folder / f"best-{step}.pt"
        self._draft.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


def _write(state: Any, path: Path) -> None:
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
