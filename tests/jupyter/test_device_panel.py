"""The Device tab's kernel side, in a real shell on simulated GPUs; the test plays the page."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from gpumemwidget.errors import BackendError
from gpumemwidget.model.breakdowns import (
    Breakdown,
    BreakdownPart,
    MapBlock,
    MapSegment,
    PartKey,
    SegmentMap,
)
from gpumemwidget.model.devices import MOST_CHILDREN, ChildProcess, PinnedUse, ProcessUse, Sample
from gpumemwidget.recording.monitor import Monitor
from gpumemwidget.report.wording.parts import list_pinned
from gpumemwidget.session.session import current_session
from gpumemwidget.widgets.dashboard import Dashboard, open_dashboard
from gpumemwidget.widgets.device_panel import (
    DevicePanel,
    describe_breakdown,
    describe_children,
    describe_map,
)
from tests.browser.stage import MIB, Stage
from tests.clock import ManualClock

_TOTAL_BYTES = 80 * 1024 * MIB
_NO_SAMPLES: tuple[Sample, ...] = ()


class _Page:
    """A page with one view, that keeps what it is sent."""

    def __init__(self, shell: InteractiveShell, stage: Stage) -> None:
        self.shell = shell
        self.stage = stage
        self.dashboard: Dashboard = open_dashboard(current_session())
        self.monitor: Monitor = current_session().monitor
        self.sent: list[dict[str, Any]] = []
        self.dashboard.send = self._keep

    def see(self, device: str | None, *, look: bool = True, visible: bool = True) -> None:
        content = {"kind": "view", "view": "a", "visible": visible, "variables": False}
        self.say(**content, device=device, look=look, snapshot=False)

    def say(self, **content: object) -> None:
        self.sent.clear()
        self.dashboard._handle_custom_msg(content, [])

    def run(self, source: str) -> None:
        self.shell.run_cell(source, store_history=True).raise_error()

    def list(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.sent if message["kind"] == kind]

    def _keep(self, content: dict[str, Any], buffers: object = None) -> None:  # noqa: ARG002
        json.dumps(content)
        self.sent.append(content)


@pytest.fixture
def page(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Page]:
    """Two GPUs, of which one is in use."""
    stage = Stage(2, n_used=1)
    stage.set(monkeypatch.setattr)
    stage.train(0)
    shell.run_line_magic("load_ext", "gpumemwidget")
    shell.user_ns["stage"] = stage
    page = _Page(shell, stage)
    yield page
    page.see(None, visible=False)


def test_parts_are_computed_when_the_tab_is_opened(page: _Page) -> None:
    """Of every device, each adding up to its total, with the map of the one that is shown."""
    page.see("cuda:0")

    assert [message["state"] for message in page.list("device")] == ["running", "done"]
    done = page.list("device")[-1]
    breakdowns = {breakdown["device"]: breakdown for breakdown in done["breakdowns"]}
    assert list(breakdowns) == ["cuda:0", "cuda:1", "host"]
    for breakdown in breakdowns.values():
        assert sum(part["bytes"] for part in breakdown["parts"]) == breakdown["total"]
        assert all(part["tell"] for part in breakdown["parts"])
    assert breakdowns["cuda:0"]["total"] == _TOTAL_BYTES
    assert list(done["maps"]) == ["cuda:0"]
    segments = done["maps"]["cuda:0"]["segments"]
    assert sum(segment["bytes"] for segment in segments) == breakdowns["cuda:0"]["reserved"]
    for segment in segments:
        assert sum(block[0] for block in segment["blocks"]) == segment["bytes"]


def test_untouched_device_has_the_drivers_figures_and_stays_untouched(page: _Page) -> None:
    """What stands there is the driver's, and looking does not use it."""
    page.stage.processes["cuda:1", 2**31 - 7] = 100 * MIB

    page.see("cuda:1")

    breakdown = page.list("device")[-1]["breakdowns"][1]
    assert (breakdown["device"], breakdown["used"]) == ("cuda:1", 109 * MIB)
    assert page.stage.gpu.list_touched() == (0,)


def test_nothing_is_computed_while_the_tab_is_closed(page: _Page) -> None:
    """Neither after a cell nor with time; nor for a view that can't be seen."""
    page.see(None, look=False)
    page.run("x = 1")
    page.monitor.sampled.call(_NO_SAMPLES)
    assert page.list("device") + page.list("live") == []

    page.see("cuda:0", look=False, visible=False)
    page.run("x = 2")
    page.monitor.sampled.call(_NO_SAMPLES)

    assert page.list("device") + page.list("live") == []


