"""Budgets in a shell, on a simulated GPU: what is said, what is marked, what is stopped."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import gpumemwidget
from gpumemwidget.backends.allocator import ReplayAllocator
from gpumemwidget.backends.cuda import CudaBackend
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.backends.simulated import simulate_torch
from gpumemwidget.devices import EVERY_GPU, Budget
from gpumemwidget.errors import BadInputError
from gpumemwidget.jupyter import extension, stops
from gpumemwidget.jupyter.extension import current_extension
from gpumemwidget.jupyter.stops import CellStops
from gpumemwidget.measure.budget import Budgets
from gpumemwidget.records import CellRecord, Reading, Sample

MIB = 1 << 20
GIB = 1 << 30

#: Waits as a person would: it ends by an interrupt, or tells that none came.
WAIT = "import time\ntime.sleep(20)\nmissed = True"


class Cells:
    """A shell with a simulated GPU."""

    def __init__(self, shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
        self.shell = shell
        self._capsys = capsys
        self.allocator = ReplayAllocator()
        self.allocator.touch(0)
        self.hardware = Hardware([CudaBackend(simulate_torch(self.allocator)), HostBackend()])
        shell.user_ns.update(gpu=self.allocator, missed=False)
        self.result: Any = None

    def run(self, source: str) -> str:
        """Run a cell; what it printed."""
        self._capsys.readouterr()
        self.result = self.shell.run_cell(source, store_history=True)
        out = self._capsys.readouterr()
        assert out.err == ""
        return out.out

    @property
    def last(self) -> CellRecord:
        return current_extension().monitor.ledger[-1]

    @property
    def stops(self) -> CellStops:
        found = current_extension()._events._stops
        assert found is not None
        return found

    @property
    def stopped_at(self) -> list[int | None]:
        """Of each recorded cell, what its first device had when it was stopped."""
        return [record.devices[0].stopped_at_bytes for record in current_extension().monitor.ledger]


@pytest.fixture
def cells(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Cells]:
    cells = Cells(shell, capsys)
    monkeypatch.setattr(extension, "detect_hardware", lambda: cells.hardware)
    cells.run("%load_ext gpumemwidget\nimport gpumemwidget")

    yield cells

    cells.run("%unload_ext gpumemwidget")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# -- What is said ----------------------------------------------------------------------------------


def test_a_budget_is_set_shown_and_taken_away(cells: Cells) -> None:
    assert cells.run("%membudget") == "membudget: no budget is set\n"
    assert cells.run("%membudget 10 GiB") == (
        "membudget: every GPU 10.00 GiB\n"
        "From the next cell on: the one that has more than 10.00 GiB allocated on any GPU is "
        "marked, and a line below it tells.\n"
    )
    assert cells.run("%membudget 5GiB --device cuda:0 --stop") == (
        "membudget: every GPU 10.00 GiB; cuda:0 5.00 GiB, which stops the cell\n"
        "From the next cell on: the one that has more than 5.00 GiB allocated on cuda:0 is "
        "interrupted.\n"
    )
    assert cells.run("%membudget --device cuda:0") == (
        "membudget: cuda:0 5.00 GiB, which stops the cell\n"
    )
    assert cells.run("%membudget off") == "membudget: no budget is set\n"
    assert cells.run("%membudget") == "membudget: no budget is set\n"


def test_what_stands_beyond_it_already_is_told(cells: Cells) -> None:
    cells.run("x = gpu.allocate(200 << 20)")

    said = cells.run("%membudget 100MiB")

    assert said.splitlines()[-1] == (
        "cuda:0 has 200.00 MiB allocated already: a cell counts once it rises above what stood at "
        "its start."
    )


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("0.8", "'0.8' has no unit"),
        ("10", "'10' has no unit"),
        ("10 B", "a budget of 10 bytes is less than any cell takes"),
        ("much", "'much' is no amount of memory"),
        ("-5GiB", "membudget: unrecognized arguments: -5GiB|expected|-5GiB"),
        ("10GiB --device cuda:9", "no device 'cuda:9' here: choose from cuda:0, host"),
        ("--stop", "--stop (stop=True) goes with an amount"),
        ("off --stop", "--stop (stop=True) goes with an amount"),
        ("9999GiB", "cuda:0 has 80.00 GiB, and 9.76 TiB is more: give less, or off"),
        ("9999GiB --device cuda:0", "cuda:0 has 80.00 GiB, and 9.76 TiB is more"),
        ("999999GiB --device host", "is more: give less, or off for no budget"),
    ],
)
def test_bad_input_is_refused_in_one_line(cells: Cells, line: str, cause: str) -> None:
    result = cells.shell.run_cell(f"%membudget {line}", store_history=True)

    assert not result.success
    assert type(result.error_in_exec).__name__ == "UsageError"
    assert any(each in str(result.error_in_exec) for each in cause.split("|"))
    assert "\n" not in str(result.error_in_exec)
    assert current_extension().monitor.budgets.table is None


def test_the_function_sets_the_same(cells: Cells) -> None:
    assert gpumemwidget.budget() == ()
    assert gpumemwidget.budget(10 * GIB) == (Budget(EVERY_GPU, 10 * GIB),)
    assert gpumemwidget.budget("20GiB", device="host", stop=True) == (
        Budget(EVERY_GPU, 10 * GIB),
        Budget("host", 20 * GIB, stops=True),
    )
    assert gpumemwidget.budget(device="cuda:0") == (Budget("cuda:0", 10 * GIB),)
    assert gpumemwidget.budget("off", device="host") == (Budget(EVERY_GPU, 10 * GIB),)
    assert gpumemwidget.budget("off") == ()


@pytest.mark.parametrize(
    ("amount", "cause"),
    [
        (1e10, "a float is no amount"),
        (True, "a bool is no amount"),
        (b"10GiB", "a bytes is no amount"),
        (10**25, "is more: give less"),
    ],
)
def test_the_function_refuses_what_is_no_amount(cells: Cells, amount: Any, cause: str) -> None:
    with pytest.raises(BadInputError, match=cause):
        gpumemwidget.budget(amount)


class Hostile(str):
    """Does not let itself be looked at."""

    __hash__ = None  # type: ignore[assignment]

    @property
    def __class__(self) -> Any:
        raise SystemExit

    def __eq__(self, other: object) -> bool:
        raise SystemExit

    def __repr__(self) -> str:
        raise SystemExit


def test_objects_of_the_users_are_not_asked_what_they_are(cells: Cells) -> None:
    """Neither for an amount nor for a device, and the same holds for whole devices."""
    with pytest.raises(BadInputError, match="a Hostile is no amount: give bytes as an int"):
        gpumemwidget.budget(Hostile("10GiB"))
    calls: list[Callable[[], object]] = [
        lambda: gpumemwidget.budget("10GiB", device=Hostile("cuda:0")),
        lambda: gpumemwidget.bridge(device=Hostile("cuda:0")),
        lambda: gpumemwidget.bridge().record(Hostile("cuda:0")),
    ]
    for call in calls:
        with pytest.raises(BadInputError) as refusal:
            call()
        assert str(refusal.value) == (
            "device is a name such as 'cuda:0', and not of type Hostile: %memstat lists them"
        )


def test_more_than_there_can_be_is_refused_where_no_device_tells_its_total() -> None:
    """An export's columns would not hold it."""
    budgets = Budgets()

    with pytest.raises(BadInputError, match="more than any device has"):
        budgets.set(10**25)

    assert budgets.table is None


