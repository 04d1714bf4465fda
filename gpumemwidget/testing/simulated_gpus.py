"""Simulated GPUs with their history and pinned memory, and a placeholder of ``torch``."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from gpumemwidget.allocator.blocks import SimulatedBlock, Statistic
from gpumemwidget.allocator.caching import CachingAllocator, DeviceFullError
from gpumemwidget.allocator.rules import AllocatorSettings
from gpumemwidget.backends.snapshot import SMALL_PAGE_BYTES
from gpumemwidget.errors import BadInputError
from gpumemwidget.model.devices import Segment
from gpumemwidget.model.traces import TraceAction
from gpumemwidget.units import format_bytes

#: The simulation's own folders, whose frames are no part of a program's stack.
_OWN_PATHS = tuple(str(Path(__file__).parents[1] / name) for name in ("testing", "allocator"))


class SimulatedGpus:
    """One or several GPUs, addressed by index or as ``"cuda:0"``.

    A GPU is in use from ``touch`` or its first allocation on. All methods may be called from any
    thread.

    Attributes:
        allocators: the GPUs' allocators, by index.
        pinned: what PyTorch's allocator of pinned host memory has from the system.
        name: what each GPU is called.
    """

    name = "Simulated GPU"

    def __init__(
        self, n_devices: int = 1, *, total_bytes: int = 80 * 1024**3, expandable: bool = False
    ) -> None:
        settings = AllocatorSettings(is_expandable=expandable)
        self.allocators = tuple(
            CachingAllocator(total_bytes, settings=settings) for _ in range(n_devices)
        )
        self.pinned = Statistic()
        self._is_expandable = expandable
        self._histories = [SimulatedHistory() for _ in self.allocators]
        self._touched: set[int] = set()
        #: The blocks in use and their allocators, by handle.
        self._blocks: dict[int, tuple[CachingAllocator, SimulatedBlock]] = {}
        self._next_handle = 1
        self._lock = threading.Lock()

    # -- What a program does -----------------------------------------------------------------------

    def touch(self, device: int | str = 0) -> None:
        """Begin to use a GPU, as its first tensor does."""
        with self._lock:
            self._touched.add(self._find_index(device))

    def allocate(self, n_bytes: int, device: int | str = 0) -> int:
        """Allocate a block, and return the handle that ``free`` takes.

        Raises:
            BadInputError: the size is not positive, or there is no such GPU.
            DeviceFullError: there is no room, even after the cache was given back.
        """
        if n_bytes <= 0:
            raise BadInputError(f"can't allocate {n_bytes} bytes: ask for at least 1")
        with self._lock:
            allocator = self._use(device)
            try:
                block = allocator.allocate(n_bytes)
            except DeviceFullError as exc:
                # In PyTorch's words, by which the card of an OOM finds the GPU and the request.
                raise DeviceFullError(
                    f"CUDA out of memory. Tried to allocate {format_bytes(n_bytes)}. "
                    f"GPU {self._find_index(device)} has a total capacity of "
                    f"{format_bytes(allocator.total_bytes)}: {exc}"
                ) from None
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            self._blocks[handle] = (allocator, block)
            return handle

    def free(self, handle: int) -> None:
        """Give a block, by what ``allocate`` returned, back to its GPU's cache.

        Raises:
            BadInputError: there is no such block, or it was freed already.
        """
        with self._lock:
            allocator, block = self._find_block(handle)
            del self._blocks[handle]
            allocator.free(block)

    def empty_cache(self) -> None:
        """Give unused memory of every GPU back, as ``torch.cuda.empty_cache`` does."""
        with self._lock:
            for allocator in self.allocators:
                allocator.empty_cache()

    def set_fraction(self, fraction: float, device: int | str = 0) -> None:
        """Limit a GPU as ``torch.cuda.set_per_process_memory_fraction`` does."""
        with self._lock:
            allocator = self.find_allocator(device)
            allocator.allowed_bytes = int(fraction * allocator.total_bytes)

    def reset_peak(self, device: int | str = 0) -> None:
        """Begin the peaks anew, as ``torch.cuda.reset_peak_memory_stats`` does."""
        with self._lock:
            self.find_allocator(device).reset_peaks()

    def record_history(
        self,
        enabled: str | None = "all",
        context: str | None = "all",
        stacks: str = "all",  # noqa: ARG002 - PyTorch's parameter; there are no stacks of C++ here
        max_entries: int = sys.maxsize,
        *,
        clear_history: bool = False,
    ) -> None:
        """Switch the history on or off, as ``torch.cuda.memory._record_memory_history`` does."""
        with self._lock:
            for allocator, history in zip(self.allocators, self._histories, strict=True):
                history.configure(enabled, context, max_entries, clear=clear_history)
                allocator.on_event = history.note

    # -- What PyTorch reads ------------------------------------------------------------------------

    @property
    def is_history_on(self) -> bool:
        """Return what ``torch._C._cuda_isHistoryEnabled`` does: whether a history is kept."""
        return any(history.is_on for history in self._histories)

    def list_touched(self) -> tuple[int, ...]:
        """Return the indices of the GPUs in use."""
        with self._lock:
            return tuple(sorted(self._touched))

    def get_memory(self, device: int | str = 0) -> tuple[int, int]:
        """Return free and total bytes as ``torch.cuda.mem_get_info``, which uses the GPU."""
        with self._lock:
            allocator = self._use(device)
            taken_bytes = allocator.outside_bytes + allocator.reserved_bytes
            return allocator.total_bytes - taken_bytes, allocator.total_bytes

    def stats(self, device: int | str = 0) -> dict[Any, Any]:
        """Return the counters as ``torch.cuda.memory_stats_as_nested_dict`` does."""
        with self._lock:
            return self.find_allocator(device).to_stats()

    def take_snapshot(self) -> dict[str, Any]:
        """Return segments and events as ``torch.cuda.memory._snapshot`` does."""
        with self._lock:
            segments = [
                _write_segment(index, segment, history.stacks)
                for index, (allocator, history) in enumerate(
                    zip(self.allocators, self._histories, strict=True)
                )
                for segment in allocator.list_segments(f"cuda:{index}")
            ]
            events = [list(history.events) for history in self._histories]
            for history in self._histories:
                history.note(TraceAction.SNAPSHOT, 0, 0, 0, None)
            return {
                "segments": segments,
                "device_traces": events,
                "allocator_settings": {
                    "max_split_size": -1,
                    "expandable_segments": self._is_expandable,
                },
            }

    def find_allocator(self, device: int | str) -> CachingAllocator:
        """Return the allocator of a GPU.

        Raises:
            BadInputError: there is no such GPU.
        """
        return self.allocators[self._find_index(device)]

    def find_address(self, handle: int) -> int:
        """Return the address of a block in use.

        Raises:
            BadInputError: there is no such block, or it was freed.
        """
        with self._lock:
            return self._find_block(handle)[1].address

    def _use(self, device: int | str) -> CachingAllocator:
        index = self._find_index(device)
        self._touched.add(index)
        return self.allocators[index]

    def _find_index(self, device: int | str) -> int:
        text = str(device).removeprefix("cuda:")
        if not text.isdecimal() or int(text) >= len(self.allocators):
            raise BadInputError(
                f"there is no device {device!r}: there are {len(self.allocators)} simulated GPUs"
            )
        return int(text)

    def _find_block(self, handle: int) -> tuple[CachingAllocator, SimulatedBlock]:
        if handle not in self._blocks:
            raise BadInputError(f"{handle} is no handle of a block in use: free each once")
        return self._blocks[handle]


def _write_segment(
    index: int, segment: Segment, stacks: dict[int, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Return a segment as ``torch.cuda.memory_snapshot`` does."""
    is_small = (segment.page_bytes or segment.n_bytes) <= SMALL_PAGE_BYTES
    return {
        "device": index,
        "address": segment.address,
        "total_size": segment.n_bytes,
        "segment_type": "small" if is_small else "large",
        "segment_pool_id": segment.pool_id,
        "stream": segment.stream,
        "is_expandable": segment.page_bytes is not None,
        "blocks": [
            {
                "address": block.address,
                "size": block.n_bytes,
                "requested_size": block.requested_bytes or 0,
                "state": block.state,
                "frames": stacks.get(block.address, []) if block.state != "inactive" else [],
            }
            for block in segment.blocks
        ],
    }


