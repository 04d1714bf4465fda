"""The release on a real GPU: what was planned is what the allocator gives back."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from gpumemwidget.backends.hardware import Hardware, detect_hardware
from tests.owners.conftest import notebook  # noqa: F401 - a fixture
from tests.owners.notebook import Notebook

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
    gc.collect()
    return torch.cuda.memory_allocated(0)


def _release_exactly(notebook: Notebook, *names: str, **options: bool) -> int:  # noqa: F811
    """Release, and hold what went to what was planned; the bytes."""
    before = _allocated()
    plan = notebook.plan(*names, **options)
    report = notebook.release(*names, **options)
    freed = before - _allocated()
    assert report.stopped is None
    assert dict(plan.frees_bytes).get("cuda:0", 0) == freed
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

    assert rows["small"].frees_bytes == (("cuda:0", 512),)
    assert rows["x"].held_bytes == (("cuda:0", 64 * MIB),)
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
    assert before - _allocated() == dict(report.plan.frees_bytes)["cuda:0"]
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

    assert row.frees_bytes == (("cuda:0", 32 * MIB),)
    assert freed == 32 * MIB


def test_looking_changes_nothing_on_the_device(notebook: Notebook) -> None:  # noqa: F811
    """Allocated memory before and after the rows are listed is equal to the byte."""
    notebook.run(_TRAINED)
    notebook.run("out = model(torch.ones(8, 512, device='cuda:0')).sum()")
    before = (_allocated(), torch.cuda.max_memory_allocated(0))

    notebook.list_rows()
    notebook.plan("model", "opt", "out")

    assert (_allocated(), torch.cuda.max_memory_allocated(0)) == before
