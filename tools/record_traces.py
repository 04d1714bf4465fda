"""Records what the allocator's history says of small cells, with the true counters beside it.

    python -m tools.record_traces FOLDER

Each cell becomes ``FOLDER/NAME.json.gz``, a recording; ``cells.json`` has what ran, and the
counters of requested bytes, which a recording has no place for.
"""

from __future__ import annotations

import gc
import json
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.hardware import Hardware
from tools.recordings import Recorder, save_recording

_MODEL = """\
import torch, torch.nn as nn
class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc = nn.Linear(d, 4 * d)
        self.proj = nn.Linear(4 * d, d)
    def forward(self, x):
        return x + self.proj(torch.relu(self.fc(x)))
class Net(nn.Module):
    def __init__(self, d, n):
        super().__init__()
        self.h = nn.ModuleList([Block(d) for _ in range(n)])
        self.head = nn.Linear(d, 10)
    def forward(self, x):
        for block in self.h:
            x = block(x)
        return self.head(x)
model = Net(256, 3).cuda()
opt = torch.optim.AdamW(model.parameters())
data = torch.randn(64, 256, device="cuda"); target = torch.randint(10, (64,), device="cuda")
def step(x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss
"""

#: What ran before the cell, and the cell.
CELLS: dict[str, tuple[str, str]] = {
    "tensors": (
        "",
        """\
a = torch.ones(1000, device="cuda")
b = torch.ones(1 << 20, device="cuda")
for i in range(3):
    c = torch.empty(300_000 + i, device="cuda")
    d = c * 2
    del c
e = [torch.zeros(513, device="cuda") for _ in range(5)]
big = torch.empty(19 * (1 << 20) + 5, dtype=torch.uint8, device="cuda")
del big
big = torch.empty(18 * (1 << 20) + 7, dtype=torch.uint8, device="cuda")
huge = torch.empty(100_000_001, dtype=torch.uint8, device="cuda")
del a, e
""",
    ),
    "training": (
        _MODEL,
        """\
for n in range(3):
    step(data, target)
loss = nn.functional.cross_entropy(model(data), target)
loss.backward()
g = torch.ones(64, 10, device="cuda")
y = model(data)
y.backward(g)
opt.step()
""",
    ),
    "checkpoint": (
        _MODEL,
        """\
from torch.utils.checkpoint import checkpoint
x = data.clone().requires_grad_()
for use_reentrant in (True, False):
    h = x
    for block in model.h:
        h = checkpoint(block, h, use_reentrant=use_reentrant)
    h.sum().backward()
""",
    ),
    "streams": (
        "",
        """\
s = torch.cuda.Stream()
x = torch.ones(1 << 22, device="cuda")
with torch.cuda.stream(s):
    y = x * 2
    z = torch.empty(1 << 20, device="cuda")
x.record_stream(s)
del x
w = torch.empty(1 << 22, device="cuda")
torch.cuda.synchronize()
v = torch.empty(1 << 22, device="cuda")
del y, z
u = torch.empty(1 << 20, device="cuda")
""",
    ),
    "empty_cache": (
        "",
        """\
x = torch.ones(1 << 24, device="cuda")
del x
torch.cuda.empty_cache()
y = torch.ones(1 << 22, device="cuda")
z = torch.ones(1 << 20, device="cuda")
""",
    ),
    "graph": (
        "",
        """\
x = torch.ones(1 << 20, device="cuda")
g = torch.cuda.CUDAGraph()
with torch.cuda.graph(g):
    y = x * 2
    z = y + 1
    del y
g.replay()
torch.cuda.synchronize()
w = z * 2
""",
    ),
    "ring": (
        "",
        """\
keep = []
for n in range(500):
    keep.append(torch.empty(1000 + n, device="cuda"))
    t = torch.empty(50000, device="cuda")
    del t
""",
    ),
    "oom": (
        "",
        """\
keep = [torch.empty(1 << 26, device="cuda") for _ in range(4)]
try:
    a = torch.empty(1 << 40, device="cuda")
except torch.OutOfMemoryError:
    pass
del keep[1]
more = torch.empty(1 << 41, device="cuda")
""",
    ),
    "expandable": (
        "",
        """\
x = [torch.empty(3_000_000 + i, device="cuda") for i in range(20)]
del x[3], x[5]
y = torch.empty(1 << 26, device="cuda")
z = torch.empty(100, device="cuda")
del y
torch.cuda.empty_cache()
w = torch.empty(1 << 23, device="cuda")
""",
    ),
    "roundup": (
        "",
        """\
a = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in (700, 1300, 70_001, 900_001)]
b = [torch.empty(n << 10, dtype=torch.uint8, device="cuda") for n in (1100, 2700, 5000, 70_000)]
del a[1], b[2]
c = torch.empty(4_800_000, dtype=torch.uint8, device="cuda")
""",
    ),
    "max_split": (
        "",
        """\
a = torch.empty(60 << 20, dtype=torch.uint8, device="cuda")
del a
b = torch.empty(45 << 20, dtype=torch.uint8, device="cuda")
c = torch.empty(15 << 20, dtype=torch.uint8, device="cuda")
del b
d = torch.empty(58 << 20, dtype=torch.uint8, device="cuda")
""",
    ),
}
#: The allocator's settings, of those that need some; afterwards they are plain again.
_SETTINGS = {
    "expandable": "expandable_segments:True",
    "roundup": "roundup_power2_divisions:4",
    "max_split": "max_split_size_mb:40",
}
_PLAIN = "expandable_segments:False,roundup_power2_divisions:1,max_split_size_mb:10000000"
_N_EVENTS = {"ring": 400}