class SimulatedHistory:
    """The history of one GPU's allocator. Whoever owns it locks it.

    Attributes:
        events: the oldest first, in PyTorch's form.
        stacks: the stack that allocated each block in use, by address.
    """

    def __init__(self) -> None:
        self.events: deque[dict[str, Any]] = deque()
        self.stacks: dict[int, list[dict[str, Any]]] = {}
        self._enabled: str | None = None
        self._context: str | None = None
        #: PyTorch gives the same dictionary for the same frame, and so does this history.
        self._frames: dict[tuple[str, int, str], dict[str, Any]] = {}

    @property
    def is_on(self) -> bool:
        """Return whether events, or only the stacks of blocks, are kept."""
        return self._enabled is not None

    def configure(
        self, enabled: str | None, context: str | None, max_entries: int, *, clear: bool
    ) -> None:
        """Switch the history on or off, as ``torch.cuda.memory._record_memory_history`` does."""
        self._enabled, self._context = enabled, context
        kept = () if enabled is None or clear else self.events
        self.events = deque(kept, maxlen=min(max_entries, sys.maxsize))

    def note(
        self,
        action: TraceAction,
        address: int,
        n_bytes: int,
        stream: int,
        block: SimulatedBlock | None,
    ) -> None:
        """Keep one event, and the stack of a block that is allocated, if the history is on."""
        # A free without a stack of its own has that of its block's allocation.
        is_free = block is not None and action is not TraceAction.ALLOC
        stack = self.stacks.get(address, []) if is_free else []
        # The contexts in which PyTorch keeps the stack of such an event.
        contexts = {
            TraceAction.ALLOC: ("state", "alloc", "all"),
            TraceAction.FREE_REQUESTED: ("all",),
            TraceAction.FREE_COMPLETED: ("all",),
        }
        if self.is_on and self._context in contexts.get(action, ("alloc", "all")):
            stack = self._take_stack()
        if action is TraceAction.ALLOC:
            self.stacks[address] = stack
        if self._enabled == "all":
            event = {
                "action": action.word,
                ("device_free" if action is TraceAction.OOM else "addr"): address,
                "size": n_bytes,
                "stream": stream,
                "time_us": time.time_ns() // 1000,
            }
            if action is not TraceAction.SNAPSHOT:
                event["frames"] = stack
            self.events.append(event)

    def _take_stack(self) -> list[dict[str, Any]]:
        """Return the program's frames, innermost first."""
        frames = []
        frame: Any = sys._getframe(1)  # noqa: SLF001 - inspect's public way reads all sources
        while frame is not None:
            name, filename, line = frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno
            if not filename.startswith(_OWN_PATHS):
                raw = {"name": name, "filename": filename, "line": line}
                frames.append(self._frames.setdefault((filename, line, name), raw))
            frame = frame.f_back
        return frames


