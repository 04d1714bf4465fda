"""What the callbacks of all trainers do: record spans, and read the peaks since the last log."""

# ruff: noqa: SLF001 - sys._current_frames is the one way to see the stack of another thread

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from types import FrameType
from typing import Any

from gpumemwidget.backends.hardware import Hardware, keep_hardware
from gpumemwidget.errors import BadInputError, BusyError, GpuMemError, Notes
from gpumemwidget.model.devices import HOST
from gpumemwidget.remote.writer.recorder import (
    FileRecording,
    MeasuredSpan,
    find_recorder,
    report_failure,
)

#: Maximum number of errors, each the cause of the one before, that are searched for a training's.
_MAX_LINKS = 100


class TrainingMeter:
    """The peaks and the spans of one training at a time.

    Args:
        every_steps: record each step whose number is a multiple of this; ``None`` for none.

    Raises:
        BadInputError: ``every_steps`` is no positive number.
    """

    def __init__(self, every_steps: int | None) -> None:
        if every_steps is not None and (not isinstance(every_steps, int) or every_steps < 1):
            raise BadInputError(f"every_steps is {every_steps!r}: give a number from 1 on")
        self._every_steps = every_steps
        #: The loop of the training; ``None`` where its trainer reports each error itself.
        self._loop: TrainingLoop | None = None
        #: Measures the peaks while a training runs.
        self._hardware: Hardware | None = None
        self._is_open = False
        #: Ends what a training has begun, its spans excepted.
        self._opened = ExitStack()
        #: The spans that are open, by their names, the outermost first.
        self._spans: dict[str, MeasuredSpan] = {}
        self._failures: Notes[str] = Notes()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the settings alone: a recording belongs to its own process."""
        return TrainingMeter, (self._every_steps,)

    def open(self, folder: str | os.PathLike[str], loop: TrainingLoop | None = None) -> None:
        """Begin to record into a folder, unless this process is recorded already.

        Args:
            folder: where the recording goes.
            loop: the loop of a trainer that does not report its errors: the training ends when a
                cell or the program has ended, or another training begins, without it.
        """
        self._end()
        for meter in tuple(_running.values()):
            meter.end_if_over(next_loop=loop)
        self._loop, self._is_open = loop, True
        number = next(number for number in count() if _running.setdefault(number, self) is self)
        self._opened.callback(_running.pop, number)
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if shell is not None and loop is not None:
            shell.events.register("post_run_cell", self.end_if_over)
            self._opened.callback(_unregister, shell.events, self.end_if_over)
        with self._guarding("beginning the recording"), suppress(BusyError):
            if find_recorder("run") is None:
                self._opened.enter_context(FileRecording(folder))
        if loop is not None:
            # Before the recorder ends the recording at the program's exit.
            atexit.register(self._end)
            self._opened.callback(atexit.unregister, self._end)
        with self._guarding("reading the peaks"):
            hardware = keep_hardware(f"trainers {number}")
            hardware.start_span()
            self._hardware = hardware

    def close(self, error: BaseException | None = None) -> None:
        """End the recording and its open spans, with the error that ended the training, if any.

        May be called twice.
        """
        self._hardware, self._is_open = None, False
        kind = None if error is None else type(error)
        with self._guarding("ending the recording"):
            while self._spans:
                self._spans.popitem()[1].__exit__(kind, error, None)
        with self._guarding("ending the recording"):
            self._opened.__exit__(kind, error, None)

    def end_if_over(self, cell: Any = None, *, next_loop: TrainingLoop | None = None) -> None:
        """End a training whose loop was left without an event.

        Args:
            cell: the result of a cell that has ended: its error may have ended the training.
            next_loop: the loop of a training that begins now.
        """
        if self._is_open and self._loop is not None and not self._loop.is_running(next_loop):
            self._end(getattr(cell, "error_in_exec", None))

    def _end(self, error: BaseException | None = None) -> None:
        """End a training that reported no end, with an error if that came out of its loop."""
        unreported = GpuMemError("the training did not report its end")
        known = (error, sys.exc_info()[1], getattr(sys, "last_value", None))
        raised = () if self._loop is None else filter(self._loop.has_raised, known)
        self.close(next(iter(raised), unreported))

    @contextmanager
    def _guarding(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - a failure of ours is never the training's
            report_failure(self._failures, what, exc, "the training")

    def begin(self, name: str, number: int | None = None) -> None:
        """Begin a span of the training within those that are open, unless it is open already."""
        if self._is_open and name not in self._spans:
            span = MeasuredSpan(name, number)
            span.__enter__()
            self._spans[name] = span

    def begin_step(self, number: int) -> None:
        """Begin the span of a step, if it is one of those that are recorded."""
        if self._every_steps and number % self._every_steps == 0:
            self.begin("training step", number)

    def end(self, name: str) -> None:
        """End a span and what is open within it; nothing where it is not open."""
        while name in self._spans:
            self._spans.popitem()[1].__exit__(None, None, None)

    def read_peaks(self) -> dict[str, int]:
        """Return the exact peaks since the last call, in bytes; nothing where no training runs.

        ``memory/allocated_peak_bytes`` and ``memory/reserved_peak_bytes`` are the first used GPU's;
        further ones have their own name (``memory/cuda:1/…``). The host's is the peak of its
        resident size.
        """
        if self._hardware is None:
            return {}
        amounts: dict[str, int | None] = {}
        with self._guarding("reading the peaks"):
            for reading in self._hardware.read_exact():
                if reading.device == HOST:
                    amounts["memory/host_resident_peak_bytes"] = reading.reserved_peak_bytes
                else:
                    prefix = f"memory/{reading.device}" if amounts else "memory"
                    amounts[f"{prefix}/allocated_peak_bytes"] = reading.allocated_peak_bytes
                    amounts[f"{prefix}/reserved_peak_bytes"] = reading.reserved_peak_bytes
            self._hardware.start_span()
        return {name: n_bytes for name, n_bytes in amounts.items() if n_bytes is not None}


class TrainingLoop:
    """The call in which a training runs: found again on its thread, and not held.

    Args:
        frame: the frame of the call.
        state: an object that belongs to this training alone; no reference to it is kept.
    """

    def __init__(self, frame: FrameType, state: object) -> None:
        self._place = id(frame), frame.f_code
        self._thread_id = threading.get_ident()
        self._find_state = weakref.ref(state)

    def is_running(self, next_loop: TrainingLoop | None = None) -> bool:
        """Return whether the call goes on, given that another training begins in ``next_loop``."""
        # A call that has ended may have left its place to the next one.
        if next_loop is not None and next_loop._place == self._place:
            return next_loop._find_state() is self._find_state()
        frame = sys._current_frames().get(self._thread_id)
        return frame is not None and self._is_among(traceback.walk_stack(frame))

    def has_raised(self, error: BaseException | None) -> bool:
        """Return whether an error, or one that it was raised from, came out of the call."""
        for _ in range(_MAX_LINKS):
            if error is None:
                return False
            if self._is_among(traceback.walk_tb(error.__traceback__)):
                return True
            cause = error.__cause__
            error = error.__context__ if cause is None else cause
        return False

    def _is_among(self, frames: Iterable[tuple[FrameType, int]]) -> bool:
        return any((id(frame), frame.f_code) == self._place for frame, _ in frames)


def _unregister(events: Any, hook: Callable[..., None]) -> None:
    # The notebook's user may have removed all hooks.
    with suppress(ValueError):
        events.unregister("post_run_cell", hook)


#: The trainings that run. Each has hardware of its own, by this number: reading peaks resets them.
_running: dict[int, TrainingMeter] = {}
