"""Processes that others start: ranks by launchers, workers by a DataLoader or multiprocessing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # no types are published with it
import pytest

import gpumemwidget
from gpumemwidget.model.processes import ProcessState
from gpumemwidget.remote.reader.recordings import Recordings
from gpumemwidget.widgets import processes_panel
from gpumemwidget.widgets.page import Message
from gpumemwidget.widgets.processes_panel import describe_processes
from tests.remote.programs import (
    ROOT,
    RUN,
    SLACK_BYTES,
    Ended,
    end_group,
    find_peak,
    run_python,
    start_python,
    wait_for,
    write_script,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TORCHRUN = ("-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node")

#: Each rank takes more than the one before, and prints what the kernel says of its peak.
TRAIN = """
import os, re, sys, time
import torch, torch.distributed as dist
import gpumemwidget

def train():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
    with gpumemwidget.span("spike"):
        held = torch.ones((rank + 1) << 24, dtype=torch.float32)
        with open("/proc/self/status") as status:
            highest = re.search(r"VmHWM:\\s+(\\d+) kB", status.read())
        del held
    os.write(1, f"rank {rank}: {int(highest[1]) * 1024}\\n".encode())
    dist.barrier()
    if os.environ.get("HANGS"):
        time.sleep(120)
    dist.destroy_process_group()

if __name__ == "__main__":
    train()
"""


def check_ranks(folder: Path, ended: Ended, n_ranks: int) -> tuple[ProcessState, ...]:
    """Each rank has a file, and in it the peak that it read itself."""
    assert ended.status == 0, ended.err[-3000:]
    read = {int(rank): int(peak) for rank, peak in re.findall(r"rank (\d): (\d+)", ended.out)}
    recordings = gpumemwidget.load(folder)
    states = recordings.processes
    assert [(state.info.role, state.info.number) for state in states] == [
        ("rank", rank) for rank in range(n_ranks)
    ]
    for state in states:
        spans = [span for span in state.spans if span.name == "spike"]
        (host,) = [each for each in spans[0].devices if each.device == "host"]
        recorded = host.reserved.peak_bytes or 0
        assert abs(recorded - read[state.info.number or 0]) < SLACK_BYTES
        assert host.peak_is == "exact"
        assert (find_peak(state).reserved_bytes or 0) >= recorded
        assert state.status == "ended"
    assert "rank 1" in recordings.report().text
    return states


def count_steps(state: ProcessState) -> int:
    return sum(span.n_spans for span in state.spans if "step" in span.name)


def test_torchrun(tmp_path: Path) -> None:
    """Ranks share a new folder; each sums itself up in one line."""
    write_script(tmp_path, TRAIN)

    ended = run_python(tmp_path, *TORCHRUN, 2, *RUN, "train.py", timeout_s=150)

    (folder,) = tmp_path.glob("train-*.gpumem")
    states = check_ranks(folder, ended, 2)
    # From the start to the first, from step to step, and what is after the last.
    assert [count_steps(state) for state in states] == [4] * 2
    summary = r"^rank \d: peak .* resident\. gpumemwidget\.load\('train-.*\.gpumem'\) opens it\.$"
    assert len(re.findall(summary, ended.err, re.MULTILINE)) == 2


def test_a_rank_that_hangs_and_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its row, which says since when it is silent, and then that it is lost."""
    monkeypatch.setattr(processes_panel, "_SILENT_S", 4.0)
    write_script(tmp_path, TRAIN)
    folder = tmp_path / "records"
    process = start_python(
        tmp_path, *TORCHRUN, 2, *RUN, "--to", folder, "train.py", env={"HANGS": "1"}
    )
    ranks: tuple[ProcessState, ...] = ()
    try:
        wait_for(lambda: len(list(folder.glob("*rank*.jsonl"))) == 2, timeout_s=60)
        recordings = gpumemwidget.load(folder)
        wait_for(lambda: len(recordings.update().processes) == 2)
        wait_for(
            lambda: all(
                "spike" in {span.name for span in state.spans}
                for state in recordings.update().processes
            ),
            timeout_s=60,
        )
        ranks = recordings.processes
        os.kill(ranks[1].info.pid, signal.SIGSTOP)
        wait_for(lambda: psutil.Process(ranks[1].info.pid).status() == psutil.STATUS_STOPPED)
        # All that it has recorded until then is in its file.
        stopped_at = time.time()
        (_, before) = recordings.update().processes
        wait_for(lambda: list_rows(recordings)[1]["silent_since"] is not None)
        first, second = list_rows(recordings)
        (goes_on, stands) = recordings.processes
        os.kill(ranks[1].info.pid, signal.SIGCONT)
        wait_for(lambda: list_rows(recordings)[1]["silent_since"] is None)
        os.kill(ranks[1].info.pid, signal.SIGKILL)
        wait_for(lambda: recordings.update().processes[1].status == "lost")
    finally:
        # torchrun starts each rank in a group of its own.
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.info.pid, signal.SIGKILL)
        end_group(process)

    assert (first["name"], first["status"], first["silent_since"]) == ("rank 0", "running", None)
    assert (second["name"], second["status"]) == ("rank 1", "running")
    assert second["silent_since"] == before.info.started_at + before.heard_s
    assert stopped_at - 4 < second["silent_since"] <= stopped_at
    assert stands == before
    assert goes_on.info.started_at + goes_on.heard_s > stopped_at
    assert recordings.processes[1].spans[: len(before.spans)] == before.spans
    assert "rank 1: the recording stops" in recordings.report().text


