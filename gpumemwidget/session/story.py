"""Write a session as one page: the plot, cells, cards, traces, leaks, owners, devices, versions."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from operator import itemgetter
from typing import TypeAlias

from gpumemwidget.model.devices import PeakIs
from gpumemwidget.model.processes import DevicePeak
from gpumemwidget.report.account import report_account
from gpumemwidget.report.cell import report_ledger
from gpumemwidget.report.charts.timeline import draw_counters
from gpumemwidget.report.devices import report_stat
from gpumemwidget.report.leaks import report_leaks
from gpumemwidget.report.oom import report_oom
from gpumemwidget.report.page import Redaction, render_story
from gpumemwidget.report.render.blocks import Block, Cell, Column, Note, Table
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.wording import name_record
from gpumemwidget.report.trace import report_trace
from gpumemwidget.session.leak_watch import LeakWatch
from gpumemwidget.session.session import Session

#: The peaks of allocated and of reserved memory, and how exact they are.
_Peaks: TypeAlias = tuple[int | None, int | None, PeakIs | None]


def write_story(session: Session, *, is_redacted: bool = False) -> str:
    """Return a session as one HTML page; see ``render_story``."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(session.monitor.clock.wall()))
    sections = list(_list_sections(session, Redaction(is_off=not is_redacted)))
    return render_story(f"Memory of a session, {when}", sections, is_redacted=is_redacted)


def _list_sections(session: Session, redaction: Redaction) -> Iterator[tuple[str, Report]]:
    change = redaction.redact
    account, watch = change(session.owners()), session.attach(LeakWatch)
    states, notes = change(session.stat()), change(session.hardware.take_notes())
    yield "Now", report_stat(states, notes, account)
    plot = _plot(session)
    if plot:
        yield "The session", Report(tuple(plot))
    ledger = session.monitor.ledger
    leaks = change(watch.list_leaks_by_cell())
    records = change(ledger.records)
    yield "Cells", report_ledger(records, dropped=ledger.dropped, n_shown=500, leaks=leaks)
    for card in change(session.oom_cards):
        yield "Out of memory", report_oom(card)
    for trace in session.list_traces():
        samples = session.monitor.samples_of(trace.record)
        shown = change(trace)
        yield f"Lines of {name_record(shown.record)}", report_trace(shown, samples)
    ignored = change(watch.list_ignored(), "names")
    grown = change(watch.list_leaks()), change(watch.list_unexplained())
    yield "Growth", report_leaks(*grown, ignored)
    yield "Owners", report_account(account, is_whole=True)
    yield "Devices", change(session.breakdown())._report()  # noqa: SLF001 - what it displays
    yield "Versions", Report((_tabulate_versions(),))


def _plot(session: Session) -> list[Block]:
    """Return each device over the session, as far as its samples are kept, with its peak."""
    samples = session.monitor.history.samples(0.0)
    if len(samples) < 2:
        return []
    cells = [device for record in session.monitor.ledger.records for device in record.devices]
    highest = []
    for name in (newest.device for newest in samples[-1].readings):
        known = [r for s in samples for r in s.readings if r.device == name]
        # The counters' own peaks: what was freed between two samples is in them.
        peaks = [(r.allocated_peak_bytes, r.reserved_peak_bytes, r.peak_is) for r in known]
        peaks += [
            (cell.allocated.peak_bytes, cell.reserved.peak_bytes, cell.peak_is)
            for cell in cells
            if cell.device == name
        ]
        allocated, reserved = (_find_highest(peaks, place) for place in (0, 1))
        peak_is = reserved[2] if allocated[0] is None else allocated[2]
        highest.append(DevicePeak(name, allocated[0], reserved[1], peak_is))
    words = "The highest peak is marked. Samples of long ago are thinned out."
    return [*draw_counters(highest, samples), Note(words)]


def _find_highest(peaks: Sequence[_Peaks], place: int) -> _Peaks:
    known = [peak for peak in peaks if peak[place] is not None]
    return max(known, key=itemgetter(place), default=(None, None, None))


def _list_versions() -> dict[str, str]:
    found = {"Python": platform.python_version(), "system": platform.platform()}
    for name in ("gpumemwidget", "torch", "IPython", "ipykernel", "ipywidgets", "nvidia-ml-py"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return found | ({"CUDA of PyTorch": cuda} if isinstance(cuda, str) else {})


def _tabulate_versions() -> Table:
    rows = tuple((Cell(name), Cell(text)) for name, text in _list_versions().items())
    columns = Column("what", "words"), Column("version", "words")
    return Table("Versions", columns, (rows,), caption_is_seen=False)
