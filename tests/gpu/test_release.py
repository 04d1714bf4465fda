"""The release on a real GPU: what was planned is what the allocator gives back."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from gpumemwidget.model.ownership import DeviceBytes
from gpumemwidget.model.releases import (
    Reason,
    ReasonKind,
    RestoreReport,
    Stop,
    StopKind,
)
from gpumemwidget.releasing.release import execute_restore
from tests.gpu.conftest import needs_two
from tests.gpu.processes import MIB
from tests.ownership.notebook import Notebook

pytestmark = pytest.mark.gpu


def _allocated() -> int:
    """What is left when the rubbish of earlier tests is gone: some of it only goes in turns."""
    for _ in range(3):
        gc.collect()
    return torch.cuda.memory_allocated(0)


def _release_exactly(notebook: Notebook, *names: str) -> int:
    """Release, and hold what went to what was planned; the bytes."""
    before = _allocated()
    plan = notebook.plan(*names)
    report = notebook.release(*names)
    freed = before - _allocated()
    assert report.stopped is None
    assert dict(plan.frees_bytes.by_device).get("cuda:0", 0) == freed
    return freed


def test_tensors_are_dropped_and_the_cache_is_given_back(notebook: Notebook) -> None:
    """A tensor, its view and a displayed value; the reserved memory falls too."""
    notebook.run(
        "import torch\n"
        f"x = torch.empty({64 * MIB}, dtype=torch.uint8, device='cuda:0')\n"
        "v = x[1000:]\n"
        "small = torch.ones(3, device='cuda:0')"
    )
    notebook.run("x[:2]")
    reserved = torch.cuda.memory_reserved(0)
    rows = notebook.list_rows()

    freed = _release_exactly(notebook, "x", "v", "Out[2]", "small")

    assert rows["small"].frees_bytes == DeviceBytes((("cuda:0", 512),))
    assert rows["x"].held_bytes == DeviceBytes((("cuda:0", 64 * MIB),))
    assert freed == 64 * MIB + 512
    assert torch.cuda.memory_reserved(0) <= reserved - 64 * MIB


_TRAINED = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
model[2].weight = model[0].weight
model.to('cuda:0')
opt = torch.optim.AdamW(model.parameters())
def step(device):
    opt.zero_grad(set_to_none=False)
    loss = model(torch.ones(8, 512, device=device)).square().mean()
    loss.backward()
    opt.step()
    return loss.detach()
step('cuda:0')
"""


def test_a_model_that_its_optimizer_holds_is_moved(notebook: Notebook) -> None:
    """Parameters and gradients leave the GPU in place; the optimizer's state stays on it."""
    notebook.run(_TRAINED)
    opt = notebook.ip.user_ns["opt"]

    freed = _release_exactly(notebook, "model")

    parameters = opt.param_groups[0]["params"]
    # The weight that both layers share, two biases, and as many gradients.
    assert freed == 2 * (512 * 512 + 2 * 512) * 4
    assert all(not each.is_cuda and not each.grad.is_cuda for each in parameters)
    assert opt.state[parameters[0]]["exp_avg"].is_cuda


def _restore(notebook: Notebook, *names: str) -> RestoreReport:
    return execute_restore(notebook.shell, notebook.hardware, names)


def test_what_was_kept_comes_back_to_the_byte(notebook: Notebook) -> None:
    """Out and back: the same objects, values and bytes, still tied, and training goes on."""
    notebook.run(_TRAINED)
    notebook.run("view = model[0].weight.detach()[1:, ::2]")
    ns = notebook.ip.user_ns
    before = _allocated()
    parameters = list(ns["model"].parameters())
    tensors = [*parameters, *(each.grad for each in parameters)]
    tensors += [value for state in ns["opt"].state.values() for value in state.values()]
    devices = [each.device for each in tensors]
    values = [each.detach().cpu().clone() for each in tensors]
    strides = [each.stride() for each in tensors]

    released = notebook.release("model", "opt", keep=True)
    between = _allocated()
    report = _restore(notebook, "model", "opt")

    assert (released.stopped, report.stopped, report.remains) == (None, None, ())
    assert before - between == dict(released.plan.frees_bytes.by_device)["cuda:0"]
    assert between + dict(report.plan.needs_bytes.by_device)["cuda:0"] == before == _allocated()
    assert [each.device for each in tensors] == devices
    assert [each.stride() for each in tensors] == strides
    assert all(torch.equal(each.cpu(), value) for each, value in zip(tensors, values, strict=True))
    assert ns["model"][2].weight is ns["model"][0].weight
    with torch.no_grad():
        ns["model"][0].weight[1, 2] = 7.0
    assert ns["view"][0, 1].item() == 7.0
    notebook.run("loss = step('cuda:0')")
    assert torch.isfinite(ns["loss"]).item()


