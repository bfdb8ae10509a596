"""What a text says about its law: uniform under the null, and not otherwise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from measures import kolmogorov_smirnov, martingale_tail, normal_tail
from settings import SAMPLING
from textlaws import STEPS, cell_of, cells, laws_of_text, processors, together, witness
from tiny import perturbed, stock

TEXT = 4000
VOCAB = 12


def laws(seed: int) -> tuple[Tensor, Tensor]:
    """Log probabilities of target and draft, every position another one; some tokens tie, some are impossible."""
    dice = torch.Generator().manual_seed(seed)
    logits = torch.randn(TEXT, VOCAB, generator=dice, dtype=torch.float64) * 1.5
    logits[:, 3] = logits[:, 4]
    logits[::3, 7] = -math.inf
    return logits.log_softmax(-1), (logits + torch.randn(TEXT, VOCAB, generator=dice)).log_softmax(-1)


def say(law: Tensor, seed: int) -> list[int]:
    return torch.multinomial(law, 1, generator=torch.Generator().manual_seed(seed))[:, 0].tolist()


def p_values(found: dict) -> dict[str, float]:
    out = {name: kolmogorov_smirnov(torch.tensor(found[name])) for name in found if name.startswith("place_")}
    for name in ("score_p", "score_ratio", "score_recent"):
        if name in found:
            out[name] = normal_tail(found[name][0] / math.sqrt(found[name][1]))
    return out


@pytest.mark.parametrize("seed", range(5))
def test_texts_of_the_target_pass(seed: int) -> None:
    target, draft = laws(seed)
    found = witness(target, target, draft, say(target.exp(), seed + 90), seed, SAMPLING)
    assert (found["n"], found["used"], found["impossible"], found["edge"]) == (TEXT, TEXT, 0, 0)
    assert len(found["place_p"]) == len(found["place_ratio"]) == TEXT
    assert min(p_values(found).values()) > 1e-3
    # Independent of one another: neighbours are not correlated.
    places = torch.tensor(found["place_p"])
    assert abs(float(torch.corrcoef(torch.stack([places[1:], places[:-1]]))[0, 1])) < 4 / math.sqrt(TEXT)


def test_texts_of_another_law_do_not() -> None:
    target, draft = laws(3)
    colder = (target * 1.2).softmax(-1)
    towards = 0.85 * target.exp() + 0.15 * draft.exp()
    assert p_values(witness(target, target, None, say(colder, 5), 1, SAMPLING))["score_p"] < 1e-8
    # Whoever says what was just said more often than the law has it.
    said = say(target.exp(), 6)
    for place in range(3, TEXT, 10):
        if target[place, said[place - 2]] > -math.inf:
            said[place] = said[place - 2]
    assert p_values(witness(target, target, None, said, 1, SAMPLING))["score_recent"] < 1e-3
    found = p_values(witness(target, target, draft, say(towards, 5), 1, SAMPLING))
    assert found["score_ratio"] < 1e-6 and found["place_ratio"] < 1e-2


@pytest.mark.parametrize("temperature", [0.05, 0.2])
def test_texts_of_peaked_laws_pass(temperature: float) -> None:
    """The draft says next to nothing of what the target sometimes says, and the target is nearly certain."""
    dice = torch.Generator().manual_seed(11)
    logits = torch.randn(TEXT, VOCAB, generator=dice, dtype=torch.float64)
    target = (logits / temperature).log_softmax(-1)
    best = target.topk(2, -1).indices
    draft = torch.full_like(target, -math.inf).scatter(1, best[:, :1], 0.0)
    least = 1.0
    for seed in range(12):
        found = witness(target, target, draft, say(target.exp(), seed + 90), seed, SAMPLING)
        for what in ("p", "ratio"):
            value, variance = found[f"score_{what}"]
            least = min(least, martingale_tail(value, variance, STEPS[what], variance))
    assert least > 1e-3
    # No step is larger than it says.
    one = witness(target[:1], target[:1], draft[:1], [int(best[0, 1])], 1, SAMPLING)
    assert abs(one["score_ratio"][0]) <= STEPS["ratio"] and abs(one["score_p"][0]) <= STEPS["p"]


def test_places_by_hand() -> None:
    target = torch.tensor([[0.5, 0.2, 0.2, 0.1]], dtype=torch.float64).log()
    draft = torch.tensor([[0.3, 0.16, 0.16, 0.38]], dtype=torch.float64).log()
    dice = torch.rand(2, 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    spots = {0: (0.0, 0.5), 1: (0.5, 0.4), 2: (0.5, 0.4), 3: (0.9, 0.1)}
    # By q / p: 0.6, 0.8, 0.8, 3.8. Tokens of one rank share their mass.
    ratio_spots = {3: (0.0, 0.1), 1: (0.1, 0.4), 2: (0.1, 0.4), 0: (0.5, 0.5)}
    for token in range(4):
        found = witness(target, target, draft, [token], 4, SAMPLING)
        low, width = spots[token]
        assert found["place_p"][0] == pytest.approx(low + width * float(dice[0]), abs=1e-8)
        low, width = ratio_spots[token]
        assert found["place_ratio"][0] == pytest.approx(low + width * float(dice[1]), abs=1e-8)
        mean = float((target.exp() * target).sum())
        assert found["score_p"][0] == pytest.approx(float(target[0, token]) - mean)
        assert found["score_p"][1] == pytest.approx(float((target.exp() * target**2).sum()) - mean**2)


def test_impossible_tokens_are_told_from_those_at_an_edge() -> None:
    bare = torch.tensor([[0.4, 0.3, 0.3 - 1e-6, 1e-6]] * 3, dtype=torch.float64).log()
    kept = bare.clone()
    kept[:, 2:] = -math.inf
    kept = kept.log_softmax(-1)
    two = {**SAMPLING, "top_k": 2}
    found = witness(kept, bare, None, [0, 2, 3], 1, two)
    assert (found["n"], found["used"], found["impossible"], found["edge"]) == (3, 1, 1, 1)
    assert "place_ratio" not in found and len(found["place_p"]) == 1
    assert witness(kept[:1], bare[:1], None, [3], 1, two) == {"n": 1, "impossible": 1, "edge": 0, "used": 0}
    # Where nothing is cut there is no edge.
    assert witness(kept, bare, None, [0, 2, 3], 1, SAMPLING)["impossible"] == 2


STEEP = [0.5, 0.3, 0.1, 0.06, 0.04]


@pytest.mark.parametrize(
    ("changed", "edge"),
    [
        # Tokens 0 to 2 hold 0.9: a hair more, and token 3 stays.
        ({"top_p": 0.9 - 1e-7}, 3),
        ({"top_p": 0.9 - 1e-3}, None),
        ({"min_p": 0.12 * (1 + 1e-6)}, 3),
        ({"min_p": 0.12 * (1 + 1e-2)}, None),
        # Of the 0.9 that top-k leaves, tokens 0 and 1 hold 0.8.
        ({"top_k": 3, "top_p": 0.8 / 0.9 - 1e-7}, 2),
        ({"top_k": 3, "top_p": 0.8 / 0.9 - 1e-3}, None),
        # At the edge of one cut, far behind that of the other.
        ({"top_p": 0.9 - 1e-7, "min_p": 0.15}, None),
        ({"top_k": 3, "top_p": 0.9 - 1e-7}, None),
    ],
)
def test_each_cut_has_an_edge_of_its_own(changed: dict[str, float], edge: int | None) -> None:
    """The next token is far below the last one that stays, and yet it is rounding that leaves it out."""
    sampling = {**SAMPLING, **changed}
    bare = torch.tensor([STEEP], dtype=torch.float64).log()
    kept = processors(sampling)(torch.zeros(1, 1, dtype=torch.long), bare.clone()).log_softmax(-1)
    said = int((kept > -math.inf).sum())
    for token in range(said, len(STEEP)):
        found = witness(kept, bare, None, [token], 1, sampling)
        assert (found["edge"], found["impossible"]) == ((1, 0) if token == edge else (0, 1)), token
    assert edge in (None, said)


class WithoutDoubles(Tensor):
    """As of a device that has no float64."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(function, types, args, kwargs or {})
        if function is Tensor.cpu:
            return out.as_subclass(Tensor)
        if isinstance(out, Tensor) and out.dtype is torch.float64:
            raise TypeError("this device has no float64")
        return out


