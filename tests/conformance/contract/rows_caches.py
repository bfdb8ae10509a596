"""Table 1.5: caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, StoppingCriteriaList
from transformers.cache_utils import StaticCache

from conformance.contract import models
from conformance.contract.core import Row, Side
from conformance.contract.observe import WANTED, Asked, cache_view, everything, greedy, section, token
from hf_treespec import TreeCache, _compat
from tiny import WIDTH, build, cache_argument, first_block, new_cache, perturbed, plain_cache, prompt, reference, stock

STATIC: dict[str, Any] = {"cache_implementation": "static", "disable_compile": True}


def chat(*, full: bool, turns: int = 3, family: str = "llama", batch: int = 1, helper: str = "perturbed") -> Any:
    """Turn after turn on one cache, with all ids or with only the new ones."""

    def run(side: Side) -> Any:
        cache = new_cache(stock(family))
        ids, mask = prompt(family, batch)
        given, outs = ids, []
        for turn in range(turns):
            out = side.generate(given, mask, family=family, helper=helper, **cache_argument(cache))
            # Plain decoding stores everything but its last token.
            whole = torch.cat([ids, out[:, given.shape[1] :]], 1)
            outs.append((whole, _compat.cache_length(cache)))
            more = prompt(family, batch, seed=50 + turn, width=4)[0].clamp(min=3)
            ids = torch.cat([whole, more], 1)
            mask = torch.cat([mask, mask.new_ones(batch, ids.shape[1] - mask.shape[1])], 1)
            given = ids if full else ids[:, _compat.cache_length(cache) :]
        return outs, cache_view(cache, mask)

    return run


def covered(extra: int) -> Callable[[Side], Any]:
    """A cache that holds the whole prompt and more."""

    def run(side: Side) -> Any:
        ids, mask = prompt("llama", 1)
        cache = plain_cache(stock("llama"), greedy(), mask, WIDTH + extra)
        return side.generate(ids, mask, **cache_argument(cache))

    return run


def fresh_text() -> Tensor:
    ids, mask = prompt("llama", 1)
    return reference(stock("llama"), ids, mask, max_new_tokens=14)


def passed_in(side: Side) -> Any:
    cache = new_cache(stock("llama"))
    out = side.generate(return_dict_in_generate=True, **cache_argument(cache))
    return out.sequences, _compat.cache_from_outputs(out) is cache, cache_view(cache)


def older_name(side: Side) -> Any:
    cache = new_cache(stock("llama"))
    out = side.generate(past_key_values=cache, return_dict_in_generate=True)
    return out.sequences, out.past_key_values is cache


def shorter_name(side: Side) -> Any:
    return older_name(side) if _compat.cache_kwarg(stock("llama")) != "cache" else passed_in(side)


class Stop(Exception):
    """Of the caller."""


def interrupted(where: str) -> Callable[[Side], Any]:
    """The caller's cache after an exception holds a committed prefix of the text."""

    def run(side: Side) -> Any:
        cache, calls, stopped = new_cache(stock("llama")), 0, False

        def fail(*_: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 5:
                raise Stop
            return torch.zeros(1, dtype=torch.bool)

        model, helper = side.model(), perturbed(stock("llama"), 0.0)
        hook, more = None, {}
        if where == "forward":
            # A copy made after the hook would bring it along.
            hook = first_block(model).register_forward_pre_hook(lambda *_: (fail(), None)[1])
        else:
            more = {"stopping_criteria": StoppingCriteriaList([Asked(fail)])}
        try:
            side.generate(helper=helper, max_new_tokens=40, **more, **cache_argument(cache))
        except Stop:
            stopped = True
        finally:
            if hook:
                hook.remove()
        if not stopped:
            return "never interrupted"
        lengths = {int(layer.get_seq_length()) for layer in cache.layers}
        length = lengths.pop()
        if lengths or length < WIDTH:
            return "layers of different lengths"
        expected = plain_cache(stock("llama"), greedy(new=40), prompt("llama", 1)[1], length)
        keys = [(a.keys - b.keys).abs().max() < 1e-3 for a, b in zip(cache.layers, expected.layers, strict=True)]
        return "a committed prefix" if all(keys) else "other contents"

    return run


def static(**call: Any) -> Callable[[Side], Any]:
    def run(side: Side) -> Any:
        model = side.on(build("llama"))
        out = side.generate(model=model, **{**WANTED, **STATIC, **call})
        return out.sequences, out.scores, type(_compat.cache_from_outputs(out)).__name__

    return run


def static_object(side: Side) -> Any:
    cache = StaticCache(config=stock("llama").config, max_cache_len=64)
    return side.generate(**cache_argument(cache), disable_compile=True), int(cache.get_seq_length())


def tree_cache(storage: str) -> Callable[[Side], Any]:
    """A TreeCache in any call: same object, as long as the text but for its last token."""

    def run(side: Side) -> Any:
        cache = TreeCache(stock("llama").config, storage=storage)
        out = side.generate(return_dict_in_generate=True, **cache_argument(cache))
        return out.sequences, _compat.cache_from_outputs(out) is cache, cache.get_seq_length()

    return run


def static_sliding(side: Side) -> Any:
    return side.generate(family="mistral", **STATIC)


def past_windows(family: str, batch: int = 1) -> Callable[[Side], Any]:
    def run(side: Side) -> Any:
        ids, mask = prompt(family, batch)
        out = side.generate(ids, mask, family=family, max_new_tokens=24, return_dict_in_generate=True)
        cache = _compat.cache_from_outputs(out)
        return out.sequences, [(type(layer).__name__, layer.keys.shape) for layer in cache.layers]

    return run


def of_kind(kind: str, **config: Any) -> Callable[[Side], Any]:
    # A copy for each call: some releases of transformers empty it.
    return lambda side: side.generate(cache_implementation=kind, **({"cache_config": dict(config)} if config else {}))


def no_cache(side: Side) -> Any:
    return side.generate(use_cache=False)


def hybrid(side: Side) -> Any:
    model = models.hybrid()
    helper = perturbed(stock("llama"))
    return side.generate(*prompt("llama", 1), model=side.on(model), helper=helper)


def crossed(side: Side) -> Any:
    model = models.t5()
    out = side.generate(*prompt("llama", 1), model=side.on(model), helper="lookup", **WANTED)
    cache = _compat.cache_from_outputs(out)
    return out.sequences, type(cache).__name__, int(cache.get_seq_length())


def compile_settings(side: Side) -> Any:
    return side.generate(compile_config=CompileConfig(backend="eager"))


def after_end(side: Side) -> Any:
    out = side.generate(helper="twin", eos_token_id=token(6), return_dict_in_generate=True)
    return out.sequences, _compat.cache_length(_compat.cache_from_outputs(out))


def recording(side: Side) -> Any:
    """A sliding cache is given back as plain decoding leaves it: no switch stays on."""
    out = side.generate(family="mistral", return_dict_in_generate=True)
    cache = _compat.cache_from_outputs(out)
    names = [sorted(vars(layer)) for layer in cache.layers]
    return names, [getattr(layer, "record_past", None) for layer in cache.layers]


ROWS = section(
    "1.5",
    ("the default cache: class, length, contents", everything()),
    ("length of the cache after an end inside a path", after_end),
    ("a cache passed in: same object, filled as by plain", passed_in),
    Row("1.5", "the cache as past_key_values", older_name, also="0.5"),
    ("the cache under the name of this release", shorter_name),
    Row("1.5", "a chat that goes on with the full ids", chat(full=True), also="0.3a"),
    ("the same with prompt lookup", chat(full=True, helper="lookup")),
    ("the same, batch of 3", chat(full=True, batch=3)),
    ("a chat that goes on with only the new ids", chat(full=False)),
    ("a cache after an exception in a criterion", interrupted("criterion")),
    Row(
        "1.5",
        "a cache after an exception inside a forward",
        interrupted("forward"),
        truth=lambda: "a committed prefix",
        note="plain leaves layers of different lengths",
    ),
    Row(
        "1.5",
        "a cache that covers the prompt",
        covered(0),
        truth=fresh_text,
        also="0.3 plain",
        note="plain feeds the prompt a second time",
    ),
    Row(
        "1.5",
        "a cache that is longer than the prompt",
        covered(5),
        truth=fresh_text,
        note="plain feeds the prompt a second time",
    ),
    ("use_cache=False", no_cache, "a tree needs the cache"),
    ("cache_implementation='static'", static()),
    ("a StaticCache passed in", static_object),
    ("cache_implementation='static', sliding windows", static_sliding),
    ("sliding windows, text past them (Mistral)", past_windows("mistral")),
    ("sliding and full layers (Gemma 2)", past_windows("gemma2")),
    ("sliding windows, batch of 3", past_windows("mistral", 3)),
    ("a sliding cache is given back without traces", recording),
    Row(
        "1.5",
        "cache_implementation='quantized'",
        of_kind("quantized", backend="fp8"),
        note="the backend that needs no other library",
    ),
    ("cache_implementation='dynamic'", of_kind("dynamic")),
    ("a TreeCache passed in", tree_cache("dense")),
    ("a TreeCache of 8 bits passed in", tree_cache("int8")),
    ("EncoderDecoderCache (T5)", crossed),
    ("convolution layers beside attention (LFM2)", hybrid),
    ("compile_config without a cache that can be compiled", compile_settings),
)
