"""The decoder of an EAGLE head: a base model of transformers with a changed first layer.

So rotary positions, attention, masks and caches are those of transformers.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_treespec import _compat
from hf_treespec.errors import TreeConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["DECODERS", "make_decoder"]

# Base models whose layers have these parts and no others.
DECODERS = ("llama", "mistral", "qwen2", "qwen3")
_PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")


class SideBySideLayer(nn.Module):
    """A decoder layer whose attention reads embedding and state side by side; only the state goes on.

    Args:
        layer: of transformers; its parts are taken over.
        width: of each of the two.
        norm_before_residual: whether the attention is added to the normalised state.
    """

    def __init__(self, layer: nn.Module, width: int, norm_before_residual: bool) -> None:
        super().__init__()
        for name in _PARTS:
            self.add_module(name, layer.get_submodule(name))
        attention = self.get_submodule("self_attn")
        for name in ("q_proj", "k_proj", "v_proj"):
            old = attention.get_submodule(name)
            assert isinstance(old, nn.Linear)
            setattr(attention, name, nn.Linear(2 * width, old.out_features, bias=old.bias is not None))
        self.hidden_norm = copy.deepcopy(self.get_submodule("input_layernorm"))
        self.norm_before_residual = norm_before_residual

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Tensor:
        """State `[B, T, E]` of `[B, T, 2 E]`."""
        embeddings, state = hidden_states.chunk(2, dim=-1)
        normed = self.hidden_norm(state)
        both = torch.cat([self.get_submodule("input_layernorm")(embeddings), normed], dim=-1)
        attended, _ = self.get_submodule("self_attn")(hidden_states=both, **arguments)
        state = (normed if self.norm_before_residual else state) + attended
        out: Tensor = state + self.get_submodule("mlp")(self.get_submodule("post_attention_layernorm")(state))
        return out


def make_decoder(
    config: PreTrainedConfig, *, side_by_side: bool, norm_before_residual: bool = False
) -> PreTrainedModel:
    """A random decoder without embeddings and without a final norm.

    Args:
        config: of transformers.
        side_by_side: whether the first layer reads embedding and state side by side (EAGLE-3); else it has no norm at
            its input (EAGLE-1).
        norm_before_residual: see `SideBySideLayer`.

    Raises:
        TreeConfigError: for a kind of decoder whose layers have other parts.
    """
    if config.model_type not in DECODERS:
        raise TreeConfigError(
            f"a head with a decoder of model_type {config.model_type!r}: expected one of {', '.join(DECODERS)}"
        )
    decoder = _compat.new_base_model(config)
    layers: Any = decoder.get_submodule("layers")
    if side_by_side:
        layers[0] = SideBySideLayer(layers[0], int(config.hidden_size), norm_before_residual)
    else:
        layers[0].input_layernorm = nn.Identity()
    decoder.norm = nn.Identity()
    return decoder
