"""Files of PyTorch's memory viewer are read back, whole or not at all, and never run anything."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import gpumemwidget
from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.snapshot import load_snapshot
from gpumemwidget.errors import FileError
from gpumemwidget.model.traces import AllocatorTrace, NoteKind, TraceNote
from gpumemwidget.testing import SimulatedGpus, simulate_torch
from tools.recordings.recording import list_allocator_events

MIB = 1 << 20


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, AllocatorTrace]:
    """A file that a trace has written, and that trace."""
    gpu = SimulatedGpus()
    backend = CudaBackend(simulate_torch(gpu))
    kept = gpu.allocate(3 * MIB)
    backend.start_trace(n_events=100)
    gpu.allocate(100)
    gpu.free(kept)
    path = tmp_path / "snapshot.pickle"
    (trace,) = backend.end_trace(snapshot_to=path)
    return path, trace


def rewrite(path: Path, change: Any) -> None:
    """Change what a file holds."""
    snapshot = pickle.loads(path.read_bytes())
    changed = change(snapshot)
    is_new = isinstance(changed, dict) and "segments" in changed
    path.write_bytes(pickle.dumps(changed if is_new else snapshot))


def refuse(path: Path) -> str:
    """What is said of a file that is refused: one line that begins with its name."""
    with pytest.raises(FileError) as caught:
        gpumemwidget.load_trace(path)
    said = str(caught.value)
    assert said.startswith(str(path))
    assert "\n" not in said
    return said.removeprefix(str(path))


# -- What is read ------------------------------------------------------------------------------


def test_a_trace_comes_back_from_its_file(written: tuple[Path, AllocatorTrace]) -> None:
    """Its events and its end; what stood before is not in a file."""
    path, trace = written

    (read,) = load_snapshot(path)

    # The file has what was noted before the span's own first event, too.
    assert list_allocator_events(read.events)[-len(trace.events) :] == list_allocator_events(
        trace.events
    )
    assert read.after == trace.after
    assert (read.device, read.rules) == (trace.device, trace.rules)
    assert (read.before, read.is_whole) == ((), False)
    assert read.start_us == read.events.times_us[0]
    assert read.end_us == read.events.times_us[-1]
    assert read.notes == (TraceNote(NoteKind.START_WORKED_OUT),)


def test_each_device_has_its_trace(tmp_path: Path) -> None:
    """One that has memory and no events, too."""
    gpu = SimulatedGpus(3)
    backend = CudaBackend(simulate_torch(gpu))
    gpu.allocate(1, 0)
    backend.start_trace(n_events=100)
    gpu.allocate(2, 2)
    path = tmp_path / "snapshot.pickle"
    traces = backend.end_trace(snapshot_to=path)

    read = load_snapshot(path)

    assert [each.device for each in read] == [each.device for each in traces]
    assert [each.after for each in read] == [each.after for each in traces]


# -- What is refused ---------------------------------------------------------------------------


class Evil:
    """Runs something when it is read by anything that runs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_nothing_in_a_file_is_run(tmp_path: Path, written: tuple[Path, AllocatorTrace]) -> None:
    """Wherever in it the request stands; the line says what it asked for."""
    path, _ = written
    mark = tmp_path / "ran"
    rewrite(path, lambda snapshot: {**snapshot, "extra": Evil(mark)})

    assert "was to be run, and was not" in refuse(path)

    assert not mark.exists()


@pytest.mark.parametrize(
    "body",
    [
        b"cos\nsystem\n(S'touch ran'\ntR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x09touch ran\x85R.",
        b"(ios\nsystem\n.",
        b"\x80\x02cbuiltins\nexec\nX\x01\x00\x00\x001\x85\x81.",
        b"Pid\n.",
        b"]Q.",
    ],
)
def test_no_operation_of_pickle_runs_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    """Each way in which a pickle can call something."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pickle"
    path.write_bytes(body)

    assert "is damaged, or no memory snapshot" in refuse(path)

    assert [each.name for each in tmp_path.iterdir()] == ["evil.pickle"]


def test_files_of_other_kinds_and_cut_anywhere_are_refused(
    tmp_path: Path, written: tuple[Path, AllocatorTrace]
) -> None:
    """Whatever they are, and wherever they end."""
    whole = written[0].read_bytes()
    path = tmp_path / "cut.pickle"
    parts = (whole[:length] for length in range(0, len(whole), 97))
    for body in (b"PK\x03\x04zip", b"{}", b"hello", b"\x1f\x8b", b"\x80\x04", *parts):
        path.write_bytes(body)
        assert "is damaged, or no memory snapshot" in refuse(path)


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({"a": 1}, "is damaged, or no memory snapshot of PyTorch's (KeyError: 'device_traces')"),
        ([], "is damaged, or no memory snapshot of PyTorch's (TypeError"),
        ({"segments": [], "device_traces": []}, "holds no events: record a history before"),
        ({"segments": [], "device_traces": [[], []]}, "holds no events: record a history"),
    ],
)
def test_other_things_are_refused(tmp_path: Path, held: Any, said: str) -> None:
    """What is no snapshot, and snapshots without a history."""
    path = tmp_path / "other.pickle"
    path.write_bytes(pickle.dumps(held))

    assert said in refuse(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """And so are a folder, and a pipe, which would be waited for without end."""
    os.mkfifo(tmp_path / "pipe")

    assert "can't be read: No such file" in refuse(tmp_path / "missing")
    assert "is no regular file" in refuse(tmp_path)
    assert "is no regular file" in refuse(tmp_path / "pipe")


def test_too_large_a_file_is_refused(tmp_path: Path) -> None:
    """Before it is read."""
    path = tmp_path / "large.pickle"
    with path.open("wb") as file:
        file.truncate((2 << 30) + 1)

    assert refuse(path) == " holds more than 2 GiB: record fewer events (max_entries)"


# Not "r", an index into the memo: pickle takes as much memory as that says.
@given(place=st.integers(0, 1 << 20), value=st.integers(0, 255).filter(lambda n: n != ord("r")))
@example(place=0, value=0)
def test_a_changed_byte_is_read_or_refused(
    written: tuple[Path, AllocatorTrace], place: int, value: int
) -> None:
    """Nothing else comes out of it."""
    path, _ = written
    body = bytearray(path.read_bytes())
    body[place % len(body)] = value
    other = path.with_name("changed.pickle")
    other.write_bytes(bytes(body))

    with contextlib.suppress(FileError):
        assert gpumemwidget.load_trace(other).to_text()
