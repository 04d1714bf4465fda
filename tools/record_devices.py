"""Records whole devices: other processes come and go, pools, fragmentation, pinned memory, a limit.

    python -m tools.record_devices FOLDER [NAME]

Each session, or the one that is named, becomes ``FOLDER/NAME.json.gz``, a recording; the one of two
GPUs only where there are two. All of them run in processes of their own.
``FOLDER/NAME-moments.json`` names the events, and has what the driver and PyTorch themselves said
at each.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.gpu.processes import GIB, MIB, ROOT, Neighbour

_Stages = Iterator[str]


class Session:
    """What the stages of a session share."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.held: dict[str, Any] = {}

    def start(self, device: int = 0, *, is_child: bool = False) -> Neighbour:
        """Another process; it ends with the session at the latest."""
        return self._stack.enter_context(Neighbour(device, is_child=is_child))


def train(session: Session, devices: tuple[str, ...]) -> None:
    """A model, part by part on the devices, after a step; and a graph that is alive."""
    import torch
    from torch import nn

    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(
                nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048)).to(device)
                for device in devices
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part, device in zip(self.parts, devices, strict=True):
                x = part(x.to(device))
            return x

    model = Spread()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(257, 2048)).square().mean().backward()
        optimizer.step()
    session.held.update(model=model, optimizer=optimizer, out=model(torch.randn(257, 2048)))
    _synchronize()


def fragment(session: Session, device: str = "cuda:0") -> None:
    """Free blocks of many sizes beside blocks in use."""
    import torch

    sizes = [(700 * n, 300_001 * n, 5 * MIB + 1000 * n)[n % 3] for n in range(1, 60)]
    held = [torch.empty(n_bytes, dtype=torch.uint8, device=device) for n_bytes in sizes]
    held.append(torch.empty(90 * MIB, dtype=torch.uint8, device=device))
    session.held["kept"] = held[::4]


def capture(session: Session) -> None:
    """A CUDA graph with its pool."""
    import torch

    x = torch.ones(4 * MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        z = y + 1
        del y
    graph.replay()
    session.held.update(x=x, graph=graph, z=z)
    _synchronize()


def fill_pool(session: Session) -> None:
    """A ``MemPool`` with a tensor, and with free memory."""
    import torch

    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        session.held["pooled"] = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        torch.empty(50 * MIB, dtype=torch.uint8, device="cuda")
    session.held["pool"] = pool


def lend() -> None:
    """A block that is freed while another stream works on it."""
    import torch

    stream = torch.cuda.Stream()
    late = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_500_000_000)  # Cycles: most of a second.
        late.add_(1)
    late.record_stream(stream)


def play_one_gpu(session: Session) -> _Stages:
    """One GPU that is not ours alone."""
    yield "nothing is in use"
    other = session.start()
    other.take(3 * GIB)
    yield "another process is there"
    import torch

    session.held["x"] = torch.ones(1, device="cuda")
    yield "the first tensor"
    train(session, ("cuda:0",))
    yield "a model was trained"
    child = session.start(is_child=True)
    child.take(GIB)
    yield "a child is there"
    capture(session)
    yield "a CUDA graph"
    fill_pool(session)
    yield "a MemPool"
    fragment(session)
    yield "fragmented"
    lend()
    yield "a block that another stream still uses"
    _synchronize()
    session.held["pinned"] = torch.empty(100 * MIB, dtype=torch.uint8, pin_memory=True)
    torch.empty(50 * MIB, dtype=torch.uint8, pin_memory=True)
    yield "pinned memory"
    torch.cuda.set_per_process_memory_fraction(0.25, 0)
    yield "a limit"
    other.take(5 * GIB)
    yield "the other takes more"
    other.free()
    yield "the other has freed all"
    child.close()
    yield "the child has ended"
    torch.cuda.empty_cache()
    yield "the cache was emptied"
    for name in ("graph", "z", "pool", "pooled"):
        del session.held[name]
    gc.collect()
    yield "graph and pool are gone"
    torch.cuda.empty_cache()
    yield "the cache was emptied again"
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    session.held.clear()
    gc.collect()
    other.close()
    yield "all was released"


def play_two_gpus(session: Session) -> _Stages:
    """Two GPUs: one is touched later, and others are on them."""
    yield "nothing is in use"
    other = session.start(1)
    other.take(2 * GIB)
    yield "another process is on the second"
    import torch

    session.held["y"] = torch.ones(1, device="cuda:1")
    yield "the second is touched"
    train(session, ("cuda:0", "cuda:1"))
    yield "a spread model was trained"
    children = [session.start(index, is_child=True) for index in range(2)]
    children[0].take(500 * MIB)
    children[1].take(700 * MIB)
    yield "a child on each"
    layer = torch.nn.Linear(4096, 4096).to("cuda:0")
    parallel = torch.nn.DataParallel(layer, device_ids=[0, 1])
    session.held["loss"] = parallel(torch.randn(64, 4096, device="cuda:0")).sum()
    session.held["parallel"] = parallel
    del layer, parallel
    _synchronize()
    yield "replicas of DataParallel"
    fragment(session, "cuda:1")
    yield "the second is fragmented"
    torch.cuda.set_per_process_memory_fraction(0.5, 1)
    yield "a limit on the second"
    other.free()
    children[1].close()
    yield "others have freed"
    torch.cuda.empty_cache()
    yield "the cache was emptied"
    session.held.clear()
    gc.collect()
    torch.cuda.empty_cache()
    yield "all was released"


