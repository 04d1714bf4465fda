"""Simulated GPUs and recordings in the place of this machine's, as docs/testing.md shows them."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

import gpumemwidget
from gpumemwidget.backends.hardware import detect_hardware
from gpumemwidget.errors import BadInputError
from gpumemwidget.model.devices import DeviceInfo, Reading
from gpumemwidget.testing import (
    DeviceFullError,
    Recording,
    replay,
    simulate_gpus,
)
from gpumemwidget.testing.recording import Event

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


def test_the_documented_notebook(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells allocate on simulated GPUs, and the report has their lines and peaks."""
    load, trace, others, *_ = read_examples()

    loaded = run(shell, capsys, load)
    with shell.user_ns["gpus"]:
        report = run(shell, capsys, trace)
        stat = run(shell, capsys, others)

    assert "2 × Simulated GPU (80.00 GiB, once in use)" in loaded
    assert "700.00 MiB" in report  # The peak of cuda:0,
    assert "300.00 MiB" in report  # and that of cuda:1.
    assert "activations = gpus.allocate(200 << 20)" in report
    assert "GPU is lost" in stat


def test_the_documented_test(shell: InteractiveShell) -> None:
    """A user's own test of what a step takes."""
    *_, example, _ = read_examples()
    names = {"shell": shell, "gpumemwidget": gpumemwidget}

    exec(example, names)
    names["test_the_peak_of_a_step"]()


def test_the_documented_recording(
    shell: InteractiveShell,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A session that was recorded elsewhere is there at once, and goes by the clock."""
    *_, example = read_examples()
    shutil.copy(ROOT / "tests" / "data" / "h200-training.json.gz", tmp_path / "session.json.gz")
    monkeypatch.chdir(tmp_path)

    run(shell, capsys, example)

    with shell.user_ns["player"]:
        names = {report.info.device: report.info.name for report in gpumemwidget.stat()}
    assert names["cuda:0"] == "NVIDIA H200"


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
    """Simulated GPUs and recordings come before it is loaded; else they are refused."""
    shell.run_line_magic("load_ext", "gpumemwidget")

    with pytest.raises(BadInputError, match="unload_ext gpumemwidget first"):
        simulate_gpus()
    with pytest.raises(BadInputError, match="unload_ext gpumemwidget first"):
        replay(ROOT / "tests" / "data" / "h200-training.json.gz")


def test_a_recording_goes_on_by_hand(shell: InteractiveShell) -> None:
    """Without a clock, each event is asked for."""
    readings = [Reading("cuda:0", n_bytes, 5 * MIB) for n_bytes in (0, 3 * MIB, 0)]
    events = tuple(Event(float(time_s), (each,)) for time_s, each in enumerate(readings))
    with replay(Recording((DeviceInfo("cuda:0", "GPU", None),), (), events)) as player:
        shell.run_line_magic("load_ext", "gpumemwidget")
        hardware = gpumemwidget.monitor().hardware
        seen = []
        for _ in range(2):
            player.advance()
            seen.append([r.allocated_bytes for r in hardware.read() if r.device == "cuda:0"])
        shell.run_line_magic("unload_ext", "gpumemwidget")

    assert seen == [[3 * MIB], [0]]
