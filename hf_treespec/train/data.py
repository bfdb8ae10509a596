"""Texts and features of a target in a folder that several training runs may share."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_treespec.draft import Features
from hf_treespec.errors import TrainError
from hf_treespec.train.features import Examples, write_features
from hf_treespec.train.processes import on_first
from hf_treespec.train.shards import OtherRunError, claim
from hf_treespec.train.texts import Text, TextSettings, count_units, read_texts, write_texts

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

__all__ = ["Report", "TargetData", "check_held_out"]

# Called with what is being done, how much of it is done, and how much it is in all.
Report = Callable[[str, int, int], None]


def check_held_out(held_out: int, prompts: int) -> None:
    """Refuse a number of held-out prompts that leaves none for one of both uses.

    Raises:
        TrainError: naming both numbers.
    """
    if not 0 < held_out < prompts:
        raise TrainError(f"held_out={held_out} of {prompts} prompts: expected at least one, and some to learn from")


class TargetData:
    """What a target wrote, and what it makes of it.

    Args:
        folder: of the data; made if needed. One run at a time may let texts be written into it.
        model: the target, in evaluation mode.
        prompts: ids of each.
        settings: of the texts. More `passes` only add texts, so a folder serves any number of them.
        held_out: how many of the prompts are kept for judging drafts; their texts are greedy.
        accelerator: of all processes, which share the work.
        name: of the target, so that a folder is not taken for that of another one.

    Raises:
        TrainError: if there are too few prompts.
        OtherRunError: if the folder holds data of another target, of other prompts or settings.
    """

    def __init__(
        self,
        folder: Path,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        settings: TextSettings,
        *,
        held_out: int,
        accelerator: Accelerator,
        name: str,
    ) -> None:
        check_held_out(held_out, len(prompts))
        self._folder = folder
        self._model = model
        self._accelerator = accelerator
        told = hashlib.sha256(repr([tuple(prompt) for prompt in prompts]).encode()).hexdigest()
        about = {"target": name, "prompts": told[:16], "held_out": held_out, **asdict(settings)}
        del about["passes"]

        def make() -> None:
            try:
                claim(folder, hashlib.sha256(repr(about).encode()).hexdigest(), about, fresh=False)
            except OtherRunError as error:
                said = str(error).replace("pass --fresh or another --out", "pass another folder of data")
                raise OtherRunError(said) from error
            for part in ("texts", "held-out"):
                (folder / part).mkdir(exist_ok=True)

        on_first(accelerator, make)
        order = list(prompts)
        random.Random(settings.seed).shuffle(order)
        greedy = replace(settings, temperatures=(0.0,), passes=1)
        # Per part its prompts, settings and progress.
        self._parts: dict[str, tuple[Sequence[Sequence[int]], TextSettings]] = {
            "held-out": (order[:held_out], greedy),
            "texts": (order[held_out:], settings),
        }
        self._texts: dict[str, list[Text]] = {}

    def write(self, tokens: int | None, report: Report) -> None:
        """Let the target write what is missing, and read it.

        Args:
            tokens: see `write_texts`; of the texts to learn from.
            report: of the progress, in tokens.
        """
        for part, (prompts, settings) in self._parts.items():
            wanted = tokens if part == "texts" else None
            most = len(prompts) * settings.passes * settings.new_tokens
            total = most if wanted is None else min(wanted, most)
            what = {"texts": "texts", "held-out": "held-out texts"}[part]
            write_texts(
                self._model,
                prompts,
                self._folder / part,
                settings,
                tokens=wanted,
                report=lambda done, what=what, total=total: report(what, min(done, total), total),  # type: ignore[misc]
                **self._share(),
            )
            self._accelerator.wait_for_everyone()
            self._texts[part] = read_texts(self._folder / part, count_units(prompts, settings), wanted)

    def _share(self) -> dict[str, Any]:
        return {"rank": self._accelerator.process_index, "world": self._accelerator.num_processes}

    def texts(self) -> list[Text]:
        """The texts to learn from, after `write`."""
        return self._texts["texts"]

    def held_out(self) -> list[Text]:
        """Those to judge by, after `write`."""
        return self._texts["held-out"]

    def examples(self, features: Features, report: Report) -> tuple[Examples, Examples]:
        """Those to learn from and those held out, with these hidden states."""
        layers = [*map(str, features.layers), *(["last"] if features.last else [])]
        found = []
        for part in ("texts", "held-out"):
            texts = self._texts[part]
            folder = self._folder / "-".join([f"{part}-features", *layers])
            on_first(self._accelerator, lambda folder=folder: folder.mkdir(exist_ok=True))  # type: ignore[misc]
            total = len(texts)
            write_features(
                self._model,
                texts,
                folder,
                features,
                report=lambda done, total=total: report("features", done, total),  # type: ignore[misc]
                **self._share(),
            )
            self._accelerator.wait_for_everyone()
            found.append(Examples(folder, len(texts)))
        return found[0], found[1]
