"""Scripts: what their steps do to simulated GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpumemwidget.errors import BadInputError
from gpumemwidget.model.devices import ProcessUse
from gpumemwidget.testing import Step, demo_script, play_script

MIB, GIB = 1 << 20, 1 << 30
CONTEXT = 512 * MIB


def test_steps_stand_in_readings_and_whole_devices() -> None:
    """What is reserved is the process's on the GPU, beside its context; a full GPU is an OOM."""
    steps = [
        Step(1.0, "allocate", 0, "x", 40 * MIB),
        Step(2.0, "allocate", 0, "too much", 80 * GIB),
        Step(3.0, "free", 0, "too much"),
        Step(3.0, "oom"),
        Step(4.0, "free", 0, "x"),
        Step(5.0, "empty_cache"),
        Step(6.0, "touch", 1),
    ]

    recording = play_script(steps)

    assert [
        (event.time_s, reading.allocated_bytes, reading.reserved_bytes, reading.num_ooms)
        for event in recording.events[1:]
        for reading in event.readings[:1]
    ] == [
        (1.0, 40 * MIB, 40 * MIB, 0),
        (2.0, 40 * MIB, 40 * MIB, 1),
        (3.0, 40 * MIB, 40 * MIB, 2),
        (4.0, 0, 40 * MIB, 2),
        (5.0, 0, 0, 2),
        (6.0, 0, 0, 2),
    ]
    first, second = recording.events[:2]
    assert first.surroundings.processes["cuda:0"] == ()
    assert second.surroundings.processes["cuda:0"] == (
        ProcessUse(4100, "python -m ipykernel_launcher", "own", CONTEXT + 40 * MIB),
    )
    assert second.uses[0].used_bytes == CONTEXT + 40 * MIB
    assert [len(event.readings) for event in recording.events] == [0, 1, 1, 1, 1, 1, 2]


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
        play_script(steps)


def test_the_demonstration_fits_and_is_freed() -> None:
    """Two GPUs are more than half full at its peak; it runs out of memory once, as told."""
    events = play_script(demo_script(2, n_steps=3)).events

    peaks = [max(event.readings[gpu].allocated_bytes for event in events[1:]) for gpu in range(2)]
    assert 40 * GIB < peaks[1] < peaks[0] < 80 * GIB
    assert [reading.num_ooms for reading in events[-1].readings] == [1, 0]
    assert [reading.reserved_bytes for reading in events[-1].readings] == [0, 0]
