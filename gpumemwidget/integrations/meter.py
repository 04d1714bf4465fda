"""What the callbacks of all trainers do: record spans, and read the peaks since the last log."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from contextlib import ExitStack, suppress
from itertools import count
from typing import Any

from gpumemwidget.backends.hardware import Hardware, keep_hardware
from gpumemwidget.errors import BadInputError, BusyError, GpuMemError
from gpumemwidget.model.devices import HOST
from gpumemwidget.remote.writer.recorder import FileRecording, MeasuredSpan, find_recorder


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
        #: Measures the peaks while a training runs.
        self._hardware: Hardware | None = None
        #: Ends what a training has begun, its spans excepted.
        self._opened = ExitStack()
        #: The spans that are open, by their names, the outermost first.
        self._spans: dict[str, MeasuredSpan] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the settings alone: a recording belongs to its own process."""
        return TrainingMeter, (self._every_steps,)

    def open(self, training: object, folder: str | os.PathLike[str]) -> None:
        """Begin to record into a folder, unless this process is recorded already.

        An earlier training of this thread, or of one that has ended, must have failed: it ends.

        Args:
            training: an object that belongs to this training alone; no reference to it is kept.
            folder: where the recording goes.
        """
        self.stop()
        run = self, threading.current_thread(), weakref.ref(training)
        for meter, thread, find_training in tuple(_running.values()):
            is_over = thread is run[1] or not thread.is_alive()
            if is_over and find_training() is not training:
                meter.stop()
        with suppress(BusyError):
            if find_recorder("run") is None:
                self._opened.enter_context(FileRecording(folder))
        number = next(number for number in count() if _running.setdefault(number, run) is run)
        self._opened.callback(_running.pop, number)
        atexit.register(self.stop)
        self._opened.callback(atexit.unregister, self.stop)
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if shell is not None and run[1] is threading.main_thread():
            shell.events.register("post_run_cell", self.stop)
            self._opened.callback(shell.events.unregister, "post_run_cell", self.stop)
        self._hardware = keep_hardware(f"trainers {number}")
        self._hardware.start_span()

    def close(self, error: BaseException | None = None) -> None:
        """End the recording and its open spans, with the error that ended the training, if any.

        May be called twice.
        """
        self._hardware, kind = None, None if error is None else type(error)
        while self._spans:
            self._spans.popitem()[1].__exit__(kind, error, None)
        self._opened.__exit__(kind, error, None)

    def stop(self, cell: Any = None) -> None:
        """End a training that failed without an event: with this cell's result, or the program."""
        # The program's own error, at its exit: an interpreter goes on after one.
        last = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        error = getattr(cell, "error_in_exec", last)
        self.close(error or GpuMemError("the training did not report its end"))

    def begin(self, name: str, number: int | None = None) -> None:
        """Begin a span within those that are open; nothing where it is open already."""
        if name not in self._spans:
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
        for reading in self._hardware.read_exact():
            if reading.device == HOST:
                amounts["memory/host_resident_peak_bytes"] = reading.reserved_peak_bytes
            else:
                prefix = f"memory/{reading.device}" if amounts else "memory"
                amounts[f"{prefix}/allocated_peak_bytes"] = reading.allocated_peak_bytes
                amounts[f"{prefix}/reserved_peak_bytes"] = reading.reserved_peak_bytes
        self._hardware.start_span()
        return {name: n_bytes for name, n_bytes in amounts.items() if n_bytes is not None}


#: The trainings that run. Each has hardware of its own, by this number: reading peaks resets them.
_running: dict[int, tuple[TrainingMeter, threading.Thread, weakref.ref[Any]]] = {}
