"""Account for memory beside the walk's storages: allocators' blocks, other libraries' arrays.

A storage is smaller than its block, which the allocator rounds up and may not have split, and two
storages may lie in one block. So the account adds up blocks. Blocks that no storage claims are
PyTorch's own: it allocates them in C++ and keeps them, and no object of Python's leads to them.
What they are follows from the pool they are in and the size that was asked for (which was held
against the C++ stacks of such blocks, on an H100 with torch 2.11).

Arrays of other libraries on a GPU are no part of the account: PyTorch's allocator does not count
them. They are listed by the names that hold them. Variables are looked at, and lists, tuples and
dictionaries in them. Only CuPy's and JAX's own attributes are read: that allocates nothing and
waits for nothing.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set, Sized
from itertools import islice
from types import ModuleType
from typing import Any, cast

from gpumemwidget.backends.libraries import (
    count_cublas_bytes,
    count_cublaslt_bytes,
    parse_kib,
    parse_workspace_config,
)
from gpumemwidget.model.devices import Block, Segment
from gpumemwidget.model.ownership import LibraryArray, MemoryKind, Owned
from gpumemwidget.ownership.graph.objects import is_a, is_one_of, read_namespace
from gpumemwidget.ownership.graph.torch_reader import find_torch
from gpumemwidget.ownership.labels import describe_key
from gpumemwidget.ownership.shell import Shell
from gpumemwidget.tracing.sources import format_allocation


class BlockMap:
    """Finds blocks by address, in the snapshot of ``MemoryBackend.read_segments``.

    The numbers of the notebook's cells, by the names of their compiled files, name the line that
    allocated a block where a history was recorded.
    """

    def __init__(
        self, segments: Iterable[Segment], *, cells: Mapping[str, int] | None = None
    ) -> None:
        self._cells = cells or {}
        self._workspace_sizes = functools.cache(read_workspace_sizes)
        #: For each device the blocks in use, with their segments, in the order of addresses.
        self._blocks: dict[str, list[tuple[Segment, Block]]] = {}
        self._with_pools: set[str] = set()
        for segment in sorted(segments, key=lambda segment: segment.address):
            if segment.is_private:
                self._with_pools.add(segment.device)
            in_use = (
                (segment, block) for block in segment.blocks if block.state == "active_allocated"
            )
            self._blocks.setdefault(segment.device, []).extend(in_use)
        self._starts = {
            device: [block.address for _, block in blocks]
            for device, blocks in self._blocks.items()
        }

    @property
    def devices(self) -> Set[str]:
        """The devices of the snapshot."""
        return self._blocks.keys()

    def find(self, device: str, address: int) -> Block | None:
        """Return the block in use that contains an address.

        ``None`` for memory that the allocator does not count: another library's (DLPack, a C++
        extension with an allocator of its own), or the outputs of a CUDA graph, which
        ``torch.compile(mode="reduce-overhead")`` frees under their tensors.
        """
        place = bisect_right(self._starts.get(device, ()), address) - 1
        if place < 0:
            return None
        _, block = self._blocks[device][place]
        return block if address < block.address + block.n_bytes else None

    def list_kinds(self, device: str) -> Iterator[tuple[Block, MemoryKind]]:
        """Yield the device's blocks in use, with what each is if no storage claims it."""
        for segment, block in self._blocks.get(device, ()):
            yield block, self._describe(device, segment, block, {})[0]

    def describe_unclaimed(
        self,
        claimed: Collection[tuple[str, int]],
        pools: Mapping[tuple[int, int], str] | None = None,
    ) -> tuple[Owned, ...]:
        """Describe the blocks that no storage claims, biggest first; similar ones are one line.

        Claimed are devices and addresses; the pools are those that ``name_pools`` found.
        """
        alike: dict[tuple[str, MemoryKind, str, str | None], list[Block]] = {}
        for device, in_use in self._blocks.items():
            for segment, block in in_use:
                if (device, block.address) not in claimed:
                    kind, words = self._describe(device, segment, block, pools or {})
                    line = format_allocation(block.frames, self._cells)
                    alike.setdefault((device, kind, words, line), []).append(block)
        owned = [
            Owned(
                device,
                sum(block.n_bytes for block in blocks),
                kind,
                (words,),
                "nowhere",
                allocated_at=line,
                rounding_bytes=add_known(map(find_rounding, blocks)),
            )
            for (device, kind, words, line), blocks in alike.items()
        ]
        return tuple(sorted(owned, key=lambda line: (line.device, -line.n_bytes, line.owner)))

    def _describe(
        self, device: str, segment: Segment, block: Block, pools: Mapping[tuple[int, int], str]
    ) -> tuple[MemoryKind, str]:
        asked_bytes = block.n_bytes if block.requested_bytes is None else block.requested_bytes
        is_workspace = asked_bytes in self._workspace_sizes(device)
        if segment.is_private:
            name = pools.get(segment.pool_id)
            of = f"of {name}" if name else f"{segment.pool_id[0]}, {segment.pool_id[1]}"
            what = "cuBLAS workspace in the private pool" if is_workspace else "private pool"
            return "CUDA-graph pool", f"{what} {of} on {device}"
        if is_workspace:
            return "cuBLAS workspace", f"cuBLAS workspace of {device}"
        # A generator that CUDA graphs use keeps its seed and its offset on the GPU, 8 bytes each:
        # https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/cuda/CUDAGeneratorImpl.cpp
        if asked_bytes == 8 and device in self._with_pools:
            return "CUDA-graph pool", f"random state of CUDA graphs on {device}"
        return "unknown", f"allocated on {device}, held by no Python object"


