"""A trace as a file: written whole, read back the same, and refused where it is anything else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gpumemwidget.errors import FileError
from gpumemwidget.model.traces import CellTrace
from gpumemwidget.tracing.trace_file import (
    check_target,
    format_trace,
    parse_trace,
    read_trace,
    write_trace,
)
from tests.report.trace_examples import make_host_trace, make_hostile_trace


def _make_trace() -> CellTrace:
    """A trace with text of all kinds, two devices and the host."""
    trace = make_hostile_trace()
    (device,) = trace.devices
    devices = (device, dataclasses.replace(device, timeline=None))
    return dataclasses.replace(
        trace, devices=devices, host=make_host_trace().host, notes=("größe \ud800",)
    )


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """All of it, to the last field."""
    trace = _make_trace()

    path = write_trace(trace, tmp_path / "cell.json")

    assert path == tmp_path / "cell.json"
    assert read_trace(path) == trace


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    """Unless its place is asked for."""
    path = tmp_path / "cell.json"
    path.write_text("mine")

    with pytest.raises(FileError, match="is there already"):
        write_trace(_make_trace(), path)
    assert path.read_text() == "mine"

    write_trace(_make_trace(), path, force=True)
    assert read_trace(path) == _make_trace()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cell.csv", "'cell.csv' is not a name for a trace: give one that ends in .json"),
        ("none/cell.json", "the folder {folder}/none does not exist"),
        (".", "is not a name for a trace"),
    ],
)
def test_places_are_refused_before(tmp_path: Path, name: str, message: str) -> None:
    """Before anything was traced for nothing."""
    with pytest.raises(FileError) as caught:
        check_target(tmp_path / name)

    assert message.format(folder=tmp_path) in str(caught.value)


def _change(path: str, value: Any) -> Any:
    """The file's values with one of them replaced, or taken away for ``...``."""
    data = json.loads(format_trace(_make_trace()))
    steps = [int(step) if step.isdecimal() else step for step in path.split(".")]
    place = data
    for step in steps[:-1]:
        place = place[step]
    if value is ...:
        del place[steps[-1]]
    else:
        place[steps[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", "other", 'it does not say "format"'),
        ("version", 2, "this trace is of version 2, and we read version 1"),
        ("trace", ..., "trace has not the fields"),
        ("trace.record.status", "fine", "trace.record.status is none of what it may be"),
        ("trace.record.duration_s", float("nan"), "trace.record.duration_s is no number"),
        ("trace.record.first_line", 5, "trace.record.first_line is no text"),
        ("trace.devices", {}, "trace.devices is no list"),
        ("trace.devices.0.n_events", True, "trace.devices[0].n_events is no number"),
        ("trace.devices.0.timeline.times_s", [0, 1], "columns of different lengths"),
        ("trace.devices.0.timeline.times_s", [0, 2, 1, 3], "goes back in time"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(path: str, value: Any, message: str) -> None:
    """With the place that is wrong: nothing is guessed."""
    with pytest.raises(FileError) as caught:
        parse_trace(json.dumps(_change(path, value)))

    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\x80\x04", b"null", b"[" * 100_000, "ä".encode("utf-16")]
)
def test_other_files_are_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    """Whatever somebody takes for a trace."""
    path = tmp_path / "other.json"
    path.write_bytes(content)

    with pytest.raises(FileError, match="this is no trace of gpumemwidget's") as caught:
        read_trace(path)

    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value).splitlines()) == 1


def test_calls_without_end_are_refused() -> None:
    """A file of somebody's may lie as deep as it likes."""
    data = json.loads(format_trace(_make_trace()))
    use = data["trace"]["devices"][0]["units"][0]["lines"][0]
    for _ in range(300):
        use["calls"] = [{**use["calls"][0], "calls": use["calls"]}]

    with pytest.raises(FileError, match="its calls lie too deep"):
        parse_trace(json.dumps(data))
