"""Trees as JSON: the text form is frozen, everything else is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_treespec import TreeConfigError
from hf_treespec.tree import TokenTree, shape_from_json, shape_to_json, tree_from_json, tree_to_json


@given(st.integers(0, 2**32), st.integers(1, 30))
def test_round_trip(seed: int, nodes: int) -> None:
    rng = random.Random(seed)
    tokens = tuple(rng.sample(range(200_000), nodes))
    tree = TokenTree(tokens, (-1, *(rng.randrange(node) for node in range(1, nodes))))
    assert tree_from_json(tree_to_json(tree)) == tree
    assert shape_from_json(shape_to_json(tree)) == tree


def test_the_text_is_frozen() -> None:
    tree = TokenTree((5, 8, 9), (-1, 0, 0))
    assert json.loads(tree_to_json(tree)) == {
        "version": 1, "kind": "tree", "tokens": [5, 8, 9], "parents": [-1, 0, 0],
    }  # fmt: skip
    assert json.loads(shape_to_json(tree)) == {
        "version": 1, "kind": "shape", "ranks": [5, 8, 9], "parents": [-1, 0, 0],
    }  # fmt: skip


GOOD = {"version": 1, "kind": "tree", "tokens": [5, 8], "parents": [-1, 0]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "expected a JSON object of kind 'tree' and version 1, got"),
        (json.dumps({**GOOD, "version": 2}), "version 1, got"),
        (json.dumps({**GOOD, "kind": "shape"}), "kind 'tree'"),
        (json.dumps({"version": 1, "kind": "tree", "tokens": [5]}), r"lacks \['parents'\]"),
        (json.dumps({"version": 1, "kind": "tree", "ranks": [5]}), r"lacks \['parents', 'tokens'\]"),
        (json.dumps({**GOOD, "parents": [-1, 1]}), r"parents\[1\]=1"),
        (json.dumps({**GOOD, "tokens": [5]}), "two arrays"),
        ("no JSON", "tree"),
        (json.dumps({**GOOD, "tokens": 5}), "tokens"),
        (json.dumps({**GOOD, "tokens": "58"}), "tokens"),
        (json.dumps({**GOOD, "tokens": [5, 8.5]}), "tokens"),
        (json.dumps({**GOOD, "tokens": [5, None]}), "tokens"),
    ],
)
def test_anything_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(TreeConfigError, match=message):
        tree_from_json(text)


@pytest.mark.parametrize(("write", "read"), [(tree_to_json, shape_from_json), (shape_to_json, tree_from_json)])
def test_a_tree_is_no_shape(write: Callable[[TokenTree], str], read: Callable[[str], TokenTree]) -> None:
    with pytest.raises(TreeConfigError, match="expected a JSON object of kind"):
        read(write(TokenTree.root_only(1)))
