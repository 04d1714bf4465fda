"""The report of recorded processes: where each stands, its peaks, its spans and how it ended."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from gpumemwidget.model.cells import Status
from gpumemwidget.model.devices import HOST, Sample
from gpumemwidget.model.processes import (
    DevicePeak,
    GpuShare,
    ProcessInfo,
    ProcessState,
    Skew,
    SpanRecord,
    choose_processes,
)
from gpumemwidget.report.charts.timeline import MOST_CHARTS, draw_counters
from gpumemwidget.report.oom import report_oom
from gpumemwidget.report.render.blocks import (
    MOST_ROWS,
    SOME,
    STATUS_TONES,
    Block,
    Cell,
    Column,
    Group,
    Heading,
    Note,
    Run,
    Table,
    Tone,
    bytes_cell,
    change_cell,
    explain_marks,
    make_group,
    make_heading,
    name_columns,
    number_columns,
    peak_cell,
    sort_devices,
    warn,
)
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.wording import count
from gpumemwidget.units import UNKNOWN, format_bytes, format_duration

#: A name that is cut in its middle keeps the digits of its pid.
_PROCESS = Column("process", "name", fold=16)
_DEVICE_COLUMNS = (
    *name_columns("device"),
    *number_columns("allocated", "reserved", "peak"),
    Column("peak in", "words", last="wrap", is_optional=True),
)
_TONES: dict[str, Tone] = {"running": "plain", "ended": "muted", "failed": "bad", "lost": "warn"}
#: The next step where no process is watched.
WATCHING_BEGINS = "gpumemwidget.watch(FOLDER) or gpumemwidget.watch_cluster(CLIENT) begins"


def report_processes(
    states: Sequence[ProcessState],
    gpus: Sequence[GpuShare] = (),
    skews: Sequence[Skew] = (),
    *,
    samples: Sequence[Sample] = (),
    unread: Sequence[str] = (),
    n_older: int = 0,
) -> Report:
    """Report what each process has in use and had at its peak, its spans, and what stands out.

    Args:
        states: the processes.
        gpus: the GPUs that they use, each once.
        skews: the processes that stand out.
        samples: those of a process that is alone.
        unread: why some files can't be read, one sentence per file.
        n_older: number of older recordings that are not among ``states``.
    """
    unread_notes = list(warn(*(f"{why}." for why in unread)))
    if n_older:
        words = count(n_older, "older recording is", "older recordings are")
        unread_notes += warn(f"{words} not shown: open them one by one.")
    if not states:
        nothing = Note("No process was recorded here; folders within it are not read.")
        return Report([nothing, *unread_notes])
    blocks: list[Block]
    if len(states) == 1:
        [state] = states
        rows = [make_group(row) for row in _list_device_rows(state, is_alone=True)]
        blocks = [
            _describe_one(state),
            Table("Memory of the process", _DEVICE_COLUMNS, rows, caption_is_seen=False),
            *_draw(state, samples),
            *unread_notes,
            *_tabulate_spans(state),
            *_list_troubles(state, "The program"),
            *(block for card in state.ooms[:SOME] for block in report_oom(card).blocks),
        ]
        return Report([*blocks, *explain_marks(blocks)])
    listed = choose_processes(states, {skew.process.info.id for skew in skews}, MOST_ROWS)
    shown = [state for state in states if state.info.id in listed]
    names = name_processes(states)
    groups = [_list_process_rows(state, names[state.info.id]) for state in shown]
    hosts = {state.info.host for state in states}
    where = f"on {count(len(hosts), 'host')}" if len(hosts) > 1 else f"on {hosts.pop()}"
    columns = (_PROCESS, Column("state", "words"), *_DEVICE_COLUMNS)
    blocks = [
        make_heading(count(len(states), "process", "processes"), where),
        Table("Memory of each process", columns, groups, n_shared=2, caption_is_seen=False),
        *_note_more(len(states) - len(shown), "process is", "processes are"),
    ]
    if gpus:
        groups = [_list_gpu_rows(share, names) for share in gpus]
        columns = (
            Column("GPU", "name", fold=24),
            *number_columns("total", "in use"),
            _PROCESS,
            *number_columns("takes", "at most"),
        )
        blocks.append(Table("GPUs", columns, groups, n_shared=3))
    blocks.extend(unread_notes)
    blocks.extend(warn(*(word_skew(skew, names[skew.process.info.id]) for skew in skews)))
    n_cards = 0
    for state in shown:
        name = names[state.info.id]
        blocks.extend(_list_troubles(state, name, _word_moment(state.heard_at)))
        for card in state.ooms[: SOME - n_cards]:
            n_cards += 1
            blocks.append(make_heading(f"Out of memory in {name}"))
            blocks.extend(report_oom(card).blocks)
    n_more = sum(len(state.ooms) for state in states) - n_cards
    blocks.extend(_note_more(n_more, "out-of-memory error is", "out-of-memory errors are"))
    return Report([*blocks, *explain_marks(blocks)])


def report_spans(states: Sequence[ProcessState]) -> Report:
    """Report the spans of each process, those of one name together."""
    blocks: list[Block] = [make_heading("Spans of other processes")]
    states_with = [state for state in states if state.spans]
    if not states_with:
        return Report([*blocks, Note("None was recorded.")])
    names = name_processes(states)
    for state in states_with[:SOME]:
        blocks.extend(_tabulate_spans(state, names[state.info.id]))
    blocks.extend(_note_more(len(states_with) - SOME, "process is", "processes are"))
    return Report([*blocks, *explain_marks(blocks)])


def report_none_watched() -> Report:
    """Report that no process is watched, and how to begin."""
    return Report([Note(f"No other process is watched: {WATCHING_BEGINS}.")])


# -- Words -----------------------------------------------------------------------------------------


def name_process(info: ProcessInfo) -> str:
    """Return a short name of a process: ``rank 3``, ``engine 0``, ``python train.py``."""
    if info.number is not None:
        return f"{info.role} {info.number}"
    return info.label or info.name


def name_processes(states: Sequence[ProcessState]) -> dict[str, str]:
    """Return each process's name, by its id; where several would have one name, with their pids.

    Two runs in one folder have a ``rank 0`` each, and all children of a program its own name.
    """
    alike: dict[str, list[ProcessInfo]] = {}
    for state in states:
        alike.setdefault(name_process(state.info), []).append(state.info)
    names: dict[str, str] = {}
    for name, infos in alike.items():
        has_hosts = len({info.host for info in infos}) > 1
        for info in infos:
            where = f"pid {info.pid} on {info.host}" if has_hosts else f"pid {info.pid}"
            names[info.id] = f"{name} ({where})" if len(infos) > 1 else name
    return names


def name_peak_span(peak: DevicePeak | None) -> str:
    """Return the span that a peak is in: ``epoch 3``; ``""`` for none.

    One of several at once is ``train, shared by 2 tasks``.
    """
    if peak is None or peak.span is None:
        return ""
    shared = f", shared by {peak.shared_with + 1} tasks" if peak.shared_with else ""
    return name_span(peak.span, peak.number) + shared


def name_span(name: str, number: int | None) -> str:
    """Return a span's name with its number."""
    return name if number is None else f"{name} {number}"


