"""The table of ``%memhelp``: every magic with what it does and an example."""

from __future__ import annotations

from collections.abc import Sequence

from gpumemwidget.report.render.blocks import Cell, Column, Note, Table
from gpumemwidget.report.render.output import Report

_COLUMNS = (
    Column("magic", "code"),
    Column("example", "code"),
    Column("what it does", "words", last="wrap"),
)


def report_help(magics: Sequence[tuple[str, str, str]]) -> Report:
    """Report all magics in a table, each with its name, an example and a summary."""
    table = Table(
        caption="The magics of gpumemwidget",
        columns=_COLUMNS,
        groups=tuple((tuple(map(Cell, texts)),) for texts in magics),
        stacks=True,
    )
    more = Note("%NAME? shows all options of one. Python functions: help(gpumemwidget).")
    return Report((table, more))
