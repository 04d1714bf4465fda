"""The input transformer alone: which lines it takes out, and what it leaves in their place."""

from __future__ import annotations

import pytest

from gpumemwidget.jupyter.outputs import MemtraceLine
from gpumemwidget.model.traces import TraceRequest


def _parse(text: str) -> TraceRequest | None:
    """Takes ``--lines 1`` and nothing else."""
    return {"": TraceRequest(), "--lines 1": TraceRequest(n_lines=1)}.get(text)


@pytest.fixture
def asked() -> list[TraceRequest | None]:
    return []


@pytest.fixture
def line(asked: list[TraceRequest | None]) -> MemtraceLine:
    return MemtraceLine(_parse, asked.append)


@pytest.mark.parametrize(
    ("cell", "left"),
    [
        ("%%memtrace\nx = 1\n", "\nx = 1\n"),
        ("%%memtrace\r\nx = 1\n", "\nx = 1\n"),
        ("%%memtrace  \t\nx = 1\n", "\nx = 1\n"),
        ("%%memtrace\n\nx = 1\ny\n", "\n\nx = 1\ny\n"),
        ("%%memtrace\n    x = 1\n    y\n", "\nx = 1\ny\n"),
        ("%%memtrace\n%%time\nx = 1\n", "%%time\nx = 1\n"),
        ("%%memtrace\n\n%%time\nx = 1\n", "%%time\nx = 1\n"),
        ("%%memtrace\n  %%time\n  x = 1\n", "%%time\nx = 1\n"),
        ("%%memtrace\n# x\n", "\n# x\n"),
        ("%%memtrace\n\n", "\n\n"),
        ("%%memtrace\n   ", "\n"),
    ],
)
def test_a_line_that_is_valid_goes(
    line: MemtraceLine, asked: list[TraceRequest | None], cell: str, left: str
) -> None:
    """An empty line stands for it, unless another cell magic follows, which has to come first."""
    lines = line(cell.splitlines(keepends=True))

    assert "".join(lines) == left
    assert asked == [TraceRequest()]


@pytest.mark.parametrize(
    "cell",
    [
        "",
        "x = 1\n",
        "x = 1\n%%memtrace\n",
        "%%memtrace\n",
        "%%memtrace --nonsense\nx = 1\n",
        "%%memtraceable\nx = 1\n",
        "%%memtrace?\n",
        "%%time\n%%memtrace\nx = 1\n",
        "# %%memtrace\nx = 1\n",
        "'''\n%%memtrace\n'''\n",
    ],
)
def test_every_other_cell_is_left_alone(
    line: MemtraceLine, asked: list[TraceRequest | None], cell: str
) -> None:
    lines = cell.splitlines(keepends=True)

    assert line(lines) is lines
    assert asked == [None]