def word_skew(skew: Skew, name: str) -> str:
    """Return in a sentence how far a process of that name is above the others, and in what."""
    above = format_bytes(skew.above_median_bytes)
    span = name_peak_span(skew.peak)
    return (
        f"{name} is {above} above the median of the "
        f"{skew.n_processes} processes{f'; its peak is in {span}' if span else ''}."
    )


def word_status(state: ProcessState) -> str:
    """Return what a process does, or how it ended: ``in epoch 3``, ``ended``."""
    if state.status == "running" and state.running is not None:
        return f"in {name_span(state.running.name, state.running.number)}"
    return state.status


def _word_moment(at_s: float) -> str:
    """Return a time of day by a process's own clock: ``03:21:12.5``.

    To a tenth of a second: where one rank dies, the others often follow within the second.
    """
    return time.strftime("%H:%M:%S", time.localtime(at_s)) + f".{int(at_s % 1 * 10)}"


def _note_more(n_more: int, noun: str, plural: str) -> list[Note]:
    """Return ``9,950 more processes are not shown.``; nothing where there are no more."""
    words = count(n_more, f"more {noun}", f"more {plural}")
    return [Note(f"{words} not shown.")] if n_more > 0 else []


def _describe_one(state: ProcessState) -> Heading:
    info = state.info
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.started_at))
    return make_heading(
        info.name,
        Run(word_status(state), _TONES[state.status]),
        f"pid {info.pid} on {info.host}",
        Run(f"{format_duration(state.heard_s)} from {began} on", "muted"),
    )


