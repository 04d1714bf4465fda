"""A recording is played from event to event: positions, spans, devices and traces."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import BadInputError
from gpumemwidget.model.devices import DeviceInfo, PeakIs, Reading
from gpumemwidget.testing import SimulatedGpus, simulate_torch
from tools.recordings import Recorder, Recording, RecordingPlayer, ReplayBackend
from tools.recordings.recording import Event

MIB = 1 << 20
GPU = DeviceInfo("cuda:0", "GPU", None)


def make_recording(*marks: tuple[int, int], peak_is: PeakIs = "exact") -> Recording:
    """One device, and an event a second: what stands, and the peak since the event before."""
    events = (
        Event(float(second), (Reading("cuda:0", current, current, peak, peak, peak_is, second, 0),))
        for second, (current, peak) in enumerate(marks)
    )
    return Recording(devices=(GPU,), visible=(), events=tuple(events))


def play(recording: Recording, position: int = 0) -> ReplayBackend:
    player = RecordingPlayer(recording)
    player.advance(position)
    return ReplayBackend(player)


def peak_over(backend: ReplayBackend, n_events: int) -> tuple[int | None, PeakIs | None]:
    """The peak of a span over the next events."""
    backend.start_span()
    backend.player.advance(n_events)
    (reading,) = backend.read_exact()
    assert reading.allocated_peak_bytes == reading.reserved_peak_bytes
    return reading.allocated_peak_bytes, reading.peak_is


# -- Positions -------------------------------------------------------------------------------------


def test_it_never_goes_back() -> None:
    """A position goes on to the last event, and no further."""
    player = RecordingPlayer(make_recording((1, 1), (2, 2), (3, 3)))

    passed = [player.advance(n_events) for n_events in (1, 0, 5, 1)]

    assert passed == [1, 0, 1, 0]
    with pytest.raises(BadInputError, match="only forward"):
        player.advance(-1)


# -- Peaks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("peak_is", ["at least", "sampled"])
def test_recorded_doubt_stays(peak_is: PeakIs) -> None:
    """A recorded peak that was not exact does not become so by being played."""
    backend = play(make_recording((10, 10), (12, 80), peak_is=peak_is))

    assert peak_over(backend, 1) == (80, peak_is)


def test_unknown_stays_unknown() -> None:
    """What was not recorded is ``None``, not 0, and the peak of a span that has it is not known."""
    readings = [
        Reading("host", None, None),
        Reading("host", 5, 10, None, 10, "exact"),
        Reading("host", 5, 20, None, 70, "exact"),
        Reading("host", None, None),
    ]
    events = tuple(Event(float(i), (reading,)) for i, reading in enumerate(readings))
    backend = play(Recording((DeviceInfo("host", "host memory", None),), (), events))

    (failed,) = backend.read()
    backend.player.advance()
    backend.start_span()
    backend.player.advance()
    (known,) = backend.read()
    backend.player.advance()
    (unknown,) = backend.read()

    assert failed == readings[0]
    assert known == readings[2]
    assert unknown == readings[3]


@given(st.integers(0, 10_000), st.data())
def test_any_span_agrees_with_the_allocator(seed: int, data: st.DataObject) -> None:
    """Over any stretch of a session the peaks are the highest that it reached, exactly."""
    chance = random.Random(seed)
    gpus = SimulatedGpus()
    recorder = Recorder(Hardware([CudaBackend(simulate_torch(gpus))]))
    live: list[int] = []
    recorder.tick()
    for _ in range(30):
        if live and chance.random() < 0.5:
            gpus.free(live.pop(chance.randrange(len(live))))
        else:
            live.append(gpus.allocate(chance.randrange(1, 9) * MIB))
        recorder.tick()
    recording = recorder.to_recording()
    first = data.draw(st.integers(1, 30))
    last = data.draw(st.integers(first, 30))
    backend = play(recording, first)

    backend.start_span()
    backend.player.advance(last - first)
    (end,) = backend.read_exact()

    passed = [event.readings[0] for event in recording.events[first : last + 1]]
    assert end.allocated_peak_bytes == max(reading.allocated_bytes for reading in passed)
    assert end.reserved_peak_bytes == max(reading.reserved_bytes for reading in passed)
    assert end.peak_is == "exact"


# -- Traces ----------------------------------------------------------------------------------------


def test_a_recording_without_a_history_says_so() -> None:
    """Nothing runs then."""
    backend = play(make_recording((1, 1), (2, 2)))

    (note,) = backend.start_trace(n_events=10)

    assert "holds no history" in note.text
    assert backend.end_trace() == ()
