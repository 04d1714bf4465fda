"""Steady growth, and what looks like it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest

from gpumemwidget.leaks.levels import Levels

MIB = 1 << 20


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
