"""What the callbacks of all trainers do: record spans, and read the peaks since the last log."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import ExitStack, suppress
from itertools import count
from typing import Any

from gpumemwidget.backends.hardware import Hardware, keep_hardware
from gpumemwidget.errors import BadInputError, BusyError, GpuMemError
from gpumemwidget.model.devices import HOST
from gpumemwidget.remote.writer.recorder import FileRecording, MeasuredSpan


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
        self.thread = threading.current_thread()
        #: Ends what a training has begun, its spans excepted.
        self._opened = ExitStack()
        #: The spans that are open, the outermost first.
        self._spans: list[tuple[str, MeasuredSpan]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the settings alone: a recording belongs to its own process."""
        return TrainingMeter, (self._every_steps,)

    def open(self, folder: str | os.PathLike[str]) -> None:
        """Begin to record into a folder, unless this process is recorded already.

        A training that failed on this thread, or on one that has ended, ends here at the latest.
        """
        self.stop()
        self.thread = threading.current_thread()
        for meter in tuple(_running.values()):
            if meter.thread is self.thread or not meter.thread.is_alive():
                meter.stop()
        with suppress(BusyError):
            self._opened.enter_context(FileRecording(folder))
        number = next(number for number in count() if _running.setdefault(number, self) is self)
        self._opened.callback(_running.pop, number)
        atexit.register(self.stop)
        self._opened.callback(atexit.unregister, self.stop)
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if shell is not None and self.thread is threading.main_thread():
            shell.events.register("post_run_cell", self.stop)
            self._opened.callback(shell.events.unregister, "post_run_cell", self.stop)
        self._hardware = keep_hardware(f"trainers {number}")
        self._hardware.start_span()

    def close(self, error: BaseException | None = None) -> None:
        """End the recording and its open spans, with the error that ended the training, if any.

        May be called twice.
        """
        kind, self._hardware = None if error is None else type(error), None
        while self._spans:
            self._spans.pop()[1].__exit__(kind, error, None)
        self._opened.__exit__(kind, error, None)

    def stop(self, cell: Any = None) -> None:
        """End a training that failed, and whose trainer has no event for that.

        Args:
            cell: IPython's result of the cell that it ran in, if that has ended.
        """
        # The program's own error, at its exit: an interpreter goes on after one.
        last = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        error = getattr(cell, "error_in_exec", last)
        self.close(error or GpuMemError("the training did not report its end"))

    def begin(self, name: str, number: int | None = None) -> None:
        """Begin a span within those that are open; nothing where it is open already."""
        if all(known != name for known, _ in self._spans):
            span = MeasuredSpan(name, number)
            span.__enter__()
            self._spans.append((name, span))

    def begin_step(self, number: int) -> None:
        """Begin the span of a step, if it is one of those that are recorded."""
        if self._every_steps and number % self._every_steps == 0:
            self.begin("training step", number)

    def end(self, name: str) -> None:
        """End a span and what is open within it; nothing where it is not open."""
        if any(known == name for known, _ in self._spans):
            ended = ""
            while ended != name:
                ended, span = self._spans.pop()
                span.__exit__(None, None, None)

    def read_peaks(self) -> dict[str, int]:
        """Return the exact peaks since the last call, in bytes; nothing where no training runs.

        ``memory/allocated_peak_bytes`` and ``memory/reserved_peak_bytes`` are the first used GPU's;
        further ones have their own name (``memory/cuda:1/…``). The host's is the peak of its
        resident size.
        """
        if self._hardware is None:
            return {}
        amounts: dict[str, int | None] = {}
        for reading in self._hardware.end_span():
            if reading.device == HOST:
                amounts["memory/host_resident_peak_bytes"] = reading.reserved_peak_bytes
            else:
                prefix = f"memory/{reading.device}" if amounts else "memory"
                amounts[f"{prefix}/allocated_peak_bytes"] = reading.allocated_peak_bytes
                amounts[f"{prefix}/reserved_peak_bytes"] = reading.reserved_peak_bytes
        self._hardware.start_span()
        return {name: n_bytes for name, n_bytes in amounts.items() if n_bytes is not None}


#: The meters of the trainings that run. Each has hardware of its own, by this number: reading its
#: peaks begins them anew.
_running: dict[int, TrainingMeter] = {}
