"""What a training run is to make."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hf_treespec.errors import TrainError
from hf_treespec.train.loop import LoopSettings
from hf_treespec.train.texts import TextSettings

__all__ = ["FREE", "KINDS", "TrainSettings"]

# Per kind how it is usually trained.
_LOOPS: Mapping[str, LoopSettings] = {
    # A large layer between two states: what it has learnt after so many texts hangs on the optimizer.
    "eagle3": LoopSettings(optimizer="muon", learning_rate=3e-3, batch_tokens=1024),
    "medusa": LoopSettings(),
    "mlp": LoopSettings(),
    # It begins with weights that are right already, and its laws are over all ids.
    "model": LoopSettings(learning_rate=3e-4, batch_tokens=2048),
}
KINDS = tuple(_LOOPS)
# What may differ between a run and the one that goes on with it.
FREE = ("loop.minutes", "loop.patience")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """What to train, on how much.

    Args:
        kind: ``"eagle3"``, a decoder layer that reads hidden states of three layers and what it made itself;
            ``"medusa"``, a stack of residual layers for each token ahead; ``"mlp"``, a recurrent head, the cheapest;
            ``"model"``, a causal LM of a few of the target's layers, which needs no hidden states.
        depths: tokens ahead that it is trained for. Medusa and MLP heads draft no deeper.
        vocabulary: ids that a head knows: those that the target writes most often. Of a model it is the length of the
            list beside it, for calls that reduce its vocabulary.
        layers: for ``"eagle3"`` the hidden states to read, counted as `output_hidden_states` does, from 1 to one less
            than the target's layers; None for three. For ``"model"`` the layers to keep, from 0; None for a sixth of
            them, evenly spaced. Rising numbers.
        inner_size: intermediate size of the layer of ``"eagle3"``, None for the target's; width of the state of
            ``"mlp"``, None for the target's hidden size.
        init: folder of a trained draft of the same kind to begin from; what it knows and reads, and its sizes, are
            kept, whatever `vocabulary` says. None for a fresh one.
        decay: each depth counts so much less than the one before.
        tokens: of the target's own to learn from; None for what the prompts give.
        held_out: prompts kept for judging; None for a tenth, 64 at most.
        texts: how the target writes.
        loop: how the draft is trained; None for what suits the kind.
        measured: held-out prompts on which calls of `generate` are counted at the end; 0 for none.
        measured_tokens: of each.
        max_nodes: of their trees.

    Raises:
        TrainError: for values that cannot work.
    """

    kind: str = "eagle3"
    depths: int = 5
    vocabulary: int = 8192
    layers: tuple[int, ...] | None = None
    inner_size: int | None = None
    init: str | None = None
    decay: float = 0.8
    tokens: int | None = None
    held_out: int | None = None
    texts: TextSettings = field(default_factory=TextSettings)
    loop: LoopSettings | None = None
    measured: int = 16
    measured_tokens: int = 96
    max_nodes: int = 16

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise TrainError(f"kind={self.kind!r}: expected one of {', '.join(KINDS)}")
        least = {"measured": 0}
        for name in ("depths", "vocabulary", "inner_size", "tokens", "held_out", "measured", "measured_tokens",
                     "max_nodes"):  # fmt: skip
            value, low = getattr(self, name), least.get(name, 1)
            if value is not None and value < low:
                raise TrainError(f"{name}={value}: expected at least {low}")
        if not 0 < self.decay <= 1:
            raise TrainError(f"decay={self.decay}: expected more than 0, and 1 at most")
        if self.layers is not None and (not self.layers or self.kind not in ("eagle3", "model")):
            raise TrainError(f"layers={self.layers} with kind={self.kind!r}: expected numbers, for eagle3 or model")
        # Servers of EAGLE-3 heads put the states side by side in the order of the layers, whatever order is written.
        if self.layers is not None and list(self.layers) != sorted(set(self.layers)):
            raise TrainError(f"layers={self.layers}: expected rising numbers")
        if self.inner_size is not None and self.kind not in ("eagle3", "mlp"):
            raise TrainError(f"inner_size={self.inner_size} with kind={self.kind!r}: has an effect for eagle3 and mlp")
        if self.init is not None and (self.layers is not None or self.inner_size is not None):
            raise TrainError(
                f"init={self.init!r} with layers={self.layers}, inner_size={self.inner_size}: a draft to begin from "
                "has its own; leave them out"
            )

    def loop_settings(self) -> LoopSettings:
        """How the draft is trained."""
        return _LOOPS[self.kind] if self.loop is None else self.loop

    def held_out_of(self, prompts: int) -> int:
        """How many of so many prompts are kept for judging."""
        return min(64, max(1, prompts // 10)) if self.held_out is None else self.held_out

    def to_dict(self) -> dict[str, Any]:
        """All of them, as JSON has them."""
        plain: dict[str, Any] = json.loads(json.dumps({**asdict(self), "loop": asdict(self.loop_settings())}))
        return plain
