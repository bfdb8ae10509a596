"""The one target forward of a round, over the trees of all rows.

Shapes: B rows, N nodes with the root, L physical cache length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.attention import TreeContext, node_positions, tree_forward_context
from hf_treespec.cache import RowCache
from hf_treespec.engine.features import Places
from hf_treespec.engine.kwargs import passed_on
from hf_treespec.engine.outputs import KeptStates
from hf_treespec.errors import UnsupportedModelError
from hf_treespec.routes import Route
from hf_treespec.tree import NODES, TokenTree, align_trees, layout_trees

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["TargetForward", "all_logits", "continued_kinds"]


class TargetForward:
    """Scores every node of one tree per row.

    Args:
        model: the target.
        cache: its cache; each forward appends N tree slots.
        last_positions: `[..., B, 1]`, position id of the last prompt token of every row.
        prompt_mask_BP: int64 `[B, P]` with 0 at prompt padding, or None.
        model_kwargs: the other keyword arguments of the call, passed on as plain decoding passes them.
        states: gets the outputs of each forward, if the call asks for more than logits.
        route: one of the masked routes. A model that counts by slots counts the same in all rows, so that its trees
            are aligned by depth.
    """

    measure = NODES

    def __init__(
        self,
        model: PreTrainedModel,
        cache: RowCache,
        last_positions: Tensor,
        prompt_mask_BP: Tensor | None,
        model_kwargs: Mapping[str, Any],
        states: KeptStates | None = None,
        route: Route = Route.MASK,
    ) -> None:
        self._model = model
        self.rows = cache
        # Inputs may lie on the host while the model does not.
        self._last_positions = last_positions.to(_compat.input_device(model, last_positions.device))
        self._prompt_mask = prompt_mask_BP
        # Read once a call. Rows that fall behind get gaps before their text, so that nothing changes in it.
        self._padded_left = prompt_mask_BP is None or not bool((prompt_mask_BP.diff(dim=1) < 0).any())
        self._kwargs = passed_on(model_kwargs)
        self._cache_kwarg = _compat.cache_kwarg(model)
        self._states = states
        self._aligned = not route.told_positions
        # As in plain decoding: positions are told to models that take them.
        self._tells_positions = route.told_positions or _compat.accepts_position_ids(model)
        # What the model makes of positions is taken by depth afterwards.
        self._tells_slots = route is Route.POSITION_HOOK
        # As in plain decoding: such models may make a mask of their own where they are given none.
        self._wants_mask = self._aligned and model_kwargs.get("attention_mask") is not None
        # A bias is made from the mask, or by another function where there is none.
        self._trees_want_mask = route is Route.ALIBI
        self._slots: list[list[int]] | None = None

    def slots(self, paths: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Tree slots of nodes of the trees that were read last, per row."""
        if self._slots is None:
            return paths
        return [[slots[node] for node in path] for slots, path in zip(self._slots, paths, strict=True)]

    def places(self, paths: Sequence[Sequence[int]]) -> Places:
        """Where the forward of the trees that were read last has the nodes of the paths."""
        return Places([([row] * len(slots), slots) for row, slots in enumerate(self.slots(paths))])

    def positions(self, ahead: Sequence[int], depths_BQ: Tensor, first: int) -> Tensor:
        """Position ids `[..., B, Q]` of tokens behind the cache.

        Args:
            ahead: per row, how many positions its root lies behind the last prompt token.
            depths_BQ: how far each token lies behind the root.
            first: tree slot of the first of the Q tokens.
        """
        device = self._last_positions.device
        if self._tells_slots:
            depths_BQ = torch.arange(first, first + depths_BQ.shape[1])[None]
        return node_positions(self._last_positions, torch.tensor(ahead, device=device)[:, None], depths_BQ.to(device))

    def mask(self, slots: int, *, tree: bool = True) -> Tensor | None:
        """2D mask of the cache and so many slots behind it, or None where the model wants none.

        Args:
            slots: as they will be after the forward.
            tree: whether the forward reads a tree.
        """
        device = self._last_positions.device
        mask = self.rows.mask(slots, self._prompt_mask, device)
        if mask is None and (self._wants_mask or (tree and self._trees_want_mask)):
            rows = len(self.rows.lengths)
            mask = torch.ones((rows, self.rows.physical + slots), dtype=torch.long, device=device)
        return mask

    def read(
        self, tokens_BQ: Tensor, positions: Tensor, mask: Tensor | None, *, keep: int = 0, bare: bool = False
    ) -> Any:
        """Outputs of one forward over tokens behind the cache, by the model's own rules for inputs.

        Args:
            tokens_BQ: token ids.
            positions: their position ids, `[..., B, Q]`.
            mask: 2D mask, or None.
            keep: only the last so many logits, if the model can; 0 for all.
            bare: without hidden states and attentions, whatever the call asks for.
        """
        kwargs = continued_kinds(self._kwargs, tokens_BQ.shape[1])
        if bare:
            kwargs = {name: value for name, value in kwargs.items() if not name.startswith("output_")}
        inputs = _compat.prepare_inputs(
            self._model,
            tokens_BQ.to(self._last_positions.device),
            attention_mask=mask,
            **({"position_ids": positions} if self._tells_positions else {}),
            **{self._cache_kwarg: self.rows.cache},
            **kwargs,
            **({"logits_to_keep": keep} if _compat.supports_logits_to_keep(self._model) else {}),
        )
        return self._model(**inputs, return_dict=True)

    def __call__(self, trees: Sequence[TokenTree], ahead: Sequence[int]) -> Tensor:
        """Logits `[B, N, V]` of all nodes.

        Args:
            trees: one per row.
            ahead: per row, how many positions its root lies behind the last prompt token.
        """
        device = self._last_positions.device
        if self._aligned and len(trees) > 1:
            layout, self._slots = align_trees(trees, device)
        else:
            layout, self._slots = layout_trees(trees, device), None
        nodes = layout.nodes
        positions = self.positions(ahead, layout.depths_BN, 0)
        # A root alone is an ordinary decoding step: the model's own mask serves, and the step costs what plain costs.
        context = None
        mask = self.mask(nodes, tree=nodes > 1)
        shorter = self.rows.shorter(device)
        if nodes > 1 or shorter is not None:
            context = TreeContext(
                base=self.rows.physical,
                depths_BQ=layout.depths_BN,
                slot_depths_BM=layout.depths_BN,
                visible_BQM=layout.ancestors_BNN(),
                keys=self.rows.capacity or self.rows.physical + nodes,
                shorter_B=shorter,
                padded_left=self._padded_left,
                words_BNW=layout.words_BNW,
            )
        # With a static cache the inputs come with their masks.
        with tree_forward_context(context):
            outputs = self.read(layout.tokens_BN, positions, mask)
        if self._states is not None:
            self._states.see(outputs)
        logits = all_logits(outputs, nodes)
        return logits if self._slots is None else _take(logits, self._slots)