def test_parts_are_computed_anew_after_a_cell(page: _Page) -> None:
    """While they are seen, what the cell allocated is among them."""
    page.see("cuda:0")
    before = page.list("device")[-1]["breakdowns"][0]["allocated"]

    page.run("stage.take(1024, 'tensor', 'batch')")

    after = page.list("device")[-1]["breakdowns"][0]["allocated"]
    assert after - before == 1024 * MIB


def test_wish_in_mid_cell_waits_for_its_end(page: _Page) -> None:
    """It is answered that it is queued; several are one. The children come at once."""
    page.see("cuda:0", look=False)
    n_live: list[int] = []

    def ask() -> None:
        page.see("cuda:0")
        page.dashboard._device.look_soon()
        n_live.append(len(page.list("live")))

    page.shell.user_ns["ask"] = ask
    page.run("ask()")

    assert n_live[0] >= 2
    states = [message["state"] for message in page.list("device")]
    assert states == ["queued", "queued", "running", "done"]


def test_wish_of_a_tab_that_was_closed_meanwhile_is_dropped(page: _Page) -> None:
    """Nobody would see the answer; who opens the tab again asks anew."""
    page.see("cuda:0", look=False)

    def ask() -> None:
        page.see("cuda:0")
        page.see(None, look=False)

    page.shell.user_ns["ask"] = ask
    page.run("ask()")
    assert page.list("device") == []
    page.see("cuda:0")

    assert [message["state"] for message in page.list("device")] == ["running", "done"]


def test_children_are_told_while_a_cell_runs(page: _Page) -> None:
    """With what they have of each device and of the host."""
    page.see("cuda:0")
    pids: list[int] = []

    def work() -> None:
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        page.stage.processes["cuda:0", child.pid] = 700 * MIB
        page.sent.clear()
        page.dashboard._device.send_children(anyway=True)
        pids.append(child.pid)
        child.communicate(b"\n")

    page.shell.user_ns["work"] = work
    page.run("work()")

    told = page.list("live")[0]["children"]
    (child,) = [each for each in told if each["pid"] == pids[0]]
    assert child["devices"] == [["cuda:0", 700 * MIB]]
    assert child["resident"] > 0


