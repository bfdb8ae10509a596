"""Tokenizers that write the same text differently, made on the spot, and models that recite a text in one of them."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

TEXT = (
    "the river bends where the old mill stands, and the miller's daughter counts the boats that pass. "
    "seven boats came down before noon; one was red, two were green. "
    "caf\u00e9 \u65e5\u672c\u8a9e na\u00efve \U0001f600 r\u00e9sum\u00e9! "
    "then the wind turned, and nobody came. she closed the book and went home along the water.\n"
)
_SPECIALS = ["<pad>", "<s>", "</s>"]


def _wrapped(core: Tokenizer, **more: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", **more)


@functools.cache
def byte_level(size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as of GPT-2: no text is unknown, a character may be spread over tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=size, special_tokens=_SPECIALS, initial_alphabet=alphabet)
    )
    return _wrapped(core)


@functools.cache
def sentence_piece(size: int) -> PreTrainedTokenizerFast:
    """BPE over words with a leading mark and a space put before the text, bytes as a last resort, as of Llama."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "\u2581")
    learner.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    plain = "".join(c for c in TEXT if ord(c) < 128)
    learner.train_from_iterator([plain], trainers.BpeTrainer(vocab_size=size - 256, special_tokens=_SPECIALS))
    learned = json.loads(learner.to_str())["model"]
    vocab = learned["vocab"]
    # Not among the special tokens: they are text.
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    merges = [tuple(pair) for pair in learned["merges"]]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrapped(core)


@functools.cache
def words() -> PreTrainedTokenizerFast:
    """Whole words and marks, joined by spaces on decoding; half of the words of the text are unknown."""
    known = sorted({word for word, _ in pre_tokenizers.Whitespace().pre_tokenize_str(TEXT)})[::2]
    pieces = [*_SPECIALS, "[UNK]", *known]
    core = Tokenizer(models.WordLevel({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return _wrapped(core, unk_token="[UNK]")


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


class Reciter(LlamaForCausalLM):
    """A model of the Llama class whose logits do not depend on its weights: it recites one text in its own tokens.

    The next token is read off the position, so the model agrees with itself in any batch and any tree only if
    positions are right; whoever leaves the text gets what stands at that place all the same.
    """

    script: list[int]

    # `generate` reads the signature.
    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        positions = kwargs.get("position_ids")
        assert positions is not None
        keep = out.logits.shape[1]
        wanted = torch.tensor(self.script)[(positions[:, -keep:] + 1) % len(self.script)]
        out.logits = out.logits * 0.02 + 9.0 * torch.nn.functional.one_hot(wanted, self.config.vocab_size)
        return out


def tiny_llama(vocab: int, *, seed: int = 1, kind: type[LlamaForCausalLM] = LlamaForCausalLM) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=512, initializer_range=0.6,
            tie_word_embeddings=False, bos_token_id=1, eos_token_id=None, pad_token_id=0, attn_implementation="sdpa",
        )  # fmt: skip
        return kind(config).eval()


def reciter(tokenizer: PreTrainedTokenizerFast, text: str = TEXT) -> PreTrainedModel:
    model = tiny_llama(len(tokenizer), kind=Reciter)
    model.script = encode(tokenizer, text)
    return model


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> Tensor:
    return torch.tensor([encode(tokenizer, text)])
