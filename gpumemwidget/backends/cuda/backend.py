"""Read, trace and limit the caching allocator of each CUDA (or ROCm) device that is in use.

PyTorch's nested statistics are read, one dictionary for each device: the public functions flatten
it, which takes five times as long. A device is touched once it has a primary context; to ask
anything else of a device without one would create it, hundreds of MB of the user's memory.

A limit is a share of a GPU that PyTorch may reserve. It allows ``share * total`` bytes: a double,
cut to a whole number. From 2.11 on, its own allocator is limited without a device coming into use:
before CUDA is, a limit waits for the last step of CUDA's initialisation. Other allocators and
earlier releases would bring the device into use (https://github.com/pytorch/pytorch/pull/161035)
and make it the current one: there only a device in use can be limited.

There is one history of allocations in a process. Whoever starts it sets it for all, and nobody can
ask how it is set. So while a trace runs, the bindings of ``torch._C`` that set the history are
wrapped. A history that the user runs is used as it is, and gets an entry for each snapshot that is
taken; what a user's call sets ends ours. Ours is bounded, and begins with such an entry, which
marks the start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import math
import os
import re
import threading
import time
from collections.abc import Callable, Container, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from gpumemwidget.backends.counters import TouchedCounters
from gpumemwidget.backends.hooks import CudaStartHook, Patch
from gpumemwidget.backends.peak_overlay import NestedStats, PeakOverlay
from gpumemwidget.backends.snapshot import (
    parse_segments,
    parse_traces,
    read_large_page_bytes,
    write_snapshot,
)
from gpumemwidget.errors import BackendError, FileError, is_from_signal_handler, read_first_line
from gpumemwidget.model.devices import (
    HOST,
    Chip,
    DeviceInfo,
    HardwareNote,
    HardwareNoteKind,
    Limit,
    LimitRequest,
    Segment,
)
from gpumemwidget.model.traces import AllocatorTrace, NoteKind, TraceNote


class CudaBackend(TouchedCounters):
    """Counters of the touched CUDA devices.

    Args:
        torch: the imported module ``torch``; it is never imported from here.

    Raises:
        BackendError: this build of PyTorch has no CUDA.
    """

    def __init__(self, torch: ModuleType) -> None:
        if not hasattr(torch._C, "_cuda_memoryStats"):  # noqa: SLF001 - the one sign of a CUDA build that initialises nothing
            raise BackendError(
                f"PyTorch {torch.__version__} was built without CUDA: its GPU can't be read, "
                "install a CUDA build to record it"
            )
        super().__init__(torch, "cuda", PeakOverlay(torch._C))  # noqa: SLF001 - see the overlay
        self._touched: list[int] = []
        self._history = CudaHistory(torch)
        self._limits = _Limits(torch, self._notes.add)

    def read_segments(self) -> tuple[Segment, ...]:
        """Return the segments of the touched devices: 2 ms with 600 blocks.

        ``()``, with a note, where CUDA refuses, or where the snapshot would have all events of a
        history that the user records.
        """
        touched = self._list_touched()
        if not touched:
            return ()
        if self._history.is_costly:
            kind, version = HardwareNoteKind.BLOCKS_COSTLY, str(self._torch.__version__)
            self._notes.add(HardwareNote(kind, version))
            return ()
        read = partial(self._history.read_segments, touched)
        return self._ask(read, self.kind, "the allocator's blocks", ())

    def start_trace(self, *, n_events: int) -> tuple[HardwareNote, ...]:
        """Start the allocator's history, which takes seconds the first time, or use the user's."""
        return self._history.start(self._list_touched(), n_events=n_events)

    def end_trace(self, *, snapshot_to: Path | None = None) -> tuple[AllocatorTrace, ...]:
        """Return the touched devices' events since the start: 2.5 s for a million of them."""
        return self._history.end(self._list_touched(), snapshot_to=snapshot_to)

    def read_chip(self, device: str) -> Chip | None:
        """Return a device's chip once CUDA is initialised: to ask then makes no context."""
        if not self._is_in_use():
            return None
        ask = partial(self._torch.cuda.get_device_properties, int(device.partition(":")[2]))
        properties = self._ask(ask, device, "properties", None)
        if not hasattr(properties, "multi_processor_count"):
            return None
        return Chip(
            (properties.major, properties.minor),
            properties.multi_processor_count,
            getattr(properties, "max_threads_per_multi_processor", 2048),
        )

    def read_pinned(self) -> int | None:
        """Return the bytes that PyTorch's allocator of pinned memory has from the system: 10 µs.

        ``None`` before its first use, and before PyTorch 2.7, which does not count it.
        """
        read_stats = getattr(self._torch._C, "_cuda_hostMemoryStats", None)  # noqa: SLF001 - the public call flattens
        if read_stats is None or not self._is_in_use():
            return None
        stats: NestedStats = self._ask(read_stats, HOST, "pinned memory", {})
        # Before 2.9 it had another name.
        taken: dict[str, int] = stats.get("reserved_bytes") or stats.get("allocated_bytes", {})
        return taken["current"] if any(taken.values()) else None

    def set_limit(self, device: str, request: LimitRequest) -> None:
        """Call ``torch.cuda.set_per_process_memory_fraction``, now or as CUDA starts."""
        touched = self._list_touched()
        kind, _, index = device.partition(":")
        is_known = kind == self.kind and index.isascii() and index.isdigit()
        if is_known and self._is_in_use():
            is_known = int(index) < self._torch.cuda.device_count()
        if not is_known:
            raise BackendError(f"there is no {device} here: name one that %memstat lists")
        self._limits.set(int(index), request, is_touched=int(index) in touched)

    def read_limits(self) -> tuple[Limit, ...]:
        """Return the limits of touched devices, and of others that have a limit, set or waiting."""
        touched = self._list_touched()
        reserved = {reading.device: reading.reserved_bytes for reading in self.read_as_user()}
        limits = []
        for index in sorted({*touched, *self._limits.set_bytes, *self._limits.waiting}):
            device, request = f"cuda:{index}", self._limits.waiting.get(index)
            if request is not None:
                asked = (request.limit_bytes, None, None)
                limits.append(Limit(device, *asked, is_waiting=True, share=request.share))
            elif self._is_in_use():
                read_total = partial(self._limits.read_total, index)
                total_bytes = self._ask(read_total, device, "total memory", None)
                limit_bytes = self._limits.read(index)
                limits.append(Limit(device, limit_bytes, total_bytes, reserved.get(device)))
        return tuple(limits)

    def release_workspaces(self) -> bool:
        """Free cuBLAS's workspaces, 32 MiB and more for each handle and stream, if there are any.

        Raises:
            BackendError: CUDA refuses, as it does after a fault on the device; or a CUDA graph is
                alive. A graph that was captured after a warm-up on the same stream writes into that
                stream's workspace whenever it is replayed: freed, that could be another's memory.
        """
        if not self._is_in_use():
            return False
        if self._has_graphs():
            raise BackendError(
                "cuBLAS's workspaces stay while a CUDA graph is alive, which may use them: delete "
                "the graphs first (those of torch.compile with torch._dynamo.reset())"
            )
        before = self._sum_allocated()
        try:
            self._torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 - has no public name
        except RuntimeError as exc:
            raise BackendError(
                f"CUDA could not free cuBLAS's workspaces ({read_first_line(exc)}): restart the "
                "kernel if the device is in error"
            ) from exc
        return self._sum_allocated() < before

    def _sum_allocated(self) -> int:
        return sum(reading.allocated_bytes or 0 for reading in self.read())

    def _has_graphs(self) -> bool:
        graph_type = getattr(self._torch._C, "_CUDAGraph", None)  # noqa: SLF001 - the base class of all graphs
        read_bases = vars(type)["__mro__"].__get__
        # By identity: a class of the user's may have an == or a hash of its own.
        classes = {id(cls): cls for cls in map(type, gc.get_objects())}
        return any(base is graph_type for cls in classes.values() for base in read_bases(cls))

    def take_notes(self) -> tuple[HardwareNote, ...]:
        """Return notes on what failed."""
        return super().take_notes() + self._history.take_notes()

    def close(self) -> None:
        """Take the overlay away, forget limits that wait, and end our history; set limits stay."""
        self._history.close()
        self._limits.close()
        super().close()

    def _is_in_use(self) -> bool:
        # False in a forked child too, where the parent's CUDA can't be used.
        return bool(self._torch.cuda.is_initialized())

    def _list_touched(self) -> list[int]:
        if not self._is_in_use():
            return []
        count = self._torch.cuda.device_count()
        if len(self._touched) < count:
            has_context = self._bindings._cuda_hasPrimaryContext  # noqa: SLF001 - no public call asks without creating one
            self._touched = [index for index in range(count) if has_context(index)]
        return self._touched

    def _describe_device(self, index: int) -> DeviceInfo:
        # The user may set a limit at any time.
        info, limit_bytes = super()._describe_device(index), self._limits.read(index)
        return info if limit_bytes is None else dataclasses.replace(info, limit_bytes=limit_bytes)