def all_logits(outputs: Any, width: int) -> Tensor:
    """The logits `[B, Q, V]` of a forward over Q tokens.

    Raises:
        UnsupportedModelError: if some are left out: many a class of a user's own gives those of the last token alone.
    """
    logits: Tensor = outputs.logits
    if logits.shape[1] < width:
        raise UnsupportedModelError(
            f"its forward gives the logits of {logits.shape[1]} of {width} tokens, and a tree needs those of all; let "
            "it take logits_to_keep"
        )
    # Some give more than that to several rows; plain decoding goes by the last.
    return logits[:, -width:]


def _take(logits_BSV: Tensor, slots: Sequence[Sequence[int]]) -> Tensor:
    """`[B, N, V]` of the nodes at these slots; rows with fewer nodes repeat their root's."""
    nodes = max(len(row) for row in slots)
    index = torch.tensor([[*row, *[0] * (nodes - len(row))] for row in slots], device=logits_BSV.device)
    return logits_BSV[torch.arange(len(slots), device=logits_BSV.device)[:, None], index]


def continued_kinds(model_kwargs: Mapping[str, Any], nodes: int) -> dict[str, Any]:
    """Keyword arguments of a call with per-token kinds continued over N nodes, as plain decoding continues them."""
    kwargs = dict(model_kwargs)
    for name in ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"):
        kinds = kwargs.get(name)
        if kinds is not None:
            last = torch.zeros_like(kinds[:, -1:]) if name == "mm_token_type_ids" else kinds[:, -1:]
            kwargs[name] = last.expand(-1, nodes)
    return kwargs
