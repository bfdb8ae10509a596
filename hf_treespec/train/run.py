"""A training run: the target's texts, its hidden states, the draft, and its card, each stage resumable."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_treespec import _compat
from hf_treespec.api.support import require_support
from hf_treespec.config import TreeConfig
from hf_treespec.draft import DraftHead
from hf_treespec.errors import TrainError, UnsupportedModelError
from hf_treespec.train.card import write_card
from hf_treespec.train.checkpoints import Progress
from hf_treespec.train.data import TargetData, check_held_out
from hf_treespec.train.fresh import frequent_ids
from hf_treespec.train.kinds import check_layers, lesson_of, new_draft, save
from hf_treespec.train.loop import fit
from hf_treespec.train.mark import weights_mark
from hf_treespec.train.measure import measure
from hf_treespec.train.processes import check_accelerator, on_first, patient_accelerator
from hf_treespec.train.result import TrainResult
from hf_treespec.train.settings import FREE, TrainSettings
from hf_treespec.train.shards import OtherRunError, claim
from hf_treespec.train.target import frozen, lent, taking_trees

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

__all__ = ["Stage", "train_draft"]

_RESULT = "result.json"
_FOLDERS = ("data", "checkpoints", "draft")


class Stage(NamedTuple):
    """How far a stage of a run has come.

    Attributes:
        name: of the stage.
        done: of its work.
        total: all of it; an end token may make it less.
    """

    name: str
    done: int
    total: int


def train_draft(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    folder: str | Path,
    settings: TrainSettings | None = None,
    accelerator: Accelerator | None = None,
    report: Callable[[Stage | Progress], None] | None = None,
    *,
    name: str | None = None,
    tokenizer: Any = None,
    data_folder: str | Path | None = None,
    made_with: Mapping[str, Any] | None = None,
    fresh: bool = False,
) -> TrainResult:
    """Train a draft for a model on what it makes of some prompts.

    Stopped at any point, the same call goes on where it was; once done, it returns what it came to.

    Args:
        model: the target, a causal LM that takes trees; it is as it was afterwards. No gradient is written into it.
        prompts: token ids of each.
        folder: of the run: `draft/` with the draft and its card, `data/`, `checkpoints/`, `result.json`.
        settings: what to train; None for an EAGLE-3 head.
        accelerator: of the processes that share the work; None for one that accelerate makes.
        report: called on the first process with the progress of each stage, and at each look at the held-out texts.
        name: of the target, for the card; None for the one that it was loaded by.
        tokenizer: saved beside a draft of kind "model".
        data_folder: of texts and hidden states that several runs share; None for `folder/data`.
        made_with: versions and machine for the card; None for versions alone.
        fresh: drop what an earlier run left in the folder.

    Returns:
        Where the draft is, and what it is worth.

    Raises:
        TrainError: for settings that cannot work; `OtherRunError` if the folder holds another run.
        UnsupportedModelError: for a target that takes no trees, or whose hidden states cannot be found.
        UnsupportedCallError: for a draft that the target cannot be given.
    """
    settings = settings or TrainSettings()
    if accelerator is None:
        accelerator = patient_accelerator()
    check_accelerator(accelerator)
    tell = report if report is not None and accelerator.is_main_process else _nothing
    name = name or model.name_or_path or type(model).__name__
    made_with = _versions() if made_with is None else made_with
    _check_target(model)
    with lent(model):
        run = _Run(model, prompts, Path(folder), settings, accelerator, tell, name, made_with)
        run.claim(fresh)
        done = run.finished()
        return run.train(None if data_folder is None else Path(data_folder), tokenizer) if done is None else done


def _nothing(event: Stage | Progress) -> None:
    """What is called where nobody listens."""


def _versions() -> dict[str, Any]:
    return {**{name: version(name) for name in ("torch", "transformers")}, "platform": platform.platform()}


def _check_target(model: PreTrainedModel) -> None:
    if _compat.is_encoder_decoder(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} has an encoder: drafts are trained for decoder-only models, whose texts need no "
            "second input"
        )
    require_support(model, "the model")


class _Run:
    """The stages; see `train_draft`."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        folder: Path,
        settings: TrainSettings,
        accelerator: Accelerator,
        tell: Callable[[Stage | Progress], None],
        name: str,
        made_with: Mapping[str, Any],
    ) -> None:
        # Before the folder is that of this run.
        check_layers(model, settings)
        self._model = model
        self._prompts = _usable(model, prompts, settings)
        self._left_out = len(prompts) - len(self._prompts)
        self._held_out = settings.held_out_of(len(self._prompts))
        check_held_out(self._held_out, len(self._prompts))
        self._folder = folder
        self._settings = settings
        self._accelerator = accelerator
        self._tell = tell
        self._name = name
        self._made_with = made_with
        self._mark = f"{Path(name).name}:{weights_mark(model)}"

    def claim(self, fresh: bool) -> None:
        """Make the folder that of this run."""
        told = hashlib.sha256(repr(self._prompts).encode()).hexdigest()[:16]
        about = {"target": self._mark, "prompts": told, **self._settings.to_dict()}
        if self._settings.init is not None:
            # What counts is the draft, not where it lies.
            about["init"] = weights_mark(new_draft(self._model, (), self._settings))
        loop = {key: value for key, value in about["loop"].items() if f"loop.{key}" not in FREE}
        fingerprint = hashlib.sha256(json.dumps({**about, "loop": loop}, sort_keys=True).encode()).hexdigest()

        def make() -> None:
            folder = self._folder
            if folder.is_dir() and any(folder.iterdir()) and not (folder / "run.json").exists():
                raise OtherRunError(f"{folder} holds files of something else; pass another --out")
            if fresh:
                for part in _FOLDERS:
                    shutil.rmtree(folder / part, ignore_errors=True)
                (folder / _RESULT).unlink(missing_ok=True)
            claim(folder, fingerprint, about, fresh=fresh, free=FREE)
            (folder / "checkpoints").mkdir(exist_ok=True)

        on_first(self._accelerator, make)

    def finished(self) -> TrainResult | None:
        """What the run came to, if it was done before."""
        file = self._folder / _RESULT
        return TrainResult.from_dict(json.loads(file.read_text())) if file.exists() else None

    def train(self, data_folder: Path | None, tokenizer: Any) -> TrainResult:
        """Do what is left to do."""
        settings, model, accelerator = self._settings, self._model, self._accelerator
        self._try()
        data = TargetData(
            self._folder / "data" if data_folder is None else data_folder,
            model,
            self._prompts,
            settings.texts,
            held_out=self._held_out,
            accelerator=accelerator,
            name=self._mark,
        )

        def stage(name: str, done: int, total: int) -> None:
            self._tell(Stage(name, done, total))

        data.write(settings.tokens, stage)
        texts = data.texts()
        tokens = sum(len(text.new) for text in texts)
        ids = frequent_ids(texts, settings.vocabulary, _compat.vocabulary_size(model))
        draft = new_draft(model, ids, settings)
        lesson = lesson_of(draft, model, settings)
        examples, held_out = data.examples(lesson.features, stage)
        checkpoints = self._folder / "checkpoints"
        with frozen(model):
            looks = fit(
                lesson, examples, held_out, checkpoints, settings.loop_settings(), accelerator, report=self._tell
            )
        draft = draft.to(model.device, model.dtype).eval()
        saved = self._folder / "draft"
        on_first(accelerator, lambda: save(draft, saved, target=self._name, ids=ids, tokenizer=tokenizer))
        judged = [text.prompt for text in data.held_out()[: settings.measured]]
        sizes = {"new_tokens": settings.measured_tokens, "max_nodes": settings.max_nodes}
        measured = []
        for number, temperature in enumerate((0.0, 1.0) if judged else ()):
            self._tell(Stage("calls of generate", number * len(judged), 2 * len(judged)))
            measured.append(measure(model, draft, judged, temperature, accelerator, **sizes))
        lengths = {"untrained": looks[0].accepted_length, "best": max(look.accepted_length for look in looks)}
        result = TrainResult(
            draft=str(saved),
            kind=settings.kind,
            target=self._name,
            parameters=sum(weight.numel() for weight in draft.parameters()),
            dtype=str(model.dtype).removeprefix("torch."),
            bytes=sum(path.stat().st_size for path in saved.iterdir() if path.suffix in (".safetensors", ".pt")),
            prompts=len(self._prompts),
            left_out=self._left_out,
            held_out=self._held_out,
            texts=len(texts),
            tokens=tokens,
            tokens_trained=looks[-1].tokens,
            steps=looks[-1].step,
            seconds=looks[-1].seconds,
            accepted_length=lengths,
            measured=tuple(measured),
            settings=settings.to_dict(),
            made_with=dict(self._made_with),
        )

        def finish() -> None:
            write_card(saved, result.to_dict(), looks)
            part = self._folder / "result.part"
            part.write_text(json.dumps(result.to_dict(), indent=2) + "\n")
            part.replace(self._folder / _RESULT)

        on_first(accelerator, finish)
        return result

    def _try(self) -> None:
        """Let an untrained draft draft once, and write it, so that what fails does so before hours of work."""
        model, settings = self._model, self._settings
        ids = range(min(settings.vocabulary, _compat.vocabulary_size(model)))
        draft: Any = new_draft(model, ids, settings).to(model.device, model.dtype).eval()
        if isinstance(draft, DraftHead):
            draft.check(model)
        prompt = torch.tensor([list(self._prompts[0][-4:])], device=model.device)
        call: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
        tree = TreeConfig(max_nodes=4, max_depth=2, fallback="off")
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices), taking_trees(model) as treed:
            treed.generate(prompt, assistant_model=draft, tree_config=tree, max_new_tokens=4, **call)

        def write() -> None:
            with tempfile.TemporaryDirectory() as folder:
                save(draft, Path(folder), target=self._name, ids=ids, tokenizer=None)

        if isinstance(draft, DraftHead):
            on_first(self._accelerator, write)


def _usable(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], settings: TrainSettings
) -> list[tuple[int, ...]]:
    """Prompts with tokens and room behind them, each once."""
    limits = (_compat.max_positions(model), _compat.max_sequence(model))
    # A tree reaches beyond the text.
    behind = max(settings.texts.new_tokens, settings.measured_tokens + settings.max_nodes if settings.measured else 0)
    longest = min((limit for limit in limits if limit), default=1 << 62) - behind
    found = [one for one in dict.fromkeys(tuple(prompt) for prompt in prompts) if 0 < len(one) <= longest]
    if len(found) < 2:
        raise TrainError(
            f"prompts: {len(found)} of {len(prompts)} can be used: expected at least 2 different ones, of 1 to "
            f"{longest} tokens, as the target takes {longest + behind} and {behind} are to come"
        )
    return found
