"""The machine that a figure was measured on: without it no figure means anything."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

__all__ = ["describe_machine", "list_devices"]

_PACKAGES = ("torch", "ipython", "ipykernel", "jupyterlab", "anywidget")


def describe_machine() -> dict[str, str]:
    """The processor, memory, GPUs and versions, as words."""
    return {
        "processor": f"{_read_processor()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "GPU": ", ".join(_list_gpu_names()) or "none",
        "system": platform.platform(),
        "Python": platform.python_version(),
        **{name: version for name in _PACKAGES if (version := _read_version(name))},
    }


def list_devices() -> list[str]:
    """The CUDA devices that the benchmarks use: all that torch sees."""
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def _list_gpu_names() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _read_processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _read_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
