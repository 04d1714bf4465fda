"""The Device tab's kernel side, in a real shell on simulated GPUs; the test plays the page."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell

from gpumemwidget.errors import BackendError
from gpumemwidget.model.devices import ChildProcess, Sample
from gpumemwidget.widgets.device_panel import describe_children
from tests.browser.stage import MIB, Stage
from tests.jupyter.page import Page

_TOTAL_BYTES = 80 * 1024 * MIB
_NO_SAMPLES: tuple[Sample, ...] = ()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Two GPUs, of which one is in use."""
    stage = Stage(2, n_used=1)
    stage.set(monkeypatch.setattr)
    stage.train(0)
    return stage


@pytest.fixture
def page(shell: InteractiveShell, stage: Stage) -> Iterator[Page]:
    shell.run_line_magic("load_ext", "gpumemwidget")
    shell.user_ns["stage"] = stage
    page = Page(shell)
    yield page
    page.see(visible=False)


def test_parts_are_computed_when_the_tab_is_opened(page: Page) -> None:
    """Of every device what is in use; of the one that is shown its report with the map."""
    page.see(device="cuda:0", look=True)

    assert [message["state"] for message in page.list("device")] == ["running", "done"]
    breakdowns = page.list("device")[-1]["breakdowns"]
    assert [each["device"] for each in breakdowns] == ["cuda:0", "cuda:1", "host"]
    assert breakdowns[0]["total"] == _TOTAL_BYTES
    assert "parameters" in breakdowns[0]["html"]
    assert "Map of segments" in breakdowns[0]["html"]
    assert [each["html"] for each in breakdowns[1:]] == [None, None]
    assert 0 < breakdowns[2]["used"] < breakdowns[2]["total"]


def test_untouched_device_has_the_drivers_figures_and_stays_untouched(
    page: Page, stage: Stage
) -> None:
    """What stands there is the driver's, and looking does not use it."""
    stage.processes["cuda:1", 2**31 - 7] = 100 * MIB

    page.see(device="cuda:1", look=True)

    breakdown = page.list("device")[-1]["breakdowns"][1]
    assert (breakdown["device"], breakdown["used"]) == ("cuda:1", 109 * MIB)
    assert stage.gpu.list_touched() == (0,)


def test_nothing_is_computed_while_the_tab_is_closed(page: Page) -> None:
    """Neither after a cell nor with time; nor for a view that can't be seen."""
    page.see()
    page.run("x = 1")
    page.monitor.sampled.call(_NO_SAMPLES)
    assert page.list("device") + page.list("live") == []

    page.see(visible=False, device="cuda:0")
    page.run("x = 2")
    page.monitor.sampled.call(_NO_SAMPLES)

    assert page.list("device") + page.list("live") == []


def test_parts_are_computed_anew_after_a_cell(page: Page) -> None:
    """While they are seen, what the cell allocated is among them."""
    page.see(device="cuda:0", look=True)
    assert "fresh_one" not in page.list("device")[-1]["breakdowns"][0]["html"]

    page.run("stage.take(1024, 'tensor', 'fresh_one')")

    assert "fresh_one" in page.list("device")[-1]["breakdowns"][0]["html"]


def test_wish_in_mid_cell_waits_for_its_end(page: Page) -> None:
    """It is answered that it is queued; several are one. The children come at once."""
    page.see(device="cuda:0")
    n_live: list[int] = []

    def ask() -> None:
        page.see(device="cuda:0", look=True)
        page.dashboard._device.look_soon()
        n_live.append(len(page.list("live")))

    page.shell.user_ns["ask"] = ask
    page.run("ask()")

    assert n_live[0] >= 2
    states = [message["state"] for message in page.list("device")]
    assert states == ["queued", "queued", "running", "done"]


def test_children_are_told_while_a_cell_runs(page: Page, stage: Stage) -> None:
    """With what they have of each device and of the host."""
    page.see(device="cuda:0", look=True)
    pids: list[int] = []

    def work() -> None:
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        stage.processes["cuda:0", child.pid] = 700 * MIB
        page.sent.clear()
        page.dashboard._device.send_children()
        pids.append(child.pid)
        child.communicate(b"\n")

    page.shell.user_ns["work"] = work
    page.run("work()")

    told = page.list("live")[0]["children"]
    (child,) = [each for each in told if each["pid"] == pids[0]]
    assert child["devices"] == [["cuda:0", 700 * MIB]]
    assert child["resident"] > 0


def test_failure_is_told_where_the_click_was(
    page: Page, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line; the next wish is answered again."""

    def fail(**_: object) -> None:
        raise BackendError("made to fail")

    monkeypatch.setattr(stage.hardware, "take_device_states", fail)
    page.see(device="cuda:0", look=True)
    failed = page.list("device")[-1]
    assert (failed["state"], failed["message"]) == ("failed", "made to fail")
    monkeypatch.undo()

    page.see(device="cuda:0", look=True)

    assert page.list("device")[-1]["state"] == "done"


# -- Messages --------------------------------------------------------------------------------------


def test_children_beyond_fifty_are_counted() -> None:
    """Those with the most memory are told."""
    children = [ChildProcess(n, 1, f"worker {n}", n * MIB) for n in range(1, 81)]

    told = describe_children(children)

    assert len(told["children"]) == 50
    assert told["n_more_children"] == 30
    assert told["are_all_counted"]
    assert told["children"][0]["resident"] >= 64 * MIB
