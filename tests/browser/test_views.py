"""What a person does with the dashboard's own controls, and what it shows of whole devices."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.lab import Lab, Notebook
from tests.browser.stage import write_load
from tests.ranks import write_ranks

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


@contextlib.contextmanager
def _open(lab: Lab, n_devices: int, n_used: int, *cells: str) -> Iterator[Notebook]:
    """A notebook on simulated GPUs with its dashboard, and cells that have run."""
    with lab.open_dashboard(write_load(n_devices, n_used), *cells) as notebook:
        for number in range(2, 2 + len(cells)):
            notebook.run(number, timeout_s=60)
        yield notebook


def _run_dashboard(notebook: Notebook) -> None:
    """Run a notebook's first three cells, of which the second shows the dashboard."""
    notebook.wait_for_kernel()
    for number in range(3):
        notebook.run(number, timeout_s=60)
    notebook.page.wait_for_selector(".gmd[data-drawn]")


def _wait_for_chip(notebook: Notebook, device: str, pattern: str) -> None:
    chip = notebook.page.locator(f'.gmd-chip[data-device="{device}"]')
    expect(chip).to_have_text(re.compile(pattern), timeout=60_000, use_inner_text=True)


def test_first_view_tells_how_full_each_device_is(lab: Lab) -> None:
    """One total everywhere, that of the driver; GPUs that are lost or not used have a card too.

    PyTorch's counters outrun the driver: what this process gave back is free at once, and nobody
    else's.
    """
    fill = "stage.train(0)\nstage.driver.lose(2)"
    with lab.open_dashboard(write_load(3, 1), fill, _FREE_ALL) as notebook:
        notebook.run(2)
        _wait_for_chip(notebook, "cuda:0", r"33\.4 GiB here · 36\.3 of 80 GiB in use")
        _wait_for_chip(notebook, "cuda:0", "37% busy")
        _wait_for_chip(notebook, "cuda:1", r"not used here · 0 of 80 GiB in use")
        _wait_for_chip(notebook, "cuda:2", "can't be read")
        _wait_for_chip(notebook, "host", r"MiB here · .* of .* GiB in use")
        page = notebook.page
        chip = page.locator('.gmd-chip[data-device="cuda:0"]')
        title = chip.get_attribute("title") or ""
        assert "cached: 6.43 GiB" in title
        assert "other processes: 2.93 GiB" in title
        # This process has used one GPU, so the plot is of that one.
        assert page.locator(".gmd-busy").get_by_role("img").get_attribute("aria-label") == (
            "How busy: cuda:0 37%"
        )

        page.locator("[data-tab=device]").click()
        page.locator(".gmd-report", has_text="80.00 GiB").wait_for()
        assert "total 80.00 GiB" in page.locator(".gmd-canvas").inner_text()

        notebook.run(3)
        # Somebody else's 2.93 GiB, and this process's context.
        _wait_for_chip(notebook, "cuda:0", r"512 MiB here · 3\.43 of 80 GiB in use")
        title = chip.get_attribute("title") or ""
        assert "other processes: 2.93 GiB" in title
        assert "free: 76.57 GiB" in title


@pytest.fixture(scope="module")
def worked(lab: Lab) -> Iterator[Notebook]:
    """A notebook in which four cells have taken memory, with its dashboard."""
    cells = [f"stage.take({n_mib}, 'tensor', 'x{n_mib}')" for n_mib in (30, 10, 50, 20)]
    with _open(lab, 1, 1, *cells, "time.sleep(2)\n%memstat") as notebook:
        yield notebook


def test_choices_are_remembered_by_the_next_page(worked: Notebook, lab: Lab) -> None:
    """Window, tab and hidden lines; own cells are hidden until they are asked for."""
    page = worked.page
    page.locator("[data-tab=cells]").click()
    cells = page.locator(".gmd-cells tbody")
    expect(cells).to_contain_text("take(20,", timeout=60_000)
    assert "%memdash" not in cells.inner_text()
    page.locator(".gmd-hidden-cells", has_text="1 gpumemwidget cell hidden.").wait_for()
    page.locator(".gmd-own").click()
    expect(cells).to_contain_text("%memdash", timeout=60_000)
    page.locator(".gmd-own").click()
    expect(cells).not_to_contain_text("%memdash", timeout=60_000)

    page.locator('[data-window="30 s"]').click()
    page.locator(".gmd-key-peak").click()
    assert page.locator(".gmd-key-peak").get_attribute("aria-pressed") == "false"
    page.wait_for_function(_PEAK_IS_HIDDEN)
    page.locator("[data-tab=device]").click()
    worked.save()
    worked.wait_until(
        lambda: "widget-view+json" in (lab.folder / worked.name).read_text("utf-8"),
        "the file has the dashboard",
    )
    worked.load()
    page.locator(".gmd[data-drawn]").wait_for(timeout=60_000)

    chosen = '[aria-pressed="true"]'
    page.locator(f'[data-window="30 s"]{chosen}').wait_for()
    page.locator('[data-tab=device][aria-selected="true"]').wait_for()
    page.locator('.gmd-key-peak[aria-pressed="false"]').wait_for()
    page.wait_for_function(_PEAK_IS_HIDDEN)


