"""The stem of a round, read before its paths, once for each row: the same text and caches; no root is read twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

import calls
import ordered
import seq2seq
import tiny
from calls import BUSHES, CHAINS_OF_4, GREEDY, SAMPLED, Pair
from hf_treespec import Support, _compat, is_supported
from hf_treespec.api import hooks
from hf_treespec.engine.stem import StemChoice
from hf_treespec.routes import Route
from ordered import ALONE, PATHS, assert_same_state, returned
from seq2seq import assert_same_caches, pair_of_caches, source_text
from sources import MAKERS, Source, drafting
from tiny import WIDTH, assert_same_cache, cache_argument, real_texts

pytestmark = pytest.mark.filterwarnings("ignore::hf_treespec.TreeSpecWarning")
batches = pytest.mark.parametrize("batch", [1, 3])
samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["t0", "t0.9"])
DICT = {"return_dict_in_generate": True}


@pytest.fixture
def stem(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool | None:
    """The answer to whether stems are read on their own."""
    made = StemChoice.__init__

    def init(self: StemChoice) -> None:
        made(self)
        self.forced = request.param

    monkeypatch.setattr(StemChoice, "__init__", init)
    return request.param


class shapes_read:
    """`[rows, tokens]` of every forward of a model from now on."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shapes: list[tuple[int, ...]] = []
        # The forwards of its probe, should that be still to come, are none of a call.
        is_supported(model)
        self._handle = model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("decoder_input_ids", kwargs.get("input_ids"))
        self.shapes.append(tuple(ids.shape))

    def remove(self) -> None:
        self._handle.remove()


def expected_shapes(
    source: Source, batch: int, *, stem: bool, order_bound: bool, whole: int = 1
) -> Iterator[tuple[int, int]]:
    """What the forwards behind the prefill read, from the trees and how much of them was accepted.

    Args:
        source: of the trees.
        batch: rows.
        stem: whether stems are read on their own.
        order_bound: whether accepted tokens may be lost.
        whole: longest paths from which the root is not taken.
    """
    pending = 0
    for trees, visited in zip(source.rounds, source.paths, strict=True):
        width = 1 + max(tree.max_depth for tree in trees)
        paths = sum(not tree.children(node) for tree in trees for node in range(len(tree)))
        left = len(visited[0])
        if stem and width > whole:
            yield batch, pending + 1
            pending, width, left = 0, width - 1, left - 1
        elif stem and width > 1 and pending:
            yield batch, pending
            pending = 0
        yield paths, pending + width
        pending = pending + left if order_bound and left < width else 0
    if pending:
        yield batch, pending


def both_ordered(family: str, batch: int, **arguments: Any) -> Pair:
    """`calls.twice` on a left-padded prompt."""
    ids, mask = ordered.prompt(batch)
    models = ordered.stock(family), ordered.treed(family)
    return calls.twice(ids, mask, **{"models": models, "max_new_tokens": 12, "pad_token_id": 0, **DICT, **arguments})


@pytest.mark.parametrize(
    ("family", "stem"),
    [*((family, True) for family in (*PATHS, *ALONE)), ("lfm2_moe", False), ("xlstm", False), ("lfm2_moe", None)],
    indirect=["stem"],
)
@batches
@samplings
def test_an_order_bound_state(family: str, batch: int, sampling: dict[str, Any], stem: bool | None) -> None:
    if family in ALONE and batch > 1:
        pytest.skip("several rows are decoded plainly")
    for maker in ("half_right", "deep", "random_tree") if family == "lfm2_moe" else ("half_right",):
        reads = shapes_read(ordered.treed(family))
        pair = both_ordered(family, batch, maker=maker, **sampling)
        reads.remove()
        assert_same_state(returned(pair.expected), returned(pair.actual), ordered.prompt(batch)[1])
        # Were the probe to find that it goes wrong, all would be decoded plainly.
        assert pair.stats.drafted_nodes > 0
        if stem is not None:
            # Several rows of one token each would not be read right by a model that is right for one row only.
            kinds: dict[str, Any] = {"order_bound": True, "whole": 2 if family in ALONE else 1}
            assert reads.shapes[1:] == list(expected_shapes(pair.source, batch, stem=stem, **kinds))


@pytest.mark.parametrize(
    ("family", "stem"), [("t5", True), ("bart", True), ("t5", False), ("bart", None)], indirect=["stem"]
)
@batches
@samplings
def test_behind_an_encoder(family: str, batch: int, sampling: dict[str, Any], stem: bool | None) -> None:
    for maker in ("half_right", "deep", "random_tree"):
        reads = shapes_read(seq2seq.treed(family))
        pair = seq2seq.twice(family, source_text(batch), maker=maker, max_new_tokens=12, **DICT, **sampling)
        reads.remove()
        assert_same_caches(*(_compat.cache_from_outputs(output) for output in (pair.expected, pair.actual)))
        if stem is not None:
            assert reads.shapes[1:] == list(expected_shapes(pair.source, batch, stem=stem, order_bound=False))


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt2"])
@batches
@samplings
@pytest.mark.parametrize("stem", [True], indirect=True)
def test_windows_and_told_positions(
    monkeypatch: pytest.MonkeyPatch, family: str, batch: int, sampling: dict[str, Any], stem: bool
) -> None:
    """Models that would take a mask, sent down the other route: their windows hold the root beside the paths."""
    monkeypatch.setattr(hooks, "is_supported", lambda model: Support(True, Route.PATHS, "by this test"))
    ids, mask = tiny.prompt(family, batch)
    reads = shapes_read(tiny.treed(family))
    pair = calls.twice(ids, mask, family=family, max_new_tokens=20, **DICT, **sampling)
    reads.remove()
    assert_same_cache(*(_compat.cache_from_outputs(output) for output in (pair.expected, pair.actual)), mask)
    assert reads.shapes[1:] == list(expected_shapes(pair.source, batch, stem=stem, order_bound=False))