# -- Processes -------------------------------------------------------------------------------------


def _list_process_rows(state: ProcessState, name: str) -> Group:
    shared = (name, Cell(word_status(state), tone=_TONES[state.status]))
    return make_group(*_list_device_rows(state, is_alone=False), shared=shared)


def _list_device_rows(state: ProcessState, *, is_alone: bool) -> list[Sequence[Cell | str]]:
    peaks = {peak.device: peak for peak in state.peaks}
    rows: list[Sequence[Cell | str]] = []
    for reading in sort_devices(state.readings):
        peak = peaks.get(reading.device, DevicePeak(reading.device, None, None))
        is_host = reading.device == HOST
        n_bytes = peak.reserved_bytes if is_host else peak.allocated_bytes
        figures = (
            _make_figure(state, n_bytes, is_alone=is_alone)
            for n_bytes in (reading.allocated_bytes, reading.reserved_bytes)
        )
        highest = peak_cell(n_bytes, peak.peak_is, is_resident=is_host)
        rows.append((reading.device, *figures, highest, name_peak_span(peak)))
    return rows or [(Cell(UNKNOWN, tone="muted"), "", "", "", "")]


def _make_figure(state: ProcessState, n_bytes: int | None, *, is_alone: bool) -> Cell:
    """Return what a process has; of one that is alone and has ended, what it had last."""
    if state.status == "running" or n_bytes is None:
        return bytes_cell(n_bytes)
    if is_alone:
        return Cell(f"last {format_bytes(n_bytes)}", tone="muted")
    # One that is lost may run on a host that can't be reached.
    return Cell(UNKNOWN if state.status == "lost" else format_bytes(0), tone="muted")


def _list_gpu_rows(share: GpuShare, names: Mapping[str, str]) -> Group:
    name = share.name if share.uuid is None else f"{share.name}, {share.uuid[:12]}"
    rows: list[Sequence[Cell | str]] = [
        (
            names[part.process.info.id],
            bytes_cell(part.n_bytes) if part.process.status == "running" else "",
            bytes_cell(None if part.peak is None else part.peak.reserved_bytes),
        )
        for part in share.parts[:MOST_ROWS]
    ]
    if n_more := len(share.parts) - len(rows):
        rows.append((Cell(f"{n_more:,} more", tone="muted"), "", ""))
    if share.other_bytes:
        rows.append((Cell("others", tone="muted"), bytes_cell(share.other_bytes), ""))
    whole = (name, bytes_cell(share.total_bytes), bytes_cell(share.used_bytes))
    return make_group(*rows, shared=whole)


