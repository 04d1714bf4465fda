"""The blocks of a report: what it says, before it is text or HTML.

Each report is built once, of a few kinds of blocks, and drawn as text and as HTML from them, so
both forms say the same numbers.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, Protocol, TypeVar

from gpumemwidget.model.cells import CellDevice, Status
from gpumemwidget.model.devices import PeakIs, rank_device
from gpumemwidget.model.ownership import DeviceBytes
from gpumemwidget.report.render.markup import Html
from gpumemwidget.units import UNKNOWN, format_bytes, format_change

#: Maximum numbers of entries of a list in a report: names in a sentence, rows among other things,
#: and rows of a list of its own, a screen or two. Where all are asked for, it is about as much as a
#: page can show without delay (250 KB of HTML).
FEW, SOME, MOST_ROWS, MOST_ROWS_OF_ALL = 3, 12, 50, 500

_T = TypeVar("_T")

#: How a piece of text is meant. ``code`` is the user's own text.
Tone = Literal["plain", "strong", "muted", "code", "bad", "warn"]


@dataclass(frozen=True, slots=True)
class Run:
    """A piece of a line."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Heading:
    """A line of pieces with a dot between them."""

    runs: tuple[Run, ...]


def make_heading(title: str, *pieces: Run | str, tone: Tone = "strong") -> Heading:
    """Return a heading; of its pieces a plain text has no tone."""
    others = (Run(piece) if isinstance(piece, str) else piece for piece in pieces)
    return Heading((Run(title, tone), *others))


@dataclass(frozen=True, slots=True)
class Line:
    """A quiet line, which breaks only between its pieces."""

    pieces: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    A ``name`` heads its row, a ``number`` is aligned to the right, ``code`` is the user's text
    unless the cell has a tone. ``index`` and ``source`` are the columns of a table that opens: the
    number of a line, and the line itself or a call below it. A ``last`` column takes the room that
    is left: its text wraps, or is cut with an ellipsis.
    """

    title: str
    kind: Literal["name", "number", "words", "code", "index", "source"] = "number"
    last: Literal["wrap", "cut"] | None = None
    #: Maximum width in characters: longer text loses its middle (text) or breaks anywhere (HTML).
    fold: int | None = None
    #: True if the column is left out where no row has anything in it. Neither the first column nor
    #: a shared one may be.
    is_optional: bool = False


def name_columns(*titles: str) -> tuple[Column, ...]:
    """Return columns that head their rows."""
    return tuple(Column(title, "name") for title in titles)


def number_columns(*titles: str) -> tuple[Column, ...]:
    """Return columns of numbers."""
    return tuple(map(Column, titles))


@dataclass(frozen=True, slots=True)
class Cell:
    """One value of a table, as text."""

    text: str
    #: Stands before a number that is not exact, ``≥`` or ``~``; a note explains the mark.
    mark: str = ""
    tone: Tone = "plain"
    #: Depth in a tree, by which the cell is indented.
    level: int = 0
    #: Share of a whole (0 to 1), drawn in HTML as a bar beside the text.
    share: float | None = None
    #: Class of a patch of colour before the text, in HTML; an ``index`` has it as its edge.
    swatch: str = ""
    #: Quieter words behind a ``source``: the file and the line of a call.
    detail: str = ""


Row = tuple[Cell, ...]
Group = tuple[Row, ...]


def make_group(*rows: Iterable[Cell | str], shared: Iterable[Cell | str] = ()) -> Group:
    """Return rows of a table, with the cells ``shared`` by them; a plain text is a cell."""
    return tuple(
        tuple(Cell(cell) if isinstance(cell, str) else cell for cell in row)
        for row in ((*(() if n else shared), *row) for n, row in enumerate(rows))
    )


@dataclass(frozen=True, slots=True)
class Table:
    """Rows in groups; the first ``n_shared`` cells of a group's first row belong to all its rows.

    The cell of a ``last`` column is shared with them. The group's other rows are shorter by the
    shared cells.
    """

    caption: str
    columns: tuple[Column, ...]
    groups: Sequence[Group]
    n_shared: int = 0
    #: False for a table that needs no name on the page: only screen readers hear its caption.
    caption_is_seen: bool = True
    #: In HTML the shared cell is a line above its rows, which keeps the table narrow.
    shared_above: bool = False
    #: The last cell of a row stands below the others: in text, and where HTML has little room, if
    #: no cells are shared and there are at most three others.
    stacks: bool = False
    #: The first row of a group is a line of source, which HTML opens to the calls below it. Text
    #: has the first two columns, which are an ``index`` and a ``source``, behind the others.
    opens: bool = False
    #: Maximum number of groups that are shown, and about that of all rows.
    most: int = MOST_ROWS


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence below the figures: what a mark means, what went wrong."""

    text: str
    mark: str = ""
    tone: Tone = "muted"


