"""Open recordings of processes: one file, or a folder with a file for each process."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # no types are published with it

from gpumemwidget.errors import GpuMemError, RecordingError
from gpumemwidget.model.processes import ProcessInfo, ProcessState
from gpumemwidget.recording.files import find_target
from gpumemwidget.recording.history import History
from gpumemwidget.remote.files import MessageReader, list_recordings
from gpumemwidget.remote.gathering.collector import Collector
from gpumemwidget.remote.gathering.gpus import share_gpus
from gpumemwidget.remote.gathering.skew import find_skews
from gpumemwidget.remote.messages import Message
from gpumemwidget.report.processes import report_processes
from gpumemwidget.report.render.output import Report

#: Seconds of silence after which a process without an end counts as lost: it tells something ten
#: times a second, which a shared file system may pass on late.
_SILENT_HERE_S = 2.0
_SILENT_ELSEWHERE_S = 15.0


class FileSource:
    """The recordings of a file or a folder; new ones in a folder are found.

    Args:
        path: the file or the folder.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._readers: dict[str, MessageReader] = {}

    def read(self) -> Iterator[tuple[str, Message]]:
        """Yield what was written since the last call.

        Raises:
            FileError: a file can't be read; those that can have been.
            RecordingError: a file was written by a newer gpumemwidget; likewise.
        """
        failure: GpuMemError | None = None
        for path in list_recordings(self._path):
            key = str(path)
            if key not in self._readers:
                self._readers[key] = MessageReader(path)
            try:
                for message in self._readers[key].read():
                    yield key, message
            except GpuMemError as exc:
                failure = exc
        if failure is not None:
            raise failure

    def is_alive(self, key: str, info: ProcessInfo) -> bool:
        """Return whether a process still runs, or wrote just now."""
        is_here = info.host == socket.gethostname()
        if is_here and runs_here(info):
            return True
        try:
            age_s = time.time() - Path(key).stat().st_mtime
        except OSError:
            return False
        return age_s < (_SILENT_HERE_S if is_here else _SILENT_ELSEWHERE_S)

    def measure_offset(self, key: str) -> float | None:  # noqa: ARG002 - of all sources
        """Return ``None``: a file doesn't tell."""
        return None

    def count_unread(self, key: str) -> int:
        """Return the number of lines that are no messages."""
        return self._readers[key].n_unread

    def close(self) -> None:
        """Do nothing: files are open only while they are read."""


def runs_here(info: ProcessInfo) -> bool:
    """Return whether a process of this host still runs."""
    try:
        # The kernel gives a pid to another process again.
        return bool(psutil.Process(info.pid).create_time() <= info.started_at)
    except (psutil.Error, ValueError):  # No process has a pid below 0.
        return False


class Recordings:
    """The recorded processes of a file or a folder, which may still be written to.

    Displayed, it is a report of all of them. ``update()`` reads what has come since.

    Args:
        path: a file, or a folder whose recordings are read; new ones are found by ``update``.

    Raises:
        FileError: nothing is there, or it can't be read.
        RecordingError: it is a file, and no recording.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = find_target(path)
        list_recordings(self.path)
        self._collector = Collector(_raise)
        self._collector.add(FileSource(self.path))
        self.update()
        if self.path.is_file() and not self.processes:
            raise RecordingError(
                f"{self.path} is no recording: choose a file that gpumemwidget.record() or "
                "python -m gpumemwidget run has written"
            )

    def update(self) -> Recordings:
        """Read what was written since the last call; return the same object.

        Raises:
            FileError: a file can't be read any more; the others have been read.
            RecordingError: a file was written by a newer gpumemwidget; likewise.
        """
        self._collector.read()
        return self

    @property
    def processes(self) -> tuple[ProcessState, ...]:
        """The processes: ranks in their order, others by the beginning of their recording."""
        return self._collector.processes

    def find_history(self, process: ProcessState) -> History:
        """Return the samples of one of ``processes``, in seconds since its recording began."""
        return self._collector.find_history(process)

    def report(self) -> Report:
        """Return the report of all processes, as text and as HTML."""
        states = self.processes
        samples = self.find_history(states[0]).samples() if len(states) == 1 else ()
        return report_processes(states, share_gpus(states), find_skews(states), samples=samples)

    def _repr_html_(self) -> str:
        return self.report().html

    def __repr__(self) -> str:
        return self.report().text


def _raise(_what: str, exc: Exception) -> None:
    raise exc
