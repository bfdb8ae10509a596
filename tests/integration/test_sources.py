"""Sources without a second model, in whole calls: the text of plain decoding, by every route, and who is credited."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import tiny
from calls import GREEDY, SAMPLED
from every_route import ROUTES, mask_inputs
from hf_treespec import TreeConfig, UnsupportedCallError, disable, enable
from hf_treespec.control import SizePolicy
from hf_treespec.draft import LearningDraft, TextDraft, build_corpus_index
from hf_treespec.draft.text import Predictor
from hf_treespec.tree import TokenTree
from tiny import MARGIN, WIDTH, assert_same_text, cache_argument, new_cache, prompt, real_texts

batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])
ALL = ("ngram", "suffix", "recycle", "lookahead")


def among(*drafts: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("draft", drafts, ids=["+".join([d] if isinstance(d, str) else d) for d in drafts])


OFF = TreeConfig(max_nodes=16, max_depth=6, max_children=3, fallback="off", seed=3)
EOS = [5, 6, 7, 9, 14, 23, 31, 40, 52]
NEW = 20


def same_text(
    model: PreTrainedModel,
    inputs: dict[str, Any],
    config: TreeConfig,
    plain: PreTrainedModel | None = None,
    **call: Any,
) -> Tensor:
    """The text with a tree, which must be that of no tree, and greedily that of transformers alone."""
    call = {"max_new_tokens": NEW, **inputs, **call}
    expected = model.generate(tree_config=config.replace(max_nodes=0), **call)
    if plain is not None and not call["do_sample"]:
        assert_same_text(plain.generate(**call), expected, width=1)
    actual = model.generate(tree_config=config, **call)
    assert_same_text(expected, actual, width=1)
    return actual


@pytest.mark.parametrize("route", ROUTES)
@batches
@samplings
@among("recycle", "lookahead", ("ngram", "lookahead"), ALL)
@pytest.mark.filterwarnings("ignore::hf_treespec.TreeSpecWarning")
def test_any_source_equals_no_tree(route: str, batch: int, sampling: dict[str, Any], draft: Any) -> None:
    stock, treed, inputs, family = ROUTES[route]
    model = treed(family)
    same_text(model, inputs(batch), OFF.replace(draft=draft), stock(family), **sampling)
    stats = model.treespec_stats
    names = [draft] if isinstance(draft, str) else list(draft)
    assert stats.draft == "+".join(names)
    assert stats.drafted_nodes > 0 and set(stats.drafted_by_source) <= set(names)
    # Each node has one source at least, each accepted one too.
    for by_source, total in (
        (stats.drafted_by_source, stats.drafted_nodes),
        (stats.accepted_by_source, stats.accepted_tokens),
    ):
        assert max(by_source.values(), default=0) <= total <= sum(by_source.values())
        assert len(names) > 1 or by_source.get(names[0], 0) == total


@among("suffix", "recycle", "lookahead", ("ngram", "recycle"))
@samplings
@batches
def test_ends_caches_and_the_fallback(draft: Any, sampling: dict[str, Any], batch: int) -> None:
    """Rows that end early, a cache that goes on, and trees that are cut by the clock."""
    model, config = tiny.treed("llama"), OFF.replace(draft=draft)
    for more in ({"eos_token_id": EOS}, {"eos_token_id": EOS, "repetition_penalty": 1.3}):
        same_text(model, mask_inputs(batch), config.replace(fallback="auto"), tiny.stock("llama"), **more, **sampling)
    ids, mask = prompt("llama", batch)
    cache, whole = new_cache(tiny.stock("llama")), {"attention_mask": mask, **sampling}
    first = model.generate(ids, tree_config=config, max_new_tokens=8, **cache_argument(cache), **whole)
    whole["attention_mask"] = torch.cat([mask, mask.new_ones(batch, 8)], 1)
    again = model.generate(first, tree_config=config, max_new_tokens=8, **cache_argument(cache), **whole)
    alone = model.generate(first, tree_config=config.replace(max_nodes=0), max_new_tokens=8, **whole)
    assert_same_text(alone, again, width=first.shape[1])


@among(ALL)
@batches
def test_prompts_that_nobody_has_ids_of(draft: Any, batch: int) -> None:
    ids, mask = prompt("llama", batch)
    embeds = tiny.stock("llama").get_input_embeddings()(ids).detach()
    inputs = {"inputs_embeds": embeds, "attention_mask": mask}
    same_text(tiny.treed("llama"), inputs, OFF.replace(draft=draft), tiny.stock("llama"), do_sample=False)
    assert tiny.treed("llama").treespec_stats.drafted_nodes > 0


@pytest.mark.parametrize("rule", ["rrs", "block"])
@among("suffix", "lookahead")
def test_independent_rules_take_the_nodes_as_certain(draft: Any, rule: str) -> None:
    config = OFF.replace(verification=rule, draft=draft)
    call = {**mask_inputs(3), "do_sample": True, "max_new_tokens": NEW, "tree_config": config}
    one, two = (tiny.treed("llama").generate(**call) for _ in range(2))
    assert one.shape == (3, WIDTH + NEW) and torch.equal(one, two)


@among("suffix", "lookahead")
def test_under_independent_rules_a_row_has_one_text_alone_and_in_a_batch(draft: Any) -> None:
    """What is learnt of one row moves no coin of another."""
    call = {"do_sample": True, "max_new_tokens": NEW, "tree_config": OFF.replace(verification="rrs", draft=draft)}
    (ids, mask), model = prompt("llama", 3), tiny.treed("llama")
    whole = real_texts(model.generate(ids, attention_mask=mask, **call), mask)
    for row in range(3):
        alone = ids[row : row + 1, mask[row].bool()]
        assert model.generate(alone, attention_mask=torch.ones_like(alone), **call)[0].tolist() == whole[row]


@among("recycle", ALL)
def test_a_table_that_knows_the_coins_is_refused_under_independent_rules(draft: Any) -> None:
    """A table learnt from a text with the same seed would choose children by the coins that judge them."""
    config = OFF.replace(draft=draft, verification="rrs")
    model, call = tiny.treed("llama"), {**mask_inputs(1), "max_new_tokens": NEW, "tree_config": config}
    with pytest.raises(UnsupportedCallError, match="'recycle' is learnt from texts"):
        model.generate(**call, do_sample=True)
    same_text(model, mask_inputs(1), config, tiny.stock("llama"), do_sample=False)


@among("recycle", "lookahead", ALL)
def test_nearly_no_temperature(draft: Any) -> None:
    config = OFF.replace(draft=draft)
    call = {**mask_inputs(1), "do_sample": True, "temperature": 1e-3, "max_new_tokens": NEW}
    model = tiny.treed("llama")
    plain = model.generate(**call, tree_config=config.replace(max_nodes=0))
    assert torch.equal(model.generate(**call, tree_config=config), plain)


# -- oracles --

CYCLE = (3, 9, 4, 17, 11, 8, 20)


def periodic(cycle: tuple[int, ...] = CYCLE) -> PreTrainedModel:
    """A model whose next token is a function of the last one: it walks through a cycle for ever."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24, hidden_size=64, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4,
        tie_word_embeddings=False, eos_token_id=None, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().double()
    with torch.no_grad():
        for layer in model.model.layers:
            # What the probe of the masks can just see.
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.down_proj.weight.zero_()
        table = torch.randn(24, 64, dtype=torch.float64)
        model.model.embed_tokens.weight.copy_(table)
        model.lm_head.weight.zero_()
        for token, following in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
            model.lm_head.weight[following] = table[token]
    return model


