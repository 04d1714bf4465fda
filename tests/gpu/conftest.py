"""Fixtures of the tests on GPUs: this machine's devices, and notebooks that use them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest
import torch

from gpumemwidget.backends.hardware import Hardware, detect_hardware
from tests.ownership.conftest import notebook

__all__ = ["N_GPUS", "clean", "hardware", "needs_two", "notebook"]

#: Asked of the driver, which starts CUDA nowhere.
N_GPUS = torch.cuda.device_count()
needs_two = pytest.mark.skipif(N_GPUS < 2, reason="needs two GPUs")


@pytest.fixture
def hardware() -> Iterator[Hardware]:
    """This machine's GPUs and its host memory; what earlier tests left in C++ is cleared."""
    torch.cuda.init()
    torch._C._cuda_clearCublasWorkspaces()
    hardware = detect_hardware()
    yield hardware
    hardware.close()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def clean() -> Iterator[None]:
    """All devices begin empty, and nothing stays on them."""
    torch.cuda.init()
    _clean_up()
    yield
    torch.cuda.set_device(0)
    torch.cuda.synchronize()
    _clean_up()


def _clean_up() -> None:
    for _ in range(3):
        gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
