"""Recordings: what is written is what is read, and what is not whole is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.backends.recorder import Recorder
from gpumemwidget.backends.recording import (
    Event,
    Recording,
    format_recording,
    load_recording,
    parse_recording,
    save_recording,
)
from gpumemwidget.backends.replay import ReplayBackend, ReplayMonitor
from gpumemwidget.backends.script import demo_script
from gpumemwidget.backends.statechanges import Change
from gpumemwidget.devices import ChildProcess, Limit, PinnedUse, ProcessUse
from gpumemwidget.errors import FileError, RecordingError
from gpumemwidget.records import DeviceInfo, DeviceUse, Reading

DATA = Path(__file__).parents[1] / "data"

GPU = DeviceInfo("cuda:0", "NVIDIA H200", 100, None, "GPU-1")
HOST_INFO = DeviceInfo("host", "host memory", None)


def make_recording() -> Recording:
    """Two events, with everything that may be known and unknown."""
    return Recording(
        devices=(GPU, HOST_INFO),
        visible=(GPU,),
        events=(
            Event(0.0, "start_span", (Reading("host", None, 5, None, 5, "sampled"),)),
            Event(
                0.25,
                "tick",
                (
                    Reading("cuda:0", 1, 2, 3, 4, "exact", 0, 1),
                    Reading("host", 6, 7, None, None, None),
                ),
                (DeviceUse("cuda:0", 40, 60, 100, 93),),
            ),
        ),
        about="two events",
    )


def damage(change: Callable[[dict[str, Any]], object]) -> str:
    """A good recording's text after a change to its data."""
    data = json.loads(format_recording(make_recording()))
    change(data)
    return json.dumps(data)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    """A recording comes back from its file as it was."""
    path = tmp_path / "made.json"

    save_recording(make_recording(), path)

    assert load_recording(path) == make_recording()


def test_the_file_states_its_version_units_and_columns() -> None:
    """A reader needs nothing but the file to understand its numbers."""
    data = json.loads(format_recording(make_recording()))

    assert (data["format"], data["version"]) == ("gpumemwidget recording", 1)
    assert data["units"]["_bytes"] == "bytes"
    assert data["columns"]["readings"][:2] == ["device", "allocated_bytes"]
    assert data["events"][1][:2] == [0.25, "tick"]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_file_cut_short_is_refused(share: float, tmp_path: Path) -> None:
    """However much is missing at the end, the error says that it is cut short."""
    text = format_recording(make_recording())
    path = tmp_path / "short.json"
    path.write_text(text[: int(len(text.rstrip()) * share)])

    with pytest.raises(RecordingError) as caught:
        load_recording(path)

    assert str(caught.value) == f"{path} is cut short or damaged: record it again"


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", "7", '{"format": "other"}', "\x00", "[" * 100_000, "{" * 9]
)
def test_other_files_are_refused(text: str) -> None:
    """What is not ours is said to be not ours, in one line."""
    with pytest.raises(RecordingError) as caught:
        parse_recording(text, source="x.json")

    message = "x.json is no recording of gpumemwidget's: choose another file"
    assert str(caught.value) == message


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 are not ours."""
    path = tmp_path / "picture.json"
    path.write_bytes(b"\x89PNG\xff\xfe")

    with pytest.raises(RecordingError, match="no recording of gpumemwidget's"):
        load_recording(path)


@pytest.mark.parametrize("version", [0, 3, "1", 1.0, True, None, [1]])
def test_another_version_is_refused(version: object) -> None:
    """The error names both versions."""
    text = damage(lambda data: data.update(version=version))

    with pytest.raises(RecordingError, match=r"of version .*, and this release reads versions 1"):
        parse_recording(text)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data["events"].pop(), "it holds 1 of 2 events"),
        (lambda data: data.pop("events"), "it holds 0 of 2 events"),
        (lambda data: data.update(events=[], n_events=0), "it holds no event"),
        (lambda data: data.pop("devices"), "devices is no list"),
        (lambda data: data["devices"][0].pop(), "devices has a row that is not of 5 values"),
        (lambda data: data["devices"].append(data["devices"][0]), "devices has a device twice"),
        (lambda data: data["devices"].pop(), "event 0 reads host, which is not listed"),
        (lambda data: data["events"].reverse(), "event 1 is earlier than the one before"),
        (lambda data: data["events"].append(3) or data.update(n_events=3), "is no list of four"),
        (lambda data: data["events"][0].__setitem__(0, "now"), "event 0 has no time"),
        (lambda data: data["events"][0].__setitem__(0, -1), "event 0 has no time"),
        (lambda data: data["events"][0].__setitem__(0, float("nan")), "event 0 has no time"),
        (lambda data: data["events"][0].__setitem__(0, True), "event 0 has no time"),
        (lambda data: data["events"][0].__setitem__(1, "stop"), "event 0 is a 'stop'"),
        (lambda data: data["events"][0].__setitem__(1, []), "event 0 is a \\[\\]"),
        (lambda data: data["events"][0].__setitem__(2, {}), "event 0's readings is no list"),
        (lambda data: data["events"][1][2][0].__setitem__(1, -5), "has -5 for allocated_bytes"),
        (lambda data: data["events"][1][2][0].__setitem__(1, 0.5), "has 0.5 for allocated_bytes"),
        (lambda data: data["events"][1][2][0].__setitem__(1, True), "has True for allocated"),
        (lambda data: data["events"][1][2][0].__setitem__(5, "sure"), "has 'sure' for peak_is"),
        (lambda data: data["events"][1][2][0].__setitem__(0, None), "has None for device"),
        (lambda data: data["events"][1][3][0].__setitem__(4, 101), "has 101 for utilization"),
    ],
)
def test_contradictions_are_refused(
    change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    """Each thing that can't be is named in one line."""
    with pytest.raises(RecordingError, match=reason) as caught:
        parse_recording(damage(change), source="x.json")

    assert str(caught.value).startswith("x.json is damaged: ")
    assert str(caught.value).endswith("; record it again")
    assert "\n" not in str(caught.value)


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner)),
        max_leaves=8,
    ),
    st.sampled_from(["devices", "visible", "events", "n_events", "about", "readings", "uses"]),
)
def test_no_rubbish_gets_through_or_breaks_out(rubbish: object, where: str) -> None:
    """Whatever stands in a field, the answer is a recording or our own error."""
    text = damage(
        lambda data: (
            data["events"][1].__setitem__(2 if where == "readings" else 3, rubbish)
            if where in ("readings", "uses")
            else data.update({where: rubbish})
        )
    )

    try:
        recording = parse_recording(text)
    except RecordingError as error:
        assert "\n" not in str(error)  # noqa: PT017 - either outcome is right, none other is
    else:
        assert len(recording.events) == 2