# -- What is marked --------------------------------------------------------------------------------


def test_the_cell_that_crosses_it_is_told_by_its_peak(cells: Cells) -> None:
    """One clear line; not for the cells before it and after it, which stay within."""
    cells.run("%membudget 100MiB")
    before = cells.run("a = gpu.allocate(60 << 20)")
    crossing = cells.run("b = gpu.allocate(60 << 20)\ngpu.free(b)")
    after = cells.run("c = gpu.allocate(1 << 20)")

    assert (before, after) == ("", "")
    assert " ".join(crossing.split()) == (
        "cuda:0 went beyond its budget: 120.00 MiB allocated at the peak, 100.00 MiB allowed. "
        "%%memtrace above the cell tells which line took it; %membudget off ends the budget."
    )
    over = [record.devices[0].is_over_budget for record in current_extension().monitor.ledger]
    assert over == [False, False, False, True, False]


def test_the_ledger_and_the_line_show_the_mark(cells: Cells) -> None:
    cells.run("%membudget 100MiB")
    cells.run("%memtrace on")

    line = cells.run("b = gpu.allocate(120 << 20)")
    ledger = cells.run("%memledger --last 2")

    assert "! beyond its budget of 100.00 MiB" in line.splitlines()[0]
    assert line.splitlines()[1].startswith("cuda:0 went beyond its budget: 120.00 MiB")
    assert "! 120.00 MiB" in ledger
    assert "! beyond the budget that the cell had (%membudget)" in ledger