@pytest.mark.parametrize("family", ["lfm2_moe", "xlstm"])
@pytest.mark.parametrize("stem", [True], indirect=True)
def test_an_oracle_is_believed(family: str, stem: bool) -> None:
    pair = both_ordered(family, 1, maker="chain", config=CHAINS_OF_4, max_new_tokens=26)
    # The prefill's token, then 5 a round.
    assert pair.stats.rounds == 5 and pair.stats.accepted_tokens == 20


@pytest.mark.parametrize(("family", "batch"), [("lfm2_moe", 3), ("qwen3_next", 1)])
@pytest.mark.parametrize("stem", [True], indirect=True)
def test_a_passed_in_cache_goes_on(family: str, batch: int, stem: bool) -> None:
    models = ordered.stock(family), ordered.treed(family)
    calls.goes_on_behind_a_cache(models, *ordered.prompt(batch), assert_same_state, pad_token_id=0)


class Burst(Exception):
    pass


class Fuse:
    """Raises half-way through the forwards of a model that it is set on, and notes how much had been read before.

    Args:
        model: the model.
        layer: of it, in whose middle it raises.
        at: number of the first such forward behind the prefill, by pairs: stem and paths of a round.
        cache: its length is noted as each round begins.
        for_good: whether later forwards raise as well.
    """

    def __init__(self, model: torch.nn.Module, layer: torch.nn.Module, at: int, cache: Any, *, for_good: bool) -> None:
        self._at, self._cache, self._for_good, self._count = at, cache, for_good, -1
        self.lengths: list[int] = []
        self._handles = [model.register_forward_pre_hook(self._begin), layer.register_forward_pre_hook(self._raise)]

    def _begin(self, *_: Any) -> None:
        self._count += 1
        if self._count <= self._at:
            self.lengths.append(self._cache.get_seq_length())

    def _raise(self, *_: Any) -> None:
        if self._count == self._at or (self._for_good and self._count > self._at):
            raise Burst

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


@pytest.mark.parametrize(("family", "batch"), [("lfm2_moe", 1), ("bamba", 3)])
@pytest.mark.parametrize("at", [3, 4, 7, 8], ids=["stem 2", "paths 2", "stem 4", "paths 4"])
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("stem", [True], indirect=True)
def test_an_exception_gives_a_state_back_as_before_the_round(
    family: str, batch: int, at: int, for_good: bool, stem: bool
) -> None:
    model, cache = ordered.treed(family), DynamicCache(config=ordered.stock(family).config)
    ids, mask = ordered.prompt(batch)
    call = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    text = ordered.stock(family).generate(ids, attention_mask=mask, **call)
    fuse = Fuse(model, model.model.layers[-1], at, cache, for_good=for_good)
    # Some paths are accepted in part, so that tokens are pending when the next round begins.
    source = Source(MAKERS["deep"], vocab=ordered.VOCAB, truth=real_texts(text, mask))
    with drafting(source), pytest.raises(Burst) as caught:
        model.generate(ids, attention_mask=mask, tree_config=BUSHES, **call, **cache_argument(cache))
    fuse.remove()
    emitted = 1 + sum(len(paths[0]) for paths in source.paths)
    begun = fuse.lengths[at - (at - 1) % 2]
    length = cache.get_seq_length()
    if for_good:
        # What was pending could not be read, and that is said.
        assert length == begun
        assert (length < WIDTH + emitted - 1) == bool(getattr(caught.value, "__notes__", []))
    else:
        assert length == WIDTH + emitted - 1
    whole = torch.cat([mask, mask.new_ones(batch, 24)], 1)
    again = DynamicCache(config=ordered.stock(family).config)
    ordered.stock(family).generate(
        text[:, :length], attention_mask=whole[:, :length], max_new_tokens=1, pad_token_id=0, **cache_argument(again)
    )
    assert_same_state(again, cache, mask)


@pytest.mark.parametrize("family", ["t5", "bart"])
@batches
@pytest.mark.parametrize("at", [3, 4], ids=["stem", "paths"])
@pytest.mark.parametrize("stem", [True], indirect=True)
def test_an_exception_behind_an_encoder(family: str, batch: int, at: int, stem: bool) -> None:
    model, cache = seq2seq.treed(family), pair_of_caches(seq2seq.stock(family))
    call = {**source_text(batch), "max_new_tokens": 24, "do_sample": False, **seq2seq.LIVELY.get(family, {})}
    text = seq2seq.stock(family).generate(**call)
    layers = [m for m in model.get_decoder().modules() if type(m).__name__.endswith(("DecoderLayer", "Block"))]
    fuse = Fuse(model, layers[-1], at, cache, for_good=True)
    source = Source(MAKERS["half_right"], vocab=seq2seq.VOCAB, truth=text.tolist())
    with drafting(source), pytest.raises(Burst):
        model.generate(**call, tree_config=BUSHES, **cache_argument(cache))
    fuse.remove()
    length = cache.get_seq_length()
    assert length == sum(len(paths[0]) for paths in source.paths) + 1 == fuse.lengths[at - (at - 1) % 2]
    theirs = pair_of_caches(seq2seq.stock(family))
    seq2seq.stock(family).generate(
        **source_text(batch), max_new_tokens=1, do_sample=False, decoder_input_ids=text[:, :length],
        **cache_argument(theirs),
    )  # fmt: skip
    assert_same_caches(theirs, cache)
