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
from typing import ClassVar, Literal, TypeVar

from gpumemwidget.report.render.markup import Html

#: Maximum numbers of entries of a list in a report: names in a sentence, rows among other things,
#: and rows of a list of its own, a screen or two. Where all are asked for, it is about as much as a
#: page can show without delay (250 KB of HTML).
FEW, SOME, MOST_ROWS, MOST_ROWS_OF_ALL = 3, 12, 50, 500
#: Minimum number of rows that are shown of each group of a long table: a host and its GPUs.
_LEAST_IN_GROUP = 9
#: Maximum number of blocks of a report, each with its own rows.
_MOST_BLOCKS = 200

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


def make_group(*rows: Iterable[Cell | str]) -> Group:
    """Return rows of a table; a plain text is a cell."""
    return tuple(
        tuple(Cell(cell) if isinstance(cell, str) else cell for cell in row) for row in rows
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
    #: no cells are shared.
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


# -- Bounds ----------------------------------------------------------------------------------------


def bound_blocks(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Return the blocks, the lists in them cut to what a person can read, with what is left out."""
    bounded: list[Block] = []
    for tone, same in itertools.groupby(blocks, lambda b: b.tone if isinstance(b, Note) else None):
        some = tuple(map(_bound_block, same))
        bounded.extend(some if tone is None else bound_items(some, partial(_make_note, tone)))
    return bound_items(bounded, lambda words: Note(f"{words} parts are not shown."), _MOST_BLOCKS)


def _make_note(tone: Tone, words: str) -> Note:
    return Note(f"{words}.", tone=tone)


def _bound_block(block: Block) -> Block:
    match block:
        case Table() if not block.opens:
            return replace(block, groups=tuple(_bound_groups(block)))
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
    """Return the first of some items, and one that says how many more there are.

    An item that said "1 more" would take the room of that one.
    """
    n_more = len(items) - most
    return (*items[:most], make(f"{n_more:,} more")) if n_more > 1 else tuple(items)


def _bound_groups(table: Table) -> Iterator[Group]:
    n_rows = max(_LEAST_IN_GROUP, table.most // max(1, min(len(table.groups), table.most)))

    def make_row(words: str) -> Row:
        return (Cell(words, tone="muted"),)

    for rows in bound_items(table.groups, lambda words: (make_row(words),), table.most):
        yield bound_items(rows, make_row, n_rows)
