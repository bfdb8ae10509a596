"""What the prompt of a call looks like once `generate` has prepared it.

Shapes: B rows, P physical prompt length (what the cache holds after the prefill), I width of `input_ids`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.errors import UnsupportedCallError

if TYPE_CHECKING:
    from transformers import GenerationConfig

__all__ = ["Prompt"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Padding, positions and known tokens of the prompt.

    Args:
        mask_BP: int64 `[B, P]` with 0 at padding, or None if nothing is padded.
        last_positions: `[..., B, 1]`, position id of the last prompt token.
        real_tokens: per row the real tokens among the P.
        known_tokens: per row the real ids of `input_ids` (a passed-in cache may hold more).
    """

    mask_BP: Tensor | None
    last_positions: Tensor
    real_tokens: list[int]
    known_tokens: list[list[int]]

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        model_kwargs: Mapping[str, Any],
        generation_config: GenerationConfig,
        *,
        encoder_decoder: bool = False,
    ) -> Prompt:
        """Read it off the prepared call; for an encoder-decoder it is the prompt of the decoder.

        Raises:
            UnsupportedCallError: if a passed-in cache does not fit the ids and the mask.
        """
        batch, width = input_ids.shape
        of = "decoder_" if encoder_decoder else ""
        mask = model_kwargs.get(f"{of}attention_mask")
        cache = _compat.passed_cache(dict(model_kwargs))
        past = _compat.cache_length(cache) if cache is not None else 0
        whole = _compat.mask_length(generation_config, mask)
        # As in the prefill of `generate`: a mask as wide as the ids means that the ids are the whole text.
        # A decoder has no mask by default, and is then given the ids as they are.
        physical = width if whole == width or (whole is None and not encoder_decoder) else past + width
        if whole is not None and whole not in (width, past + width):
            raise UnsupportedCallError(
                f"{of}attention_mask is {whole} wide: expected {width} (input_ids hold the whole text) or "
                f"{past + width} (the cache holds {past} tokens and input_ids the next {width})"
            )
        if past >= physical:
            raise UnsupportedCallError(
                f"the cache holds {past} tokens and input_ids with the attention_mask describe {physical}: at least "
                "one token must be new. Pass the full ids and mask, or crop the cache to fewer tokens than the prompt"
            )
        if mask is not None and bool((mask != 0).all()):
            mask = None
        real = [physical] * batch if mask is None else [int(n) for n in (mask != 0).sum(-1).tolist()]
        ids = input_ids.tolist()
        if mask is None:
            known = ids
        else:
            flags = (mask[:, -width:] != 0).tolist()
            known = [[t for t, f in zip(r, fs, strict=True) if f] for r, fs in zip(ids, flags, strict=True)]
            empty = [row for row, tokens in enumerate(known) if not tokens]
            if empty:
                raise UnsupportedCallError(f"{of}attention_mask masks every token of rows {empty}; each row needs one")
        positions = model_kwargs.get(f"{of}position_ids")
        if positions is None:
            positions = torch.tensor([[n - 1] for n in real], device=input_ids.device)
        # One row of position ids may serve the whole batch.
        last = positions[..., -1:]
        return cls(
            mask_BP=None if mask is None else (mask != 0).long(),
            last_positions=last.expand(*last.shape[:-2], batch, 1),
            real_tokens=real,
            known_tokens=known,
        )