def test_failure_is_told_where_the_click_was(page: _Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line; the next wish is answered again."""

    def fail(**_: object) -> None:
        raise BackendError("made to fail")

    monkeypatch.setattr(page.stage.hardware, "take_device_states", fail)
    page.see("cuda:0")
    failed = page.list("device")[-1]
    assert (failed["state"], failed["message"]) == ("failed", "made to fail")
    monkeypatch.undo()

    page.see("cuda:0")

    assert page.list("device")[-1]["state"] == "done"


def test_children_are_asked_for_once_a_second() -> None:
    """However often samples come, and only while somebody looks."""
    clock = ManualClock()
    seen = {"cuda:0"}
    sent: list[dict[str, Any]] = []
    # The children differ each time, else nothing is sent.
    children = ((ChildProcess(pid, 1, "worker", pid * MIB, ()),) for pid in itertools.count(10))
    hardware = SimpleNamespace(list_children=lambda: next(children))
    monitor: Any = SimpleNamespace(clock=clock, hardware=hardware, running=None)
    session: Any = SimpleNamespace(monitor=monitor)
    panel = DevicePanel(session, sent.append, guard=lambda action: action(), seen=lambda: seen)

    for _ in range(31):
        panel.send_children()
        clock.advance(0.1)
    seen.clear()
    clock.advance(10)
    panel.send_children()

    assert len(sent) == 4


# -- Messages --------------------------------------------------------------------------------------


def _make_map(n_segments: int, n_blocks: int) -> SegmentMap:
    """Segments of 2 MiB whose blocks are in use and free in turn."""
    size = 2 * MIB // n_blocks
    blocks = tuple(
        MapBlock(n * size, size, size, "inactive" if n % 2 else "active_allocated", None, f"x[{n}]")
        for n in range(n_blocks)
    )
    segment = MapSegment(0, 2 * MIB, False, False, True, blocks)
    reserved = n_segments * 2 * MIB
    return SegmentMap("cuda:0", reserved, reserved // 2, 0, size, (segment,) * n_segments)


@pytest.mark.parametrize(("n_segments", "n_blocks"), [(1, 4096), (400, 16), (3, 2)])
def test_map_stays_small_and_adds_up(n_segments: int, n_blocks: int) -> None:
    """However fine it is: what is too narrow goes together, what is too much is counted."""
    told = describe_map(_make_map(n_segments, n_blocks))

    drawn = [block for segment in told["segments"] for block in segment["blocks"]]
    assert sum(block[0] for block in drawn) + told["more"] == n_segments * 2 * MIB
    assert len(told["segments"]) + told["n_more"] == n_segments
    assert len(drawn) <= 5000
    assert len(json.dumps(told)) < 400_000
    counted = sum(block[5] for block in drawn)
    assert counted == len(told["segments"]) * n_blocks


def test_processes_beyond_a_dozen_are_one_line() -> None:
    """With what they have together."""
    others = tuple(
        BreakdownPart("process", (n + 1) * MIB, process=ProcessUse(n, None, "other", (n + 1) * MIB))
        for n in range(40)
    )
    taken = sum(part.n_bytes for part in others)
    breakdown = Breakdown(
        device="cuda:0",
        name="Simulated GPU",
        total_bytes=_TOTAL_BYTES,
        parts=(
            BreakdownPart("others", taken, parts=others),
            BreakdownPart("free", _TOTAL_BYTES - taken),
        ),
        allocated_bytes=None,
        reserved_bytes=None,
        used_bytes=taken,
    )

    told = describe_breakdown(breakdown)

    part = told["parts"][0]
    assert part["look"] == "others"
    assert len(part["parts"]) == 12
    assert part["n_more"] == 28
    assert sum(each["bytes"] for each in part["parts"]) + part["more"] == part["bytes"]


def test_pinned_memory_is_told_as_the_report_tells_it() -> None:
    """In its own rows, with the report's words; none where there is no pinned memory."""
    breakdown = Breakdown(
        device="host",
        name="host memory",
        total_bytes=_TOTAL_BYTES,
        parts=(BreakdownPart("free", _TOTAL_BYTES),),
        allocated_bytes=None,
        reserved_bytes=None,
        used_bytes=None,
    )
    uncounted = dataclasses.replace(breakdown, pinned=PinnedUse(None, 3 * MIB))
    counted = dataclasses.replace(breakdown, pinned=PinnedUse(MIB, 3 * MIB, 2 * MIB))

    assert describe_breakdown(breakdown)["pinned"] == []
    for told in (uncounted, counted):
        assert told.pinned is not None
        rows = [
            (row["label"], row["bytes"], row["tell"]) for row in describe_breakdown(told)["pinned"]
        ]
        assert rows == list_pinned(told.pinned)
    sizes = [row["bytes"] for row in describe_breakdown(counted)["pinned"]]
    assert sizes == [MIB, 2 * MIB]


def test_names_of_blocks_are_cut() -> None:
    """A key may be a book; and a block without a name is called as it is in the table of parts."""
    block = MapBlock(0, MIB, MIB, "active_allocated", "tensor", "x" * 100_000)
    other = MapBlock(MIB, MIB, MIB, "active_allocated", "unknown", "")
    segment = MapSegment(0, 2 * MIB, False, False, True, (block, other))

    told = describe_map(SegmentMap("cuda:0", 2 * MIB, 2 * MIB, 0, 0, (segment,)))

    assert max(map(len, told["words"])) == 200
    looks = [("tensor", "other tensors", MIB), ("unnamed", "no variable", MIB)]
    assert [tuple(each) for each in told["looks"]] == looks


def test_children_beyond_fifty_are_counted() -> None:
    """Those with the most memory are told."""
    children = [ChildProcess(n, 1, f"worker {n}", n * MIB) for n in range(1, 81)]

    told = describe_children(children)

    assert len(told["children"]) == 50
    assert told["n_more_children"] == 30
    assert told["are_all_counted"]
    assert told["children"][0]["resident"] >= 64 * MIB


def test_children_beyond_those_that_are_read_are_at_least_so_many() -> None:
    """Hardware tells no more than it can name within its time."""
    told = describe_children([ChildProcess(n, 1, "worker", n * MIB) for n in range(MOST_CHILDREN)])

    assert told["n_more_children"] == MOST_CHILDREN - 50
    assert not told["are_all_counted"]


@pytest.mark.parametrize("merged", [(), ("children", "others")])
def test_children_that_may_be_among_others_are_told_to_be_so(merged: tuple[PartKey, ...]) -> None:
    """Then that one stands on no device is no news of it."""
    breakdown = Breakdown(
        device="cuda:0",
        name="Simulated GPU",
        total_bytes=_TOTAL_BYTES,
        parts=(BreakdownPart("rest", _TOTAL_BYTES, merged=merged),),
        allocated_bytes=None,
        reserved_bytes=None,
        used_bytes=None,
    )

    assert describe_breakdown(breakdown)["hides_children"] == bool(merged)


def test_hostile_names_are_told_as_text() -> None:
    """The page sets them as text; here they only have to arrive whole."""
    name = "<img src=x onerror=alert(1)>"

    told = describe_children([ChildProcess(7, 1, name, None)])

    assert told["children"][0]["name"] == name
    assert told["children"][0]["resident"] is None
