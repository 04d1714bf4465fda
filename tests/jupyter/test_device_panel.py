"""The Device tab's kernel side, in a real shell on simulated GPUs; the test plays the page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from gpumemwidget.errors import BackendError
from gpumemwidget.model.cells import Span
from gpumemwidget.model.devices import ChildProcess, Sample
from gpumemwidget.recording.monitor import Monitor
from gpumemwidget.widgets.panels import DeviceUseHistory, describe_children
from tests.browser.stage import MIB, Stage
from tests.clock import ManualClock
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
    """The device that is shown has its report with the map, and no other has one."""
    page.see(device="cuda:0", look=True)

    assert [message["state"] for message in page.list("device")] == ["running", "done"]
    breakdowns = page.list("device")[-1]["breakdowns"]
    assert [each["device"] for each in breakdowns] == ["cuda:0", "cuda:1", "host"]
    assert "parameters" in breakdowns[0]["html"]
    assert "Map of segments" in breakdowns[0]["html"]
    assert [each["html"] for each in breakdowns[1:]] == [None, None]


def test_untouched_device_has_the_drivers_figures_and_stays_untouched(
    page: Page, stage: Stage
) -> None:
    """What stands there is the driver's, and looking does not use it."""
    stage.driver.set_process(2**30, 100 * MIB, 1)

    page.see(device="cuda:1", look=True)

    breakdown = page.list("device")[-1]["breakdowns"][1]
    assert breakdown["device"] == "cuda:1"
    assert "100.00 MiB" in breakdown["html"]
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
    assert told["children"][0]["resident"] >= 64 * MIB


# -- Use over time ---------------------------------------------------------------------------------


class _Use:
    """A history on simulated GPUs, of which one is in use; the test moves its clock."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.stage = Stage(2, n_used=1)
        self.is_seen = True
        self.sent: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.monitor = Monitor(
            self.stage.hardware,  # type: ignore[arg-type]
            clock=self.clock,
            on_failure=lambda what, _: self.failures.append(what),
        )
        self.history = DeviceUseHistory(
            self.monitor, self.sent.append, is_seen=lambda: self.is_seen
        )

    def tick(self, n_times: int, step_s: float) -> None:
        for _ in range(n_times):
            self.history.send()
            self.clock.advance(step_s)


@pytest.fixture
def use() -> Iterator[_Use]:
    use = _Use()
    yield use
    use.monitor.close()


def test_devices_are_told_with_the_drivers_total(use: _Use) -> None:
    """Used or not: what is in use by anybody, by this process, and how busy the device is."""
    use.stage.take(1024, "tensor", "x")

    use.tick(1, 1.0)

    first, second, host = use.sent[0]["devices"]
    assert (first["device"], first["total"], first["is_touched"]) == ("cuda:0", _TOTAL_BYTES, True)
    # The neighbour's, this process's context and tensor.
    assert first["used"] == (3000 + 512 + 1024) * MIB
    assert (first["own"], first["reserved"]) == ((512 + 1024) * MIB, 1024 * MIB)
    assert first["busy"] == 37
    assert (second["used"], second["own"], second["is_touched"]) == (0, None, False)
    assert second["reserved"] is None
    assert (host["device"], host["own"]) == ("host", None)


def test_drivers_are_asked_once_a_second_while_somebody_looks(use: _Use) -> None:
    """However often samples come; nobody looks: nobody asks."""
    use.tick(31, 0.1)
    assert len(use.sent) == 4

    use.is_seen = False
    use.tick(10, 1.0)
    assert len(use.sent) == 4


def test_page_that_joins_gets_a_bounded_past(use: _Use) -> None:
    """The newest moments."""
    use.tick(950, 1.0)

    joined = use.history.describe()

    assert len(joined["moments"]) == 900
    time_s, devices = joined["moments"][-1]
    assert time_s == use.clock.now()
    assert devices["cuda:0"] == [(3000 + 512) * MIB, 37, 512 * MIB]
    assert "host" not in devices


def test_a_gpu_of_another_library_is_one_of_this_process(
    use: _Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has there, its context too, is outside PyTorch, which has not touched the GPU."""
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    use.stage.driver.library.set_use(2000 * MIB, 1000 * MIB, 1)

    use.tick(1, 1.0)

    _, second, _ = use.sent[0]["devices"]
    assert (second["is_touched"], second["reserved"]) == (True, None)
    assert second["own"] == second["outside"] == (3000 + 512) * MIB


def test_a_running_cell_keeps_the_most_that_was_outside(use: _Use) -> None:
    """Of the samples that the tab takes meanwhile: what is given back within the cell has a peak.

    What PyTorch has reserved is no part of it.
    """
    use.tick(1, 1.0)
    library = use.stage.driver.library
    use.monitor.start_cell(execution_count=1, cell_id=None, source="x = 1")
    for held_bytes in (2000 * MIB, 700 * MIB, 0):
        library.set_use(held_bytes)
        use.stage.take(1024, "tensor", "x")
        use.tick(1, 1.0)

    record = use.monitor.end_cell(status="ok")

    assert record is not None
    outside = {device.device: device.outside for device in record.devices}
    assert outside == {"cuda:0": Span(512 * MIB, 512 * MIB, 2512 * MIB), "host": None}
    assert use.failures == []


def test_lost_device_is_told_and_leaves_no_moment(use: _Use) -> None:
    """What can't be read is not drawn as nothing."""
    use.stage.driver.lose(1)

    use.tick(1, 1.0)

    lost = use.sent[0]["devices"][1]
    assert (lost["used"], lost["busy"]) == (None, None)
    assert "GPU is lost" in lost["note"]
    assert list(use.history.describe()["moments"][-1][1]) == ["cuda:0"]
