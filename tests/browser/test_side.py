"""The panel beside the notebook and the item in the status bar, in JupyterLab and Notebook 7."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.lab import BUSY, Lab, Notebook
from tests.browser.stage import write_load
from tools.pictures import HOST_CARD, LOAD_CARDS

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

_LOAD = write_load(1, 1)
_LOAD_AGAIN = "%load_ext gpumemwidget"
_FILL = "stage.train(0)"


def _panel(notebook: Notebook) -> Any:
    return notebook.page.locator(".gml-panel")


def _wait_for_status(notebook: Notebook, text: str) -> None:
    item = notebook.page.locator(".gml-status button:visible")
    expect(item).to_have_text(text, use_inner_text=True, timeout=60_000)


def _wait_for_model(notebook: Notebook) -> None:
    """Wait until the one dashboard shows what ``_FILL`` has taken."""
    chip = _panel(notebook).locator('.gmd-chip[data-device="cuda:0"]')
    expect(chip).to_contain_text("33.4 GiB here", timeout=60_000)


def _wait_for_dashboard(notebook: Notebook) -> None:
    _panel(notebook).locator(".gmd[data-drawn]").wait_for()


def _wait_for_message(notebook: Notebook, text: str) -> Any:
    """Wait until the panel says this in the place of the dashboard."""
    message = _panel(notebook).locator(".gml-message", has_text=text)
    message.wait_for()
    return message


def _open_beside(notebook: Notebook) -> None:
    """Run the first two cells, and wait for the dashboard in the panel."""
    notebook.wait_for_kernel()
    notebook.run(0)
    notebook.run(1)
    _wait_for_dashboard(notebook)


def _open_second(lab: Lab, notebook: Notebook, *cells: str) -> str:
    """Open another notebook to the right, which gets the focus, and run its cells; its name."""
    name = lab.write(cells)
    notebook.command("docmanager:open", {"path": name, "options": {"mode": "split-right"}})
    notebook.wait_until(lambda: notebook.path == name, f"{name} is open")
    for number in range(len(cells)):
        notebook.run_here(number)
    return name


def test_the_dashboard_is_beside_the_notebook_until_it_is_unloaded(side_lab: Lab) -> None:
    """Once, however often it is asked for; below the cell a note says where it is.

    The figure of a notebook whose kernel is busy says since when it is old. A dashboard that can't
    be shown is asked for again after the next cell.
    """
    fail = (
        "from gpumemwidget.widgets import dashboard\n"
        "read_esm, dashboard.read_esm = dashboard.read_esm, lambda: open('/missing')"
    )
    cells = [_LOAD, "%memdash --side", _FILL, "%memdash --side", f"{_FILL}\n{BUSY}"]
    cells += [f"%unload_ext gpumemwidget\n{fail}", _LOAD_AGAIN, "dashboard.read_esm = read_esm"]
    with side_lab.open(cells) as notebook:
        _open_beside(notebook)
        notebook.run(2)
        notebook.run(3)
        assert "The dashboard is beside the notebook." in notebook.output(1)
        assert notebook.cell(1).locator(".gmd").count() == 0
        _wait_for_model(notebook)
        assert notebook.page.locator(".gmd").count() == 1

        row = _panel(notebook).locator(".gml-kernels li")
        line = _panel(notebook).locator(".gml-kernels summary")
        expect(row).to_contain_text("33.36 GiB", timeout=60_000)
        assert "busy" not in (row.text_content() or "")
        line.click()
        notebook.start(4)
        old = re.compile(r"33\.36 GiB \(busy, as of \d\d:\d\d:\d\d\)")
        row.filter(has_text=old).wait_for()
        line.filter(has_text=old).wait_for()
        notebook.finish(4)
        expect(row).not_to_contain_text("busy", timeout=60_000)

        notebook.run(5)
        message = _wait_for_message(notebook, "This notebook is not recorded.")
        assert message.get_by_role("button").is_visible()
        assert notebook.page.locator(".gmd").count() == 0
        notebook.run(6)
        _wait_for_message(notebook, "The dashboard can't be shown: FileNotFoundError")
        notebook.run(7)
        _wait_for_dashboard(notebook)
        assert not _panel(notebook).locator(".gml-message").is_visible()
        assert notebook.problems == []


def test_the_status_bar_shows_the_gpu_memory(side_lab: Lab) -> None:
    """From the moment that the extension is loaded, and red beyond a budget or at a limit.

    Where a click on it opens the panel in mid-cell, the dashboard comes when the cell has ended.
    """
    cells = [_LOAD, _FILL, "%membudget 20GiB", "%membudget off", "%memlimit 32GiB", "%memlimit off"]
    with side_lab.open([*cells, BUSY]) as notebook:
        notebook.wait_for_kernel()
        item = notebook.page.locator(".gml-status button")
        assert not item.is_visible()

        notebook.run(0)
        _wait_for_status(notebook, "GPU 0.5 / 80 GiB")
        notebook.run(1)
        _wait_for_status(notebook, "GPU 33.4 / 80 GiB")
        is_red = "() => document.querySelector('.gml-status button').hasAttribute('data-over')"
        assert not notebook.page.evaluate(is_red)
        for over, off in ((2, 3), (4, 5)):
            notebook.run(over)
            notebook.page.wait_for_function(is_red)
            notebook.run(off)
            notebook.page.wait_for_function(f"() => !({is_red})()")
        assert not _panel(notebook).is_visible()

        notebook.start(6)
        notebook.wait_until(lambda: notebook.is_running(6), "the cell runs")
        item.click()
        # Some kernels answer in mid-cell.
        busy = _panel(notebook).locator(".gml-message", has_text="The kernel is busy")
        busy.or_(_panel(notebook).locator(".gmd")).first.wait_for()
        notebook.finish(6)
        _wait_for_dashboard(notebook)


def test_a_restarted_kernel_is_said_and_found_again(side_lab: Lab) -> None:
    """The note below the cell keeps its place and says what to do.

    The panel's button loads the extension again, without a second pane; so does a cell that asks
    for the dashboard after the panel was closed by hand.
    """
    with side_lab.open([_LOAD, "%memdash --side", "1 + 1"]) as notebook:
        _open_beside(notebook)
        notebook.cell(1).get_by_text("Show it").wait_for()
        before = notebook.cell(2).bounding_box()

        notebook.restart_kernel()
        words = "Run %load_ext gpumemwidget and %memdash --side again."
        notebook.cell(1).get_by_text(words).wait_for()
        after = notebook.cell(2).bounding_box()
        # The note's button is gone, which is a little higher than the words.
        assert before is not None
        assert after is not None
        assert abs(after["y"] - before["y"]) < 5
        said = "The kernel was restarted: it is not recorded any more."
        message = _wait_for_message(notebook, said)
        assert notebook.page.locator(".gml-status button:visible").count() == 0
        notebook.wait_for_kernel()
        message.get_by_role("button", name="Load gpumemwidget").click()
        _wait_for_dashboard(notebook)
        assert message.is_hidden()
        notebook.page.locator(".gml-status button", has_text="Host").wait_for()
        assert notebook.page.locator(".gmd").count() == 1

        notebook.command("application:toggle-right-area")
        _panel(notebook).wait_for(state="hidden")
        notebook.restart_kernel()
        notebook.wait_for_kernel()
        _open_beside(notebook)
        assert notebook.page.locator(".gmd").count() == 1


def test_a_page_that_is_loaded_anew_finds_the_dashboard(side_lab: Lab) -> None:
    """And a panel that was closed stays closed, though the cell has opened it before.

    In mid-cell it waits, and does not ask for what may be loaded already.
    """
    with side_lab.open([_LOAD, "%memdash --side", _FILL, BUSY]) as notebook:
        _open_beside(notebook)
        notebook.save()

        notebook.load()
        notebook.wait_for_kernel()
        _wait_for_status(notebook, "GPU 0.5 / 80 GiB")
        assert not _panel(notebook).is_visible()
        notebook.page.locator(".gml-status button").click()
        notebook.run(2)
        _wait_for_model(notebook)

        notebook.start(3)
        notebook.wait_until(lambda: notebook.is_running(3), "the cell runs")
        notebook.load()
        notebook.command("gpumemwidget:show")
        _wait_for_message(notebook, "Waiting for the kernel")
        notebook.let_finish()
        _wait_for_dashboard(notebook)


def test_run_all_opens_the_panel(side_lab: Lab) -> None:
    """Where the kernel is asked for the dashboard before any page could speak to it.

    A page has one line to a kernel: a second notebook on it says where the dashboard is.
    """
    with side_lab.open([_LOAD, "%memdash --side", _FILL, "1 + 1"]) as notebook:
        notebook.wait_for_kernel()

        notebook.command("notebook:run-all-cells")
        notebook.wait_for_end(3)
        _wait_for_model(notebook)

        name = side_lab.write(["1 + 1"])
        kernel = side_lab.request("/api/kernels")[0]["id"]
        notebook.command("docmanager:open", {"path": name, "kernel": {"id": kernel}})
        notebook.wait_until(lambda: notebook.path == name, f"{name} is open")
        _wait_for_message(notebook, "Another notebook in this page has the same kernel")
        assert notebook.problems == []


def test_a_cell_that_ran_out_of_memory_is_run_again_from_its_card(side_lab: Lab) -> None:
    """Once a release has made room for it; a view of the output alone has no cell to run."""
    fail = "event = dataclasses.replace(card.event, requested_bytes=MIB)\n"
    fail += "failing.append(dataclasses.replace(card, event=event))\nfail()"
    with side_lab.open([LOAD_CARDS, HOST_CARD, fail]) as notebook:
        notebook.wait_for_kernel()
        for number in range(3):
            notebook.run(number, timeout_s=60)
        again = notebook.page.get_by_role("button", name="Run the cell again")
        assert again.count() == 0
        notebook.select(2)
        notebook.command("notebook:create-output-view")
        view = notebook.page.locator(".jp-LinkedOutputView")
        released = view.get_by_role("button", name="Released")

        view.locator(".gmw-out tr", has_text="%memrelease big").locator("button").click()
        released.wait_for()
        assert view.get_by_role("button", name="Run the cell again").count() == 0
        notebook.show()
        again.click()

        notebook.cell(2).locator(".jp-InputPrompt", has_text="[4]:").wait_for()
        notebook.wait_for_end(2)
        assert "made to fail" in notebook.output(2)


def test_the_panel_follows_the_focus_and_lists_the_notebooks(side_lab: Lab) -> None:
    """Each with a GPU of its own; one is shut down from the list, once that is confirmed."""
    with side_lab.open([_LOAD, "%memdash --side", _FILL]) as notebook:
        _open_beside(notebook)
        notebook.run(2)
        first = notebook.name
        other_gpu = (write_load(2, 0), "stage.train(1, scale=0.5)")
        second = _open_second(side_lab, notebook, *other_gpu)
        _wait_for_status(notebook, "cuda:1 17.1 / 80 GiB")
        head = _panel(notebook).locator(".gml-head")
        notebook.wait_until(lambda: head.inner_text() == second, "the panel follows")
        _panel(notebook).locator('.gmd-chip[data-device="cuda:1"]', has_text="17.1 GiB").wait_for()

        rows = _panel(notebook).locator(".gml-kernels li")
        notebook.wait_until(lambda: rows.count() == 2, "both notebooks are in the list")
        line = _panel(notebook).locator(".gml-kernels summary")
        words = f"GPU: {first} 33.36 GiB · {second} 17.07 GiB"
        status = notebook.page.locator(".gml-status button")
        status.hover()
        notebook.wait_until(
            lambda: (
                line.inner_text() == words
                and words in (status.get_attribute("title") or "").split("\n")
            ),
            "the line and the tooltip say the same",
        )
        assert not rows.first.is_visible()
        line.click()
        assert _panel(notebook).locator(".gml-kernels h4").count() == 2
        # The text of what is not laid out yet has no spaces.
        rows.first.wait_for()
        shown = [re.sub(r"\s+", " ", text) for text in rows.all_inner_texts()]
        assert shown == [f"{first} 33.36 GiB ✕", f"{second} 17.07 GiB ✕"]
        rows.filter(has_text=first).locator("button").click()
        dialog = notebook.page.locator(".jp-Dialog")
        assert f"Shut down the kernel of {first}?" in dialog.inner_text()
        assert "This frees 33.36 GiB of GPU memory." in dialog.inner_text()
        dialog.get_by_role("button", name="Cancel").click()
        assert rows.count() == 2
        rows.filter(has_text=first).locator("button").click()
        dialog.get_by_role("button", name="Shut Down").click()

        notebook.wait_until(lambda: rows.count() == 1, "the list has one row less")
        notebook.wait_until(
            lambda: len(side_lab.request("/api/kernels")) == 1, "the kernel has ended"
        )


def test_a_note_without_a_panel_is_the_snapshot_alone(side_lab: Lab) -> None:
    """Reopened without its kernel, the notebook has one snapshot and no word of a dashboard beside.

    The plain ``%memdash`` above is another output, and stays one.
    """
    with side_lab.open([_LOAD, "%memdash", "%memdash --side"]) as notebook:
        notebook.wait_for_kernel()
        for number in range(3):
            notebook.run(number)
        _wait_for_dashboard(notebook)
        assert "beside the notebook" not in notebook.output(1)
        assert "The dashboard is beside the notebook." in notebook.output(2)
        path = side_lab.folder / notebook.name
        notebook.save()
        notebook.wait_until(lambda: "Snapshot" in path.read_text("utf-8"), "it is saved")

        notebook.reopen()
        snapshots = notebook.page.get_by_text("Snapshot of the dashboard").filter(visible=True)
        notebook.wait_until(lambda: snapshots.count() == 1, "there is one snapshot")

        assert "beside the notebook" not in notebook.output(1) + notebook.output(2)
        assert notebook.cell(2).locator("button:visible", has_text="Show it").count() == 0


def test_without_the_panel_the_dashboard_is_below_the_cell(lab: Lab) -> None:
    """As it is with %memdash alone."""
    with lab.open([_LOAD, "%memdash --side"]) as notebook:
        notebook.wait_for_kernel()
        notebook.run(0)
        notebook.run(1)

        notebook.cell(1).locator(".gmd[data-drawn]").wait_for()
        assert notebook.page.locator(".gml-panel").count() == 0


def test_notebook_7_has_the_panel_too(side_lab: Lab) -> None:
    """And the item at the top, for it has no status bar."""
    with side_lab.open([_LOAD, "%memdash --side", _FILL]) as notebook:
        notebook.load_in_notebook_7()
        notebook.wait_for_kernel()
        for number in range(3):
            notebook.run_here(number)

        _wait_for_status(notebook, "GPU 33.4 / 80 GiB")
        _wait_for_model(notebook)
