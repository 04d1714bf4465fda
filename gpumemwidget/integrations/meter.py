"""What the callbacks of all trainers do: record spans, and read the peaks since the last log."""

from __future__ import annotations

import os
from contextlib import suppress

from gpumemwidget.backends.hardware import keep_hardware
from gpumemwidget.errors import BadInputError, BusyError
from gpumemwidget.model.devices import HOST
from gpumemwidget.remote.writer.recorder import FileRecording, MeasuredSpan


class TrainingMeter:
    """The peaks and the spans of one training.

    Args:
        every_steps: record each step whose number is a multiple of this; ``None`` for none.

    Raises:
        BadInputError: ``every_steps`` is no positive number.
    """

    def __init__(self, every_steps: int | None) -> None:
        if every_steps is not None and (not isinstance(every_steps, int) or every_steps < 1):
            raise BadInputError(f"every_steps is {every_steps!r}: give a number from 1 on")
        self._every_steps = every_steps
        self._hardware = keep_hardware("trainers")
        self._recording: FileRecording | None = None
        #: The spans that are open, the outermost first.
        self._spans: list[tuple[str, MeasuredSpan]] = []

    def open(self, folder: str | os.PathLike[str]) -> None:
        """Begin to record into a folder, unless this process is recorded already."""
        self.close()
        with suppress(BusyError):
            self._recording = FileRecording(folder)
        self._hardware.start_span()

    def close(self) -> None:
        """End the recording and what is still open of its spans. May be called twice."""
        while self._spans:
            self._spans.pop()[1].__exit__(None, None, None)
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close()

    def begin(self, name: str, number: int | None = None) -> None:
        """Begin a span within those that are open."""
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

    def read_peaks(self) -> dict[str, float]:
        """Return the exact peaks since the last call, in bytes, by the names that a log has.

        ``memory/allocated_peak_bytes`` and ``memory/reserved_peak_bytes`` are the first used GPU's;
        further ones have their own name (``memory/cuda:1/…``). The host's is the peak of its
        resident size.
        """
        peaks: dict[str, float] = {}
        first = True
        for reading in self._hardware.end_span():
            if reading.device == HOST:
                amounts = {"memory/host_resident_peak_bytes": reading.reserved_peak_bytes}
            else:
                prefix = "memory" if first else f"memory/{reading.device}"
                first = False
                amounts = {
                    f"{prefix}/allocated_peak_bytes": reading.allocated_peak_bytes,
                    f"{prefix}/reserved_peak_bytes": reading.reserved_peak_bytes,
                }
            peaks.update({name: float(n) for name, n in amounts.items() if n is not None})
        self._hardware.start_span()
        return peaks