def test_laws_are_taken_to_the_cpu_before_sums_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stock("llama")
    ids, usual = [3, 9, 4, 7, 2], model.forward

    def forward(*told: Any, **options: Any) -> Any:
        out = usual(*told, **options)
        out.logits = out.logits.as_subclass(WithoutDoubles)
        return out

    monkeypatch.setattr(model, "forward", forward)
    law, bare = laws_of_text(model, ids, 2, SAMPLING)
    assert witness(law, bare, law, ids[2:], 1, SAMPLING)["used"] == 3
    assert math.fsum(cells(model, ids, 2, 3, SAMPLING, set()).values()) == pytest.approx(1.0)


def test_texts_add_up() -> None:
    target, draft = (law[:6] for law in laws(1))
    said = say(target.exp(), 2)
    one, other = (
        witness(target[:4], target[:4], draft[:4], said[:4], 1, SAMPLING),
        witness(target[4:], target[4:], None, said[4:], 2, SAMPLING),
    )
    both = together(one, other)
    assert (both["n"], both["used"], both["impossible"]) == (6, 6, 0)
    assert both["place_p"] == one["place_p"] + other["place_p"] and both["place_ratio"] == one["place_ratio"]
    assert both["score_p"] == [a + b for a, b in zip(one["score_p"], other["score_p"], strict=True)]
    whole = witness(target, target, None, said, 1, SAMPLING)
    assert both["score_p"] == pytest.approx(whole["score_p"])


