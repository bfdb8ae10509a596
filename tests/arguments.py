"""Random arguments of generate(), sense and nonsense, for hypothesis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.cache_utils import StaticCache
from transformers.generation.streamers import BaseStreamer

from hf_treespec import TreeConfig
from letters import letters
from tiny import (
    WIDTH,
    build,
    cache_argument,
    draft,
    new_cache,
    plain_cache,
    prompt,
    reference,
    stock,
    treed,
    vocabulary,
)

FAMILIES = ("llama", "gpt2", "mistral")


@dataclass(frozen=True)
class Made:
    """An argument that each call needs anew.

    Args:
        name: for the report of a failing example.
        make: `make(example)`.
    """

    name: str
    make: Callable[[Example], Any]

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Example:
    """A call.

    Args:
        family: of the models.
        batch: rows.
        arguments: of generate(), those of the tree left out; `Made` values are made for each call.
        helper: name of the assistant.
        tree: value of `tree_config`.
    """

    family: str
    batch: int
    arguments: dict[str, Any]
    helper: str
    tree: Any

    @property
    def ids(self) -> Tensor:
        return prompt(self.family, self.batch)[0]

    def call(self) -> dict[str, Any]:
        """Arguments of one call, those of the tree left out."""
        call: dict[str, Any] = {}
        for name, value in self.arguments.items():
            made = value.make(self) if isinstance(value, Made) else value
            # "cache" has another name in older releases.
            call.update(cache_argument(made) if name == "cache" else {name: made})
        return call


class Kept(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.puts: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.puts.append("end")


class Raising(BaseStreamer):
    """Fails at the fourth step."""

    def __init__(self) -> None:
        self.steps = 0

    def put(self, value: Tensor) -> None:
        self.steps += 1
        if self.steps == 4:
            raise ConnectionError("the reader has gone")

    def end(self) -> None:
        pass


def _stateful(example: Example) -> LogitsProcessorList:
    calls = 0

    def ban(ids: Tensor, scores: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return scores.masked_fill(torch.arange(scores.shape[1]) % 4 == calls % 4, -float("inf"))

    return LogitsProcessorList([ban])


def _criteria(rule: Callable[[Tensor], Any]) -> Made:
    return Made("criterion", lambda _: StoppingCriteriaList([lambda ids, scores, **kwargs: rule(ids)]))


def _late(ids: Tensor) -> Tensor:
    return torch.full((len(ids),), ids.shape[1] >= WIDTH + 4)


def _raise(ids: Tensor) -> Any:
    if ids.shape[1] >= WIDTH + 3:
        raise LookupError("of the caller")
    return torch.zeros(len(ids), dtype=torch.bool)


def _cache(length: int) -> Made:
    def make(example: Example) -> Any:
        model = stock(example.family)
        if not length:
            return new_cache(model)
        ids, mask = prompt(example.family, example.batch)
        text = reference(model, ids, mask, max_new_tokens=9)
        return plain_cache(model, text, mask, length)

    return Made(f"cache of {length}", make)


def _mask(name: str, change: Callable[[Tensor], Tensor]) -> Made:
    return Made(f"mask {name}", lambda example: change(prompt(example.family, example.batch)[1]))


def _positions(example: Example) -> Tensor:
    return (prompt(example.family, example.batch)[1].cumsum(-1) - 1).clamp(min=0) + 3


def _embeds(example: Example) -> Tensor:
    table: Any = stock(example.family).get_input_embeddings()
    return table(example.ids).detach()  # type: ignore[no-any-return]


def _hole(mask: Tensor) -> Tensor:
    mask[-1, 4:6] = 0
    return mask


def _tokenizer(example: Example) -> Any:
    return letters(vocabulary(example.family))


_SETTINGS = Made("config", lambda _: GenerationConfig(max_new_tokens=7, repetition_penalty=1.2, pad_token_id=0))
_SYNTHID = SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=2)
_ENDS = [5, 6, 7, 9, 14, 23, 31, 40, 52]

# Sense first, nonsense behind it.
CHOICES: dict[str, list[Any]] = {
    "max_new_tokens": [1, 2, 4, 6, 9, 14, 0, -1, "5", 2.5],
    "max_length": [WIDTH + 1, WIDTH + 6, 4, -3],
    "min_length": [WIDTH + 5, 0, 10**6, -1],
    "min_new_tokens": [3, 8, 0, 10**6, -2],
    "max_time": [100.0, 0.0, -1.0, "soon"],
    "stop_strings": [["ab", "q"], "z", [], [""], 5],
    "tokenizer": [Made("tokenizer", _tokenizer), "letters"],
    "eos_token_id": [9, _ENDS, Made("ends", lambda _: torch.tensor(_ENDS)), -1, None, [], 10**6, "end"],
    "pad_token_id": [0, 5, None, -1, "pad"],
    "bos_token_id": [1, None],
    "do_sample": [True, True, False, None, "yes"],
    "temperature": [0.7, 1.5, 1, 0.0, -1.0],
    "top_k": [0, 1, 5, 1000, -1],
    "top_p": [0.9, 1.0, 0.0, 1.5],
    "min_p": [0.05, 2.0],
    "typical_p": [0.8, -1.0],
    "epsilon_cutoff": [1e-3, 5.0],
    "eta_cutoff": [1e-3],
    "top_h": [0.5, 3.0],
    "num_return_sequences": [1, 2, 3, 0, -1],
    "num_beams": [1, 2, 0],
    "penalty_alpha": [0.0, 0.6],
    "repetition_penalty": [1.3, 1.0, 0.0, -1.0],
    "no_repeat_ngram_size": [2, 1, 0, -1],
    "bad_words_ids": [[[5], [7, 9]], [], [5], [[]]],
    "sequence_bias": [[[[15], 1.5], [[16, 17], -9.0]], {}, "bias"],
    "encoder_repetition_penalty": [1.2, -1.0],
    "encoder_no_repeat_ngram_size": [3, 0],
    "suppress_tokens": [[11, 12], [10**6], []],
    "begin_suppress_tokens": [[8, 9]],
    "forced_bos_token_id": [3],
    "forced_eos_token_id": [9, [9, 10], 10**6],
    "exponential_decay_length_penalty": [(2, 1.3), (2,)],
    "guidance_scale": [1.5, 1, 0.5],
    "renormalize_logits": [True],
    "remove_invalid_values": [True],
    "watermarking_config": [WatermarkingConfig(bias=3.0), _SYNTHID, {"bias": 2.0}, "mark"],
    "logits_processor": [Made("stateful", _stateful), LogitsProcessorList(), [], "processor"],
    "prefix_allowed_tokens_fn": [lambda row, ids: list(range(3 + row, 60, 2)), lambda row, ids: [], 5],
    "stopping_criteria": [
        _criteria(_late),
        _criteria(lambda ids: bool(_late(ids).all())),
        _criteria(lambda ids: ids[:, -1] % 5 == 0),
        _criteria(_raise),
        _criteria(lambda ids: "stop"),
        StoppingCriteriaList(),
    ],
    "streamer": [Made("streamer", lambda _: Kept()), Made("raising streamer", lambda _: Raising()), "stream"],
    "return_dict_in_generate": [True, True, False],
    "output_scores": [True],
    "output_logits": [True],
    "output_attentions": [True],
    "output_hidden_states": [True],
    "use_cache": [True, False, None],
    "cache_implementation": ["dynamic", "static", "offloaded", "quantized", "shelf"],
    "cache": [
        _cache(0),
        _cache(WIDTH - 4),
        _cache(WIDTH),
        _cache(WIDTH + 3),
        Made("static cache", lambda example: StaticCache(config=stock(example.family).config, max_cache_len=48)),
        "drawer",
    ],
    "attention_mask": [
        _mask("own", lambda mask: mask),
        _mask("of ones", torch.ones_like),
        _mask("with a hole", _hole),
        _mask("of floats", lambda mask: mask.float()),
        _mask("of bools", lambda mask: mask.bool()),
        _mask("of zeros", torch.zeros_like),
        _mask("too narrow", lambda mask: mask[:, 1:]),
        _mask("of four axes", lambda mask: mask[:, None, None].expand(-1, 1, WIDTH, -1)),
        None,
    ],
    "position_ids": [Made("positions", _positions)],
    "token_type_ids": [Made("kinds", lambda example: torch.zeros_like(example.ids))],
    "inputs_embeds": [Made("embeds", _embeds)],
    "prefill_chunk_size": [1, 4, 64, 0],
    "generation_config": [_SETTINGS],
    "synced_gpus": [False, None],
    "disable_compile": [True],
    "custom_generate": [None],
    "negative_prompt_ids": [Made("negative", lambda example: torch.full((example.batch, 3), 8))],
    "num_assistant_tokens": [3],
    "prompt_lookup_num_tokens": [3],
    "tree_cfg": [1],
}
HELPERS = ("none", "draft", "target", "other_size", "another_family", "text")
TREES: list[Any] = [
    *(
        TreeConfig(fallback="off", seed=3, **fields)
        for fields in (
            {},
            {"max_nodes": 0},
            {"max_nodes": 1, "max_depth": 1},
            {"max_nodes": 30, "max_depth": 3, "max_children": 9},
            {"max_depth": 14, "max_children": 1},
            {"growth": "dynamic"},
            {"growth": "static", "max_children": 2},
            {"draft": "ngram"},
            {"draft": ("suffix", "recycle")},
            {"draft": ("ngram", "lookahead")},
            {"draft": "model"},
            {"attention": "eager"},
            {"on_stateful_processor": "error"},
        )
    ),
    TreeConfig(seed=3),
    {"max_nodes": 4},
    "tree",
    5,
]


def assistant(example: Example) -> Any:
    """The object behind `helper`; None for none."""
    family = example.family
    made: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "draft": lambda: draft(family),
        "target": lambda: treed(family),
        "other_size": lambda: build(family, vocab_size=vocabulary(family) - 9),
        "another_family": lambda: draft("qwen3"),
        "text": lambda: "a model",
    }
    return made[example.helper]()


@st.composite
def examples(draw: st.DrawFn) -> Example:
    """Any call, most of them with some sense: a few arguments, each more often sensible than not."""
    names = draw(st.lists(st.sampled_from(sorted(CHOICES)), max_size=7, unique=True))
    if draw(st.integers(0, 3)):
        # Sense would be rare otherwise: these decide whether anything is generated at all.
        names = [name for name in names if name not in ("num_beams", "use_cache", "inputs_embeds", "tree_cfg")]
    arguments = {}
    for name in names:
        choices = CHOICES[name]
        # The first half of the choices is sense.
        few = choices[: max(1, (len(choices) + 1) // 2)]
        arguments[name] = draw(st.sampled_from(few if draw(st.integers(0, 4)) else choices))
    if draw(st.integers(0, 3)) and "stop_strings" in arguments:
        arguments.setdefault("tokenizer", CHOICES["tokenizer"][0])
    if not {"max_new_tokens", "max_length", "generation_config"} & set(arguments):
        arguments["max_new_tokens"] = draw(st.integers(1, 16))
    return Example(
        family=draw(st.sampled_from(FAMILIES)),
        batch=draw(st.sampled_from([1, 3])),
        arguments=arguments,
        helper=draw(st.sampled_from(HELPERS[:2] if draw(st.integers(0, 3)) else HELPERS)),
        tree=draw(st.sampled_from(TREES[:12] if draw(st.integers(0, 7)) else TREES)),
    )
