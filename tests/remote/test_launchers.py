"""Ranks that are started by torchrun, ``accelerate launch`` and ``notebook_launcher``."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

import gpumemwidget
from gpumemwidget.model.processes import ProcessState
from tests.remote.programs import (
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

#: Each rank takes more than the one before, and prints what the kernel tells it of its peak.
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
        told = host.reserved.peak_bytes or 0
        assert abs(told - read[state.info.number or 0]) < SLACK_BYTES
        assert host.peak_is == "exact"
        assert (find_peak(state).reserved_bytes or 0) >= told
        assert state.status == "ended"
    assert "rank 1" in recordings.report().text
    return states


def count_steps(state: ProcessState) -> int:
    return sum(span.n_spans for span in state.spans if "step" in span.name)


def test_torchrun(tmp_path: Path) -> None:
    """Four ranks share a new folder; each sums itself up in one line."""
    write_script(tmp_path, TRAIN)

    ended = run_python(tmp_path, *TORCHRUN, 4, *RUN, "train.py", timeout_s=150)

    (folder,) = tmp_path.glob("train-*.gpumem")
    states = check_ranks(folder, ended, 4)
    # From the start to the first, from step to step, and what is after the last.
    assert [count_steps(state) for state in states] == [4] * 4
    summary = r"^rank \d: peak .* resident\. gpumemwidget\.load\('train-.*\.gpumem'\) opens it\.$"
    assert len(re.findall(summary, ended.err, re.MULTILINE)) == 4


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    """Its record keeps what it had until then, and says that it was lost."""
    write_script(tmp_path, TRAIN)
    folder = tmp_path / "records"
    process = start_python(
        tmp_path, *TORCHRUN, 2, *RUN, "--to", folder, "train.py", env={"HANGS": "1"}
    )
    try:
        wait_for(lambda: len(list(folder.glob("*rank*.jsonl"))) == 2, timeout_s=60)
        recordings = gpumemwidget.load(folder)
        wait_for(
            lambda: all(
                "spike" in {span.name for span in state.spans}
                for state in recordings.update().processes
            ),
            timeout_s=60,
        )
        before = recordings.processes
        os.kill(before[1].info.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    finally:
        end_group(process)

    wait_for(lambda: recordings.update().processes[1].status == "lost")
    assert [state.status for state in before] == ["running", "running"]
    assert recordings.processes[1].spans[: len(before[1].spans)] == before[1].spans
    assert "rank 1: the recording stops" in recordings.report().text


def test_accelerate_launch(tmp_path: Path) -> None:
    """Its ranks are recorded as torchrun's."""
    pytest.importorskip("accelerate")
    write_script(tmp_path, TRAIN)
    # On CPUs alone accelerate asks for MPI; what it does on GPUs does without them as well.
    launch = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--module")

    ended = run_python(
        tmp_path,
        *launch,
        "gpumemwidget",
        "run",
        "--to",
        "records",
        "train.py",
        timeout_s=150,
        env={"HF_HOME": str(tmp_path)},
    )

    check_ranks(tmp_path / "records", ended, 2)


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