# -- The second version: whole devices ---------------------------------------------------------


def make_whole() -> Recording:
    """Two events, of which the second has every kind of change."""
    first = make_recording().events[0]
    change = Change(
        processes=(
            (
                "cuda:0",
                (ProcessUse(5, "python a.py", "own", 30), ProcessUse(6, None, "other", None)),
            ),
            ("cuda:1", None),
        ),
        failures=(("cuda:1", ("cuda:1: processes can't be read: it is lost.",)),),
        children=(ChildProcess(7, 5, "python b.py", None),),
        pinned=PinnedUse(1, 2, 3, 4),
        limits=(Limit("cuda:0", 50, 100, None), Limit("cuda:1", None, None, None, share=0.5)),
    )
    uses = (DeviceUse("cuda:0", 40, 55, 100, 93, driver_bytes=5),)
    second = Event(0.5, "read", first.readings, uses, change=change)
    return replace(make_recording(), events=(first, second))


def damage_whole(change: Callable[[list[Any]], object]) -> str:
    """Its text after a change to its second event."""
    data = json.loads(format_recording(make_whole()))
    change(data["events"][1])
    return json.dumps(data)


def test_whole_devices_are_written_and_read() -> None:
    """As the second version, whose columns it states; what is as it was is not there."""
    text = format_recording(make_whole())
    data = json.loads(text)

    assert parse_recording(text) == make_whole()
    assert data["version"] == 2
    assert data["columns"]["uses"][-1] == "driver_bytes"
    assert data["columns"]["events"][-1] == "changes"
    assert data["columns"]["rows"] == ["pid", "name", "relation", "n_bytes"]
    assert [len(event) for event in data["events"]] == [4, 7]
    assert set(data["events"][1][6]) == {"processes", "failures", "children", "pinned", "limits"}


def test_pinned_memory_of_which_the_use_is_not_counted() -> None:
    """As by releases of torch before 2.13."""
    whole = make_whole()
    change = replace(whole.events[1].change, pinned=PinnedUse(None, 2, None, 4))
    recording = replace(whole, events=(whole.events[0], replace(whole.events[1], change=change)))

    assert parse_recording(format_recording(recording)) == recording


