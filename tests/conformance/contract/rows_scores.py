"""Table 1.3: sampling, processors, scores and other outputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, SynthIDTextWatermarkingConfig, WatermarkingConfig

from conformance.contract.core import PLAIN, TREE, Ignored, Row, Side
from conformance.contract.observe import WANTED, Banning, everything, section, text
from tiny import build, perturbed, prompt, stock

SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95}
SYNTHID = SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123, 340], ngram_len=2)
NEGATIVE = {
    "negative_prompt_ids": torch.tensor([[9, 8, 7]]),
    "negative_prompt_attention_mask": torch.ones(1, 3, dtype=torch.long),
}
EVERY_PROCESSOR: dict[str, Any] = {
    "sequence_bias": [[[15], 1.5], [[16, 17], -9.0]],
    "encoder_repetition_penalty": 1.2,
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 3,
    "bad_words_ids": [[5], [7, 9]],
    "min_length": 14,
    "min_new_tokens": 4,
    "forced_eos_token_id": 9,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (5, 1.1),
    "suppress_tokens": [11, 12],
    "begin_suppress_tokens": [8],
    "renormalize_logits": True,
    "eos_token_id": 9,
}
EVERY_WARPER: dict[str, Any] = {
    "do_sample": True, "temperature": 0.9, "top_h": 0.9, "top_k": 40, "top_p": 0.97, "min_p": 0.001,
    "typical_p": 0.98, "epsilon_cutoff": 1e-4, "eta_cutoff": 1e-4,
}  # fmt: skip


def half_precision(side: Side) -> Any:
    model = side.on(build("llama").to(torch.bfloat16))
    out = side.generate(model=model, max_new_tokens=3, **WANTED)
    return [t.dtype for t in (*out.scores, *out.logits)]


def counted(batch: int, **call: Any) -> Callable[[Side], Any]:
    def run(side: Side) -> Any:
        processor = Banning()
        out = side.generate(batch=batch, logits_processor=LogitsProcessorList([processor]), **call)
        return out, processor.lengths

    return run


def rows_of_the_batch(batch: int, **call: Any) -> Callable[[Side], Any]:
    def run(side: Side) -> Any:
        asked: list[tuple[int, list[int]]] = []

        def allowed(row: int, ids: Tensor) -> list[int]:
            asked.append((row, ids.tolist()))
            return list(range(3 + row + int(ids[-1]) % 3, 97, 3))

        out = side.generate(batch=batch, prefix_allowed_tokens_fn=allowed, **call)
        # Assisted decoding asks for drafts too, which is its right.
        return out, asked if side.name != "stock" else None

    return lambda side: run(side)[0] if batch == 1 else run(side)


def stateful_setting(choice: str) -> Callable[[Side], Any]:
    return lambda side: side.generate(
        logits_processor=LogitsProcessorList([Banning()]), config=TREE.replace(on_stateful_processor=choice)
    )


def seeds(side: Side) -> Any:
    """The same seed twice, and with and without speculation."""

    def say(**more: Any) -> list[int]:
        torch.manual_seed(11)
        return side.generate(config=TREE.replace(seed=None), **SAMPLED, **more)[0].tolist()  # type: ignore[no-any-return]

    if side.name == PLAIN:
        return {"again": True, "without": True, "another": True}
    first = say()
    ids, mask = prompt("llama", 1)
    torch.manual_seed(11)
    tree = {"tree_config": TREE.replace(max_nodes=0, seed=None)} if side.ours else {}
    without = side.model().generate(ids, attention_mask=mask, max_new_tokens=14, **SAMPLED, **tree)[0].tolist()
    torch.manual_seed(12)
    other = side.generate(config=TREE.replace(seed=None), **SAMPLED)[0].tolist()
    return {"again": say() == first, "without": without == first, "another": other != first}


def rival(**call: Any) -> Callable[[Side], Any]:
    """A second way of speculating; plain decoding has none."""

    def run(side: Side) -> Any:
        # A model of the row's own: an early exit that fails leaves its config changed.
        return side.generate(model=side.on(build("llama")), helper="lookup", **({} if side.name == PLAIN else call))

    return run


def lossy(side: Side) -> Any:
    weight = {} if side.name == PLAIN else {"assistant_ensemble_weight": 0.5}
    return side.generate(do_sample=True, **weight)


def assistant_length(side: Side) -> Any:
    """`num_assistant_tokens` of the call changes how far the draft looks ahead, or a warning says that it does not."""
    ids, mask = prompt("llama", 1)
    if side.name == PLAIN:
        return side.generate()
    counts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for asked in ({}, {"num_assistant_tokens": 2, "num_assistant_tokens_schedule": "constant"}):
            helper = perturbed(stock("llama"), 0.0)
            forwards: list[int] = []
            helper.register_forward_hook(lambda *_, forwards=forwards: forwards.append(1))
            out = side.generate(ids, mask, helper=helper, **asked)
            counts.append(len(forwards))
    if counts[0] == counts[1] and not any("num_assistant_tokens" in str(one.message) for one in caught):
        raise Ignored("the draft runs as often as without it")
    return out


def assistant_settings(side: Side) -> Any:
    helper = perturbed(stock("llama"), 0.0)
    helper.generation_config.num_assistant_tokens_schedule = "heuristic"
    helper.generation_config.num_assistant_tokens = 5
    before = repr(helper.generation_config.to_dict())
    out = side.generate(helper=helper)
    return out, repr(helper.generation_config.to_dict()) == before


def transition_scores(side: Side) -> Any:
    out = side.generate(**WANTED, **{"batch": 1})
    return side.model().compute_transition_scores(out.sequences, out.scores, normalize_logits=True)


def inner_states(name: str) -> Callable[[Side], Any]:
    def run(side: Side) -> Any:
        model = side.on(build("llama", attention="eager"))
        out = side.generate(model=model, return_dict_in_generate=True, **{f"output_{name}": True})
        return out.sequences, out[name]

    return run


ROWS = section(
    "1.3",
    ("every processor of the settings at once", everything(**EVERY_PROCESSOR)),
    ("every processor, batch of 3", everything(batch=3, **EVERY_PROCESSOR)),
    Row("1.3", "every warper at once", everything(**EVERY_WARPER), sampled=True),
    ("scores and logits of a bfloat16 model are float32", half_precision),
    ("a stateful processor: called once a token, in order", counted(1)),
    ("a stateful processor of a batch", counted(3)),
    ("TreeConfig(on_stateful_processor='in_step')", stateful_setting("in_step")),
    ("TreeConfig(on_stateful_processor='error')", stateful_setting("error")),
    ("prefix_allowed_tokens_fn", rows_of_the_batch(1)),
    ("prefix_allowed_tokens_fn of a batch: which rows it is asked about", rows_of_the_batch(3)),
    Row(
        "1.3",
        "prefix_allowed_tokens_fn, two sequences a row",
        rows_of_the_batch(3, do_sample=True, num_return_sequences=2),
        sampled=True,
    ),
    Row("1.3", "guidance_scale", everything(guidance_scale=1.5), also="0.3b"),
    ("guidance_scale with a negative prompt", text(guidance_scale=3.0, **NEGATIVE)),
    ("watermarking_config: green list", everything(watermarking_config=WatermarkingConfig(bias=4.0))),
    (
        "watermarking_config: green list by self-hash",
        everything(watermarking_config=WatermarkingConfig(bias=4.0, seeding_scheme="selfhash")),
    ),
    Row("1.3", "watermarking_config: SynthID", text(watermarking_config=SYNTHID), also="0.3c"),
    Row(
        "1.3",
        "do_sample: draws by the target's own law",
        text(**SAMPLED),
        sampled=True,
        note="plain draws by the same noise",
    ),
    Row("1.3", "a seed fixes the text, whatever is drafted", seeds, sampled=True),
    ("prompt_lookup_num_tokens beside it", rival(prompt_lookup_num_tokens=3), "one speculation at a time"),
    ("assistant_early_exit", rival(assistant_early_exit=1)),
    ("use_mtp beside it", rival(use_mtp=True), "one speculation at a time"),
    Row("1.3", "assistant_ensemble_weight, which changes the law", lossy, "lossy by design", sampled=True),
    Row("1.3", "num_assistant_tokens in the call", assistant_length, also="0.3e"),
    ("the assistant's generation_config is not written to", assistant_settings),
    ("output_scores and output_logits", everything(helper="twin")),
    ("compute_transition_scores", transition_scores),
    ("output_attentions, eager", inner_states("attentions")),
    ("output_hidden_states", inner_states("hidden_states")),
    ("return_dict_in_generate: class, fields, ids, cache", everything(batch=3)),
    ("no return dict: ids alone", text(batch=3)),
)
