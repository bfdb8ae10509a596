"""Table 1.6: streamers, config objects, side effects."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList, TextStreamer

from conformance.contract.core import Side
from conformance.contract.observe import Asked, Puts, section
from hf_treespec import _compat
from letters import letters
from tiny import WIDTH, build, fingerprint, perturbed, prompt, stock


def streamed(batch: int = 1, **call: Any) -> Callable[[Side], Any]:
    def run(side: Side) -> Any:
        streamer = Puts()
        side.generate(batch=batch, helper="twin", streamer=streamer, **call)
        return streamer.puts

    return run


def text_streamer(batch: int) -> Callable[[Side], Any]:
    class Kept(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            said.append((text, stream_end))

    said: list[Any] = []

    def run(side: Side) -> Any:
        said.clear()
        side.generate(batch=batch, streamer=Kept(letters(97), skip_prompt=True))
        return "".join(piece for piece, _ in said), said[-1][1]

    return run


def stopped_stream(side: Side) -> Any:
    """What a streamer has seen when a criterion raises: nothing that is not text, and no end."""
    streamer = Puts()

    def rule(ids: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] >= WIDTH + 6:
            raise KeyError("of the caller")
        return torch.zeros(len(ids), dtype=torch.bool)

    with suppress(KeyError):
        side.generate(helper="twin", streamer=streamer, stopping_criteria=StoppingCriteriaList([Asked(rule)]))
    return [token for put in streamer.puts for token in (put if put == "end" else torch.tensor(put[1]).flatten())]


def settings_argument(side: Side) -> Any:
    settings = GenerationConfig(max_new_tokens=9, repetition_penalty=1.3, pad_token_id=0)
    before = repr(settings.to_dict()), sorted(vars(settings))
    out = side.generate(generation_config=settings)
    return out, (repr(settings.to_dict()), sorted(vars(settings))) == before


def users_models(side: Side) -> Any:
    model, helper = side.on(build("llama")), perturbed(stock("llama"))
    before = fingerprint(model), fingerprint(helper)
    side.generate(model=model, helper=helper)
    return (fingerprint(model), fingerprint(helper)) == before


def precedence(side: Side) -> Any:
    """Keyword over the passed config over the model's own over the defaults."""
    model = side.on(build("llama"))
    model.generation_config.max_new_tokens = 5
    model.generation_config.repetition_penalty = 1.4
    settings = GenerationConfig(max_new_tokens=7, pad_token_id=0)
    ids, mask = prompt("llama", 1)
    outs = [side.generate(ids, mask, model=model, max_new_tokens=None)]
    outs.append(side.generate(ids, mask, model=model, generation_config=settings))
    outs.append(side.generate(ids, mask, model=model, generation_config=settings, max_new_tokens=9))
    return outs


def processors_and_masks(side: Side) -> Any:
    """The caller's tensors, the random state and the registered masks stay as they are."""
    ids, mask = prompt("llama", 3)
    before, state = (ids.clone(), mask.clone()), torch.get_rng_state()
    masks = [_compat.mask_function_of(name) for name in _compat.MASK_IMPLEMENTATIONS]
    side.generate(ids, mask)
    return (
        torch.equal(ids, before[0]) and torch.equal(mask, before[1]),
        torch.equal(torch.get_rng_state(), state),
        masks == [_compat.mask_function_of(name) for name in _compat.MASK_IMPLEMENTATIONS],
    )


ROWS = section(
    "1.6",
    ("streamer: prompt, then one [1] tensor a token, then end()", streamed()),
    ("streamer of a batch of 3", streamed(3)),
    ("streamer: nothing after the end of the text", streamed(eos_token_id=[5, 6, 7, 9, 14, 23, 31, 40, 52])),
    ("TextStreamer", text_streamer(1)),
    ("TextStreamer of a batch, which it cannot print", text_streamer(3)),
    ("streamer when a criterion raises", stopped_stream),
    ("num_beams=2 with a streamer", streamed(num_beams=2)),
    ("a generation_config argument is not written to", settings_argument),
    ("target, assistant and their configs stay as they are", users_models),
    ("precedence of keyword, config, model and defaults", precedence),
    ("tensors, random state and mask registry stay as they are", processors_and_masks),
)