# -- The module torch ------------------------------------------------------------------------------


def simulate_torch(gpus: SimulatedGpus, *, version: str = "2.11.0") -> ModuleType:
    """Return a module with as much of ``torch`` as ``CudaBackend`` needs; CUDA is initialised."""

    def get_fraction(index: int) -> float:
        allocator = gpus.find_allocator(index)
        if allocator.allowed_bytes is None:
            return 1.0
        return allocator.allowed_bytes / allocator.total_bytes

    bindings = SimpleNamespace(
        _cuda_memoryStats=gpus.stats,
        _accelerator_getDeviceStats=gpus.stats,
        _cuda_resetPeakMemoryStats=gpus.reset_peak,
        _accelerator_resetPeakStats=gpus.reset_peak,
        _cuda_hasPrimaryContext=lambda device: device in gpus.list_touched(),
        _cuda_isHistoryEnabled=lambda: gpus.is_history_on,
        _cuda_record_memory_history=gpus.record_history,
        _cuda_memorySnapshot=gpus.take_snapshot,
        _cuda_getMemoryFraction=get_fraction,
        _cuda_clearCublasWorkspaces=lambda: None,
        _cuda_hostMemoryStats=lambda: {"allocated_bytes": gpus.pinned.to_dict()},
    )

    def ask(name: str, *arguments: Any, **options: Any) -> Any:
        """Call a binding as it is now, as torch's own functions do: it may have been replaced."""
        return vars(bindings)[name](*arguments, **options)

    def list_segments(*, include_traces: bool = True) -> Any:  # noqa: ARG001 - PyTorch's parameter
        return ask("_cuda_memorySnapshot")["segments"]

    torch: Any = ModuleType("torch")
    torch.__version__ = version
    vars(torch)["_C"] = bindings
    torch.cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device=lambda _: contextlib.nullcontext(),
        device_count=lambda: len(gpus.allocators),
        empty_cache=gpus.empty_cache,
        max_memory_allocated=lambda device=0: ask("_cuda_memoryStats", device)["allocated_bytes"][
            "all"
        ]["peak"],
        reset_peak_memory_stats=partial(ask, "_cuda_resetPeakMemoryStats"),
        mem_get_info=gpus.get_memory,
        set_per_process_memory_fraction=gpus.set_fraction,
        memory=SimpleNamespace(
            memory_snapshot=list_segments,
            get_allocator_backend=lambda: "native",
            _record_memory_history=partial(ask, "_cuda_record_memory_history"),
            _snapshot=partial(ask, "_cuda_memorySnapshot"),
        ),
        get_device_properties=lambda index: SimpleNamespace(
            name=gpus.name,
            total_memory=gpus.find_allocator(index).total_bytes,
            uuid=format_uuid(index),
        ),
    )
    return torch  # type: ignore[no-any-return]  # it is a module


def format_uuid(index: int) -> str:
    """Return the UUID of a simulated GPU, as PyTorch writes it: without ``GPU-``."""
    return f"simulated-{index}"
