"""Playback: positions, spans that begin anywhere, turns, and scripts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.backends.recording import Action, Event, Recording
from gpumemwidget.backends.replay import Playback, ReplayBackend, ReplayMonitor
from gpumemwidget.backends.script import Step, demo_script, play_script
from gpumemwidget.errors import BadInputError
from gpumemwidget.records import DeviceInfo, DeviceUse, PeakIs, Reading

MIB = 1024 * 1024

#: An event in short: what it was, what stood, the recorded mark.
Short = tuple[Action, int, int]


def make_recording(*events: Short, peak_is: PeakIs = "exact") -> Recording:
    """One device, with its allocated and reserved bytes alike, an event a second."""
    return Recording(
        devices=(DeviceInfo("cuda:0", "GPU", None),),
        visible=(),
        events=tuple(
            Event(
                float(second),
                action,
                (Reading("cuda:0", current, current, mark, mark, peak_is, second, 0),),
            )
            for second, (action, current, mark) in enumerate(events)
        ),
    )


def play(recording: Recording) -> ReplayBackend:
    return ReplayBackend(Playback(recording))


def peak_over(backend: ReplayBackend, n_events: int) -> tuple[int | None, PeakIs | None]:
    """The peak of a span over the next events."""
    backend.start_span()
    backend.playback.advance(n_events)
    (reading,) = backend.end_span()
    assert reading.allocated_peak_bytes == reading.reserved_peak_bytes
    return reading.allocated_peak_bytes, reading.peak_is


# -- Positions --------------------------------------------------------------------------------


def test_it_stands_until_it_is_moved() -> None:
    """Without a clock the position is the caller's, and ends at the last event."""
    playback = Playback(make_recording(("read", 1, 1), ("read", 2, 2), ("read", 3, 3)))

    moves = [playback.advance(), playback.advance(5), playback.advance()]

    assert moves == [1, 1, 0]
    assert playback.position == 2
    assert playback.is_over


@pytest.mark.parametrize("n_events", [-1, -100])
def test_it_never_goes_back(n_events: int) -> None:
    """Counters of a process don't run backwards."""
    playback = Playback(make_recording(("read", 1, 1)))

    with pytest.raises(BadInputError, match="only forward"):
        playback.advance(n_events)


def test_it_follows_a_clock() -> None:
    """With a clock, the event that stands is the last one whose time has come."""
    now = [100.0]
    recording = make_recording(("read", 1, 1), ("read", 2, 2), ("read", 3, 3))
    playback = Playback(recording, clock=lambda: now[0])

    positions = []
    for time_s in (100.0, 100.99, 101.0, 101.5, 101.0, 102.0, 500.0):
        now[0] = time_s
        positions.append(playback.position)

    assert positions == [0, 0, 1, 1, 1, 2, 2]
    assert playback.is_over
    with pytest.raises(BadInputError, match="without a clock"):
        playback.advance()


def test_it_begins_again() -> None:
    """In a loop the first event follows the last after a mean interval, and totals go on."""
    now = [0.0]
    recording = make_recording(("read", 5, 5), ("read", 6, 6), ("read", 7, 7))
    backend = ReplayBackend(Playback(recording, clock=lambda: now[0], loop=True))

    seen = []
    for time_s in (0.0, 1.0, 2.0, 3.0, 4.0, 300.0, 302.0):
        now[0] = time_s
        (reading,) = backend.read()
        seen.append((reading.allocated_bytes, reading.num_alloc_retries))

    assert seen == [(5, 0), (6, 1), (7, 2), (5, 2), (6, 3), (5, 200), (7, 202)]
    assert not backend.playback.is_over


def test_nothing_happens_between_two_turns() -> None:
    """Where a turn follows another its first event's mark is old, and the next ones' are new."""
    recording = make_recording(("read", 5, 90), ("start_span", 6, 6), ("read", 7, 50))
    backend = ReplayBackend(Playback(recording, loop=True))
    backend.playback.advance(2)

    over_the_seam = peak_over(backend, 1)
    backend.playback.advance()
    in_the_next_turn = peak_over(backend, 1)

    assert over_the_seam == (7, "exact")
    assert in_the_next_turn == (50, "exact")


