"""Traced cells in a real shell: what is traced, what is shown, and that the cell is its own."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from IPython.utils.capture import capture_output

import gpumemwidget
from gpumemwidget.errors import FileError
from gpumemwidget.model.cells import Span
from gpumemwidget.model.traces import CellTrace, DeviceTrace, HostLines, LineUse
from gpumemwidget.session import tracer
from gpumemwidget.tracing import device_trace
from tests.jupyter.machine import MIB, Machine


class Cells:
    """Runs cells, and keeps what was traced of the last one."""

    def __init__(self, shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shell = shell
        self.traces: list[CellTrace] = []
        self.text = ""
        describe = tracer.Tracer.describe

        def keep(*args: Any) -> CellTrace:
            trace = describe(*args)
            self.traces.append(trace)
            return trace

        monkeypatch.setattr(tracer.Tracer, "describe", keep)

    def run(self, source: str, *, store_history: bool = True) -> ExecutionResult:
        with capture_output() as shown:
            result = self.shell.run_cell(source, store_history=store_history)
        outputs = [output.data.get("text/plain", "") for output in shown.outputs]
        self.text = "\n".join([shown.stdout, shown.stderr, *outputs])
        return result

    @property
    def device(self) -> DeviceTrace:
        [device] = self.traces[-1].devices
        return device

    @property
    def host(self) -> HostLines:
        host = self.traces[-1].host
        assert host is not None
        return host

    def list_nets(self) -> dict[int, int]:
        """By line of the traced cell, its net change in MiB, rounded."""
        if self.traces[-1].devices:
            lines = self.device.units[0].lines
            nets = {line.line: round(line.use.net_bytes / MIB) for line in lines if line.use}
        else:
            nets = {line.line: round(line.net_bytes / MIB) for line in self.host.lines}
        return {line: n for line, n in nets.items() if n}


@pytest.fixture
def cells(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> Cells:
    # Each line is read, however slow that is on a busy machine.
    monkeypatch.setattr("gpumemwidget.tracing.line_watch._GRACE_NS", 10**12)
    shell.run_line_magic("load_ext", "gpumemwidget")
    return Cells(shell, monkeypatch)


@pytest.fixture
def gpu(make_machine: Callable[..., Machine]) -> Machine:
    """A machine with a simulated GPU, which has been used."""
    machine = make_machine()
    machine.allocator.touch(0)
    machine.shell.run_line_magic("load_ext", "gpumemwidget")
    return machine


@pytest.fixture
def gpu_cells(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> Cells:
    return Cells(gpu.shell, monkeypatch)


# -- The host --------------------------------------------------------------------------------------


def test_each_line_of_a_cell_is_told(cells: Cells) -> None:
    """By the numbers that the notebook shows, with the line of ``%%memtrace`` itself."""
    cells.run(
        "%%memtrace\n"
        f"a = bytearray({50 * MIB})\n"
        "def f(n):\n"
        "    return bytearray(n)\n"
        f"b = f({20 * MIB})\n"
        "for i in range(3):\n"
        f"    c = [f({MIB}) for _ in range(10)]\n"
    )

    assert cells.list_nets() == {2: 50, 4: 50, 7: -20}
    assert cells.host.lines[0].text == "%%memtrace"
    assert "a = bytearray(" in cells.text


def test_top_level_await_is_told(cells: Cells) -> None:
    """An async cell is read through its awaits."""
    cells.run(
        "%%memtrace\nimport asyncio\n"
        f"async def f():\n    await asyncio.sleep(0)\n    return bytearray({10 * MIB})\n"
        f"a, b = await asyncio.gather(f(), f())\nc = bytearray({5 * MIB})\n"
    )

    assert cells.list_nets() == {5: 20, 7: 5}


@pytest.mark.parametrize(("head", "line"), [("%%memtrace", 2), ("\n%%memtrace\n", 4)])
def test_what_a_cell_magic_takes_itself_stands_at_its_line(
    cells: Cells, head: str, line: int
) -> None:
    """Not at the first one, which is that of ``%%memtrace``."""
    kept = []
    cells.shell.register_magic_function(
        lambda _line, _cell: kept.append(bytearray(20 * MIB)), "cell", "keep"
    )

    cells.run(f"{head}\n%%keep\nx = 1\n")

    assert cells.list_nets() == {line: 20}


def test_a_cell_that_fails_is_told_up_to_there(cells: Cells) -> None:
    """Its error and traceback are its own; the report stands below."""
    result = cells.run(f"%%memtrace\na = bytearray({20 * MIB})\ndef f():\n    1 / 0\nf()\n")

    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert cells.list_nets() == {2: 20}
    assert cells.traces[-1].record.status == "error"
    assert "gpumemwidget" not in cells.text


def test_a_run_within_the_cell_belongs_to_the_line_that_runs_it(cells: Cells) -> None:
    """Its code is no line of this cell."""
    cells.run(
        "%%memtrace\nx = 1\n"
        f"r = get_ipython().run_cell('y = bytearray({10 * MIB})\\nz = bytearray({MIB})')\n"
    )

    assert cells.list_nets() == {3: 11}


@pytest.mark.parametrize(
    "where", ["session.tracer.describe_lines", "tracing.line_watch.LineWatch.start"]
)
def test_a_failure_of_ours_gives_the_plain_report(
    cells: Cells, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """And one line; the cell is as it would be, and so are those after it."""

    def fail(*_args: object, **_options: object) -> None:
        raise LookupError("of ours")

    with monkeypatch.context() as patch:
        patch.setattr(f"gpumemwidget.{where}", fail)
        result = cells.run("%%memtrace\nx = 41 + 1\nx")

    assert result.result == 42
    assert "Part of the trace is missing" in cells.text
    assert "LookupError: of ours" in cells.text
    assert "resident" in cells.text
    cells.run(f"%%memtrace\na = bytearray({20 * MIB})\n")
    assert cells.list_nets() == {2: 20}


# -- A GPU -----------------------------------------------------------------------------------------


def test_each_line_of_a_gpu_has_its_bytes(gpu_cells: Cells) -> None:
    """What it allocated, what is left of it, and what it had at the peak: to the byte."""
    gpu_cells.run(f"weights = gpu.allocate({500 * MIB})")

    gpu_cells.run(
        "%%memtrace\n"
        f"kept = [gpu.allocate((100 + n) * {MIB}) for n in range(5)]\n"
        "for each in kept[1:]:\n"
        "    gpu.free(each)\n"
        "def grow(n):\n"
        f"    return gpu.allocate(n * {MIB})\n"
        "more = grow(300)\n"
    )

    device = gpu_cells.device
    assert (device.device, device.peak_is) == ("cuda:0", "exact")
    uses = {line.line: line.use for line in device.units[0].lines if line.use is not None}
    # Blocks from 100 MiB on have segments of their own, whose sizes are even numbers of MiB.
    taken = [100 * MIB, 102 * MIB, 102 * MIB, 104 * MIB, 104 * MIB]
    assert uses == {
        2: LineUse(sum(taken), taken[0], sum(taken), sum(taken)),
        6: LineUse(300 * MIB, 300 * MIB, 0, 300 * MIB),
    }
    assert device.before.net_bytes == 500 * MIB
    assert device.allocated == Span(500 * MIB, 900 * MIB, 500 * MIB + sum(taken))
    assert gpu_cells.traces[-1].record.devices[0].allocated == device.allocated
    assert "host" in gpu_cells.text
    assert device.notes == ()


def test_a_ctrl_c_stops_the_report_in_one_line(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cell ends by it, as what waits behind it must not run; the next one has its report."""
    real = device_trace.describe_device

    def interrupted(*args: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return real(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(device_trace, "describe_device", interrupted)
        said = gpu.run("%%memtrace\nkept = gpu.allocate(1 << 20)")
    after = gpu.run("%%memtrace\nkept = gpu.allocate(1 << 20)")

    assert said.startswith("The report of %%memtrace was stopped.")
    assert "Error in callback" not in said
    assert "+1.00 MiB" in after
    assert [each.status for each in gpumemwidget.monitor().ledger] == ["ok"] * 2


def test_nothing_runs_between_traced_cells(gpu: Machine) -> None:
    """Nor after one that fails, nor when the extension goes."""
    for body in ("x = gpu.allocate(1)", "1 / 0", "raise KeyboardInterrupt"):
        gpu.run(f"%%memtrace\n{body}")
        assert not gpu.allocator.is_history_on

    gpu.run("%%memtrace\n%unload_ext gpumemwidget")

    assert not gpu.allocator.is_history_on


def test_a_history_that_the_cell_starts_is_its_own(gpu: Machine) -> None:
    """The report says that the trace ends there, and the cell's history goes on."""
    shown = gpu.say(
        "%%memtrace\n"
        "one = gpu.allocate(1 << 20)\n"
        "torch.cuda.memory._record_memory_history('all', context='all')\n"
        "two = gpu.allocate(2 << 20)\n"
    )

    assert "The cell started or stopped a memory history of its own" in shown
    assert gpu.allocator.is_history_on


@pytest.mark.parametrize(
    ("head", "line"),
    [("%%memtrace\n%%time", 3), ("%%time\n%%memtrace", 3), ("%%memtrace\n\n%%capture", 4)],
)
def test_the_body_of_another_magic_is_traced(gpu_cells: Cells, head: str, line: int) -> None:
    """Its lines are the cell's, though IPython counts the body of ``%%capture`` as the next one."""
    gpu_cells.run("y = 1")

    gpu_cells.run(f"{head}\nx = gpu.allocate({20 * MIB})\ny = gpu.allocate({10 * MIB})\n")

    assert gpu_cells.list_nets() == {line: 20, line + 1: 10}
    assert [unit.name for unit in gpu_cells.device.units] == ["In [2]"]


def test_a_snapshot_is_written(gpu_cells: Cells, tmp_path: Path) -> None:
    """Of PyTorch's own kind, which can be shown again."""
    gpu_cells.run(
        f"%%memtrace --snapshot '{tmp_path}/cell.pickle'\nheld = gpu.allocate({100 * MIB})\n"
    )

    assert gpumemwidget.load_trace(tmp_path / "cell.pickle").devices[0].allocated.after_bytes == (
        100 * MIB
    )
    gpu_cells.run(f"%memtrace --load '{tmp_path}/cell.pickle'")
    assert "100.00 MiB" in gpu_cells.text


def test_a_snapshot_that_could_not_be_written_is_told(
    gpu_cells: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of that name that was there before stays."""
    path = tmp_path / "cell.pickle"
    path.write_text("mine")

    def fail(*_: object) -> None:
        raise FileError("the disk is full")

    monkeypatch.setattr("gpumemwidget.backends.cuda.backend.write_snapshot", fail)

    gpu_cells.run(f"%%memtrace --force --snapshot '{path}'\nheld = gpu.allocate(1)\n")

    assert "the disk is full" in " ".join(gpu_cells.text.lower().split())
    assert path.read_text() == "mine"


def test_a_file_that_is_there_stops_the_cell(gpu_cells: Cells, tmp_path: Path) -> None:
    """Before it has run for an hour."""
    path = tmp_path / "cell.pickle"
    path.write_text("mine")

    result = gpu_cells.run(f"%%memtrace --snapshot {path}\nran = True\n")

    assert not result.success
    assert f"{path} is there already" in gpu_cells.text
    assert "ran" not in gpu_cells.shell.user_ns
    gpu_cells.run(f"%%memtrace --snapshot {path} --force\nran = True\n")
    assert gpumemwidget.load_trace(path).record.status == "ok"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--lines x", "argument --lines: "),
        ("--snapshot cell.json", "'cell.json' is not a name for a snapshot"),
        ("--load x.pickle", "--load goes into a cell of its own"),
        ("--device cuda:7", "no device 'cuda:7' here"),
    ],
)
def test_bad_options_are_refused_before_the_cell(
    gpu_cells: Cells, options: str, message: str
) -> None:
    """In one line."""
    result = gpu_cells.run(f"%%memtrace {options}\nran = True\n")

    assert not result.success
    assert message in gpu_cells.text
    assert len(gpu_cells.text.strip().splitlines()) == 1
    assert "ran" not in gpu_cells.shell.user_ns


@pytest.mark.parametrize(("first_mib", "peak_mib"), [(400, 400), (50, 300)])
def test_a_block_within_a_cell_leaves_the_cell_its_peaks(
    gpu_cells: Cells, first_mib: int, peak_mib: int
) -> None:
    """Both are exact: the block's from its own start on, and the cell's over both."""
    gpu_cells.run(
        f"import gpumemwidget\ngpu.free(gpu.allocate({first_mib * MIB}))\n"
        "with gpumemwidget.trace() as t:\n"
        f"    h = gpu.allocate({100 * MIB})\n    gpu.free(gpu.allocate({200 * MIB}))\n"
        "peak = t.record.devices[0].allocated.peak_bytes\n"
    )

    record = gpumemwidget.monitor().ledger.records[-1]
    assert gpu_cells.shell.user_ns["peak"] == 300 * MIB
    assert record.devices[0].allocated.peak_bytes == peak_mib * MIB
    assert record.devices[0].peak_is == "exact"
    assert gpu_cells.list_nets() == {4: 100}
    assert gpu_cells.device.units[0].name == "In [1]"
    assert gpu_cells.traces[-1].record.first_line == "with trace() in In [1], line 3"


def test_unloading_in_a_traced_cell_ends_the_trace(cells: Cells) -> None:
    """The cell runs on to its end, and nothing of ours is left."""
    result = cells.run(
        "%%memtrace\nimport sys\nx = 1\n%unload_ext gpumemwidget\nseen = sys.gettrace()\ny = 2\n"
    )

    assert result.success
    assert cells.shell.user_ns["y"] == 2
    assert cells.shell.user_ns["seen"] is None
