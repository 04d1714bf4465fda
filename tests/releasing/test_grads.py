"""Gradients are released as planned: those of the notebook's own leaves, and no others."""

from __future__ import annotations

import pytest
import torch

from gpumemwidget.errors import BadInputError
from gpumemwidget.model.ownership import DeviceBytes
from gpumemwidget.report.release import describe_stays
from tests.ownership.notebook import Notebook, Tracker

N = 1000


def give(tracker: Tracker, owner: torch.Tensor) -> torch.Tensor:
    """A gradient of its own storage, watched."""
    owner.grad = torch.ones_like(owner)
    tracker.track(owner.grad)
    return owner


@pytest.fixture
def model(notebook: Notebook, tracker: Tracker) -> torch.nn.Linear:
    """A layer with a gradient of 4,000 bytes and one of 4."""
    model = torch.nn.Linear(N, 1)
    for parameter in model.parameters():
        give(tracker, parameter)
    notebook.put(model=model)
    return model


def test_they_go_as_planned(notebook: Notebook, tracker: Tracker, model: torch.nn.Linear) -> None:
    """The plan says how many and how much; then they are ``None`` and the parameters as before."""
    weight = model.weight.detach().clone()

    plan = notebook.plan(grads=True)
    before = tracker.count_bytes()
    report = notebook.release(grads=True)

    assert (plan.request.grads, plan.n_grads) == (True, 2)
    assert plan.frees_bytes == DeviceBytes((("host", 4 * N + 4),))
    assert plan.stays == ()
    assert before == 4 * N + 4
    assert tracker.count_bytes() == 0
    assert (model.weight.grad, model.bias.grad) == (None, None)
    assert torch.equal(model.weight, weight)
    assert report.stopped is None
    assert report.remains == ()
    step = next(step for step in report.steps if step.kind.value == "set gradients to None")
    assert (step.status, step.result.n_tensors) == ("done", 2)
    assert step.planned_bytes == DeviceBytes((("host", 4 * N + 4),))


def test_what_a_variable_holds_too_stays(notebook: Notebook, tracker: Tracker) -> None:
    """A gradient under a name of its own is the user's; the plan says who holds it."""
    owner = give(tracker, torch.ones(N, requires_grad=True))
    notebook.put(owner=owner, kept=owner.grad)
    del owner

    report = notebook.release(grads=True)

    assert report.plan.frees_bytes == DeviceBytes()
    assert describe_stays(report.plan.stays, is_done=True) == [
        "3.91 KiB of gradients on host was not freed: kept also uses it"
    ]
    assert notebook.ip.user_ns["owner"].grad is None
    assert tracker.count_bytes() == 4 * N
    assert report.stopped is None


def test_what_is_held_elsewhere_stays(notebook: Notebook, tracker: Tracker) -> None:
    """What no row holds and something does is not promised."""
    owner = give(tracker, torch.ones(N, requires_grad=True))
    notebook.put(owner=owner)
    notebook.elsewhere.append(owner.grad)
    del owner

    plan = notebook.plan(grads=True)

    assert plan.frees_bytes == DeviceBytes()
    assert describe_stays(plan.stays, is_done=False) == [
        "3.91 KiB of gradients on host will not be freed: something that no variable names also "
        "uses it"
    ]


def test_of_leaves_alone(notebook: Notebook) -> None:
    """What ``retain_grad`` keeps on a result was asked for."""
    notebook.run(
        "import torch\nx = torch.ones(5, requires_grad=True)\ny = x * 2\ny.retain_grad()\n"
        "y.sum().backward()"
    )

    notebook.release(grads=True)

    assert notebook.ip.user_ns["x"].grad is None
    assert notebook.ip.user_ns["y"].grad is not None


def test_only_of_what_a_name_leads_to(notebook: Notebook, tracker: Tracker) -> None:
    """Another library's tensors keep theirs."""
    notebook.elsewhere.append(give(tracker, torch.ones(N, requires_grad=True)))

    report = notebook.release(grads=True)

    assert report.plan.n_grads == 0
    assert tracker.count_bytes() == 4 * N


def test_a_class_that_lies(notebook: Notebook) -> None:
    """What a class of the user's says of ``grad`` is not asked."""

    class Liar(torch.Tensor):
        @property  # type: ignore[misc]
        def grad(self) -> None:  # type: ignore[override]
            raise RuntimeError("asked")

    liar = torch.ones(N).as_subclass(Liar).requires_grad_()
    torch._C.TensorBase.grad.__set__(liar, torch.ones(N).as_subclass(Liar))
    notebook.put(liar=liar)

    report = notebook.release(grads=True)

    assert report.stopped is None
    assert report.plan.frees_bytes == DeviceBytes((("host", 4 * N),))
    assert torch._C.TensorBase.grad.__get__(liar) is None


def test_names_are_refused_with_it(notebook: Notebook, model: torch.nn.Linear) -> None:
    """A parameter would move to the CPU while its gradient waits elsewhere."""
    with pytest.raises(BadInputError, match="goes without names"):
        notebook.plan("model", grads=True)

    assert model.weight.grad is not None
