"""Scripted sessions of whole devices: what stands in them, and how they are played."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from gpumemwidget.backends.company import Scene
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.recorder import Recorder
from gpumemwidget.backends.recording import Recording, format_recording, parse_recording
from gpumemwidget.backends.replay import Playback, ReplayBackend, ReplayMonitor
from gpumemwidget.backends.scenes import SceneKind, play_scene
from gpumemwidget.backends.script import Step, play_script
from gpumemwidget.devices import ChildProcess, DeviceState, Limit, PinnedUse, ProcessUse
from gpumemwidget.errors import BackendError, BadInputError
from gpumemwidget.records import DeviceUse

DATA = Path(__file__).parents[1] / "data"
MIB = 1 << 20
TOTAL = 1600 * MIB
#: Of such a device: what the driver has, a context takes, belongs to nobody.
DRIVER = CONTEXT = 10 * MIB
UNLISTED = TOTAL // 9000
KINDS = get_args(SceneKind)
NOTEBOOK = "python -m ipykernel_launcher"


class Play:
    """A recording, played by hand behind one object."""

    def __init__(self, recording: Recording) -> None:
        self.backend = ReplayBackend(Playback(recording))
        self.hardware = Hardware([self.backend], ReplayMonitor(self.backend.playback))

    def advance(self, n_events: int = 1) -> None:
        self.backend.playback.advance(n_events)

    def take(self) -> tuple[DeviceState, ...]:
        return self.hardware.take_device_states()


def make_steps() -> list[Step]:
    """A device in use, a neighbour that grows and goes, a rank, memory pinned and limited."""
    return [
        Step(1.0, "process", 0, "python serve.py", 30 * MIB, pid=7),
        Step(2.0, "allocate", 0, "x", 40 * MIB),
        Step(2.0, "outside", 0, n_bytes=5 * MIB),
        Step(3.0, "process", 1, "python rank.py", 20 * MIB, pid=8, relation="child"),
        Step(3.0, "child", name="python rank.py", n_bytes=900, pid=8),
        Step(4.0, "pin", n_bytes=64),
        Step(4.0, "limit", 0, n_bytes=100 * MIB),
        Step(5.0, "process", 0, "python serve.py", 50 * MIB, pid=7),
        Step(6.0, "process", 0, "python serve.py", 0, pid=7),
        Step(6.0, "pin", n_bytes=16),
        Step(6.0, "child", name="python rank.py", pid=8),
        Step(7.0, "limit", 0, n_bytes=0),
    ]


# -- What a script says ------------------------------------------------------------------------


def test_what_stands_is_what_the_steps_say() -> None:
    """Processes with their bytes, and a whole device that adds up, step by step."""
    play = Play(play_script(make_steps(), total_bytes=TOTAL))
    states = []
    for _ in range(8):
        states.append(play.take())
        play.advance()
    first = [state[0] for state in states]
    second = [state[1] for state in states]
    # A segment of its own, in whole pieces of 2 MiB.
    own = ProcessUse(4100, NOTEBOOK, "own", CONTEXT + 5 * MIB + 40 * MIB)

    assert first[0].processes == ()
    assert first[1].processes == (ProcessUse(7, "python serve.py", "other", 30 * MIB),)
    assert first[2].processes == (own, ProcessUse(7, "python serve.py", "other", 30 * MIB))
    assert first[5].processes == (own, ProcessUse(7, "python serve.py", "other", 50 * MIB))
    assert first[6].processes == first[7].processes == (own,)
    assert second[3].processes == (ProcessUse(8, "python rank.py", "child", 20 * MIB),)
    used = UNLISTED + CONTEXT + 75 * MIB
    assert first[2].use == DeviceUse(
        "cuda:0", used, TOTAL - DRIVER - used, TOTAL, 93, driver_bytes=DRIVER
    )
    assert first[2].info.total_bytes == TOTAL - DRIVER
    assert (second[2].reading, second[2].use.used_bytes) == (None, UNLISTED)


def test_children_pinned_memory_and_limits_are_played() -> None:
    """Each from when it is told, until it is told otherwise."""
    play = Play(play_script(make_steps(), total_bytes=TOTAL))
    told = []
    for _ in range(8):
        hardware = play.hardware
        told.append((hardware.list_children(), hardware.read_pinned(), hardware.read_limits()))
        play.advance()

    child = ChildProcess(8, 4100, "python rank.py", 900, (("cuda:1", 20 * MIB),))
    limit = Limit("cuda:0", 100 * MIB, TOTAL - DRIVER, 40 * MIB)
    assert told[2] == ((), None, ())
    assert told[3] == ((child,), None, ())
    assert told[4] == told[5] == ((child,), PinnedUse(64, 64, 64, 64), (limit,))
    assert told[6] == ((), PinnedUse(16, 64, 64, 64), (limit,))
    assert told[7][2] == (Limit("cuda:0", None, TOTAL - DRIVER, 40 * MIB),)


def test_a_scripted_limit_holds() -> None:
    """To the byte: what reaches it is there, and one piece more runs out of memory."""
    steps = [
        Step(1.0, "limit", 0, n_bytes=100 * MIB),
        Step(2.0, "allocate", 0, "fits", 100 * MIB),
        Step(3.0, "allocate", 0, "does not", 1),
        Step(4.0, "limit", 0, n_bytes=0),
        Step(5.0, "allocate", 0, "does now", 1),
    ]
    play = Play(play_script(steps, total_bytes=TOTAL))
    ooms = []
    for _ in range(5):
        play.advance()
        ooms += [reading.num_ooms for reading in play.backend.read()]

    assert ooms == [0, 1, 1, 1]
    assert play.backend.list_devices()[0].limit_bytes is None
    with pytest.raises(BackendError, match="recording"):
        play.hardware.set_limit("cuda:0", 5)


def test_the_users_reset_of_peaks_can_be_played() -> None:
    """The user's peaks begin anew, and those of the running span go on."""
    steps = [
        Step(1.0, "allocate", 0, "x", 40 * MIB),
        Step(2.0, "free", 0, "x"),
        Step(3.0, "allocate", 0, "y", 10 * MIB),
    ]
    play = Play(play_script(steps, total_bytes=TOTAL))
    play.backend.start_span()
    play.advance(3)
    before = [play.backend.read_as_user()[0].allocated_peak_bytes]

    done = play.hardware.reset_peaks()

    assert done == ("cuda:0",)
    assert before == [40 * MIB]
    assert play.backend.read_as_user()[0].allocated_peak_bytes == 10 * MIB
    assert play.backend.end_span()[0].allocated_peak_bytes == 40 * MIB


