"""A call of generate() with and without a tree where the prompt is more than ids: embeddings, pixels, positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from calls import BUSHES, Pair, ids_of
from hf_treespec import TreeConfig
from sources import MAKERS, Source, drafting
from tiny import assert_same_text, gumbel_multinomial, shown_tokens


def text_vocabulary(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().vocab_size)


def compare(
    models: tuple[PreTrainedModel, PreTrainedModel],
    real: Tensor,
    *,
    maker: str | None = "half_right",
    config: TreeConfig = BUSHES,
    **call: Any,
) -> Pair:
    """Run the call both ways and compare the sequences.

    Args:
        models: a stock model and an enabled one of the same weights.
        real: `[B, P]`, 1 at the real tokens of the prompt; of each row of the result.
        maker: one of `sources.MAKERS`; None for the draft that the call names.
        config: of the tree; its seed is the noise of both.
        call: arguments of generate(), but for `tree_config` and `assistant_model`: the latter goes to the tree only.
    """
    plain_model, tree_model = models
    vocab = text_vocabulary(plain_model)
    assistant = call.pop("assistant_model", None)
    call = {"do_sample": False, **call}
    ids = call.get("input_ids")
    width = 0 if ids is None else int(ids.shape[1])
    shown = [[] for _ in real] if ids is None else shown_tokens(ids.repeat_interleave(len(real) // len(ids), 0), real)
    with gumbel_multinomial(config.seed or 0, shown, real.sum(-1).tolist(), vocab):
        expected = plain_model.generate(**call)
    # The source goes by positions, so what it cannot know of the prompt is filled up.
    truth = [
        [0] * int(count) + row[width:].tolist() for count, row in zip(real.sum(-1), ids_of(expected), strict=True)
    ]
    source = Source(MAKERS[maker or "chain"], seed=1, vocab=vocab, truth=truth)
    extra = {} if assistant is None else {"assistant_model": assistant}
    if maker is None:
        actual = tree_model.generate(**call, **extra, tree_config=config)
    else:
        with drafting(source):
            actual = tree_model.generate(**call, **extra, tree_config=config)
    assert type(actual) is type(expected)
    assert_same_text(ids_of(expected), ids_of(actual), width=width)
    return Pair(expected, actual, {}, {}, source, tree_model.treespec_stats)