def test_what_older_releases_can_read_is_written_for_them() -> None:
    """Without anything of whole devices a recording is of the first version, as it was."""
    data = json.loads(format_recording(make_recording()))

    assert data["version"] == 1
    assert "driver_bytes" not in data["columns"]["uses"]
    assert "changes" not in data["columns"]["events"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda event: event.append(0), "event 1 is no list of four to seven"),
        (lambda event: event[3][0].pop(), "event 1's uses has a row that is not of 6 values"),
        (lambda event: event[3][0].__setitem__(5, -1), "has -1 for driver_bytes"),
        (lambda event: event.__setitem__(6, []), "event 1 has changes without names"),
        (lambda event: event[6].update(colour=1), "event 1 changes 'colour', which is unknown"),
        (lambda event: event[6].update(processes=3), "event 1's processes is no list"),
        (lambda event: event[6].update(processes=[["cuda:0"]]), "processes has no device"),
        (lambda event: event[6].update(processes=[[7, []]]), "processes has no device"),
        (lambda event: event[6]["processes"].extend([["cuda:0", []]]), "has a device twice"),
        (lambda event: event[6]["processes"][0][1][0].pop(), "cuda:0 has a row that is not of 4"),
        (lambda event: event[6]["processes"][0][1][1].__setitem__(0, 5), "has a pid twice"),
        (lambda event: event[6]["processes"][0][1][0].__setitem__(0, -5), "has -5 for pid"),
        (lambda event: event[6]["processes"][0][1][0].__setitem__(2, "me"), "'me' for relation"),
        (lambda event: event[6]["processes"][0][1][0].__setitem__(2, []), r"\[\] for relation"),
        (lambda event: event[6].update(failures=[["cuda:0", "x"]]), "failures are no sentences"),
        (lambda event: event[6].update(failures=[["cuda:0", [""]]]), "failures are no sentences"),
        (lambda event: event[6]["children"][0].__setitem__(2, None), "has None for name"),
        (lambda event: event[6].update(children=None), "event 1's children is no list"),
        (lambda event: event[6].update(pinned=[1, 2, 3]), "pinned memory has a row that is not"),
        (lambda event: event[6].update(pinned=None), "pinned memory has a row that is not"),
        (lambda event: event[6]["pinned"].__setitem__(1, None), "None for reserved_bytes"),
        (lambda event: event[6]["limits"][1].__setitem__(4, 1.5), "has 1.5 for share"),
        (lambda event: event[6]["limits"][1].__setitem__(4, True), "has True for share"),
        (lambda event: event[6]["limits"][0].__setitem__(3, 1), "has 1 for is_waiting"),
    ],
)
def test_contradictions_of_whole_devices_are_refused(
    change: Callable[[list[Any]], object], reason: str
) -> None:
    """Each thing that can't be is named in one line."""
    with pytest.raises(RecordingError, match=reason) as caught:
        parse_recording(damage_whole(change), source="x.json")

    assert "\n" not in str(caught.value)


RUBBISH = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner)),
    max_leaves=8,
)


@given(RUBBISH, st.sampled_from(["processes", "failures", "children", "pinned", "limits", ""]))
def test_no_rubbish_of_whole_devices_breaks_out(rubbish: object, name: str) -> None:
    """Whatever stands there, the answer is a recording or our own error."""
    text = damage_whole(
        lambda event: event[6].update({name: rubbish}) if name else event.__setitem__(6, rubbish)
    )

    try:
        recording = parse_recording(text)
    except RecordingError as error:
        assert "\n" not in str(error)  # noqa: PT017 - either outcome is right, none other is
    else:
        assert len(recording.events) == 2


# -- Files and recorders -----------------------------------------------------------------------


def test_files_that_can_not_be_had(tmp_path: Path) -> None:
    """A file that is missing or there already is refused by its name, and left as it is."""
    path = tmp_path / "there.json"
    path.write_text("mine")

    with pytest.raises(FileError, match=r"none.json can't be read: No such file"):
        load_recording(tmp_path / "none.json")
    with pytest.raises(FileError, match=r"there.json is there already: choose another name"):
        save_recording(make_recording(), path)
    with pytest.raises(FileError, match="can't be written"):
        save_recording(make_recording(), tmp_path / "no" / "folder.json")

    assert path.read_text() == "mine"