def test_plot_is_zoomed_read_and_saved(worked: Notebook) -> None:
    """A drag zooms; each value has its own unit; the samples are saved as a table."""
    page = worked.page
    box = page.locator(".gmd-canvas").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.97, box["y"] + box["height"] / 2)
    texts = page.locator(".gmd-canvas .hoverlayer .legendtext")
    texts.filter(has_text="allocated: 110.00 MiB").first.wait_for()
    before = page.evaluate(_RANGE_MS)
    assert page.locator(".gmd-reset").is_hidden()
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] / 2, steps=5)
    page.mouse.up()
    page.locator(".gmd-reset").wait_for()
    worked.wait_until(lambda: page.evaluate(_RANGE_MS) < 0.8 * before, "it is zoomed")
    page.locator(".gmd-reset").click()

    with page.expect_download() as saved:
        page.locator(".gmd-save").click()
    lines = Path(saved.value.path()).read_text().splitlines()
    assert lines[0] == (
        "time_s,time,device,allocated_bytes,reserved_bytes,allocated_peak_bytes,reserved_peak_bytes"
    )
    time_s, time, device, allocated_bytes = lines[-1].split(",")[:4]
    assert datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp() == float(time_s)
    assert (device, allocated_bytes) == ("cuda:0", str(110 * 1024**2))
    stem = worked.name.removesuffix(".ipynb")
    name = rf"{stem}-gpu-memory-\d{{4}}-\d\d-\d\d-\d{{6}}\.csv"
    assert re.fullmatch(name, saved.value.suggested_filename)


def test_cells_that_kept_most_are_named_and_heads_sort(worked: Notebook) -> None:
    """The first line answers which cell took most; a click on a head sorts, a second one turns."""
    page = worked.page
    page.locator("[data-tab=cells]").click()
    most = page.locator(".gmd-most")
    codes = page.locator(".gmd-cells tbody tr code", has_text="take")
    expect(most).to_have_text(
        "Kept most: In [5] +50.00 MiB · In [3] +30.00 MiB · In [6] +20.00 MiB",
        use_inner_text=True,
        timeout=60_000,
    )

    assert "take(20," in codes.first.inner_text(), "the newest is first"
    head = page.locator('.gmd-cells [data-sort="change"]')
    head.locator("button").click()
    expect(head).to_have_attribute("aria-sort", "descending", timeout=20_000)
    taken = [int(code.split("(")[1].split(",")[0]) for code in codes.all_inner_texts()]
    assert taken == [50, 30, 20, 10]
    head.locator("button").press("Enter")
    expect(head).to_have_attribute("aria-sort", "ascending", timeout=20_000)
    assert "take(50," in codes.last.inner_text()
    most.locator("button").first.click()
    page.locator(".gmd-reset").click()


def test_choices_are_those_of_their_notebook(lab: Lab) -> None:
    """Another notebook in the same browser begins with the defaults; sort and filter come back."""
    with lab.open(_HOST_CELLS) as notebook:
        page = notebook.page
        shutil.copy(lab.folder / notebook.name, lab.folder / "other.ipynb")
        names = page.locator(".gmd-variables .gmd-name")
        _run_dashboard(notebook)
        page.locator("[data-tab=variables]").click()
        page.locator("[data-sort=name] button").click()
        page.locator(".gmd-search").fill("batch")
        notebook.wait_until(lambda: names.all_inner_texts() == ["batch_1", "batch_2"], "filtered")
        notebook.save()

        first, notebook.name = notebook.name, "other.ipynb"
        notebook.close_all()
        notebook.open_here()
        _run_dashboard(notebook)
        page.locator('[data-tab=cells][aria-selected="true"]').wait_for()
        page.locator("[data-tab=variables]").click()
        notebook.wait_until(
            lambda: names.all_inner_texts() == ["batch_2", "weights", "batch_1"], "by its size"
        )
        assert page.locator(".gmd-search").input_value() == ""

        notebook.name = first
        notebook.load()
        page.locator(".gmd[data-drawn]").wait_for()
        page.locator('[data-tab=variables][aria-selected="true"]').wait_for()
        notebook.wait_until(lambda: names.all_inner_texts() == ["batch_1", "batch_2"], "as before")
        assert page.locator(".gmd-search").input_value() == "batch"
        assert page.locator("[data-sort=name]").get_attribute("aria-sort") == "ascending"


