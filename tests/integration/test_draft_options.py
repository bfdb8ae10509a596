"""Options of sources in whole calls: those without effect are named, and warnings point at the caller."""

from __future__ import annotations

import inspect
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

import heads
import tiny
from every_route import mask_inputs
from hf_treespec import TreeConfig, TreeSpecWarning, _compat

OFF = TreeConfig(max_nodes=6, max_depth=3, max_children=3, fallback="off", seed=3)
IDS = list(range(60))


@pytest.fixture(autouse=True)
def said_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat.warning, "_WARNED", set())


def generate(config: TreeConfig, **call: Any) -> Any:
    call = {**mask_inputs(1), "max_new_tokens": 4, "do_sample": False, **call}
    return tiny.treed("llama").generate(tree_config=config, **call)


def assistant() -> Any:
    return {"assistant_model": tiny.draft("llama")}


def head() -> Any:
    return {"assistant_model": heads.random_head("medusa", tiny.treed("llama"))}


NGRAM, MODEL, EXIT = {"ngram": {"max_match": 3}}, {"model": {"vocabulary": IDS}}, {"early_exit": {"layer": 1}}


@pytest.mark.parametrize(
    ("draft", "options", "call", "unused", "used"),
    [
        ("auto", MODEL, dict, "model", "ngram"),
        ("auto", NGRAM, assistant, "ngram", "model"),
        ("auto", {**NGRAM, **MODEL}, head, "ngram, model", "medusa"),
        ("suffix", NGRAM, dict, "ngram", "suffix"),
        (("ngram", "recycle"), {**NGRAM, **EXIT}, dict, "early_exit", "ngram, recycle"),
        (("model", "ngram"), {"suffix": {"index": None}}, assistant, "suffix", "model, ngram"),
        ("early_exit", {**EXIT, "layer_skip": {"skip": [1]}}, dict, "layer_skip", "early_exit"),
    ],
)
def test_options_without_effect_are_named_once(draft: Any, options: Any, call: Any, unused: str, used: str) -> None:
    config = OFF.replace(draft=draft, draft_options=options)
    with pytest.warns(TreeSpecWarning) as caught:
        generate(config, **call())
        generate(config, **call())
    (said,) = (str(one.message) for one in caught)
    assert said == (
        f"TreeConfig(draft={draft!r}, draft_options=...): the options of {unused} have no effect in a call whose "
        f"trees come from {used}"
    )


@pytest.mark.parametrize(
    ("draft", "options", "call"),
    [
        ("auto", NGRAM, dict),
        ("auto", MODEL, assistant),
        ("model", {**MODEL, "ngram": {}}, assistant),
        ("auto", {}, head),
        (("model", "ngram"), {**MODEL, **NGRAM}, assistant),
        (("ngram", "recycle"), {**NGRAM, "recycle": {"keep": False}}, dict),
        ("early_exit", EXIT, dict),
        ("auto", {}, lambda: {"assistant_early_exit": 1}),
    ],
)
def test_options_of_what_drafts_are_not(draft: Any, options: Any, call: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", TreeSpecWarning)
        generate(OFF.replace(draft=draft, draft_options=options), **call())


# --- where a warning points ------------------------------------------------------------------------------------------


def here() -> int:
    """The line of the caller."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def test_a_warning_of_a_call_points_at_the_call() -> None:
    model, config = tiny.treed("llama"), OFF.replace(draft_options=MODEL)
    with pytest.warns(TreeSpecWarning) as caught:
        line = here() + 1
        model.generate(**mask_inputs(1), tree_config=config, max_new_tokens=4, do_sample=False)
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


def test_a_warning_of_a_call_in_another_thread_is_no_line_of_ours() -> None:
    call = {**mask_inputs(1), "tree_config": OFF.replace(draft_options=MODEL), "max_new_tokens": 4}
    with pytest.warns(TreeSpecWarning) as caught:
        thread = threading.Thread(target=tiny.treed("llama").generate, kwargs=call)
        thread.start()
        thread.join()
    assert caught[0].filename == threading.__file__


def test_a_warning_of_a_file_points_at_who_reads_it(tmp_path: Path) -> None:
    (tmp_path / "tree_config.json").write_text('{"max_node": 3}')
    with pytest.warns(TreeSpecWarning, match="dropped: max_node; did you mean 'max_nodes'") as caught:
        line = here() + 1
        TreeConfig.from_pretrained(tmp_path)
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)
