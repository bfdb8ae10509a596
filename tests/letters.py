"""A tokenizer for the tiny models, made on the spot."""

from __future__ import annotations

import itertools
import string

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast


def letters(size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of `size` ids: three special ones, the alphabet, then pairs of letters."""
    pairs = ("".join(pair) for pair in itertools.product(string.ascii_lowercase[::-1], repeat=2))
    pieces = ["<pad>", "<s>", "</s>", *string.ascii_lowercase]
    pieces += itertools.islice(pairs, size - len(pieces))
    core = Tokenizer(models.BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[]))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