def test_marks_of_a_turn_begin_where_it_begins() -> None:
    """A mark that rises after the seam is exact, though the turn before had a higher one."""
    recording = make_recording(("read", 5, 30), ("read", 6, 40), ("read", 7, 90))
    rose = ReplayBackend(Playback(recording, loop=True))
    rose.playback.advance(2)
    recording = make_recording(("read", 5, 80), ("read", 6, 80), ("read", 7, 90))
    stood = ReplayBackend(Playback(recording, loop=True))
    stood.playback.advance(2)

    assert peak_over(rose, 2) == (40, "exact")
    assert peak_over(stood, 2) == (7, "at least")


def test_a_device_that_failed_at_first_is_read_later() -> None:
    """Where counters and marks appear only later, they are played from there on."""
    readings = [Reading("cuda:0", None, None), Reading("cuda:0", 1, 2, 3, 4, "exact", 0, 0)]
    events = tuple(Event(float(i), "tick", (reading,)) for i, reading in enumerate(readings))
    backend = play(Recording((DeviceInfo("cuda:0", "GPU", None),), (), events))

    (failed,) = backend.read()
    backend.playback.advance()
    backend.start_span()
    (read,) = backend.end_span()

    assert failed == readings[0]
    assert read == Reading("cuda:0", 1, 2, 1, 2, "exact", 0, 0)


# -- Spans ------------------------------------------------------------------------------------


def test_before_any_span_the_peak_is_the_recorded_one() -> None:
    """At the first event the mark is that which the recording found."""
    backend = play(make_recording(("read", 10, 90)))

    (reading,) = backend.read()

    assert (reading.allocated_peak_bytes, reading.peak_is) == (90, "exact")


def test_a_span_as_it_was_recorded_is_exact() -> None:
    """Beginning and ending with a recorded span gives the recorded peak."""
    backend = play(make_recording(("start_span", 10, 10), ("end_span", 12, 80)))

    assert peak_over(backend, 1) == (80, "exact")


def test_the_span_before_does_not_count() -> None:
    """A span that begins at a recorded start knows nothing of the earlier peak."""
    backend = play(
        make_recording(
            ("start_span", 10, 10), ("end_span", 12, 80), ("start_span", 12, 12), ("read", 9, 15)
        )
    )
    backend.playback.advance(2)

    assert peak_over(backend, 1) == (15, "exact")


def test_ticks_are_exact_between_any_two() -> None:
    """Each tick is a span of its own, so a span over several has the highest of them."""
    recording = make_recording(
        ("tick", 10, 10), ("tick", 20, 60), ("tick", 20, 30), ("tick", 5, 20), ("tick", 5, 5)
    )

    peaks = {}
    for first, last in itertools.combinations(range(5), 2):
        backend = play(recording)
        backend.playback.advance(first)
        peaks[first, last] = peak_over(backend, last - first)

    assert peaks == {
        (0, 1): (60, "exact"),
        (0, 2): (60, "exact"),
        (0, 3): (60, "exact"),
        (0, 4): (60, "exact"),
        (1, 2): (30, "exact"),
        (1, 3): (30, "exact"),
        (1, 4): (30, "exact"),
        (2, 3): (20, "exact"),
        (2, 4): (20, "exact"),
        (3, 4): (5, "exact"),
    }


def test_a_mark_that_rose_is_exact_within_a_recorded_span() -> None:
    """A span that begins in the middle is exact if the recorded mark rose in it."""
    backend = play(make_recording(("start_span", 10, 10), ("read", 20, 50), ("read", 30, 70)))
    backend.playback.advance()

    assert peak_over(backend, 1) == (70, "exact")


def test_a_mark_that_stood_gives_a_lower_bound() -> None:
    """If the mark did not rise, what happened below it is unknown: at least what stood."""
    backend = play(make_recording(("start_span", 10, 10), ("read", 20, 90), ("read", 30, 90)))
    backend.playback.advance()

    assert peak_over(backend, 1) == (30, "at least")


def test_a_gap_in_the_recording_is_exact_only_if_nothing_moved() -> None:
    """Between a recorded end and the next start nobody looked."""
    quiet = play(make_recording(("end_span", 10, 10), ("start_span", 10, 10)))
    moved = play(make_recording(("end_span", 10, 10), ("start_span", 25, 25)))

    assert peak_over(quiet, 1) == (10, "exact")
    assert peak_over(moved, 1) == (25, "at least")


