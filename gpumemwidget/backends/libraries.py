"""Ask other libraries what they have of a GPU, and empty their caches when the user asks for it.

Only what is imported already is asked, for GPUs that this process is on: nothing is imported, and
no library or device is initialised. CuPy and JAX number GPUs as PyTorch does.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from gpumemwidget.backends.protocol import GpuLibrary

#: Libraries that may have memory of a GPU and can't be asked, by the modules that show them.
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
        jax, bridge = _find_module("jax"), _find_module("jax._src.xla_bridge")
        if jax is None or bridge is None or not bridge.backends_are_initialized():
            return None
        for found in jax.local_devices():
            if found.platform == "gpu" and found.local_hardware_id == _find_index(device):
                stats: dict[str, int] = found.memory_stats() or {}
                used, pool = stats.get("bytes_in_use"), stats.get("pool_bytes")
                if used is None:
                    return None
                return int(used), None if pool is None else max(int(pool) - int(used), 0)
        return None

    def empty_cache(self, device: str) -> None:
        """Do nothing: JAX gives nothing back."""


def list_known_libraries() -> tuple[GpuLibrary, ...]:
    """Return the libraries that say what they have."""
    return CupyPool(), JaxClient()


def list_silent_libraries() -> tuple[str, ...]:
    """Return the names of imported libraries that may have memory and can't be asked."""
    return tuple(name for module, name in _SILENT.items() if module in sys.modules)


def is_any_imported() -> bool:
    """Return whether a library other than PyTorch that may be on a GPU is imported."""
    modules = sys.modules
    return "cupy" in modules or "jax" in modules or any(name in modules for name in _SILENT)


def _find_module(name: str) -> Any:
    # Somebody may have put anything there; one that is being imported lacks its names.
    module = sys.modules.get(name)
    is_whole = type(module) is ModuleType and not getattr(module.__spec__, "_initializing", False)
    return module if is_whole else None


def _find_index(device: str) -> int:
    return int(device.partition(":")[2])
