"""What a person sees and does with reports under a cell, in JupyterLab."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

from tests.browser.lab import Lab, Notebook

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

#: Shows a GPU's trace as ``%%memtrace`` does.
_SHOW = """\
from IPython.display import display
from gpumemwidget.report.prediction import report_prediction, report_sizes
from gpumemwidget.report.trace import report_trace
from tests.report import prediction_examples, trace_examples
display(report_trace(trace_examples.make_trace(), ()))
"""
#: Whether nothing of a table is cut.
_FITS = "e => e.scrollWidth <= e.clientWidth"
_SHOW_HOSTILE = "display(report_trace(trace_examples.make_hostile_trace(), ()))"
_SHOW_PREDICTION = """\
display(report_prediction(prediction_examples.make_large_prediction()))
display(report_sizes(131, 0, prediction_examples.make_sizes()))
"""


@pytest.fixture(scope="module")
def reports(lab: Lab) -> Iterator[Notebook]:
    """A notebook with a trace in its first cell, a hostile one and a prediction."""
    with lab.open([_SHOW, _SHOW_HOSTILE, _SHOW_PREDICTION], height=2500) as notebook:
        notebook.wait_for_kernel()
        for number in range(3):
            notebook.run(number, timeout_s=60)
        notebook.cell(1).locator(".gmw-tl svg").first.wait_for()
        notebook.cell(2).locator(".gmw-w:visible").first.wait_for()
        # Later there may be JupyterLab's own, which takes away a theme's style sheet twice.
        assert notebook.problems == []
        yield notebook


def test_timeline_names_each_line_with_its_bytes(reports: Notebook) -> None:
    """Beside the picture what each line held at the peak; under the pointer the line itself."""
    timeline = reports.cell(0).locator(".gmw-tl")

    legend = [" ".join(row.split()) for row in timeline.locator("li").all_inner_texts()]
    titles = timeline.locator("path title").all_text_contents()

    assert "line 2 step(data, target) 77.05 MiB" in legend
    assert "before the cell 6.09 MiB" in legend
    assert "line 2 step(data, target)" in titles
    assert timeline.get_by_text("peak 95.19 MiB").is_visible()


def test_a_line_opens_to_its_calls_and_closes(reports: Notebook) -> None:
    """By a click and by the keyboard; the calls' amounts stand in the line's columns."""
    cell = reports.cell(0)
    calls = cell.locator(".gmw-call:visible")
    summary = cell.locator(".gmw-li summary", has_text="step(data, target)")
    assert calls.count() == 0

    summary.click()
    opened = calls.all_inner_texts()
    assert any("Net.forward › Block.forward" in text and "38.62 MiB" in text for text in opened)
    columns = [
        cell.locator(f"{row} td.gmw-r").first.evaluate("e => e.getBoundingClientRect().right")
        for row in (".gmw-li tr:has([open])", ".gmw-li .gmw-call:visible")
    ]
    assert columns[0] == columns[1]

    summary.press("Enter")
    assert calls.count() == 0
    library = cell.locator("summary", has_text="train/losses.py")
    library.click()
    assert cell.get_by_text("logits = logits.float()").is_visible()
    library.click()


@pytest.mark.parametrize(("cell", "width", "n_tables"), [(0, 1600, 1), (2, 600, 3), (2, 1400, 3)])
@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_reports_fit_the_page(
    reports: Notebook, theme: str, cell: int, width: int, n_tables: int
) -> None:
    """No table of lines or of a prediction is wider than the page."""
    reports.page.set_viewport_size({"width": width, "height": 2500})
    reports.set_theme(theme)
    tables = reports.cell(cell).locator(".gmw-w:visible")
    if cell == 0:
        tables = tables.filter(has=reports.page.locator(".gmw-li"))

    cut = [table.inner_text() for table in tables.all() if not table.evaluate(_FITS)]

    assert tables.count() >= n_tables
    assert cut == []


def test_lines_fit_a_narrow_page(lab: Lab) -> None:
    """No table of lines is wider than a page that is opened beside another, in both themes."""
    with lab.open([_SHOW], width=700) as notebook:
        notebook.wait_for_kernel()
        notebook.run(0, timeout_s=60)
        listing = notebook.page.locator(".gmw-w", has=notebook.page.locator(".gmw-li")).first
        for theme in ("JupyterLab Light", "JupyterLab Dark"):
            notebook.set_theme(theme)

            assert listing.evaluate(_FITS)


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_amounts_of_lines_have_the_colour_of_the_others(reports: Notebook, theme: str) -> None:
    """As those of the devices have it, in each theme."""
    reports.set_theme(theme)

    color, wanted = (
        reports.cell(0).locator(selector).first.evaluate("e => getComputedStyle(e).color")
        for selector in (".gmw-li td.gmw-r:not(.gmw-m)", ".gmw-q td.gmw-r:not(.gmw-m)")
    )

    assert color == wanted


def test_hostile_source_is_text(reports: Notebook) -> None:
    """Nothing of it runs, becomes an element, or is set as a formula."""
    cell = reports.cell(1)

    titles = cell.locator(".gmw-tl path title").all_text_contents()

    assert any("<script>alert" in title for title in titles)
    assert cell.locator(".jp-OutputArea script").count() == 0
    assert cell.locator(".jp-OutputArea .MathJax, .jp-OutputArea mjx-container").count() == 0
    assert "<script>alert('x')</script>" in reports.output(1)


# -- Under a cell ----------------------------------------------------------------------------------

#: Grows by 20 MB twice and prints, then waits until the test lets it end.
_CELL = """\
%%memtrace
import pathlib, time
first = bytearray(20_000_000)
print("printed by the cell")
second = bytearray(20_000_000)
while not pathlib.Path("end").exists():
    time.sleep(0.05)
