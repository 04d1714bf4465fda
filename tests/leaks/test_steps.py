"""What counts as growth with the steps of a loop, and how often the memory is read."""

from __future__ import annotations

import weakref

import pytest
import torch

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.leaks.levels import Levels
from gpumemwidget.leaks.steps import Loop, LoopWatch
from gpumemwidget.leaks.survey import Group, Survey
from gpumemwidget.model.devices import HOST, Reading

_MIB = 1 << 20


def _survey(n_losses: int, state_mib: int, leaves: frozenset[int]) -> Survey:
    """Losses that wait with their graphs, two storages of a MiB each, and an optimizer's state."""
    losses = Group(
        "host", "waiting[…]", True, False, n_losses * 2 * _MIB, 2 * n_losses, _MIB, leaves=leaves
    )
    state = Group("host", "optimizer.state[…]", False, False, state_mib * _MIB, 8, _MIB)
    groups = {(each.device, each.holder): each for each in (losses, state)}
    return Survey(groups, is_complete=True)


@pytest.mark.parametrize(("n_first", "is_told"), [(10, False), (38, True)])
def test_growth_is_compared_with_what_was_held_since_it_began(n_first: int, is_told: bool) -> None:
    """Losses wait for the optimizer's next step: those before the last one are gone.

    An optimizer's state came with that step, and would count as growth since an earlier survey.
    """
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight])
    leaves = frozenset({id(weight)})
    levels = Levels()
    for step in range(1, 51):
        levels.add(step, 2 * _MIB * (step if step < 33 else step - 32))
    loop = Loop(
        optimizers={id(optimizer): weakref.ref(optimizer)},
        n_steps=50,
        levels={"host": levels},
        first=_survey(10 if n_first < 33 else n_first - 32, 0 if n_first < 33 else 12, leaves),
        n_first=n_first,
    )

    found = loop.compare(_survey(18, 12, leaves), lambda _: None)

    holders = [gain.group.holder for _, gains, _ in found for gain in gains]
    assert holders == ["waiting[…]"] * is_told


class _SlowHardware(Hardware):
    """Counters of no device, or of the host's; each reading takes a quarter of a millisecond."""

    def __init__(self, *, read_s: float = 0.00025) -> None:
        super().__init__(())
        self.now_s = self.spent_s = 0.0
        self.levels: list[int | None] | None = None
        self._read_s = read_s

    def read(self) -> tuple[Reading, ...]:
        self.now_s += self._read_s
        self.spent_s += self._read_s
        if self.levels is None:
            return super().read()
        return (Reading(HOST, self.levels[-1], None, None, None),)

    def read_exact(self) -> tuple[Reading, ...]:
        return self.read()


def _make_watch(hardware: _SlowHardware) -> LoopWatch:
    return LoopWatch(
        hardware,
        take_survey=lambda _: None,
        list_files=list,
        on_interrupt=lambda: None,
        clock=lambda: hardware.now_s,
        cpu_clock=lambda: hardware.now_s,
    )


@pytest.mark.parametrize(
    ("n_steps", "step_s", "least_s", "most_s"),
    [
        (1, 0.021, 0, 0),
        (40, 0.001, 0.0025, 0.00275),
        (600, 0.0013, 0.0025, 0.00275),
        (60, 0.018, 0.0025, 0.00275),
        (100_000, 0.001, 0.15, 0.2025),
    ],
)
def test_reading_takes_a_small_share_of_a_loop(
    n_steps: int, step_s: float, least_s: float, most_s: float
) -> None:
    """A fifth of a percent, or some milliseconds; a single step is not read."""
    hardware = _SlowHardware()
    watch = _make_watch(hardware)

    for _ in range(n_steps):
        hardware.now_s += step_s
        loop = watch.count("loop")
        if loop is not None:
            watch.read(loop)

    assert least_s <= hardware.spent_s <= most_s


def test_loop_that_grows_is_read_at_growing_distances_however_long_reading_takes() -> None:
    """Else a short loop's growth would be looked at once, and never compared."""
    hardware = _SlowHardware()
    hardware.levels = []
    watch = _make_watch(hardware)

    for step in range(60):
        hardware.now_s += 0.001
        hardware.levels.append(step * _MIB)
        loop = watch.count("loop")
        if loop is not None:
            watch.read(loop)

    trend = watch.loops["loop"].find_trends()[HOST]
    assert (trend.since, trend.n_steps) == (2, 47)


def test_readings_without_a_level_delay_nothing() -> None:
    """A slow allocator's count is left out at times: growth is seen by the thirtieth step still."""
    hardware = _SlowHardware(read_s=0.0)
    hardware.levels = []
    watch = _make_watch(hardware)

    for step in range(30):
        hardware.now_s += 0.0001
        hardware.levels.append(step * _MIB if step % 2 else None)
        loop = watch.count("loop")
        if loop is not None:
            watch.read(loop)

    assert watch.loops["loop"].find_trends()[HOST].each_bytes == _MIB
