"""Read and write the file of PyTorch's memory viewer: a pickle, which may come from anywhere.

Nothing that the pickle names is looked up, so that it can make plain containers and nothing else.
The viewer: https://docs.pytorch.org/memory_viz, and ``python torch/cuda/_memory_viz.py``.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpumemwidget.backends.cuda.snapshot import parse_traces
from gpumemwidget.errors import FileError
from gpumemwidget.model.traces import AllocatorTrace, NoteKind, TraceNote
from gpumemwidget.progress import Stage, report_progress


def load_snapshot(path: Path) -> tuple[AllocatorTrace, ...]:
    """Return the traces of a file that ``torch.cuda.memory._dump_snapshot`` or a trace wrote.

    The file has the segments at its end alone: the traces have nothing ``before`` and are not
    whole.

    Args:
        path: the file, of up to 2 GiB: in memory a snapshot takes some ten times that.

    Returns:
        A trace of each device that has memory or events, by index.

    Raises:
        FileError: the file is too large, or has no events.
        Exception: any other, for a file that can't be read, is cut short or no snapshot, or asks
            for something to be run.
    """
    if path.stat().st_size > 2 << 30:
        raise FileError(f"{path} holds more than 2 GiB: record fewer events (max_entries)")
    with io.BufferedReader(_ReportingFile(path), 1 << 20) as file:
        snapshot = _PlainUnpickler(file).load()
    device_traces = snapshot["device_traces"]
    if not any(device_traces):
        raise FileError(
            f"{path} holds no events: record a history before it is written "
            "(torch.cuda.memory._record_memory_history())"
        )
    indices = {segment["device"] for segment in snapshot["segments"]}
    for index, raw in enumerate(device_traces):
        # Every device has the event of the snapshot itself, in use or not.
        if any(event["action"] != "snapshot" for event in raw):
            indices.add(index)
    end_us = max(raw[-1]["time_us"] for raw in device_traces if raw)
    traces = parse_traces(snapshot, before=(), start_us=0, end_us=end_us, touched=indices)
    return tuple(
        dataclasses.replace(
            trace,
            # The trace begins with its own first event.
            start_us=trace.events.times_us[0] if trace.events.times_us else trace.end_us,
            is_whole=False,
            notes=(TraceNote(NoteKind.START_WORKED_OUT),),
        )
        for trace in traces
    )


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that makes plain containers only."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Refuse to look anything up."""
        raise pickle.UnpicklingError(f"{module_name}.{global_name} was to be run, and was not")


class _ReportingFile(io.FileIO):
    """A file that reports how much of it was read, part by part: a Ctrl-C is heard in between."""

    def readinto(self, buffer: Any) -> int | None:
        n_bytes = super().readinto(buffer)
        report_progress(Stage.READ_BYTES, self.tell(), os.fstat(self.fileno()).st_size)
        return n_bytes


def write_snapshot(snapshot: Mapping[str, Any], path: Path) -> None:
    """Write the result of ``torch.cuda.memory._snapshot()`` to a file, whole or not at all.

    A file of that name is replaced.

    Raises:
        FileError: the file can't be written.
    """
    # A file in the same folder can take the place of the other at once.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            with part.open("wb") as file:
                pickle.dump(snapshot, file)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(
            f"the snapshot can't be written to {path}: {error.strerror or error}; choose another "
            "file"
        ) from error
