"""What counts as growth with the steps of a loop, what looks like it, and how often it is read."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Iterable

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


MIB = 1 << 20


# -- Steady growth ---------------------------------------------------------------------------------


def follow(levels: Iterable[float]) -> Levels:
    followed = Levels()
    for number, level in enumerate(levels, 1):
        followed.add(number, round(level))
    return followed


def test_growth_is_told_from_where_it_began() -> None:
    """Warm-up before it is left out."""
    warm_up = [0, 40 * MIB, 90 * MIB, 91 * MIB, 91 * MIB]

    trend = follow([*warm_up, *((91 + 2 * k) * MIB for k in range(1, 26))]).find_trend()

    assert trend is not None
    assert trend.each_bytes == pytest.approx(2 * MIB, rel=0.1)
    assert 3 <= trend.since <= 9
    assert trend.n_steps == 30 - trend.since


def test_batches_of_different_sizes_do_not_hide_growth() -> None:
    """Their levels scatter around it."""
    rng = random.Random(0)
    trend = follow(k * MIB + rng.random() * 3 * MIB for k in range(40)).find_trend()

    assert trend is not None
    assert trend.each_bytes == pytest.approx(MIB, rel=0.2)


@pytest.mark.parametrize(
    "levels",
    [
        [5 * MIB] * 100,
        [random.Random(1).random() * 50 * MIB for _ in range(100)],
        [min(k, 12) * MIB for k in range(40)],
        [(k % 10) * MIB for k in range(100)],
        [k * 1000 for k in range(100)],
        [(1 - math.exp(-k / 8)) * 50 * MIB for k in range(100)],
        [k * MIB for k in range(9)],
        [-k * MIB for k in range(50)],
        [(k // 34) * 40 * MIB for k in range(100)],
    ],
    ids=["flat", "random", "stops", "saw", "tiny", "levels off", "short", "falls", "stairs"],
)
def test_what_is_no_steady_growth(levels: list[float]) -> None:
    """It is none."""
    assert follow(levels).find_trend() is None


@pytest.mark.parametrize("first", [1, 2])
def test_steps_may_be_left_out(first: int) -> None:
    """Growth that has ended is none, and growth that goes on is told."""
    ended, lasting = Levels(), Levels()
    for number in range(first, 1000, 2):
        ended.add(number, min(number, 80) * MIB)
        lasting.add(number, max(0, number - 300) * MIB)

    trend = lasting.find_trend()

    assert ended.find_trend() is None
    assert trend is not None
    assert trend.each_bytes == pytest.approx(MIB, rel=0.1)


def test_a_million_steps_take_no_more_room_than_a_hundred() -> None:
    """And are followed all the same."""
    levels = follow(k * 1024.0 for k in range(1_000_000))

    trend = levels.find_trend()

    assert trend is not None
    assert trend.each_bytes == 1024
    assert trend.n_steps > 900_000


def test_the_last_level_counts_if_growth_went_on() -> None:
    """At the same rate; a level that shows something else is left out."""
    followed = follow(k * MIB for k in range(20))

    followed.add_last(40, 39 * MIB)
    trend = followed.find_trend()
    followed.add_last(60, 45 * MIB)
    stopped = followed.find_trend()
    followed.add_last(60, 500 * MIB)
    jumped = followed.find_trend()

    assert trend is not None
    assert trend.since + trend.n_steps == 40
    assert trend == stopped == jumped


def test_without_growth_no_last_level_counts() -> None:
    """There is no rate that it could go on at."""
    followed = follow([MIB] * 20)

    followed.add_last(40, 90 * MIB)

    assert followed.find_trend() is None
