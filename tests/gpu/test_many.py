"""Several GPUs: what is on each is told and released by itself, and none is touched by us."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.model.devices import LimitRequest
from gpumemwidget.model.ownership import DeviceAccount, MemoryAccount
from gpumemwidget.ownership.account import take_memory_account
from tests.gpu.conftest import N_GPUS, needs_two
from tests.gpu.processes import GIB, MIB, SHELL, Neighbour, run_program
from tests.gpu.test_breakdown import (
    check_against_driver,
    check_against_torch,
    sum_parts,
    take_breakdown,
)
from tests.ownership.notebook import Notebook

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]


def read_allocated() -> tuple[int, ...]:
    gc.collect()
    for index in range(N_GPUS):
        torch.cuda.synchronize(index)
    return tuple(torch.cuda.memory_allocated(index) for index in range(N_GPUS))


def take_account(notebook: Notebook) -> dict[str, DeviceAccount]:
    """The account of both GPUs: all that is allocated there, and nothing unknown."""
    before = read_allocated()
    current = torch.cuda.current_device()
    account: MemoryAccount = take_memory_account(notebook.shell, notebook.hardware, budget_s=20.0)
    assert read_allocated() == before
    assert torch.cuda.current_device() == current
    devices = {each.device: each for each in account.devices}
    for index, n_bytes in enumerate(before):
        owned = devices[f"cuda:{index}"].owned
        assert devices[f"cuda:{index}"].allocated_bytes == n_bytes
        assert sum(each.n_bytes for each in owned) == n_bytes
        assert dict(devices[f"cuda:{index}"].sum_kinds()).get("unknown", 0) == 0, owned
    return devices


def release(notebook: Notebook, *names: str, **options: bool) -> tuple[int, ...]:
    """Release; what went of each GPU is what was planned, workspaces beside it."""
    before = read_allocated()
    plan = dict(notebook.plan(*names, **options).frees_bytes.by_device)
    report = notebook.release(*names, **options)
    after = read_allocated()
    assert report.stopped is None
    freed = tuple(was - now for was, now in zip(before, after, strict=True))
    planned = tuple(plan.get(f"cuda:{index}", 0) for index in range(N_GPUS))
    if "cublas" in options:
        assert all(went >= told for went, told in zip(freed, planned, strict=True))
    else:
        assert freed == planned
    return freed


# -- What is on which device -----------------------------------------------------------------------

_SPREAD = """
import torch
from torch import nn
class Spread(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1024, 1024).to("cuda:0")
        self.second = nn.Linear(1024, 2048).to("cuda:1")
    def forward(self, x):
        return self.second(self.first(x.to("cuda:0")).relu().to("cuda:1"))
model = Spread()
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(64, 1024)
model(x).square().mean().backward()
optimizer.step()
"""
FIRST_BYTES = 4 * (1024 * 1024 + 1024)
SECOND_BYTES = 4 * (1024 * 2048 + 2048)


@needs_two
def test_a_spread_model(notebook: Notebook, hardware: Hardware, clean: None) -> None:
    """Parameters, gradients, states where they are; breakdowns of both; all is released."""
    before = read_allocated()
    notebook.run(_SPREAD)

    devices = take_account(notebook)

    for device, n_bytes in (("cuda:0", FIRST_BYTES), ("cuda:1", SECOND_BYTES)):
        kinds = dict(devices[device].sum_kinds())
        for kind, least_bytes in (
            ("parameter", n_bytes),
            ("gradient", n_bytes),
            ("optimizer state", 2 * n_bytes),
        ):
            # A block may be as much as 1 MiB bigger than what was asked for.
            assert least_bytes <= kinds[kind] < least_bytes + 3 * MIB, (device, kind)
    for index in range(2):
        breakdown = take_breakdown(hardware, f"cuda:{index}", devices[f"cuda:{index}"])
        check_against_torch(breakdown, index)
        check_against_driver(breakdown, index)
    freed = release(notebook, "model", "optimizer", cublas=True)
    assert freed[0] > 4 * FIRST_BYTES - 1
    assert freed[1] > 4 * SECOND_BYTES - 1
    assert read_allocated() == before


@needs_two
def test_a_dispatched_model(notebook: Notebook, clean: None) -> None:
    """What accelerate spreads over both, with its hooks: accounted to the byte, and released."""
    pytest.importorskip("accelerate")
    before = read_allocated()
    notebook.run(
        "import torch\n"
        "from torch import nn\n"
        "from accelerate import dispatch_model\n"
        "model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))\n"
        "model = dispatch_model(model, {'0': 0, '1': 0, '2': 1, '3': 1})\n"
        "with torch.no_grad():\n"
        "    y = model(torch.randn(16, 1024))"
    )
    assert notebook.ip.last_execution_result.success

    devices = take_account(notebook)

    for device in ("cuda:0", "cuda:1"):
        kinds = dict(devices[device].sum_kinds())
        assert 2 * FIRST_BYTES <= kinds["parameter"] < 2.04 * FIRST_BYTES
    freed = release(notebook, "model", "y", cublas=True)
    assert min(freed) >= 2 * FIRST_BYTES
    assert read_allocated() == before


@needs_two
def test_replicas_of_data_parallel(notebook: Notebook, clean: None) -> None:
    """While a graph holds the replicas they have owners; with it they go from both."""
    before = read_allocated()
    notebook.run(
        "import torch\n"
        "from torch import nn\n"
        "model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).cuda()\n"
        "parallel = nn.DataParallel(model, device_ids=[0, 1])\n"
        "x = torch.randn(64, 1024, device='cuda')\n"
        "loss = parallel(x).square().mean()"
    )
    assert notebook.ip.last_execution_result.success

    devices = take_account(notebook)

    second = dict(devices["cuda:1"].sum_kinds())
    # The replica's weights are no parameters, and nothing but the graph has them.
    assert second.get("saved for backward", 0) >= 4 * 1024 * 1024
    assert second.get("parameter", 0) == 0
    notebook.run("loss.backward()")
    devices = take_account(notebook)
    assert dict(devices["cuda:0"].sum_kinds())["gradient"] >= 2 * FIRST_BYTES
    assert "gradient" not in dict(devices["cuda:1"].sum_kinds())
    release(notebook, "model", "parallel", "x", "loss", cublas=True)
    assert read_allocated() == before


@needs_two
def test_looking_keeps_the_current_device(hardware: Hardware, clean: None) -> None:
    """Whichever it is, on this thread and on others, and what a thread asks for lands there."""
    kept = [torch.zeros(1, device=f"cuda:{index}") for index in range(2)]
    for index in (1, 0):
        torch.cuda.set_device(index)
        seen: list[int] = []

        def look(seen: list[int] = seen, other: str = f"cuda:{1 - index}") -> None:
            hardware.take_device_states()
            hardware.read()
            hardware.read_segments()
            hardware.empty_cache()
            hardware.set_limit(other, LimitRequest(12 * GIB))
            hardware.read_limits()
            hardware.set_limit(other, LimitRequest())
            seen.append(torch.cuda.current_device())

        look()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

        assert seen == [index, 0]
        assert torch.empty(1, device="cuda").device.index == index
    del kept


# -- A device that is not touched ------------------------------------------------------------------


@needs_two
def test_a_device_that_is_not_used_stays_untouched() -> None:
    """With only the second GPU in use nothing of ours makes a context on the first, the current."""
    found = run_program(
        SHELL
        + """
