"""What a figure or a bug report depends on: versions, machine, threads."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import hf_treespec
from hf_treespec.machine import cpu_name, hardware_of

__all__ = ["describe_environment", "hardware_of"]

_PACKAGES = ("torch", "transformers", "accelerate", "tokenizers", "triton")


def describe_environment() -> dict[str, Any]:
    """Versions (None: not installed), platform, CPU, threads and CUDA, ready for JSON."""
    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "hf_treespec": hf_treespec.__version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "cuda_devices": cuda,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
