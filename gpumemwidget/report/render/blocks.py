"""The blocks of a report: what it says, before it is text or HTML.

Each report is built once, of a few kinds of blocks, and drawn as text and as HTML from them, so
both forms say the same numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from gpumemwidget.report.render.markup import Html

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


@dataclass(frozen=True, slots=True)
class Table:
    """Rows in groups; the first ``n_shared`` cells of a group's first row stand for all its rows.

    The cell of a ``last`` column is shared with them. The group's other rows are shorter by the
    shared cells.
    """

    caption: str
    columns: tuple[Column, ...]
    groups: tuple[tuple[tuple[Cell, ...], ...], ...]
    n_shared: int = 0
    #: Screen readers hear the caption in any case; it is seen where several tables need names.
    caption_is_seen: bool = False
    #: In HTML the shared cell is a line above its rows, which keeps the table narrow.
    shared_above: bool = False
    #: The last cell of a row stands below the others: in text, and where HTML has little room, if
    #: no cells are shared.
    stacks: bool = False
    #: The first row of a group is a line of source, which HTML opens to the calls below it. Text
    #: has the first two columns, which are an ``index`` and a ``source``, behind the others.
    opens: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence below the figures: what a mark means, what went wrong."""

    text: str
    mark: str = ""
    tone: Tone = "muted"


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

    steps: tuple[Step, ...]


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
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Fold:
    """Blocks that HTML shows on a click; text shows them at once."""

    runs: tuple[Run, ...]
    blocks: tuple[Block, ...]


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
