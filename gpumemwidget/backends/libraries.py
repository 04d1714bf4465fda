"""Say what other libraries have of a GPU, and empty their caches when the user asks for it.

Only what is imported already is asked, for GPUs that this process is on: nothing is imported, and
no library or device is initialised. These libraries number GPUs as PyTorch does.

cuBLAS and cuBLASLt can't be asked: PyTorch allocates their workspaces in C++ with its own
allocator, so no object of Python's leads to them, and nothing but their size shows what they are.
"""

from __future__ import annotations

import os
import re
import sys
from types import ModuleType
from typing import Any

from gpumemwidget.backends.protocol import GpuLibrary

_KIB, _MIB = 1 << 10, 1 << 20

#: Libraries that may have memory of a GPU and not say so, by the modules that show them.
_SILENT = {
    "bitsandbytes": "bitsandbytes",
    "cudf": "cuDF",
    "faiss": "Faiss",
    "llama_cpp": "llama.cpp",
    "numba.cuda.cudadrv.devicearray": "Numba",
    "onnxruntime": "ONNX Runtime",
    "pycuda.driver": "PyCUDA",
    "rmm": "RMM",
    "tensorflow": "TensorFlow",
    "tensorrt": "TensorRT",
    "vllm": "vLLM",
}


class CupyPool:
    """CuPy's default pool of memory of the GPU that is current in this thread.

    To ask for another one would make it the current one for a moment, and to go back may start a
    CUDA context where there was none.
    """

    name = "CuPy"
    can_empty = True

    def read_use(self, device: str) -> tuple[int, int | None] | None:
        """Return the bytes in use and those kept for later."""
        cupy = _find_module("cupy")
        if cupy is None or cupy.cuda.runtime.getDevice() != _find_index(device):
            return None
        pool = cupy.get_default_memory_pool()
        return int(pool.used_bytes()), int(pool.free_bytes())

    def empty_cache(self, device: str) -> None:
        """Give back what no array is in, of pinned host memory too."""
        cupy = _find_module("cupy")
        if cupy is not None and cupy.cuda.runtime.getDevice() == _find_index(device):
            cupy.get_default_memory_pool().free_all_blocks()
            cupy.get_default_pinned_memory_pool().free_all_blocks()


class JaxClient:
    """JAX's allocator of a GPU, which takes most of it at once unless a setting says otherwise."""

    name = "JAX"
    can_empty = False

    def read_use(self, device: str) -> tuple[int, int | None] | None:
        """Return the bytes in use and those kept for later; the latter may be unknown."""
        bridge = _find_module("jax._src.xla_bridge")
        # JAX's own lists initialise its backends, or have those of the default backend alone.
        clients = [] if bridge is None else list(bridge._backends.values())  # noqa: SLF001
        for found in [device for client in clients for device in client.local_devices()]:
            if found.platform == "gpu" and found.local_hardware_id == _find_index(device):
                stats: dict[str, int] = found.memory_stats() or {}
                used, pool = stats.get("bytes_in_use"), stats.get("pool_bytes")
                if used is not None:
                    return int(used), None if pool is None else max(int(pool) - int(used), 0)
        return None

    def empty_cache(self, device: str) -> None:
        """Do nothing: JAX gives nothing back before the process ends."""


def list_known_libraries() -> tuple[GpuLibrary, ...]:
    """Return the libraries that say what they have."""
    return CupyPool(), JaxClient()


def list_silent_libraries() -> tuple[str, ...]:
    """Return the names of imported libraries that may have memory and not say so."""
    return tuple(name for module, name in _SILENT.items() if module in sys.modules)


def is_any_imported() -> bool:
    """Return whether a library other than PyTorch that may be on a GPU is imported."""
    return not sys.modules.keys().isdisjoint(("cupy", "jax", *_SILENT))


def _find_module(name: str) -> Any:
    # Somebody may have put anything there; one that is being imported lacks its names.
    module = sys.modules.get(name)
    is_whole = type(module) is ModuleType and not getattr(module.__spec__, "_initializing", False)
    return module if is_whole else None


def _find_index(device: str) -> int:
    return int(device.partition(":")[2])


# -- Workspaces of cuBLAS --------------------------------------------------------------------------


def count_cublas_bytes(major: int) -> int:
    """Return the size of a cuBLAS workspace, of which there is one for each thread and stream.

    By the environment, else by the GPU's generation: 32 MiB on Hopper and Blackwell, 8.125 MiB
    (``:4096:2:16:8``) on others. ``getChosenWorkspaceSize`` in
    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/cuda/CublasHandlePool.cpp

    Args:
        major: the first number of the GPU's compute capability, 9 of an H100.

    Returns:
        Its size, in bytes.
    """
    default = 32 * _MIB if major in (9, 10, 12) else 8 * _MIB + 128 * _KIB
    return parse_workspace_config(os.environ.get("CUBLAS_WORKSPACE_CONFIG"), default)


def count_cublaslt_bytes() -> int:
    """Return the size of a cuBLASLt workspace, in bytes: by the environment, else 1 MiB."""
    return parse_kib(os.environ.get("CUBLASLT_WORKSPACE_SIZE"), _MIB)


def parse_workspace_config(config: str | None, default: int) -> int:
    """Return the bytes of ``:4096:2:16:8``: two times 4096 KiB and eight times 16."""
    pairs = re.findall(r":(\d+):(\d+)", config or "")
    if not pairs:
        return default
    return sum(int(n_kib) * int(count) for n_kib, count in pairs) * _KIB


def parse_kib(text: str | None, default: int) -> int:
    """Return the bytes of a number of KiB; ``default`` for what is none."""
    return int(text) * _KIB if text is not None and text.isdigit() else default
