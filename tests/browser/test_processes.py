"""The Processes tab, in JupyterLab and Chromium, on recordings of simulated ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.lab import Lab
from tests.ranks import GIB, write_ranks

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

_LOAD = "%load_ext gpumemwidget\nimport gpumemwidget"


@pytest.mark.story
def test_ranks_are_seen_in_the_dashboard(lab: Lab, tmp_path: Path) -> None:
    """The tab comes with the first source; rows are live, a click shows a report, hosts fold."""
    rank, *others = write_ranks(tmp_path)
    watch = f"watched = gpumemwidget.watch({str(tmp_path)!r})"
    with lab.open_dashboard(_LOAD, watch, "watched.close()", height=2000) as notebook:
        page = notebook.page
        tab = page.locator("[data-tab=processes]")
        assert tab.is_hidden()
        notebook.run(2)
        tab.click()
        rows = page.locator(".gmd-process")
        notebook.wait_until(lambda: rows.count() == 10, "each process has a row")
        first = rows.filter(has_text="rank 0")
        assert "34.00 GiB" in first.inner_text()

        rank.take(2 * GIB)
        rank.sample()

        notebook.wait_until(lambda: "36.00 GiB" in first.inner_text(), "it has allocated more")
        notes = page.locator(".gmd-process-notes")
        assert "rank 3 is 5.91 GiB above the median" in notes.inner_text()

        def node2_is_heard() -> bool:
            # A host that is silent for some seconds says that instead.
            for other in others:
                other.sample()
            return "1 lost · 1 out of memory" in page.locator("[data-host=node2]").inner_text()

        notebook.wait_until(node2_is_heard, "the host says what happened to its processes")
        shared = page.locator(".gmd-gpu").last.locator(".gmd-bar-parts span")
        looks = [part.get_attribute("data-look") for part in shared.all()]
        assert looks == ["k0", "k1", "driver", "free"]

        rows.filter(has_text="rank 5").get_by_role("button").click()
        report = page.locator(".gmd-process-report")
        notebook.wait_until(lambda: "What you can do" in report.inner_text(), "its card is there")
        report.get_by_role("button", name="Close the report").click()
        assert report.is_hidden()

        fold = page.locator("[data-host=node1] button")
        fold.focus()
        page.keyboard.press("Enter")
        notebook.wait_until(lambda: rows.count() == 5, "the other host's rows are left")
        assert fold.evaluate("each => each === document.activeElement")
        assert fold.get_attribute("aria-expanded") == "false"

        notebook.run(3)
        notebook.wait_until(tab.is_hidden, "nothing is watched any more")
        assert page.locator("[data-tab=cells]").get_attribute("aria-selected") == "true"