@among("ngram", "suffix", "recycle", "lookahead", ALL)
@batches
@samplings
def test_a_text_that_repeats_is_accepted_whole(draft: Any, batch: int, sampling: dict[str, Any]) -> None:
    model = enable(periodic())
    ids = torch.tensor([list(CYCLE) * 2 + list(CYCLE[:row]) for row in (3,) * batch])
    config = OFF.replace(draft=draft, max_depth=6)
    text = same_text(
        model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, config, max_new_tokens=43, **sampling
    )
    whole = torch.tensor((list(CYCLE) * 9)[: text.shape[1]])
    assert torch.equal(text, whole.expand_as(text))
    stats = model.treespec_stats
    # The first token is the prefill's; a round of a whole path brings seven.
    assert stats.rounds <= 6 + ("recycle" in draft)
    assert stats.accepted_by_depth[0] >= batch * (stats.rounds - 1)


def test_recycling_needs_no_earlier_occurrence() -> None:
    """Each token comes for the first time in this text; the target has ranked it before, in another call."""
    model = enable(periodic())
    start = torch.tensor([[CYCLE[0]]])
    config = OFF.replace(draft="recycle")
    for expected in (None, 1):
        for draft in ("recycle", "ngram"):
            model.generate(start, tree_config=config.replace(draft=draft), max_new_tokens=7, do_sample=False)
            if expected and draft == "recycle":
                assert model.treespec_stats.rounds == expected
            if draft == "ngram":
                assert model.treespec_stats.rounds == 6
    model.generate(
        start,
        tree_config=config.replace(draft_options={"recycle": {"keep": False}}), max_new_tokens=7, do_sample=False,
    )  # fmt: skip
    assert model.treespec_stats.rounds > 1
    disable(model)
    enable(model).generate(start, tree_config=config, max_new_tokens=7, do_sample=False)
    assert model.treespec_stats.rounds > 1


