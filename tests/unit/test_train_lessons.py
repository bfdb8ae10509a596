"""Lessons: what a draft should have said, at the right place, and what a greedy chain would have brought."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heads import CYCLE, FOLLOWS, SIZE, VOCAB, perfect_head, periodic, walk
from hf_treespec import TreeConfig, _compat, enable
from hf_treespec.draft import Borrowed, DraftHead
from hf_treespec.train.batches import Batch, stacked
from hf_treespec.train.features import Example
from hf_treespec.train.lessons import Lesson, ModelLesson, head_lesson

KINDS = ("medusa", "mlp", "eagle", "eagle3", "model")
# Of the kinds that need a target trained for nothing else; EAGLE-1 says what the target's LM head says.
OWN_LAWS = ("medusa", "mlp", "eagle3", "model")
DEPTHS = 6


def oracle(kind: str, target: PreTrainedModel) -> nn.Module:
    return copy.deepcopy(target) if kind == "model" else perfect_head(kind, target)


def maps(draft: nn.Module) -> list[Tensor]:
    """The rows of its ids, for each depth that has its own."""
    if not isinstance(draft, DraftHead):
        return [draft.lm_head.weight]
    return {"medusa": lambda: [one.weight for one in draft.heads], "mlp": lambda: [one.weight for one in draft.head],
            "eagle3": lambda: [draft.lm_head.weight]}[draft.kind]()  # fmt: skip


def lesson(draft: nn.Module, target: PreTrainedModel) -> Lesson:
    if not isinstance(draft, DraftHead):
        return ModelLesson(draft, depths=DEPTHS, vocab_size=VOCAB)
    return head_lesson(draft, Borrowed.of(target), len(_compat.decoder_layers(target)), depths=DEPTHS)


def example(made: Lesson, target: PreTrainedModel, start: int, prompt: int, new: int) -> Example:
    """A text of the target, and what it makes of it, exactly."""
    tokens = [CYCLE[start]]
    while len(tokens) < prompt + new:
        tokens.append(FOLLOWS[tokens[-1]])
    with torch.no_grad():
        out = target(torch.tensor([tokens]), output_hidden_states=True)
    states = [out.hidden_states[layer][0] for layer in made.features.layers]
    states += [out.hidden_states[-1][0]] * made.features.last
    features = torch.cat(states, dim=-1) if states else torch.zeros((len(tokens), 0))
    logp, likely = out.logits[0].log_softmax(-1).topk(8)
    return Example(torch.tensor(tokens), prompt, features, likely, logp.float())


def batch(made: Lesson, target: PreTrainedModel) -> Batch:
    """Texts of several lengths; the last one is too short for a whole chain."""
    return stacked([example(made, target, *text) for text in ((0, 3, 20), (2, 1, 13), (4, 5, DEPTHS), (1, 4, 1))])


# Roots of the texts of `batch`: tokens of the target's own with so many behind them.
ROOTS = (20 - DEPTHS) + (13 - DEPTHS)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return periodic()


@pytest.mark.parametrize("kind", KINDS)
def test_an_oracle_is_right_everywhere(kind: str, target: PreTrainedModel) -> None:
    made = lesson(oracle(kind, target), target)
    assert made.accepted(batch(made, target)) == (DEPTHS * ROOTS, ROOTS)


@pytest.mark.parametrize("kind", OWN_LAWS)
def test_one_that_is_off_by_one_place_is_wrong_everywhere(kind: str, target: PreTrainedModel) -> None:
    draft = oracle(kind, target)
    right = lesson(draft, target)
    texts = batch(right, target)
    total, count = right(texts)
    with torch.no_grad():
        for rows in maps(draft):
            # What was said of one token is said of the one before it: of what comes one step later.
            whole = torch.zeros((VOCAB, rows.shape[1]), dtype=rows.dtype)
            ids = draft.ids if isinstance(draft, DraftHead) and draft.ids is not None else torch.arange(VOCAB)
            moved = whole.clone()
            whole[ids] = rows
            for token in CYCLE:
                moved[FOLLOWS[token]] = whole[token]
            rows.copy_(moved[ids])
    assert right.accepted(texts) == (0, ROOTS)
    worse, same = right(texts)
    assert same == count and worse > total


@pytest.mark.parametrize("kind", OWN_LAWS)
@pytest.mark.parametrize("swapped", [(3, 9), (17, 8)])
def test_it_counts_what_calls_of_generate_accept(kind: str, swapped: tuple[int, int], target: PreTrainedModel) -> None:
    """A draft that takes two tokens for one another is accepted at some places, and not at others."""
    draft = oracle(kind, target)
    with torch.no_grad():
        for rows in maps(draft):
            ids = draft.ids.tolist() if isinstance(draft, DraftHead) and draft.ids is not None else list(range(VOCAB))
            one, other = (ids.index(token) for token in swapped)
            rows[[one, other]] = rows[[other, one]].clone()
    made = lesson(draft, target)
    text = example(made, target, 0, 4, 60)
    (runs,) = made.runs(stacked([text])).tolist()
    assert set(runs[:4]) == {-1} and set(runs[-DEPTHS:]) == {-1} and len(set(runs[4:-DEPTHS])) > 2
    # The rounds that a call makes, as far as it has whole chains.
    place, rounds, accepted = 4, 0, 0
    while runs[place] >= 0:
        rounds, accepted, place = rounds + 1, accepted + runs[place], place + runs[place] + 1
    config = TreeConfig(max_nodes=DEPTHS, max_depth=DEPTHS, max_children=1, growth="static", fallback="off")
    treed = enable(copy.deepcopy(target))
    ids = text.tokens_T[None, :4]
    # The first new token is of the prefill.
    new = place + 1 - 4
    out = treed.generate(
        ids, attention_mask=torch.ones_like(ids), assistant_model=draft, tree_config=config, max_new_tokens=new,
        do_sample=False,
    )  # fmt: skip
    assert out[0].tolist() == text.tokens_T[: place + 1].tolist()
    stats = treed.treespec_stats
    assert (stats.rounds, stats.accepted_tokens) == (rounds, accepted)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_learnt_of_a_prompt(kind: str, target: PreTrainedModel) -> None:
    made = lesson(oracle(kind, target), target)
    text = example(made, target, 0, 12, 0)
    total, count = made(stacked([text]))
    assert total == 0 and count == 0
    total.backward()
    assert all(weight.grad is None or not weight.grad.any() for weight in made.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("prompt", "new"), [(1, 1), (2, 1), (1, 2), (1, 4)])
def test_texts_shorter_than_a_chain(kind: str, prompt: int, new: int, target: PreTrainedModel) -> None:
    made = lesson(oracle(kind, target), target)
    texts = stacked([example(made, target, 0, prompt, new)])
    total, count = made(texts)
    total.backward()
    assert bool(torch.isfinite(total)) and made.accepted(texts) == (0, 0)
    # A model reads the first new token behind its prompt; a head needs a state before the root.
    assert bool(count > 0) == (prompt + new > (1 if kind == "model" else 2))


def test_the_loss_is_the_cross_entropy_of_both_laws(target: PreTrainedModel) -> None:
    """Against a sum token by token, with a draft that knows some ids only."""
    draft = perfect_head("eagle3", target)
    made = lesson(draft, target)
    text = example(made, target, 1, 2, 9)
    total, count = made(stacked([text]))
    ids = draft.ids.tolist()
    expected, weights = 0.0, 0.0
    with torch.no_grad():
        laws = draft(text.features_TF[None, :-1], text.tokens_T[None, 1:], Borrowed.of(target), steps=DEPTHS)
    for depth, logits in enumerate(laws):
        for place in range(max(2, depth + 2), 11):
            known = {
                ids.index(token): chance
                for token, chance in zip(
                    text.likely_TK[place - 1].tolist(), text.logp_TK[place - 1].exp(), strict=True
                )
                if token in ids
            }
            mass = float(sum(known.values()))
            said = logits[0, place - depth - 2].log_softmax(-1)
            expected -= made.decay**depth * sum(float(p) * float(said[row]) for row, p in known.items())
            weights += made.decay**depth * mass
    assert float(count) == pytest.approx(weights, rel=1e-5)
    assert float(total.detach()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_beside_one_another_are_learnt_as_alone(kind: str, target: PreTrainedModel) -> None:
    """Prompts of all lengths, so that each text needs other places of the steps."""
    made = lesson(oracle(kind, target), target)
    shapes = [(1, 9), (7, 4), (3, 1), (2, 12), (9, 0)]
    texts = [example(made, target, seed, *shape) for seed, shape in enumerate(shapes)]
    with torch.no_grad():
        together = made(stacked(texts))
        alone = [made(stacked([text])) for text in texts]
    for place in range(2):
        assert float(together[place]) == pytest.approx(sum(float(one[place]) for one in alone), rel=1e-5)
    runs, single = made.runs(stacked(texts)), [made.runs(stacked([text]))[0] for text in texts]
    for row, one in zip(runs, single, strict=True):
        assert row[: len(one)].tolist() == one.tolist() and (row[len(one) :] == -1).all()


def test_steps_at_some_pairs_are_those_at_all(target: PreTrainedModel) -> None:
    head = perfect_head("eagle3", target)
    # One that looks at what went before.
    for seed, weight in enumerate(head.decoder.parameters()):
        nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(seed))
    made = lesson(head, target)
    batch = stacked([example(made, target, seed, 4, 8) for seed in range(3)])
    given = (batch.features_BTF[:, :-1], batch.tokens_BT[:, 1:], Borrowed.of(target))
    pairs = torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8], [9, 10, 11, 12]])
    whole, some = head.unroll(*given, steps=DEPTHS), head.unroll(*given, steps=DEPTHS, pairs_BM=pairs)
    torch.testing.assert_close(some[0], whole[0])
    for every, few in zip(whole[1:], some[1:], strict=True):
        for row in range(3):
            kept = pairs[row][pairs[row] < every.shape[1]]
            torch.testing.assert_close(few[row, : len(kept)], every[row, kept])


def test_walk_is_what_the_oracles_say() -> None:
    table = torch.randn(VOCAB, SIZE)
    assert torch.equal(walk(table)[FOLLOWS[CYCLE[0]]], table[CYCLE[0]])
