"""What the prompt of a call looks like once `generate` has prepared it.

Shapes: B rows, P physical prompt length (what the cache holds after the prefill), I width of `input_ids`, H hidden
size.
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
        ids_width: I.
        physical: P.
        last_positions: `[..., B, 1]`, position id of the last prompt token.
        real_tokens: per row the real tokens among the P.
        known_tokens: per row the real ids of `input_ids` (a passed-in cache or embeddings may hold more).
    """

    mask_BP: Tensor | None
    ids_width: int
    physical: int
    last_positions: Tensor
    real_tokens: list[int]
    known_tokens: list[list[int]]

    def slots(self, length: int) -> int:
        """Cache slots of a text of `length` ids: a passed-in cache may hold more than the ids."""
        return length + self.physical - self.ids_width

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
            UnsupportedCallError: if mask, embeddings, position ids or a passed-in cache do not fit the ids.
        """
        batch, width = input_ids.shape
        of = "decoder_" if encoder_decoder else ""
        # Embeddings of an encoder's text are no part of what the decoder reads.
        embeds = None if encoder_decoder else model_kwargs.get("inputs_embeds")
        mask = model_kwargs.get(f"{of}attention_mask")
        _check_mask(mask, batch)
        cache = _compat.passed_cache(dict(model_kwargs))
        past = _compat.cache_length(cache) if cache is not None else 0
        whole = _compat.mask_length(generation_config, mask)
        if embeds is not None:
            # They always hold the whole text; ids may name it, or a part of it, or nothing.
            width = _embedded(embeds, batch, whole)
        # As in the prefill of `generate`: a mask as wide as the ids means that the ids are the whole text.
        # A decoder has no mask by default, and is then given the ids as they are.
        physical = width if whole == width or (whole is None and not encoder_decoder) else past + width
        if whole is not None and whole not in (width, past + width):
            behind = (
                f" or {past + width} (the cache holds {past} tokens and input_ids the next {width})" if past else ""
            )
            raise UnsupportedCallError(
                f"{of}attention_mask is {whole} wide: expected {width} (input_ids hold the whole text){behind}"
            )
        if past >= physical:
            raise UnsupportedCallError(
                f"the cache holds {past} tokens and {'input_ids' if embeds is None else 'inputs_embeds'} with the "
                f"attention_mask describe {physical}: at least one token must be new. Pass the full prompt and mask, "
                "or crop the cache to fewer tokens than the prompt"
            )
        chunk = generation_config.prefill_chunk_size
        if past and chunk is not None and not _compat.chunks_behind_a_cache():
            raise UnsupportedCallError(
                f"prefill_chunk_size={chunk} with a cache that holds {past} tokens: this version of transformers "
                "reads the first chunk as if the cache were empty; leave prefill_chunk_size out, or install 5.24"
            )
        if mask is not None and bool((mask != 0).all()):
            mask = None
        real = [physical] * batch if mask is None else [int(n) for n in (mask != 0).sum(-1).tolist()]
        ids = input_ids.tolist()
        if mask is None:
            known = ids
        else:
            empty = [row for row, any_real in enumerate((mask[:, -width:] != 0).any(-1).tolist()) if not any_real]
            if empty:
                raise UnsupportedCallError(f"{of}attention_mask masks every token of rows {empty}; each row needs one")
            # Ids beside embeddings are the end of the text; more ids than embeddings have no flag and count as real.
            flags = [[True] * (len(r) - len(fs)) + fs for r, fs in zip(ids, _last(mask != 0, ids), strict=True)]
            known = [[t for t, f in zip(r, fs, strict=True) if f] for r, fs in zip(ids, flags, strict=True)]
        positions = model_kwargs.get(f"{of}position_ids")
        if positions is None:
            positions = torch.tensor([[n - 1] for n in real], device=input_ids.device)
        return cls(
            mask_BP=None if mask is None else (mask != 0).long(),
            ids_width=int(input_ids.shape[1]),
            physical=physical,
            last_positions=_last_positions(positions, batch),
            real_tokens=real,
            known_tokens=known,
        )


def _check_mask(mask: Tensor | None, batch: int) -> None:
    if mask is not None and (mask.dim() != 2 or mask.shape[0] != batch):
        raise UnsupportedCallError(
            f"attention_mask has shape {tuple(mask.shape)}: expected two axes, [{batch}, prompt length], with 0 at "
            "padding. Leave it out for a prompt without padding"
        )


def _embedded(embeds: Tensor, batch: int, mask_width: int | None) -> int:
    """Tokens that the embeddings `[B, P, H]` stand for."""
    if embeds.dim() != 3 or embeds.shape[0] != batch or not embeds.shape[1]:
        raise UnsupportedCallError(
            f"inputs_embeds has shape {tuple(embeds.shape)}: expected [{batch}, prompt length, hidden size] for "
            f"{batch} rows"
        )
    width = int(embeds.shape[1])
    if mask_width not in (None, width):
        raise UnsupportedCallError(
            f"attention_mask is {mask_width} wide and inputs_embeds hold {width} tokens: pass an attention_mask of "
            f"{width} columns. Left out, it is made as wide as input_ids"
        )
    return width


def _last(flags_BP: Tensor, ids: list[list[int]]) -> list[list[bool]]:
    """The flags of the ids, which are the end of the text."""
    count = len(ids[0])
    return flags_BP[:, flags_BP.shape[1] - min(count, flags_BP.shape[1]) :].tolist()


def _last_positions(positions: Tensor, batch: int) -> Tensor:
    """`[..., B, 1]`; one row of position ids may serve the whole batch."""
    if positions.dim() < 2 or positions.shape[-2] not in (1, batch) or not positions.shape[-1]:
        raise UnsupportedCallError(
            f"position_ids has shape {tuple(positions.shape)}: expected [{batch}, prompt length], or one row for all. "
            "With num_return_sequences pass as many rows as there are prompts"
        )
    last = positions[..., -1:]
    return last.expand(*last.shape[:-2], batch, 1)