def test_the_report_of_a_trace_tells_it_once(cells: Cells) -> None:
    cells.run("%membudget 100MiB")

    said = cells.run("%%memtrace\nb = gpu.allocate(120 << 20)")

    assert said.count("went beyond its budget") == 1
    assert "! 120.00 MiB" in said


def test_a_report_of_another_device_keeps_the_line(cells: Cells) -> None:
    cells.run("%membudget 100MiB")

    said = cells.run("%%memtrace --device host\nb = gpu.allocate(120 << 20)")

    assert said.count("cuda:0 went beyond its budget") == 1


def test_a_budget_in_the_cells_own_line_is_for_the_next_one(cells: Cells) -> None:
    said = cells.run("%membudget 100MiB\nb = gpu.allocate(120 << 20)")

    assert "went beyond" not in said
    assert cells.last.devices[0].budget_bytes is None


def test_off_in_the_cells_own_line_counts_at_once(cells: Cells) -> None:
    cells.run("%membudget 100MiB --stop")

    said = cells.run("%membudget off\nb = gpu.allocate(120 << 20)\nimport time; time.sleep(0.1)")

    assert cells.result.success
    assert "went beyond" not in said
    assert cells.last.devices[0].budget_bytes is None


def test_without_stop_no_thread_runs_and_nothing_handles_interrupts(cells: Cells) -> None:
    cells.run("%membudget 100MiB")

    cells.run(
        "import signal, threading\n"
        "handler = signal.getsignal(signal.SIGINT)\n"
        "names = [each.name for each in threading.enumerate()]"
    )

    assert cells.shell.user_ns["handler"] is signal.default_int_handler
    assert not [each for each in cells.shell.user_ns["names"] if each.startswith("gpumem")]


