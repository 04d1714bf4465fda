"""The way back: what a release moved to the CPU is where it was, and is what it was.

On the host memory is moved from host to host: the storages change, and so do their addresses.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from gpumemwidget.model.ownership import DeviceBytes
from gpumemwidget.model.releases import (
    Reason,
    ReasonKind,
    RestorePlan,
    RestoreReport,
    StepResult,
    Stop,
    StopKind,
)
from gpumemwidget.releasing.release import execute_restore, plan_restore
from gpumemwidget.releasing.storages import original_devices
from gpumemwidget.report.release import word_stop
from tests.ownership.notebook import Notebook, refuse_to_clone

pytestmark = pytest.mark.usefixtures("movable", "nothing_remembered")

_TRAINED = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
model[1].weight = model[0].weight
opt = torch.optim.AdamW(model.parameters())
sched = torch.optim.lr_scheduler.StepLR(opt, 1)
part = model[0].weight.detach()[1:, ::2]
def step():
    opt.zero_grad(set_to_none=False)
    loss = model(torch.ones(2, 6)).square().mean()
    loss.backward()
    opt.step()
    return loss.item()
step()
"""


@pytest.fixture
def nothing_remembered() -> Any:
    """No storage of another test's."""
    original_devices.forget_all()
    yield
    original_devices.forget_all()


def _plan(notebook: Notebook, *names: str) -> RestorePlan:
    return plan_restore(notebook.shell, names)


def _restore(notebook: Notebook, *names: str) -> RestoreReport:
    return execute_restore(notebook.shell, notebook.hardware, names)


def _list_tensors(notebook: Notebook) -> list[torch.Tensor]:
    model, opt = notebook.ip.user_ns["model"], notebook.ip.user_ns["opt"]
    states = [value for state in opt.state.values() for value in state.values()]
    parameters = list(model.parameters())
    return [*parameters, *(each.grad for each in parameters), *states]