# -- Segments and traces ---------------------------------------------------------------------------

#: Exceptions of CUDA in error, and of calls that another release of PyTorch has otherwise.
_REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError)


class CudaHistory:
    """The history of one process's CUDA allocators."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._lock = threading.RLock()
        self._patch = Patch()
        self._options: dict[str, bool] | None = None
        #: Idents of threads within a call of ours.
        self._own_threads: set[int] = set()
        #: True while a history of ours runs, which nobody has set since.
        self._is_ours = False
        #: What failed, each time: every traced cell shows its own.
        self._notes: list[HardwareNote] = []
        self._span: _Span | None = None
        self._cuda_start = CudaStartHook(torch, self._begin_late)

    @property
    def is_costly(self) -> bool:
        """True if to read the segments would fetch all events of a history that the user records.

        That takes up to two seconds. Older releases of torch can't leave the events out: see
        ``include_traces`` in
        https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_snapshot.html
        """
        return not self._find_options() and self._is_on()

    def read_segments(self, touched: Container[int]) -> tuple[Segment, ...]:
        """Return the segments of touched devices, by index; CUDA must be initialised.

        Raises:
            RuntimeError: CUDA refuses, or the allocator is one that keeps no blocks.
        """
        raw = self._torch.cuda.memory.memory_snapshot(**self._find_options())
        return parse_segments(
            (segment for segment in raw if segment["device"] in touched),
            large_page_bytes=read_large_page_bytes(self._torch),
        )

    def _find_options(self) -> dict[str, bool]:
        if self._options is None:
            known = inspect.signature(self._torch.cuda.memory.memory_snapshot).parameters
            self._options = {"include_traces": False} if "include_traces" in known else {}
        return self._options

    def start(self, touched: Sequence[int], *, n_events: int) -> tuple[HardwareNote, ...]:
        """Start a trace, and drop one that was running; return why none was started, if so."""
        with self._lock:
            self._end_span()
            reason = self._find_obstacle()
            if reason is not None:
                return (reason,)
            # The history bounds the events of each device. Others may come into use meanwhile.
            span = self._span = _Span(max(1, n_events // max(1, len(touched))))
            has_begun = self._torch.cuda.is_initialized()
            try:
                if has_begun:
                    self._warm_up()
                    self._begin(span)
                span.start_us = time.time_ns() // 1000
                if touched:
                    span.before = self.read_segments(touched)
                    span.marked_by_us = time.time_ns() // 1000
            except _REFUSALS as exc:
                self._end_span()
                return (_refuse(exc),)
            except BaseException:  # A Ctrl-C: half a trace would have half the events.
                self._end_span()
                raise
        if not has_begun:
            # To ask for anything now would initialise CUDA. Our lock must not be held here: a
            # thread that initialises CUDA holds torch's lock, and waits for ours.
            self._cuda_start.expect()
        return ()

    def end(
        self, touched: Sequence[int], *, snapshot_to: Path | None = None
    ) -> tuple[AllocatorTrace, ...]:
        """End the trace, and return it for each device in use; ``()`` where none was running."""
        with self._lock:
            span = self._span
            if span is None or not touched:
                self._end_span()
                return ()
            try:
                raw = self._torch.cuda.memory._snapshot()  # noqa: SLF001 - has no public name
            except _REFUSALS as exc:
                self._notes.append(_refuse(exc))
                return ()
            finally:
                end_us = time.time_ns() // 1000
                self._end_span()
        if snapshot_to is not None:
            try:
                write_snapshot(raw, snapshot_to)
            except FileError as exc:
                self._notes.append(HardwareNote(HardwareNoteKind.MESSAGE, str(exc)))
        has_events = any(raw["device_traces"])  # Parsing takes them out.
        traces = parse_traces(
            raw,
            before=span.before,
            start_us=span.start_us,
            end_us=end_us,
            touched=touched,
            marked_by_us=span.marked_by_us,
            max_entries=None if span.is_users else span.n_events,
        )
        if not (span.was_set or span.is_users):
            return traces
        # What a history of the user's costs: events, or their stacks.
        kind = NoteKind.HISTORY_WAS_SET if span.was_set else NoteKind.HISTORY_IS_USERS
        keeps_all = has_events and not span.was_set
        return tuple(
            dataclasses.replace(
                trace, notes=(TraceNote(kind),), is_whole=trace.is_whole and keeps_all
            )
            for trace in traces
        )

    def take_notes(self) -> tuple[HardwareNote, ...]:
        """Return notes on what failed since the last call."""
        notes, self._notes = self._notes, []
        return tuple(notes)

    def close(self) -> None:
        """Stop our history. May be called twice."""
        with self._lock:
            self._end_span()
            self._cuda_start.cancel()

    def _end_for_user(self) -> None:
        """End our history, within the user's own call that sets one: nothing may be raised.

        Then the history is empty, as the user would find it without us.
        """
        with self._lock:
            try:
                self._set(None)
            except Exception as exc:
                if is_from_signal_handler(exc):
                    raise
                self._notes.append(_refuse(exc))

    def _is_on(self) -> bool:
        """Return whether a history runs, ours or the user's."""
        return bool(self._torch._C._cuda_isHistoryEnabled())  # noqa: SLF001 - no public call

    def _set(self, enabled: str | None, **options: Any) -> None:
        """Set the history, which is ours then if it is on.

        Raises:
            RuntimeError: CUDA refuses.
        """
        ident = threading.get_ident()
        self._own_threads.add(ident)
        try:
            self._torch.cuda.memory._record_memory_history(enabled, **options)  # noqa: SLF001 - has no public name
        finally:
            self._own_threads.discard(ident)
        self._is_ours = enabled is not None

    def _watch(self) -> None:
        """Notice the calls of others from now on. Nothing changes if that was done already."""
        if not self._patch.is_applied:
            # The two forms that ``torch.cuda.memory._record_memory_history`` calls.
            for name in ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy"):
                self._patch.replace(self._torch._C, name, self._wrap_setter)  # noqa: SLF001 - PyTorch has no public seam below its own functions

    def _wrap_setter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            # Before the call: it may fail half-way.
            if threading.get_ident() not in self._own_threads:
                if self._is_ours:
                    self._end_for_user()
                self._is_ours = False
                if self._span is not None:
                    self._span.was_set = True
            return original(*args, **kwargs)

        return record

    def _begin(self, span: _Span) -> None:
        self._watch()
        span.is_users = self._is_on()
        if not span.is_users:
            # No stacks of frees ("all"): to take one while an error unwinds a call of C++ loses
            # the error, as in a recomputation that stops early, where tensors are freed by it.
            self._set("all", context="alloc", stacks="python", max_entries=span.n_events)

    def _end_span(self) -> None:
        """End the trace, and leave the history as it was before, if it is not another's by now."""
        span, self._span = self._span, None
        if span is None:
            return
        try:
            # False in a forked child, where CUDA can't be used.
            if self._is_ours and self._torch.cuda.is_initialized():
                self._set(None)
        except _REFUSALS as exc:
            self._notes.append(_refuse(exc))
        self._is_ours = False
        self._patch.undo()

    def _begin_late(self) -> None:
        """Start the history within the user's first use of CUDA: nothing may be raised."""
        with self._lock:
            try:
                if self._span is not None:
                    self._begin(self._span)
            except Exception as exc:
                if is_from_signal_handler(exc):
                    raise
                self._notes.append(_refuse(exc))

    def _warm_up(self) -> None:
        """Have torch import now what it needs to name lines, which takes seconds the first time.

        It looks ``torch._inductor`` up, which imports it, in
        https://github.com/pytorch/pytorch/blob/main/torch/csrc/profiler/python/combined_traceback.cpp
        Otherwise it would do so in the middle of a cell, or while an allocation fails.
        """
        # Nobody here misses the lines of C++ that torch can't name without it.
        with contextlib.suppress(Exception):
            getattr(self._torch, "_inductor", None)

    def _find_obstacle(self) -> HardwareNote | None:
        backend = self._torch.cuda.memory.get_allocator_backend()
        return None if backend == "native" else HardwareNote(HardwareNoteKind.NO_HISTORY, backend)