def play_expandable(session: Session) -> _Stages:
    """Segments that grow."""
    import torch

    session.held["x"] = torch.ones(1, device="cuda")
    yield "the first tensor"
    train(session, ("cuda:0",))
    yield "a model was trained"
    fragment(session)
    yield "fragmented"
    other = session.start()
    other.take(GIB)
    yield "another process is there"
    torch.cuda.empty_cache()
    yield "the cache was emptied"
    session.held["more"] = torch.empty(33 * MIB, dtype=torch.uint8, device="cuda")
    yield "it has grown again"


SESSIONS: dict[str, Callable[[Session], _Stages]] = {
    "one-gpu": play_one_gpu,
    "two-gpus": play_two_gpus,
    "expandable": play_expandable,
}
_ENVIRON = {
    "one-gpu": {"CUDA_VISIBLE_DEVICES": "0"},
    "expandable": {
        "CUDA_VISIBLE_DEVICES": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    },
}


def record(name: str, folder: Path) -> None:
    """Play a session, and write down what stands after each stage."""
    from gpumemwidget.backends.driver.nvml import NvmlMonitor
    from gpumemwidget.backends.hardware import detect_hardware
    from tools.recordings import Recorder, save_recording

    # PyTorch is imported by a stage: until then nothing but the driver tells of the devices.
    hardware, monitor = detect_hardware(), NvmlMonitor()
    recorder = Recorder(hardware, about=_describe(name, monitor.list_infos()))
    recorder.tick()
    moments: list[dict[str, Any]] = []
    with ExitStack() as stack:
        session = Session(stack)
        for stage in SESSIONS[name](session):
            recorder.tick(with_segments=True)
            moments.append({"name": stage, "event": recorder.n_events - 1, **_read_truth(monitor)})
        recorder.tick()
        session.held.clear()
    save_recording(recorder.to_recording(), folder / f"{name}.json.gz")
    text = json.dumps({"own_pid": os.getpid(), "moments": moments}, indent=1)
    (folder / f"{name}-moments.json").write_text(text + "\n", encoding="utf-8")
    monitor.close()
    hardware.close()


def _describe(name: str, infos: Any) -> str:
    from importlib.metadata import version

    devices = ", ".join(info.name for info in infos)
    return f"{name.replace('-', ' ')}: {devices}, torch {version('torch')}"


def _read_truth(monitor: Any) -> dict[str, Any]:
    """What the driver and PyTorch say of the devices that CUDA shows, asked directly."""
    import pynvml

    pynvml.nvmlInit()
    nvml = {}
    for index in range(len(monitor.list_infos())):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        nvml[f"cuda:{index}"] = {
            "total_bytes": memory.total,
            "reserved_bytes": memory.reserved,
            "used_bytes": memory.used,
            "free_bytes": memory.free,
            "processes": [[each.pid, each.usedGpuMemory] for each in processes],
        }
    pynvml.nvmlShutdown()
    truth: dict[str, Any] = {"nvml": nvml, "torch": {}}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            if torch._C._cuda_hasPrimaryContext(index):
                stats = torch.cuda.memory_stats_as_nested_dict(index)
                truth["torch"][f"cuda:{index}"] = {
                    f"{key}_bytes": stats[f"{key}_bytes"]["all"]["current"]
                    for key in ("allocated", "reserved", "requested", "active", "inactive_split")
                }
        pinned = torch.cuda.memory.host_memory_stats()
        truth["pinned"] = {
            f"{key}_bytes": pinned.get(f"{key}_bytes.current") for key in ("active", "allocated")
        }
    return truth


def _synchronize() -> None:
    import torch

    for index in range(torch.cuda.device_count()):
        if torch._C._cuda_hasPrimaryContext(index):
            torch.cuda.synchronize(index)


def _count_gpus() -> int:
    import pynvml

    pynvml.nvmlInit()
    n_gpus: int = pynvml.nvmlDeviceGetCount()
    pynvml.nvmlShutdown()
    return n_gpus


def main(folder: Path) -> None:
    """Record all sessions."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SESSIONS:
        if name == "two-gpus" and _count_gpus() < 2:
            print(f"{name}: needs two GPUs")
            continue
        subprocess.run(
            [sys.executable, "-m", "tools.record_devices", str(folder.resolve()), name],
            cwd=ROOT,
            env={**os.environ, **_ENVIRON.get(name, {})},
            check=True,
        )
        print(f"{name}: {(folder / f'{name}.json.gz').stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    target, *chosen = sys.argv[1:]
    if chosen:
        record(chosen[0], Path(target))
    else:
        main(Path(target))
