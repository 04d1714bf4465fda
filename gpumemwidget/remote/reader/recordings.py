"""Open recordings of processes: one file, or a folder with a file for each process."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # no types are published with it

from gpumemwidget.errors import FileError, GpuMemError, RecordingError
from gpumemwidget.model.processes import ProcessInfo, ProcessState
from gpumemwidget.recording.files import find_target
from gpumemwidget.recording.history import History
from gpumemwidget.remote.message_files import MessageReader, list_recordings
from gpumemwidget.remote.messages import Began, Message
from gpumemwidget.remote.reader.collector import Collector
from gpumemwidget.remote.reader.gpus import find_skews, share_gpus
from gpumemwidget.report.page import Redaction, render_story
from gpumemwidget.report.processes import name_process, report_processes
from gpumemwidget.report.render.output import Report

#: Seconds of silence after which a process without an end counts as lost: it writes something
#: ten times a second, which a shared file system may pass on late.
_SILENT_HERE_S = 2.0
_SILENT_ELSEWHERE_S = 15.0


class FileSource:
    """The recordings of a file or a folder; new ones in a folder are found.

    Attributes:
        failures: what could not be read at the last look, an error for each file.
        n_left_out: number of older files that are not read, as there are so many.

    Args:
        path: the file or the folder.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._readers: dict[str, MessageReader] = {}
        self.failures: tuple[GpuMemError, ...] = ()
        self.n_left_out = 0

    def read(self) -> Iterator[tuple[str, Message | None]]:
        """Yield what was written since the last call.

        Raises:
            FileError: a file can't be read; those that can have been.
            RecordingError: a file was written by a newer gpumemwidget; likewise.
        """
        failures: list[GpuMemError] = []
        for path in self._list_paths(failures):
            key = str(path)
            if key not in self._readers:
                self._readers[key] = MessageReader(path)
            try:
                for message in self._readers[key].read():
                    yield key, message
            except GpuMemError as exc:
                failures.append(exc)
        self.failures = tuple(failures)
        if failures:
            raise failures[0]

    def _list_paths(self, failures: list[GpuMemError]) -> list[Path]:
        try:
            paths, self.n_left_out = list_recordings(self._path)
            return paths
        except FileError:
            # The folder was there when the user named it.
            words = "is gone, or can't be read: what was read stays, and it is read on once it can"
            failures.append(FileError(f"{self._path} {words}"))
            return []

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

    def close(self) -> None:
        """Do nothing: files are open only while they are read."""


def runs_here(info: ProcessInfo) -> bool:
    """Return whether a process of this host still runs."""
    try:
        process = psutil.Process(info.pid)
        # One that was killed stays as a zombie until its parent has waited for it.
        has_ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        # The kernel gives a pid to another process again.
        return not has_ended and bool(process.create_time() <= info.started_at)
    except (psutil.Error, ValueError):  # No process has a pid below 0.
        return False


def open_source(path: str | os.PathLike[str]) -> FileSource:
    """Return the source of a file or a folder that a user names.

    Raises:
        FileError: nothing is there, or it can't be read.
        RecordingError: it is a file, and no recording that can be read here.
    """
    target = find_target(path, example="runs/first.jsonl")
    if not os.fspath(path):
        raise FileError("'' is no path: name a recording, or a folder that has some")
    if list_recordings(target)[0] == [target]:
        first = next(MessageReader(target).read(), None)
        if type(first) is not Began:
            raise RecordingError(
                f"{target} is no recording: choose a file that gpumemwidget.record() or "
                "python -m gpumemwidget run has written"
            )
    return FileSource(target)


class Recordings:
    """The recorded processes of a file or a folder, which may still be written to.

    Displayed, it is a report of all of them, and says which files could not be read.
    ``update()`` reads what has come since.

    Args:
        path: a file, or a folder whose recordings are read; new ones are found by ``update``.

    Raises:
        FileError: nothing is there, or nothing of it can be read.
        RecordingError: it is a file, and no recording, or all were written by a newer gpumemwidget.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._source = open_source(path)
        self.path = Path(self._source.name)
        self._collector = Collector(_raise_unless_kept)
        self._collector.add(self._source)
        self.update()

    def update(self) -> Recordings:
        """Read what was written since the last call; return the same object.

        Raises:
            FileError: files can't be read, and no process is known.
            RecordingError: files were written by a newer gpumemwidget; likewise.
        """
        self._collector.read()
        if self.failures and not self.processes:
            raise self.failures[0]
        return self

    @property
    def processes(self) -> tuple[ProcessState, ...]:
        """The processes: ranks in their order, others by the beginning of their recording."""
        return self._collector.processes

    @property
    def failures(self) -> tuple[GpuMemError, ...]:
        """The files that could not be read: an error for each of them."""
        return self._source.failures

    def find_history(self, process: ProcessState) -> History:
        """Return the samples of one of ``processes``, in seconds since its recording began."""
        return self._collector.find_history(process)

    def report(self) -> Report:
        """Return the report of all processes, as text and as HTML."""
        return self._report(Redaction(is_off=True))

    def to_page(self, *, is_redacted: bool = False) -> str:
        """Return all processes, and each by itself with its plot, as one HTML page."""
        redaction, states = Redaction(is_off=not is_redacted), self.processes
        sections = [("Processes", self._report(redaction))]
        for state in states[:32] if len(states) > 1 else ():
            shown, samples = redaction.redact(state), self.find_history(state).samples()
            one = report_processes([shown], samples=samples)
            sections.append((name_process(shown.info), one))
        title = f"GPU memory of {'a recording' if is_redacted else self.path.name}"
        return render_story(title, sections, is_redacted=is_redacted)

    def _report(self, redaction: Redaction) -> Report:
        states, failures = self.processes, self.failures
        samples = self.find_history(states[0]).samples() if len(states) == 1 else ()
        return report_processes(
            redaction.redact(states),
            redaction.redact(share_gpus(states)),
            redaction.redact(find_skews(states)),
            samples=samples,
            unread=redaction.redact([str(failure) for failure in failures]),
            n_older=self._collector.n_older,
        )

    def _repr_html_(self) -> str:
        return self.report().html

    def __repr__(self) -> str:
        return self.report().text


def _raise_unless_kept(_what: str, exc: Exception) -> None:
    # The source keeps what a file is at fault for, and the report says it.
    if not isinstance(exc, GpuMemError):
        raise exc
