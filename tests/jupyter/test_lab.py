"""The kernel's side of JupyterLab's panel; the test plays the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from comm import base_comm, get_comm_manager

from gpumemwidget.recording.sampler import Sampler
from gpumemwidget.session.session import current_session
from gpumemwidget.widgets import lab
from gpumemwidget.widgets.dashboard import Dashboard
from gpumemwidget.widgets.lab import LabLink
from tests.clock import ManualClock
from tests.jupyter.machine import GIB, Machine, has_run_meanwhile

Message = dict[str, Any]


class _Comm(base_comm.BaseComm):
    """A comm whose other end is the test."""

    def __init__(self, **options: Any) -> None:
        self.sent: list[Message] = []
        self.n_closed = 0
        super().__init__(**options)

    def publish_msg(self, msg_type: str, data: Any = None, **_: Any) -> None:
        if msg_type == "comm_close":
            self.n_closed += 1
        elif data:
            self.sent.append(data)


class _Page:
    """A page with the panel, which speaks to the session of a machine's shell."""

    def __init__(self, machine: Machine) -> None:
        machine.run("%load_ext gpumemwidget")
        self.machine = machine
        self.session = current_session()
        self.clock = self.session.monitor.clock = ManualClock()
        self.link = self.session.attach(LabLink)
        self.link.open(lambda: str(self.session.attach(Dashboard).model_id))
        [self.comm] = [each for each in get_comm_manager().comms.values() if type(each) is _Comm]

    def say(self, kind: str, **content: object) -> list[Message]:
        """Send a message; what came back."""
        self.comm.sent.clear()
        self.comm.handle_msg({"content": {"data": {"kind": kind, **content}}})
        return self.comm.sent.copy()

    def look(self, *, is_seen: bool = True, page: str = "a") -> list[Message]:
        return self.say("look", page=page, is_seen=is_seen)

    def tick(self, seconds: float = 1.0) -> None:
        """Let time pass, and the sampler take a sample."""
        self.clock.advance(seconds)
        self.session.monitor.sampled.call((self.session.monitor.read_now(),))

    def memory(self, messages: list[Message], device: str = "cuda:0") -> Message:
        """What the last message on the memory says of a device."""
        *_, last = [message for message in messages if message["kind"] == "memory"]
        [found] = [each for each in last["devices"] if each["device"] == device]
        return dict(found)


def _wait_until_stopped(sampler: Any, wake: Any) -> None:
    """Take no sample: the thread would do so by the machine's time, and the tests say when."""
    while sampler._wake is wake:
        wake.get()


@pytest.fixture
def page(make_machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch) -> _Page:
    monkeypatch.setattr(Sampler, "_run", _wait_until_stopped)
    monkeypatch.setattr(lab, "create_comm", _Comm)
    machine = make_machine(n_gpus=2)
    machine.allocator.touch(0)
    return _Page(machine)


def test_nothing_is_sent_before_a_page_speaks(page: _Page) -> None:
    """Pages without the panel never hear of it."""
    page.machine.run("kept = gpu.allocate(1 << 30)")

    assert page.comm.sent == []
    assert not page.session.monitor.is_sampling


def test_a_page_that_looks_is_told_the_memory(page: _Page) -> None:
    """At once, also of a GPU that is not in use, and no more after it has looked away."""
    page.machine.run("kept = gpu.allocate(1 << 30)")

    messages = page.look()
    told, unused = page.memory(messages), page.memory(messages, "cuda:1")
    is_sampling = page.session.monitor.is_sampling
    page.look(is_seen=False)

    assert told == {
        "device": "cuda:0",
        "name": "Simulated GPU",
        # With the CUDA context, as the driver shows it.
        "here_bytes": GIB + 80 * GIB // 160,
        "allocated_bytes": GIB,
        "reserved_bytes": GIB,
        "total_bytes": 80 * GIB,
        "limit_bytes": None,
        "budget_bytes": None,
        "is_over_budget": False,
        "is_at_limit": False,
    }
    assert (unused["allocated_bytes"], unused["reserved_bytes"]) == (0, 0)
    assert unused["total_bytes"] == 80 * GIB
    assert is_sampling
    assert not page.session.monitor.is_sampling


def test_only_what_has_changed_is_sent(page: _Page) -> None:
    """An idle notebook costs its page nothing, though the host's memory changes always a little."""
    page.machine.run("kept = gpu.allocate(1 << 30)")
    page.look()
    page.tick()
    page.comm.sent.clear()

    for _ in range(10):
        kept = bytearray(1 << 20)
        page.tick()
    del kept
    unchanged = page.comm.sent.copy()
    page.machine.run("more = gpu.allocate(1 << 30)")
    page.tick()
    page.machine.run("more = gpu.allocate(1 << 30)")
    page.tick(0.5)

    assert unchanged == []
    assert page.memory(page.comm.sent)["allocated_bytes"] == 2 * GIB


