"""Whole devices: each in parts that are all of it, who is on it, and where its blocks lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpumemwidget.devices import MOST_CHILDREN, Bridge, BridgePart, ChildProcess, SegmentMap
from gpumemwidget.records import HOST
from gpumemwidget.report.bridgebar import plot_bridge
from gpumemwidget.report.bridgetheme import name_class
from gpumemwidget.report.bridgewords import HIDDEN, find_look, list_pinned, name_part, tell_part
from gpumemwidget.report.document import (
    Block,
    Bridges,
    Cell,
    Column,
    Document,
    Fold,
    Heading,
    Note,
    Run,
    SegmentCharts,
    Table,
)
from gpumemwidget.report.html import render_html
from gpumemwidget.report.output import Report
from gpumemwidget.report.pieces import bytes_cell, share_cell
from gpumemwidget.report.segmentchart import plot_segments
from gpumemwidget.report.text import render_text
from gpumemwidget.report.words import rank_device
from gpumemwidget.units import UNKNOWN, format_bytes

__all__ = ["report_bridge"]

#: Processes of one part that are shown; those beyond are one row.
_MOST_PROCESSES = 8
_MOST_CHILDREN = 12
_COLUMNS = (
    Column("what", "name"),
    Column("bytes"),
    Column("share"),
    Column("what it is, and what can be done", "words", last="wrap"),
)
_ON_DEVICES = "on devices"
_CHILD_COLUMNS = (
    Column("pid"),
    Column("resident"),
    Column(_ON_DEVICES, "words"),
    Column("process", "words", last="wrap"),
)


def report_bridge(
    bridges: Sequence[Bridge],
    children: Sequence[ChildProcess] = (),
    maps: Mapping[str, SegmentMap] | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """Each device as a bar, what others tell of it, and its parts in a table.

    Args:
        bridges: the devices.
        children: the processes below this one.
        maps: the segments of devices, by their names; folded away until they are asked for.
        notes: sentences on what could not be read at all.
    """
    blocks: list[Block] = []
    for bridge in sorted(bridges, key=lambda each: rank_device(each.device)):
        blocks.extend(_list_blocks(bridge))
        found = (maps or {}).get(bridge.device)
        if found is not None:
            blocks.append(_fold_map(found))
    if not bridges:
        blocks.append(Note("There is no device of which the total is known."))
    blocks.extend(_list_children(children, bridges))
    told = {note for bridge in bridges for note in bridge.notes}
    blocks.extend(Note(note, tone="warn") for note in notes if note not in told)
    document = Document(tuple(blocks))
    return Report(text=render_text(document), html=render_html(document))


def _list_blocks(bridge: Bridge) -> Iterator[Block]:
    yield Heading(
        (
            Run(bridge.device, "strong"),
            *((Run(bridge.name),) if bridge.name != bridge.device else ()),
            Run(format_bytes(bridge.total_bytes)),
        )
    )
    yield Bridges(plot_bridge(bridge))
    yield Table(
        caption=f"All of {'the memory' if bridge.device == HOST else bridge.device}",
        columns=_COLUMNS,
        groups=tuple(_list_groups(bridge)),
        last_is_shared=False,
        stacks=True,
    )
    for note in bridge.notes:
        yield Note(note, tone="warn")


def _list_groups(bridge: Bridge) -> Iterator[tuple[tuple[Cell, ...], ...]]:
    rows: list[tuple[Cell, ...]] = []
    for part in bridge.parts:
        rows.append(_list_cells(part, bridge))
        parts = part.parts
        shown = parts
        if len(parts) > _MOST_PROCESSES and parts[0].key == "process":
            shown = parts[: _MOST_PROCESSES - 1]
        rows.extend(_list_cells(each, bridge, level=1) for each in shown)
        if len(shown) < len(parts):
            rest = parts[len(shown) :]
            n_bytes = sum(each.n_bytes for each in rest)
            rows.append(
                (
                    Cell(f"{len(rest)} more", level=1),
                    bytes_cell(n_bytes),
                    _share(n_bytes, bridge),
                    Cell(""),
                )
            )
    if rows:
        yield tuple(rows)
    if bridge.pinned is not None:
        yield tuple(
            (Cell(name, tone="strong"), bytes_cell(n_bytes), Cell(""), Cell(sentence))
            for name, n_bytes, sentence in list_pinned(bridge.pinned)
        )


def _list_cells(part: BridgePart, bridge: Bridge, level: int = 0) -> tuple[Cell, ...]:
    if part.process is not None:
        return (
            Cell(f"pid {part.process.pid}", level=level),
            bytes_cell(part.n_bytes),
            _share(part.n_bytes, bridge),
            Cell(part.process.name or HIDDEN),
        )
    name = name_part(part, bridge.device)
    has_parts = part.key == "allocated" and part.parts
    return (
        Cell(
            name,
            level=level,
            tone="plain" if level else "strong",
            swatch="" if has_parts else name_class(find_look(part)),
        ),
        bytes_cell(part.n_bytes),
        _share(part.n_bytes, bridge),
        Cell(tell_part(part, bridge)),
    )


def _share(n_bytes: int, bridge: Bridge) -> Cell:
    return Cell(share_cell(n_bytes, bridge.total_bytes).text)


def _fold_map(found: SegmentMap) -> Fold:
    chart = plot_segments(found)
    number = len(found.segments)
    runs = [
        Run("Map of segments", "strong"),
        Run(f"{format_bytes(found.reserved_bytes)} in {number} segment{'s' * (number != 1)}"),
        Run(f"largest free block {format_bytes(found.largest_free_block_bytes)}"),
    ]
    return Fold(tuple(runs), (SegmentCharts(chart),))


def _list_children(children: Sequence[ChildProcess], bridges: Sequence[Bridge]) -> Iterator[Block]:
    if not children:
        return
    gpus = [bridge for bridge in bridges if bridge.device != HOST]
    has_devices = bool(gpus) or any(child.devices for child in children)
    # Where a child could not be told from others, nobody knows on which devices each is.
    nowhere = UNKNOWN if any(bridge.may_hide_children for bridge in gpus) else "none"
    ordered = sorted(children, key=_weigh_child)
    yield Table(
        caption="This notebook's children",
        columns=tuple(each for each in _CHILD_COLUMNS if has_devices or each.title != _ON_DEVICES),
        groups=(
            tuple(
                _list_child_cells(child, nowhere if has_devices else None)
                for child in ordered[:_MOST_CHILDREN]
            ),
        ),
        last_is_shared=False,
        caption_is_seen=True,
    )
    n_more = len(ordered) - _MOST_CHILDREN
    if n_more > 0:
        least = "At least " if len(ordered) >= MOST_CHILDREN else ""
        yield Note(f"{least}{n_more} more are not shown.")


def _weigh_child(child: ChildProcess) -> tuple[int, int, int]:
    """Those that take most of devices first, then of the host."""
    on_devices = sum(n_bytes or 0 for _, n_bytes in child.devices)
    return -on_devices, -(child.resident_bytes or 0), child.pid


def _list_child_cells(child: ChildProcess, nowhere: str | None) -> tuple[Cell, ...]:
    devices = ", ".join(
        f"{device} {UNKNOWN if n_bytes is None else format_bytes(n_bytes)}"
        for device, n_bytes in child.devices
    )
    shown = Cell(devices or nowhere or "", tone="plain" if devices else "muted")
    return (
        Cell(str(child.pid)),
        bytes_cell(child.resident_bytes),
        *((shown,) if nowhere is not None else ()),
        Cell(child.name),
    )
