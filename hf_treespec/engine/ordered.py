"""The target forward of a round for models whose state depends on the order of the tokens.

Such a state is recurrent, convolutional, compressed, or of a kind that nobody named. Every root-to-leaf path is a
batch row, as in `engine.paths`, but what a rejected node did to the state cannot be taken back. So the state itself is
kept, repeated and given back, and accepted tokens that it lost are read again in front of the next root
(`cache.order_bound`): by every path, or with the root once for all paths in a forward before, where that is sooner
(`engine.stem`).

Shapes: B rows, N nodes with the root, P paths of all rows, T tokens of the longest path, Q tokens of a forward, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_treespec import _compat, clock
from hf_treespec.cache import OrderBoundRows, Read
from hf_treespec.engine.features import Places
from hf_treespec.engine.forward import all_logits, continued_kinds
from hf_treespec.engine.kwargs import passed_on
from hf_treespec.engine.paths import PathPlan, plan_paths, take_rows
from hf_treespec.engine.prompt import Prompt
from hf_treespec.engine.stem import StemChoice
from hf_treespec.routes import PathTraits, Route
from hf_treespec.tree import PATHS, TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["OrderedForward", "only_plain", "settled"]


class OrderedForward:
    """Scores every node of one tree per row.

    Args:
        model: the target.
        rows: its state; each forward is made in an open transaction of it.
        prompt: padding and positions of the prompt.
        model_kwargs: the keyword arguments of the call, passed on as plain decoding passes them.
        alone: see `PathTraits`.

    Attributes:
        stems: chooses whether pending tokens and roots are read in a forward of their own.
    """

    measure = PATHS

    def __init__(
        self,
        model: PreTrainedModel,
        rows: OrderBoundRows,
        prompt: Prompt,
        model_kwargs: Mapping[str, Any],
        *,
        alone: bool = False,
    ) -> None:
        self._model = model
        self._rows = rows
        self._prompt = prompt
        self._kwargs = passed_on(model_kwargs, made=rows.carried)
        positions = model_kwargs.get("position_ids")
        self._tells_positions = positions is not None
        # As in plain decoding, which a state may hold them from.
        self._one_for_all = positions is not None and positions.shape[-2] == 1 < len(rows.lengths)
        self._plan: PathPlan | None = None
        self._skipped = 0
        self._stem = False
        self.stems = StemChoice()
        # Longest paths from which no root is taken: of RWKV several rows of one token each do not come out right.
        self._kept_whole = 2 if alone else 1

    def __call__(self, trees: Sequence[TokenTree], ahead: Sequence[int]) -> Tensor:
        """Logits `[B, N, V]` of all nodes.

        Args:
            trees: one per row.
            ahead: unused: rows are in step, and the state knows how far they are.
        """
        rows, plan = self._rows, plan_paths(trees)
        transaction, batch = rows.current, len(trees)
        paths, width = plan.tokens_PT.shape
        roots_BV = None
        if width > 1 and self.stems.pays(paths=paths, rows=batch, pending=rows.ahead):
            if width > self._kept_whole:
                with transaction.reading_stem():
                    stem = [[*pending, tree.tokens[0]] for pending, tree in zip(rows.pending, trees, strict=True)]
                    roots_BV = self._read(torch.tensor(stem), range(batch), last_only=True)[:, -1]
            else:
                self.settle()
        transaction.spread(Read([tree.tokens for tree in trees], plan.home, plan.sources, width))
        pending_BN = torch.tensor(rows.pending, dtype=torch.long).reshape(batch, rows.ahead)
        self._plan, self._skipped, self._stem = plan, rows.ahead, roots_BV is not None
        tokens_PT = plan.tokens_PT if roots_BV is None else plan.tokens_PT[:, 1:]
        logits_PQV = self._read(torch.cat([pending_BN[plan.sources], tokens_PT], dim=1), plan.sources)
        return plan.logits_of_nodes(logits_PQV[:, -tokens_PT.shape[1] :], roots_BV)

    def places(self, paths: Sequence[Sequence[int]]) -> Places:
        """Where the forward of the trees that were read last has the nodes of the paths."""
        assert self._plan is not None
        return self._plan.places(paths, skipped=self._skipped, stem=self._stem)

    def slots(self, paths: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """What the state commits for the nodes of the paths: themselves."""
        return paths

    def settle(self) -> None:
        """Read what is still pending, so that the state is that of plain decoding."""
        rows = self._rows
        if rows.ahead:
            with rows.reading_pending():
                self._read(torch.tensor(rows.pending), range(len(rows.pending)), last_only=True)

    def _read(self, tokens_PQ: Tensor, sources: Sequence[int], *, last_only: bool = False) -> Tensor:
        """Logits `[P, Q, V]` of one forward, or of its last tokens.

        Args:
            tokens_PQ: int64, the pending tokens first.
            sources: per row of the forward its batch row.
            last_only: whether the model may leave out the logits of all tokens but the last of each row.
        """
        start = clock.now()
        rows = self._rows
        device = _compat.input_device(self._model, self._prompt.last_positions.device)
        width, batch = tokens_PQ.shape[1], len(rows.lengths)
        inputs = continued_kinds(self._kwargs, width)
        inputs["attention_mask"] = rows.mask(width, self._prompt.mask_BP, device)
        positions = None
        if self._tells_positions:
            read = rows.lengths[0] - rows.ahead - self._prompt.physical
            first = self._prompt.last_positions.to(device) + read + 1
            positions = first + torch.arange(width, device=device)
        if list(sources) != list(range(batch)):
            index = torch.tensor(list(sources))
            inputs = {name: take_rows(value, index, batch) for name, value in inputs.items()}
            if positions is not None:
                positions = positions.index_select(-2, index.to(positions.device))
        if positions is not None:
            inputs["position_ids"] = positions[..., :1, :] if self._one_for_all else positions
        prepared = _compat.prepare_inputs(self._model, tokens_PQ.to(device), **inputs, **rows.carried)
        if _compat.supports_logits_to_keep(self._model):
            # Some models put a number of their own here while they prepare.
            prepared["logits_to_keep"] = int(last_only)
        outputs = self._model(**prepared, return_dict=True)
        rows.carried.update(_compat.carried_state(self._model, outputs))
        logits = all_logits(outputs, 1 if last_only else width)
        self.stems.add(tokens_PQ.numel(), clock.now() - start)
        return logits


@contextmanager
def settled(forward: Any, *, wanted: bool) -> Iterator[None]:
    """Rounds, after which the state is that of plain decoding, if anyone will see it.

    Args:
        forward: that of the rounds.
        wanted: whether the state outlives the call.
    """
    wanted = wanted and isinstance(forward, OrderedForward)
    try:
        yield
    except BaseException as error:
        if wanted:
            try:
                forward.settle()
            except Exception as again:
                error.add_note(f"the cache lacks tokens that had been accepted: reading them raised {again!r}")
        raise
    if wanted:
        forward.settle()


def only_plain(model: PreTrainedModel, route: Route, traits: PathTraits, prompt: Prompt) -> bool:
    """Whether no tree can serve a call, which is then decoded plainly; it is told once."""
    if route is Route.STEPS:
        _compat.warn_once(
            f"{type(model).__name__} reads one token a forward behind its cache: no tree could be sooner than plain "
            "decoding, which is what this call gets"
        )
        return True
    if traits.alone and (len(prompt.real_tokens) > 1 or prompt.mask_BP is not None):
        _compat.warn_once(
            f"{type(model).__name__} reads several tokens behind its cache otherwise than one by one where there are "
            "several rows, or padding: such calls are decoded plainly. Pass single prompts without padding for trees"
        )
        return True
    return False
