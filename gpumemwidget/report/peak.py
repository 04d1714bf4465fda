"""What made a device's peak, as a table: by the line that allocated it, its kind and its name."""

from __future__ import annotations

from gpumemwidget.report.document import Block, Cell, Column, Table
from gpumemwidget.report.pieces import bytes_cell, share_cell
from gpumemwidget.traces import DeviceTrace, PeakPart
from gpumemwidget.units import format_bytes

__all__ = ["list_peak"]

#: Parts that are shown.
_MOST_PARTS = 12


def list_peak(device: DeviceTrace) -> list[Block]:
    """The table, with a row for the parts that are too many; nothing where no part is known.

    Where single blocks are not, the lines' own amounts at the peak say all there is to say.
    """
    if not device.peak or device.source == "lines":
        return []
    total = sum(part.n_bytes for part in device.peak)
    shown = device.peak if len(device.peak) <= _MOST_PARTS + 1 else device.peak[:_MOST_PARTS]
    rows = [_row_of_part(part, total) for part in shown]
    rest = device.peak[len(shown) :]
    if rest:
        n_bytes = sum(part.n_bytes for part in rest)
        n_blocks = sum(part.n_blocks for part in rest)
        rows.append(
            (
                Cell(f"{len(rest)} more", tone="muted"),
                bytes_cell(n_bytes),
                share_cell(n_bytes, total),
                Cell(f"{n_blocks:,}"),
                Cell("", tone="muted"),
                Cell("", tone="muted"),
            )
        )
    columns = (
        Column("allocated at", "name"),
        Column("bytes"),
        Column("share"),
        Column("blocks"),
        Column("what it is", "name", fold=24),
        Column("held by", "code", last="cut"),
    )
    table = Table(
        caption=f"What made the peak of {device.device}: {format_bytes(total)}",
        columns=columns,
        groups=(tuple(rows),),
        last_is_shared=False,
        caption_is_seen=True,
    )
    return [table]


def _row_of_part(part: PeakPart, total: int) -> tuple[Cell, ...]:
    place = part.place
    if part.unit is not None and part.line is not None and part.unit not in place:
        place = f"{part.unit}, {place}"
    is_gone = part.kind == "freed since"
    return (
        Cell(place),
        bytes_cell(part.n_bytes),
        share_cell(part.n_bytes, total),
        Cell(f"{part.n_blocks:,}"),
        Cell(part.kind, tone="muted" if is_gone else "plain"),
        Cell(part.owner or ""),
    )