def test_lookahead_makes_up_what_no_text_has_held() -> None:
    """Here no token is followed by the one that the target has for it, until the text comes round after 20 of them."""
    cycle = tuple(range(3, 23))
    start = [cycle[7 * place % 20] for place in range(20)]
    assert not {*pairwise(start)} & {*pairwise((*cycle, cycle[0]))}
    model, rounds = enable(periodic(cycle)), {}
    # Chains have no room for a window.
    for name, changes in (("tree", {}), ("chain", {"max_children": 1}), ("ngram", {"draft": "ngram"})):
        config = OFF.replace(**{"draft": "lookahead", **changes})
        text = model.generate(torch.tensor([start]), tree_config=config, max_new_tokens=64, do_sample=False)
        first = cycle.index(start[-1]) + 1
        assert text[0, 20:].tolist() == [cycle[(first + place) % 20] for place in range(64)]
        rounds[name] = model.treespec_stats.rounds
    # The first token is the prefill's; 19 tokens one by one, then paths of 7.
    assert rounds["chain"] == rounds["ngram"] == 19 + 7
    assert rounds["tree"] == 18


def test_a_corpus_is_accepted_whole(tmp_path: Path) -> None:
    model = enable(periodic())
    path = build_corpus_index([[*CYCLE, *CYCLE, *CYCLE]], tmp_path / "corpus", vocab_size=24)
    config = OFF.replace(draft="suffix", draft_options={"suffix": {"index": path}})
    start = torch.tensor([[CYCLE[0]]])
    model.generate(start, tree_config=config, max_new_tokens=15, do_sample=False)
    assert model.treespec_stats.rounds == 2
    model.generate(start, tree_config=OFF.replace(draft="suffix"), max_new_tokens=15, do_sample=False)
    assert model.treespec_stats.rounds > 6


# -- what a source is told --


class Noted(Predictor):
    name = "noted"
    learns = True

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Tensor, Any]] = []

    def begin(self, row: Any) -> None:
        self.text = list(row.tokens)

    def shares(self, row: Any, path: Any, floor: float) -> dict[int, float]:
        return dict.fromkeys((4, 5, 6), 0.2)

    def observe(self, trees: Any, logits_BNV: Tensor, paths: Any) -> None:
        self.seen.append((trees, logits_BNV.clone(), [list(path) for path in paths]))


