"""Texts and features of a target in a folder that several training runs may share."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hf_treespec.draft import Features
from hf_treespec.errors import TrainError
from hf_treespec.train.features import Examples, write_features
from hf_treespec.train.shards import claim
from hf_treespec.train.texts import Text, TextSettings, read_texts, write_texts

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

__all__ = ["TargetData"]

# Called with what is being done, and how many tokens came of one more piece of it.
Report = Callable[[str, int], None]


class TargetData:
    """What a target wrote, and what it makes of it.

    Args:
        folder: of the data; made if needed.
        model: the target, in evaluation mode.
        prompts: ids of each.
        settings: of the texts.
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
        if not 0 < held_out < len(prompts):
            raise TrainError(
                f"held_out={held_out} of {len(prompts)} prompts: expected at least one, and some to learn from"
            )
        self._folder = folder
        self._model = model
        self._settings = settings
        self._accelerator = accelerator
        told = hashlib.sha256(repr([tuple(prompt) for prompt in prompts]).encode()).hexdigest()
        about = {"target": name, "prompts": told[:16], "held_out": held_out, **asdict(settings)}
        if accelerator.is_main_process:
            claim(folder, hashlib.sha256(repr(about).encode()).hexdigest(), about, fresh=False)
            for part in ("texts", "held-out"):
                (folder / part).mkdir(exist_ok=True)
        accelerator.wait_for_everyone()
        order = list(prompts)
        random.Random(settings.seed).shuffle(order)
        self._held_out, self._prompts = order[:held_out], order[held_out:]

    def write(self, tokens: int | None, report: Report) -> None:
        """Let the target write what is missing.

        Args:
            tokens: see `write_texts`; of the texts to learn from.
            report: of the progress.
        """
        share = {"rank": self._accelerator.process_index, "world": self._accelerator.num_processes}
        greedy = replace(self._settings, temperatures=(0.0,))
        write_texts(
            self._model,
            self._held_out,
            self._folder / "held-out",
            greedy,
            report=lambda count: report("held-out texts", count),
            **share,
        )
        write_texts(
            self._model,
            self._prompts,
            self._folder / "texts",
            self._settings,
            tokens=tokens,
            report=lambda count: report("texts", count),
            **share,
        )
        self._accelerator.wait_for_everyone()

    def texts(self) -> list[Text]:
        """The texts to learn from that are there."""
        return read_texts(self._folder / "texts")

    def examples(self, features: Features, report: Report) -> tuple[Examples, Examples]:
        """Those to learn from and those held out, with these hidden states."""
        layers = [*map(str, features.layers), *(["last"] if features.last else [])]
        found = []
        for part, texts in (("texts", self.texts()), ("held-out", read_texts(self._folder / "held-out"))):
            folder = self._folder / "-".join([f"{part}-features", *layers])
            if self._accelerator.is_main_process:
                folder.mkdir(exist_ok=True)
            self._accelerator.wait_for_everyone()
            write_features(
                self._model,
                texts,
                folder,
                features,
                rank=self._accelerator.process_index,
                world=self._accelerator.num_processes,
                report=lambda count: report("features", count),
            )
            self._accelerator.wait_for_everyone()
            found.append(Examples(folder))
        return found[0], found[1]
