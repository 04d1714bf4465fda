"""Processes beside the notebook's on real GPUs, by the driver: its children, and other kernels."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from gpumemwidget.backends.hardware import Hardware
from tests.gpu.conftest import N_GPUS, needs_two
from tests.gpu.processes import MIB, SHELL, run_program

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]


_WORKER = """
import os, signal, sys, time
signal.alarm(40)
import torch
rank = int(os.environ["LOCAL_RANK"])
x = torch.ones(200 << 20, dtype=torch.uint8, device=f"cuda:{rank}")
torch.cuda.synchronize(rank)
folder = sys.argv[1]
open(os.path.join(folder, f"ready{rank}"), "w").close()
until = time.monotonic() + 30
while not os.path.exists(os.path.join(folder, "done")) and time.monotonic() < until:
    time.sleep(0.05)
"""


def test_ranks_that_torchrun_starts_from_a_cell() -> None:
    """They are below what the cell has started, each with its bytes on its own device."""
    n_ranks = min(2, N_GPUS)

    found = run_program(
        f"WORKER = {_WORKER!r}\nN_RANKS = {n_ranks}\n"
        + SHELL
        + """
import tempfile
folder = tempfile.mkdtemp()
script = os.path.join(folder, "worker.py")
open(script, "w").write(WORKER)
shell.user_ns.update(folder=folder, script=script, n_ranks=N_RANKS)
cell('''
import subprocess, sys
agent = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone",
    f"--nproc-per-node={n_ranks}", script, folder], stdout=subprocess.DEVNULL)
''')
agent = shell.user_ns["agent"]
until = time.monotonic() + 40
while time.monotonic() < until and agent.poll() is None:
    if all(os.path.exists(os.path.join(folder, f"ready{rank}")) for rank in range(N_RANKS)):
        break
    hardware.list_children()
    time.sleep(0.1)
children = [[c.pid, c.parent_pid, c.name, c.devices] for c in hardware.list_children()]
states = [[s.info.device, [[p.pid, p.relation, p.n_bytes] for p in s.processes or ()]]
          for s in hardware.take_device_states() if s.info.device != "host"]
open(os.path.join(folder, "done"), "w").close()
try:
    status = agent.wait(20)
except Exception:
    agent.terminate()
    status = agent.wait(5)
print(json.dumps({"agent": agent.pid, "children": children, "states": states, "status": status}))
"""
    )

    assert found["status"] == 0
    ranks = {}
    parents = {pid: parent for pid, parent, _, _ in found["children"]}
    assert found["agent"] in parents
    for pid, parent_pid, _, devices in found["children"]:
        if devices:
            assert parent_pid == found["agent"]
            ((device, n_bytes),) = devices
            ranks[device] = (pid, n_bytes)
    assert sorted(ranks) == [f"cuda:{index}" for index in range(n_ranks)]
    listed = dict(found["states"])
    for device, (pid, n_bytes) in ranks.items():
        assert n_bytes > 200 * MIB
        assert [pid, "child", n_bytes] in listed[device]


@needs_two
def test_ranks_of_accelerates_notebook_launcher() -> None:
    """It starts its processes although we watch: CUDA is not begun; each is seen on its device."""
    pytest.importorskip("accelerate")

    found = run_program(
        SHELL
        + """
import threading
cell("import torch, accelerate")
cell("%memstat")
hardware.take_device_states()
monitor.want_samples(monitor)
seen, stop = {}, threading.Event()
def watch():
    while not stop.is_set():
        for child in hardware.list_children():
            for device, n_bytes in child.devices:
                seen[device] = max(seen.get(device, 0), n_bytes or 0)
        stop.wait(0.1)
thread = threading.Thread(target=watch)
thread.start()
error = cell('''
def train():
    import os, time, torch
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    x = torch.ones(200 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    time.sleep(2.5)
from accelerate import notebook_launcher
notebook_launcher(train, (), num_processes=2, use_port="29512")
''')
stop.set()
thread.join(5)
monitor.unwant_samples(monitor)
status = monitor.ledger[-1].status
print(json.dumps({"error": repr(error), "seen": seen, "status": status,
    "context": [torch.cuda.is_initialized() for torch in [sys.modules["torch"]]],
    "left": len([c for c in hardware.list_children() if c.devices])}))
""",
        NCCL_NVLS_ENABLE="0",
    )

    assert found["error"] == "None"
    assert found["status"] == "ok"
    assert sorted(found["seen"]) == ["cuda:0", "cuda:1"]
    assert min(found["seen"].values()) > 200 * MIB
    assert found["context"] == [False]
    assert found["left"] == 0


_KERNEL = (
    "import sys, torch\n"
    "kept = torch.ones(256 << 18, device='cuda')\n"
    "torch.cuda.synchronize(); print(flush=True); sys.stdin.read()"
)


@pytest.fixture
def kernel() -> Iterator[str]:
    """The id of a kernel that has 256 MiB on the first GPU."""
    command = [sys.executable, "-c", _KERNEL, "-f", "/run/user/kernel-6f0e-aa.json"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        yield "6f0e-aa"
        process.stdin.close()
        process.wait()


def test_a_kernels_memory_is_told(kernel: str, hardware: Hardware) -> None:
    """With its CUDA context, beside what PyTorch has reserved; with certain pids alone."""
    kept = torch.zeros(1, device="cuda")

    listed = hardware.read_own_use("cuda:0")
    uses = [use for use in hardware.list_kernels() if use.kernel_id == kernel]

    if listed is None:
        # A container in which the driver's pids are not this machine's.
        assert uses == []
    else:
        [use] = uses
        assert use.device == "cuda:0"
        assert use.n_bytes is not None
        assert 256 * MIB < use.n_bytes < 2048 * MIB
    del kept
