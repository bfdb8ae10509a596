"""The target forward of a round as a path batch, for models that take no tree mask, behind an encoder or not.

Siblings of a tree have equal positions. A model that counts positions by its cache, or has a bias by distance in the
cache, cannot be told so; but it reads each root-to-leaf path as a batch row of its own just as plain decoding would.
Shorter paths are padded at the right: attention is causal, so that nothing before the padding can tell. The root,
which all paths share, may be read before them, where that is sooner (`engine.stem`).

Shapes: B rows, N nodes with the root, P paths of all rows, T tokens of the longest path, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_treespec import _compat, clock
from hf_treespec.attention import learned_position_limit
from hf_treespec.cache import PathCache
from hf_treespec.engine.features import Places
from hf_treespec.engine.forward import all_logits, continued_kinds
from hf_treespec.engine.kwargs import passed_on
from hf_treespec.engine.prompt import Prompt
from hf_treespec.engine.stem import StemChoice
from hf_treespec.tree import PATHS, TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["PathForward", "PathPlan", "path_length_limit", "plan_paths", "take_rows"]


@dataclass(frozen=True, slots=True)
class PathPlan:
    """The paths of a batch of trees.

    Args:
        tokens_PT: int64, tokens of each path from the root on; padding repeats the root's.
        sources: per path its batch row, ascending.
        home: per row and node the index of the first path through the node.
        depths: per row and node its depth.
    """

    tokens_PT: Tensor
    sources: list[int]
    home: list[list[int]]
    depths: list[list[int]]

    def places(self, paths: Sequence[Sequence[int]], *, skipped: int = 0, stem: bool = False) -> Places:
        """Where a forward of the paths has the nodes of some.

        Args:
            paths: per row the nodes.
            skipped: columns of the forward after which the paths begin.
            stem: whether their roots were read in the forward before.
        """
        return Places(
            [
                ([home[node] for node in path], [skipped + depths[node] - stem for node in path])
                for path, home, depths in zip(paths, self.home, self.depths, strict=True)
            ],
            stem,
        )

    def logits_of_nodes(self, logits_PTV: Tensor, roots_BV: Tensor | None = None) -> Tensor:
        """`[B, N, V]` of the nodes; rows with fewer nodes repeat their root's.

        Args:
            logits_PTV: of the paths; without their roots where those are given.
            roots_BV: of the roots, if they were read before.
        """
        nodes = max(len(row) for row in self.home)
        tables = (self.home, self.depths)
        homes, depths = ([[*row, *[row[0]] * (nodes - len(row))] for row in table] for table in tables)
        below = int(roots_BV is not None)
        paths = torch.tensor(homes, device=logits_PTV.device)
        places = torch.tensor([[max(depth - below, 0) for depth in row] for row in depths], device=logits_PTV.device)
        logits_BNV = logits_PTV[paths, places]
        if roots_BV is not None:
            at_root = [[row, node] for row, line in enumerate(depths) for node, depth in enumerate(line) if not depth]
            rows, at = torch.tensor(at_root, device=logits_BNV.device).unbind(1)
            logits_BNV[rows, at] = roots_BV[rows]
        return logits_BNV


def plan_paths(trees: Sequence[TokenTree]) -> PathPlan:
    """Lay out every root-to-leaf path of every tree as a row.

    Args:
        trees: one per batch row.
    """
    rows: list[list[int]] = []
    sources: list[int] = []
    home: list[list[int]] = []
    for row, tree in enumerate(trees):
        through = [-1] * len(tree)
        for leaf in (node for node in range(len(tree)) if not tree.children(node)):
            node = leaf
            while node >= 0 and through[node] < 0:
                through[node] = len(rows)
                node = tree.parents[node]
            rows.append(tree.path_tokens(leaf))
            sources.append(row)
        home.append(through)
    width = max(len(path) for path in rows)
    tokens = torch.tensor([path + [path[0]] * (width - len(path)) for path in rows])
    return PathPlan(tokens, sources, home, [list(tree.depths) for tree in trees])


def path_length_limit(model: PreTrainedModel) -> int | None:
    """First cache slot that the model cannot read, because a table of positions or of biases ends; or None."""
    limits = (
        learned_position_limit(_compat.decoder_of(model), _compat.max_positions(model)),
        _compat.max_sequence(model),
    )
    return min((limit for limit in limits if limit is not None), default=None)


class PathForward:
    """Scores every node of one tree per row, path by path.

    Args:
        model: the target.
        cache: its cache; each forward is made in an open transaction of it.
        prompt: padding and positions of the prompt; of the decoder's, for an encoder-decoder.
        model_kwargs: the keyword arguments of the call, passed on as plain decoding passes them.

    Attributes:
        stems: chooses whether roots are read in a forward of their own.
    """

    measure = PATHS

    def __init__(
        self, model: PreTrainedModel, cache: PathCache, prompt: Prompt, model_kwargs: Mapping[str, Any]
    ) -> None:
        self._model = model
        self._cache = cache
        self._prompt = prompt
        self._prefix = "decoder_" if _compat.is_encoder_decoder(model) else ""
        self._kwargs = passed_on(model_kwargs, prefix=self._prefix)
        # As in plain decoding: positions are told to models that take them, or if the caller has told some.
        self._tells_positions = model_kwargs.get(f"{self._prefix}position_ids") is not None or (
            not self._prefix and _compat.accepts_position_ids(model)
        )
        self._cache_kwarg = _compat.cache_kwarg(model)
        self._plan: PathPlan | None = None
        self._stem = False
        self.stems = StemChoice()

    def places(self, paths: Sequence[Sequence[int]]) -> Places:
        """Where the forward of the trees that were read last has the nodes of the paths."""
        assert self._plan is not None
        return self._plan.places(paths, stem=self._stem)

    def slots(self, paths: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """What the cache commits for nodes of the trees that were read last: its transaction knows them by node."""
        return paths

    def __call__(self, trees: Sequence[TokenTree], ahead: Sequence[int]) -> Tensor:
        """Logits `[B, N, V]` of all nodes.

        Args:
            trees: one per row.
            ahead: per row, how many positions its root lies behind the last prompt token.
        """
        plan, batch = plan_paths(trees), len(trees)
        paths, width = plan.tokens_PT.shape
        roots_BV = None
        if width > 1 and self.stems.pays(paths=paths, rows=batch):
            roots = torch.tensor([[tree.tokens[0]] for tree in trees])
            roots_BV = self._read(roots, range(batch), ahead, read=0)[:, -1]
        read = int(roots_BV is not None)
        self._plan, self._stem = plan, bool(read)
        self._cache.spread(plan.sources, plan.home)
        logits_PTV = self._read(plan.tokens_PT[:, read:], plan.sources, ahead, read=read)
        return plan.logits_of_nodes(logits_PTV, roots_BV)

    def _read(self, tokens_PQ: Tensor, sources: Sequence[int], ahead: Sequence[int], *, read: int) -> Tensor:
        """Logits `[P, Q, V]` of one forward.

        Args:
            tokens_PQ: int64.
            sources: per row of the forward its batch row.
            ahead: per batch row, how many positions its root lies behind the last prompt token.
            read: tokens of each path that the cache holds by now, uncommitted.
        """
        start = clock.now()
        device = _compat.input_device(self._model, self._prompt.last_positions.device)
        width, batch = tokens_PQ.shape[1], len(ahead)
        own: dict[str, Any] = {"attention_mask": self._cache.mask(read + width, self._prompt.mask_BP, device)}
        if self._tells_positions:
            first = self._prompt.last_positions.to(device) + torch.tensor(ahead, device=device)[:, None] + read
            own["position_ids"] = first + torch.arange(width, device=device)
        inputs = {**continued_kinds(self._kwargs, width), **{self._prefix + name: own[name] for name in own}}
        if list(sources) != list(range(batch)):
            index = torch.tensor(list(sources))
            positions = inputs.pop(f"{self._prefix}position_ids", None)
            inputs = {name: take_rows(value, index, batch) for name, value in inputs.items()}
            if positions is not None:
                inputs[f"{self._prefix}position_ids"] = positions.index_select(-2, index.to(positions.device))
        if _compat.supports_logits_to_keep(self._model):
            inputs["logits_to_keep"] = 0
        inputs[self._cache_kwarg] = self._cache.cache
        prepared = _compat.prepare_inputs(self._model, tokens_PQ.to(device), **inputs)
        logits = all_logits(self._model(**prepared, return_dict=True), width)
        self.stems.add(tokens_PQ.numel(), clock.now() - start)
        return logits


def take_rows(value: Any, index: Tensor, batch: int) -> Any:
    """Rows `index` of every tensor in an argument that has one row per batch row."""
    if isinstance(value, Tensor):
        whole = value.dim() == 0 or value.shape[0] != batch
        return value if whole else value.index_select(0, index.to(value.device))
    if isinstance(value, dict):
        # The output of an encoder is one.
        return type(value)(**{name: take_rows(part, index, batch) for name, part in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(take_rows(part, index, batch) for part in value)
    return value
