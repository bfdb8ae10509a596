"""The unconditional stream of classifier-free guidance: a second cache, read with the same trees in the same rounds.

Shapes: B rows, U width of the unconditional prompt, N nodes with the root, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.cache import CacheTransaction, RowCache
from hf_treespec.engine.forward import TargetForward
from hf_treespec.errors import UnsupportedCallError
from hf_treespec.tree import TokenTree
from hf_treespec.verify import NodeGuidance

if TYPE_CHECKING:
    from transformers import LogitsProcessorList, PreTrainedModel

__all__ = ["Guidance"]


def _known(model: PreTrainedModel, processors: Sequence[Any], last_positions: Tensor) -> Any | None:
    """The processor whose stream can be read with trees, or None: then it is called as it is, token by token.

    That is right for any processor, only slower.
    """
    found = [processor for processor in processors if type(processor) is _compat.GuidanceProcessor]
    # Two of them, a reused one, or one over another model or without a cache were made by the caller.
    if len(found) != 1 or found[0].guidance_scale == 1:
        return None
    context = found[0].unconditional_context
    if found[0].model is not model or not context["use_cache"] or not context["first_pass"]:
        return None
    # The stream is read without position ids. Models with several planes of them derive them from the last prompt.
    if last_positions.dim() > 2:
        return None
    return found[0]


def _prompt_of(processor: Any, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and mask `[B, U]` of the unconditional prompt, by the processor's own rules."""
    context = processor.unconditional_context
    ids, mask = context["input_ids"], context["attention_mask"]
    ids = input_ids[:, -1:] if ids is None else ids
    return ids, torch.ones_like(ids, dtype=torch.long) if mask is None else mask


def _check(ids: Tensor, mask: Tensor, batch: int, *, given: bool) -> None:
    if ids.dim() != 2 or ids.shape[0] != batch or not ids.shape[1]:
        name = "negative_prompt_ids" if given else "the last column of input_ids as negative prompt, which is"
        raise UnsupportedCallError(
            f"guidance_scale with {name} of shape {tuple(ids.shape)}: expected [{batch}, n] with n > 0, one row for "
            "each returned sequence; pass negative_prompt_ids of that shape"
        )
    if mask.shape != ids.shape:
        raise UnsupportedCallError(
            f"negative_prompt_attention_mask has shape {tuple(mask.shape)}: expected {tuple(ids.shape)}, that of the "
            "negative prompt"
        )


class Guidance:
    """The unconditional stream of one call.

    Args:
        forward: reads trees behind the unconditional prompt.
        rows: cache of the stream.
        mixer: gets the logits, and the nodes that the walk visits.
        last_positions: per row the position id of the last token of the unconditional prompt.
    """

    _open: CacheTransaction

    def __init__(self, forward: TargetForward, rows: RowCache, mixer: NodeGuidance, last_positions: list[int]) -> None:
        self._forward = forward
        self._rows = rows
        self._mixer = mixer
        self.last_positions = last_positions

    @classmethod
    def check(
        cls, model: PreTrainedModel, processors: LogitsProcessorList, input_ids: Tensor, last_positions: Tensor
    ) -> None:
        """Refuse an unconditional prompt that does not fit the batch; arguments as of `start`.

        Raises:
            UnsupportedCallError: naming its shape and the right one.
        """
        processor = _known(model, processors, last_positions)
        if processor is not None:
            ids, mask = _prompt_of(processor, input_ids)
            given = processor.unconditional_context["input_ids"] is not None
            _check(ids, mask, int(input_ids.shape[0]), given=given)

    @classmethod
    def start(
        cls, model: PreTrainedModel, processors: LogitsProcessorList, input_ids: Tensor, last_positions: Tensor
    ) -> tuple[Guidance | None, LogitsProcessorList]:
        """Read the unconditional prompt, which has passed `check`.

        Args:
            model: the target.
            processors: the list of the call, which is left as it is, its members too.
            input_ids: int64 `[B, P]`.
            last_positions: `[..., B, 1]`, position ids of the last prompt token.

        Returns:
            The stream and a list that mixes it in at the same place. None and the list itself for a call without
            guidance, and where the stream cannot be read with trees.
        """
        processor = _known(model, processors, last_positions)
        if processor is None:
            return None, processors
        device = _compat.input_device(model, input_ids.device)
        ids, mask = (part.to(device) for part in _prompt_of(processor, input_ids))
        batch, width = ids.shape
        rows = RowCache(_compat.make_cache(model.config), [0] * batch)
        # As the processor reads it: with a mask and without position ids.
        logits = _read(model, ids, mask, rows.cache)
        rows.lengths = [width] * batch
        counted = _positions_taken(model, ids, mask, logits)
        if counted is None:
            return None, processors
        last = counted[:, -1:].expand(batch, 1)
        padding = None if bool((mask != 0).all()) else (mask != 0).long()
        mixer = NodeGuidance(processor.guidance_scale, logits[:, -1])
        stream = cls(
            TargetForward(model, rows, last, padding, {"use_cache": True}), rows, mixer, last.flatten().tolist()
        )
        return stream, type(processors)(mixer if entry is processor else entry for entry in processors)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A context around the reading of one tree per row; what is not committed is undone on exit."""
        with self._rows.transaction() as self._open:
            yield

    def read(self, trees: Sequence[TokenTree], ahead: Sequence[int]) -> None:
        """Score every node without the prompt; arguments as of `TargetForward`."""
        self._mixer.score(self._forward(trees, ahead))

    def stand(self, row: int, node: int) -> None:
        """The walk chooses the next token of the row at this node."""
        self._mixer.stand(row, node)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the visited nodes of every row; see `CacheTransaction.commit`."""
        self._open.commit(paths)


def _read(model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: Any, position_ids: Tensor | None = None) -> Tensor:
    return _compat.model_forward(
        model, input_ids=ids, attention_mask=mask, position_ids=position_ids, cache=cache, logits_to_keep=1
    )


def _positions_taken(model: PreTrainedModel, ids: Tensor, mask: Tensor, logits: Tensor) -> Tensor | None:
    """The positions `[B or 1, U]` that the model takes when it is given a mask and none.

    Most models count the slots, some (OPT) the real tokens. Without padding that is the same. With it the prompt is
    read again with the positions said; None if neither gives the logits.
    """
    slots = torch.arange(ids.shape[1], device=ids.device)[None]
    if bool((mask != 0).all()):
        return slots
    real = ((mask != 0).long().cumsum(-1) - 1).clamp(min=0)
    for positions in (slots, real):
        again = _read(model, ids, mask, _compat.make_cache(model.config), positions)
        if torch.allclose(again, logits, rtol=1e-4, atol=1e-4):
            return positions
    return None