@pytest.mark.parametrize("fallback", ["off", "auto"])
@batches
def test_what_is_observed_is_what_the_target_says_of_each_path(
    batch: int, fallback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted()
    source = TextDraft([noted])
    assert isinstance(source, LearningDraft) and source.learns
    monkeypatch.setattr("hf_treespec.engine.loop.make_draft", lambda *_: source)
    ids, mask = prompt("llama", batch)
    text = tiny.treed("llama").generate(
        ids, attention_mask=mask, max_new_tokens=8, do_sample=False, tree_config=OFF.replace(fallback=fallback)
    )
    assert len(noted.seen) == tiny.treed("llama").treespec_stats.rounds + 1
    whole = real_texts(text, mask)
    done = [int(row.sum()) - 1 for row in mask]
    plain = tiny.stock("llama")
    for trees, logits, paths in noted.seen:
        for row, (tree, path) in enumerate(zip(trees, paths, strict=True)):
            if not path:
                continue
            assert tree.tokens[0] == whole[row][done[row]]
            for node in range(len(tree)):
                read = [*whole[row][: done[row]], *tree.path_tokens(node)]
                expected = plain(torch.tensor([read])).logits[0, -1].detach()
                assert float((expected - logits[row, node]).abs().max()) < MARGIN
            done[row] += len(path)
            assert tree.path_tokens(path[-1]) == whole[row][done[row] - len(path) : done[row]]


def test_padding_behind_an_ended_row_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted()
    monkeypatch.setattr("hf_treespec.engine.loop.make_draft", lambda *_: TextDraft([noted]))
    inputs = mask_inputs(3)
    whole = tiny.stock("llama").generate(**inputs, max_new_tokens=12, do_sample=False)
    end = int(whole[1, WIDTH + 3])
    # A criterion of the caller's own keeps the rows in step.
    text = tiny.treed("llama").generate(
        **inputs, max_new_tokens=12, do_sample=False, eos_token_id=end, pad_token_id=0, tree_config=OFF,
        stopping_criteria=[lambda ids, scores, **_: torch.zeros(len(ids), dtype=torch.bool)],
    )  # fmt: skip
    new = [row[: row.index(end) + 1] if end in row else row for row in text[:, WIDTH:].tolist()]
    assert len(new[1]) < len(max(new, key=len))
    # The prefill's one token is the root of the first round; what the last node said is the last token.
    assert [sum(len(paths[row]) for *_, paths in noted.seen[1:]) for row in range(3)] == [len(row) - 1 for row in new]


def test_credit_goes_by_the_nodes_that_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    class One(Noted):
        def __init__(self, name: str, token: int, share: float) -> None:
            super().__init__()
            self.name, self.told = name, {token: share}

        def shares(self, row: Any, path: Any, floor: float) -> dict[int, float]:
            return {} if path else self.told

    def cut(self: SizePolicy, trees: Any, *_: Any, **more: Any) -> Any:
        """Of the two children of a root the second."""
        self.kept = [[0, 2] if tree.drafted == 2 else [0] for tree in trees]
        return [tree.part([2]) if tree.drafted == 2 else TokenTree.root_only(tree.tokens[0]) for tree in trees]

    source = TextDraft([One("one", 4, 0.9), One("two", 5, 0.1)])
    monkeypatch.setattr("hf_treespec.engine.loop.make_draft", lambda *_: source)
    monkeypatch.setattr(SizePolicy, "cut", cut)
    same_text(tiny.treed("llama"), mask_inputs(1), OFF, do_sample=False)
    stats = tiny.treed("llama").treespec_stats
    assert stats.drafted_by_source == {"two": stats.drafted_nodes} and stats.drafted_nodes > 5


def test_sources_that_do_not_learn_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextDraft, "observe", lambda *_: pytest.fail("nothing here learns from logits"))
    for draft in ("ngram", "suffix", ("ngram", "suffix")):
        same_text(tiny.treed("llama"), mask_inputs(1), OFF.replace(draft=draft), do_sample=False)


def test_one_transfer_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers: list[Any] = []
    cpu = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self: transfers.append(self.shape) or cpu(self))
    same_text(tiny.treed("llama"), mask_inputs(1), OFF.replace(draft="recycle"), **SAMPLED)
    assert len(transfers) == tiny.treed("llama").treespec_stats.rounds + 1
    assert all(shape[0] == 2 and shape[-1] == 8 for shape in transfers)


def test_in_inference_mode_and_out_of_it() -> None:
    model = enable(tiny.build("llama"))
    config = OFF.replace(draft="recycle")
    with torch.inference_mode():
        one = same_text(model, mask_inputs(1), config, do_sample=False)
    assert_same_text(one, same_text(model, mask_inputs(1), config, do_sample=False), width=1)


# -- refusals --


@among("suffix", ("ngram", "recycle"))
def test_an_assistant_beside_a_source_is_refused(draft: Any) -> None:
    with pytest.raises(UnsupportedCallError) as caught:
        tiny.treed("llama").generate(
            **mask_inputs(1), tree_config=OFF.replace(draft=draft), assistant_model=tiny.draft("llama")
        )
    assert f"TreeConfig(draft={draft!r}) with an assistant_model: leave one out" in str(caught.value)


def test_a_corpus_that_does_not_fit_is_refused_before_any_forward(tmp_path: Path) -> None:
    class Words:
        def __len__(self) -> int:
            return 2

        def get_vocab(self) -> dict[str, int]:
            return {"a": 1}

    model = tiny.treed("llama")
    handle = model.register_forward_pre_hook(lambda *_: pytest.fail("no forward may come before the refusal"))
    made = build_corpus_index([[1, 2, 3]], tmp_path / "other", vocab_size=5)
    right = build_corpus_index([[1, 2, 3]], tmp_path / "right", vocab_size=97, fingerprint="abc")
    try:
        for path, more, reason in (
            (tmp_path / "none", {}, "cannot be read"),
            (made, {}, "vocabulary of 5 ids, the model has 97"),
            (right, {"tokenizer": Words()}, "the tokenizer abc"),
        ):
            config = OFF.replace(draft="suffix", draft_options={"suffix": {"index": path}})
            with pytest.raises(UnsupportedCallError) as caught:
                model.generate(**mask_inputs(1), tree_config=config, **more)
            assert f"suffix['index']={str(path)!r}" in str(caught.value) and reason in str(caught.value)
    finally:
        handle.remove()
    config = OFF.replace(draft="suffix", draft_options={"suffix": {"index": right}})
    same_text(model, mask_inputs(1), config, do_sample=False)
