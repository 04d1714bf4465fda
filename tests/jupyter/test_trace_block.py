"""``with gpumemwidget.trace()``: in scripts, threads and async code, and beside cells."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpumemwidget
from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.hardware import Hardware, keep_hardware, use_hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.errors import BadInputError, BusyError
from gpumemwidget.model.traces import NoteKind, TraceNote
from gpumemwidget.session import tracer
from gpumemwidget.session.tracer import Trace
from gpumemwidget.testing import SimulatedGpus, simulate_torch

MIB = 1 << 20


@pytest.fixture
def gpu() -> Iterator[SimulatedGpus]:
    """A simulated GPU in use, and no extension loaded."""
    allocator = SimulatedGpus(1)
    allocator.touch(0)
    hardware = Hardware([CudaBackend(simulate_torch(allocator)), HostBackend()])
    use_hardware(lambda: hardware)

    yield allocator

    use_hardware(None)
    hardware.close()


def _list_nets(trace: Trace) -> list[int]:
    """Of each line that moved something, its net change in MiB, rounded."""
    if trace.host is not None:
        return [n for line in trace.host.lines if (n := round(line.net_bytes / MIB))]
    [device] = trace.devices
    lines = device.units[0].lines
    return [n for line in lines if line.use and (n := round(line.use.net_bytes / MIB))]


# -- Scripts ---------------------------------------------------------------------------------------

_SCRIPT = """
import sys
import gpumemwidget

def work(n):
    return bytearray(n)

with gpumemwidget.trace() as t:
    a = work(20_000_000)
    b = [work(1_000_000) for _ in range(5)]
    del a

assert not {"IPython", "plotly", "torch", "anywidget"} & sys.modules.keys()
changes = {line.line: round(line.net_bytes / 1e6) for line in t.host.lines}
print({line: change for line, change in changes.items() if change})
print(t.record.devices[0].peak_is, t.record.status)
assert sys.gettrace() is None
"""


def test_a_script_needs_no_notebook(tmp_path: Path) -> None:
    """Nor IPython or plotly: the lines of the file that the block stands in are told."""
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)

    answer = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)

    assert answer.stderr == ""
    assert answer.stdout.splitlines() == ["{6: 25, 11: -20}", "exact ok"]


def test_it_is_shown_as_cells_are() -> None:
    """As text and static HTML; a figure is drawn of GPUs alone."""
    with gpumemwidget.trace() as t:
        kept = bytearray(20 * MIB)

    assert len(kept) == 20 * MIB
    assert "kept = bytearray(20 * MIB)" in t.to_text()
    assert "kept = bytearray(20 * MIB)" in t.to_html()
    with pytest.raises(BadInputError, match="no GPU was traced, and the host has no figure"):
        t.figure()
    assert repr(t) == t.to_text()
    assert t.record.first_line.startswith("with trace() in test_trace_block.py, line ")
    assert t.to_text().startswith(f"{t.record.first_line} · ok")


def test_a_snapshot_that_was_not_written_is_told(tmp_path: Path) -> None:
    """There is nothing to write where no GPU was traced."""
    with gpumemwidget.trace(snapshot=tmp_path / "x.pickle") as t:
        pass

    assert TraceNote(NoteKind.NO_SNAPSHOT) in t.trace.notes
    assert list(tmp_path.iterdir()) == []


def test_an_error_passes_through() -> None:
    """As it is, and with the lines up to it."""
    with pytest.raises(ZeroDivisionError) as caught, gpumemwidget.trace() as t:  # noqa: PT012 - it is about both lines
        kept = bytearray(20 * MIB)
        1 / 0  # noqa: B018 - meant to fail

    del kept
    assert [each.name for each in caught.traceback] == ["test_an_error_passes_through"]
    assert t.record.status == "error"
    assert _list_nets(t) == [20]


def test_threads_and_coroutines_have_blocks_too() -> None:
    """Of each the lines of its own thread are read."""
    seen: list[list[int]] = []

    def work() -> None:
        with gpumemwidget.trace() as t:
            kept = bytearray(20 * MIB)
        seen.append(_list_nets(t))
        del kept

    async def main() -> None:
        with gpumemwidget.trace() as t:
            first = bytearray(20 * MIB)
            await asyncio.sleep(0.001)
            second = bytearray(10 * MIB)
        seen.append(_list_nets(t))
        del first, second

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    asyncio.run(main())

    assert seen == [[20], [20, 10]]
    assert sys.gettrace() is None


def test_blocks_follow_each_other_but_do_not_nest() -> None:
    """A refused one leaves the outer one as it is."""
    with gpumemwidget.trace() as outer:
        first = bytearray(20 * MIB)
        with pytest.raises(BusyError, match="one at a time") as caught, gpumemwidget.trace():
            pass
        second = bytearray(10 * MIB)
    with gpumemwidget.trace() as after:
        third = bytearray(5 * MIB)

    assert _list_nets(outer) == [20, 10]
    assert _list_nets(after) == [5]
    assert len(caught.traceback) <= 2
    del first, second, third


def test_a_block_is_used_once() -> None:
    """And tells nothing before its end."""
    trace = gpumemwidget.trace()
    with trace:
        with pytest.raises(BadInputError, match="the block has not ended"):
            _ = trace.record
        assert repr(trace) == "a trace that has not ended"

    with pytest.raises(BadInputError, match="used already"), trace:
        pass


# -- A GPU -----------------------------------------------------------------------------------------


def test_a_gpu_s_peaks_are_exact_and_invisible(gpu: SimulatedGpus, tmp_path: Path) -> None:
    """The user's own peak goes on, also after the block."""
    gpu.free(gpu.allocate(300 * MIB))
    hardware = keep_hardware("traces")

    with gpumemwidget.trace(snapshot=tmp_path / "run.pickle") as t:
        held = gpu.allocate(100 * MIB)
        gpu.free(gpu.allocate(50 * MIB))

    [device] = t.devices
    [gpu_record, _] = t.record.devices
    assert device.device == "cuda:0"
    assert device.allocated == gpu_record.allocated
    assert device.allocated.peak_bytes == 150 * MIB
    assert t.record.devices[0].peak_is == "exact"
    assert _list_nets(t) == [100]
    assert hardware.read_as_user()[0].allocated_peak_bytes == 300 * MIB
    loaded = gpumemwidget.load_trace(tmp_path / "run.pickle")
    assert "<svg" in loaded.to_html()
    assert loaded.figure().data
    with pytest.raises(BadInputError, match="used already"), loaded:
        pass
    # The file of the outermost function: where several processes share the tests it is another.
    assert "test_trace_block.py" in [unit.name for unit in loaded.devices[0].units]
    assert not gpu.is_history_on
    gpu.free(held)