@needs_two
def test_a_model_on_two_gpus_comes_back_to_each(notebook: Notebook) -> None:
    """Every part to the device that it was on, to the byte, and the next step works."""
    notebook.run(
        "import torch\n"
        "first = torch.nn.Linear(256, 512, device='cuda:0')\n"
        "second = torch.nn.Linear(512, 256, device='cuda:1')\n"
        "opt = torch.optim.AdamW([*first.parameters(), *second.parameters()])\n"
        "x = torch.ones(64, 256, device='cuda:0')\n"
        "def step():\n"
        "    opt.zero_grad()\n"
        "    loss = second(first(x).relu().to('cuda:1')).square().mean()\n"
        "    loss.backward()\n"
        "    opt.step()\n"
        "    return loss.item()\n"
        "before = step()"
    )
    ns = notebook.ip.user_ns
    parameters = [*ns["first"].parameters(), *ns["second"].parameters()]
    devices = [each.device for each in parameters]
    gc.collect()
    allocated = [torch.cuda.memory_allocated(index) for index in range(2)]

    released = notebook.release("first", "second", "opt", keep=True)
    between = [torch.cuda.memory_allocated(index) for index in range(2)]
    report = _restore(notebook, "first", "second", "opt")

    assert (released.stopped, report.stopped, report.remains) == (None, None, ())
    planned = dict(released.plan.frees_bytes.by_device)
    freed = [was - now for was, now in zip(allocated, between, strict=True)]
    assert freed == [planned["cuda:0"], planned["cuda:1"]]
    assert min(freed) > 0
    assert [each.device for each in parameters] == devices
    assert [torch.cuda.memory_allocated(index) for index in range(2)] == allocated
    notebook.run("after = step()")
    assert ns["after"] < ns["before"]


def test_what_was_made_on_the_cpu_stays_there(notebook: Notebook) -> None:
    """Only what a release moved is on the GPU again; the report says what else stays, and why.

    Without the gradients and moments of a step on the CPU the next step on the GPU works.
    """
    notebook.run(_TRAINED)
    ns = notebook.ip.user_ns
    notebook.release("model", "opt", keep=True)
    ns["opt"].state.clear()
    ns["opt"].zero_grad(set_to_none=True)
    notebook.run("first = step('cpu')")

    report = _restore(notebook, "model", "opt")
    parameters = list(ns["model"].parameters())
    places = [(each.is_cuda, each.grad.is_cuda) for each in parameters]
    notebook.run("opt.zero_grad(set_to_none=True)\nopt.state.clear()\nsecond = step('cuda:0')")

    assert report.stopped is None
    assert places == [(True, False)] * len(parameters)
    assert [stay.reason for stay in report.plan.stays] == [Reason(ReasonKind.NOT_MOVED)] * 2
    assert ns["second"].is_cuda


def test_a_full_device_gets_nothing_back(notebook: Notebook) -> None:
    """The second of two does not fit: the first is on the CPU again, and both can come later."""
    notebook.run(
        "import torch\n"
        f"a = torch.full(({64 * MIB},), 3, dtype=torch.uint8, device='cuda:0')\n"
        f"b = torch.full(({64 * MIB},), 4, dtype=torch.uint8, device='cuda:0')"
    )
    ns = notebook.ip.user_ns
    notebook.release("a", "b", keep=True)
    before = _allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved(0) + 96 * MIB) / total, 0
    )
    try:
        report = _restore(notebook, "a", "b")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
    after = _allocated()
    on_cpu = not ns["a"].is_cuda and not ns["b"].is_cuda
    again = _restore(notebook, "a", "b")

    assert report.stopped is not None
    assert report.stopped.kind is StopKind.FAILED
    assert report.stopped.error.startswith("OutOfMemoryError: ")
    assert (on_cpu, after) == (True, before)
    assert again.stopped is None
    assert (ns["a"].device.index, ns["a"][5].item(), ns["b"][5].item()) == (0, 3, 4)


def test_a_capture_is_not_disturbed(notebook: Notebook) -> None:
    """On this thread's stream a release is refused, and the graph can be replayed afterwards."""
    notebook.put(x=torch.ones(512, device="cuda:0"), y=torch.ones(512, device="cuda:0"))
    x = notebook.ip.user_ns["x"]
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        doubled = x * 2
        report = notebook.release("y")
    graph.replay()
    torch.cuda.synchronize()

    assert report.stopped == Stop(StopKind.CAPTURE)
    assert notebook.ip.user_ns["y"] is not None
    assert doubled.sum().item() == 1024


def test_a_capture_on_another_thread_is_not_disturbed(notebook: Notebook) -> None:
    """Torch tells of it by the stream that it captures on."""
    notebook.put(x=torch.ones(512, device="cuda:0"), y=torch.ones(512, device="cuda:0"))
    x = notebook.ip.user_ns["x"]
    graph = torch.cuda.CUDAGraph()
    reached, go_on = threading.Event(), threading.Event()
    results: list[torch.Tensor] = []

    def capture(source: torch.Tensor) -> None:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results.append(source * 2)
            reached.set()
            go_on.wait(60)

    thread = threading.Thread(target=capture, args=(x,))
    thread.start()
    assert reached.wait(60)
    try:
        report = notebook.release("y")
    finally:
        go_on.set()
        thread.join()
    graph.replay()
    torch.cuda.synchronize()

    assert report.stopped == Stop(StopKind.CAPTURE)
    assert results[0].sum().item() == 1024
