"""The release on a real GPU: what was planned is what the allocator gives back."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from gpumemwidget.backends.hardware import Hardware, detect_hardware
from gpumemwidget.model.ownership import DeviceBytes
from gpumemwidget.model.releases import (
    Reason,
    ReasonKind,
    RestoreReport,
    Stop,
    StopKind,
)
from gpumemwidget.releasing.restore import execute_restore
from tests.ownership.conftest import notebook  # noqa: F401 - a fixture
from tests.ownership.notebook import Notebook, Tracker

pytestmark = pytest.mark.gpu

MIB = 1024**2


@pytest.fixture
def hardware() -> Iterator[Hardware]:
    """This machine's GPUs and its host memory."""
    hardware = detect_hardware()
    yield hardware
    hardware.close()
    gc.collect()
    torch.cuda.empty_cache()


def _allocated() -> int:
    """What is left when the rubbish of earlier tests is gone: some of it only goes in turns."""
    for _ in range(3):
        gc.collect()
    return torch.cuda.memory_allocated(0)


def _release_exactly(notebook: Notebook, *names: str, **options: bool) -> int:  # noqa: F811
    """Release, and hold what went to what was planned; the bytes."""
    before = _allocated()
    plan = notebook.plan(*names, **options)
    report = notebook.release(*names, **options)
    freed = before - _allocated()
    assert report.stopped is None
    assert dict(plan.frees_bytes.by_device).get("cuda:0", 0) == freed
    return freed


def test_tensors_are_dropped_and_the_cache_is_given_back(notebook: Notebook) -> None:  # noqa: F811
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


def test_a_model_that_its_optimizer_holds_is_moved(notebook: Notebook) -> None:  # noqa: F811
    """Parameters and gradients leave the GPU in place; the optimizer's state stays on it."""
    notebook.run(_TRAINED)
    opt = notebook.ip.user_ns["opt"]

    freed = _release_exactly(notebook, "model")

    parameters = opt.param_groups[0]["params"]
    # The weight that both layers share, two biases, and as many gradients.
    assert freed == 2 * (512 * 512 + 2 * 512) * 4
    assert all(not each.is_cuda and not each.grad.is_cuda for each in parameters)
    assert opt.state[parameters[0]]["exp_avg"].is_cuda