def test_a_device_can_be_chosen(gpu: SimulatedGpus) -> None:
    """The host beside a GPU, or one GPU."""
    with gpumemwidget.trace(device="host") as host:
        kept = bytearray(20 * MIB)
        gpu.free(gpu.allocate(50 * MIB))
    with gpumemwidget.trace(device="cuda:0") as cuda:
        gpu.free(gpu.allocate(50 * MIB))

    assert host.devices == ()
    assert _list_nets(host) == [20]
    assert [device.device for device in cuda.devices] == ["cuda:0"]
    del kept


def test_hardware_that_fails_leaves_no_trace_running(
    gpu: SimulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next block begins as ever, and what a block did is not lost."""

    def fail(*_args: object) -> None:
        raise OSError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(Hardware, "start_span", fail)
        with pytest.raises(OSError, match="gone"), gpumemwidget.trace():
            pass
    with monkeypatch.context() as patch:
        patch.setattr(Hardware, "read_exact", fail)
        with gpumemwidget.trace() as t:
            held = gpu.allocate(100 * MIB)

    assert t.trace.notes == (TraceNote(NoteKind.FAILED, "OSError: gone"),)
    assert t.record.devices[0].allocated.after_bytes is None
    assert _list_nets(t) == [100]
    gpu.free(held)


@pytest.mark.parametrize("name", ["prepare", "stop"])
def test_an_interrupt_does_not_leave_a_trace_running(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """At its beginning or at its end it waits until the trace has begun, or is over."""
    work = getattr(tracer.Tracer, name)

    def interrupt(self: tracer.Tracer) -> None:
        signal.raise_signal(signal.SIGINT)
        work(self)

    monkeypatch.setattr(tracer.Tracer, name, interrupt)
    trace = gpumemwidget.trace()
    reached = []
    with pytest.raises(KeyboardInterrupt), trace:
        reached.append(name)

    assert reached == ([] if name == "prepare" else [name])
    assert trace.record.status == ("interrupted" if name == "prepare" else "ok")
    assert not tracer._lock.locked()