def test_processes_that_leave_no_room_are_refused() -> None:
    """A script's mistake is named before anything is played."""
    steps = [Step(1.0, "process", 0, "python big.py", 2000 * MIB, pid=7)]

    with pytest.raises(BadInputError, match="leave nothing of 1677721600 bytes"):
        play_script(steps, total_bytes=TOTAL)


def test_without_company_a_script_is_what_it_was() -> None:
    """Nobody is told of, and the driver keeps nothing to itself."""
    play = Play(play_script([Step(1.0, "allocate", 0, "x", MIB)], total_bytes=TOTAL))
    play.advance()

    (state,) = play.take()

    assert (state.processes, state.use.driver_bytes, state.notes) == (None, None, ())
    assert play.hardware.list_children() == ()
    assert '"version": 1' in format_recording(play.backend.playback.recording)


# -- What the driver may or may not tell -------------------------------------------------------


def play_two_thirds(kind: SceneKind, n_devices: int = 2) -> Play:
    recording = play_scene(n_devices, kind)
    play = Play(recording)
    play.advance(len(recording.events) * 2 // 3)
    return play


@pytest.mark.parametrize("n_devices", [1, 2, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_every_moment_of_every_scene_adds_up(kind: SceneKind, n_devices: int) -> None:
    """Driver, used and free are the total; listed processes are no more than what is used."""
    play = Play(play_scene(n_devices, kind, n_steps=4))
    n_seen = 0
    while not play.backend.playback.is_over:
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
        play.advance()

    assert n_seen > 50


@pytest.mark.parametrize("n_devices", [1, 2, 8])
def test_a_whole_scene_has_all_kinds_of_company(n_devices: int) -> None:
    """This process on each device, a neighbour on the first, a rank on each further one."""
    play = play_two_thirds("whole", n_devices)

    states = play.take()

    relations = [[each.relation for each in state.processes] for state in states]
    assert relations == [["own", "other", "other"], *[["own", "child"]] * (n_devices - 1)]
    assert [child.name for child in play.hardware.list_children()[:2]] == ["pt_data_worker"] * 2
    assert len(play.hardware.list_children()) == 2 + n_devices - 1
    assert play.hardware.read_pinned().allocated_bytes == 256 * MIB
    assert play.hardware.read_limits()[0].limit_bytes == 72 << 30
    assert all(state.notes == () for state in states)


def test_a_lost_gpu_answers_no_more() -> None:
    """Its last figures don't stand on: nothing is known of it, and why; its neighbour goes on."""
    play = play_two_thirds("lost GPU")

    first, second = play.take()

    assert first.use is not None
    assert (second.use, second.processes) == (None, None)
    assert second.reading.reserved_bytes > 0
    assert [note[:32] for note in second.notes] == [
        "cuda:1: memory in use can't be r",
        "cuda:1: processes can't be read:",
    ]


def test_no_permission_to_see_processes() -> None:
    """The devices' figures are there, and nobody on them."""
    play = play_two_thirds("no permission")

    first, second = play.take()

    assert (first.processes, second.processes) == (None, None)
    assert first.use.used_bytes > first.reading.reserved_bytes
    assert first.notes == ("cuda:0: processes can't be read: this user has no permission for it.",)


def test_an_instance_is_the_only_device() -> None:
    """Small, without a utilisation."""
    play = play_two_thirds("MIG", 8)

    (state,) = play.take()

    assert state.info.name == "Simulated GPU MIG 1g.10gb"
    assert state.info.uuid.startswith("MIG-")
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


def test_scenes_are_seen_by_who_asks_for_them_alone() -> None:
    """A scene of one's own: other numbers, another name."""
    scene = Scene(own_pid=5, own_name="python work.py")
    play = Play(play_script([Step(1.0, "touch")], total_bytes=TOTAL, scene=scene))
    play.advance()

    (state,) = play.take()

    assert state.processes == (ProcessUse(5, "python work.py", "own", CONTEXT),)


# -- Files and recorders -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_scenes_come_back_from_their_files(kind: SceneKind) -> None:
    """With all that stands in them, as the second version."""
    recording = play_scene(2, kind, n_steps=1)

    text = format_recording(recording)
    again = parse_recording(text)

    events = [replace(event, time_s=round(event.time_s, 6)) for event in recording.events]
    assert again == replace(recording, events=tuple(events))
    assert '"version": 2' in text


def test_eight_gpus_are_written_as_they_were() -> None:
    """The file beside the tests is what is written today, so that it stays readable."""
    text = (DATA / "scripted-eight-gpus.json").read_text()

    assert format_recording(play_scene(8, n_steps=1, snapshots=False)) == text
    assert len(parse_recording(text).events[-1].uses) == 8


@pytest.mark.parametrize("kind", KINDS)
def test_a_scene_that_is_recorded_again_is_the_same(kind: SceneKind) -> None:
    """What a recorder writes down of whole devices, played, gives the same states."""
    played = Play(play_scene(2, kind, n_steps=2, snapshots=False))
    monitor = ReplayMonitor(played.backend.playback)
    recorder = Recorder(played.hardware, monitor)
    recorder.tick()
    told = [(played.take(), played.hardware.list_children(), played.hardware.read_limits())]
    for _ in range(60):
        played.advance()
        recorder.tick()
        told.append((played.take(), played.hardware.list_children(), played.hardware.read_limits()))

    again = Play(parse_recording(format_recording(recorder.to_recording())))
    told_again = []
    for _ in told:
        hardware = again.hardware
        told_again.append((again.take(), hardware.list_children(), hardware.read_limits()))
        again.advance()

    assert _leave_out_peaks(told_again) == _leave_out_peaks(told)


def _leave_out_peaks(told: list[tuple[object, ...]]) -> list[object]:
    """All but the readings, whose peaks run from when the recorder came."""
    return [
        ([(s.info, s.use, s.processes, s.notes) for s in states], children, limits)  # type: ignore[attr-defined]
        for states, children, limits in told
    ]


def test_a_recorder_writes_changes_alone() -> None:
    """What stands as it stood is not there again."""
    played = Play(play_script(make_steps(), total_bytes=TOTAL))
    recorder = Recorder(played.hardware, ReplayMonitor(played.backend.playback))
    for _ in range(3):
        recorder.tick()
    played.advance()
    recorder.tick()

    changes = [event.change for event in recorder.to_recording().events]

    assert changes[1:3] == [changes[3].__class__()] * 2
    assert changes[3].processes == (
        ("cuda:0", (ProcessUse(7, "python serve.py", "other", 30 * MIB),)),
    )
    assert changes[3].children is changes[3].pinned is changes[3].limits is None
