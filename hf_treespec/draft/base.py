"""What a draft source is: the protocol between the engine and the sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from hf_treespec.tree import TokenTree, TreeLimits
from hf_treespec.verify import DraftLaws

__all__ = [
    "CreditedDraft",
    "Draft",
    "DraftRow",
    "FeatureDraft",
    "Features",
    "LearningDraft",
    "WeighingDraft",
]


@dataclass(slots=True)
class DraftRow:
    """What a source may read of one row. The engine extends `tokens` as it commits; sources never write to it.

    Args:
        index: batch row.
        tokens: ids of prompt and committed text without padding, the root (last emitted token) included.
        offset: position of `tokens[0]`; above 0 when a passed-in cache holds text that the call did not repeat.
        noise: `noise(position)` is the Gumbel noise `[V]` that the target will add when it chooses the token of that
            position; None under greedy decoding.
        settled: leading tokens that can never change; None for all. Others come about where the text is encoded by
            another tokenizer, and its last words may be written anew with the next ones.
    """

    index: int
    tokens: list[int]
    offset: int = 0
    noise: Callable[[int], Tensor] | None = field(default=None, repr=False)
    noise_of: Callable[[int, Sequence[int]], list[float]] | None = field(default=None, repr=False)
    settled: int | None = None


class Draft(Protocol):
    """A source of trees. One object serves one call of `generate`.

    Attributes:
        name: what the statistics call it.
        cheap: whether proposing costs next to nothing beside a forward of the target, or is weighed by the source
            itself. Then whole trees are asked for every round, and only the part that pays is scored.

    A source that grows trees by forwards and prunes them has `levels_read` besides: the levels of the trees last
    proposed that it read, those that were pruned away included. Costs are kept by it.
    """

    name: str
    cheap: bool

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[TokenTree]:
        """One tree per row, rooted at `rows[i].tokens[-1]`.

        Args:
            rows: all rows of the batch, always in the same order.
            limits: budget per row; `max_nodes == 0` asks for a root-only tree (the row is finished or has no room).

        Returns:
            One tree per row, within its limits.
        """
        ...

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Learn which nodes of the trees last proposed were accepted.

        Args:
            paths: per row the accepted node indices, root first; empty for a row that did not advance.
        """
        ...

    def laws(self, batch: int) -> DraftLaws | None:
        """The laws that the random nodes of the trees last proposed were drawn from; None if there are none.

        Args:
            batch: rows.
        """
        ...


@runtime_checkable
class LearningDraft(Protocol):
    """What a source has besides that learns from the target's logits.

    Attributes:
        learns: whether this one does; `observe` is called only then.
    """

    learns: bool

    def observe(self, trees: Sequence[TokenTree], logits_BNV: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Learn from what the target said at the nodes that it scored, visited or not. Called before `commit`.

        Args:
            trees: as they were scored, one per row: those proposed, or parts of them. After the prefill they are the
                last tokens of the prompts alone, if those are known.
            logits_BNV: raw logits of their nodes; rows with fewer nodes repeat their root's.
            paths: per row the accepted nodes of `trees`, root first; empty for a row whose logits mean nothing.
        """
        ...


@runtime_checkable
class CreditedDraft(Protocol):
    """What a source has besides that can name the sources behind each node.

    Attributes:
        origins: per row and node of the trees last proposed, the names of the sources that proposed it; none for the
            root.
    """

    origins: Sequence[Sequence[Sequence[str]]]


@runtime_checkable
class WeighingDraft(Protocol):
    """What a source has besides that weighs what parts of it cost against what they bring.

    Attributes:
        promise: set by the engine. Of trees and of the batch rows that count it tells the tokens of a round to expect
            of the size that pays most, and the seconds of such a round without drafting; None where no sizes are
            chosen, or nothing is known yet.
    """

    promise: Callable[[Sequence[TokenTree], Sequence[int]], tuple[float, float] | None] | None


@dataclass(frozen=True, slots=True)
class Features:
    """Which hidden states of the target a source reads.

    Args:
        layers: as `output_hidden_states` of transformers counts them: 0 is what the first decoder layer is given, i
            what layer i - 1 gives. The number of layers itself is not among them: there transformers has `last`.
        last: whether the last hidden state comes behind those: after the final norm, as the LM head reads it.
    """

    layers: tuple[int, ...] = ()
    last: bool = False

    @property
    def count(self) -> int:
        """How many hidden states there are of each token."""
        return len(self.layers) + self.last


@runtime_checkable
class FeatureDraft(Protocol):
    """What a source has besides that reads hidden states of the target.

    Attributes:
        features: which ones.
    """

    features: Features

    def read(self, states: Sequence[Tensor | None]) -> None:
        """Take the hidden states of all tokens that the target has read since the last time, in order.

        Called after the prefill, before the first token is chosen, and after each round before `commit`. So at
        `propose` there are those of every token of a row but its root, as far back as this call has read the text.

        Args:
            states: per row `[tokens, features.count * hidden size]`, on the device and in the type of the target's
                last layer that is read; None for a row that did not advance.
        """
        ...
