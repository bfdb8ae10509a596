"""What the target makes of its texts, once and on disk: hidden states of each token and the most likely next ones.

A part holds some texts, one behind the other, and is written whole or not at all. Texts are read back one by one, so
that what is trained on need not fit into memory.

Shapes: N tokens of a part, F hidden states side by side, K likely tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_treespec.draft import Features
from hf_treespec.engine import Prompt, tapped
from hf_treespec.errors import TrainError
from hf_treespec.train.texts import Text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Example", "Examples", "write_features"]

_TEXTS = 64
_FORWARD_TOKENS = 2048
LIKELY = 64


@dataclass(frozen=True, slots=True)
class Example:
    """One text as the target read it; T tokens.

    Attributes:
        tokens_T: int64 ids.
        prompt: how many of them are the prompt, on which no draft is judged.
        features_TF: hidden states; F is 0 if the draft reads none.
        likely_TK: int64 ids of the most likely tokens behind each, most likely first.
        logp_TK: float32 natural logarithms of their probabilities at temperature 1.
    """

    tokens_T: Tensor
    prompt: int
    features_TF: Tensor
    likely_TK: Tensor
    logp_TK: Tensor


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.safetensors"


def write_features(
    model: PreTrainedModel,
    texts: Sequence[Text],
    folder: Path,
    features: Features,
    *,
    rank: int = 0,
    world: int = 1,
    report: Callable[[int], None] | None = None,
) -> None:
    """Write the parts that are not there yet.

    Args:
        model: the target, in evaluation mode.
        texts: all of them, in an order that other runs of the folder share: one may have more of them than another.
        folder: of the parts; it exists.
        features: which hidden states.
        rank: of this process.
        world: how many processes share the work.
        report: called after each part with the texts up to it.
    """
    for number, first in enumerate(range(0, len(texts), _TEXTS)):
        of_part = texts[first : first + _TEXTS]
        path = _part(folder, number)
        if number % world != rank or (path.exists() and _holds(path, of_part)):
            continue
        made = [_read(model, batch, features) for batch in _batches(of_part)]
        tensors = {name: torch.cat([part[name] for part in made]) for name in made[0]}
        # A name of its own: another run may be writing the same part.
        unfinished = path.with_suffix(f".unfinished-{os.getpid()}")
        save_file(tensors, unfinished)
        os.replace(unfinished, path)
        if report is not None:
            report(first + len(of_part))


def _holds(path: Path, texts: Sequence[Text]) -> bool:
    """Whether a part begins with these texts; where it ends too early it is written anew."""
    with safe_open(path, "pt") as file:
        lengths, prompts = (file.get_tensor(name)[: len(texts)].tolist() for name in ("lengths", "prompts"))
        tokens = file.get_slice("tokens")[: sum(lengths)].tolist()
    wanted = [token for text in texts for token in (*text.prompt, *text.new)]
    return bool(prompts == [len(text.prompt) for text in texts] and tokens == wanted)


def _batches(texts: Sequence[Text]) -> list[list[Text]]:
    """In order, each of about as many tokens as a forward should have."""
    batches: list[list[Text]] = [[]]
    width = 0
    for text in texts:
        width = max(width, len(text.prompt) + len(text.new))
        if batches[-1] and width * (len(batches[-1]) + 1) > _FORWARD_TOKENS:
            batches.append([])
            width = len(text.prompt) + len(text.new)
        batches[-1].append(text)
    return batches


def _read(model: PreTrainedModel, texts: Sequence[Text], features: Features) -> dict[str, Tensor]:
    whole = [[*text.prompt, *text.new] for text in texts]
    width = max(map(len, whole))
    # Padding on the right: causal models do not see it, and positions need no correction.
    ids = torch.tensor([one + [0] * (width - len(one)) for one in whole])
    mask = torch.tensor([[1] * len(one) + [0] * (width - len(one)) for one in whole])
    prompt = Prompt(mask, width, width, mask[:, -1:], [len(one) for one in whole], whole)
    with torch.no_grad(), tapped(model, features if features.count else None) as taps:
        inputs: dict[str, Any] = {"attention_mask": mask.to(model.device), "use_cache": False}
        if taps is None:
            logits = model(ids.to(model.device), **inputs).logits
            states = [torch.zeros((len(one), 0), dtype=torch.bfloat16) for one in whole]
        else:
            with taps.watched():
                logits = model(ids.to(model.device), **inputs).logits
            states = [state for state in taps.of_prompt(prompt) if state is not None]
    real = mask.bool().to(logits.device)
    # Row by row: the logits of all tokens in float32 at once may be larger than the model.
    tops = [_likely(row[keep]) for row, keep in zip(logits, real, strict=True)]
    return {
        "tokens": torch.tensor([token for one in whole for token in one], dtype=torch.int32),
        "lengths": torch.tensor([len(one) for one in whole], dtype=torch.int32),
        "prompts": torch.tensor([len(text.prompt) for text in texts], dtype=torch.int32),
        "features": torch.cat(states).to("cpu", torch.bfloat16),
        "likely": torch.cat([ids for ids, _ in tops]),
        "logp": torch.cat([logp for _, logp in tops]),
    }


def _likely(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits_NV.float()
    top, ids = logits.topk(min(LIKELY, logits.shape[-1]))
    return ids.to("cpu", torch.int32), (top - logits.logsumexp(-1, keepdim=True)).to("cpu", torch.float16)


class Examples:
    """The texts of a folder of parts, read one by one.

    Args:
        folder: of the parts.
        count: how many texts; the folder may hold more.

    Raises:
        TrainError: if some are missing.
    """

    def __init__(self, folder: Path, count: int) -> None:
        paths = [_part(folder, number) for number in range(-(-count // _TEXTS))]
        if not count or not all(path.exists() for path in paths):
            raise TrainError(f"{folder}: expected {len(paths)} parts of features; let them be written again")
        # Open files by process and path: what is mapped before a fork is none of the child's.
        self._files: dict[tuple[int, Path], Any] = {}
        # Of each text its part and where its tokens lie there.
        self._places: list[tuple[Path, int, int, int]] = []
        for path in paths:
            with safe_open(path, "pt") as file:
                lengths, prompts = file.get_tensor("lengths").tolist(), file.get_tensor("prompts").tolist()
            start = 0
            for length, prompt in zip(lengths, prompts, strict=True):
                self._places.append((path, start, start + length, prompt))
                start += length
        if len(self._places) < count:
            raise TrainError(
                f"{folder}: {len(self._places)} of {count} texts are there; let features be written again"
            )
        del self._places[count:]

    def __len__(self) -> int:
        return len(self._places)

    def length(self, index: int) -> int:
        """Tokens of a text."""
        _, start, end, _ = self._places[index]
        return end - start

    def new_tokens(self, index: int) -> int:
        """Tokens of a text that are not of its prompt."""
        _, start, end, prompt = self._places[index]
        return end - start - prompt

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_files": {}}

    def __getitem__(self, index: int) -> Example:
        """One text."""
        path, start, end, prompt = self._places[index]
        key = os.getpid(), path
        if key not in self._files:
            self._files[key] = safe_open(path, "pt")
        part = self._files[key]
        cut = {name: part.get_slice(name)[start:end] for name in ("tokens", "features", "likely", "logp")}
        return Example(cut["tokens"].long(), prompt, cut["features"], cut["likely"].long(), cut["logp"].float())