def test_panel_is_as_narrow_as_a_side_panel(lab: Lab, tmp_path: Path) -> None:
    """Nothing reaches beyond the dashboard or covers something else, and tools stand in one row."""
    write_ranks(tmp_path)
    fill = "stage.train(0)\nstage.train(1, scale=0.5)\nbatch = torch.zeros(1000)"
    watch = f"import gpumemwidget\nwatched = gpumemwidget.watch({str(tmp_path)!r})"
    with lab.open_dashboard(write_load(2, 2), f"import torch\n{fill}", watch) as notebook:
        page = notebook.page
        notebook.run(2, timeout_s=60)
        notebook.run(3)
        for width in (268, 320, 420, 720):
            page.locator(".gmd").evaluate(
                "(element, n) => { element.style.width = `${n}px` }", width
            )
            for tab, filled in _FILLED.items():
                page.locator(f"[data-tab={tab}]").click()
                page.locator(filled).first.wait_for()
                notebook.wait_until(
                    lambda width=width: page.evaluate(_PLOT_WIDTH) < width, "the plot is as narrow"
                )

                assert page.evaluate(_LIST_CUT_OFF) == [], (width, tab)
                assert page.evaluate(_COVERED) == [], (width, tab)
            tools = [page.locator(name).bounding_box() for name in (".gmd-pause", ".gmd-save")]
            assert len({box and box["y"] for box in tools}) == 1, width


def test_many_gpus_are_summed_up(lab: Lab) -> None:
    """Devices that a cell left alone are left out; of many others the one that weighs most."""
    some = "for n in range(5): stage.take(10 * (n + 1), 'tensor', f'x{n}', n)"
    every = "for n in range(8): stage.take(20, 'tensor', f'y{n}', n)"
    with _open(lab, 8, 8, some, "x = 1", every) as notebook:
        page = notebook.page
        rows = page.locator(".gmd-cells tbody tr")
        notebook.wait_until(lambda: "take(20" in rows.first.inner_text(), "all are listed")
        alike, quiet, several = (
            rows.nth(n).locator('[data-label="change"]').inner_text().split("\n") for n in range(3)
        )
        assert "cuda" not in " ".join(quiet)
        assert several[:2] == ["cuda:4+50.00 MiB", "4 more"]
        assert alike[0] == "all 8+20.00 MiB"


#: The driver goes on saying what it said before all was freed.
_FREE_ALL = """
before = stage.hardware.read_devices()
own = stage.hardware.read_own_uses()
stage.hardware.read_devices = lambda: before
stage.hardware.read_own_uses = lambda: own
stage.drop("")
stage.gpu.empty_cache()
"""
_PEAK_IS_HIDDEN = '() => document.querySelector(".gmd-canvas").data[2].visible === false'
_HOST_CELLS = (
    "%load_ext gpumemwidget\nimport torch",
    "%memdash",
    "batch_1 = torch.zeros(100)\nweights = torch.zeros(200)\nbatch_2 = torch.zeros(300)",
)
#: What each tab has once it is filled.
_FILLED = {
    "cells": ".gmd-cells [data-label=change]",
    "variables": ".gmd-variables [value=batch]",
    "device": ".gmd-report table",
    "processes": ".gmd-process",
}
_PLOT_WIDTH = 'document.querySelector(".gmd-canvas").layout.width'
#: Figures that stand on one another.
_COVERED = """
() => {
    const figures = [...document.querySelectorAll(".gmd-table td.gmd-number span")]
        .filter((each) => each.checkVisibility() && !each.children.length && each.textContent);
    const boxes = figures.map((each) => [each, each.getBoundingClientRect()]);
    return boxes.flatMap(([one, a], i) => boxes.slice(i + 1)
        .filter(([, b]) => a.left < b.right - 1 && b.left < a.right - 1
            && a.top < b.bottom - 1 && b.top < a.bottom - 1)
        .map(([other]) => `${one.textContent} / ${other.textContent}`));
}
"""
#: Elements that reach beyond the dashboard or the list that they are in. A report's tables may be
#: wider, and scroll.
_LIST_CUT_OFF = """
() => [...document.querySelectorAll(".gmd *")].filter((element) => {
    const isOther = element.closest(".gmd-report, .gmd-canvas, .gmd-hidden");
    if (isOther || !element.checkVisibility()) return false;
    const frame = element.closest(".gmd-scroll") ?? document.querySelector(".gmd");
    const [own, around] = [element.getBoundingClientRect(), frame.getBoundingClientRect()];
    return own.width > 0 && (own.right > around.right + 1 || own.left < around.left - 1);
}).map((element) => element.outerHTML.slice(0, 200))
"""
_RANGE_MS = """
() => {
    const axis = document.querySelector(".gmd-canvas")._fullLayout.xaxis;
    return axis.r2l(axis.range[1]) - axis.r2l(axis.range[0]);
}
"""
