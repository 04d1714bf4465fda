"""Open recordings of processes, watch them for a session, and find the GPUs that they share."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]  # no types are published with it

from gpumemwidget.errors import BadInputError, FileError, GpuMemError, RecordingError
from gpumemwidget.model.devices import HOST, DeviceUse
from gpumemwidget.model.processes import (
    DevicePeak,
    GpuPart,
    GpuShare,
    ProcessInfo,
    ProcessState,
    Skew,
)
from gpumemwidget.recording.files import find_target
from gpumemwidget.recording.history import History
from gpumemwidget.recording.monitor import Callbacks
from gpumemwidget.remote.messages import Began, Message, MessageReader, list_recordings
from gpumemwidget.remote.reader.collector import Collector, Source
from gpumemwidget.report.page import Redaction, render_story
from gpumemwidget.report.processes import (
    WATCHING_BEGINS,
    name_process,
    report_none_watched,
    report_processes,
    report_spans,
)
from gpumemwidget.report.render.output import Report

if TYPE_CHECKING:
    from gpumemwidget.session.session import Session


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
        paths: list[Path] = []
        try:
            paths, self.n_left_out = list_recordings(self._path)
        except FileError as exc:
            # What was read of a folder that is gone stays, and it is read on once it is back.
            failures.append(exc)
        for path in paths:
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

    def is_alive(self, key: str, info: ProcessInfo) -> bool:
        """Return whether a process still runs, or wrote just now."""
        is_here = info.host == socket.gethostname()
        if is_here and runs_here(info):
            return True
        try:
            age_s = time.time() - Path(key).stat().st_mtime
        except OSError:
            return False
        # It writes something ten times a second, which a shared file system may pass on late.
        return age_s < (2.0 if is_here else 15.0)

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


# -- The processes that a session watches ----------------------------------------------------------

#: Maximum number of seconds to wait for what the processes of engines have now, and then for what
#: the sources have.
_ENGINES_S, _FRESH_S = 1.5, 2.0


class Processes:
    """The processes that a session watches: ``session.attach(Processes)`` is the one of a session.

    Attributes:
        collector: has the processes; it reads on its thread from the first source on.
        changed: called when a source was added or taken away, with ``None``.
        gathered: called on the collector's thread when it has read the sources, with ``None``.

    Args:
        session: shows failures.
    """

    def __init__(self, session: Session) -> None:
        self.changed: Callbacks[None] = Callbacks(session.report_failure)
        self.gathered: Callbacks[None] = Callbacks(session.report_failure)
        self.collector = Collector(session.report_failure, on_read=lambda: self.gathered.call(None))

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources, in the order in which they were added."""
        return self.collector.sources

    def add(self, source: Source) -> Watch:
        """Watch the processes of a source from now on, until the result is closed."""
        self.collector.add(source)
        self.collector.start()
        self.collector.read_soon()
        self.changed.call(None)
        return Watch(self, source)

    def remove(self, source: Source) -> None:
        """Watch the processes of a source no more, and forget them."""
        if source in self.sources:
            self.collector.remove(source)
            self.changed.call(None)

    def report(self) -> Report:
        """Return the report of all processes, as they are now; without a source, how to begin."""
        if not self.sources:
            return report_none_watched()
        states = self.list_states()
        return report_processes(
            states,
            share_gpus(states),
            find_skews(states),
            unread=self.list_unread(),
            n_older=self.collector.n_older,
        )

    def report_spans(self) -> Report:
        """Return the report of the spans of each process."""
        return report_spans(self.list_states())

    def list_unread(self) -> tuple[str, ...]:
        """Return why some files can't be read, one sentence a file."""
        failures = [failure for source in self.sources for failure in source.failures]
        # A folder may be watched twice.
        return tuple(dict.fromkeys(map(str, failures)))

    def list_states(self) -> tuple[ProcessState, ...]:
        """Return the processes, with what has come until now.

        Of a source that does not answer they are as they were heard last.
        """
        if not self.sources:
            raise BadInputError(f"no other process is watched: {WATCHING_BEGINS}")
        deadline_s = time.monotonic() + _ENGINES_S
        for source in self.sources:
            # Engines pass on what they have twice a second; a file has it at once.
            if (wait := getattr(source, "wait_for_all", None)) is not None:
                wait(max(0.0, deadline_s - time.monotonic()))
        self.collector.wait_for_read(_FRESH_S)
        return self.collector.processes

    def close(self) -> None:
        """Watch nothing any more. May be called twice."""
        self.collector.close()


