"""``%%memtrace``: the line above a cell that asks for its report.

The line is taken out of the cell by an input transformer, and the measuring is done by the cell
events. So the cell runs as if the line were not there: ``await``, other cell magics, the last
value, tracebacks with their line numbers and the status that stops "Run All" stay its own. (A cell
magic that runs its body itself loses one or the other of these.)
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["MemtraceLine", "MemtraceOptions", "parse_head"]

_LINE = re.compile(r"%%memtrace(?![\w?])[ \t]*(?P<options>.*?)[ \t]*\r?\n?")
_IDENTIFIER = re.compile(r"[^\W\d]")


@dataclasses.dataclass(frozen=True, slots=True)
class MemtraceOptions:
    """What stands behind ``%%memtrace``."""

    #: The one device that the report shows; ``None`` for all.
    device: str | None = None
    #: Whether a chart stands in the output while the cell runs.
    live: bool = True
    #: How many of a source's lines are shown, and how many calls deep; ``None``: the report's own.
    n_lines: int | None = None
    depth: int | None = None
    #: How many events of the allocators are kept.
    n_events: int | None = None
    #: A file for PyTorch's own memory viewer, and one for the trace itself.
    snapshot: Path | None = None
    export: Path | None = None
    #: Whether they may take the places of files that are there.
    force: bool = False


def parse_head(
    source: str, parse: Callable[[str], MemtraceOptions | None]
) -> MemtraceOptions | None:
    """The options of a cell that begins with ``%%memtrace``.

    Args:
        source: the cell as it was typed.
        parse: reads the text behind the magic's name; ``None`` where it is not valid.

    Returns:
        ``None`` where the cell begins with something else, or with options that are not valid.
    """
    if "%%memtrace" not in source:
        return None
    # As IPython takes the first line's indentation away; a body of blanks stays a body.
    lines = [line.lstrip(" \t") for line in source.splitlines(keepends=True)]
    found = _split_head(lines, parse)
    return None if found is None else found[0]


def _split_head(
    lines: Sequence[str], parse: Callable[[str], MemtraceOptions | None]
) -> tuple[MemtraceOptions, int] | None:
    """The options in the first line that is not blank, and the number of lines up to its end."""
    for n_blank, line in enumerate(lines):
        if line.isspace():
            continue
        match = _LINE.fullmatch(line) if line.startswith("%%") else None
        # Nothing below it: IPython's own message for a cell magic without a body says it best.
        if match is None or n_blank + 1 == len(lines):
            return None
        options = parse(match["options"])
        return None if options is None else (options, n_blank + 1)
    return None


class MemtraceLine:
    """The input transformer that takes a valid ``%%memtrace`` line out of a cell.

    It stands in ``input_transformers_cleanup``, so it also sees what other cell magics hand back to
    IPython: the body of ``%%time`` or ``%%capture``. A line with options that are not valid stays,
    so that the cell magic of this name gets it and refuses it.

    Args:
        shell: whose rules for one-line cells (``ls``, ``exit``) the body keeps.
        parse: reads the text behind the magic's name; ``None`` where it is not valid.
        on_removed: is told the options of each line that was taken out.
    """

    #: IPython then leaves it out when it only asks whether a cell is complete, which for cell
    #: magics has a rule of its own (a blank line ends them).
    has_side_effects = True

    def __init__(
        self,
        shell: InteractiveShell,
        parse: Callable[[str], MemtraceOptions | None],
        on_removed: Callable[[MemtraceOptions], None],
    ) -> None:
        self._shell = shell
        self._parse = parse
        self._on_removed = on_removed

    def __call__(self, lines: list[str]) -> list[str]:
        """The lines of a cell without the magic's."""
        found = _split_head(lines, self._parse)
        if found is None:
            return lines
        options, n_head = found
        self._on_removed(options)
        # IPython has removed the indentation that all lines shared; the body may have more of it.
        body = textwrap.dedent("".join(lines[n_head:])).splitlines(keepends=True)
        first = next((line for line in body if not line.isspace()), "")
        if first.startswith("%%"):
            # Another cell magic, which IPython looks for in the first line only.
            return self([*body[body.index(first) :]])
        # An empty line in its stead, so that a traceback names the lines that the notebook shows.
        return ["\n" * n_head, *self._prefilter(body)]

    def _prefilter(self, body: list[str]) -> list[str]:
        """What IPython does to a cell of one line only (``ls``, ``exit``), done to such a body."""
        prefilter = self._shell.prefilter_manager
        if len(body) != 1 or not _IDENTIFIER.match(body[0]) or prefilter is None:
            return body
        # IPython does it last: ``ls?`` asks for help, and is no ``ls`` any more by then.
        body = self._shell.input_transformer_manager.do_token_transforms(body)
        if len(body) != 1:
            return body
        with self._shell.builtin_trap:
            return [prefilter.prefilter_lines(body[0].rstrip("\n")) + "\n"]
