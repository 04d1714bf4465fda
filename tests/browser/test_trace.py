"""What a person sees and does with the report of a traced cell, in JupyterLab."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator

from tests.browser.lab import Lab, Notebook

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

#: A GPU's trace, shown as ``%%memtrace`` shows it.
_SHOW = """\
from IPython.display import display
from gpumemwidget.report.trace import report_trace
from tests.report import trace_examples
display(report_trace(trace_examples.{}(), ()))
"""


@contextlib.contextmanager
def _show(lab: Lab, make: str, **options: object) -> Iterator[Notebook]:
    """A notebook with the report of a made trace in view."""
    with lab.open([_SHOW.format(make)], **options) as notebook:  # type: ignore[arg-type]
        notebook.wait_for_kernel()
        notebook.run(0, timeout_s=60)
        notebook.page.wait_for_selector(".gmw-tl svg")
        yield notebook
        assert notebook.problems == []


def _list_calls(notebook: Notebook) -> Locator:
    return notebook.page.locator(".gmw-call:visible")


def test_timeline_names_each_line_with_its_bytes(lab: Lab) -> None:
    """Beside the picture what each line held at the peak; under the pointer the line itself."""
    with _show(lab, "make_trace") as notebook:
        timeline = notebook.page.locator(".gmw-tl")

        legend = [" ".join(row.split()) for row in timeline.locator("li").all_inner_texts()]
        assert "line 2 step(data, target) 77.05 MiB" in legend
        assert "before the cell 6.09 MiB" in legend
        titles = timeline.locator("path title").all_text_contents()
        assert "line 2 step(data, target)" in titles
        assert timeline.get_by_text("peak 95.19 MiB").is_visible()


def test_a_line_opens_to_its_calls_and_closes(lab: Lab) -> None:
    """By a click and by the keyboard; the calls' amounts stand in the line's columns."""
    with _show(lab, "make_trace") as notebook:
        page = notebook.page
        summary = page.locator(".gmw-li summary", has_text="step(data, target)")
        assert _list_calls(notebook).count() == 0

        summary.click()
        opened = _list_calls(notebook).all_inner_texts()
        assert any("Net.forward › Block.forward" in text and "38.62 MiB" in text for text in opened)
        columns = [
            page.locator(f"{row} td.gmw-r").first.evaluate("e => e.getBoundingClientRect().right")
            for row in (".gmw-li tr:has([open])", ".gmw-li .gmw-call:visible")
        ]
        assert columns[0] == columns[1]

        summary.press("Enter")
        assert _list_calls(notebook).count() == 0
        page.locator("summary", has_text="train/losses.py").click()
        assert page.get_by_text("logits = logits.float()").is_visible()


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
@pytest.mark.parametrize("width", [700, 1600])
def test_report_fits_the_page(lab: Lab, theme: str, width: int) -> None:
    """No table of the lines is wider than the page, and its text has the colour of the others."""
    with _show(lab, "make_trace", theme=theme, width=width) as notebook:
        page = notebook.page
        listing = page.locator(".gmw-w", has=page.locator(".gmw-li")).first

        assert listing.evaluate("e => e.scrollWidth <= e.clientWidth")
        color, wanted = (
            page.locator(selector).first.evaluate("e => getComputedStyle(e).color")
            for selector in (".gmw-li td.gmw-r:not(.gmw-m)", ".gmw-q td.gmw-r:not(.gmw-m)")
        )
        assert color == wanted


def test_hostile_source_is_text(lab: Lab) -> None:
    """Nothing of it runs, becomes an element, or is set as a formula."""
    with _show(lab, "make_hostile_trace") as notebook:
        page = notebook.page
        titles = page.locator(".gmw-tl path title").all_text_contents()

        assert any("<script>alert" in title for title in titles)
        assert page.locator(".jp-OutputArea script").count() == 0
        assert page.locator(".jp-OutputArea .MathJax, .jp-OutputArea mjx-container").count() == 0
        assert "<script>alert('x')</script>" in notebook.output(0)


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
