"""Scripts: what their steps do to simulated GPUs, and the scenes of whole devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import pytest

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import BadInputError
from gpumemwidget.model.devices import (
    ChildProcess,
    DeviceState,
    DeviceUse,
    Limit,
    PinnedUse,
    ProcessUse,
)
from gpumemwidget.testing import (
    Recording,
    RecordingPlayer,
    ReplayBackend,
    ReplayMonitor,
    SceneKind,
    Step,
    play_scene,
    play_script,
)

MIB = 1 << 20
TOTAL = 1600 * MIB
#: Of such a GPU: what the driver has, a context takes, and is listed for nobody.
DRIVER = CONTEXT = 10 * MIB
UNLISTED = TOTAL // 9000
NOTEBOOK = "python -m ipykernel_launcher"


class Play:
    """A recording, played by hand behind one object."""

    def __init__(self, recording: Recording, position: int = 0) -> None:
        self.player = RecordingPlayer(recording)
        self.player.advance(position)
        self.hardware = Hardware([ReplayBackend(self.player)], ReplayMonitor(self.player))

    def take(self) -> tuple[DeviceState, ...]:
        return self.hardware.take_device_states()


def test_steps_stand_in_whole_devices() -> None:
    """Processes with their bytes, and a whole GPU that adds up, step by step."""
    steps = [
        Step(1.0, "process", 0, "python serve.py", 30 * MIB, pid=7),
        Step(2.0, "allocate", 0, "x", 40 * MIB),
        Step(2.0, "libraries", 0, n_bytes=5 * MIB),
        Step(3.0, "process", 1, "python rank.py", 20 * MIB, pid=8, relation="child"),
        Step(4.0, "process", 0, "python serve.py", 50 * MIB, pid=7),
        Step(5.0, "process", 0, "python serve.py", 0, pid=7),
    ]
    recording = play_script(steps, total_bytes=TOTAL)

    states = [Play(recording, position).take() for position in range(6)]

    first, second = zip(*states, strict=True)
    own = ProcessUse(4100, NOTEBOOK, "own", CONTEXT + 5 * MIB + 40 * MIB)
    assert [state.processes for state in first] == [
        (),
        (ProcessUse(7, "python serve.py", "other", 30 * MIB),),
        (own, ProcessUse(7, "python serve.py", "other", 30 * MIB)),
        (own, ProcessUse(7, "python serve.py", "other", 30 * MIB)),
        (own, ProcessUse(7, "python serve.py", "other", 50 * MIB)),
        (own,),
    ]
    assert second[3].processes == (ProcessUse(8, "python rank.py", "child", 20 * MIB),)
    used = UNLISTED + CONTEXT + 75 * MIB
    assert first[2].use == DeviceUse(
        "cuda:0", used, TOTAL - DRIVER - used, TOTAL, 93, driver_bytes=DRIVER
    )
    assert first[2].info.total_bytes == TOTAL - DRIVER
    assert (second[2].reading, second[2].use.used_bytes) == (None, UNLISTED)


def test_children_pinned_memory_and_limits_are_recorded() -> None:
    """Each from when it is so, until it is otherwise."""
    steps = [
        Step(1.0, "process", 0, "python rank.py", 20 * MIB, pid=8, relation="child"),
        Step(1.0, "child", name="python rank.py", n_bytes=900, pid=8),
        Step(2.0, "touch"),
        Step(2.0, "pin", n_bytes=64),
        Step(2.0, "limit", 0, n_bytes=100 * MIB),
        Step(3.0, "pin", n_bytes=16),
        Step(3.0, "child", name="python rank.py", pid=8),
        Step(4.0, "limit", 0),
    ]
    recording = play_script(steps, total_bytes=TOTAL)
    told = [
        (hardware.list_children(), hardware.read_pinned(), hardware.read_limits())
        for hardware in (Play(recording, position).hardware for position in range(5))
    ]

    child = ChildProcess(8, 4100, "python rank.py", 900, (("cuda:0", 20 * MIB),))
    assert told[0] == ((), None, ())
    assert told[1] == ((child,), None, ())
    assert told[2][:2] == ((child,), PinnedUse(64, 64, 64, 64))
    assert told[2][2] == (Limit("cuda:0", 100 * MIB, TOTAL - DRIVER, 0),)
    assert told[3][:2] == ((), PinnedUse(16, 80, 64, 80))
    assert told[4][2] == (Limit("cuda:0", None, TOTAL - DRIVER, 0),)


def test_a_scripted_limit_holds() -> None:
    """To the byte: what reaches it is there, and one piece more runs out of memory."""
    steps = [
        Step(1.0, "limit", 0, n_bytes=100 * MIB),
        Step(2.0, "allocate", 0, "fits", 100 * MIB),
        Step(3.0, "allocate", 0, "does not", 1),
        Step(4.0, "free", 0, "does not"),
        Step(4.0, "limit", 0),
        Step(5.0, "allocate", 0, "does now", 1),
        Step(6.0, "oom", 0),
    ]

    recording = play_script(steps, total_bytes=TOTAL)

    readings = [event.readings[0] for event in recording.events[2:]]
    assert [reading.num_ooms for reading in readings] == [0, 1, 1, 1, 2]
    assert [reading.num_alloc_retries for reading in readings] == [0, 1, 1, 1, 2]


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
        (
            [Step(1.0, "process", 0, "big", 2000 * MIB, pid=7)],
            "others can't take 21[0-9]+ bytes of",
        ),
    ],
)
def test_steps_that_can_not_be_are_refused(steps: Sequence[Step], message: str) -> None:
    """A script's mistake is named with its step."""
    with pytest.raises(BadInputError, match=message):
        play_script(steps, total_bytes=TOTAL)


