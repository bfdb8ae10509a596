"""Which arguments of a call its forwards pass on as they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["passed_on"]

# Made anew for every forward, from a cache and what it holds.
_MADE = ("cache", "past_key_values", "logits_to_keep", "inputs_embeds")
_MADE_OF_DECODER = ("attention_mask", "position_ids")


def passed_on(model_kwargs: Mapping[str, Any], *, prefix: str = "", made: Collection[str] = ()) -> dict[str, Any]:
    """The arguments that `prepare_inputs_for_generation` is given in each forward as plain decoding gives them.

    Args:
        model_kwargs: keyword arguments of the call.
        prefix: ``"decoder_"`` for an encoder-decoder, where plain names speak of the encoder.
        made: more that are made anew.
    """
    own = {*_MADE, *(prefix + name for name in _MADE_OF_DECODER), *made}
    return {name: value for name, value in model_kwargs.items() if name not in own}
