"""Simulated GPUs in place of this machine's, as docs/testing.md shows them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import gpumemwidget
from gpumemwidget.backends.hardware import detect_hardware
from gpumemwidget.errors import BadInputError
from gpumemwidget.model.cells import Span
from gpumemwidget.report.cell import report_ledger
from gpumemwidget.testing import DeviceFullError, simulate_gpus
from gpumemwidget.testing.machine import SimulatedMachine

ROOT = Path(__file__).parents[2]
MIB, GIB = 1 << 20, 1 << 30


def read_examples() -> list[str]:
    """The code of the page, block by block."""
    text = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    return re.findall(r"^```i?python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(shell: InteractiveShell, capsys: pytest.CaptureFixture[str], source: str) -> str:
    """What a cell prints."""
    capsys.readouterr()
    done = shell.run_cell(source, store_history=True)
    done.raise_error()
    return capsys.readouterr().out


@contextmanager
def load_with_gpus(
    shell: InteractiveShell, n_devices: int = 1, total_bytes: int = 8 * GIB
) -> Iterator[SimulatedMachine]:
    """The extension loaded on simulated GPUs, which cells have as ``gpus``."""
    with simulate_gpus(n_devices, total_bytes=total_bytes) as gpus:
        shell.user_ns.update(gpus=gpus, gpumemwidget=gpumemwidget)
        shell.run_line_magic("load_ext", "gpumemwidget")
        yield gpus
        shell.run_line_magic("unload_ext", "gpumemwidget")


def test_the_documented_notebook(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells allocate on simulated GPUs, and the report has their lines and peaks."""
    load, trace, others, *_ = read_examples()

    loaded = run(shell, capsys, load)
    with shell.user_ns["gpus"]:
        report = run(shell, capsys, trace)
        stat = run(shell, capsys, others)

    assert "2 × Simulated GPU (80.00 GiB, from first use on)" in loaded
    assert "700.00 MiB" in report  # The peak of cuda:0,
    assert "300.00 MiB" in report  # and that of cuda:1.
    assert "activations = gpus.allocate(200 << 20)" in report
    assert "GPU is lost" in stat


def test_the_documented_test(shell: InteractiveShell) -> None:
    """A user's own test of what a step takes."""
    *_, example = read_examples()
    names = {"shell": shell, "gpumemwidget": gpumemwidget}

    exec(example, names)
    names["test_the_peak_of_a_step"]()


def test_each_loading_has_the_same_gpus() -> None:
    """What is allocated stands after hardware was closed, until this machine's own is back."""
    with simulate_gpus(2, total_bytes=8 * GIB) as gpus:
        gpus.allocate(100 * MIB)
        detect_hardware().close()
        again = detect_hardware()
        readings = {reading.device: reading.allocated_bytes for reading in again.read()}
        uses = {state.info.device: state.use for state in again.take_device_states()}
        again.close()
    after = detect_hardware()
    devices = [info.device for info in after.list_devices()]
    after.close()

    assert readings["cuda:0"] == 100 * MIB
    assert uses["cuda:1"].total_bytes == 8 * GIB
    assert "cuda:1" not in devices


def test_others_leave_less_room() -> None:
    """What another process takes can't be allocated, until it is gone."""
    with simulate_gpus(total_bytes=8 * GIB) as gpus:
        gpus.driver.set_process(4711, 6 * GIB)
        with pytest.raises(DeviceFullError, match="no room for 4294967296 bytes"):
            gpus.allocate(4 * GIB)
        with pytest.raises(BadInputError, match="others can't take"):
            gpus.driver.set_process(4712, 6 * GIB)
        gpus.driver.set_process(4711, 0)
        gpus.allocate(4 * GIB)

        assert dict(gpus.driver.list_processes("cuda:0"))[os.getpid()] > 4 * GIB


def test_a_loaded_extension_keeps_its_hardware(shell: InteractiveShell) -> None:
    """Simulated GPUs come before it is loaded; else they are refused."""
    shell.run_line_magic("load_ext", "gpumemwidget")

    with pytest.raises(BadInputError, match="unload_ext gpumemwidget first"):
        simulate_gpus()


def test_a_full_gpu_has_the_card_of_an_oom(shell: InteractiveShell) -> None:
    """So that it can be shown where there is no GPU."""
    with load_with_gpus(shell, 2):
        shell.run_cell("gpus.allocate(5 << 30, 1)", store_history=True)
        shell.run_cell("gpus.driver.library.set_use(0, 1 << 30, 1)", store_history=True)

        with capture_output() as output:
            shell.run_cell("gpus.allocate(3 << 30, 1)", store_history=True)

    shown = "\n".join(str(each.data.get("text/plain")) for each in output.outputs)
    assert "Out of memory on cuda:1 · 3.00 GiB requested" in shown
    assert re.search(r"unattributed +5\.00 GiB", shown)
    assert re.search(r"at most 1\.00 GiB +Empty the caches of other libraries", shown)
    assert "%memrelease --libraries" in shown