@dataclasses.dataclass(slots=True)
class _Span:
    n_events: int
    start_us: int = 0
    #: When the snapshot that marks the start was done; ``None`` where none was taken.
    marked_by_us: int | None = None
    before: tuple[Segment, ...] = ()
    #: True if the history is the user's.
    is_users: bool = False
    #: True if the user has set one meanwhile.
    was_set: bool = False


def _refuse(exc: Exception) -> HardwareNote:
    return HardwareNote(HardwareNoteKind.HISTORY_REFUSED, read_first_line(exc))


# -- Limits ----------------------------------------------------------------------------------------


class _Limits:
    """The limits of one process."""

    def __init__(self, torch: Any, on_failure: Callable[[HardwareNote], object]) -> None:
        self._torch = torch
        self._on_failure = on_failure
        #: Limits that wait for CUDA, by device.
        self.waiting: dict[int, LimitRequest] = {}
        #: Bytes of the limits that were set from here.
        self.set_bytes: dict[int, int] = {}
        self._pid = os.getpid()
        self._cuda_start = CudaStartHook(torch, self._set_at_start)

    def read(self, index: int) -> int | None:
        """Return the limit of a device in use, whoever set it: 1 µs, or 10 µs where there is one.

        ``None``: there is none, or the allocator (a pluggable one) has none.
        """
        # Before 2.7 only limits that were set from here are known.
        read_share = getattr(self._torch._C, "_cuda_getMemoryFraction", None)  # noqa: SLF001 - the public call would initialise CUDA
        if read_share is None:
            return self.set_bytes.get(index)
        try:
            with self._keep_current_device(index):
                share = read_share(index)
            # The share is a double for a whole number of bytes.
            return round(share * self.read_total(index)) if share < 1.0 else None
        except RuntimeError:
            return None

    def read_total(self, index: int) -> int:
        """Return the total bytes of a device in use, as PyTorch counts them for its limits."""
        total_bytes: int
        if self._is_early:
            total_bytes = self._torch.cuda.get_device_properties(index).total_memory
        else:
            with self._keep_current_device(index):
                total_bytes = self._torch.cuda.mem_get_info(index)[1]
        return total_bytes

    def set(self, index: int, request: LimitRequest, *, is_touched: bool) -> None:
        """Set a device's limit or take it away, now or as soon as CUDA is in use."""
        self.waiting.pop(index, None)
        if is_touched or (self._is_early and self._torch.cuda.is_initialized()):
            self._set_now(index, request)
        elif self._is_early and not request.is_off:
            self.waiting[index] = request
            self._cuda_start.expect()
        elif not request.is_off:
            raise self._refuse_unused(index)

    def close(self) -> None:
        self.waiting.clear()
        self._cuda_start.cancel()

    def _set_at_start(self) -> None:
        """Set the limits that wait, in the last step of CUDA's initialisation: nothing may fail."""
        waiting, self.waiting = self.waiting, {}
        if os.getpid() != self._pid:
            # A forked child has a copy of what waits, and no limit was asked for it.
            return
        for index, request in waiting.items():
            try:
                if not self._is_early:
                    # The user has chosen another allocator since.
                    raise self._refuse_unused(index)
                self._set_now(index, request)
            except Exception as exc:  # noqa: BLE001 - this runs within the user's first use of CUDA
                kind = HardwareNoteKind.LIMIT_FAILED
                self._on_failure(HardwareNote(kind, read_first_line(exc), f"cuda:{index}"))

    def _refuse_unused(self, index: int) -> BackendError:
        return BackendError(
            f"cuda:{index} is not in use yet, and PyTorch {self._torch.__version__} can't "
            "limit it before: allocate something there first"
        )

    def _set_now(self, index: int, request: LimitRequest) -> None:
        try:
            total_bytes = self.read_total(index)
            share = 1.0 if request.share is None else request.share
            if request.limit_bytes is not None:
                share = find_share(request.limit_bytes, total_bytes)
            with self._keep_current_device(index):
                self._torch.cuda.set_per_process_memory_fraction(share, index)
        except RuntimeError as exc:
            raise BackendError(
                f"PyTorch could not limit cuda:{index} ({read_first_line(exc)}): "
                "only its own allocator has limits"
            ) from exc
        self.set_bytes.pop(index, None)
        if share < 1.0:
            self.set_bytes[index] = int(share * total_bytes)

    @property
    def _is_early(self) -> bool:
        """True if a limit can be set without touching its device, as by PyTorch's own allocator."""
        release = re.findall(r"\d+", str(self._torch.__version__))[:2]
        is_new = tuple(map(int, release)) >= (2, 11)
        return is_new and self._torch.cuda.memory.get_allocator_backend() == "native"

    def _keep_current_device(self, index: int) -> contextlib.AbstractContextManager[object]:
        """Return a context in which torch may make a device current; none where it does not."""
        context: contextlib.AbstractContextManager[object]
        context = contextlib.nullcontext() if self._is_early else self._torch.cuda.device(index)
        return context


def find_share(limit_bytes: int, total_bytes: int) -> float:
    """Return the share whose product with the total, a double cut to a whole number, is the limit.

    The total is below 2**51, which is more than any device has; a limit above it is 1.0, none.
    """
    share = limit_bytes / total_bytes
    # The nearest double may lie a little below; the one above it is less than a byte away.
    while int(share * total_bytes) < limit_bytes:
        share = math.nextafter(share, 2.0)
    return min(share, 1.0)