def test_a_recorder_writes_down_what_it_passes_on() -> None:
    """Played back, a recording gives the readings and uses that were recorded."""
    source = ReplayBackend.from_script(demo_script(2, n_steps=2))
    seconds = iter(range(10_000))
    monitor = ReplayMonitor(source.playback)
    recorder = Recorder(source, monitor, clock=lambda: float(next(seconds)), about="again")
    told = [recorder.start_span()]
    for _ in range(20):
        source.playback.advance()
        told.append(recorder.tick())
    told.append(recorder.read())
    told.append(recorder.end_span())

    recording = recorder.to_recording()

    assert [event.readings for event in recording.events] == told
    assert [event.action for event in recording.events[:2]] == ["start_span", "tick"]
    assert [event.action for event in recording.events[-2:]] == ["read", "end_span"]
    assert [event.time_s for event in recording.events[:3]] == [1.0, 2.0, 3.0]
    assert [info.device for info in recording.devices] == ["cuda:0", "cuda:1"]
    assert recording.visible == monitor.list_infos()
    assert recording.events[5].uses[0].device == "cuda:0"
    assert parse_recording(format_recording(recording)).about == "again"


def test_a_recorder_keeps_a_bounded_number() -> None:
    """When it is full it goes on passing on, and keeps no more."""
    source = ReplayBackend.from_script(demo_script(1, n_steps=1))
    recorder = Recorder(source, max_events=3)

    told = [recorder.tick() for _ in range(10)]

    assert recorder.n_events == 3
    assert len(told) == 10


@pytest.mark.parametrize("options", [(), ("--trace", "--snapshot")])
def test_a_script_is_recorded_from_the_command_line(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """The tool runs a script with its arguments, and what it writes can be played."""
    out, script = tmp_path / "out.json", tmp_path / "work.py"
    script.write_text(
        "import sys\nblock = bytearray(64 << 20)\ndel block\nprint(__name__, sys.argv[1:])\n"
    )
    command = [sys.executable, "-m", "gpumemwidget.backends.record", "--interval-s", "0.01"]
    command += options

    done = subprocess.run(
        [*command, str(out), "--", str(script), "--fast", "1"],
        capture_output=True,
        text=True,
        check=True,
    )
    again = subprocess.run(
        [*command, str(out), str(script)], capture_output=True, text=True, check=False
    )
    recording = load_recording(out)

    assert done.stdout == "__main__ ['--fast', '1']\n"
    assert recording.devices[-1].device == "host"
    assert recording.about.startswith("work.py on ")
    peaks = [event.readings[-1].reserved_peak_bytes for event in recording.events]
    assert max(peaks) - recording.events[0].readings[-1].reserved_bytes > 60 << 20
    assert again.returncode == 1
    assert again.stderr == f"{out} is there already: choose another name\n"


#: All files there but the picture of an OOM's card, what ran for the traces, and what the driver
#: said beside the recordings of devices.
KEPT = sorted(
    {*DATA.glob("**/*.json")}
    - {DATA / "h100-oom.json", DATA / "h100-traces" / "cells.json"}
    - {*DATA.glob("**/*-moments.json")}
)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_kept_recordings_can_be_played(path: Path) -> None:
    """Every recording beside the tests is whole, and every reading in it adds up."""
    recording = load_recording(path)

    for event in recording.events:
        for reading in event.readings:
            if reading.reserved_peak_bytes is not None:
                assert reading.reserved_peak_bytes >= reading.reserved_bytes
            if reading.allocated_peak_bytes is not None:
                assert reading.allocated_peak_bytes >= reading.allocated_bytes


def test_a_real_gpus_session_plays_as_it_was() -> None:
    """Ten training steps on an H200: their peak, the out-of-memory error, what cuBLAS keeps."""
    backend = ReplayBackend.from_file(DATA / "h200-training.json")
    backend.start_span()

    while backend.playback.advance():
        pass

    gpu, host = backend.end_span()
    assert (gpu.device, host.device) == ("cuda:0", "host")
    assert (gpu.allocated_peak_bytes, gpu.reserved_peak_bytes) == (387_023_872, 446_693_376)
    assert (gpu.peak_is, gpu.num_alloc_retries, gpu.num_ooms) == ("exact", 1, 1)
    # Two workspaces of 32.5 MiB: the main thread's and the backward pass's.
    assert gpu.allocated_bytes == 2 * 34_078_720
