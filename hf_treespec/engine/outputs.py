"""Hidden states and attentions of the emitted tokens, as plain decoding would have given them.

Plain decoding reads one token a forward and gives one element a token. Here the element of a token is cut out of a
tree forward: the row of its node, and of the attention's key axis the committed slots and the node's own path, in
order. Nodes beside the path have a weight of exactly zero, so nothing is lost by leaving them out.

Shapes: B rows, N nodes with the root, H heads, K keys of a layer, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.cache import SLIDING, STATIC, TREE, RowCache, layer_kind

if TYPE_CHECKING:
    from transformers import GenerationConfig

__all__ = ["KeptStates"]

_FIELDS = ("hidden_states", "attentions")


class KeptStates:
    """Collects the wanted outputs of a call, one element per emitted token of all rows together.

    Args:
        wanted: names among "hidden_states" and "attentions".
        prefill: outputs of the prefill, whose states are the first element.
        layers: of the cache.
    """

    def __init__(self, wanted: Sequence[str], prefill: Any, layers: Sequence[Any]) -> None:
        self._steps: dict[str, list[Any]] = {name: [getattr(prefill, name)] for name in wanted}
        self._outputs: Any = None
        attentions: Sequence[Any] = (prefill.attentions if "attentions" in wanted else None) or ()
        # Layers that share a cache: which keys a layer of the model reads is not known here.
        self.cuttable = not attentions or len(attentions) == len(layers)
        if not self.cuttable:
            _compat.warn_once(
                f"output_attentions=True: the model has {len(attentions)} attentions and {len(layers)} cache layers; "
                "the text is decoded without trees"
            )

    @staticmethod
    def wanted(generation_config: GenerationConfig) -> list[str]:
        """Which of them the call returns."""
        if not generation_config.return_dict_in_generate:
            return []
        return [name for name in _FIELDS if getattr(generation_config, f"output_{name}")]

    def fields(self) -> dict[str, tuple[Any, ...]]:
        """Fields of the output class."""
        return {name: tuple(steps) for name, steps in self._steps.items()}

    def see(self, outputs: Any) -> None:
        """Take the outputs of a tree forward."""
        self._outputs = outputs

    def keep(self, paths: Sequence[Sequence[int]], cache: RowCache) -> None:
        """Add an element for every depth of the accepted paths.

        Args:
            paths: per row the visited nodes, root first; equally many in all rows.
            cache: as it was before the forward: its rows do not hold the paths yet.
        """
        outputs, self._outputs = self._outputs, None
        for depth in range(len(paths[0])):
            walked = torch.tensor([list(path[: depth + 1]) for path in paths])
            for name, steps in self._steps.items():
                states = getattr(outputs, name)
                if not self.cuttable:
                    # No trees then: the forward was plain decoding's own.
                    steps.append(states)
                elif name == "hidden_states":
                    steps.append(_each(states, lambda state, _, at=walked[:, -1]: _rows(state, at)))
                else:
                    steps.append(_each(states, lambda state, i, path=walked: _keys(state, path, cache, i)))


def _each(states: tuple[Any, ...] | None, pick: Any) -> tuple[Any, ...] | None:
    """Apply `pick(state, index)`; sdpa gives an empty tuple, and a selection of layers leaves None for the others."""
    if states is None:
        return None
    return tuple(None if state is None else pick(state, index) for index, state in enumerate(states))


def _rows(state_BNE: Tensor, node_B: Tensor) -> Tensor:
    """`[B, 1, E]` of one node per row."""
    rows = torch.arange(len(node_B), device=state_BNE.device)
    return state_BNE[rows, node_B.to(state_BNE.device)][:, None]


def _keys(weights_BHNK: Tensor, path_BD: Tensor, cache: RowCache, index: int) -> Tensor:
    """`[B, H, 1, K']` of the last node of each path, over the keys that plain decoding has there."""
    batch, depth = path_BD.shape
    nodes, width = weights_BHNK.shape[2:]
    device = weights_BHNK.device
    layer: Any = cache.cache.layers[index]
    base = cache.physical
    weights_BHK = weights_BHNK[torch.arange(batch, device=device), :, path_BD[:, -1].to(device)]
    static = layer_kind(layer) == STATIC
    stored = base if static else width - nodes
    column_BK = torch.cat([torch.arange(stored).expand(batch, -1), stored + path_BD], dim=1)
    if layer_kind(layer) == SLIDING or (layer_kind(layer) == TREE and layer.is_sliding):
        # The window has moved on with the path: what fell out of it has no column in plain decoding.
        column_BK = column_BK[:, -(min(base + depth - 1, int(layer.sliding_window) - 1) + 1) :]
    picked = weights_BHK.gather(2, column_BK.to(device)[:, None].expand(-1, weights_BHK.shape[1], -1))
    if static:
        whole = torch.zeros_like(weights_BHK)
        whole[:, :, : picked.shape[2]] = picked
        picked = whole
    return picked[:, :, None]
