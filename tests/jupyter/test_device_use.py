"""Whole devices over time: asked once a second, only while somebody looks, in bounded memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpumemwidget.widgets.device_panel import DeviceUseHistory
from tests.browser.stage import MIB, Stage
from tests.clock import ManualClock

_TOTAL_BYTES = 80 * 1024 * MIB


class _Session:
    """A history on simulated GPUs, of which one is in use; the test moves its clock."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.stage = Stage(2, n_used=1)
        self.is_seen = True
        self.sent: list[dict[str, Any]] = []
        monitor: Any = SimpleNamespace(clock=self.clock, hardware=self.stage.hardware)
        self.history = DeviceUseHistory(monitor, self.sent.append, is_seen=lambda: self.is_seen)

    def tick(self, n_times: int, step_s: float) -> None:
        for _ in range(n_times):
            self.history.send()
            self.clock.advance(step_s)


@pytest.fixture
def session() -> _Session:
    return _Session()


def test_devices_are_told_with_the_drivers_total(session: _Session) -> None:
    """Used or not: what is in use by anybody, by this process, and how busy the device is."""
    session.stage.take(1024, "tensor", "x")

    session.tick(1, 1.0)

    first, second, host = session.sent[0]["devices"]
    assert (first["device"], first["total"], first["is_touched"]) == ("cuda:0", _TOTAL_BYTES, True)
    # The neighbour's, this process's context and tensor, and what no process is listed for.
    assert first["used"] == (3000 + 543 + 1024 + 9) * MIB
    assert (first["own"], first["reserved"]) == ((543 + 1024) * MIB, 1024 * MIB)
    assert first["busy"] == 37
    assert (second["used"], second["own"], second["is_touched"]) == (0, None, False)
    assert second["reserved"] is None
    assert (host["device"], host["own"]) == ("host", None)


def test_drivers_are_asked_once_a_second_while_somebody_looks(session: _Session) -> None:
    """However often samples come; nobody looks: nobody asks."""
    session.tick(31, 0.1)
    assert len(session.sent) == 4

    session.is_seen = False
    session.tick(10, 1.0)
    assert len(session.sent) == 4


def test_page_that_joins_gets_a_bounded_past(session: _Session) -> None:
    """The newest moments."""
    session.tick(950, 1.0)

    joined = session.history.describe()

    assert len(joined["moments"]) == 900
    time_s, devices = joined["moments"][-1]
    assert time_s == session.clock.now()
    assert devices["cuda:0"] == [(3000 + 543 + 9) * MIB, 37]
    assert "host" not in devices


def test_lost_device_is_told_and_leaves_no_moment(session: _Session) -> None:
    """What can't be read is not drawn as nothing."""
    session.stage.lost.add("cuda:1")

    session.tick(1, 1.0)

    lost = session.sent[0]["devices"][1]
    assert (lost["used"], lost["busy"]) == (None, None)
    assert "fell off the bus" in lost["note"]
    assert list(session.history.describe()["moments"][-1][1]) == ["cuda:0"]