from tests.gpu.processes import read_nvml
before, _ = read_nvml(0)
cell("import torch")
import torch
none_yet = [torch.cuda.is_initialized()]
gpumemwidget.stat()
hardware.take_device_states()
none_yet.append(torch.cuda.is_initialized())
from gpumemwidget.device_parts import build_breakdown
errors = [repr(each) for each in (
    cell("model = torch.nn.Linear(1024, 1024, device='cuda:1')"),
    cell("x = torch.ones(64, 1024, device='cuda:1')\\nloss = model(x).sum()"),
    cell("loss.backward()"),
    cell("%memstat"), cell("%memstat --device cuda:0"), cell("%memvars"),
    cell("%memwhy model"), cell("%memledger"), cell("%memstat --device"),
) if each is not None]
monitor.want_samples(monitor)
time.sleep(0.5)
with gpumemwidget.trace() as t:
    y = torch.ones(1 << 20, device="cuda:1")
cell("from gpumemwidget import owners, variables\\nowners(); variables(); None")
states = {s.info.device: s for s in hardware.take_device_states()}
breakdowns = {name: build_breakdown(state) for name, state in states.items()}
cell("%memrelease x")
cell("torch.empty(1 << 50, dtype=torch.uint8, device='cuda:1')")
hardware.empty_cache()
monitor.unwant_samples(monitor)
after, pids = read_nvml(0)
current = torch.cuda.current_device()
ledger = [[d.device for d in each.devices] for each in monitor.ledger]
context = [torch._C._cuda_hasPrimaryContext(index) for index in range(2)]
print(json.dumps({
    "none_yet": none_yet, "errors": errors, "context": context, "current": current,
    "grown": after.used - before.used, "is_listed": os.getpid() in pids,
    "reading": states["cuda:0"].reading is None, "use": states["cuda:0"].use is not None,
    "sum": sum(part.n_bytes for part in breakdowns["cuda:0"].parts),
    "total": breakdowns["cuda:0"].total_bytes,
    "ledger": ledger[-1], "traced": [each.device for each in t.devices],
}))
"""
    )

    assert found["none_yet"] == [False, False]
    assert found["errors"] == []
    assert found["context"] == [False, True]
    assert found["current"] == 0
    assert abs(found["grown"]) <= MIB
    assert not found["is_listed"]
    assert found["reading"]
    assert found["use"]
    assert found["sum"] == found["total"] > 0
    assert found["ledger"] == ["cuda:1", "host"]
    assert found["traced"][0] == "cuda:1"
    assert "cuda:0" not in found["traced"]


@needs_two
def test_events_are_their_own_devices() -> None:
    """Whatever the current device is: peaks, lines, an OOM and its card are those of the second."""
    found = run_program(
        SHELL
        + """