# -- What is stopped -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        WAIT,
        "while True: pass",
        "import threading\nthreading.Event().wait(20)",
        "import threading\nother = threading.Thread(target=lambda: __import__('time').sleep(1))\n"
        "other.start()\nother.join(20)\nmissed = True",
        "import subprocess\nsubprocess.run(['sleep', '20'])\nmissed = True",
        "%time __import__('time').sleep(20)",
        "import asyncio\nawait asyncio.sleep(20)\nmissed = True",
        "async def rise():\n    import asyncio\n    await asyncio.gather(asyncio.sleep(20))\n"
        "await rise()\nmissed = True",
        "import asyncio\nasync def spin():\n    while True: await asyncio.sleep(0)\nawait spin()",
    ],
    ids=["sleep", "loop", "lock", "join", "process", "magic", "await", "gather", "spin"],
)
def test_the_cell_that_crosses_it_is_interrupted(cells: Cells, body: str) -> None:
    cells.run("%membudget 100MiB --stop")

    said = cells.run(f"b = gpu.allocate(120 << 20)\n{body}")

    assert isinstance(cells.result.error_in_exec, KeyboardInterrupt | asyncio.CancelledError)
    assert not cells.shell.user_ns["missed"]
    (gpu, _) = cells.last.devices
    assert (cells.last.status, gpu.budget_bytes, gpu.stopped_at_bytes) == (
        "interrupted",
        100 * MIB,
        120 * MIB,
    )
    assert "%membudget interrupted this cell: cuda:0 had 120.00 MiB allocated, 100.00" in said
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_cell_whose_loop_is_stuck_in_another_task_is_interrupted(cells: Cells) -> None:
    """The loop, which is the cell's own outside of a kernel, never has its turn to cancel it."""
    cells.run("%membudget 100MiB --stop")

    # IPython prints the error where the loop ends, not where the cell does.
    cells.shell.run_cell(
        "import asyncio\nb = gpu.allocate(120 << 20)\n"
        "async def compute():\n    while True: pass\n"
        "await asyncio.gather(compute())",
        store_history=True,
    )
    cells.shell.run_cell("import asyncio\nawait asyncio.sleep(0.05)", store_history=True)

    assert [record.status for record in current_extension().monitor.ledger][-2:] == [
        "interrupted",
        "ok",
    ]
    assert cells.stopped_at[-2:] == [120 * MIB, None]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_memory_that_another_thread_takes_stops_the_cell(cells: Cells) -> None:
    cells.run("%membudget 100MiB --stop")

    cells.run(
        "import threading\n"
        "threading.Thread(target=gpu.allocate, args=(120 << 20,)).start()\n" + WAIT
    )

    assert cells.stopped_at[-1] == 120 * MIB


def test_a_body_of_another_magic_is_stopped(cells: Cells) -> None:
    cells.run("%membudget 100MiB --stop")

    cells.run(f"%%capture\nb = gpu.allocate(120 << 20)\n{WAIT}")

    assert cells.stopped_at[-1] == 120 * MIB
    assert cells.last.status == "interrupted"
    assert not cells.shell.user_ns["missed"]


@pytest.mark.parametrize("magic", ["%%memtrace", "%%memtrace --no-live\n%%time"])
def test_a_traced_cell_is_stopped_and_has_its_report(cells: Cells, magic: str) -> None:
    """Within our own hooks at each line the signal is dropped, and comes again."""
    cells.run("%membudget 100MiB --stop")

    said = cells.run(
        f"{magic}\nb = gpu.allocate(120 << 20)\n"
        "def step():\n    a = 1\n    b = 2\n    return a + b\n"
        "while True:\n    for n in range(100):\n        step()"
    )

    assert cells.stopped_at[-1] == 120 * MIB
    assert "!! 120.00 MiB" in said
    assert said.count("%membudget interrupted this cell") == 1


def test_the_traceback_ends_in_the_users_line(cells: Cells) -> None:
    """As with the person's own interrupt."""
    cells.run("%membudget 100MiB --stop")

    cells.run("b = gpu.allocate(120 << 20)\nwhile True: pass")

    files = []
    traceback = cells.result.error_in_exec.__traceback__
    while traceback is not None:
        files.append(traceback.tb_frame.f_code.co_filename)
        traceback = traceback.tb_next
    assert not [name for name in files if "gpumemwidget/jupyter" in name]
    assert cells.result.error_in_exec.args == ()


def test_a_cell_that_catches_it_goes_on_and_is_only_marked(cells: Cells) -> None:
    """It is interrupted once."""
    cells.run("%membudget 100MiB --stop")

    said = cells.run(
        "import time\nb = gpu.allocate(120 << 20)\ncaught = 0\n"
        "for n in range(3):\n"
        "    try:\n        time.sleep(0.3)\n"
        "    except KeyboardInterrupt:\n        caught += 1\n"
        "c = gpu.allocate(60 << 20)"
    )

    assert cells.shell.user_ns["caught"] == 1
    assert (cells.last.status, cells.stopped_at[-1]) == ("ok", 120 * MIB)
    assert said.replace("\n", " ").strip() == (
        "%membudget interrupted this cell: cuda:0 had 120.00 MiB allocated, 100.00 MiB are "
        "allowed. The cell caught that and went on to 180.00 MiB at the peak."
    )