@pytest.mark.parametrize("peak_is", ["at least", "sampled"])
def test_recorded_doubt_stays(peak_is: PeakIs) -> None:
    """A recorded peak that was not exact does not become so by being played."""
    backend = play(make_recording(("start_span", 10, 10), ("end_span", 12, 80), peak_is=peak_is))

    assert peak_over(backend, 1) == (80, peak_is)


def test_unknown_stays_unknown() -> None:
    """What was not recorded is ``None``, not 0, and says nothing against the rest."""
    readings = [
        Reading("host", None, 10, None, 10, "exact"),
        Reading("host", None, 20, None, 70, "exact"),
        Reading("host", None, None),
    ]
    events = tuple(Event(float(i), "tick", (reading,)) for i, reading in enumerate(readings))
    backend = play(Recording((DeviceInfo("host", "host memory", None),), (), events))
    backend.start_span()
    backend.playback.advance()

    (known,) = backend.read()
    backend.playback.advance()
    (unknown,) = backend.read()

    assert known == Reading("host", None, 20, None, 70, "exact")
    assert (unknown.allocated_bytes, unknown.reserved_bytes) == (None, None)
    assert unknown.reserved_peak_bytes == 70


def test_users_peak_is_that_since_the_recording_began() -> None:
    """Spans don't touch what a user would be told."""
    backend = play(make_recording(("tick", 10, 40), ("tick", 10, 90), ("tick", 10, 10)))
    backend.playback.advance(2)
    backend.start_span()

    (told,) = backend.read_as_user()
    (ours,) = backend.read()

    assert (told.allocated_peak_bytes, ours.allocated_peak_bytes) == (90, 10)


@given(st.integers(0, 10_000), st.data())
def test_any_span_over_any_script_agrees_with_the_allocator(seed: int, data: st.DataObject) -> None:
    """Over any stretch of a scripted session the peaks are the highest that it reached, exactly."""
    rng = random.Random(seed)
    steps: list[Step] = []
    live: list[str] = []
    for number in range(30):
        if live and rng.random() < 0.5:
            steps.append(Step(float(number), "free", 0, live.pop(rng.randrange(len(live)))))
        else:
            live.append(f"block {number}")
            steps.append(Step(float(number), "allocate", 0, live[-1], rng.randrange(1, 9) * MIB))
    recording = play_script(steps)
    first = data.draw(st.integers(1, 30))
    last = data.draw(st.integers(first, 30))
    backend = play(recording)
    backend.playback.advance(first)

    backend.start_span()
    backend.playback.advance(last - first)
    (end,) = backend.end_span()

    passed = [event.readings[0] for event in recording.events[first : last + 1]]
    assert end.allocated_peak_bytes == max(reading.allocated_bytes for reading in passed)
    assert end.reserved_peak_bytes == max(reading.reserved_bytes for reading in passed)
    assert end.peak_is == "exact"


# -- Devices ----------------------------------------------------------------------------------


def test_a_device_touched_within_a_span_begins_at_nothing() -> None:
    """It is not listed before, and at the span's end its peak is what it reached since."""
    steps = [
        Step(1.0, "allocate", 0, "a", 2 * MIB),
        Step(2.0, "allocate", 1, "b", 30 * MIB),
        Step(3.0, "free", 1, "b"),
    ]
    backend = ReplayBackend.from_script(steps)
    empty = backend.read()
    backend.playback.advance()
    start = backend.start_span()
    backend.playback.advance(2)
    end = backend.end_span()

    assert empty == ()
    assert [reading.device for reading in start] == ["cuda:0"]
    assert [reading.device for reading in end] == ["cuda:0", "cuda:1"]
    assert (end[1].allocated_bytes, end[1].allocated_peak_bytes) == (0, 30 * MIB)
    assert end[1].peak_is == "exact"


def test_devices_are_listed_once_touched() -> None:
    """The backend knows the devices in use, the monitor all that can be seen."""
    backend = ReplayBackend.from_script([Step(1.0, "touch", 1), Step(2.0, "touch", 0)])
    monitor = ReplayMonitor(backend.playback)

    listed = [[info.device for info in backend.list_devices()]]
    for _ in range(2):
        backend.playback.advance()
        listed.append([info.device for info in backend.list_devices()])

    assert listed == [[], ["cuda:1"], ["cuda:0", "cuda:1"]]
    assert [info.device for info in monitor.list_infos()] == ["cuda:0", "cuda:1"]


