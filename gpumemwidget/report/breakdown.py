"""Whole devices: each in parts that add up, its processes, and the map of its segments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpumemwidget.model.breakdowns import Breakdown, BreakdownPart, SegmentMap
from gpumemwidget.model.devices import HOST, MOST_CHILDREN, ChildProcess, rank_device
from gpumemwidget.report.charts.bar import DeviceBar
from gpumemwidget.report.charts.segments import plot_segments
from gpumemwidget.report.render.blocks import (
    Block,
    Cell,
    Column,
    Fold,
    Heading,
    Note,
    Run,
    Table,
    Tone,
)
from gpumemwidget.report.render.cells import bytes_cell, share_cell
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.render.palette import name_class
from gpumemwidget.report.wording.parts import (
    HIDDEN,
    find_look,
    list_breakdown_notes,
    name_part,
    tell_part,
    tell_pinned,
)
from gpumemwidget.report.wording.words import count
from gpumemwidget.units import UNKNOWN, format_bytes

#: Maximum number of processes of one part; those beyond are one row.
_MAX_PROCESSES = 8
#: Maximum number of this notebook's children.
_MAX_CHILDREN = 12
_COLUMNS = (
    Column("what", "name"),
    Column("bytes"),
    Column("share"),
    Column("what it is, and what can be done", "words", last="wrap"),
)
#: The third is left out if no child is on a device.
_CHILD_COLUMNS: tuple[Column, ...] = (
    Column("pid"),
    Column("resident"),
    Column("on devices", "words"),
    Column("process", "words", last="wrap"),
)


def report_breakdown(
    breakdowns: Sequence[Breakdown],
    children: Sequence[ChildProcess] = (),
    maps: Mapping[str, SegmentMap] | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """Report each device as a bar, with the figures of other tools and its parts in a table."""
    blocks: list[Block] = []
    for breakdown in sorted(breakdowns, key=lambda each: rank_device(each.device)):
        blocks.extend(_list_device(breakdown))
        segment_map = (maps or {}).get(breakdown.device)
        if segment_map is not None:
            blocks.append(_fold_map(segment_map))
    if not breakdowns:
        blocks.append(Note("There is no device with a known total."))
    blocks.extend(_list_children(children))
    told = {note for breakdown in breakdowns for note in list_breakdown_notes(breakdown)}
    blocks.extend(Note(note, tone="warn") for note in notes if note not in told)
    return Report(tuple(blocks))


def _list_device(breakdown: Breakdown) -> Iterator[Block]:
    names = [Run(breakdown.device, "strong")]
    if breakdown.name != breakdown.device:
        names.append(Run(breakdown.name))
    yield Heading((*names, Run(format_bytes(breakdown.total_bytes))))
    yield DeviceBar(breakdown)
    yield Table(
        caption=f"All of {'the memory' if breakdown.device == HOST else breakdown.device}",
        columns=_COLUMNS,
        groups=tuple(_list_groups(breakdown)),
        stacks=True,
    )
    for note in list_breakdown_notes(breakdown):
        yield Note(note, tone="warn")


def _list_groups(breakdown: Breakdown) -> Iterator[tuple[tuple[Cell, ...], ...]]:
    rows: list[tuple[Cell, ...]] = []
    for part in breakdown.parts:
        rows.append(_list_cells(part, breakdown))
        shown = part.parts
        if len(shown) > _MAX_PROCESSES and shown[0].key == "process":
            shown = shown[: _MAX_PROCESSES - 1]
        rows.extend(_list_cells(each, breakdown, level=1) for each in shown)
        rest = part.parts[len(shown) :]
        if rest:
            n_bytes = sum(each.n_bytes for each in rest)
            more = Cell(f"{len(rest)} more", level=1)
            rows.append((more, bytes_cell(n_bytes), _share(n_bytes, breakdown), Cell("")))
    if rows:
        yield tuple(rows)
    pinned = breakdown.pinned
    if pinned is not None:
        name, sentence = Cell("pinned", tone="strong"), Cell(tell_pinned(pinned))
        yield ((name, bytes_cell(pinned.reserved_bytes), Cell(""), sentence),)


def _list_cells(part: BreakdownPart, breakdown: Breakdown, level: int = 0) -> tuple[Cell, ...]:
    if part.process is not None:
        name = Cell(f"pid {part.process.pid}", level=level)
        what = part.process.name or HIDDEN
    else:
        has_kinds = part.key == "allocated" and part.parts
        swatch = "" if has_kinds else name_class(find_look(part))
        tone: Tone = "plain" if level else "strong"
        name = Cell(name_part(part, breakdown.device), level=level, tone=tone, swatch=swatch)
        what = tell_part(part, breakdown)
    return (name, bytes_cell(part.n_bytes), _share(part.n_bytes, breakdown), Cell(what))


def _share(n_bytes: int, breakdown: Breakdown) -> Cell:
    return Cell(share_cell(n_bytes, breakdown.total_bytes).text)


def _fold_map(segment_map: SegmentMap) -> Fold:
    number = count(len(segment_map.segments), "segment")
    runs = (
        Run("Map of segments", "strong"),
        Run(f"{format_bytes(segment_map.reserved_bytes)} in {number}"),
        Run(f"largest free block {format_bytes(segment_map.largest_free_block_bytes)}"),
    )
    return Fold(runs, (plot_segments(segment_map),))


def _list_children(children: Sequence[ChildProcess]) -> Iterator[Block]:
    if not children:
        return
    ordered = sorted(children, key=_weigh_child)
    rows = [_list_child_cells(child) for child in ordered[:_MAX_CHILDREN]]
    columns = _CHILD_COLUMNS
    if not any(child.devices for child in children):
        columns = (*columns[:2], *columns[3:])
        rows = [(*row[:2], *row[3:]) for row in rows]
    yield Table(
        caption="This notebook's children",
        columns=columns,
        groups=(tuple(rows),),
        caption_is_seen=True,
    )
    n_more = len(ordered) - _MAX_CHILDREN
    if n_more > 0:
        least = "At least " if len(ordered) >= MOST_CHILDREN else ""
        yield Note(f"{least}{n_more} more are not shown.")


def _weigh_child(child: ChildProcess) -> tuple[int, int, int]:
    """Return the sort key of a child: bytes on devices before bytes on the host."""
    on_devices = sum(n_bytes or 0 for _, n_bytes in child.devices)
    return -on_devices, -(child.resident_bytes or 0), child.pid


def _list_child_cells(child: ChildProcess) -> tuple[Cell, ...]:
    devices = ", ".join(
        f"{device} {UNKNOWN if n_bytes is None else format_bytes(n_bytes)}"
        for device, n_bytes in child.devices
    )
    resident = bytes_cell(child.resident_bytes)
    return (Cell(str(child.pid)), resident, Cell(devices), Cell(child.name))