def test_a_peak_that_reads_as_what_stopped_the_cell_is_not_told_twice(cells: Cells) -> None:
    cells.run("%membudget 100MiB --stop")

    said = cells.run(
        "import time\nb = gpu.allocate(120 << 20)\n"
        "try:\n    time.sleep(20)\nexcept KeyboardInterrupt:\n    c = gpu.allocate(512)\n    raise"
    )

    assert cells.last.devices[0].allocated.peak_bytes == 120 * MIB + 512
    assert "had 120.00 MiB allocated, 100.00 MiB are allowed. Allow more" in " ".join(said.split())


def test_a_cell_that_makes_another_error_of_it_is_said_to(cells: Cells) -> None:
    cells.run("%membudget 100MiB --stop")

    said = cells.run(
        "import time\nb = gpu.allocate(120 << 20)\n"
        "try:\n    time.sleep(20)\nexcept KeyboardInterrupt:\n    raise ValueError('mine')"
    )

    assert (cells.last.status, cells.stopped_at[-1]) == ("error", 120 * MIB)
    assert " ".join(said.split()).endswith(
        "cuda:0 had 120.00 MiB allocated, 100.00 MiB are allowed. The cell ended in another error "
        "upon that."
    )


def test_a_cell_that_begins_beyond_it_goes_on_until_it_rises(cells: Cells) -> None:
    cells.run("b = gpu.allocate(120 << 20)")
    cells.run("%membudget 100MiB --stop")

    still = cells.run("import time; time.sleep(0.2)")
    cells.run(f"c = gpu.allocate(1 << 20)\n{WAIT}")

    assert still == ""
    assert cells.stopped_at[-2:] == [None, 121 * MIB]


def test_the_next_cell_is_not_stopped_for_the_one_before(cells: Cells) -> None:
    """However short the cells are, and though what stands is beyond the budget."""
    cells.run("%membudget 100MiB --stop")

    for number in range(40):
        cells.shell.run_cell(
            f"b = gpu.allocate({120 + number} << 20)\ngpu.free(b)", store_history=True
        )
        within = cells.shell.run_cell("import time\ntime.sleep(0.025)", store_history=True)

        assert within.success
        assert cells.last.devices[0].stopped_at_bytes is None


def test_a_persons_own_interrupt_is_passed_on(cells: Cells) -> None:
    cells.run("%membudget 100MiB --stop")

    cells.run("import signal\nsignal.raise_signal(signal.SIGINT)\nmissed = True")

    assert isinstance(cells.result.error_in_exec, KeyboardInterrupt)
    assert cells.last.status == "interrupted"
    assert cells.stopped_at[-1] is None
    assert not cells.shell.user_ns["missed"]


