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
from gpumemwidget.model.devices import LibraryUse

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


class _Library:
    """A library that is there once its module is imported."""

    module: str

    @property
    def is_imported(self) -> bool:
        """Whether it may have memory."""
        return self.module in sys.modules


class CupyPool(_Library):
    """CuPy's default pool of memory of the GPU that is current in this thread.

    To ask for another one would make it the current one for a moment, and to go back may start a
    CUDA context where there was none.
    """

    name = "CuPy"
    module = "cupy"

    def read_use(self, device: str) -> LibraryUse | None:
        """Return what its arrays are in, and what it keeps for later."""
        cupy = _find_module("cupy")
        if cupy is None or cupy.cuda.runtime.getDevice() != _find_index(device):
            return None
        pool = cupy.get_default_memory_pool()
        used, cached = int(pool.used_bytes()), int(pool.free_bytes())
        return LibraryUse(self.name, used, cached, can_empty=True)

    def empty_cache(self, device: str) -> None:
        """Give back what no array is in, also pinned host memory (CuPy does not say how much)."""
        cupy = _find_module("cupy")
        if cupy is not None and cupy.cuda.runtime.getDevice() == _find_index(device):
            cupy.get_default_memory_pool().free_all_blocks()
            cupy.get_default_pinned_memory_pool().free_all_blocks()


class _KeepingLibrary(_Library):
    """A library that can't be asked to give back what it keeps for later."""

    def empty_cache(self, device: str) -> None:
        """Do nothing."""


class JaxClient(_KeepingLibrary):
    """JAX's allocator of a GPU, which takes most of it at once unless a setting says otherwise."""

    name = "JAX"
    module = "jax"

    def read_use(self, device: str) -> LibraryUse | None:
        """Return what its arrays are in, what it keeps for later, and its limit."""
        bridge = _find_module("jax._src.xla_bridge")
        # JAX's own lists initialise its backends, or have those of the default backend alone.
        clients = [] if bridge is None else list(bridge._backends.values())  # noqa: SLF001
        for found in [device for client in clients for device in client.local_devices()]:
            if found.platform == "gpu" and found.local_hardware_id == _find_index(device):
                stats: dict[str, int] = found.memory_stats() or {}
                used, pool = stats.get("bytes_in_use"), stats.get("pool_bytes")
                limit = stats.get("bytes_limit")
                if used is not None:
                    cached = None if pool is None else max(int(pool) - int(used), 0)
                    return LibraryUse(self.name, int(used), cached, limit)
        return None


class TensorflowContext(_KeepingLibrary):
    """TensorFlow's allocator of a GPU, once its eager context is initialised."""

    name = "TensorFlow"
    module = "tensorflow"

    def read_use(self, device: str) -> LibraryUse | None:
        """Return the bytes that tensors are in; what else is preallocated is unknown."""
        tensorflow = _find_module("tensorflow")
        eager = _find_module("tensorflow.python.eager.context")
        context = None if tensorflow is None or eager is None else eager.context_safe()
        if context is None or not context._initialized:  # noqa: SLF001 - nothing public says it
            return None
        config = tensorflow.config
        names = [gpu.name for gpu in config.get_visible_devices("GPU")]
        name = f"/physical_device:GPU:{_find_index(device)}"
        # Where a GPU is divided into several logical ones, their numbers are others.
        if name not in names or len(config.list_logical_devices("GPU")) != len(names):
            return None
        info = config.experimental.get_memory_info(f"GPU:{names.index(name)}")
        return LibraryUse(self.name, int(info["current"]))


class RmmResource(_KeepingLibrary):
    """RMM's memory resource of a GPU, which cuDF and others allocate from."""

    name = "RMM"
    module = "rmm"

    def read_use(self, device: str) -> LibraryUse | None:
        """Return the bytes in use by RMM's statistics, if they are on.

        They count from when they were switched on: what the pool has beside them may be in use.
        """
        rmm = _find_module("rmm")
        resource = None if rmm is None else rmm.mr.get_per_device_resource(_find_index(device))
        while resource is not None:
            if isinstance(resource, rmm.mr.StatisticsResourceAdaptor):
                # In ``with rmm.statistics.statistics()`` they begin anew, and may fall below 0.
                used = int(resource.allocation_counts.current_bytes)
                return LibraryUse(self.name, max(used, 0))
            resource = resource.get_upstream() if hasattr(resource, "get_upstream") else None
        return None


def list_known_libraries() -> tuple[GpuLibrary, ...]:
    """Return the libraries that say what they have."""
    return CupyPool(), JaxClient(), TensorflowContext(), RmmResource()


def list_silent_libraries() -> tuple[str, ...]:
    """Return the names of imported libraries that may have memory and not say so."""
    return tuple(name for module, name in _SILENT.items() if module in sys.modules)


def is_silent_one_imported() -> bool:
    """Return whether a library that may have memory and not say so is imported."""
    return not sys.modules.keys().isdisjoint(_SILENT)


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
