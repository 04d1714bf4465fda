"""What readings add up to: for any readings the sums are those of the counter, to the byte."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from gpumemwidget.measure.linesums import LineSums, Moment

_START_BYTES = 1000
#: A line, whether others may have run too, and what stood then.
_Readings = Sequence[tuple[int, bool, int]]
_readings = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.booleans(),
        st.one_of(st.integers(0, 3000), st.sampled_from([0, 1500])),
    ),
    max_size=60,
)


def _take(readings: _Readings, *, n_at_once: int = 7) -> LineSums:
    sums = LineSums(0, _START_BYTES)
    for begin in range(0, len(readings), n_at_once):
        part = readings[begin : begin + n_at_once]
        sums.take(
            array("q", [10 + begin + place for place in range(len(part))]),
            array("l", [-1 - line if is_gap else line for line, is_gap, _ in part]),
            array("q", [value for _, _, value in part]),
            len(part),
        )
    return sums


def _check(sums: LineSums, readings: _Readings) -> None:
    last = readings[-1][2] if readings else _START_BYTES
    lines = sums.lines.values()
    assert sum(each.added_bytes - each.returned_bytes for each in lines) == last - _START_BYTES
    assert sums.before_bytes + sum(each.held_bytes for each in lines) == last
    assert sums.now_bytes == last
    assert 0 <= sums.before_bytes <= _START_BYTES
    assert all(0 <= each.held_bytes <= each.highest_bytes for each in lines)
    moments = sums.list_moments()
    assert [each.time_ns for each in moments] == sorted({each.time_ns for each in moments})
    assert moments[-1].in_use_bytes == last
    for moment in moments:
        assert 0 <= moment.in_use_bytes - sum(moment.held_bytes.values()) <= _START_BYTES
    seen = [_START_BYTES, *(value for _, _, value in readings)]
    assert sums.peak.in_use_bytes == max(seen)
    assert {max(seen), min(seen)} <= {each.in_use_bytes for each in moments}


@given(_readings)
@settings(max_examples=300, deadline=None)
def test_sums_are_the_counters(readings: _Readings) -> None:
    """Whatever rose and fell, in a gap or not: nothing is lost and nothing is held twice."""
    sums = _take(readings)

    _check(sums, readings)


@given(_readings, st.lists(st.integers(0, 5), min_size=6, max_size=6))
@settings(max_examples=100, deadline=None)
def test_sums_by_other_lines_are_the_same(readings: _Readings, names: list[int]) -> None:
    """Several may become one."""
    sums = _take(readings)

    renamed = sums.rename(dict(enumerate(names)))

    assert renamed.lines.keys() <= set(names)
    _check(renamed, readings)


def test_a_long_run_is_thinned_without_losing_an_extreme() -> None:
    """Each stretch keeps its lowest, its highest and its last moment."""
    readings = [(1, False, 5000 + n % 97) for n in range(50_000)]
    readings[31_111] = (1, False, 90_000)
    readings[40_001] = (1, False, 7)

    sums = _take(readings, n_at_once=1000)

    _check(sums, readings)
    assert len(sums.list_moments()) <= 3 * 512 + 2
    assert sums.peak.time_ns == 10 + 31_111


def test_a_gap_is_shared_out_as_its_lines_were_read() -> None:
    """In proportion to what each added when it was read last; the rest to the last of them."""
    sums = _take([(2, False, 1300), (3, False, 1400), (4, False, 1400), (4, True, 5400)])

    assert {line: each.added_bytes for line, each in sums.lines.items()} == {2: 3300, 3: 1100}
    assert sums.peak == Moment(13, 5400, {2: 3300, 3: 1100})


def test_a_gap_that_nothing_is_known_of_is_the_running_line_s() -> None:
    """There is nobody else to name."""
    sums = _take([(4, True, 5000)])

    assert {line: each.added_bytes for line, each in sums.lines.items()} == {4: 4000}
