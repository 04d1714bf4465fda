"""A release moves what its names own, and leaves alone what they merely reach.

The plan takes the host for a device that memory can be moved away from, so that this is tested
without a GPU; on one, ``notebooks/quickstart.ipynb`` and ``tests/gpu/test_release.py`` show it.
"""

from __future__ import annotations

import pytest

from gpumemwidget.model.ownership import DeviceBytes
from tests.ownership.notebook import Notebook, Tracker

pytestmark = pytest.mark.usefixtures("movable")

MODEL = """
import torch
model = torch.nn.Linear(10, 10, bias=False)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
def step():
    loss = model(torch.ones(2, 10)).square().sum()
    loss.backward()
    opt.step()
step()
"""


def _addresses(notebook: Notebook) -> dict[str, int]:
    """Where the model's weight, its gradient and its momentum lie."""
    model, opt = notebook.ip.user_ns["model"], notebook.ip.user_ns["opt"]
    (weight,) = opt.param_groups[0]["params"]
    assert model is None or model.weight is weight
    return {
        "weight": weight.data_ptr(),
        "gradient": weight.grad.data_ptr(),
        "momentum": opt.state[weight]["momentum_buffer"].data_ptr(),
    }


def _moved(notebook: Notebook, *names: str, **options: bool) -> set[str]:
    before = _addresses(notebook)
    notebook.release(*names, **options)
    after = _addresses(notebook)
    return {what for what, address in before.items() if after[what] != address}


@pytest.mark.saved_tensors
def test_losses_do_not_take_the_model_along(notebook: Notebook) -> None:
    """Their graphs reach its parameters, and what they saved goes; the model stays where it is."""
    notebook.run(MODEL)
    notebook.run("losses = [model(torch.ones(500, 10)).square().sum() for _ in range(3)]")
    row = notebook.list_rows()["losses"]

    assert _moved(notebook, "losses") == set()

    # Of each: the batch and the model's output, 500 by 10 numbers, and the sum.
    assert row.frees_bytes == DeviceBytes((("host", 3 * (2 * 500 * 10 + 1) * 4),))
    notebook.run("step()")


def test_optimizer_does_not_take_the_model_along(notebook: Notebook, tracker: Tracker) -> None:
    """Its state goes; the parameters that it trained are the model's."""
    notebook.run(MODEL)
    weight = notebook.ip.user_ns["model"].weight
    tracker.track(notebook.ip.user_ns["opt"].state[weight]["momentum_buffer"])
    address = weight.data_ptr()

    report = notebook.release("opt")

    assert report.plan.moves == ()
    assert weight.data_ptr() == address
    assert tracker.count_bytes() == 0


def test_optimizer_kept_on_the_cpu_moves_its_state_alone(notebook: Notebook) -> None:
    """``--keep`` of an optimizer offloads its moments tensor by tensor."""
    notebook.run(MODEL)

    assert _moved(notebook, "opt", keep=True) == {"momentum"}


def test_trainer_does_not_take_along_what_has_a_name_of_its_own(notebook: Notebook) -> None:
    """An object that refers to the model is released; the model stays, and the report says so."""
    notebook.run(MODEL + "class Trainer: pass\ntrainer = Trainer()\ntrainer.model = model")

    assert _moved(notebook, "trainer") == set()


def test_left_over_loop_variable_does_not_tear_a_model_apart(notebook: Notebook) -> None:
    """``p`` of ``for p in model.parameters()`` is a name too, but the model is moved whole."""
    notebook.run(MODEL + "for p in model.parameters(): pass")

    assert _moved(notebook, "model") == {"weight", "gradient"}