@pytest.mark.parametrize(
    ("cell", "is_over_budget", "is_at_limit"),
    [
        ("%membudget 512MiB", True, False),
        ("%membudget 2GiB", False, False),
        ("%memlimit 1GiB", False, True),
        ("%memlimit 2GiB", False, False),
    ],
)
def test_budgets_and_limits_are_told(
    page: _Page, cell: str, is_over_budget: bool, is_at_limit: bool
) -> None:
    """Also those that a cell has just set."""
    page.machine.run("kept = gpu.allocate(1 << 30)")
    page.look()

    page.machine.run(cell)
    told = page.memory(page.look(page="b"))

    assert (told["is_over_budget"], told["is_at_limit"]) == (is_over_budget, is_at_limit)


def test_each_run_of_side_is_told(page: _Page) -> None:
    """A page that comes later hears how often the panel was asked for."""
    assert page.look()[0] == {"kind": "side", "n_shown": 0}

    page.link.show()
    page.link.show()

    assert page.comm.sent[-1] == {"kind": "side", "n_shown": 2}
    assert page.look(page="later")[0] == {"kind": "side", "n_shown": 2}


def test_the_dashboard_is_made_when_it_is_asked_for(page: _Page) -> None:
    """And is the one that %memdash shows."""
    [message] = page.say("dashboard")

    model_id = page.session.attach(Dashboard).model_id
    assert message == {"kind": "dashboard", "model_id": model_id}


def test_a_dashboard_that_fails_is_said(page: _Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """The panel waits for no answer that never comes."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("made to fail")

    monkeypatch.setattr("gpumemwidget.widgets.dashboard.read_esm", fail)

    [message] = page.say("dashboard")

    failed = {"kind": "failed", "of": "dashboard", "message": "RuntimeError: made to fail"}
    assert message == failed


def test_the_gpus_are_told_by_their_uuids(page: _Page) -> None:
    """No process here is a Jupyter kernel."""
    [message] = page.say("kernels")

    assert message["kind"] == "kernels"
    assert [gpu["device"] for gpu in message["gpus"]] == ["cuda:0", "cuda:1"]
    assert len({gpu["uuid"] for gpu in message["gpus"]}) == 2
    assert all(gpu["kernels"] == {} for gpu in message["gpus"])


def test_nonsense_is_reported_once(page: _Page) -> None:
    """A page may send anything."""
    for nonsense in ({}, {"kind": "what"}, {"kind": "look"}, {"kind": []}):
        page.comm.handle_msg({"content": {"data": nonsense}})

    assert page.session.last_failure is not None
    assert page.look()[0]["kind"] == "side"


def test_a_page_that_falls_silent_after_a_cell_is_lost(page: _Page) -> None:
    """A page whose notebook was closed can't say a word; one that is there does after each cell."""
    page.look()

    page.tick(3600)
    while_idle = page.session.monitor.is_sampling
    page.machine.run("x = 1")
    page.tick(20)
    page.look()
    page.tick(20)
    after_a_word = page.session.monitor.is_sampling
    page.machine.run("x = 2")
    page.tick(30)

    assert (while_idle, after_a_word) == (True, True)
    assert not page.session.monitor.is_sampling


def test_the_end_of_a_cell_is_sent_however_little_it_changed(page: _Page) -> None:
    """The status bar shows what the cell's card shows."""
    before = page.memory(page.look(), "host")["here_bytes"]
    page.comm.sent.clear()

    page.machine.run("kept = bytearray(b'x') * (40 << 20)")
    page.tick()

    assert page.memory(page.comm.sent, "host")["here_bytes"] > before


def test_a_cell_runs_while_a_driver_is_asked(page: _Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may hang: no cell waits for what the panel is told of the devices."""
    page.look()
    page.machine.run("kept = gpu.allocate(1 << 30)")
    monitor = page.session.monitor

    def run_cell() -> None:
        monitor.start_cell(execution_count=9, cell_id=None, source="1")
        monitor.end_cell(status="ok")

    assert has_run_meanwhile(monkeypatch, page.session.hardware, page.tick, run_cell)
    assert page.memory(page.comm.sent)["allocated_bytes"] == GIB


def test_unloading_closes_the_line(page: _Page) -> None:
    """Pages that speak to it show what to do."""
    page.look()
    assert page.comm.comm_id in get_comm_manager().comms

    page.machine.run("%unload_ext gpumemwidget")

    assert page.comm.n_closed == 1
    assert page.comm.comm_id not in get_comm_manager().comms
    assert not page.session.monitor.is_sampling
