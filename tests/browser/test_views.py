"""What a person does with the dashboard's own controls, and what it shows of whole devices."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.lab import Lab, Notebook
from tests.browser.stage import write_load

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


@contextlib.contextmanager
def _open(lab: Lab, n_devices: int, n_used: int, *cells: str) -> Iterator[Notebook]:
    """A notebook on simulated GPUs with its dashboard, and cells that have run."""
    with lab.open_dashboard(write_load(n_devices, n_used), *cells) as notebook:
        for number in range(2, 2 + len(cells)):
            notebook.run(number, timeout_s=60)
        yield notebook


def _chip(notebook: Notebook, device: str) -> str:
    return notebook.page.locator(f'.gmd-chip[data-device="{device}"]').inner_text()


def _wait_for_chip(notebook: Notebook, device: str, pattern: str) -> None:
    notebook.wait_until(
        lambda: re.search(pattern, _chip(notebook, device)) is not None,
        f"{device} shows {pattern}: {_chip(notebook, device)!r}",
    )


def test_first_view_tells_how_full_each_device_is(lab: Lab) -> None:
    """One total everywhere, that of the driver; GPUs that are lost or not used have a card too."""
    fill = "stage.train(0)\nstage.driver.lose(2)"
    with _open(lab, 3, 1, fill) as notebook:
        _wait_for_chip(notebook, "cuda:0", r"26\.4 GiB here · 36\.3 of 80 GiB in use")
        _wait_for_chip(notebook, "cuda:0", "37% busy")
        _wait_for_chip(notebook, "cuda:1", r"not used here · 0 of 80 GiB in use")
        _wait_for_chip(notebook, "cuda:2", "can't be read")
        _wait_for_chip(notebook, "host", r"MiB here · .* of .* GiB in use")
        page = notebook.page
        title = page.locator('.gmd-chip[data-device="cuda:0"]').get_attribute("title") or ""
        assert "cached by PyTorch: 6.43 GiB" in title
        assert "others: 2.93 GiB" in title
        # This process has used one GPU, so the plot is of that one.
        assert page.locator(".gmd-busy").get_by_role("img").get_attribute("aria-label") == (
            "How busy: cuda:0 37%"
        )

        page.locator("[data-tab=device]").click()
        page.locator('[data-pick="cuda:0"]', has_text="36.29 GiB of 80.00 GiB in use").wait_for()
        page.locator(".gmd-report", has_text="80.00 GiB").wait_for()
        assert "total 80.00 GiB" in page.locator(".gmd-canvas").inner_text()


def test_what_was_freed_is_not_said_to_be_others_until_the_driver_is_asked(lab: Lab) -> None:
    """PyTorch's counters outrun the driver: what this process gave back is free at once."""
    with _open(lab, 1, 1, "stage.train(0)", _FREE_ALL) as notebook:
        # Somebody else's 2.93 GiB, and this process's context.
        _wait_for_chip(notebook, "cuda:0", r"0 B here · 3\.43 of 80 GiB in use")
        title = notebook.page.locator('.gmd-chip[data-device="cuda:0"]').get_attribute("title")
        assert "others: 2.93 GiB" in (title or "")
        assert "free: 76.57 GiB" in (title or "")


def test_choices_are_remembered_by_the_next_page(lab: Lab) -> None:
    """Window, tab and hidden lines; own cells are hidden until they are asked for."""
    with _open(lab, 1, 1, "stage.train(0)", "%memstat") as notebook:
        page = notebook.page
        cells = page.locator(".gmd-cells tbody")
        notebook.wait_until(lambda: "stage.train(0)" in cells.inner_text(), "the cell is listed")
        assert "%memstat" not in cells.inner_text()
        page.locator(".gmd-hidden-cells", has_text="2 gpumemwidget cells hidden.").wait_for()
        page.locator(".gmd-own").click()
        notebook.wait_until(lambda: "%memstat" in cells.inner_text(), "own cells are shown")

        page.locator('[data-window="30 s"]').click()
        page.locator(".gmd-key-peak").click()
        assert page.locator(".gmd-key-peak").get_attribute("aria-pressed") == "false"
        notebook.wait_until(lambda: bool(page.evaluate(_PEAK_IS_HIDDEN)), "the line is gone")
        page.locator("[data-tab=device]").click()
        notebook.save()
        notebook.wait_until(
            lambda: "widget-view+json" in (lab.folder / notebook.name).read_text("utf-8"),
            "the file has the dashboard",
        )
        notebook.load()
        page.locator(".gmd[data-drawn]").wait_for(timeout=60_000)

        chosen = '[aria-pressed="true"]'
        page.locator(f'[data-window="30 s"]{chosen}').wait_for()
        page.locator('[data-tab=device][aria-selected="true"]').wait_for()
        page.locator('.gmd-key-peak[aria-pressed="false"]').wait_for()
        notebook.wait_until(lambda: bool(page.evaluate(_PEAK_IS_HIDDEN)), "it is still gone")


