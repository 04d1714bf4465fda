"""What the user's names hold, and what the release of each would free."""

from __future__ import annotations

from collections.abc import Sequence

from gpumemwidget.records import Holding
from gpumemwidget.report.document import Block, Cell, Column, Document, Note, Table
from gpumemwidget.report.html import render_html
from gpumemwidget.report.output import Report
from gpumemwidget.report.pieces import bytes_cell
from gpumemwidget.report.text import render_text
from gpumemwidget.report.words import rank_device

__all__ = ["describe_shape", "report_holdings"]

_COLUMNS = (
    Column("name", "code"),
    Column("device", "words"),
    Column("holds"),
    Column("frees"),
    Column("what", "words", last="wrap"),
)


def report_holdings(holdings: Sequence[Holding]) -> Report:
    """The rows of the variables panel, in the order given, a line for each device."""
    blocks: list[Block] = []
    if holdings:
        blocks.append(
            Table(
                caption="What the names hold, and what the release of each alone would free",
                columns=_COLUMNS,
                groups=tuple(_list_rows(holding) for holding in holdings),
                n_shared=1,
            )
        )
    else:
        blocks.append(Note("No name holds a tensor."))
    if any(holding.held_bytes != holding.frees_bytes for holding in holdings):
        blocks.append(
            Note("frees: what goes if this alone is released; what is shared stays until all go.")
        )
    document = Document(tuple(blocks))
    return Report(text=render_text(document), html=render_html(document))


def _list_rows(holding: Holding) -> tuple[tuple[Cell, ...], ...]:
    held, frees = dict(holding.held_bytes), dict(holding.frees_bytes)
    # The biggest first, as the record has them; what frees but does not hold can't be.
    devices = [*held, *sorted(frees.keys() - held.keys(), key=rank_device)]
    what = Cell(_describe(holding))
    name = Cell(holding.name)
    if not devices:
        return ((name, Cell(""), bytes_cell(0), bytes_cell(0), what),)
    rows = [
        (Cell(device), bytes_cell(held.get(device, 0)), bytes_cell(frees.get(device, 0)))
        for device in devices
    ]
    return ((name, *rows[0], what), *rows[1:])


def describe_shape(holding: Holding) -> str:
    """``tensor 1024×1024 float32``; ``module`` where there is no shape."""
    words = [holding.kind]
    if holding.shape is not None:
        words.append("×".join(map(str, holding.shape)) or "scalar")
    if holding.dtype is not None:
        words.append(holding.dtype.removeprefix("torch."))
    return " ".join(words)


def _describe(holding: Holding) -> str:
    words = describe_shape(holding)
    if holding.shared_with:
        words += f"; shared with {', '.join(holding.shared_with)}"
    if holding.held_elsewhere:
        words += "; also held elsewhere"
    return words
