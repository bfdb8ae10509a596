"""What a figure or a bug report depends on: versions, machine, threads."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import hf_treespec

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
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "cuda_devices": cuda,
    }


def hardware_of(device: torch.device) -> str:
    """Name of the chip behind a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    # platform.processor() is empty or "x86_64" on Linux.
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
