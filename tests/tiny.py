"""Tiny random models and what the tests of whole generate() calls share: prompts, references, comparisons.

References come from models that were never enabled, so they run nothing of hf_treespec.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.cache_utils import DynamicCache

from hf_treespec import TreeConfig, _compat, enable, is_supported
from hf_treespec.verify import GumbelNoise, text_streams

# Threads only cost time at these sizes.
torch.set_num_threads(1)

FAMILIES = ("llama", "gpt2", "mistral", "gemma2", "qwen3")
# Families with layers that forget: their windows are shorter than the prompts.
SLIDING = ("mistral", "gemma2")
# Below this the arg-max may differ between two batch shapes of the same float32 model.
MARGIN = 1e-4
WIDTH = 11

_WIDE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
# initializer_range is large enough that greedy text does not fall into a loop; see `assert_lively`.
_KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {**_WIDE, "vocab_size": 97}),
    "gpt2": (
        GPT2Config,
        GPT2LMHeadModel,
        {"vocab_size": 71, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, "initializer_range": 0.4},
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {**_WIDE, "vocab_size": 83, "sliding_window": 9}),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {
            **_WIDE,
            "vocab_size": 89,
            "sliding_window": 7,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
            # Only eager attention knows the softcap.
            "attn_implementation": "eager",
        },
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {**_WIDE, "vocab_size": 61}),
}


def build(family: str, *, seed: int = 1, attention: str | None = None, **changes: Any) -> PreTrainedModel:
    """A new float32 model, random by `seed`, that never ends by itself."""
    config_class, model_class, fields = _KINDS[family]
    fields = {"initializer_range": 0.6, "attn_implementation": "sdpa", **fields, **changes}
    if attention is not None:
        fields["attn_implementation"] = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = config_class(**fields, tie_word_embeddings=False, bos_token_id=1, eos_token_id=None, pad_token_id=0)
        model = model_class(config).eval()
    if family == "gpt2":
        # Positions that weigh little would let the text fall into a loop, and a wrong position pass unnoticed.
        with torch.no_grad():
            model.transformer.wpe.weight.mul_(3.0)
    return model


def perturbed(model: PreTrainedModel, scale: float = 0.05, seed: int = 7) -> PreTrainedModel:
    """A copy with noise on its weights: a draft that is right now and then."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter.add_(torch.randn_like(parameter) * scale)
    return draft


def shared(make: Callable[..., PreTrainedModel]) -> tuple[Callable[..., PreTrainedModel], ...]:
    """Two functions for the models that `make` builds, each of which builds a model once.

    `stock` gives the reference, never enabled and never changed; `treed` one with the same weights, enabled and
    proven: the forward of a probe is nothing that a test should count, whichever test comes first.
    """

    @functools.cache
    def treed(*args: Any, **kwargs: Any) -> PreTrainedModel:
        model = enable(make(*args, **kwargs))
        is_supported(model)
        return model

    return functools.cache(make), treed


stock, treed = shared(build)


@functools.cache
def draft(family: str) -> PreTrainedModel:
    """A shared draft model for `treed(family)`."""
    return perturbed(stock(family))


def vocabulary(family: str) -> int:
    return int(_KINDS[family][2]["vocab_size"])