del first"""


@contextlib.contextmanager
def _run_cell(lab: Lab, cell: str = _CELL) -> Iterator[Notebook]:
    """A notebook whose second cell is traced and waits for ``end``."""
    end = lab.folder / "end"
    end.unlink(missing_ok=True)
    with lab.open(["%load_ext gpumemwidget", cell]) as notebook:
        notebook.wait_for_kernel()
        notebook.run(0)
        notebook.start(1)
        try:
            yield notebook
        finally:
            end.unlink(missing_ok=True)
        assert notebook.problems == []


def _end(notebook: Notebook, lab: Lab) -> None:
    (lab.folder / "end").touch()
    notebook.wait_for_end(1, timeout_s=60)
    notebook.page.wait_for_selector(".gmw-li")


def _list_outputs(notebook: Notebook) -> list[str]:
    """What stands under the cell, from the top, each by what it is."""
    kinds = {"head": ".gmw-q", "lines": ".gmw-li", "own": "pre"}
    found = []
    for output in notebook.cell(1).locator(".jp-OutputArea-child").all():
        found += [kind for kind, selector in kinds.items() if output.locator(selector).count()][:1]
    return found


@pytest.mark.story
def test_live_report_gives_way_to_the_last_one(lab: Lab) -> None:
    """While the cell runs its report goes on; then the last one stands below what it printed."""
    with _run_cell(lab) as notebook:
        root = notebook.cell(1).locator(".gmw").first
        root.get_by_text("not finished").wait_for()
        first = root.inner_text()
        notebook.wait_until(lambda: root.inner_text() != first, "the figures go on")
        _end(notebook, lab)
        notebook.wait_until(lambda: "not finished" not in notebook.output(1), "the last one")

        assert notebook.output(1).startswith("printed by the cell")
        assert _list_outputs(notebook) == ["own", "head"]
        lines = notebook.cell(1).locator(".gmw-li").inner_text()
        assert re.search(r"second = bytearray\(20_000_000\)\s+\+19\.\d\d MiB", lines)
        assert re.search(r"del first\s+-19\.\d\d MiB", lines)
