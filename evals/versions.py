"""What an eval ran with."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import transformers

import hf_treespec

__all__ = ["versions"]


def versions() -> dict[str, str]:
    """Of everything that makes a text; the library's own with a digest of its source."""
    told = hashlib.sha256()
    root = Path(hf_treespec.__file__).parent
    for path in sorted(root.rglob("*.py")):
        told.update(f"{path.relative_to(root)}".encode() + b"\0" + path.read_bytes())
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_treespec": f"{hf_treespec.__version__}, source {told.hexdigest()[:12]}",
    }
