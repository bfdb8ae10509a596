"""Hidden states of the target for a draft that reads them: hooks on a few layers, there for one call.

Only forwards that are `watched` are seen, so neither a second stream nor the draft's own use of the target's layers
disturbs. Padding and rejected nodes are left out.

Shapes: B rows, Q tokens of a forward, H hidden size of the target.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hf_treespec import _compat
from hf_treespec.attention import held
from hf_treespec.draft import Features
from hf_treespec.engine.prompt import Prompt
from hf_treespec.errors import TreeSpecError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["FeatureTaps", "Places", "tapped"]


class Places(NamedTuple):
    """Where a forward has the nodes of a path of each row.

    Attributes:
        nodes: per batch row the rows and the columns of the forward; negative columns count from its end.
        stem: whether the first node of each path was read in the forward before instead: in the last column of its
            batch row.
    """

    nodes: Sequence[tuple[Sequence[int], Sequence[int]]]
    stem: bool = False


class FeatureTaps:
    """The hidden states of the forward that was watched last.

    Args:
        features: which ones.
    """

    def __init__(self, features: Features) -> None:
        self.features = features
        # Per wanted state `[B, Q, H]` of each forward inside the last `watched`.
        self._seen: list[list[Tensor]] = [[] for _ in range(features.count)]
        # The thread whose forwards are seen: another may run the same model meanwhile.
        self._watching: int | None = None

    def take(self, place: int, state_BQH: Tensor) -> None:
        """What a hook does."""
        if self._watching == threading.get_ident():
            self._seen[place].append(state_BQH.detach())

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Keep what the forwards inside show, and forget what was kept before."""
        for states in self._seen:
            states.clear()
        self._watching = threading.get_ident()
        try:
            yield
        finally:
            self._watching = None

    def of_prompt(self, prompt: Prompt) -> list[Tensor | None]:
        """Per row `[tokens, count * H]` of the prompt, as far as it was read now, maybe in chunks; without padding."""
        parts = self._states()
        states_BWF = _joined([torch.cat(chunks, dim=1) for chunks in parts])
        width = states_BWF.shape[1]
        if width > prompt.physical:
            raise TreeSpecError(f"the prefill read {width} tokens of a prompt of {prompt.physical}")
        if prompt.mask_BP is None:
            return list(states_BWF.unbind(0))
        real_BW = prompt.mask_BP[:, -width:].bool().to(states_BWF.device)
        return [states[real] for states, real in zip(states_BWF, real_BW, strict=True)]

    def of_paths(self, places: Places) -> list[Tensor | None]:
        """Per row `[nodes, count * H]` of its path, which the forward watched last has read; None for no path.

        Args:
            places: of each path in that forward.
        """
        # Where a forward runs the model more than once, the last time is that of the trees.
        states = self._states()
        found: list[Tensor | None] = []
        for row, (rows, columns) in enumerate(places.nodes):
            if not columns:
                found.append(None)
                continue
            stem = int(places.stem)
            parts = [
                chunks[-1][_index(rows[stem:], chunks[-1]), _index(columns[stem:], chunks[-1])] for chunks in states
            ]
            if stem:
                parts = [torch.cat([chunks[-2][row, -1:], part]) for chunks, part in zip(states, parts, strict=True)]
            found.append(_joined(parts))
        return found

    def _states(self) -> list[list[Tensor]]:
        if any(not states for states in self._seen) or len({len(states) for states in self._seen}) > 1:
            counts = [len(states) for states in self._seen]
            raise TreeSpecError(
                f"a forward of the target showed its hidden states {counts} times; expected each as often. A layer "
                "was replaced, or compiled, while the call ran"
            )
        return self._seen


def _index(numbers: Sequence[int], state: Tensor) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.long, device=state.device)


def _joined(states: Sequence[Tensor]) -> Tensor:
    """Side by side; layers may lie on several devices."""
    last = states[-1]
    return last if len(states) == 1 else torch.cat([state.to(last.device, last.dtype) for state in states], dim=-1)


@contextmanager
def tapped(model: PreTrainedModel, features: Features | None) -> Iterator[FeatureTaps | None]:
    """Hooks for the length of a call; None if nothing is wanted.

    Compiled code does not call hooks that came later: parts of the model that are compiled run as they were written.

    Args:
        model: the target.
        features: which hidden states are wanted.
    """
    if features is None:
        yield None
        return
    taps = FeatureTaps(features)
    with ExitStack() as stack:
        for place, layer in enumerate(features.layers):
            stack.callback(_compat.tap_layer(model, layer, partial(taps.take, place)).remove)
        if features.last:
            stack.callback(_compat.tap_last(model, partial(taps.take, features.count - 1)).remove)
        if _compat.has_compiled_parts(model):
            stack.enter_context(held("eager", _forced_eager))
        yield taps


def _forced_eager() -> Callable[[], None]:
    # There is one stance for all threads.
    stack = ExitStack()
    stack.enter_context(torch.compiler.set_stance("force_eager"))
    return stack.close
