"""The null law of a text: the target's own conditionals, teacher-forced, and what a text says about them.

Nothing here asks the library under test: logits come from one forward of the model over the finished text, and the
processors are those of transformers, in the order in which `generate` applies them.

Shapes: T new tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

__all__ = ["STEPS", "VARIANCES", "cell_of", "cells", "laws_of_text", "processors", "together", "witness"]

# By how much of a log probability rounding may move what top-k leaves, and the order of tokens.
_EDGE = 1e-4
# By how much of the mass above a token it may move what top-p leaves, and by which share of p what min-p leaves.
_EDGE_MASS, _EDGE_SHARE = 1e-5, 1e-4
_FLOOR = -30.0
# Values of scores are cut to these bounds: no step is larger than their distance, however peaked the laws are.
_BOUNDS = {"p": (-16.0, 0.0), "ratio": (-8.0, 8.0)}
# The largest step of each score.
STEPS = {**{name: high - low for name, (low, high) in _BOUNDS.items()}, "recent": 1.0}
# The variance a token that each score is likely to have: a guess, from SmolLM2-135M-Instruct at temperature 1.
VARIANCES = {"p": 6.0, "ratio": 2.5, "recent": 0.015}
# How many tokens back a token counts as said recently: about as many as a round emits.
_RECENT = 3


def processors(sampling: Mapping[str, float]) -> LogitsProcessorList:
    """What `generate` makes of these settings."""
    found = LogitsProcessorList()
    if sampling["repetition_penalty"] != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(sampling["repetition_penalty"]))
    if sampling["temperature"] != 1.0:
        found.append(TemperatureLogitsWarper(sampling["temperature"]))
    if sampling["top_k"]:
        found.append(TopKLogitsWarper(int(sampling["top_k"])))
    if sampling["top_p"] < 1.0:
        found.append(TopPLogitsWarper(sampling["top_p"]))
    if sampling["min_p"]:
        found.append(MinPLogitsWarper(sampling["min_p"]))
    return found


def _shaped(logits_TV: Tensor, ids: Sequence[int], first: int, sampling: Mapping[str, float]) -> Tensor:
    """Log probabilities, float32; row t is about the token behind `ids[: first + t]`."""
    chain = processors(sampling)
    logits_TV = logits_TV.float()
    if sampling["repetition_penalty"] != 1.0:
        rows = [
            chain(torch.tensor([ids[: first + t]], device=logits_TV.device), logits_TV[t : t + 1].clone())
            for t in range(logits_TV.shape[0])
        ]
        scores = torch.cat(rows)
    else:
        scores = chain(torch.zeros((logits_TV.shape[0], 1), dtype=torch.long), logits_TV.clone())
    return scores.log_softmax(-1)


def _within(ids: Sequence[int], size: int) -> list[int]:
    return [token if token < size else 0 for token in ids]


@torch.no_grad()
def laws_of_text(model: Any, ids: Sequence[int], first: int, sampling: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """The model's conditional laws at each token from `first` on.

    Args:
        model: target or draft.
        ids: prompt and text.
        first: length of the prompt.
        sampling: all of `settings.SAMPLING`.

    Returns:
        Log probabilities `[T, V]` after the processors, and those of the bare logits at the same temperature.
    """
    # As in `generate`, a draft reads an id beyond its vocabulary as id 0: a poor guess, and a law all the same.
    ids = _within(ids, model.get_input_embeddings().weight.shape[0])
    # On the CPU: sums are made in float64, which not every device has.
    logits = model(torch.tensor([ids], device=model.device)).logits[0, first - 1 : -1].cpu()
    ids = _within(ids, logits.shape[-1])
    shaped = _shaped(logits, ids, first, sampling)
    bare = {**sampling, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return shaped, shaped if bare == dict(sampling) else _shaped(logits, ids, first, bare)


def _place(law_TV: Tensor, rank_TV: Tensor, tokens_T: Tensor, dice_T: Tensor) -> Tensor:
    """Where each token lies in its law's distribution function, tokens in falling order of `rank_TV`, ties as one."""
    mine = rank_TV.gather(1, tokens_T[:, None])
    above = (law_TV * (rank_TV > mine)).sum(-1, dtype=torch.float64)
    level = (law_TV * (rank_TV == mine)).sum(-1, dtype=torch.float64)
    return (above + dice_T * level).clamp(0.0, 1.0)


