"""What a model type is put through: whole calls of generate() with trees, each held against plain decoding.

Every call is compared with plain generate() of a model that was never enabled: text token by token, and the cache that
both return. Trees come from a source that knows plain's text, so that rejections and deep acceptance both happen.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance.zoo import models
from conformance.zoo.caches import cache_difference
from conformance.zoo.weights import extra_arguments, streams
from hf_treespec import TreeConfig, UnsupportedCallError, UnsupportedModelError, _compat, enable, is_supported
from hf_treespec.routes import Route
from hf_treespec.verify import GumbelNoise, text_streams
from sources import MAKERS, Source, drafting
from tiny import MARGIN, gumbel_multinomial, real_texts

SEED = 3
NEW = 24
# Below the window of the tiny models at first, and past it from the start.
WIDTHS = (5, 13)
BUSHES = TreeConfig(max_nodes=16, max_depth=5, max_children=3, fallback="off", seed=SEED)
CHAINS = TreeConfig(max_nodes=4, max_depth=4, max_children=1, fallback="off", seed=SEED)
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95}
_OTHERS = ("half_right", "deep", "random_tree", "wide")


@dataclass(frozen=True)
class Cell:
    """One call.

    Args:
        attention: implementation.
        width: of the prompt.
        batch: rows; several are left-padded.
        sampled: whether tokens are drawn.
    """

    attention: str
    width: int
    batch: int
    sampled: bool

    def __str__(self) -> str:
        return f"{self.attention}, prompt {self.width}, batch {self.batch}, {'sampled' if self.sampled else 'greedy'}"


@dataclass
class Finding:
    """What came of a model type.

    Attributes:
        name: one of `zoo.types()`.
        route: by `is_supported`.
        verdict: "equal", "refused", "wrong" or "error".
        reason: of the refusal, or what is wrong.
        calls: calls compared with plain decoding.
        drafted: nodes that were proposed.
        accepted: and those that were accepted.
        excused: calls that part from plain where its two best tokens are within rounding.
        plain: what plain decoding itself cannot do.
        refused_calls: calls that were refused, and the reason.
        attentions: implementations that ran, and the precision of the weights.
    """

    name: str
    route: str
    verdict: str = "equal"
    reason: str = ""
    calls: int = 0
    drafted: int = 0
    accepted: int = 0
    excused: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    refused_calls: list[str] = field(default_factory=list)
    attentions: dict[str, str] = field(default_factory=dict)


class Parted(AssertionError):
    """Text or cache differ from plain decoding's."""


def cells(name: str, *, whole: bool) -> list[Cell]:
    """The calls of a type: all combinations, or half of them in which every pair of settings occurs."""
    every = itertools.product(models.attentions(name), WIDTHS, (1, 3), (False, True))
    made = [Cell(*settings) for settings in every]
    return [c for c in made if whole or ((c.width == WIDTHS[0]) + (c.batch == 1) + c.sampled) % 2 == 0]


