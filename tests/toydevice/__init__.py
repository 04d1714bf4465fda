"""A device of PyTorch's kind for extensions, in host memory: two of them, with real tensors.

``device.cpp`` is compiled for the installed torch, once; programs that begin with ``make_start()``
have tensors on ``toy:0`` and ``toy:1``, with autograd, optimizers and copies between the two. What
holds there of any accelerator is so tested without one.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

__all__ = ["make_start"]

_SOURCE = Path(__file__).with_name("device.cpp")
#: The first release whose allocators of extensions have statistics for ``torch.accelerator``.
_FIRST = (2, 9)

_START = """
import types
import torch
torch.utils.rename_privateuse1_backend("toy")
torch.ops.load_library({library!r})
toy = types.ModuleType("torch.toy")
toy.is_available = lambda: True
toy.device_count = lambda: 2
toy.current_device = lambda: torch.accelerator.current_device_index()
toy.is_initialized = lambda: torch._C._accelerator_isAllocatorInitialized()
toy._is_in_bad_fork = lambda: False
toy.manual_seed_all = lambda seed: None
torch._register_device_module("toy", toy)
torch.utils.generate_methods_for_privateuse1_backend()
"""


def make_start() -> str:
    """The beginning of a program that is to have the device; skips where it can't be built."""
    return _START.format(library=str(_build()))


@functools.cache
def _build() -> Path:
    import torch

    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler to build a device with")
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _FIRST:
        pytest.skip(f"torch {torch.__version__} has no statistics for devices of extensions")
    key = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    user = getattr(os, "getuid", int)()
    folder = Path(tempfile.gettempdir()) / f"gpumemwidget-toydevice-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"device-{key}.so"
    if not library.exists():
        root = Path(torch.__file__).parent
        made = folder / f"{library.name}.{os.getpid()}"
        done = subprocess.run(
            [
                *(compiler, "-std=c++20", "-O0", "-shared", "-fPIC", str(_SOURCE)),
                *("-I", str(root / "include"), "-I", str(root / "include/torch/csrc/api/include")),
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
                *("-L", str(root / "lib"), "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root / 'lib'}"),
                *("-o", str(made)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        made.replace(library)
    return library