def _score(law_TV: Tensor, value_TV: Tensor, tokens_T: Tensor) -> list[float]:
    """Sum of value(token) less its expectation, and its variance; values are finite."""
    seen = value_TV.gather(1, tokens_T[:, None])[:, 0].double()
    value_TV = value_TV.masked_fill(law_TV == 0, 0.0)
    weighted = law_TV * value_TV
    mean = weighted.sum(-1, dtype=torch.float64)
    square = weighted.mul_(value_TV).sum(-1, dtype=torch.float64)
    return [float((seen - mean).sum()), float((square - mean**2).clamp(min=0.0).sum())]


def _score_recent(law_TV: Tensor, tokens: Sequence[int], places: Sequence[int]) -> list[float]:
    """As `_score`, of whether a token repeats one of the `_RECENT` before it; `places` are those of the rows."""
    before = [set(tokens[max(0, place - _RECENT) : place]) for place in places]
    pairs = [(row, token) for row, said in enumerate(before) for token in said]
    rows, cols = torch.tensor(pairs, dtype=torch.long, device=law_TV.device).view(-1, 2).unbind(-1)
    chance = law_TV.new_zeros(len(places), dtype=torch.float64).index_add(0, rows, law_TV[rows, cols].double())
    seen = sum(tokens[place] in said for place, said in zip(places, before, strict=True))
    return [seen - float(chance.sum()), float((chance * (1 - chance)).clamp(min=0.0).sum())]


def _at_an_edge(bare_TV: Tensor, tokens_T: Tensor, sampling: Mapping[str, float]) -> Tensor:
    """Which tokens `generate` may have left in by rounding alone: each cut by its own threshold.

    Args:
        bare_TV: log probabilities before top-k, top-p and min-p.
        tokens_T: tokens.
        sampling: all of `settings.SAMPLING`.
    """
    mine_T1 = bare_TV.gather(1, tokens_T[:, None])
    fits = torch.isfinite(mine_T1[:, 0])
    chance_TV = bare_TV.double().exp()
    if sampling["top_k"]:
        last_T1 = bare_TV.topk(min(int(sampling["top_k"]), bare_TV.shape[1])).values[:, -1:]
        fits &= (mine_T1 > last_T1 - _EDGE)[:, 0]
        chance_TV = chance_TV.masked_fill(bare_TV < last_T1, 0.0)
    if sampling["top_p"] < 1.0:
        # A token stays as long as those above it hold less than top_p.
        above_T = (chance_TV * (bare_TV > mine_T1 + _EDGE)).sum(-1) / chance_TV.sum(-1)
        fits &= above_T < sampling["top_p"] + _EDGE_MASS
    if sampling["min_p"]:
        share_T = (mine_T1[:, 0] - bare_TV.amax(-1)).double().exp()
        fits &= share_T >= sampling["min_p"] * (1 - _EDGE_SHARE)
    cuts = sampling["top_k"] or sampling["top_p"] < 1.0 or sampling["min_p"]
    return fits if cuts else torch.zeros_like(fits)