def _list_troubles(state: ProcessState, name: str, moment: str = "") -> Iterator[Note]:
    """Return how a process ended, if not as it should, and when; and what can't be read of it."""
    if state.error:
        yield Note(f"{name} ended{moment and f' at {moment}'} with {state.error}", tone="bad")
    if state.status == "lost":
        running = state.running
        where = "" if running is None else f", in {name_span(running.name, running.number)},"
        yield from warn(
            f"{name}: the recording stops at {format_duration(state.heard_s)}"
            f"{moment and f' ({moment})'}{where} without an end. The process was killed, its host "
            "or cluster can't be reached, or the recording could not be written."
        )
    if state.n_unread:
        yield from warn(f"{name}: {count(state.n_unread, 'line')} can't be read.")


# -- Spans -----------------------------------------------------------------------------------------


def _tabulate_spans(state: ProcessState, caption: str = "Spans") -> Iterator[Block]:
    if not state.spans:
        return
    groups: dict[str, list[SpanRecord]] = {}
    for span in state.spans:
        groups.setdefault(span.name, []).append(span)
    # By their time: that is what the program is about.
    ordered = sorted(groups.items(), key=lambda item: -sum(span.duration_s for span in item[1]))
    peaks = {peak.span for peak in state.peaks}
    listed = [
        (name, spans)
        for place, (name, spans) in enumerate(ordered)
        if place < SOME or name in peaks or any(span.status != "ok" for span in spans)
    ][:MOST_ROWS]
    rows = [_list_span_rows(name, spans) for name, spans in listed]
    columns = (
        Column("span", "name", fold=40),
        *number_columns("times", "time"),
        Column("status", "words"),
        *name_columns("device"),
        *number_columns("last change", "peak"),
    )
    yield Table(caption, columns, rows, n_shared=4)
    if n_more := len(ordered) - len(listed):
        yield Note(f"{count(n_more, 'more span name')}, which took less time.")
    if state.n_dropped_spans:
        yield Note(f"{count(state.n_dropped_spans, 'older span')} not counted.")


def _list_span_rows(name: str, spans: Sequence[SpanRecord]) -> Group:
    n_spans = str(sum(span.n_spans for span in spans))
    duration = format_duration(sum(span.duration_s for span in spans))
    status = Cell("ok", tone=STATUS_TONES["ok"])
    kinds: tuple[tuple[Status, str], ...] = (("error", "failed"), ("interrupted", "interrupted"))
    for kind, word in kinds:
        if n_failed := sum(span.n_spans for span in spans if span.status == kind):
            status = Cell(f"{n_failed} {word}", tone=STATUS_TONES[kind])
            break
    rows: list[Sequence[Cell | str]] = []
    for device in sort_devices(spans[-1].devices):
        found = [part for span in spans for part in span.devices if part.device == device.device]
        highest = max(found, key=lambda part: part.peak_counter.peak_bytes or 0)
        is_host = device.device == HOST
        peak = peak_cell(highest.peak_counter.peak_bytes, highest.peak_is, is_resident=is_host)
        rows.append((device.device, change_cell(device.peak_counter.change_bytes), peak))
    rows = rows or [(Cell(UNKNOWN, tone="muted"), "", "")]
    return make_group(*rows, shared=(name, n_spans, duration, status))


def _draw(state: ProcessState, samples: Sequence[Sample]) -> Iterable[Block]:
    if len(samples) < 2:
        return []
    known = {peak.device: peak for peak in state.peaks}
    names = [reading.device for reading in samples[-1].readings]
    peaks = [known.get(name, DevicePeak(name, None, None)) for name in names]
    # On the host the only known peak is that of resident memory.
    peaks = [replace(peak, allocated_bytes=None) if peak.device == HOST else peak for peak in peaks]
    # Over the whole time of the recording.
    begin, end = replace(samples[0], time_s=0.0), replace(samples[-1], time_s=state.heard_s)
    # Samples that came after the state was read are later than its end.
    within = [sample for sample in samples if 0 < sample.time_s < state.heard_s]
    return draw_counters(sort_devices(peaks)[:MOST_CHARTS], [begin, *within, end])