def list_rows(recordings: Recordings) -> list[Message]:
    """Return the rows that the Processes tab has of the processes, as of now."""
    states = recordings.update().processes
    shown = describe_processes(states, find_line=lambda *_: [], wall_s=time.time())
    (host,) = shown["hosts"]
    rows: list[Message] = host["rows"]
    return rows


NOTEBOOK = """
import os
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="nocolor")
shell.run_cell("%load_ext gpumemwidget")
shell.run_cell("import train, gpumemwidget, accelerate")
shell.run_cell('''
def recorded():
    with gpumemwidget.record("records"):
        train.train()
accelerate.notebook_launcher(recorded, (), num_processes=2, use_port="29533")
''').raise_error()
"""


def test_a_launcher_in_a_notebook(tmp_path: Path) -> None:
    """Forked from a notebook with the extension, each rank records itself with ``record()``."""
    pytest.importorskip("accelerate")
    write_script(tmp_path, TRAIN)
    write_script(tmp_path, NOTEBOOK, "notebook.py")

    ended = run_python(
        tmp_path, "notebook.py", timeout_s=60, env={"IPYTHONDIR": str(tmp_path / "ipython")}
    )

    check_ranks(tmp_path / "records", ended, 2)


WORKERS = """
import multiprocessing, sys
import torch, gpumemwidget
from torch.utils.data import DataLoader

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    dataset = [torch.zeros(4)] * 8
{example}
    child.start()
    child.join()
    assert len(list(loader)) == 8
"""


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_the_documented_workers(how: str, tmp_path: Path) -> None:
    """A DataLoader's workers and a child record themselves beside the program."""
    page = (ROOT / "docs" / "scripts.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(def record_worker.*?)^```$", page, re.M | re.DOTALL)
    write_script(tmp_path, WORKERS.format(example=example))

    ended = run_python(tmp_path, *RUN, "--to", "runs", "train.py", how, timeout_s=100)

    assert ended.status == 0, ended.err[-3000:]
    states = gpumemwidget.load(tmp_path / "runs").processes
    pids = {state.info.pid for state in states}
    assert [state.status for state in states] == ["ended"] * 4
    assert len(pids) == 4
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == sorted(f"train-{socket.gethostname()}-{pid}.gpumem.jsonl" for pid in pids)
    parts = [span.number for state in states for span in state.spans if span.name == "part"]
    assert parts == [1]
