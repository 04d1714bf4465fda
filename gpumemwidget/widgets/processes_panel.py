"""Serve the Processes tab: the hosts, their GPUs with the processes on them, and one's own report.

All of it is described on the thread that gathers what the processes write: a share that hangs must
hold up neither the kernel nor its sampler. ``js/processes.js`` reads these messages.

Names come from other machines and are data: they are cleaned and cut here, and set as text there.
"""

from __future__ import annotations

import functools
import re
import socket
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpumemwidget.model.devices import HOST, Reading
from gpumemwidget.model.processes import (
    DevicePeak,
    GpuShare,
    ProcessState,
    Skew,
    choose_processes,
)
from gpumemwidget.recording.history import History
from gpumemwidget.remote.reader.recordings import Processes, find_skews, share_gpus
from gpumemwidget.report.processes import (
    name_peak_span,
    name_process,
    name_processes,
    report_processes,
    word_skew,
    word_status,
)
from gpumemwidget.report.render.markup import clean
from gpumemwidget.report.render.text import cut
from gpumemwidget.widgets.page import Message, Page, attempt

if TYPE_CHECKING:
    from gpumemwidget.remote.reader.collector import Source

#: Minimum number of seconds between two messages about few processes. With every further
#: ``_N_FEW`` of them it is as long again: many processes cost the kernel hardly more.
_SEND_EVERY_S = 0.9
_N_FEW = 60
#: Maximum number of processes in a message, and of one process's GPUs.
MAX_PROCESSES = 200
#: A process's line: maximum number of points, and the seconds of one point.
MAX_POINTS = 60
_POINT_S = 2.0
#: Maximum number of processes that stand out and are named, and of files that can't be read.
_MAX_SKEWS = _MAX_UNREAD = 4
#: Seconds of silence from which a running process is shown as silent.
_SILENT_S = 15.0
#: Maximum number of columns of a name, and of the line of an error.
_MAX_NAME, _MAX_ERROR = 60, 200