def warn(*sentences: str) -> list[Note]:
    """Return a warning for each sentence."""
    return [Note(sentence, tone="warn") for sentence in sentences]


def say(sentence: str) -> Note:
    """Return a sentence that is as important as the figures."""
    return Note(sentence, tone="plain")


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a list, with the details that belong to it."""

    name: str
    summary: str = ""
    #: Lines below the step; pieces where some of a line is code.
    details: tuple[str | tuple[Run, ...], ...] = ()
    #: ``code`` if the name is the user's text.
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Steps:
    """Numbered steps."""

    steps: Sequence[Step]


@dataclass(frozen=True, slots=True)
class Option:
    """An action that a person can take: what it gives, what it is, and what to type for it."""

    amount: str
    text: str
    command: str = ""


@dataclass(frozen=True, slots=True)
class Options:
    """Options, the best first."""

    caption: str
    options: Sequence[Option]


@dataclass(frozen=True, slots=True)
class Fold:
    """Blocks that HTML shows on a click; text shows them at once."""

    runs: tuple[Run, ...]
    blocks: Sequence[Block]


class Picture(ABC):
    """A block that draws itself."""

    __slots__ = ()

    #: Name of its style sheet, without the suffix.
    sheet: ClassVar[str]
    #: An untrusted notebook, which strips SVG, loses the picture.
    is_svg: ClassVar[bool] = True

    @abstractmethod
    def to_html(self) -> Html:
        """Return the picture as HTML."""

    def to_text(self) -> str:
        """Return what text shows in place of the picture; nothing by default."""
        return ""


Block = Heading | Line | Table | Note | Steps | Options | Fold | Picture


# -- Amounts, peaks, marks and their legend --------------------------------------------------------

#: Stands before a lower bound in a table; a note below explains it.
AT_LEAST_MARK = "≥"

#: Meanings of the marks before numbers, in the order of the legend.
_MARK_MEANINGS = {
    "≥": "at least: the peak counter was reset during the cell, or recording began later",
    "~": "sampled at intervals: the true peak may be higher",
    "*": "peak of resident memory (malloc has no peak counter)",
    "!": "above the cell's budget (%membudget)",
}

STATUS_TONES: dict[Status, Tone] = {"ok": "muted", "error": "bad", "interrupted": "warn"}


def bytes_cell(n_bytes: int | None, *, mark: str = "") -> Cell:
    """Return an amount; an unknown one is grey."""
    if n_bytes is None:
        return Cell(format_bytes(None), tone="muted")
    return Cell(format_bytes(n_bytes), mark=mark)


def device_bytes_cell(amounts: DeviceBytes, device: str) -> Cell:
    """Return the bytes on one device, marked if they are a lower bound."""
    return bytes_cell(amounts.on(device), mark=AT_LEAST_MARK if amounts.is_at_least else "")


def explain_lower_bounds(amounts: Iterable[DeviceBytes]) -> tuple[Note, ...]:
    """Return the legend of the mark of ``device_bytes_cell``, if any of these amounts has it."""
    if not any(amount.is_at_least for amount in amounts):
        return ()
    text = "at least: there may be more, not found in time or held by C++ code"
    return (Note(text, mark=AT_LEAST_MARK),)


def change_cell(n_bytes: int | None, *, mark: str = "") -> Cell:
    """Return a difference with its sign; none is grey."""
    if not n_bytes:
        return Cell(format_change(n_bytes), tone="muted")
    return Cell(format_change(n_bytes), mark=mark)


def peak_cell(peak_bytes: int | None, peak_is: PeakIs | None, *, is_resident: bool = False) -> Cell:
    """Return a peak, marked if it is not exact, and if it is one of resident memory."""
    mark = {"at least": AT_LEAST_MARK, "sampled": "~"}.get(peak_is or "exact", "")
    return bytes_cell(peak_bytes, mark=f"{mark} *".strip() if is_resident else mark)


def mark_budget(cell: Cell, device: CellDevice) -> Cell:
    """Return a peak's cell, marked and coloured if the peak exceeds the budget of its cell."""
    if device.is_over_budget:
        return replace(cell, mark=f"! {cell.mark}".rstrip(), tone="warn")
    return cell


