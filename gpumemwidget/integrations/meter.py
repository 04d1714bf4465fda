"""What the callbacks of all trainers do: record spans, and read the peaks since the last log."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
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

#: The error of a training that failed and whose trainer did not say why.
UNREPORTED = GpuMemError("the training did not report its end")


class TrainingMeter:
    """The peaks and the spans of one training at a time.

    Attributes:
        is_open: True from ``open`` until ``close``.
        is_block: True from ``open`` until ``close`` of a recording whose end is always reported.

    Args:
        every_steps: record each step whose number is a multiple of this; ``None`` for none.

    Raises:
        BadInputError: ``every_steps`` is no positive number.
    """

    def __init__(self, every_steps: int | None) -> None:
        if every_steps is not None and (not isinstance(every_steps, int) or every_steps < 1):
            raise BadInputError(f"every_steps is {every_steps!r}: give a number from 1 on")
        self._every_steps = every_steps
        self.is_open = self.is_block = False
        #: Measures the peaks while a training runs.
        self._hardware: Hardware | None = None
        #: Ends what ``open`` has begun.
        self._opened = ExitStack()
        #: The spans that are open, by their names, the outermost first.
        self._spans: dict[str, MeasuredSpan] = {}
        self._failures: Notes[str] = Notes()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the settings alone: a recording belongs to its own process."""
        return TrainingMeter, (self._every_steps,)

    def open(self, folder: str | os.PathLike[str], *, is_block: bool = False) -> None:
        """Begin to record into a folder, unless this process is recorded already.

        Other trainings that are open end as failed ones, unless their ends are always reported.

        Args:
            folder: where the recording goes.
            is_block: whether ``close`` is called in any case, also after an error.
        """
        for meter in tuple(_open_meters.values()):
            if meter is self or not meter.is_block:
                meter.close(UNREPORTED)
        self.is_open, self.is_block = True, is_block
        number = next(n for n in count() if _open_meters.setdefault(n, self) is self)
        self._opened.callback(_open_meters.pop, number, None)
        with self._guarding("beginning the recording"), suppress(BusyError):
            if find_recorder("run") is None:
                self._opened.enter_context(FileRecording(folder))
        if not is_block:
            # Before the recorder ends the recording at the program's exit.
            atexit.register(self.end_spans, UNREPORTED)
            self._opened.callback(atexit.unregister, self.end_spans)
        with self._guarding("reading the peaks"):
            hardware = keep_hardware(f"trainers {number}")
            hardware.start_span()
            self._hardware = hardware

    def close(self, error: BaseException | None = None) -> None:
        """End the recording and the open spans, with the error that ended the training, if any.

        May be called twice.
        """
        self._hardware, self.is_open, self.is_block = None, False, False
        self.end_spans(error)
        with self._guarding("ending the recording"):
            self._opened.__exit__(None if error is None else type(error), error, None)

    def begin(self, name: str, number: int | None = None) -> None:
        """Begin a span within those that are open, unless it is open already."""
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

    def end_spans(self, error: BaseException | None = None) -> None:
        """End all spans that are open, with the error that ended them, if any."""
        with self._guarding("ending the recording"):
            while self._spans:
                kind = None if error is None else type(error)
                self._spans.popitem()[1].__exit__(kind, error, None)

    def read_peaks(self) -> dict[str, int]:
        """Return the exact peaks since the last call, in bytes; nothing where no training runs.

        Those of the first GPU in use have no device in their names; others have their own.
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

    @contextmanager
    def _guarding(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - a failure of ours is never the training's
            report_failure(self._failures, what, exc, "the training")


#: The meters that are open. Each has hardware of its own, by its number: reading resets the peaks.
_open_meters: dict[int, TrainingMeter] = {}
