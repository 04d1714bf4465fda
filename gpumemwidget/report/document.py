"""What a report says, before it is text or HTML.

Each report is built once, as a document of a few kinds of blocks, and drawn twice from it: so both
forms say the same numbers, and the escaping of a user's text is done in one place for each form.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gpumemwidget.report.bridgebar import BridgeChart
from gpumemwidget.report.segmentchart import SegmentChart
from gpumemwidget.report.sparkline import Sparkline
from gpumemwidget.report.timeline import TimelineChart

__all__ = [
    "Block",
    "Bridges",
    "Cell",
    "Column",
    "Document",
    "Fold",
    "Heading",
    "Listing",
    "ListingRow",
    "Note",
    "Option",
    "Options",
    "Part",
    "Run",
    "SegmentCharts",
    "Sparklines",
    "Step",
    "Steps",
    "Table",
    "Timelines",
    "UseBar",
]

#: How a piece of text is meant. ``code`` is the user's own text.
Tone = Literal["plain", "strong", "muted", "code", "bad", "warn"]


@dataclass(frozen=True, slots=True)
class Run:
    """A piece of a line."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Heading:
    """The first line: pieces with a dot between them."""

    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    ``name`` heads its row, ``number`` is set to the right, ``code`` is the user's text, save cells
    of a tone. A ``last`` column takes what room is left: ``wrap`` flows, ``cut`` ends in an
    ellipsis.
    """

    title: str
    kind: Literal["name", "number", "words", "code"] = "number"
    last: Literal["wrap", "cut"] | None = None
    #: So wide at most: longer text loses its middle (text) or may break anywhere (HTML).
    fold: int | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One value of a table, as text already."""

    text: str
    #: Stands before a number that is not what it seems: ``≥``, ``~``, ``*``. A note explains it.
    mark: str = ""
    tone: Tone = "plain"
    #: Says a little more, where there is room (HTML).
    detail: str = ""
    #: Fills the rest of the row.
    spans_rest: bool = False
    #: How far it is indented: its depth in a tree.
    level: int = 0
    #: Drawn as a bar beside the text, where there is room (HTML): 0 to 1.
    share: float | None = None
    #: The class of a patch of colour before the text (HTML).
    swatch: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows in groups; the first ``n_shared`` cells of a group's first row stand for all its rows.

    So does the cell of a ``last`` column, unless each row has its own. The group's other rows are
    that much shorter.
    """

    caption: str
    columns: tuple[Column, ...]
    groups: tuple[tuple[tuple[Cell, ...], ...], ...]
    n_shared: int = 0
    last_is_shared: bool = True
    #: Screen readers hear the caption in any case; it is seen where several tables need names.
    caption_is_seen: bool = False
    #: In HTML the shared cell is a line of its own above its rows, which keeps the table narrow.
    shared_above: bool = False
    #: The last cell of a row stands below the others: in text, and where HTML has little room.
    stacks: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence below: what a mark means, what went wrong."""

    text: str
    mark: str = ""
    tone: Tone = "muted"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a list, with the details that belong to it."""

    name: str
    summary: str = ""
    #: Lines of their own; pieces where some of it is the user's text or to be typed.
    details: tuple[str | tuple[Run, ...], ...] = ()
    #: ``code`` where the name is the user's text.
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps in their order."""

    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Sparklines:
    """The charts, which only HTML can show."""

    charts: tuple[Sparkline, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a whole."""

    label: str
    n_bytes: int
    #: Which colour it has: a kind of memory, or ``cached``, ``outside``, ``others``, ``free``,
    #: ``rest``.
    look: str
    #: Stands behind the amount.
    detail: str = ""
    #: What it is made of; drawn in its place, where there is any.
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class UseBar:
    """A device's memory as one bar, with what its parts are."""

    title: str
    #: What the parts add up to.
    total_bytes: int
    parts: tuple[Part, ...]
    #: Where a line stands across the bar, and what it is.
    mark_bytes: int | None = None
    mark_label: str = ""


@dataclass(frozen=True, slots=True)
class Option:
    """Something that a person can do: what it gives, what it is, and what to type for it."""

    amount: str
    text: str
    command: str = ""


@dataclass(frozen=True, slots=True)
class Options:
    """Options in their order."""

    caption: str
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Timelines:
    """What stands over the time of a cell, which only HTML can show."""

    charts: tuple[TimelineChart, ...]


@dataclass(frozen=True, slots=True)
class Bridges:
    """A device's memory as a bar, and what others tell of it; text has the latter alone."""

    chart: BridgeChart


@dataclass(frozen=True, slots=True)
class SegmentCharts:
    """Where the blocks lie in their segments: a picture, in text a line of letters a row."""

    chart: SegmentChart


@dataclass(frozen=True, slots=True)
class ListingRow:
    """A line of source with its amounts, a call below it, or a row that stands for others."""

    #: ``line`` and ``call`` are code, ``words`` are ours: "12 lines that allocated nothing".
    kind: Literal["line", "call", "words", "sum"]
    #: As it was typed, with its indentation.
    text: str
    number: int | None = None
    #: One for each of the listing's columns; ``()`` where there is nothing to tell.
    amounts: tuple[Cell, ...] = ()
    #: What is said of a call more quietly: the file and the line.
    detail: str = ""
    #: How deep a call is below its line, from 1.
    level: int = 0
    #: The key of its colour in the timeline (``Band.key``), where it has one.
    band: str = ""
    #: The calls below a line, in the order in which they stand, of all levels.
    calls: tuple[ListingRow, ...] = ()


@dataclass(frozen=True, slots=True)
class Listing:
    """Source, line by line, with amounts beside it."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[ListingRow, ...]


@dataclass(frozen=True, slots=True)
class Fold:
    """Blocks that HTML shows when they are asked for; text shows them."""

    runs: tuple[Run, ...]
    blocks: tuple[Block, ...]


Block = (
    Heading
    | Table
    | Note
    | Steps
    | Sparklines
    | UseBar
    | Options
    | Timelines
    | Bridges
    | SegmentCharts
    | Listing
    | Fold
)


@dataclass(frozen=True, slots=True)
class Document:
    """A whole report."""

    blocks: tuple[Block, ...] = field(default=())
    #: More classes of the HTML's outermost element; with any it has a frame.
    classes: tuple[str, ...] = ()