def test_whole_devices_follow_the_position() -> None:
    """The monitor's use is the allocator's memory, the context, and what others hold."""
    backend = ReplayBackend.from_script(
        [Step(1.0, "allocate", 0, "a", 64 * MIB)], total_bytes=1280 * MIB
    )
    monitor = ReplayMonitor(backend.playback)
    before = monitor.read_use("cuda:0")
    backend.playback.advance()
    after = monitor.read_use("cuda:0")
    monitor.close()

    assert before == DeviceUse("cuda:0", 5 * MIB, 1275 * MIB, 1280 * MIB, 0)
    assert after == DeviceUse("cuda:0", 77 * MIB, 1203 * MIB, 1280 * MIB, 93)
    assert monitor.read_use("cuda:0") is None
    assert monitor.list_infos() == ()


# -- Scripts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([Step(2.0, "touch"), Step(1.0, "touch")], "the step at 1.0 s comes after one at 2.0 s"),
        ([Step(1.0, "free", 0, "x")], "'x' at 1.0 s is not in use"),
        (
            [Step(1.0, "allocate", 0, "x", 1), Step(2.0, "allocate", 0, "x", 1)],
            "'x' at 2.0 s is in use: free it first",
        ),
        ([Step(1.0, "allocate", 0, "x", 0)], "can't allocate 0 bytes"),
        ([Step(1.0, "touch", -1)], "there is no device -1"),
    ],
)
def test_steps_that_can_not_be_are_refused(steps: Sequence[Step], message: str) -> None:
    """A script's mistake is named with its step."""
    with pytest.raises(BadInputError, match=message):
        ReplayBackend.from_script(steps)


def test_running_out_of_memory_can_be_scripted() -> None:
    """An allocation that finds no room counts, and need not be freed; so does one on demand."""
    backend = ReplayBackend.from_script(
        [
            Step(1.0, "allocate", 0, "big", 50 * MIB),
            Step(2.0, "allocate", 0, "too big", 80 * MIB),
            Step(3.0, "free", 0, "too big"),
            Step(4.0, "oom"),
            Step(5.0, "retry"),
        ],
        total_bytes=100 * MIB,
    )

    counts = []
    while not backend.playback.is_over:
        backend.playback.advance()
        (reading,) = backend.read()
        counts.append((reading.num_alloc_retries, reading.num_ooms))

    assert counts == [(0, 0), (1, 1), (1, 1), (2, 2), (3, 2)]


@pytest.mark.parametrize("n_devices", [1, 2, 8])
def test_the_demonstration_trains_and_tidies_up(n_devices: int) -> None:
    """It fills each device, exactly measured, runs out once, and ends with nothing in use."""
    recording = play_script(demo_script(n_devices))
    backend = play(recording)
    backend.start_span()
    backend.playback.advance(len(recording.events))
    end = backend.end_span()

    assert len(end) == n_devices
    assert {reading.peak_is for reading in end} == {"exact"}
    assert {reading.allocated_bytes for reading in end} == {0}
    assert {reading.reserved_bytes for reading in end} == {0}
    assert all(reading.allocated_peak_bytes > 40 * 1024 * MIB for reading in end)
    assert end[0].num_ooms == 1
    assert len(recording.events[-1].uses) == n_devices
    if n_devices > 1:
        last = f"cuda:{n_devices - 1}"
        touched = [
            event.time_s
            for event in recording.events
            if last in [reading.device for reading in event.readings]
        ]
        assert touched[0] == 2.0


def test_the_demonstration_loops_without_a_seam() -> None:
    """Played in a loop, totals only rise and no span's peak leaves what one turn reaches."""
    now = [0.0]
    backend = ReplayBackend.from_script(demo_script(2), clock=lambda: now[0], loop=True)
    totals, peaks = [], set()
    for _ in range(200):
        backend.start_span()
        now[0] += 0.7
        for reading in backend.end_span()[:1]:
            totals.append(reading.num_ooms)
            peaks.add(reading.peak_is)

    assert totals == sorted(totals)
    assert totals[-1] == 5
    assert peaks == {"exact"}