def find_rounding(block: Block) -> int | None:
    """Return the bytes of a block beyond its request; ``None`` if the request is unknown."""
    asked = block.requested_bytes
    return None if asked is None or asked > block.n_bytes else block.n_bytes - asked


def add_known(sizes: Iterable[int | None]) -> int | None:
    """Return the sum of sizes in bytes; ``None`` if one of them is unknown."""
    known = list(sizes)
    return None if None in known else sum(n_bytes for n_bytes in known if n_bytes is not None)


def name_pools(named: Iterable[tuple[str, object]]) -> dict[tuple[int, int], str]:
    """Return the names of private memory pools: of their CUDA graphs and ``MemPool`` objects."""
    torch = find_torch()
    if torch is None or not torch.cuda.is_initialized():
        return {}
    # Their own classes: what derives from them may be the user's.
    graph_type = torch._C._CUDAGraph  # noqa: SLF001
    pool_type = getattr(torch._C, "_MemPool", None)  # noqa: SLF001 - since 2.5
    pools: dict[tuple[int, int], str] = {}
    for name, target in named:
        if is_one_of(type(target), graph_type):
            try:
                pool_id = graph_type.pool(target)
            except RuntimeError:
                continue  # Nothing was captured yet.
        elif pool_type is not None and is_one_of(type(target), pool_type):
            pool_id = pool_type.id.__get__(target)
        else:
            continue
        pools[pool_id] = f"{pools[pool_id]}, {name}" if pool_id in pools else name
    return pools


def read_workspace_sizes(device: str) -> frozenset[int]:
    """Return the sizes of cuBLAS and cuBLASLt workspaces on a device, for each handle and stream.

    From its own rules, https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/cuda/CublasHandlePool.cpp:
    the environment's, else by the device's generation.
    """
    torch = find_torch()
    index = device.partition(":")[2]
    # Before CUDA is in use the question could initialise it.
    if torch is None or not torch.cuda.is_initialized() or not index.isdigit():
        return frozenset()
    properties = torch.cuda.get_device_properties(int(index))
    # Since 2.15 they can be read, and set.
    names = ("_cuda_getCublasWorkspaceSize", "_cuda_getCublasLtWorkspaceSize")
    readers = [getattr(torch._C, name) for name in names if hasattr(torch._C, name)]  # noqa: SLF001
    if len(readers) == len(names):
        return frozenset({read() for read in readers} - {0})
    if torch.version.hip is not None:
        is_large = properties.gcnArchName.startswith(("gfx94", "gfx95"))
        blas = parse_workspace_config(
            _getenv("CUBLAS_WORKSPACE_CONFIG", "HIPBLAS_WORKSPACE_CONFIG"),
            (128 if is_large else 32) << 20,
        )
        lt = parse_kib(_getenv("CUBLASLT_WORKSPACE_SIZE", "HIPBLASLT_WORKSPACE_SIZE"), 76 << 20)
    else:
        blas, lt = count_cublas_bytes(properties.major), count_cublaslt_bytes()
    return frozenset({blas, lt} - {0})


def _getenv(*names: str) -> str | None:
    return next((os.environ[name] for name in names if name in os.environ), None)


# -- Arrays of other libraries ---------------------------------------------------------------------

_read_name: Any = type.__dict__["__name__"].__get__

#: An array's memory on a GPU, with what it is compared by.
_Found = Iterator[tuple[object, LibraryArray]]


