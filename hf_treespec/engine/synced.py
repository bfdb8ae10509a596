"""Ranks that share parameters (ZeRO-3, FSDP) run the same forwards in the same order, however their texts differ.

Every forward of such a model gathers parameters from all ranks, so a rank that runs one more than the others waits for
ever. Before each forward the ranks agree on whose turn it is: the model with the highest number that any of them wants
to run. A rank that wants another one, or none because it is done, runs a forward of one token that nobody reads.
So ranks may differ in prompts, lengths, rounds, tree depths and fallbacks.

One all_reduce of one integer per forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from hf_treespec import _compat
from hf_treespec.attention import tree_forward_context
from hf_treespec.errors import UnsupportedCallError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["in_lockstep", "refused_together"]

_DONE = 0


@contextmanager
def refused_together(device: torch.device) -> Iterator[None]:
    """A call that is refused inside is refused on every rank: one that went on would wait for the others for ever.

    Args:
        device: where the process group reduces.

    Raises:
        UnsupportedCallError: on a rank whose own call is right, if that of another is not.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    refused = torch.tensor(int(failure is not None), device=device)
    distributed.all_reduce(refused, op=distributed.ReduceOp.MAX)
    if failure is not None:
        raise failure
    if int(refused):
        raise UnsupportedCallError(
            "synced_gpus=True with tree_config: the call of another rank was refused, and no rank can go on alone; "
            "that rank's own error says why"
        )


@contextmanager
def in_lockstep(models: Sequence[PreTrainedModel], device: torch.device) -> Iterator[None]:
    """Every forward of the models inside waits for its turn; at the end, for all ranks to be done.

    A rank that leaves by an exception does not wait, as in plain decoding.

    Args:
        models: target first, then the draft. All ranks must name the same ones in the same order.
        device: where the process group reduces.
    """
    lockstep = _Lockstep(models, device)
    hooks = [
        model.register_forward_pre_hook(lockstep.hook(turn), prepend=True)
        for turn, model in enumerate(models, start=1)
    ]
    try:
        yield
        lockstep.wait_for(_DONE)
    finally:
        for hook in hooks:
            hook.remove()


class _Lockstep:
    def __init__(self, models: Sequence[PreTrainedModel], device: torch.device) -> None:
        self._models = models
        self._device = device
        self._idle = False

    def hook(self, turn: int) -> Any:
        """A pre-hook of the model with this number."""

        def before(module: Any, arguments: Any) -> None:
            if not self._idle:
                self.wait_for(turn)

        return before

    def wait_for(self, wanted: int) -> None:
        """Run what other ranks want until all agree on `wanted`: first drafts, then targets, then the end."""
        while True:
            turn = torch.tensor(wanted, device=self._device)
            distributed.all_reduce(turn, op=distributed.ReduceOp.MAX)
            agreed = int(turn)
            if agreed == wanted:
                return
            self._idle_forward(self._models[agreed - 1])

    def _idle_forward(self, model: PreTrainedModel) -> None:
        one = torch.zeros((1, 1), dtype=torch.long, device=_compat.input_device(model, self._device))
        self._idle = True
        try:
            # The tree of the forward that waits is not this one's.
            with tree_forward_context(None):
                _compat.model_forward(model, input_ids=one, cache=None)
        finally:
            self._idle = False