# -- Scenes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_devices", [1, 3])
@pytest.mark.parametrize("kind", get_args(SceneKind))
def test_every_moment_of_every_scene_adds_up(kind: SceneKind, n_devices: int) -> None:
    """Driver, used and free are the total; listed processes are no more than what is used."""
    play = Play(play_scene(n_devices, kind, n_steps=2))
    n_seen = 0
    for _ in range(play.player.n_events):
        for state in play.take():
            assert state.is_at_one_moment
            use, listed = state.use, state.processes
            if use is not None:
                n_seen += 1
                assert use.driver_bytes + use.used_bytes + use.free_bytes == use.total_bytes
                assert min(use.driver_bytes, use.used_bytes, use.free_bytes) >= 0
                assert sum(each.n_bytes for each in listed or ()) <= use.used_bytes
            own = [each for each in listed or () if each.relation == "own"]
            if own and state.reading is not None:
                assert own[0].n_bytes >= state.reading.reserved_bytes
        play.player.advance()

    assert n_seen > 30


def play_two_thirds(kind: SceneKind, n_devices: int = 2) -> Play:
    recording = play_scene(n_devices, kind)
    return Play(recording, len(recording.events) * 2 // 3)


def test_a_scene_has_all_kinds_of_company() -> None:
    """This process on each GPU, a neighbour on the first, a child on each further one."""
    play = play_two_thirds("plain", 3)

    states = play.take()

    relations = [[each.relation for each in state.processes] for state in states]
    assert relations == [["own", "other", "other"], *[["own", "child"]] * 2]
    assert [child.name for child in play.hardware.list_children()[:2]] == ["pt_data_worker"] * 2
    assert len(play.hardware.list_children()) == 4
    assert play.hardware.read_pinned().allocated_bytes == 256 * MIB
    assert play.hardware.read_limits()[0].limit_bytes == 72 << 30
    assert all(state.notes == () for state in states)


def test_a_lost_gpu_answers_no_more() -> None:
    """Its last figures don't stand on: nothing is known of it, and why; its neighbour goes on."""
    first, second = play_two_thirds("lost GPU").take()

    assert first.use is not None
    assert (second.use, second.processes) == (None, None)
    assert second.reading.reserved_bytes > 0
    assert [note[:32] for note in second.notes] == [
        "cuda:1: memory in use can't be r",
        "cuda:1: processes can't be read:",
    ]


def test_no_permission_to_see_processes() -> None:
    """The figures of the GPUs are there, and nobody on them."""
    first, second = play_two_thirds("no permission").take()

    assert (first.processes, second.processes) == (None, None)
    assert first.use.used_bytes > first.reading.reserved_bytes
    assert first.notes == ("cuda:0: processes can't be read: this user has no permission for it.",)


def test_an_instance_is_the_only_device() -> None:
    """Small, without a utilisation."""
    (state,) = play_two_thirds("MIG", 8).take()

    assert state.info.name == "Simulated GPU MIG 1g.10gb"
    assert (state.use.total_bytes, state.use.utilization_percent) == (10 << 30, None)
    assert [each.relation for each in state.processes] == ["own", "other", "other"]


def test_a_container_has_other_numbers() -> None:
    """Nobody has a name or is this process's; it is said why."""
    play = play_two_thirds("host PIDs")

    first, second = play.take()

    assert {each.relation for each in (*first.processes, *second.processes)} == {"other"}
    assert {each.name for each in (*first.processes, *second.processes)} == {None}
    assert all("as happens within containers" in state.notes[0] for state in (first, second))
    assert all(child.devices == () for child in play.hardware.list_children())