def list_library_arrays(
    shell: Shell, deadline_s: float
) -> tuple[tuple[LibraryArray, ...], tuple[str, ...], bool]:
    """Return CuPy's and JAX's arrays on GPUs, the largest first, each memory once.

    Also the names of libraries with arrays that could not be read, and whether everything was
    looked at: not so where there was too much, or ``deadline_s`` on ``time.perf_counter`` passed.
    """
    found: dict[object, LibraryArray] = {}
    unread: dict[str, None] = {}
    known = list(_list_classes())
    if not known:
        return (), (), True
    arrays, is_whole = _find_arrays(shell, [cls for cls, _, _ in known], deadline_s)
    for path, value in arrays:
        if time.perf_counter() > deadline_s:
            is_whole = False
            break
        for cls, library, describe in known:
            if type(value) is cls:
                try:
                    for key, array in describe(path, value):
                        found.setdefault(key, array)
                except Exception:  # noqa: BLE001 - the library's own code: it costs only this row
                    unread[library] = None
    listed = tuple(sorted(found.values(), key=lambda array: -array.n_bytes))
    return listed, tuple(unread), is_whole


def _list_classes() -> Iterator[tuple[object, str, Callable[[str, Any], _Found]]]:
    """Yield the class of each imported library's arrays, with the function that describes one."""
    for module_name, name, library, describe in (
        ("cupy", "ndarray", "CuPy", _describe_cupy),
        ("jax._src.array", "ArrayImpl", "JAX", _describe_jax),
    ):
        module = sys.modules.get(module_name)
        cls = read_namespace(module).get(name) if is_a(module, ModuleType) else None
        if is_a(cls, type):
            yield cls, library, describe


def _find_arrays(
    shell: Shell, classes: list[object], deadline_s: float
) -> tuple[list[tuple[str, object]], bool]:
    """Return objects of these classes by path, the outermost first, and whether that is all."""
    # Items that are looked at in one container and in all take about 0.1 s. Numbers and texts are
    # quickly passed over; containers and arrays among them cost more, and have a limit too.
    max_items, max_items_of_all, max_found = 500_000, 2_000_000, 100_000
    # By identity: to look a class up asks its metaclass for a hash.
    containers = {id(list), id(tuple), id(dict)}
    wanted = containers | {id(cls) for cls in classes}
    queue = [(name, shell.user_ns.get(name), 0) for name in shell.list_user_names()]
    found: list[tuple[str, object]] = []
    seen: set[int] = set()
    room, is_whole = max_items_of_all, True
    for path, value, depth in queue:
        kind = id(type(value))
        if kind not in wanted or id(value) in seen:
            continue
        seen.add(id(value))
        if kind not in containers:
            found.append((path, value))
            continue
        n_items = len(cast("Sized", value))
        most = min(room, max_items) if depth < 8 else 0
        if time.perf_counter() > deadline_s:
            most = 0
        room -= min(n_items, most)
        is_whole &= n_items <= most
        for key, item in _list_items(value, most):
            if id(type(item)) in wanted:
                if len(queue) >= max_found:
                    is_whole = False
                    break
                queue.append((f"{path}[{describe_key(key)}]", item, depth + 1))
    return found, is_whole


def _list_items(value: Any, most: int) -> Iterable[tuple[object, object]]:
    """Return the first items of a list, a tuple or a dictionary with their indices or keys."""
    if type(value) is not dict:
        return enumerate(value[:most])
    try:
        return list(islice(value.items(), most))
    except RuntimeError:  # Another thread has changed it meanwhile.
        return []


def _describe_cupy(path: str, array: Any) -> _Found:
    memory = array.data.mem
    # Memory that CuPy does not own is another library's: PyTorch's account has its own.
    if _read_name(type(memory)) != "UnownedMemory" and memory.size:
        what = f"{array.dtype.name}{list(array.shape)}"
        device = f"cuda:{int(memory.device_id)}"
        yield int(memory.ptr), LibraryArray(device, path, int(memory.size), "CuPy", what)


def _describe_jax(path: str, array: Any) -> _Found:
    if array.is_deleted():
        return
    sharding, dtype = array.sharding, array.dtype
    n_bytes = math.prod(sharding.shard_shape(array.shape)) * int(dtype.itemsize)
    what = f"{dtype.name}{list(array.shape)}"
    for device in sharding.addressable_devices:
        if device.platform == "gpu" and n_bytes:
            name = f"cuda:{int(device.local_hardware_id)}"
            yield (id(array), name), LibraryArray(name, path, n_bytes, "JAX", what)
