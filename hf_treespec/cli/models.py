"""Loading models and tokenizers, and turning prompts into token ids."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from hf_treespec.cli.faults import UsageFault, one_line
from hf_treespec.cli.promptsets import PromptSet
from hf_treespec.draft.heads import is_head, load_draft

__all__ = [
    "LoadOptions",
    "check_path",
    "encode",
    "encode_sets",
    "load_drafter",
    "load_model",
    "load_tokenizer",
    "loading",
    "pad_arguments",
]

_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load a model; checked when it is made, before anything is read.

    Args:
        dtype: one of the names that `--dtype` takes.
        device: a torch device, or "auto".
        attention: attention implementation, None for the model's default.

    Raises:
        UsageFault: naming the option.
    """

    dtype: str = "auto"
    device: str = "auto"
    attention: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise UsageFault("--dtype", f"{self.dtype!r}: expected one of {', '.join(_DTYPES)}")
        self.torch_device()

    def torch_device(self) -> torch.device:
        """The device, with "auto" resolved."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise UsageFault("--device", f"{self.device!r}: {one_line(error)}") from error
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise UsageFault("--device", f"{self.device!r}: torch sees {torch.cuda.device_count()} CUDA devices")
        return device

    def keywords(self) -> dict[str, Any]:
        """Keywords of `from_pretrained` and `from_config`; "auto" leaves the type to the saved config."""
        keywords: dict[str, Any] = {"dtype": self.dtype if self.dtype == "auto" else getattr(torch, self.dtype)}
        if self.attention is not None:
            keywords["attn_implementation"] = self.attention
        return keywords


def check_path(name: str, argument: str) -> None:
    """Refuse a path that is not there, before transformers takes it for a name on the hub.

    Raises:
        UsageFault: naming the argument.
    """
    path = Path(name).expanduser()
    if (path.is_absolute() or name.startswith(".")) and not path.exists():
        raise UsageFault(argument, f"{name}: no such file or folder")


@contextmanager
def loading(argument: str, trouble: str) -> Iterator[None]:
    """Report whatever goes wrong inside as a fault of the argument.

    Files of others are read here, by code of others: safetensors, the hub client and the model classes all raise
    errors of their own, several of them straight from `Exception`.

    Args:
        argument: whom to name.
        trouble: what could not be done.

    Raises:
        UsageFault: with the name and text of the error.
    """
    try:
        yield
    except Exception as error:
        raise UsageFault(argument, f"{trouble}: {type(error).__name__}: {error}") from error


def load_model(name: str, argument: str, options: LoadOptions, family: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """A language model in evaluation mode on its device.

    Args:
        name: folder, or name on the hub.
        argument: whom to name.
        options: how to load it.
        family: the auto class that loads it.

    Raises:
        UsageFault: naming the argument, if it cannot be loaded.
    """
    check_path(name, argument)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with loading(argument, f"{name} cannot be loaded"):
        model: PreTrainedModel = family.from_pretrained(name, **options.keywords())
    # Its own stubs take no device here and leave eval() untyped.
    module: torch.nn.Module = model.train(False)
    with loading("--device", f"{name} cannot be moved to {options.device}"):
        module.to(options.torch_device())
    return model


def load_drafter(name: str, options: LoadOptions) -> Any:
    """What `--draft-model` names: a draft head for the target, or else a language model.

    Raises:
        UsageFault: if it cannot be loaded.
    """
    check_path(name, "--draft-model")
    with loading("--draft-model", f"{name} cannot be loaded"):
        head = load_draft(name) if is_head(name) else None
    if head is None:
        return load_model(name, "--draft-model", options)
    dtype = options.keywords()["dtype"]
    with loading("--device", f"{name} cannot be moved to {options.device}"):
        return head.to(options.torch_device(), None if dtype == "auto" else dtype)


def load_tokenizer(name: str, argument: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model.

    Raises:
        UsageFault: naming the argument, if it cannot be loaded.
    """
    check_path(name, argument)
    with loading(argument, f"the tokenizer of {name} cannot be loaded"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, chat: bool, argument: str) -> dict[str, torch.Tensor]:
    """Inputs of `generate` for one prompt, batch 1, on the CPU.

    Args:
        tokenizer: the tokenizer of the model.
        text: the prompt.
        chat: whether it goes through the chat template as a user's message.
        argument: whom to name if it cannot be done.

    Raises:
        UsageFault: without a chat template, or for a prompt of no tokens.
    """
    if chat:
        if not tokenizer.chat_template:
            raise UsageFault(argument, "the tokenizer has no chat template; pass --raw")
        message = [{"role": "user", "content": text}]
        inputs: Any = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(text, return_tensors="pt")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if ids.shape[1] == 0:
        raise UsageFault(argument, "the prompt has no tokens")
    return {"input_ids": ids.long(), "attention_mask": mask.long()}


def encode_sets(
    tokenizer: PreTrainedTokenizerBase, sets: Sequence[PromptSet], chat: bool | None
) -> list[dict[str, torch.Tensor]]:
    """Inputs of `generate` for all prompts of some sets, as `encode` gives them.

    Args:
        tokenizer: the tokenizer of the model.
        sets: the prompts.
        chat: the option `--chat` or `--raw`; None for what suits the set and the tokenizer.
    """
    return [
        encode(
            tokenizer,
            text,
            chat=one.chat and bool(tokenizer.chat_template) if chat is None else chat,
            argument="--chat" if chat else f"--set {one.name}",
        )
        for one in sets
        for text in one.prompts
    ]


def pad_arguments(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """A pad id for `generate`, which otherwise logs at every call that it takes the end of text for one."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return {} if pad is None else {"pad_token_id": pad}