class ProcessesPanel:
    """Sends to the views the processes that the session watches, while one shows the tab."""

    def __init__(self, page: Page, *, is_seen: Callable[[], bool]) -> None:
        self._monitor = page.session.monitor
        self._processes = page.session.attach(Processes)
        self._send = page.send
        self._is_seen = is_seen
        self._sources: tuple[Source, ...] = ()
        self._lines: dict[str, ProcessLines] = {}
        #: Ids of the processes whose reports were asked for.
        self._asked: deque[str] = deque(maxlen=8)
        self._sent: Message | None = None
        self._due_s = 0.0

    def look_soon(self) -> None:
        """Send the processes as soon as they are read."""
        self._sent, self._due_s = None, 0.0
        self._read_soon()

    def report_soon(self, request: Message) -> None:
        """Send the report of a process: its spans, its timeline, the cards of its OOMs."""
        self._asked.append(str(request["id"]))
        self._read_soon()

    def update(self) -> None:
        """Send what is asked for and what is new; on the collector's thread."""
        while self._asked:
            self._send_report(self._asked.popleft())
        now_s = self._monitor.clock.now()
        if not self._is_seen() or now_s < self._due_s:
            return
        n_listed = 0 if self._sent is None else min(self._sent["n_processes"], MAX_PROCESSES)
        # Before the work: a page that opens the tab meanwhile wants the next one at once.
        self._due_s = now_s + _SEND_EVERY_S * (1 + n_listed // _N_FEW)
        message = self._describe()
        if message != self._sent:
            self._sent = message
            self._send(message)

    def _read_soon(self) -> None:
        if self._processes.sources:
            self._processes.collector.read_soon()

    def _describe(self) -> Message:
        collector = self._processes.collector
        states = collector.processes
        if collector.sources != self._sources:
            # The histories of a source that is watched again are new.
            self._sources, self._lines = collector.sources, {}
        known = {state.info.id for state in states}
        self._lines = {key: lines for key, lines in self._lines.items() if key in known}
        unread = self._processes.list_unread()
        return {
            "kind": "processes",
            "sources": [_clip(source.name) for source in collector.sources],
            "unread": [_clip(why, _MAX_ERROR) for why in unread[:_MAX_UNREAD]],
            "n_more_unread": max(0, len(unread) - _MAX_UNREAD),
            **describe_processes(
                states,
                find_line=self._find_line,
                wall_s=self._monitor.clock.wall(),
            ),
        }

    def _find_line(self, state: ProcessState, device: str) -> list[int | None]:
        lines = self._lines.get(state.info.id)
        if lines is None:
            try:
                history = self._processes.collector.find_history(state)
            except KeyError:  # The process is watched no more.
                return []
            lines = self._lines[state.info.id] = ProcessLines(history)
        lines.update(state.heard_s)
        return lines.list_points(device)

    def _send_report(self, process_id: str) -> None:
        outcome = attempt(partial(self._describe_one, process_id))
        self._send({"kind": "process", "id": process_id, **outcome})

    def _describe_one(self, process_id: str) -> Message:
        collector = self._processes.collector
        found = [state for state in collector.processes if _clip(state.info.id) == process_id]
        samples = collector.find_history(found[0]).samples() if found else ()
        html = report_processes(found, samples=samples).html
        return {"html": html, "wall_s": self._monitor.clock.wall()}


class ProcessLines:
    """The last two minutes of a process's counters, with the highest value of each two seconds.

    Of GPUs that is *allocated*, of the host *resident*.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._until_s = 0.0
        #: By device the highest value of each stretch of time.
        self._points: dict[str, dict[int, int]] = {}

    def update(self, now_s: float) -> None:
        """Take the samples that have come, up to now on their own clock."""
        first_s = max(self._until_s, now_s - MAX_POINTS * _POINT_S)
        for sample in self._history.samples(first_s):
            place = int(sample.time_s / _POINT_S)
            self._until_s = sample.time_s
            for reading in sample.readings:
                is_host = reading.device == HOST
                value = reading.reserved_bytes if is_host else reading.allocated_bytes
                points = self._points.setdefault(reading.device, {})
                if value is not None and value > points.get(place, -1):
                    points[place] = value
        for points in self._points.values():
            for old in sorted(points)[:-MAX_POINTS]:
                del points[old]

    def list_points(self, device: str) -> list[int | None]:
        """Return the points of a device, the newest last, in percent of the highest."""
        points = self._points.get(device)
        if not points:
            return []
        last = int(self._until_s / _POINT_S)
        first = max(min(points), last - MAX_POINTS + 1)
        values = [points.get(place) for place in range(first, last + 1)]
        most = max((value for value in values if value is not None), default=0) or 1
        return [None if value is None else round(100 * value / most) for value in values]


# -- Messages --------------------------------------------------------------------------------------


def describe_processes(
    states: Sequence[ProcessState],
    *,
    find_line: Callable[[ProcessState, str], list[int | None]],
    wall_s: float,
) -> Message:
    """Describe hosts, their GPUs and the processes on them, each in the order of the processes.

    ``find_line`` returns the points of a process's line on a device; ``wall_s`` is the time now, in
    seconds since the epoch.
    """
    skews, names = find_skews(states), name_processes(states)
    skewed = {skew.process.info.id for skew in skews}
    listed = choose_processes(states, skewed, MAX_PROCESSES)
    # Ranks come in their order, and so do their GPUs, whatever else runs there.
    states = sorted(states, key=lambda state: state.info.number is None)
    places = {state.info.id: place for place, state in enumerate(states)}
    shares = sorted(share_gpus(states), key=lambda share: places[share.parts[0].process.info.id])
    hosts: dict[str, list[ProcessState]] = {}
    for state in sorted(states, key=lambda state: _split_numbers(state.info.host)):
        hosts.setdefault(state.info.host, []).append(state)
    write = _RowWriter(find_line, listed, skewed, wall_s)
    described = (
        _describe_host(members, [share for share in shares if share.host == host], write)
        for host, members in hosts.items()
    )
    return {
        "hosts": [host for host in described if host["gpus"] or host["rows"]],
        "skews": [_word_skew(skew, names[skew.process.info.id]) for skew in skews[:_MAX_SKEWS]],
        "n_more_skews": max(0, len(skews) - _MAX_SKEWS),
        "n_processes": len(states),
        "n_hosts": len(hosts),
        "n_unlisted": len(states) - len(listed),
    }


class _RowWriter:
    """Describes a process's row on a GPU or on its host, if the process is listed."""

    def __init__(
        self,
        find_line: Callable[[ProcessState, str], list[int | None]],
        listed: Collection[str],
        skewed: Collection[str],
        wall_s: float,
    ) -> None:
        self._find_line = find_line
        self._listed = listed
        self._skewed = skewed
        self._wall_s = wall_s
        self._n_rows: Counter[str] = Counter()

    def describe(
        self,
        state: ProcessState,
        device: str,
        reading: Reading | None,
        peak: DevicePeak | None,
        taken_bytes: int | None = None,
    ) -> Message | None:
        """Return the row of a process on a GPU, or on its host; ``None``: it is not listed."""
        info = state.info
        self._n_rows[info.id] += 1
        if info.id not in self._listed or self._n_rows[info.id] > 16:
            return None
        is_running = state.status == "running"
        return {
            "id": _clip(info.id),
            "name": _clip(name_process(info)),
            "what": _clip(info.name),
            "label": _clip(info.label),
            "pid": info.pid,
            "device": _clip(device),
            "status": state.status,
            "words": _clip(word_status(state)),
            "running_s": state.heard_s - state.running.start_s if state.running else None,
            "silent_since": find_silence(state, self._wall_s) if is_running else state.heard_at,
            "allocated": reading and reading.allocated_bytes,
            "reserved": reading and reading.reserved_bytes,
            "taken": taken_bytes,
            # The host has a high-water mark of its resident size alone.
            "peak": peak and (peak.reserved_bytes if device == HOST else peak.allocated_bytes),
            "peak_is": peak and peak.peak_is,
            "peak_in": _clip(name_peak_span(peak)),
            "n_ooms": len(state.ooms),
            "error": _clip(state.error, _MAX_ERROR),
            "is_skewed": info.id in self._skewed,
            "line": self._find_line(state, device),
        }


def _describe_host(
    states: Sequence[ProcessState], shares: Sequence[GpuShare], write: _RowWriter
) -> Message:
    on_gpus = {part.process.info.id for share in shares for part in share.parts}
    others = [state for state in states if state.info.id not in on_gpus]
    gpus = [_describe_gpu(share, write) for share in shares]
    rows = [_describe_on_host(state, write) for state in others]
    status = Counter(state.status for state in states)
    is_silent = status["lost"] > 0 and not status["running"]
    return {
        "host": _clip(states[0].info.host),
        "n_processes": len(states),
        "n_lost": status["lost"],
        # A process that ended with an OOM is counted there.
        "n_failed": sum(1 for state in states if state.status == "failed" and not state.ooms),
        "n_ooms": sum(1 for state in states if state.ooms),
        "n_gpus": len(shares),
        # The name that all of its GPUs have; "" where they differ.
        "gpu_name": _clip(shares[0].name) if len({share.name for share in shares}) == 1 else "",
        "used": _add(share.used_bytes for share in shares),
        "total": _add(share.total_bytes for share in shares),
        "silent_since": max(state.heard_at for state in states) if is_silent else None,
        "gpus": [gpu for gpu in gpus if gpu["rows"]],
        "rows": [row for row in rows if row is not None],
    }


def _describe_on_host(state: ProcessState, write: _RowWriter) -> Message | None:
    reading = next((reading for reading in state.readings if reading.device == HOST), None)
    peak = next((peak for peak in state.peaks if peak.device == HOST), None)
    return write.describe(state, HOST, reading, peak)


def _describe_gpu(share: GpuShare, write: _RowWriter) -> Message:
    described = [
        (part, write.describe(part.process, part.device, part.reading, part.peak, part.n_bytes))
        for part in share.parts
    ]
    return {
        "uuid": share.uuid and _clip(share.uuid),
        "name": _clip(share.name),
        "total": share.total_bytes,
        "used": share.used_bytes,
        "free": share.free_bytes,
        "others": share.other_bytes,
        "unlisted": sum(part.n_bytes or 0 for part, row in described if row is None),
        "rows": [row for _, row in described if row is not None],
    }


def find_silence(state: ProcessState, wall_s: float) -> float | None:
    """Return since when a process that runs is silent, in seconds since the epoch.

    ``None`` where it is not, or where it is of another host, whose clock may be off.
    """
    is_here = state.info.host == socket.gethostname()
    is_silent = is_here and wall_s - state.heard_at > _SILENT_S
    return state.heard_at if is_silent else None


def _split_numbers(name: str) -> list[str | int]:
    """Return what sorts ``node2`` before ``node10``."""
    parts = re.split("([0-9]+)", _clip(name))
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]


def _word_skew(skew: Skew, name: str) -> Message:
    return {"id": _clip(skew.process.info.id), "words": _clip(word_skew(skew, name), 2 * _MAX_NAME)}


def _add(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(value or 0 for value in known)


def _clip(text: str, width: int = _MAX_NAME) -> str:
    """Return a text from elsewhere in so many columns, without what acts on a page."""
    return _clean_and_cut(text[: 4 * width], width)


# A text from elsewhere may have megabytes, which this would keep.
@functools.lru_cache(maxsize=4096)
def _clean_and_cut(text: str, width: int) -> str:
    return cut(clean(text), width)