def test_a_persons_interrupt_in_the_hook_of_the_start_waits_for_the_cell(
    cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells.run("%membudget 100MiB --stop")
    real = cells.hardware.start_span

    def interrupted() -> tuple[Reading, ...]:
        signal.raise_signal(signal.SIGINT)
        return real()

    monkeypatch.setattr(cells.hardware, "start_span", interrupted)
    cells.run(WAIT)
    monkeypatch.undo()

    assert isinstance(cells.result.error_in_exec, KeyboardInterrupt)
    assert (cells.last.status, cells.stopped_at[-1]) == ("interrupted", None)


def test_a_persons_interrupt_is_passed_on_where_ours_is_dropped(cells: Cells) -> None:
    """As in a finalizer, where one of ours comes with every sample and is dropped."""
    cells.run("%membudget 100MiB --stop")

    cells.run(
        "import signal, time\nmet = []\n"
        "class Held:\n"
        "    def __del__(self):\n"
        "        gpu.allocate(120 << 20)\n"
        "        for n in range(5):\n"
        "            try:\n"
        "                time.sleep(0.1)\n"
        "                signal.raise_signal(signal.SIGINT)\n"
        "                met.append(False)\n"
        "            except KeyboardInterrupt:\n"
        "                met.append(True)\n"
        "held = Held()\ndel held"
    )

    # One may fall together with one of ours, which is dropped.
    assert len(cells.shell.user_ns["met"]) == 5
    assert any(cells.shell.user_ns["met"])


def test_a_handler_of_the_cell_gets_it_and_stays(cells: Cells) -> None:
    cells.run("%membudget 100MiB --stop")

    cells.run(
        "import signal, time\nseen = []\n"
        "old = signal.signal(signal.SIGINT, lambda *each: seen.append(1))\n"
        "b = gpu.allocate(120 << 20)\ntime.sleep(0.3)"
    )
    handler = signal.getsignal(signal.SIGINT)
    cells.run("signal.signal(signal.SIGINT, old)")
    restored = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    assert cells.shell.user_ns["seen"] == [1]
    assert getattr(handler, "__name__", "") == "<lambda>"
    assert restored is signal.default_int_handler


def test_a_handler_of_ours_that_a_cell_has_kept_passes_all_on(cells: Cells) -> None:
    cells.run("%membudget 100MiB --stop")
    cells.run("import signal\nkept = signal.getsignal(signal.SIGINT)")
    cells.run("%membudget off")
    cells.run("_ = signal.signal(signal.SIGINT, kept)")

    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)

    assert signal.getsignal(signal.SIGINT) is cells.shell.user_ns["kept"]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_handler_that_is_put_back_cells_later_is_no_chain(cells: Cells) -> None:
    cells.run("%membudget 100MiB --stop")
    cells.run("import signal")

    for _ in range(5):
        cells.run("old = signal.getsignal(signal.SIGINT)")
        cells.run("_ = signal.signal(signal.SIGINT, old)")

    handler: Any = cells.shell.user_ns["old"]
    assert handler.previous is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("action", ["SIG_IGN", "SIG_DFL"])
def test_nothing_is_sent_where_python_does_not_handle_it(cells: Cells, action: str) -> None:
    """The default action would end the kernel."""
    cells.run("%membudget 100MiB --stop")

    cells.run(
        f"import signal, time\nsignal.signal(signal.SIGINT, signal.{action})\n"
        "b = gpu.allocate(120 << 20)\ntime.sleep(0.2)\nreached = True"
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)

    assert cells.shell.user_ns["reached"]
    assert cells.stopped_at[-1] is None
    assert cells.last.devices[0].is_over_budget


