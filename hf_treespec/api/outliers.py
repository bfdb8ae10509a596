"""LLM.int8(): linear layers whose result for one token depends on the other tokens of the forward.

bitsandbytes' 8-bit layers keep input columns in 16 bits in which any token of the forward exceeds
`llm_int8_threshold` (6.0 by default). So a token's logits depend on what shares its forward: a sibling in a tree, but
also the prompt of a prefill and the other rows of a batch. Measured on a tiny random model: logits move by up to 4 %
of the largest one. With `llm_int8_threshold=0.0` each token is quantised by itself, and 4-bit layers do not quantise
tokens at all; then trees give the text of plain decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["has_shared_outliers", "without_shared_outliers"]


def _states(model: nn.Module) -> list[Any]:
    # By name: bitsandbytes is an extra, and importing it takes seconds.
    layers: list[Any] = [module for module in model.modules() if type(module).__name__ == "Linear8bitLt"]
    return [layer.state for layer in layers if layer.state.threshold > 0.0]


def has_shared_outliers(model: nn.Module) -> bool:
    """Whether tokens of one forward change each other's logits."""
    return bool(_states(model))


@contextmanager
def without_shared_outliers(model: nn.Module) -> Iterator[None]:
    """Quantise every token by itself inside; no other thread may run the model meanwhile."""
    states = [(state, state.threshold) for state in _states(model)]
    try:
        for state, _ in states:
            state.threshold = 0.0
        yield
    finally:
        for state, threshold in states:
            state.threshold = threshold
