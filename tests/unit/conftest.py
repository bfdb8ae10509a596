"""Tiny random models with a tokenizer, saved as folders: what the command line takes, without network or weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

WORDS = [f"w{number}" for number in range(57)]
SPECIAL = ["<pad>", "<eos>", "<unk>", "user", "bot", "a", "b"]
CHAT = (
    "{% for message in messages %}user {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}bot{% endif %}"
)


def make_tokenizer(chat_template: str | None = CHAT) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def save_llama(folder: Path, *, seed: int = 0, chat_template: str | None = CHAT) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.5,
        # No end of text: every text is as long as its limit, so that counts are known.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer(chat_template).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    with torch.random.fork_rng(devices=[]):
        return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    with torch.random.fork_rng(devices=[]):
        return save_llama(tmp_path_factory.mktemp("draft"), seed=1)


@pytest.fixture(scope="session")
def chatless_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    with torch.random.fork_rng(devices=[]):
        return save_llama(tmp_path_factory.mktemp("chatless"), chat_template=None)


@pytest.fixture(scope="session")
def cacheless_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that cannot take a tree: it has no cache, and its decoding with one sees the last token alone."""
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    folder = tmp_path_factory.mktemp("cacheless")
    with torch.random.fork_rng(devices=[]):
        config = OpenAIGPTConfig(vocab_size=64, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5)
        OpenAIGPTLMHeadModel(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def treespec() -> Callable[..., Any]:
    """Run the command line in this process; the result has exit_code, stdout and stderr."""
    from typer.testing import CliRunner

    from hf_treespec.cli.app import app

    def run(*arguments: object, stdin: str | None = None) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)

    return run


@pytest.fixture
def make_row() -> Callable[..., Any]:
    """A measurement with some fields changed."""
    from hf_treespec.cli.rows import Row

    row = Row(
        set="code",
        prompt=0,
        repeat=0,
        method="plain",
        order=0,
        seconds=0.1 + 0.2,
        prompt_tokens=7,
        new_tokens=5,
        target_forwards=5,
        tokens_per_round=1.0,
        draft_seconds=None,
        text_equal=None,
        first_difference=None,
        reference=None,
        config=None,
        temperature=0.0,
        max_new_tokens=5,
        seed=1 << 60,
        model="folder, with a comma",
        draft_model=None,
        dtype="float32",
        device="cpu",
        hardware='a "quoted" chip',
        threads=2,
        torch="2.13.0",
        transformers="5.24.0",
        hf_treespec="0.1.0",
    )
    return lambda **changes: replace(row, **changes)


@pytest.fixture
def one_error() -> Callable[..., None]:
    """Check that a command ended as it should over a user's mistake: exit code 2, one line, nothing on stdout."""

    def check(result: Any, *parts: str) -> None:
        assert (result.exit_code, result.stdout) == (2, ""), result
        lines = result.stderr.splitlines()
        assert len(lines) == 1 and lines[0].startswith("treespec: error: "), result.stderr
        for part in parts:
            assert part in lines[0]

    return check


@pytest.fixture
def sets(tmp_path: Path) -> list[str]:
    """Options for a set of texts and a set of questions, repetitive as n-grams like it."""
    code, chat = tmp_path / "code.jsonl", tmp_path / "chat.jsonl"
    code.write_text("".join(json.dumps({"prompt": f"w{n} w2 w3 w{n} w2 w3 w{n}"}) + "\n" for n in range(4)))
    chat.write_text(json.dumps({"turns": ["a b a b", "then"]}) + "\n")
    return ["--set", f"code={code}", "--set", f"chat={chat}"]
