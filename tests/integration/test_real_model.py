"""The real model: trees from n-grams give the text of plain decoding, sooner in rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import heads
from drafts import make_draft
from hf_treespec import TreeConfig, disable, enable

pytestmark = pytest.mark.real_model

# Text that repeats itself, so that trees are accepted and rejected in turn.
SMOKE = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return"
MORE = [
    "The first ten square numbers are 1, 4, 9,",
    "Q: What is the capital of France?\nA: Paris.\nQ: What is the capital of Italy?\nA:",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
    "Once upon a time there was a",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n    print(",
    "Dear Sir or Madam,\n\nI am writing to",
]


def _texts(model: Any, tokenizer: Any, prompt: str, new: int, **arguments: Any) -> tuple[list[int], list[int], float]:
    """New tokens of the reference and of the tree, and the tree's tokens a round."""
    inputs = tokenizer(prompt, return_tensors="pt")
    width = inputs["input_ids"].shape[1]
    if arguments["do_sample"]:
        enable(model)
        plain = model.generate(**inputs, tree_config=TreeConfig(max_nodes=0, seed=3), max_new_tokens=new, **arguments)
    else:
        plain = disable(model).generate(**inputs, max_new_tokens=new, **arguments)
        enable(model)
    config = TreeConfig(draft="ngram", max_nodes=16, seed=3, fallback="off")
    try:
        tree = model.generate(**inputs, tree_config=config, max_new_tokens=new, **arguments)
        return plain[0, width:].tolist(), tree[0, width:].tolist(), model.treespec_stats.tokens_per_round
    finally:
        disable(model)


def test_smoke(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    plain, tree, per_round = _texts(model, tokenizer, SMOKE, 32, do_sample=False)
    assert tree == plain
    # A draft that never hits would pass the equality alone.
    assert per_round > 1.3


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{"do_sample": False}, {"do_sample": True, "top_k": 0}], ids=["t0", "t1"])
@pytest.mark.parametrize("prompt", MORE)
def test_same_text(smollm2: tuple[Any, Any], prompt: str, arguments: dict[str, Any]) -> None:
    model, tokenizer = smollm2
    plain, tree, _ = _texts(model, tokenizer, prompt, 64, **arguments)
    assert tree == plain


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{"do_sample": False}, {"do_sample": True, "top_k": 0}], ids=["t0", "t1"])
@pytest.mark.parametrize("storage", ["dense", "int8", "fp8"])
@pytest.mark.parametrize("prompt", [SMOKE, MORE[1]])
def test_trees_over_our_own_cache(
    smollm2: tuple[Any, Any], prompt: str, storage: str, arguments: dict[str, Any]
) -> None:
    model, tokenizer = smollm2
    inputs = tokenizer(prompt, return_tensors="pt")
    tree = TreeConfig(draft="ngram", max_nodes=16, seed=3, fallback="off", kv_cache=storage)
    enable(model)
    try:
        texts = [
            model.generate(**inputs, tree_config=config, max_new_tokens=24, **arguments)
            for config in (tree.replace(max_nodes=0), tree)
        ]
    finally:
        disable(model)
    assert torch.equal(*texts)


# Every source with what it needs; `head:` is a random one, `layers:20` the target's first 20 layers.
SOURCES: dict[str, tuple[Any, str | None, dict[str, Any]]] = {
    "ngram": ("ngram", None, {}),
    "suffix": ("suffix", None, {}),
    "recycle": ("recycle", None, {}),
    "lookahead": ("lookahead", None, {}),
    "joint text": (("ngram", "recycle", "lookahead"), None, {}),
    "early_exit": ("early_exit", None, {"early_exit": {"layer": 20}}),
    "layer_skip": ("layer_skip", None, {"layer_skip": {"skip": [14, 16, 18]}}),
    "model": ("model", "layers:20", {}),
    "joint model": (("model", "ngram"), "layers:20", {}),
    **{kind: ("model", f"head:{kind}", {}) for kind in heads.MAKERS},
    "joint head": (("model", "ngram"), "head:eagle3", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{"do_sample": False}, {"do_sample": True, "top_k": 0}], ids=["t0", "t1"])
@pytest.mark.parametrize("source", SOURCES)
def test_every_source(smollm2: tuple[Any, Any], source: str, arguments: dict[str, Any]) -> None:
    model, tokenizer = smollm2
    draft, kind, options = SOURCES[source]
    assistant = None
    if kind is not None:
        name = kind.partition(":")[2]
        if kind.startswith("head:"):
            # Layers that this target has; 0 and 1 are those of the tiny models.
            assistant = heads.random_head(name, model, **({"layers": (2, 15)} if name == "eagle3" else {}))
        else:
            assistant = make_draft(kind, model, seed=0)
    enable(model)
    call = {**tokenizer(SMOKE, return_tensors="pt"), "max_new_tokens": 32, **arguments}
    config = TreeConfig(draft=draft, draft_options=options, max_nodes=16, seed=3, fallback="off")
    extra = {} if assistant is None else {"assistant_model": assistant}
    try:
        expected = model.generate(tree_config=TreeConfig(max_nodes=0, seed=3), **call)
        actual = model.generate(tree_config=config, **extra, **call)
        stats = model.treespec_stats
    finally:
        disable(model)
    assert torch.equal(actual, expected)
    assert stats.drafted_nodes > 0
    # A random head is right by luck only; the others must be of use on text that repeats itself.
    assert stats.tokens_per_round > 1.1 or arguments["do_sample"] or "head:" in (kind or "")


@pytest.mark.slow
def test_batch_rows_are_batch_one(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    tokenizer.padding_side = "left"
    inputs = tokenizer(MORE[:3], return_tensors="pt", padding=True)
    enable(model)
    try:
        batch = model.generate(**inputs, tree_config=TreeConfig(fallback="off"), max_new_tokens=32, do_sample=False)
    finally:
        disable(model)
    for row, prompt in enumerate(MORE[:3]):
        alone = tokenizer(prompt, return_tensors="pt")
        text = model.generate(**alone, max_new_tokens=32, do_sample=False)[0, alone["input_ids"].shape[1] :]
        mine = batch[row, inputs["input_ids"].shape[1] :][: len(text)]
        assert torch.equal(mine, text)