def test_plot_is_zoomed_read_and_saved(lab: Lab) -> None:
    """The wheel zooms with Ctrl alone; each value has its own unit; the picture and the table."""
    with _open(lab, 1, 1, "stage.take(3, 'tensor', 'x')\ntime.sleep(2)") as notebook:
        page = notebook.page
        box = page.locator(".gmd-canvas").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] * 0.97, box["y"] + box["height"] / 2)
        texts = page.locator(".gmd-canvas .hoverlayer .legendtext")
        texts.first.wait_for()
        notebook.wait_until(
            lambda: "allocated: 3.00 MiB" in texts.all_text_contents(), "each in its own unit"
        )
        before = page.evaluate(_RANGE_MS)
        page.evaluate(_COUNT_WHEELS)
        page.mouse.wheel(0, -100)
        page.wait_for_function("window.wheels === 1")
        assert page.locator(".gmd-reset").is_hidden()
        page.keyboard.down("Control")
        page.mouse.wheel(0, -300)
        page.keyboard.up("Control")
        page.locator(".gmd-reset").wait_for()
        notebook.wait_until(lambda: page.evaluate(_RANGE_MS) < 0.8 * before, "it is zoomed")

        with page.expect_download() as saved:
            page.locator('[data-save="CSV"]').click()
        lines = Path(saved.value.path()).read_text().splitlines()
        assert lines[0].startswith("time,cuda:0 allocated,cuda:0 reserved,cuda:0 peak")
        assert lines[-1].split(",")[1] == str(3 * 1024**2)
        with page.expect_download() as saved:
            page.locator('[data-save="PNG"]').click()
        assert Path(saved.value.path()).read_bytes().startswith(b"\x89PNG")


def test_many_gpus_are_summed_up(lab: Lab) -> None:
    """Of eight the one that weighs most in the column, and the others together."""
    take = "stage.take(100, 'tensor', 'x', 3)"
    pass_by = "stage.take(50, 'tensor', 'y', 1)\nstage.take(90, 'tensor', 'z', 7)\nstage.drop('z')"
    with _open(lab, 8, 8, take, "x = 1", pass_by) as notebook:
        page = notebook.page
        rows = page.locator(".gmd-cells tbody tr")
        notebook.wait_until(lambda: "stage.take(50" in rows.first.inner_text(), "all are listed")
        passing, quiet, busy = (
            rows.nth(n).locator('[data-label="change"]').inner_text().split("\n") for n in range(3)
        )
        assert quiet[0] == "all 80 B"
        assert busy[:2] == ["cuda:3+100.00 MiB", "other 70 B"]
        assert passing[:2] == ["cuda:1+50.00 MiB", "other 70 B"]
        rise = rows.first.locator('[data-label="rise"]').inner_text().split("\n")
        assert rise[0] == "cuda:7+90.00 MiB"


#: The driver goes on saying what it said before all was freed.
_FREE_ALL = """
before = stage.hardware.read_devices()
own = stage.hardware.read_own_use("cuda:0")
stage.hardware.read_devices = lambda: before
stage.hardware.read_own_use = lambda device: own
stage.drop("")
stage.gpu.empty_cache()
"""
_PEAK_IS_HIDDEN = '() => document.querySelector(".gmd-canvas").data[2].visible === false'
_COUNT_WHEELS = """
() => {
    window.wheels = 0;
    document.addEventListener("wheel", () => window.wheels++, { once: true });
}
"""
_RANGE_MS = """
() => {
    const axis = document.querySelector(".gmd-canvas")._fullLayout.xaxis;
    return axis.r2l(axis.range[1]) - axis.r2l(axis.range[0]);
}
"""
