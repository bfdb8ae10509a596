"""Trees from a draft model of another tokenizer.

The committed text is kept in the draft's tokens too (`Mirror`). The draft grows a tree in its own tokens behind it;
each path is decoded, encoded by the target's tokenizer where it follows the target's last tokens, and the paths that
come out are merged into one tree of target tokens. The target chooses its tokens as ever, so the text is its own
whatever the mapping does; a poor mapping only costs acceptance.

The target's noise belongs to its ids and positions, which the draft does not have: under sampling the draft proposes
its most probable children, not the coupled ones, and fewer of them are accepted than of a draft that shares the
target's tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

from hf_treespec.draft.base import DraftRow
from hf_treespec.draft.codec import REPLACEMENT, TextCodec, shared_specials
from hf_treespec.draft.mirror import Mirror
from hf_treespec.draft.model import ModelDraft
from hf_treespec.tree import TokenTree, TreeBuilder, TreeLimits
from hf_treespec.verify import DraftLaws

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RetokenizedDraft"]

# Target tokens in front of a proposal that decide how it is encoded.
_CONTEXT = 4
# Bounds of draft tokens per target token, which is measured on the text so far.
_RATIOS = (0.5, 3.0)
_MOST_NODES = 4096


class RetokenizedDraft:
    """Draft source over a draft source with other tokens.

    Args:
        draft: the draft model, with the ids of its own vocabulary.
        tokenizer: of the target.
        assistant_tokenizer: of the draft.
        vocab_size: ids that the target knows; no others are proposed.
    """

    name = "retokenized"
    cheap = False

    def __init__(
        self,
        draft: ModelDraft,
        tokenizer: PreTrainedTokenizerBase,
        assistant_tokenizer: PreTrainedTokenizerBase,
        *,
        vocab_size: int,
    ) -> None:
        self._draft = draft
        self._target = TextCodec(tokenizer)
        self._own = TextCodec(assistant_tokenizer)
        self._vocab = vocab_size
        self._to_own = shared_specials(self._target, self._own)
        self._to_target = shared_specials(self._own, self._target)
        self._mirrors: dict[int, Mirror] = {}

    @property
    def forward_seconds(self) -> float:
        """Time in forwards of the draft model."""
        return self._draft.forward_seconds

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[TreeLimits]) -> list[TokenTree]:
        """One tree per row; see `Draft.propose`."""
        mirrors = [self._mirror(row, limit) for row, limit in zip(rows, limits, strict=True)]
        own_limits = [self._own_limits(mirror, limit) for mirror, limit in zip(mirrors, limits, strict=True)]
        # A row without a budget may have no token of the draft's yet; its root is never read.
        own_rows = [m.row if m.row.tokens else DraftRow(index=m.row.index, tokens=[0], settled=0) for m in mirrors]
        trees = self._draft.propose(own_rows, own_limits)
        return [
            self._translated(row.tokens, mirror.row.tokens, tree, scores, limit)
            if tree.drafted
            else TokenTree.root_only(row.tokens[-1])
            for row, mirror, tree, scores, limit in zip(rows, mirrors, trees, self._draft.scores, limits, strict=True)
        ]

    def laws(self, batch: int) -> DraftLaws | None:
        """None: no node is random; see `Draft.laws`."""
        return None

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep what the draft has read of the settled text; see `Draft.commit`."""
        self._draft.commit(paths)

    def _mirror(self, row: DraftRow, limit: TreeLimits) -> Mirror:
        mirror = self._mirrors.get(row.index)
        if mirror is None:
            mirror = self._mirrors[row.index] = Mirror(row.index, self._target, self._own, self._to_own)
        if limit.max_nodes:
            mirror.update(row.tokens)
        return mirror

    def _own_limits(self, mirror: Mirror, limit: TreeLimits) -> TreeLimits:
        if not limit.max_nodes or not mirror.row.tokens:
            return limit.capped(max_nodes=0)
        low, high = _RATIOS
        ratio = min(max(len(mirror.row.tokens) / mirror.read, low), high)
        return TreeLimits(
            max_nodes=min(ceil(limit.max_nodes * max(1.0, ratio)), _MOST_NODES),
            max_depth=ceil(limit.max_depth * ratio),
            max_children=limit.max_children,
        )

    def _translated(
        self, text: Sequence[int], own_text: Sequence[int], tree: TokenTree, scores: Sequence[float], limit: TreeLimits
    ) -> TokenTree:
        """The draft's tree in target tokens."""
        context, before, partial = self._target.split_partial(self._target.run_before(text, len(text), _CONTEXT))
        texts = self._texts(own_text, tree)
        ends = [node for node in texts if not any(child in texts for child in tree.children(node))]
        encoded = self._target.encode_after(context, before, [texts[node] for node in ends])
        paths: list[list[tuple[int, float]]] = []
        for node, ids in zip(ends, encoded, strict=True):
            # The target has begun a character: only what completes it can follow.
            if ids[: len(partial)] != partial:
                continue
            steps = self._steps(tree, node, ids, texts, scores)
            closing = self._to_target.get(tree.tokens[node]) if tree.tokens[node] in self._own.specials else None
            if closing is not None and len(steps) == len(ids):
                steps.append((closing, scores[node]))
            paths.append(steps[len(partial) :][: limit.max_depth])
        return _merged(text[-1], paths, limit)

    def _texts(self, own_text: Sequence[int], tree: TokenTree) -> dict[int, str]:
        """The text of each node's path, in order of nodes; special tokens have none, and nothing comes below them."""
        context = self._own.run_before(own_text, len(own_text), _CONTEXT)
        before = self._own.decode([context])[0]
        texts = {0: ""}
        closed: set[int] = set()
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            if parent not in texts or parent in closed:
                continue
            if tree.tokens[node] in self._own.specials:
                texts[node] = texts[parent]
                closed.add(node)
                continue
            whole = self._own.decode([[*context, *tree.path_tokens(node)[1:]]])[0]
            if whole.startswith(before):
                # Up to the first bytes that are no whole character; the parent may have more before a missing byte.
                texts[node] = max(texts[parent], whole[len(before) :].partition(REPLACEMENT)[0], key=len)
        del texts[0]
        return texts

    def _steps(
        self, tree: TokenTree, node: int, ids: Sequence[int], texts: dict[int, str], scores: Sequence[float]
    ) -> list[tuple[int, float]]:
        """Target tokens of one path, up to the first that the target cannot mean, each with its score.

        A token is as likely as the draft's node whose text reaches its end.
        """
        above = []
        while node:
            above.append((len(texts[node]), scores[node]))
            node = tree.parents[node]
        steps: list[tuple[int, float]] = []
        end = 0
        for token in ids:
            if token == self._target.unknown or token >= self._vocab:
                break
            end += self._target.width(token)
            while len(above) > 1 and above[-1][0] < end:
                above.pop()
            steps.append((token, above[-1][1]))
        return steps


def _merged(root: int, paths: Sequence[Sequence[tuple[int, float]]], limit: TreeLimits) -> TokenTree:
    """One tree of the best nodes of all paths; a node that several paths share has the score of the best of them."""
    children: list[dict[int, int]] = [{}]
    scores = [0.0]
    for path in paths:
        node = 0
        for token, score in path:
            child = children[node].get(token)
            if child is None:
                child = children[node][token] = len(scores)
                children.append({})
                scores.append(score)
            scores[child] = max(scores[child], score)
            node = child
    builder = TreeBuilder(root)
    queue = [(0, 0)]
    for node, place in queue:
        best = sorted(children[node].items(), key=lambda item: -scores[item[1]])
        for token, child in best[: limit.max_children]:
            queue.append((child, builder.add(place, token, scores[child] - scores[node])))
    return builder.freeze(builder.best(limit.max_nodes))[0]
