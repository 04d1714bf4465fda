"""A driver that takes too long to answer is not waited for."""

from __future__ import annotations

import threading

import pytest

from gpumemwidget.backends.driver import nvml
from gpumemwidget.backends.driver.nvml import TimeLimitedMonitor
from gpumemwidget.model.devices import DeviceUse
from gpumemwidget.testing import SimulatedDriver, SimulatedGpus

PATIENCE_S = 60.0


class _Driver(SimulatedDriver):
    """A driver that tells the use of a GPU when it may."""

    def __init__(self) -> None:
        super().__init__(SimulatedGpus(1))
        self.may_answer, self.n_asked = threading.Event(), 0

    def read_use(self, device: str) -> DeviceUse | None:
        self.n_asked += 1
        assert self.may_answer.wait(PATIENCE_S)
        return super().read_use(device)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> _Driver:
    monkeypatch.setattr(nvml, "_LIMIT_S", 0.1)
    return _Driver()


def test_nobody_waits_twice_for_a_driver_that_hangs(driver: _Driver) -> None:
    """It is asked again once it has answered."""
    monitor = TimeLimitedMonitor(driver)
    infos = monitor.list_infos()

    silent = [monitor.read_use("cuda:0") for _ in range(3)]
    known = monitor.list_infos()
    n_asked = driver.n_asked
    driver.may_answer.set()
    for thread in threading.enumerate():
        if thread.name == "gpumemwidget-driver":
            thread.join(PATIENCE_S)
    answered = monitor.read_use("cuda:0")

    unknown = DeviceUse("cuda:0", None, None, None, failure="the driver does not answer")
    assert silent == [unknown] * 3
    assert n_asked == 1
    assert known == infos
    assert answered == driver.read_use("cuda:0")


def test_a_driver_that_hangs_is_closed_without_waiting(driver: _Driver) -> None:
    """Nothing is known of its devices then."""
    monitor = TimeLimitedMonitor(driver)
    monitor.list_infos()
    monitor.read_use("cuda:0")

    monitor.close()

    assert monitor.list_infos() == ()
    driver.may_answer.set()


def test_a_failure_of_the_driver_is_the_askers() -> None:
    """As if it had been asked directly."""

    class Failing(SimulatedDriver):
        def read_use(self, device: str) -> DeviceUse | None:
            raise OSError(device)

    monitor = TimeLimitedMonitor(Failing(SimulatedGpus(1)))

    with pytest.raises(OSError, match="cuda:0"):
        monitor.read_use("cuda:0")
    monitor.close()