def prompt(family: str, batch: int, seed: int = 0, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """Random ids and their mask `[batch, width]`; a batch of three is left-padded by 4, 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary(family), (batch, width), generator=generator)
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, : min(4, width - 1)] = 0
        mask[2, :1] = 0
    ids[mask == 0] = 0
    return ids, mask


def real_texts(sequences: Tensor, mask: Tensor) -> list[list[int]]:
    """Rows without the padding of the prompt: what a draft source may know."""
    keep = torch.cat([mask, mask.new_ones(len(mask), sequences.shape[1] - mask.shape[1])], 1).bool()
    return [row[flags].tolist() for row, flags in zip(sequences, keep, strict=True)]


def assert_lively(sequences: Tensor, width: int = WIDTH) -> None:
    """A text that repeats one token would let many a bug pass: each row must use several, rows must differ."""
    rows = [row[width:].tolist() for row in sequences]
    for row in rows:
        assert len(set(row)) >= min(4, max(1, len(row) // 4)), f"degenerate reference text {row}"
    assert len({tuple(row) for row in rows}) == len(rows), f"rows with equal reference text {rows[0]}"


@contextmanager
def gumbel_multinomial(
    seed: int, prompts: Sequence[Sequence[int]], lengths: Sequence[int], vocab: int
) -> Iterator[None]:
    """Make the sampling loop of transformers draw by the Gumbel-max trick with the noise of `seed`.

    Stock sampling then is a reference for coupled sampling that shares nothing with the engine but the noise.

    Args:
        seed: of the noise.
        prompts: per row the real ids that the call shows; they key the noise.
        lengths: per row the real tokens of the prompt, shown or not: the position of the first token that is drawn.
        vocab: width of the scores.
    """
    noise = GumbelNoise(seed, vocab, streams=text_streams(prompts))
    position = list(lengths)

    def multinomial(probs: Tensor, num_samples: int = 1, **_: Any) -> Tensor:
        drawn = [int((p.double().log() + noise.at(row, position[row])).argmax()) for row, p in enumerate(probs)]
        position[:] = [p + 1 for p in position]
        return torch.tensor(drawn)[:, None]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", multinomial)
        yield


def shown_tokens(ids: Tensor, mask: Tensor) -> list[list[int]]:
    """Real ids among those that a call shows, if it shows the end of the text only (or more than has a mask)."""
    fitting = mask[:, -ids.shape[1] :] if ids.shape[1] else mask[:, :0]
    beyond = mask.new_ones(len(mask), ids.shape[1] - fitting.shape[1])
    return real_texts(ids, torch.cat([beyond, fitting], 1))


def reference(model: PreTrainedModel, ids: Tensor, mask: Tensor, *, seed: int = 0, **arguments: Any) -> Any:
    """Stock generate(); under `do_sample` with the noise of `seed`."""
    arguments = {"do_sample": False, **arguments}
    if not arguments["do_sample"]:
        return model.generate(ids, attention_mask=mask, **arguments)
    rows, texts = (tensor.repeat_interleave(arguments.get("num_return_sequences", 1), 0) for tensor in (mask, ids))
    with gumbel_multinomial(seed, shown_tokens(texts, rows), rows.sum(-1).tolist(), int(model.config.vocab_size)):
        return model.generate(ids, attention_mask=mask, **arguments)


def assert_same_text(expected: Tensor, actual: Tensor, margin: Any = None, *, width: int = WIDTH) -> None:
    """Equal token by token; a row may part only where `margin(row, column)` is below MARGIN.

    Args:
        expected: `[B, L]`.
        actual: `[B, L']`.
        margin: gap between the two best perturbed logits at a place of the expected text; None allows no difference.
        width: prompt width.
    """
    if torch.equal(expected, actual):
        return
    assert expected.dtype == actual.dtype and expected.shape[0] == actual.shape[0], (expected, actual)
    common = min(expected.shape[1], actual.shape[1])
    report, fatal = [], []
    for row in range(expected.shape[0]):
        differ = (expected[row, :common] != actual[row, :common]).nonzero().flatten().tolist()
        if not differ:
            continue
        column = differ[0]
        gap = float("inf") if margin is None or column < width else margin(row, column)
        report.append(
            f"row {row}, new token {column - width}: expected {expected[row, column:].tolist()}, "
            f"got {actual[row, column:].tolist()}; margin {gap:.3g}"
        )
        if gap >= MARGIN:
            fatal.append(row)
    print("\n".join(report))
    assert report, f"lengths differ: expected {expected.tolist()}, got {actual.tolist()}"
    assert not fatal, "\n".join(report)


def margins(model: PreTrainedModel, ids: Tensor, mask: Tensor, *, seed: int = 0, **arguments: Any) -> Any:
    """`margin` for `assert_same_text`: the two best perturbed scores, from `max_nodes=0` on the enabled model."""

    def margin(row: int, column: int) -> float:
        arguments.update(return_dict_in_generate=True, output_scores=True)
        out = model.generate(ids, attention_mask=mask, tree_config=TreeConfig(max_nodes=0, seed=seed), **arguments)
        scores = out.scores[column - ids.shape[1]][row].double()
        if arguments.get("do_sample"):
            position = int(mask[row].sum()) + column - ids.shape[1]
            streams = text_streams(real_texts(ids, mask))
            scores = scores + GumbelNoise(seed, scores.shape[-1], streams=streams).at(row, position)
        best = scores.topk(2).values
        return float(best[0] - best[1])

    return margin


# --- caches --------------------------------------------------------------------------------------------------------


def new_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config)


def cache_argument(cache: Any) -> dict[str, Any]:
    """The cache under the name that this version of generate() wants."""
    return {_compat.cache_kwarg(stock("llama")): cache}


def snapshot(cache: Any) -> list[dict[str, Any]]:
    """State of every layer, copied."""
    return [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in layer.__dict__.items()} for layer in cache.layers
    ]


def assert_same_cache(expected: Any, actual: Any, mask: Tensor, *, tolerance: float = 1e-4) -> None:
    """Same classes, attributes and lengths layer by layer; same contents wherever `mask` is 1.

    Args:
        expected: cache of plain decoding.
        actual: ours.
        mask: `[B, P]` of the prompt; later slots are all real.
        tolerance: largest difference of a key or value.
    """
    assert type(actual) is type(expected)
    assert len(actual.layers) == len(expected.layers)
    length = _compat.cache_length(expected)
    assert _compat.cache_length(actual) == length
    whole = torch.cat([mask, mask.new_ones(len(mask), max(0, length - mask.shape[1]))], 1)[:, :length].bool()
    for one, two in zip(expected.layers, actual.layers, strict=True):
        assert type(two) is type(one)
        assert set(vars(two)) == set(vars(one)), "attributes of a cache layer appeared or were left behind"
        assert int(two.get_seq_length()) == int(one.get_seq_length())
        for name, value in vars(one).items():
            if name not in ("keys", "values") and not isinstance(value, Tensor):
                assert getattr(two, name) == value, name
        if not one.is_initialized:
            continue
        for name in ("keys", "values"):
            k1, k2 = getattr(one, name), getattr(two, name)
            assert k1.shape == k2.shape, (name, k1.shape, k2.shape)
            real = whole[:, length - k1.shape[2] :]
            difference = (k1 - k2).abs().amax((1, 3))[real]
            assert difference.numel() and float(difference.max()) < tolerance, (name, float(difference.max()))


def plain_cache(model: PreTrainedModel, sequences: Tensor, mask: Tensor, length: int) -> Any:
    """The cache that plain decoding has after reading the first `length` columns."""
    width = mask.shape[1]
    whole = torch.cat([mask, mask.new_ones(len(mask), max(0, length - width))], 1)[:, :length]
    cache = new_cache(model)
    if length:
        out = model.generate(
            sequences[:, :length],
            attention_mask=whole,
            max_new_tokens=1,
            do_sample=False,
            return_dict_in_generate=True,
            **cache_argument(cache),
        )
        cache = _compat.cache_from_outputs(out)
    cache._is_user_defined = True
    return cache


# --- models --------------------------------------------------------------------------------------------------------


def first_block(model: PreTrainedModel) -> nn.Module:
    """The first decoder layer's feed-forward: when it runs, one cache layer has been updated, the others have not."""
    layers: Sequence[Any] = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    return layers[0].mlp


def fingerprint(model: PreTrainedModel) -> tuple[Any, ...]:
    """Everything about a model that a call must leave alone."""
    weights = tuple((name, hash(tensor.numpy().tobytes())) for name, tensor in model.state_dict().items())
    own = {k: v for k, v in vars(model).items() if k not in ("treespec_stats", "_modules", "_parameters")}
    return (
        type(model),
        weights,
        repr(model.config.to_dict()),
        repr(model.generation_config.to_dict()),
        sorted(own),
        _compat.attention_implementation(model),
        model.training,
        tuple(module.training for module in model.modules()),
        tuple(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()),
    )