SHAPED = {**SAMPLING, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.5}


@pytest.mark.parametrize("sampling", [SAMPLING, SHAPED, {**SAMPLING, "top_k": 4, "min_p": 0.1}])
def test_the_null_law_is_that_of_plain_decoding(sampling: dict[str, float]) -> None:
    model = stock("llama")
    ids = torch.tensor([[3, 9, 4, 7]])
    out = model.generate(
        ids, do_sample=True, max_new_tokens=8, output_scores=True, return_dict_in_generate=True, eos_token_id=None,
        **sampling,
    )  # fmt: skip
    law, bare = laws_of_text(model, out.sequences[0].tolist(), 4, sampling)
    assert law.shape == bare.shape == (8, model.config.vocab_size)
    for step, scores in enumerate(out.scores):
        assert torch.allclose(scores[0].float().softmax(-1), law[step].exp(), atol=1e-5)
    assert torch.isfinite(bare).all()
    assert len(processors(sampling)) == sum(sampling[key] != usual for key, usual in SAMPLING.items())


@pytest.mark.parametrize("sampling", [SAMPLING, SHAPED])
def test_cells_are_the_law_of_the_first_tokens(sampling: dict[str, float]) -> None:
    model, prompt, ends = perturbed(stock("llama"), 0.0), [3, 9, 4, 7], {5}
    law = cells(model, prompt, 2, 3, sampling, ends)
    assert math.fsum(law.values()) == pytest.approx(1.0, abs=1e-6)
    vocab = model.config.vocab_size
    total: dict[str, float] = {}
    for a in range(vocab):
        both, _ = laws_of_text(model, [*prompt, a, 0], 4, sampling)
        for b, chance in enumerate((both[0, a] + both[1]).exp().tolist()):
            if chance:
                cell = cell_of([a, b], law)
                total[cell] = total.get(cell, 0.0) + chance
    for cell, chance in law.items():
        assert total.get(cell, 0.0) == pytest.approx(chance, abs=2e-6), cell


def test_cells_of_texts() -> None:
    law = {"1,2": 0.2, "1,*": 0.2, "7": 0.1, "*": 0.5}
    assert cell_of([1, 2, 9], law) == "1,2"
    assert cell_of([1, 3], law) == "1,*"
    assert cell_of([7, 0], law) == "7"
    assert cell_of([4, 2], law) == "*"
    assert cell_of([12, 2], {**law, "12,2": 0.0, "12,*": 0.0}) == "12,2"
    # The cells behind 42 are none behind 4.
    assert cell_of([4, 2], {**law, "42,*": 0.0}) == "*"
    with pytest.raises(ValueError, match="too short"):
        cell_of([1], law)
