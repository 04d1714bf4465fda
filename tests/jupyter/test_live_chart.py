"""The live chart in JupyterLab, and the report that follows it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.lab import Lab, Notebook

pytestmark = pytest.mark.browser

#: Grows by 20 MB every 0.1 s until the test lets it end.
_BUSY = """\
%%memtrace
import pathlib, time
kept = []
while not pathlib.Path("end").exists() and len(kept) < 300:
    kept.append(bytearray(20_000_000) if len(kept) < 40 else None)
    time.sleep(0.1)
print("done")
42"""


@pytest.fixture
def notebook(lab: Lab) -> Iterator[Notebook]:
    with lab.open(["%load_ext gpumemwidget", _BUSY]) as notebook:
        notebook.wait_for_kernel()
        notebook.run(0)
        yield notebook
    (lab.folder / "end").unlink(missing_ok=True)


def _read_now(notebook: Notebook) -> str:
    """The resident bytes in the column ``now``."""
    row = "tr[data-device=host][data-counter=resident]"
    return notebook.cell(1).locator(f".gmw-live {row} [data-column=now]").inner_text()


def _read_line(notebook: Notebook) -> str | None:
    """The path of the drawn resident line, the second of the chart."""
    return notebook.cell(1).locator(".gmw-live .scatterlayer .js-line").nth(1).get_attribute("d")


def test_it_is_live_in_mid_cell_and_gives_way_to_the_report(notebook: Notebook, lab: Lab) -> None:
    """The numbers and the lines go on; then the report stands below what the cell displayed."""
    notebook.start(1)
    root = notebook.cell(1).locator(".gmw").first
    root.wait_for()
    # The chart is drawn, and goes on being drawn.
    notebook.wait_until(lambda: _read_now(notebook) != "—", "the first reading is shown")
    first = _read_now(notebook)
    first_line = _read_line(notebook)
    notebook.wait_until(lambda: _read_now(notebook) != first, "the numbers go on")
    notebook.wait_until(lambda: _read_line(notebook) != first_line, "the line goes on")
    assert notebook.is_running(1)
    assert "running" in root.inner_text()

    (lab.folder / "end").touch()
    notebook.wait_for_end(1)
    notebook.wait_until(lambda: " ok " in notebook.output(1), "the report is shown")
    notebook.wait_until(lambda: notebook.cell(1).locator(".gmw").count() == 1, "the chart is gone")

    shown = notebook.output(1)
    assert shown.index("done") < shown.index("42") < shown.index("In [2]")
    assert notebook.cell(1).locator(".jupyter-widgets").count() == 0
    assert notebook.problems == []


def test_a_cell_that_is_run_again_has_a_chart_again(notebook: Notebook, lab: Lab) -> None:
    root = notebook.cell(1).locator(".gmw").first
    (lab.folder / "end").touch()
    notebook.run(1)
    (lab.folder / "end").unlink()

    notebook.start(1)
    notebook.wait_until(lambda: "running" in root.inner_text(), "the chart is there again")
    notebook.wait_until(lambda: _read_now(notebook) != "—", "it is live")
    (lab.folder / "end").touch()
    notebook.wait_for_end(1)

    notebook.wait_until(lambda: "running" not in root.inner_text(), "the report is shown")
    assert notebook.problems == []