import torch
cell("import torch; a = torch.ones(1 << 20, device='cuda:0'); b = torch.ones(1, device='cuda:1')")
from gpumemwidget.jupyter import outputs as cell_outputs
cards = []
show = cell_outputs.show_card
cell_outputs.show_card = lambda card, session: (cards.append(card), show(card, session))
cell("c = torch.empty(64 << 20, dtype=torch.uint8, device='cuda:1'); del c")
peaks = {d.device: d.allocated.rise_bytes for d in monitor.ledger[-1].devices}
cell('''with __import__("gpumemwidget").trace() as t:
    d = torch.empty(10 << 20, dtype=torch.uint8, device="cuda:1")
    e = torch.empty(20 << 20, dtype=torch.uint8, device="cuda:0")
    with torch.cuda.device(1):
        f = torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
''')
traced = {}
for device in shell.user_ns["t"].devices:
    for unit in device.units:
        for line in unit.lines:
            if line.use is not None:
                traced.setdefault(device.device, []).append([line.line, line.use.allocated_bytes])
error = cell("x = torch.empty(1 << 50, dtype=torch.uint8, device='cuda:1')")
ooms = {d.device: d.num_ooms for d in monitor.ledger[-1].devices}
print(json.dumps({
    "peaks": peaks, "traced": traced, "ooms": ooms, "error": type(error).__name__,
    "cards": [[card.event.device, card.event.allocated_bytes, card.event.device_total_bytes
               - (card.event.state.use.driver_bytes or 0)] for card in cards],
    "allocated": torch.cuda.memory_allocated(1), "current": torch.cuda.current_device(),
    "total": torch.cuda.mem_get_info(1)[1],
}))
"""
    )

    assert found["peaks"]["cuda:1"] == 64 * MIB
    assert found["peaks"]["cuda:0"] == 0
    assert sorted(n for _, n in found["traced"]["cuda:1"]) == [10 * MIB, 40 * MIB]
    assert [n for _, n in found["traced"]["cuda:0"]] == [20 * MIB]
    assert found["error"] == "OutOfMemoryError"
    assert found["ooms"]["cuda:1"] == 1
    assert found["ooms"]["cuda:0"] == 0
    assert found["cards"] == [["cuda:1", found["allocated"], found["total"]]]
    assert found["current"] == 0


_NAMES = """
import ctypes, json, os
driver = ctypes.CDLL("libcuda.so.1")
from gpumemwidget.backends.driver.nvml import NvmlMonitor
monitor = NvmlMonitor()
listed = {info.device: info.uuid for info in monitor.list_infos()}
uses = [monitor.read_use(device).total_bytes for device in listed]
count = ctypes.c_int(0)
if driver.cuInit(0) == 0:
    driver.cuDeviceGetCount(ctypes.byref(count))
shown = {}
for index in range(count.value):
    number, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    driver.cuDeviceGet(ctypes.byref(number), index)
    driver.cuDeviceGetUuid(ctypes.byref(uuid), number)
    text = bytes(uuid).hex()
    parts = (text[:8], text[8:12], text[12:16], text[16:20], text[20:])
    shown[f"cuda:{index}"] = "GPU-" + "-".join(parts)
print(json.dumps([listed, shown, uses]))
"""


@pytest.mark.parametrize(
    "visible", ["", "0", "1", "1,0", "0,0", "7", "-1", "uuid", "uuids", "short uuid", "1,gpu"]
)
def test_devices_are_those_that_cuda_shows(visible: str) -> None:
    """Told before CUDA is asked, under each ``CUDA_VISIBLE_DEVICES``, in CUDA's order."""
    uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(N_GPUS)]
    told = {
        "uuid": uuids[-1],
        "uuids": ",".join(reversed(uuids)),
        "short uuid": uuids[0][:12],
    }.get(visible, visible)

    listed, shown, uses = run_program(_NAMES, CUDA_VISIBLE_DEVICES=told)

    assert listed == shown
    assert len(uses) == len(shown)


@needs_two
def test_processes_are_on_their_own_device(hardware: Hardware, clean: None) -> None:
    """What others take of the second is in its breakdown, and in no other's."""
    kept = [torch.ones(MIB, device=f"cuda:{index}") for index in range(2)]
    before = [take_breakdown(hardware, f"cuda:{index}") for index in range(2)]

    with Neighbour(1) as other, Neighbour(1, is_child=True) as child:
        other.take(700 * MIB)
        child.take(300 * MIB)
        after = [take_breakdown(hardware, f"cuda:{index}") for index in range(2)]
        check_against_driver(after[0], 0)
        check_against_driver(after[1], 1)
        children = hardware.list_children()

    assert abs(sum_parts(after[0], "free") - sum_parts(before[0], "free")) <= MIB
    for key, n_bytes in (("others", 700 * MIB), ("children", 300 * MIB)):
        assert sum_parts(after[0], key) == sum_parts(before[0], key)
        assert sum_parts(after[1], key) - sum_parts(before[1], key) > n_bytes
    ((device, n_bytes),) = next(each.devices for each in children if each.pid == child.pid)
    assert device == "cuda:1"
    assert n_bytes > 300 * MIB
    del kept