def test_a_round_trip_changes_nothing_but_the_memory(notebook: Notebook) -> None:
    """The same objects, ties, views, strides and values; the next steps are what they would be."""
    notebook.run(_TRAINED)
    ns = notebook.ip.user_ns
    before = _list_tensors(notebook)
    values = [each.detach().clone() for each in before]
    strides = [each.stride() for each in before]

    released = notebook.release("model", "opt", keep=True)
    on_cpu = [each.data_ptr() for each in before]
    report = _restore(notebook, "model", "opt")

    after = _list_tensors(notebook)
    assert (released.stopped, report.stopped, report.remains) == (None, None, ())
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert all(a.data_ptr() != address for a, address in zip(after, on_cpu, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(after, values, strict=True))
    assert [each.stride() for each in after] == strides
    assert ns["model"][1].weight is ns["model"][0].weight
    assert all(each.requires_grad for each in ns["model"].parameters())
    with torch.no_grad():
        ns["model"][0].weight[1, 2] = 9.0
    assert ns["part"][0, 1].item() == 9.0
    assert ns["step"]() > 0


def test_a_failure_puts_everything_back(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is full: what was moved is on the CPU again, and can be restored later."""
    notebook.put(a=torch.ones(10), b=torch.ones(20), c=torch.ones(30))
    notebook.release("a", "b", "c", keep=True)
    addresses = [notebook.ip.user_ns[name].data_ptr() for name in "abc"]

    def fill() -> Exception:
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")

    with monkeypatch.context() as patched:
        refuse_to_clone(patched, n_bytes=80, make_error=fill)
        report = _restore(notebook, "a", "b", "c")
    left = [notebook.ip.user_ns[name].data_ptr() for name in "abc"]
    again = _restore(notebook, "a", "b", "c")

    assert word_stop(report.stopped) == (
        "Failed: OutOfMemoryError: CUDA out of memory. Tried to allocate. "
        "Everything is where it was."
    )
    assert left == addresses
    assert (again.stopped, again.result) == (None, StepResult(n_tensors=3, n_bytes=240))


def test_what_an_optimizer_holds_comes_back_by_its_name(notebook: Notebook) -> None:
    """A model that was released and not kept lives on in its optimizer, and can return there."""
    notebook.run(_TRAINED)
    parameters = list(notebook.ip.user_ns["model"].parameters())
    notebook.release("model")
    on_cpu = [each.data_ptr() for each in parameters]

    by_model = _plan(notebook, "model")
    report = _restore(notebook, "opt")

    assert word_stop(by_model.refusal) == (
        "Nothing to restore: model holds nothing that a release moved to the CPU and that is still "
        "there."
    )
    assert report.stopped is None
    assert all(a.data_ptr() != b for a, b in zip(parameters, on_cpu, strict=True))


def test_what_is_gone_or_was_never_moved_is_said(notebook: Notebook) -> None:
    """A tensor that took the other's place, and a name that was never released."""
    notebook.put(x=torch.ones(10), y=torch.ones(5))
    notebook.release("x", keep=True)
    notebook.put(x=torch.ones(10))

    for name in ("x", "y"):
        assert _plan(notebook, name).refusal == Stop(StopKind.NOT_ON_HOST, name=name)


def test_a_graph_in_the_way_is_said(notebook: Notebook) -> None:
    """A computation on the CPU needs the weights there: the model stays whole."""
    notebook.run(_TRAINED)
    notebook.release("model", "opt", keep=True)
    notebook.run("loss = model(torch.ones(2, 6)).sum()")

    plan = _plan(notebook, "model")

    assert plan.moves == ()
    assert word_stop(plan.refusal) == "Nothing can be moved back."
    assert plan.stays[0].reason == Reason(ReasonKind.SAVED)


def test_another_device_is_where_it_goes(notebook: Notebook) -> None:
    """The device that is noted is the one that is asked for memory."""
    x = torch.ones(10)
    notebook.put(x=x)
    original_devices.note(torch, [x.untyped_storage()], ["cuda:3"])
    address = x.data_ptr()

    plan = _plan(notebook, "x")
    report = _restore(notebook, "x")

    assert plan.needs_bytes == DeviceBytes((("cuda:3", 512),))
    # This machine has no such device: torch says so, and the tensor is as it was.
    assert word_stop(report.stopped).endswith("Everything is where it was.")
    assert (x.data_ptr(), x.tolist()) == (address, [1.0] * 10)


def _describe_all(tensors: list[torch.Tensor]) -> list[tuple[object, ...]]:
    """Values, layout, and which of them share memory, whatever the memory is."""
    storages: dict[int, int] = {}
    return [
        (
            each.tolist(),
            each.shape,
            each.stride(),
            each.storage_offset(),
            each.dtype,
            each.requires_grad,
            storages.setdefault(each.untyped_storage()._cdata, len(storages)),
        )
        for each in tensors
    ]


def _make_tensors(rng: random.Random) -> list[torch.Tensor]:
    """Tensors of all kinds that can be moved, many of them over one memory."""
    tensors: list[torch.Tensor] = []
    for number in range(rng.randint(1, 12)):
        kind = rng.choice(["new", "view", "transposed", "tied", "parameter", "complex", "reversed"])
        base = rng.choice(tensors).detach() if tensors else torch.arange(12.0).reshape(3, 4)
        if kind == "new" or base.dim() != 2 or min(base.shape) < 2:
            tensors.append(torch.full((3, 4), float(number)))
        elif kind == "view":
            tensors.append(base[1:, ::2])
        elif kind == "transposed":
            tensors.append(base.t())
        elif kind == "tied":
            tensors.append(base)
        elif kind == "parameter":
            tensors.append(torch.nn.Parameter(torch.full((4, 3), float(number))))
            if rng.random() < 0.5:
                tensors[-1].grad = torch.full((4, 3), -float(number))
        elif kind == "complex":
            tensors.append(torch.full((2, 2), complex(number, 1)).conj())
        else:
            tensors.append(base.expand(2, *base.shape))
    return tensors


@pytest.mark.parametrize("seed", range(4))
def test_any_tensors_make_the_round_trip(notebook: Notebook, seed: int) -> None:
    """In any containers, by any of their names: out, back."""
    rng = random.Random(seed)
    tensors = _make_tensors(rng)
    holders: list[Any] = [[], {}, torch.nn.ParameterList()]
    for number, each in enumerate(tensors):
        if number % 2:
            holders[0].append((each, {"again": each}))
        else:
            holders[1][f"key {number}"] = [each]
        if isinstance(each, torch.nn.Parameter):
            holders[2].append(each)
    notebook.put(first=holders[0], second=holders[1], third=holders[2], alone=tensors[0])
    names = ["first", "second", "third", "alone"]
    before = _describe_all(tensors)
    grads = [id(each.grad) for each in tensors]

    released = notebook.release(*rng.sample(names, 4), keep=True)
    between = _describe_all(tensors)
    report = _restore(notebook, *rng.sample(names, 4))

    assert (released.stopped, report.stopped, report.plan.stays) == (None, None, ())
    assert released.remains == ()
    assert before == between == _describe_all(tensors)
    assert [id(each.grad) for each in tensors] == grads