def witness(
    target_TV: Tensor,
    bare_TV: Tensor,
    draft_TV: Tensor | None,
    tokens: Sequence[int],
    seed: int,
    sampling: Mapping[str, float],
) -> dict[str, Any]:
    """What a text says against the hypothesis that it was drawn from the target.

    Under the hypothesis every number of `place_*` is uniform on [0, 1] and independent of all others, and every
    `score_*` is the end of a martingale (value, variance).

    Args:
        target_TV: log probabilities of the target.
        bare_TV: of the target before top-k, top-p and min-p.
        draft_TV: of the draft; tokens are ordered by q / p too. None leaves that out.
        tokens: T tokens.
        seed: of the randomisation.
        sampling: all of `settings.SAMPLING`; what cuts says where its edge is.

    Returns:
        JSON-ready; `impossible` counts tokens that the target never says, rounding at an edge apart.
    """
    tokens_T = torch.tensor(tokens, device=target_TV.device)
    chance = target_TV.gather(1, tokens_T[:, None])[:, 0]
    possible = chance > -math.inf
    edge = ~possible
    if bool(edge.any()):
        edge[~possible] = _at_an_edge(bare_TV[~possible], tokens_T[~possible], sampling)
    out: dict[str, Any] = {"n": len(tokens), "impossible": int((~possible & ~edge).sum()), "edge": int(edge.sum())}
    if not bool(possible.any()):
        return {**out, "used": 0}
    target_TV, tokens_T = target_TV[possible], tokens_T[possible]
    generator = torch.Generator().manual_seed(seed)
    dice = torch.rand(2, len(tokens), generator=generator, dtype=torch.float64).to(target_TV.device)[:, possible]
    law = target_TV.exp()
    out["used"] = int(possible.sum())
    out["place_p"] = [round(u, 9) for u in _place(law, target_TV, tokens_T, dice[0]).tolist()]
    out["score_p"] = _score(law, target_TV.clamp(*_BOUNDS["p"]), tokens_T)
    out["score_recent"] = _score_recent(law, tokens, possible.nonzero()[:, 0].tolist())
    if draft_TV is not None:
        ratio = draft_TV[possible, : target_TV.shape[1]].clamp(min=_FLOOR)
        if ratio.shape[1] < target_TV.shape[1]:
            ratio = torch.nn.functional.pad(ratio, (0, target_TV.shape[1] - ratio.shape[1]), value=_FLOOR)
        ratio = ratio - target_TV
        out["place_ratio"] = [round(u, 9) for u in _place(law, ratio, tokens_T, dice[1]).tolist()]
        out["score_ratio"] = _score(law, ratio.clamp(*_BOUNDS["ratio"]), tokens_T)
    return out


def together(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """What two texts say: counts and scores add up, places follow one another."""
    out = {**one, **{key: value for key, value in other.items() if key not in one}}
    for key in one.keys() & other.keys():
        scores = key.startswith("score_")
        out[key] = [a + b for a, b in zip(one[key], other[key], strict=True)] if scores else one[key] + other[key]
    return out


OTHER = "*"


@torch.no_grad()
def cells(
    model: Any, prompt: Sequence[int], tokens: int, branches: int, sampling: Mapping[str, float], ends: set[int]
) -> dict[str, float]:
    """The exact law of the first tokens, in cells: paths of the most likely tokens, and what leaves them.

    Args:
        model: the target.
        prompt: ids.
        tokens: length of a path.
        branches: most likely tokens that are told apart behind each prefix.
        sampling: all of `settings.SAMPLING`.
        ends: ids behind which nothing follows.

    Returns:
        Cell name -> probability; they add up to 1. "5,7,*" is the prefix 5, 7 and then none of its best tokens.
    """
    law: dict[str, float] = {}
    open_paths: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        batch = torch.tensor([[*prompt, *path] for path in open_paths], device=model.device)
        logits = torch.cat([model(part).logits[:, -1].cpu() for part in batch.split(16)])
        deeper: dict[tuple[int, ...], float] = {}
        for (path, chance), row in zip(open_paths.items(), logits, strict=True):
            chances = _shaped(row[None], [*prompt, *path], len(prompt) + len(path), sampling)[0].double().exp()
            best = chances.topk(min(branches, chances.shape[0]))
            for token, share in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                if share <= 0:
                    continue
                longer = (*path, token)
                if token in ends or len(longer) == tokens:
                    law[",".join(map(str, longer))] = chance * share
                else:
                    deeper[longer] = chance * share
            law[",".join(map(str, (*path, OTHER)))] = chance * max(0.0, 1.0 - float(best.values.sum()))
        open_paths = deeper
        if not open_paths:
            break
    return law


def cell_of(text: Sequence[int], law: Mapping[str, float]) -> str:
    """The cell of a text.

    Raises:
        ValueError: if it is too short for any.
    """
    for length in range(len(text)):
        name = ",".join(map(str, text[: length + 1]))
        if name in law:
            return name
        prefix = ",".join(map(str, text[: length + 1])) + ","
        if not any(cell.startswith(prefix) for cell in law):
            return ",".join(map(str, itertools.chain(text[:length], [OTHER])))
    raise ValueError(f"text {list(text)} is too short for the cells of its law")