def prompt(model: PreTrainedModel, batch: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random ids `[batch, width]` and their mask; three rows are left-padded by 3, 0 and 1."""
    generator = torch.Generator().manual_seed(seed + width)
    rows = batch * streams(model)
    ids = torch.randint(3, 90, (rows, width), generator=generator)
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :3] = 0
        mask[2, :1] = 0
    return ids.masked_fill(mask == 0, 0), mask


def check(name: str, *, whole: bool = True) -> Finding:
    """Put a type through its calls."""
    plain_model = models.build(name)
    support = is_supported(plain_model)
    found = Finding(name, str(support.route))
    if not support.ok:
        found.verdict, found.reason = "refused", support.reason
        _must_refuse(name, found)
        return found
    done: str | None = None
    # Each is done with its attention before the next model is built.
    for number, cell in enumerate(cells(name, whole=whole)):
        if cell.attention != done:
            plain_model = models.build(name, attention=cell.attention)
            tree_model = enable(copy.deepcopy(plain_model))
            support = is_supported(plain_model)
            done = cell.attention
            found.attentions[cell.attention] = str(plain_model.dtype).removeprefix("torch.")
        try:
            _check_cell(plain_model, tree_model, cell, number, support.route, found)
            if support.route.masked and whole and (cell.width, cell.sampled) == (WIDTHS[1], False):
                _check_assistant(plain_model, tree_model, cell, found)
        except Parted as parted:
            found.verdict, found.reason = "wrong", f"{cell}: {parted}"
            return found
        except Exception as error:  # the verdict on a type is what its calls raise
            found.verdict, found.reason = "error", f"{cell}: {type(error).__name__}: {' '.join(str(error).split())}"
            return found
    if not found.calls:
        found.verdict, found.reason = "error", f"nothing compared: {found.plain} {found.refused_calls}"
    return found


def _must_refuse(name: str, found: Finding) -> None:
    """A refusal comes before any forward, and says why."""
    model = models.build(name)
    ids, mask = prompt(model, 1, WIDTHS[1])
    try:
        masked = {"attention_mask": mask} if streams(model) == 1 else {}
        model.generate(ids, max_new_tokens=NEW, **masked, **GREEDY, **extra_arguments(model))
    except Exception as error:  # plain decoding may raise anything
        found.plain.append(f"raises {type(error).__name__}: {' '.join(str(error).split())[:150]}")
    try:
        enable(model)
    except UnsupportedModelError as error:
        if found.reason not in str(error):
            found.verdict, found.reason = "error", f"says {error} instead of {found.reason}"
    else:
        found.verdict, found.reason = "error", "not refused"


def _check_cell(
    plain_model: PreTrainedModel, tree_model: PreTrainedModel, cell: Cell, number: int, route: Route, found: Finding
) -> None:
    ids, mask = prompt(plain_model, cell.batch, cell.width)
    sampling = SAMPLED if cell.sampled else GREEDY
    call = {"max_new_tokens": NEW, "return_dict_in_generate": True, **sampling, **extra_arguments(plain_model)}
    if streams(plain_model) == 1:
        call["attention_mask"] = mask
    try:
        with coupled(cell, ids, mask, _logits_width(plain_model)):
            expected = plain_model.generate(ids, output_scores=True, output_logits=True, **call)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, AssertionError) as error:
        found.plain.append(f"{cell}: raises {type(error).__name__}: {' '.join(str(error).split())[:150]}")
        return
    truth = real_texts(expected.sequences, mask)
    other = _OTHERS[(number + number // len(_OTHERS)) % len(_OTHERS)]
    for maker, config in ((other, BUSHES), ("chain", CHAINS)):
        source = Source(MAKERS[maker], seed=1, vocab=90, truth=truth)
        try:
            with drafting(source):
                actual = tree_model.generate(ids, tree_config=config, **call)
        except UnsupportedCallError as error:
            found.refused_calls.append(f"{cell}: {error}")
            return
        found.calls += 1
        _compare_text(expected, actual, cell, mask, maker, found)
        stats = tree_model.treespec_stats
        found.drafted += sum(tree.drafted for trees in source.rounds for tree in trees)
        found.accepted += stats.accepted_tokens
        if torch.equal(expected.sequences, actual.sequences):
            difference = cache_difference(expected, actual, mask)
            if difference:
                raise Parted(f"{maker}: {difference}")
            if maker == "chain":
                _all_accepted(source, route, stats)


def _check_assistant(model: PreTrainedModel, tree_model: PreTrainedModel, cell: Cell, found: Finding) -> None:
    """The target as its own draft model, by forwards of its own: right at every node again."""
    ids, mask = prompt(model, cell.batch, cell.width)
    call = {"attention_mask": mask, "max_new_tokens": NEW, "return_dict_in_generate": True, **GREEDY}
    expected = model.generate(ids, output_scores=True, **call)
    try:
        actual = tree_model.generate(ids, assistant_model=model, tree_config=CHAINS, **call)
    except UnsupportedCallError as error:
        found.refused_calls.append(f"as its own assistant: {error}")
        return
    found.calls += 1
    _compare_text(expected, actual, cell, mask, "assistant", found)
    stats = tree_model.treespec_stats
    found.drafted += stats.drafted_nodes
    found.accepted += stats.accepted_tokens
    if torch.equal(expected.sequences, actual.sequences) and stats.accepted_tokens != stats.drafted_nodes:
        raise Parted(f"of {stats.drafted_nodes} nodes of itself as draft {stats.accepted_tokens} were accepted")


def _all_accepted(source: Source, route: Route, stats: Any) -> None:
    """A draft that is the target itself is right at every node: 5 tokens a round, but for the end."""
    for trees, paths in zip(source.rounds, source.paths, strict=True):
        for tree, path in zip(trees, paths, strict=True):
            if path and len(path) != len(tree):
                raise Parted(f"of a chain of {tree.drafted} right tokens {len(path) - 1} were accepted")
    rounds = math.ceil((NEW - 1) / 5)
    if route.masked and stats.rounds != rounds:
        raise Parted(f"{stats.rounds} rounds for {NEW} tokens, with right chains of 4 expected {rounds}")


def _compare_text(expected: Any, actual: Any, cell: Cell, mask: Tensor, maker: str, found: Finding) -> None:
    one, two = expected.sequences, actual.sequences
    if torch.equal(one, two):
        return
    if one.shape != two.shape:
        raise Parted(f"{maker}: lengths {tuple(one.shape)} and {tuple(two.shape)}")
    for row in range(len(one)):
        differ = (one[row] != two[row]).nonzero().flatten().tolist()
        if not differ:
            continue
        gap = _margin(expected, cell, mask, row, differ[0])
        note = f"{cell}, {maker}, row {row}: new token {differ[0] - cell.width} differs, margin {gap:.3g}"
        if not gap < MARGIN:
            raise Parted(f"{note}: {one[row, cell.width :].tolist()} against {two[row, cell.width :].tolist()}")
        found.excused.append(note)


def _margin(expected: Any, cell: Cell, mask: Tensor, row: int, column: int) -> float:
    """Gap between the two best tokens of plain decoding, with the noise on them if there is one."""
    if column < cell.width:
        return math.inf
    scores = expected.scores[column - cell.width][row].double()
    if cell.sampled:
        noise = GumbelNoise(
            SEED, scores.shape[-1], streams=text_streams(real_texts(expected.sequences[:, : cell.width], mask))
        )
        scores = scores + noise.at(row, int(mask[row].sum()) + column - cell.width)
    best = scores.topk(2).values
    return float(best[0] - best[1])


def _logits_width(model: PreTrainedModel) -> int:
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    return int(weight.shape[0]) if weight is not None else _compat.vocabulary_size(model)


@contextmanager
def coupled(cell: Cell, ids: Tensor, mask: Tensor, vocab: int) -> Iterator[None]:
    """Plain sampling with the noise of the trees."""
    with ExitStack() as stack:
        if cell.sampled:
            stack.enter_context(gumbel_multinomial(SEED, real_texts(ids, mask), mask.sum(-1).tolist(), vocab))
        yield