def record(name: str, folder: Path) -> dict[str, Any]:
    """Run a cell and write its recording; what ran, and the counters that it does not hold."""
    before, source = CELLS[name]
    names: dict[str, Any] = {"torch": torch, "__name__": "__main__"}
    _compile(before, f"/tmp/ipykernel_1/before_{name}.py")(names)
    run = _compile(source, f"/tmp/ipykernel_1/{name}.py")
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    hardware = Hardware([CudaBackend(torch)])
    about = f"{name}, on one {torch.cuda.get_device_name()}, torch {torch.__version__}"
    recorder = Recorder(hardware, about=about)
    recorder.start_trace(n_events=_N_EVENTS.get(name, 100_000))
    requested = [_read_requested()]
    error = None
    try:
        run(names)
    except Exception as exc:  # noqa: BLE001 - one of the cells runs out of memory, to be recorded
        error = type(exc).__name__
    requested.append(_read_requested())
    recorder.end_trace()
    save_recording(recorder.to_recording(), folder / f"{name}.json.gz")
    hardware.close()
    names.clear()
    gc.collect()
    torch.cuda.empty_cache()
    return {
        "filename": f"/tmp/ipykernel_1/{name}.py",
        "source": source,
        "before_filename": f"/tmp/ipykernel_1/before_{name}.py",
        "before": before,
        "requested_bytes": dict(zip(("start", "end"), requested, strict=True)),
        "error": error,
    }


def _compile(source: str, filename: str) -> Callable[[dict[str, Any]], None]:
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    code = compile(source, filename, "exec")

    def run(names: dict[str, Any]) -> None:
        exec(code, names)

    return run


def _read_requested() -> int:
    stats = torch.cuda.memory_stats_as_nested_dict()
    value: int = stats["requested_bytes"]["all"]["current"]
    return value


def main(folder: Path) -> None:
    """Record all cells."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.cuda.init()
    torch.ones(1, device="cuda")
    cells = {}
    for name in CELLS:
        if name in _SETTINGS:
            torch._C._accelerator_setAllocatorSettings(_SETTINGS[name])
        cells[name] = record(name, folder)
        if name in _SETTINGS:
            torch._C._accelerator_setAllocatorSettings(_PLAIN)
    (folder / "cells.json").write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