def test_keep_leaves_a_model_that_goes_on_on_the_cpu(notebook: Notebook) -> None:  # noqa: F811
    """Everything is on the CPU, weights are still tied, and training goes on as it would have."""
    notebook.run(_TRAINED)
    expected = [each.detach().cpu() for each in notebook.ip.user_ns["model"].parameters()]
    before = _allocated()

    report = notebook.release("model", "opt", keep=True)

    model, opt = notebook.ip.user_ns["model"], notebook.ip.user_ns["opt"]
    assert report.stopped is None
    assert before - _allocated() == dict(report.plan.frees_bytes.by_device)["cuda:0"]
    assert model[2].weight is model[0].weight
    found = list(model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert not any(value.is_cuda for state in opt.state.values() for value in state.values())
    notebook.run("loss = step('cpu')")
    assert torch.isfinite(notebook.ip.user_ns["loss"]).item()


def test_a_loss_gives_back_what_its_graph_saved(notebook: Notebook) -> None:  # noqa: F811
    """An output kept without ``no_grad`` holds its activations: they go with it."""
    notebook.run(_TRAINED)
    notebook.run("losses = [model(torch.ones(64, 512, device='cuda:0')).sum() for _ in range(3)]")

    freed = _release_exactly(notebook, "losses")

    # Of each: the batch and the output of the ReLU, 128 KiB each, and the sum, at the least.
    assert freed >= 3 * (2 * 64 * 512 * 4 + 512)


def test_an_out_of_memory_error_is_released(notebook: Notebook) -> None:  # noqa: F811
    """After an OOM the frames of the exception hold the batch; ``exceptions`` frees it."""
    notebook.run(
        "import torch\n"
        "def train():\n"
        f"    batch = torch.empty({32 * MIB}, dtype=torch.uint8, device='cuda:0')\n"
        "    return torch.empty(2**50, dtype=torch.uint8, device='cuda:0')\n"
        "train()"
    )
    row = notebook.list_rows()["last exception"]

    freed = _release_exactly(notebook, exceptions=True)

    assert row.frees_bytes == DeviceBytes((("cuda:0", 32 * MIB),))
    assert freed == 32 * MIB


def test_looking_changes_nothing_on_the_device(notebook: Notebook) -> None:  # noqa: F811
    """Allocated memory before and after the rows are listed is equal to the byte."""
    notebook.run(_TRAINED)
    notebook.run("out = model(torch.ones(8, 512, device='cuda:0')).sum()")
    before = (_allocated(), torch.cuda.max_memory_allocated(0))

    notebook.list_rows()
    notebook.plan("model", "opt", "out")

    assert (_allocated(), torch.cuda.max_memory_allocated(0)) == before


def _restore(notebook: Notebook, *names: str) -> RestoreReport:  # noqa: F811
    return execute_restore(notebook.shell, notebook.hardware, names)


def test_what_was_kept_comes_back_to_the_byte(notebook: Notebook) -> None:  # noqa: F811
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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU alone")
def test_a_model_on_two_gpus_comes_back_to_each(notebook: Notebook) -> None:  # noqa: F811
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


def test_what_was_made_on_the_cpu_stays_there(notebook: Notebook) -> None:  # noqa: F811
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


def test_a_full_device_gets_nothing_back(notebook: Notebook) -> None:  # noqa: F811
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


def test_a_cache_of_inference_makes_the_round_trip(notebook: Notebook) -> None:  # noqa: F811
    """Inference tensors stay such, and weights do not become any, whatever mode is on."""
    notebook.run(
        "import torch\n"
        "weight = torch.ones(512, device='cuda:0', requires_grad=True)\n"
        "with torch.inference_mode():\n"
        "    cache = [torch.ones(512, device='cuda:0') for _ in range(2)]"
    )
    ns = notebook.ip.user_ns
    before = _allocated()

    with torch.inference_mode():
        released = notebook.release("weight", "cache", keep=True)
    report = _restore(notebook, "weight", "cache")

    assert (released.stopped, report.stopped) == (None, None)
    assert _allocated() == before
    assert not ns["weight"].is_inference()
    assert all(each.is_inference() and each.is_cuda for each in ns["cache"])
    (ns["weight"] * 2).sum().backward()
    assert ns["weight"].grad.is_cuda


def test_a_model_in_a_live_graph_stays_whole(notebook: Notebook) -> None:  # noqa: F811
    """Its loss can still go backward: no part of it was moved from under the graph."""
    notebook.run(_TRAINED)
    notebook.run("loss = model(torch.ones(8, 512, device='cuda:0')).sum()")

    plan = notebook.plan("model", keep=True)
    report = notebook.release("model", keep=True)
    notebook.run("loss.backward()")

    assert plan.moves == ()
    assert report.stopped is None
    assert all(each.is_cuda for each in notebook.ip.user_ns["model"].parameters())
    assert notebook.ip.last_execution_result.error_in_exec is None


def test_a_chain_of_exceptions_is_released_to_the_byte(notebook: Notebook) -> None:  # noqa: F811
    """What the frames of a cause and of its effect hold goes with the last exception."""
    # A cached block that is a little larger would be taken as a whole.
    torch.cuda.empty_cache()
    notebook.run(
        "import torch\n"
        "def load():\n"
        f"    weights = torch.empty({8 * MIB}, dtype=torch.uint8, device='cuda:0')\n"
        "    raise KeyError('no such layer')\n"
        "def train():\n"
        f"    batch = torch.empty({16 * MIB}, dtype=torch.uint8, device='cuda:0')\n"
        "    try:\n"
        "        load()\n"
        "    except KeyError as exc:\n"
        "        raise RuntimeError('no model') from exc\n"
        "train()"
    )

    assert _release_exactly(notebook, exceptions=True) == 24 * MIB


def test_cublas_workspaces_are_freed(notebook: Notebook) -> None:  # noqa: F811
    """They are no name's, so no name frees them; the next product makes its own anew."""
    notebook.run(
        "import torch\n"
        "a = torch.ones(64, 64, device='cuda:0')\n"
        "b = torch.nn.functional.linear(a, a)\n"
        "torch.cuda.synchronize()"
    )
    before = _allocated()

    report = notebook.release(cublas=True)
    freed = before - _allocated()
    notebook.run("c = torch.nn.functional.linear(a, a)")

    assert report.stopped is None
    step = next(each for each in report.steps if each.kind.value == "free cuBLAS workspaces")
    assert (step.status, step.result.is_freed) == ("done", True)
    assert freed == dict(step.allocated_freed_bytes)["cuda:0"] > 0
    assert torch.equal(notebook.ip.user_ns["b"], notebook.ip.user_ns["c"])


def test_a_loader_of_pinned_memory_is_released(notebook: Notebook) -> None:  # noqa: F811
    """Its batches are pinned; they go, and the report says why the host's counter stays."""
    tracker = Tracker()
    notebook.put(track=tracker.track)
    notebook.run(
        "import torch\n"
        f"data = torch.utils.data.TensorDataset(torch.ones(4, {MIB}))\n"
        "loader = torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True)\n"
        "it = iter(loader)\n"
        "(batch,) = next(it)\n"
        "is_pinned = batch.is_pinned()\n"
        "_ = track(batch)"
    )
    notebook.run("del _")

    report = notebook.release("it", "loader", "batch", "data")

    assert notebook.ip.user_ns["is_pinned"]
    assert (report.stopped, report.plan.empty_names) == (None, ())
    assert tracker.count_bytes() == 0
    (stay,) = [each for each in report.plan.stays if each.name == "batch"]
    assert (stay.reason.kind, stay.held_bytes.total_bytes) == (ReasonKind.PINNED, 8 * MIB)
    assert report.remains == ()


def test_a_capture_is_not_disturbed(notebook: Notebook) -> None:  # noqa: F811
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


def test_a_capture_on_another_thread_is_not_disturbed(notebook: Notebook) -> None:  # noqa: F811
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
