"""GPUs for the notebooks beside this file: this machine's, or what others have said.

Where there are no NVIDIA GPUs, or too few, the tensors of a notebook are ``meta`` tensors, which
take no memory, and what GPUs said while its cells ran on them is played: allocators, driver,
processes, and who owned what. The notebook's cells and gpumemwidget's own code are the same.

A recording is made by executing a notebook on a machine with GPUs, with the environment variable
``GPUMEMWIDGET_RECORD_TO`` set to a folder (``python -m tools.record_notebooks`` does that).
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from story import Story, describe_owners, drop_host, play, read_story

from gpumemwidget.backends.driver.nvml import NvmlMonitor
from gpumemwidget.ownership import account as entries
from gpumemwidget.session.session import current_session
from tools.recordings import Recorder, RecordingPlayer

with warnings.catch_warnings():
    # Of the abandoned package "pynvml", where somebody has it: torch imports what is called so.
    warnings.simplefilter("ignore", FutureWarning)
    import torch

__all__ = ["Gpus"]

_FOLDER = Path(__file__).parent / "recordings"
_RECORD_TO = "GPUMEMWIDGET_RECORD_TO"
_MIB = 1024**2

#: What each source calls a device's memory, as ``show`` has it.
_SOURCES = (
    "nvidia-smi, memory used",
    "nvidia-smi, this process",
    "torch.cuda.mem_get_info(), total - free",
    "torch.cuda.memory_reserved()",
    "torch.cuda.memory_allocated()",
    "  of that requested",
)
#: The bytes that each source gives, by device.
_Figures = dict[str, dict[str, int | None]]

#: A process that takes memory until its input ends.
_CHILD = """
import sys, torch
index, n_bytes = map(int, sys.argv[1:])
kept = torch.ones(n_bytes, dtype=torch.uint8, device=f"cuda:{index}")
torch.cuda.synchronize(index)
print("ready", flush=True)
sys.stdin.read()
"""


class Gpus:
    """The GPUs that a notebook works on.

    Args:
        story: the name of the recording that is played where there are too few GPUs.
        n: how many it needs.
    """

    def __init__(self, story: str, n: int = 1) -> None:
        self.n = n
        self.is_played = torch.cuda.device_count() < n
        self._story = story
        self._moments: list[dict[str, Any]] = []
        #: The figures that were shown last.
        self._last: _Figures = {}
        self._heard: dict[str, str] = {}
        self._recorder: Recorder | None = None
        self._children: list[subprocess.Popen[str]] = []
        if not self.is_played:
            # Torch would have to initialise CUDA to know.
            monitor = NvmlMonitor()
            names = [info.name for info in monitor.list_infos()[:n]]
            monitor.close()
            print(f"What follows is this machine's: {_join(names)}, torch {torch.__version__}.")
            return
        recorded = read_story(_FOLDER / f"{story}.json.gz")
        self._moments, self._heard = recorded.moments, recorded.heard
        self._player = RecordingPlayer(recorded.recording)
        play(self._player, self._find_moment)
        few = "is no NVIDIA GPU" if n == 1 else f"are fewer than {n} NVIDIA GPUs"
        print(f"There {few} on this machine. {recorded.recording.about}")
        print("The times, and the host's memory, are this machine's.")

    def device(self, index: int = 0) -> torch.device:
        """Where tensors go."""
        return torch.device("meta") if self.is_played else torch.device("cuda", index)

    def total_bytes(self, index: int = 0) -> int:
        """What a device has in all, as its driver says."""
        for report in current_session().monitor.hardware.read_devices():
            if report.info.device == f"cuda:{index}":
                use = report.use
                total = report.info.total_bytes if use is None else use.total_bytes
                return total or 0
        raise ValueError(f"there is no cuda:{index}")

    def synchronize(self) -> None:
        """Wait until all that was asked of the GPUs is done."""
        if not self.is_played:
            for reading in current_session().monitor.hardware.read():
                if reading.device.startswith("cuda:"):
                    torch.cuda.synchronize(reading.device)

    def show(self, moment: str) -> None:
        """What each source says now.

        Args:
            moment: what has just been done; where a recording is played, it goes on to there.
        """
        if self.is_played:
            self._go_to(moment)
            figures = self._find_moment()["figures"]
        else:
            self.synchronize()
            figures = _read_figures(self.n)
            self._keep(moment, figures)
        _print(moment, figures, self._last)
        self._last = figures

    def read(self, device: str, source: str) -> int:
        """One of these figures, in bytes, at the moment that was shown last."""
        figures = self._find_moment()["figures"] if self.is_played else _read_figures(self.n)
        n_bytes: int | None = figures[device][source]
        if n_bytes is None:
            raise ValueError(f"{source} is not known of {device}")
        return n_bytes

    def hear(self, what: str, say: Callable[[], str]) -> str:
        """What GPUs made a function say: now, or when it was recorded.

        Args:
            what: its name in the recording.
            say: the function; it is not called where a recording is played.
        """
        if self.is_played:
            return self._heard[what]
        self._heard[what] = said = say()
        self._write()
        return said

    def run(self, what: str, code: str, **environ: str) -> str:
        """What a Python process prints that sees the GPUs: now, or when it was recorded."""

        def start() -> str:
            command = [sys.executable, "-W", "ignore", "-c", code]
            done = subprocess.run(
                command,
                env={**os.environ, **environ},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            return done.stdout if done.returncode == 0 else done.stdout + done.stderr

        return self.hear(what, start)

    def start_child(self, index: int, n_bytes: int) -> None:
        """Start a process below this one that takes so much of a device, until ``end_children``."""
        if self.is_played:
            return
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _CHILD, str(index), str(n_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._children.append(child)
        assert child.stdout is not None
        if child.stdout.readline() != "ready\n":
            raise RuntimeError("the child has failed")

    def end_children(self) -> None:
        """End all of them."""
        for child in self._children:
            child.communicate("")
        self._children.clear()

    # -- What is played ----------------------------------------------------------------------------

    def _find_moment(self) -> dict[str, Any]:
        position = self._player.position
        return [each for each in self._moments if each["event"] <= position][-1]

    def _go_to(self, moment: str) -> None:
        [event] = [each["event"] for each in self._moments if each["name"] == moment]
        position = self._player.position
        if event < position:
            raise ValueError(f"the recording has gone on from {moment!r}: restart the kernel")
        self._player.advance(event - position)

    # -- What is recorded --------------------------------------------------------------------------

    def _keep(self, name: str, figures: dict[str, Any]) -> None:
        """Write this moment down, where that was asked for."""
        if _RECORD_TO not in os.environ:
            return
        running = current_session()
        hardware = running.monitor.hardware
        if self._recorder is None:
            self._recorder = Recorder(hardware)
            self._recorder.tick()
        self._recorder.tick(with_segments=True)
        account = entries.take_memory_account(running.shell, hardware)
        names = entries.take_block_account(running.shell, hardware, budget_s=5.0)[1]
        self._moments.append(
            {
                "name": name,
                "event": self._recorder.n_events - 1,
                "figures": figures,
                **describe_owners(account, names),
            }
        )
        self._write()

    def _write(self) -> None:
        if self._recorder is None:
            return
        recording = drop_host(self._recorder.to_recording())
        names = _join([info.name for info in recording.visible])
        about = (
            f"What follows is played: recorded while these cells ran on {names}, "
            f"torch {torch.__version__}."
        )
        recording = dataclasses.replace(recording, about=about)
        path = Path(os.environ[_RECORD_TO]) / f"{self._story}.json.gz"
        Story(recording, self._moments, self._heard).write(path)


# -- The figures -----------------------------------------------------------------------------------


def _read_figures(n: int) -> _Figures:
    """What each source says of each device; of one that is not in use, the driver alone."""
    hardware = current_session().monitor.hardware
    used = _ask_nvidia_smi()
    figures: _Figures = {}
    for state in hardware.take_device_states(with_segments=False):
        device = state.info.device
        if not device.startswith("cuda:") or int(device[5:]) >= n:
            continue
        figures[device] = dict.fromkeys(_SOURCES)
        given = figures[device]
        if state.use is not None:
            given[_SOURCES[0]] = used.get(state.info.uuid or "", state.use.used_bytes)
        given[_SOURCES[1]] = next(
            (each.n_bytes for each in state.processes or () if each.relation == "own"), None
        )
        if state.reading is None:
            continue  # Asking torch might begin to use it.
        free, total = torch.cuda.mem_get_info(device)
        given[_SOURCES[2]] = total - free
        given[_SOURCES[3]] = torch.cuda.memory_reserved(device)
        given[_SOURCES[4]] = torch.cuda.memory_allocated(device)
        given[_SOURCES[5]] = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    return figures


def _ask_nvidia_smi() -> dict[str, int]:
    """The used memory by UUID, as the program itself prints it: in MiB."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    lines = (line.split(", ") for line in done.stdout.splitlines())
    return {line[0]: int(line[1]) * _MIB for line in lines if len(line) == 2 and line[1].isdigit()}


def _print(moment: str, figures: _Figures, before: _Figures) -> None:
    """The figures, and how they differ from those before."""
    width = max(map(len, _SOURCES))
    print(f"{moment:{width}}", *(f"{device:>12}{'change':>13}" for device in figures))
    for source in _SOURCES:
        words = []
        for device, amounts in figures.items():
            now, then = amounts[source], before.get(device, {}).get(source)
            change = 0 if now is None or then is None else now - then
            words.append(
                f"{_format_amount(now):>12}{_format_amount(change, '+') * bool(change):>13}"
            )
        print(f"{source:{width}}", *words)


def _format_amount(n_bytes: int | None, sign: str = "") -> str:
    """In MiB, as nvidia-smi has it; what is less, in bytes."""
    if n_bytes is None:
        return "—"
    if abs(n_bytes) < _MIB:
        return f"{n_bytes:{sign},} B"
    return f"{round(n_bytes / _MIB):{sign},} MiB"


def _join(names: list[str]) -> str:
    """``NVIDIA H100``, ``2 × NVIDIA H200``."""
    kinds = {name: names.count(name) for name in names}
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in kinds.items())