def test_memory_without_an_owner_has_one_name(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    """In each report that shows it: now, by variable and by device."""
    reports = ("%memstat", "%memvars", "%memstat --device")
    with load_with_gpus(shell):
        shell.run_cell("import torch; gpus.allocate(3 << 30)")

        shown = [run(shell, capsys, line) for line in reports]

    assert [bool(re.search(r"unattributed +3\.00 GiB", text)) for text in shown] == [True] * 3
    # Other tests of this process may have left tensors on the host that no variable leads to.
    assert not re.search(r"no variable +3\.00 GiB", "".join(shown))


def test_memory_that_sleeps_is_no_part_of_the_device(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has a row beside the parts; the card of an OOM says that it gives nothing."""
    with load_with_gpus(shell, 1, 80 * GIB):
        shell.run_cell("gpus.allocate(40 << 30); gpus.driver.sleep(38 << 30)")
        device = run(shell, capsys, "%memstat --device cuda:0")
        record = gpumemwidget.breakdown("cuda:0").record()
        shell.run_cell("gpus.allocate(60 << 30)", store_history=True)
        with capture_output() as output:
            shell.run_cell("gpus.allocate(30 << 30)", store_history=True)

    assert re.search(r"asleep +37\.50 GiB", device)
    assert [(part.key, part.n_bytes) for part in record.parts] == [
        ("rest", 5 * GIB // 2),
        ("free", 155 * GIB // 2),
    ]
    card = "\n".join(str(shown.data.get("text/plain")) for shown in output.outputs)
    assert re.search(r"this process +62\.50 GiB\n +free +17\.50 GiB", card)
    assert "At least 37.50 GiB of the reserved memory is asleep" in card


def test_a_gpu_that_shares_the_hosts_memory(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parts are the system's, and add up to all of it."""
    with simulate_gpus(1, total_bytes=80 * GIB) as gpus:
        gpus.driver.share(20 * GIB)
        shell.user_ns["gpus"] = gpus
        shell.run_line_magic("load_ext", "gpumemwidget")
        shell.run_cell("gpus.allocate(10 << 30)")
        device = run(shell, capsys, "%memstat --device cuda:0")
        record = gpumemwidget.breakdown("cuda:0").record()
        shell.run_line_magic("unload_ext", "gpumemwidget")

    parts = {part.key: part.n_bytes for part in record.parts}
    assert parts == {
        "allocated": 10 * GIB,
        "outside": GIB // 2,
        "unlisted": 20 * GIB,
        "free": 99 * GIB // 2,
    }
    assert (record.is_shared, record.doubts) == (True, ())
    assert re.search(r"host memory in use +20\.00 GiB", device)


def test_what_a_library_took_for_a_while_is_a_sampled_peak(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the report, in the line of each cell and in the ledger, where samples saw 64 MiB of it."""
    sources = [
        f"gpus.driver.library.set_use({n_bytes}); gpumemwidget.monitor().read_own_uses(); "
        "gpus.driver.library.set_use(0)"
        for n_bytes in (3 << 30, 63 << 20)
    ]
    with load_with_gpus(shell) as gpus:
        gpus.touch(0)
        reports = [run(shell, capsys, f"%%memtrace\n{source}") for source in sources]
        shell.run_line_magic("memtrace", "on")
        lines = [run(shell, capsys, source) for source in sources]
        ledger = run(shell, capsys, "%memledger")

    row = r"outside PyTorch +51\.20 MiB +51\.20 MiB +0 B +~ 3\.05 GiB +~ \+3\.00 GiB"
    line = "outside PyTorch 51.20 MiB (0 B), peak sampled 3.05 GiB"
    assert [bool(re.search(row, report)) for report in reports] == [True, False]
    assert "outside PyTorch" not in reports[1]
    assert [line in words for words in lines] == [True, False]
    assert len(re.findall(r"cuda:0 outside PyTorch +0 B +~ 3\.05 GiB", ledger)) == 2


def test_what_other_libraries_take_is_told_by_cell(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a GPU that PyTorch is not on; the driver is asked for nothing without a library."""
    monkeypatch.setitem(sys.modules, "faiss", ModuleType("faiss"))
    with load_with_gpus(shell, 2):
        shell.run_cell("gpus.allocate(1 << 30, 1)", store_history=True)
        shell.run_cell("gpus.driver.library.set_use(2 << 30, 1 << 30, 0)", store_history=True)
        shell.run_cell("gpus.driver.library.set_use(1 << 30, 0, 0)", store_history=True)
        shell.run_cell("gpus.driver.lose(0); gpus.allocate(1 << 30, 1)", store_history=True)
        records = gpumemwidget.monitor().ledger.records
        ledger = report_ledger(records, sort="change").text

    context_bytes = 8 * GIB // 160
    seen = [{cell.device: cell.outside for cell in record.devices} for record in records]
    assert seen[0]["cuda:1"] == Span(0, context_bytes, context_bytes)
    assert seen[1]["cuda:0"] == Span(0, context_bytes + 3 * GIB, context_bytes + 3 * GIB)
    assert seen[1]["cuda:1"] == Span(context_bytes, context_bytes, context_bytes)
    before_bytes = context_bytes + 3 * GIB
    assert seen[2]["cuda:0"] == Span(before_bytes, context_bytes + GIB, before_bytes)
    assert "cuda:0" not in seen[3]
    # What the allocator counts began at 0 in the cell that touched the GPU first.
    (first,) = [cell for cell in records[0].devices if cell.device == "cuda:1"]
    assert (first.num_ooms, first.allocated.change_bytes) == (0, GIB)
    assert re.search(r"\[2\].* cuda:0 outside PyTorch +\+3\.05 GiB", ledger)
    assert ledger.index("In [2]") < ledger.index("In [1]") < ledger.index("In [3]")
