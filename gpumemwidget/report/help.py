"""The table of ``%memhelp``: every magic with what it does and an example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpumemwidget.report.render.blocks import Cell, Column, Note, Table
from gpumemwidget.report.render.output import Report

_COLUMNS = (
    Column("magic", "code"),
    Column("example", "code"),
    Column("what it does", "words", last="wrap"),
)


@dataclass(frozen=True, slots=True)
class MagicHelp:
    """A magic with its summary and an example."""

    #: With its percent signs.
    name: str
    #: One sentence without its full stop.
    summary: str
    example: str


def report_help(magics: Sequence[MagicHelp]) -> Report:
    """Report all magics in a table, in the given order."""
    table = Table(
        caption="The magics of gpumemwidget",
        columns=_COLUMNS,
        groups=tuple(
            ((Cell(magic.name), Cell(magic.example), Cell(magic.summary)),) for magic in magics
        ),
        stacks=True,
    )
    more = Note("%NAME? shows all options of one. Python functions: help(gpumemwidget).")
    return Report((table, more))