def share_cell(n_bytes: int, total_bytes: int) -> Cell:
    """Return a share in percent and as a bar; blank if there is no whole."""
    if total_bytes <= 0:
        return Cell("")
    share = min(max(n_bytes / total_bytes, 0.0), 1.0)
    percent = 100 * share
    text = f"{percent:.0f}" if percent >= 9.95 or percent == 0 else f"{percent:.1f}"
    text = "<0.1" if 0 < percent < 0.05 else text
    return Cell(f"{text} %", tone="plain" if share else "muted", share=share)


class _OfDevice(Protocol):
    @property
    def device(self) -> str: ...


_D = TypeVar("_D", bound=_OfDevice)


def sort_devices(records: Iterable[_D]) -> list[_D]:
    """Return records of one device each in the order that every report has."""
    return sorted(records, key=lambda record: rank_device(record.device))


def has_moved(device: CellDevice) -> bool:
    """Return whether the cell changed the device's memory."""
    return device.has_moved_outside or any(
        span.change_bytes != 0 or span.rise_bytes not in (0, None)
        for span in (device.allocated, device.reserved)
    )


def explain_marks(blocks: Iterable[Block]) -> tuple[Note, ...]:
    """Return the legend of the marks that occur in the tables."""
    tables = [block for block in blocks if isinstance(block, Table)]
    rows = (row for table in tables for rows in table.groups for row in rows)
    marks = {mark for row in rows for cell in row for mark in cell.mark.split()}
    return tuple(Note(text, mark=mark) for mark, text in _MARK_MEANINGS.items() if mark in marks)


# -- Optional columns ------------------------------------------------------------------------------


def drop_blank_columns(table: Table) -> Table:
    """Return a table without those optional columns whose cells are all blank or unknown."""
    if not any(column.is_optional for column in table.columns):
        return table
    # Each cell with the number of its column: only a group's first row has the shared ones.
    groups = [
        [list(enumerate(row, table.n_shared if index else 0)) for index, row in enumerate(group)]
        for group in table.groups
    ]
    cells = (pair for group in groups for row in group for pair in row)
    known = {place for place, cell in cells if cell.text not in ("", UNKNOWN)}
    columns = {
        place: column
        for place, column in enumerate(table.columns)
        if not column.is_optional or place in known
    }
    kept = [
        tuple(tuple(cell for place, cell in row if place in columns) for row in group)
        for group in groups
    ]
    return replace(table, columns=tuple(columns.values()), groups=kept)


# -- Bounds ----------------------------------------------------------------------------------------


def bound_blocks(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Return the blocks, the lists in them cut to what a person can read, with what is left out."""
    bounded: list[Block] = []
    for tone, same in itertools.groupby(blocks, lambda b: b.tone if isinstance(b, Note) else None):
        some = tuple(map(_bound_block, same))
        bounded.extend(some if tone is None else bound_items(some, partial(_make_note, tone)))
    return bound_items(bounded, lambda words: Note(f"{words} parts are not shown."), 200)


def _make_note(tone: Tone, words: str) -> Note:
    return Note(f"{words}.", tone=tone)


def _bound_block(block: Block) -> Block:
    match block:
        case Table() if not block.opens:
            table = drop_blank_columns(block)
            return replace(table, groups=tuple(_bound_groups(table)))
        case Steps():
            return Steps(bound_items(block.steps, Step))
        case Options():
            return replace(block, options=bound_items(block.options, partial(Option, "")))
        case Line():
            return Line(bound_items(block.pieces, str))
        case Fold():
            return replace(block, blocks=bound_blocks(block.blocks))
    return block


def bound_items(
    items: Sequence[_T], make: Callable[[str], _T], most: int = MOST_ROWS
) -> tuple[_T, ...]:
    """Return the first of some items, and one that says how many more there are."""
    shown, rest = split_rest(items, most)
    return (*shown, make(f"{len(rest):,} more")) if rest else tuple(shown)


def split_rest(items: Sequence[_T], most: int) -> tuple[Sequence[_T], Sequence[_T]]:
    """Return the items to show, and the rest, which one line counts: "5 more".

    The rest is empty or has at least two items: "1 more" would take the room of that one.
    """
    n_shown = len(items) if len(items) <= most + 1 else most
    return items[:n_shown], items[n_shown:]


def _bound_groups(table: Table) -> Iterator[Group]:
    # Of each group of a long table a host and its GPUs are shown.
    n_rows = max(9, table.most // max(1, min(len(table.groups), table.most)))

    def make_row(words: str) -> Row:
        return (Cell(words, tone="muted"),)

    for rows in bound_items(table.groups, lambda words: (make_row(words),), table.most):
        yield bound_items(rows, make_row, n_rows)
