"""Names of the chips that models run on."""

from __future__ import annotations

import platform
from functools import lru_cache
from pathlib import Path

import torch

__all__ = ["cpu_name", "hardware_of"]


def hardware_of(device: torch.device) -> str:
    """Name of the chip behind a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """Name of the processor."""
    # platform.processor() is empty or "x86_64" on Linux.
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
