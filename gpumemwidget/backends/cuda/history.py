"""Record the allocator's history for a cell, and leave the history as it was found.

There is one history in a process. Whoever starts it sets it for all, and nobody can ask how it is
set. So while that matters, the bindings of ``torch._C`` that set the history are wrapped. A history
that the user runs is used as it is, and gets an entry for each snapshot that is taken; what a
user's call sets ends ours. Ours is bounded, and begins with such an entry, which marks the start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import threading
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

from gpumemwidget.backends.hooks import CudaStartHook, Patch
from gpumemwidget.backends.snapshot import (
    parse_segments,
    parse_traces,
    read_large_page_bytes,
    write_snapshot,
)
from gpumemwidget.errors import FileError, is_from_signal_handler, read_first_line
from gpumemwidget.model.devices import HardwareNote, HardwareNoteKind, Segment
from gpumemwidget.model.traces import AllocatorTrace, NoteKind, TraceNote

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

    # -- Segments ----------------------------------------------------------------------------------

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

    # -- Traces ------------------------------------------------------------------------------------

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

    # -- On and off --------------------------------------------------------------------------------

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
