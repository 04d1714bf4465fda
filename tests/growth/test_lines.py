"""The line that adds memory: what is told of readings at lines."""

from __future__ import annotations

from pathlib import Path

from gpumemwidget.growth.lines import sum_lines
from gpumemwidget.tracing.line_watch import LineReadings

#: Line 5 gives back the forward pass of line 3, and line 7 keeps its own.
_LOOP = """\
for step in range(4):
    x = torch.randn(256, 128)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append((model(x) - x).square().mean())
"""


def read_lines(file: Path, changes: list[tuple[int, int]]) -> LineReadings:
    """Return the readings of changes in bytes, each with its line."""
    readings = LineReadings(lambda: 0, call_ns=0, grace_ns=0)
    for line, n_bytes in changes:
        place = str(file), line
        readings.events.append((place, n_bytes))
        readings.changes[place] = readings.changes.get(place, 0) + n_bytes
    return readings


def test_a_line_that_stores_a_graph_goes_before_another_that_takes_as_much(tmp_path: Path) -> None:
    """Though what is given back is about as large: on the host the graph's objects count, too."""
    file = tmp_path / "cell.py"
    file.write_text(_LOOP)
    step = [(7, 395_456), (2, 131_088), (3, 399_264), (5, -392_912)]

    changes = sum_lines(read_lines(file, step * 4))

    found = changes.find("losses[…]'s graph", in_graph=True, largest_bytes=131_072)
    assert found == (str(file), 7)
