"""Programs that are recorded: real processes, waited for with an end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gpumemwidget
from gpumemwidget.model.processes import DevicePeak, ProcessState
from gpumemwidget.remote.messages import decode
from gpumemwidget.remote.process_log import ProcessLog
from gpumemwidget.remote.reader.recordings import Recordings

ROOT = Path(__file__).parents[2]
RUN = ("-m", "gpumemwidget", "run")
#: The kernel counts resident pages in batches for each core: two readings differ by so much.
SLACK_BYTES = 1 << 20


@dataclass(frozen=True)
class Ended:
    """A program that has ended."""

    status: int
    out: str
    err: str


def write_script(folder: Path, source: str, name: str = "train.py") -> Path:
    """Write a program, and return its file."""
    path = folder / name
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    return path


def start_python(
    folder: Path, *arguments: object, env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a Python in a folder, in a group of processes of its own."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        | (env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_python(
    folder: Path, *arguments: object, timeout_s: float = 60, env: dict[str, str] | None = None
) -> Ended:
    """Run a Python in a folder; nothing of it is left afterwards."""
    process = start_python(folder, *arguments, env=env)
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        end_group(process)
    return Ended(process.returncode, out, err)


def end_group(process: subprocess.Popen[str]) -> None:
    """Kill a process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)


def wait_for(is_so: Callable[[], object], *, timeout_s: float = 40) -> None:
    """Wait until something is so; fail if it is not in time."""
    until_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until_s, "it did not come about in time"
        time.sleep(0.01)


def load_one(path: Path) -> ProcessState:
    """Return the one process of a recording."""
    (state,) = gpumemwidget.load(path).processes
    return state


def read_lines(lines: bytes) -> ProcessState:
    """Return the process that sent some lines and still runs."""
    log = ProcessLog()
    for line in lines.splitlines():
        log.take(decode(line))
    state = log.describe(is_alive=True)
    assert state is not None
    return state


def find_peak(state: ProcessState, device: str = "host") -> DevicePeak:
    """Return a process's peak on a device."""
    return next(peak for peak in state.peaks if peak.device == device)


def list_spans(recordings: Recordings | ProcessState) -> list[tuple[str, int | None, int]]:
    """Return name, number and count of the spans of the one process."""
    state = recordings.processes[0] if isinstance(recordings, Recordings) else recordings
    return [(span.name, span.number, span.n_spans) for span in state.spans]