def test_unloading_within_the_cell_takes_it_away(cells: Cells) -> None:
    cells.run("%membudget 100MiB --stop")

    cells.run(
        "%unload_ext gpumemwidget\nimport time\nb = gpu.allocate(120 << 20)\ntime.sleep(0.2)\n"
        "reached = True"
    )

    assert cells.shell.user_ns["reached"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_failing_read_is_told_once_and_stops_nothing(
    cells: Cells, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.run("%membudget 100MiB --stop")

    def fail(self: Hardware) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(Hardware, "read", fail)
    monkeypatch.setattr(cells.hardware, "read", lambda: fail(cells.hardware), raising=False)
    result = cells.shell.run_cell("import time; time.sleep(0.2)", store_history=True)

    assert result.success
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_forked_child_is_not_stopped(cells: Cells) -> None:
    cells.run("%membudget 100MiB --stop")

    cells.run(
        "import os, time\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    gpu.allocate(120 << 20); time.sleep(0.2); os._exit(7)\n"
        "code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])"
    )

    assert cells.shell.user_ns["code"] == 7
    assert cells.stopped_at[-1] is None


# -- The moments between ---------------------------------------------------------------------------


def _send_now(cells: Cells) -> None:
    """Another thread sees the cell beyond its budget, at this very moment."""
    watching = cells.stops
    sample = Sample(current_extension().monitor.clock.now(), cells.hardware.read())
    thread = threading.Thread(target=watching.look_at, args=(sample,))
    thread.start()
    thread.join()
    # A few lines of Python, in which a signal that has arrived is handled.
    for _ in range(1000):
        pass


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread looks by itself."""
    monkeypatch.setattr(stops.Sampler, "start", lambda _self: None)


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("event", ["pre_run_cell", "post_execute"])
def test_it_is_dropped_in_ipythons_own_code_around_the_cell(cells: Cells, event: str) -> None:
    """And what comes next is not met: the cell has ended meanwhile, or has not begun."""
    cells.run("%membudget 100MiB --stop")
    met = []

    def send(_info: object = None) -> None:
        cells.allocator.allocate(120 * MIB)
        _send_now(cells)
        met.append(cells.stops._sent)

    # At the start it comes behind ours.
    cells.shell.events.register(event, send)
    cells.run("reached = True")
    cells.shell.events.unregister(event, send)

    assert cells.shell.user_ns["reached"]
    assert cells.result.success
    assert cells.stopped_at[-1] is None
    assert met == [None]
    cells.run("import time; time.sleep(0.05)")
    assert cells.result.success


@pytest.mark.usefixtures("by_hand")
def test_it_is_taken_back_in_the_hook_of_the_cells_end(
    cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was sent just before, and arrives when the hook has begun."""
    cells.run("%membudget 100MiB --stop")
    cells.run("pass")
    end: Callable[[CellStops], None] = CellStops.end
    sent = []

    def send_and_end(self: CellStops) -> None:
        monkeypatch.setattr(stops, "find_handler", lambda: cells.shell.user_ns["handler"])
        _send_now(cells)
        sent.append(self._sent is not None)
        end(self)

    monkeypatch.setattr(CellStops, "end", send_and_end)
    started_s = time.monotonic()
    cells.run(
        "import signal\nb = gpu.allocate(120 << 20)\nhandler = signal.getsignal(signal.SIGINT)"
    )
    monkeypatch.setattr(CellStops, "end", end)
    cells.run("import time; time.sleep(0.1)")

    assert sent == [True]
    assert cells.result.success
    assert [record.status for record in current_extension().monitor.ledger][-2:] == ["ok", "ok"]
    assert cells.stopped_at[-2:] == [None, None]
    assert time.monotonic() - started_s < 5


@pytest.mark.usefixtures("by_hand")
def test_it_is_not_sent_while_a_hook_of_ours_holds_interrupts_back(cells: Cells) -> None:
    cells.run("%membudget 100MiB --stop")

    def hook() -> None:
        _send_now(cells)

    cells.shell.user_ns["hook"] = hook
    cells.run(
        "from gpumemwidget.jupyter.interrupts import run_uninterrupted\n"
        "b = gpu.allocate(120 << 20)\nrun_uninterrupted(hook)\nreached = True"
    )

    assert cells.result.success
    assert cells.shell.user_ns["reached"]
    assert cells.stops._sent is None


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("through", ["finalizer", "weak reference", "fork"])
def test_it_is_dropped_where_it_would_be_lost(
    cells: Cells, monkeypatch: pytest.MonkeyPatch, through: str
) -> None:
    """Python lets no exception out of these: it is sent again once they have returned."""
    cells.run("%membudget 100MiB --stop")
    ran = []

    def send() -> None:
        _send_now(cells)
        ran.append(True)

    class Finalized:
        def __del__(self) -> None:
            send()

    class Thing:
        pass

    def finish() -> None:
        if through == "finalizer":
            Finalized()
        elif through == "weak reference":
            thing = Thing()
            weakref.finalize(thing, send)
            del thing
        elif os.fork() == 0:
            os._exit(0)

    if through == "fork":
        if not hasattr(logging, "_releaseLock"):
            pytest.skip("nothing of logging's in Python runs around a fork here")
        lock = logging._lock  # type: ignore[attr-defined]

        class Lock:
            """Released by a function that logging has registered for forks."""

            def acquire(self) -> None:
                lock.acquire()

            def release(self) -> None:
                send()
                lock.release()

        monkeypatch.setattr(logging, "_lock", Lock())
    cells.shell.user_ns.update(finish=finish, again=lambda: _send_now(cells))

    cells.run("b = gpu.allocate(120 << 20)\nfinish()\nfirst = True\nagain()\nmissed = True")
    monkeypatch.undo()

    assert ran
    assert cells.shell.user_ns["first"]
    assert not cells.shell.user_ns["missed"]
    assert cells.stopped_at[-1] == 120 * MIB


@pytest.mark.usefixtures("by_hand")
def test_one_that_has_met_nothing_is_sent_again(
    cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at once: it may be on its way."""
    cells.run("%membudget 100MiB --stop")
    sent = []
    real = stops.send_interrupt

    def lose_the_first() -> None:
        sent.append(True)
        if len(sent) > 1:
            real()

    monkeypatch.setattr(stops, "send_interrupt", lose_the_first)
    cells.shell.user_ns["send"] = lambda: _send_now(cells)

    cells.run(
        "import time\nb = gpu.allocate(120 << 20)\nsend()\nsend()\nfirst = True\n"
        "time.sleep(0.03)\nsend()\nmissed = True"
    )

    assert cells.shell.user_ns["first"]
    assert len(sent) == 2
    assert not cells.shell.user_ns["missed"]
    assert cells.stopped_at[-1] == 120 * MIB


@pytest.mark.usefixtures("by_hand")
def test_a_second_one_that_comes_late_interrupts_no_second_time(cells: Cells) -> None:
    """Nor the cell after it; what a person sends later is met again."""
    cells.run("%membudget 100MiB --stop")
    cells.shell.user_ns.update(send=lambda: _send_now(cells))

    cells.run(
        "import signal, time\nb = gpu.allocate(120 << 20)\n"
        "try:\n    send()\nexcept KeyboardInterrupt:\n    signal.raise_signal(signal.SIGINT)\n"
        "once = True\ntime.sleep(0.06)\nsignal.raise_signal(signal.SIGINT)\nmissed = True"
    )

    assert cells.shell.user_ns["once"]
    assert not cells.shell.user_ns["missed"]
    assert isinstance(cells.result.error_in_exec, KeyboardInterrupt)


@pytest.mark.usefixtures("by_hand")
def test_it_is_dropped_while_the_cells_value_is_shown(cells: Cells) -> None:
    """There an interrupt would leave ipykernel's answer half made, for later cells to trip over."""
    cells.run("%membudget 100MiB --stop")
    sent = []

    class Value:
        def __repr__(self) -> str:
            _send_now(cells)
            sent.append(True)
            return "shown"

    cells.shell.user_ns["value"] = Value()

    said = cells.run("b = gpu.allocate(120 << 20)\nvalue")

    assert set(sent) == {True}
    assert "shown" in said
    assert (cells.last.status, cells.stopped_at[-1]) == ("ok", None)


@pytest.mark.usefixtures("by_hand")
def test_it_is_dropped_in_code_of_ours_and_sent_again(cells: Cells) -> None:
    cells.run("%membudget 100MiB --stop")
    folder = Path(gpumemwidget.__file__).parent
    ours = compile("send()\nfinished = True", str(folder / "ours.py"), "exec")
    cells.shell.user_ns.update(ours=ours, send=lambda: _send_now(cells))

    cells.run("b = gpu.allocate(120 << 20)\nexec(ours)\nfirst = finished\nsend()\nmissed = True")

    assert cells.shell.user_ns["first"]
    assert not cells.shell.user_ns["missed"]
    assert cells.stopped_at[-1] == 120 * MIB


@pytest.mark.usefixtures("by_hand")
def test_it_is_dropped_while_the_cells_own_traceback_is_shown(
    cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells.run("%membudget 100MiB --stop")
    sent = []

    def show(*_: object, **__: object) -> None:
        _send_now(cells)
        sent.append(True)

    monkeypatch.setattr(cells.shell, "showtraceback", show)

    cells.run("b = gpu.allocate(120 << 20)\n1 / 0")

    assert sent == [True]
    assert isinstance(cells.result.error_in_exec, ZeroDivisionError)
    assert (cells.last.status, cells.stopped_at[-1]) == ("error", None)
