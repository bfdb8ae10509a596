"""Trees and shapes as small JSON objects, for files, logs and tests."""

from __future__ import annotations

import json

from hf_treespec.errors import TreeConfigError
from hf_treespec.tree.topology import TokenTree

__all__ = ["shape_from_json", "shape_to_json", "tree_from_json", "tree_to_json"]

_VERSION = 1


def _dump(kind: str, key: str, tree: TokenTree) -> str:
    return json.dumps({"version": _VERSION, "kind": kind, key: list(tree.tokens), "parents": list(tree.parents)})


def _load(text: str, kind: str, key: str) -> TokenTree:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise TreeConfigError(f"expected JSON of kind {kind!r}, got {text[:80]!r}: {error}") from error
    if not isinstance(data, dict) or data.get("version") != _VERSION or data.get("kind") != kind:
        raise TreeConfigError(f"expected a JSON object of kind {kind!r} and version {_VERSION}, got {text[:80]!r}")
    missing = {key, "parents"} - data.keys()
    if missing:
        raise TreeConfigError(f"{kind} JSON lacks {sorted(missing)}")
    for name in (key, "parents"):
        values = data[name]
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise TreeConfigError(f"{kind} JSON: {name} must be a list of integers, got {values!r:.80}")
    return TokenTree(tuple(data[key]), tuple(data["parents"]))


def tree_to_json(tree: TokenTree) -> str:
    """JSON text of a tree: tokens and parents."""
    return _dump("tree", "tokens", tree)


def tree_from_json(text: str) -> TokenTree:
    """Inverse of `tree_to_json`; raises `TreeConfigError` on anything else."""
    return _load(text, "tree", "tokens")


def shape_to_json(shape: TokenTree) -> str:
    """JSON text of a static shape: ranks and parents."""
    return _dump("shape", "ranks", shape)


def shape_from_json(text: str) -> TokenTree:
    """Inverse of `shape_to_json`; raises `TreeConfigError` on anything else."""
    return _load(text, "shape", "ranks")
