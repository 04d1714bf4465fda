"""Has the allocator's history written for a cell, and leaves it as it was found.

A history that the user runs is used as it is. Ours is bounded, starts after nothing and before
everything: once it is on, a snapshot is taken, which is itself an event and marks the start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpumemwidget.backends.events import parse_traces
from gpumemwidget.backends.history import HistorySwitch
from gpumemwidget.backends.snapshot import SnapshotReader
from gpumemwidget.backends.snapwrite import write_snapshot
from gpumemwidget.errors import FileError
from gpumemwidget.records import Segment
from gpumemwidget.traces import ACTIONS, AllocatorTrace

__all__ = ["CudaTracer"]

#: What CUDA raises in error, and what calls raise that another release has otherwise.
_REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError)
_STOP = "stop it with torch.cuda.memory._record_memory_history(None) for a trace of our own"
_IS_USERS = "a memory history was running already, and was used as it is"
_HAS_NO_EVENTS = f"{_IS_USERS}: it keeps no events; {_STOP}"
_HAS_NO_STACKS = f'{_IS_USERS}: it keeps no lines of its events, as one of "state"; {_STOP}'
_WAS_SET = (
    "a memory history was started or stopped within the cell, and is left as it is now: "
    "events are missing"
)


class CudaTracer:
    """Traces of one process's CUDA allocators.

    Args:
        torch: the imported module ``torch``.
        snapshots: reads what stands when a trace begins.
        clock_ns: nanoseconds since the epoch, as the events have them.
    """

    def __init__(
        self,
        torch: Any,
        snapshots: SnapshotReader,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._torch = torch
        self._snapshots = snapshots
        self._clock_ns = clock_ns
        self._lock = threading.RLock()
        self._switch = HistorySwitch(torch)
        self._span: _Span | None = None
        #: Whether the lines of live blocks are to be kept between traces.
        self._has_sites = False
        self._awaits_cuda = False
        #: One object, so that it is found again.
        self._when_cuda_begins = self._begin_late
        self._notes: list[str] = []

    @property
    def is_tracing(self) -> bool:
        """Whether a trace was started and not ended."""
        return self._span is not None

    @property
    def keeps_no_events(self) -> bool:
        """Whether the history that runs is ours and keeps the lines of live blocks alone."""
        return self._span is None and self._switch.is_ours

    def start(self, touched: Sequence[int], *, n_events: int) -> tuple[str, ...]:
        """Begin a trace, and drop one that was running; why there is none, where there is none.

        Args:
            touched: indices of the devices that are in use.
            n_events: how many events to keep, of all devices: the newest.
        """
        with self._lock:
            self._end_span()
            reason = self._find_obstacle()
            if reason is not None:
                return (reason,)
            self._yield_to_others()
            # The ring is one for each device. More than these may come into use meanwhile.
            span = self._span = _Span(max(1, n_events // max(1, len(touched))))
            try:
                if self._torch.cuda.is_initialized():
                    self._warm_up()
                    self._begin(span)
                    self._mark(span, touched)
                else:
                    span.start_us = self._now_us()
            except _REFUSALS as exc:
                self._end_span()
                return (f"CUDA refuses a trace: {_first_line(exc)}",)
            except BaseException:  # A Ctrl-C: half a trace would tell of half the events.
                self._end_span()
                raise
        self._await_cuda()
        return ()

    def end(
        self, touched: Sequence[int], *, snapshot_to: Path | None = None
    ) -> tuple[AllocatorTrace, ...]:
        """End the trace: one for each device in use. ``()`` where none was running.

        Args:
            touched: indices of the devices that are in use now.
            snapshot_to: a file to write torch's own snapshot to, which its memory viewer reads. If
                it can't be written, a note says so.
        """
        with self._lock:
            span = self._span
            if span is None or not touched:
                self._end_span()
                return ()
            try:
                raw = self._torch.cuda.memory._snapshot()  # noqa: SLF001 - has no public name
            except _REFUSALS as exc:
                self._note(f"CUDA gives no trace: {_first_line(exc)}")
                return ()
            finally:
                end_us = self._now_us()
                was_set = self._switch.n_foreign_calls != span.n_foreign_calls
                self._end_span()
        if snapshot_to is not None:
            try:
                write_snapshot(raw, snapshot_to)
            except FileError as exc:
                self._note(str(exc))
        has_events = any(raw["device_traces"])
        traces = parse_traces(
            raw,
            before=span.before,
            start_us=span.start_us,
            end_us=end_us,
            touched=touched,
            marked_by_us=span.marked_by_us,
            max_entries=None if span.is_users else span.n_events,
        )
        if was_set:
            return tuple(_flaw(each, _WAS_SET) for each in traces)
        if span.is_users and not has_events:
            return tuple(_flaw(each, _HAS_NO_EVENTS) for each in traces)
        if span.is_users:
            return tuple(_note_users(each) for each in traces)
        return traces

    def set_sites(self, *, is_on: bool) -> str:
        """Keep the line of each live block from now on, or no longer; what was done."""
        with self._lock:
            self._yield_to_others()
            if is_on == self._has_sites:
                return f"the line of each block was {'' if is_on else 'not '}kept already"
            if is_on:
                reason = self._find_obstacle()
                if reason is not None:
                    return reason
                # (To ask before CUDA is in use ends the process.)
                can_ask = self._torch.cuda.is_initialized()
                if can_ask and self._switch.is_on() and not self._switch.is_ours:
                    return _IS_USERS.replace("was used", "is used")
            self._has_sites = is_on
            # A trace that is running goes on; what holds after it is settled at its end.
            if self._span is None:
                try:
                    self._rest()
                except _REFUSALS as exc:
                    self._has_sites = False
                    return f"CUDA refuses to keep lines: {_first_line(exc)}"
        self._await_cuda()
        return f"the line of each block is {'kept from now on' if is_on else 'no longer kept'}"

    def take_notes(self) -> tuple[str, ...]:
        """Sentences on what failed since the last call."""
        notes, self._notes = self._notes, []
        return tuple(notes)

    def close(self) -> None:
        """Switch off what is ours. May be called twice."""
        with self._lock:
            self._has_sites = False
            self._end_span()
            self._settle()
            if self._awaits_cuda:
                self._awaits_cuda = False
                queue = getattr(self._torch.cuda, "_queued_calls", [])
                queue[:] = [each for each in queue if each[0] is not self._when_cuda_begins]

    # -- On and off --------------------------------------------------------------------------------

    def _begin(self, span: _Span) -> None:
        self._switch.watch()
        span.n_foreign_calls = self._switch.n_foreign_calls
        span.is_users = not self._switch.is_ours and self._switch.is_on()
        if not span.is_users:
            # No stacks of frees ("all"): to take one while an error unwinds a call of C++ loses
            # the error, as in a recomputation that stops early, where tensors are freed by it.
            self._switch.set("all", context="alloc", stacks="python", max_entries=span.n_events)

    def _mark(self, span: _Span, touched: Sequence[int]) -> None:
        span.start_us = self._now_us()
        if touched:
            span.before = self._snapshots.read(touched)
            span.marked_by_us = self._now_us()

    def _end_span(self) -> None:
        """End the trace, and leave the history as it was before, if it is not another's by now."""
        span, self._span = self._span, None
        if span is not None:
            self._yield_to_others()
            self._settle()

    def _settle(self) -> None:
        try:
            self._rest()
        except _REFUSALS as exc:
            self._note(f"CUDA could not end its memory history: {_first_line(exc)}")

    def _rest(self) -> None:
        """Set what holds between traces: the lines of live blocks are kept, or nothing is."""
        # False in a forked child, where CUDA can't be used: its copy of the history is nobody's.
        can_set = self._torch.cuda.is_initialized()
        if self._switch.is_ours and can_set:
            self._switch.set(None)  # That empties the ring; live blocks keep their lines.
        self._switch.is_ours = False
        if not self._has_sites:
            self._switch.unwatch()
        elif can_set:
            self._warm_up()
            self._begin_sites()

    def _begin_sites(self) -> None:
        self._switch.watch()
        self._switch.set("state", context="state", stacks="python", max_entries=1)

    def _yield_to_others(self) -> None:
        """Lines that we kept are no longer ours to keep once another has set the history."""
        if self._has_sites and not self._awaits_cuda and not self._switch.is_ours:
            self._has_sites = False

    def _await_cuda(self) -> None:
        """Go on when the user begins to use CUDA: to ask for anything now would initialise it.

        Not under our lock: a thread that initialises CUDA holds torch's, and waits for ours.
        """
        if not self._torch.cuda.is_initialized() and not self._awaits_cuda:
            self._awaits_cuda = True
            self._torch.cuda._lazy_call(self._when_cuda_begins)  # noqa: SLF001 - has no public name

    def _begin_late(self) -> None:
        """Begin within the user's own first call: nothing may be raised."""
        with self._lock:
            if not self._awaits_cuda:
                return
            self._awaits_cuda = False
            try:
                if self._span is not None:
                    self._begin(self._span)
                elif self._has_sites and self._switch.is_on():
                    self._has_sites = False
                    self._note(_IS_USERS.replace("was used", "is used"))
                elif self._has_sites:
                    self._begin_sites()
            except Exception as exc:  # noqa: BLE001 - it would be the user's own call that fails
                self._note(f"CUDA refuses a trace: {_first_line(exc)}")

    def _warm_up(self) -> None:
        """Have torch import now what it needs to name lines, which takes seconds the first time.

        It looks ``torch._inductor`` up, which imports it, in
        https://github.com/pytorch/pytorch/blob/main/torch/csrc/profiler/python/combined_traceback.cpp
        Else that would be in mid-cell, or while an allocation fails.
        """
        # Where that fails, torch goes on without it, and so do we.
        with contextlib.suppress(Exception):
            getattr(self._torch, "_inductor", None)

    def _find_obstacle(self) -> str | None:
        backend = getattr(self._torch.cuda.memory, "get_allocator_backend", lambda: "native")()
        if backend != "native":
            return (
                f"the CUDA allocator {backend} keeps no history: for lines start the kernel with "
                "PyTorch's own (backend:native)"
            )
        if not self._switch.can_tell:
            return (
                f"PyTorch {self._torch.__version__} does not tell whether a memory history runs, "
                "so that none is started: upgrade to 2.4"
            )
        return None

    def _now_us(self) -> int:
        return self._clock_ns() // 1000

    def _note(self, note: str) -> None:
        self._notes.append(note)


class _Span:
    """A trace that is running."""

    def __init__(self, n_events: int) -> None:
        self.n_events = n_events
        self.start_us = 0
        #: When the snapshot that marks the start was done; ``None`` where there is no mark.
        self.marked_by_us: int | None = None
        self.before: tuple[Segment, ...] = ()
        #: Whether the history ran before us.
        self.is_users = False
        #: How often others had set the history, at the start.
        self.n_foreign_calls = 0


def _flaw(trace: AllocatorTrace, note: str) -> AllocatorTrace:
    return dataclasses.replace(trace, is_whole=False, notes=(*trace.notes, note))


def _note_users(trace: AllocatorTrace) -> AllocatorTrace:
    """What a history of the user's does not tell."""
    events = trace.events
    allocs = ACTIONS.index("alloc")
    stacks = {
        place for code, place in zip(events.actions, events.stacks, strict=True) if code == allocs
    }
    note = _HAS_NO_STACKS if stacks == {0} else _IS_USERS
    return dataclasses.replace(trace, notes=(*trace.notes, note))


def _first_line(exc: BaseException) -> str:
    return str(exc).strip().partition("\n")[0]