class Watch:
    """A source that is watched, until ``close``."""

    def __init__(self, processes: Processes, source: Source) -> None:
        self._processes = processes
        self._source = source

    def close(self) -> None:
        """Watch it no more, and forget its processes. May be called twice."""
        self._processes.remove(self._source)

    def __repr__(self) -> str:
        is_open = self._source in self._processes.sources
        return f"<{'watching' if is_open else 'no longer watching'} {self._source.name}>"


# -- The GPUs that they share ----------------------------------------------------------------------


def share_gpus(states: Sequence[ProcessState]) -> tuple[GpuShare, ...]:
    """Return the GPUs that these processes use, host by host.

    A GPU is known by its UUID: its index is another one in each process that sees other GPUs.
    """
    groups: dict[tuple[str, str], list[tuple[ProcessState, int]]] = {}
    for state in states:
        for place, info in enumerate(state.devices):
            if info.device != HOST:
                key = info.uuid or f"{state.info.id} {info.device}"
                groups.setdefault((state.info.host, key), []).append((state, place))
    shares = []
    for (host, _), members in groups.items():
        infos = [state.devices[place] for state, place in members]
        use = _find_use(members)
        total = infos[0].total_bytes
        shares.append(
            GpuShare(
                host=host,
                uuid=infos[0].uuid,
                name=infos[0].name,
                total_bytes=total if use is None or use.total_bytes is None else use.total_bytes,
                used_bytes=None if use is None else use.used_bytes,
                free_bytes=None if use is None else use.free_bytes,
                parts=tuple(
                    _make_part(state, state.devices[place].device) for state, place in members
                ),
            )
        )
    return tuple(sorted(shares, key=lambda share: (share.host, share.uuid or "")))


def _find_use(members: Sequence[tuple[ProcessState, int]]) -> DeviceUse | None:
    """Return the newest use of a GPU that a running process has read; ``None`` if there is none.

    What a process read at its end counts memory that it has given back since.
    """
    found = [
        (state, use)
        for state, place in members
        for use in state.uses
        if state.status == "running"
        and use.device == state.devices[place].device
        and use.used_bytes is not None
    ]
    _, use = max(found, key=lambda pair: pair[0].heard_at, default=(None, None))
    return use


def _make_part(state: ProcessState, device: str) -> GpuPart:
    reading = next((found for found in state.readings if found.device == device), None)
    own_bytes = dict(state.own_bytes).get(device)
    n_bytes = own_bytes
    if own_bytes is None and reading is not None:
        n_bytes = reading.reserved_bytes
    if state.status != "running":
        n_bytes = 0
    return GpuPart(
        process=state,
        device=device,
        reading=reading,
        peak=next((peak for peak in state.peaks if peak.device == device), None),
        n_bytes=n_bytes,
    )


def find_skews(states: Sequence[ProcessState]) -> tuple[Skew, ...]:
    """Return the processes whose peak is well above the median of those with the same role.

    Compared are the peaks of *allocated* on each process's fullest GPU; with fewer than three
    processes there is no median to speak of.

    Returns:
        The biggest difference first.
    """
    found = []
    for role in {state.info.role for state in states}:
        peaks = [
            (state, peak)
            for state in states
            if state.info.role == role and (peak := _find_fullest(state)) is not None
        ]
        if len(peaks) < 3:
            continue
        middle = median_low(peak.allocated_bytes or 0 for _, peak in peaks)
        for state, peak in peaks:
            above = (peak.allocated_bytes or 0) - middle
            # By less than 5 % of the median, or 64 MiB, a peak does not stand out.
            if above >= max(64 * 1024**2, 0.05 * middle):
                found.append(Skew(state, peak, above, len(peaks)))
    return tuple(sorted(found, key=lambda skew: -skew.above_median_bytes))


def _find_fullest(state: ProcessState) -> DevicePeak | None:
    peaks = [p for p in state.peaks if p.device != HOST and p.allocated_bytes is not None]
    return max(peaks, key=lambda peak: peak.allocated_bytes or 0, default=None)
