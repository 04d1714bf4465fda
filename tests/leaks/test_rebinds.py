"""Names bound anew while their old values take memory beside the new ones.

Real tensors in host memory, which are taken for those of a simulated GPU whose figures follow them.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import gpumemwidget
from gpumemwidget.jupyter import outputs
from gpumemwidget.session.rebinds import RebindWatch, note_values
from tests.jupyter.conftest import make_machine, shell  # noqa: F401 - fixtures
from tests.jupyter.machine import MIB, Machine

#: An eighth of the GPU, which the smallest value that is told of is a twentieth of.
MODEL = 50 * MIB
TOTAL = 400 * MIB
#: Begins every notebook here.
SETUP = "import copy, functools, gc\nmodel = Net()\noptimizer = Optimizer(model)"


class Simulation:
    """A simulated GPU and what notebooks here put onto it."""

    def __init__(self, machine: Machine) -> None:
        # No object of the notebook's leads to it, as none leads into CUDA.
        gpu = weakref.proxy(machine.allocator)

        def take(n_bytes: int) -> torch.Tensor:
            """A tensor, or a parameter's, that frees its block as it goes."""
            tensor = torch.nn.Parameter(torch.empty(n_bytes // 4))
            weakref.finalize(tensor, gpu.free, gpu.allocate(n_bytes))
            return tensor

        class Net(torch.nn.Module):
            def __init__(self, n_bytes: int = MODEL) -> None:
                super().__init__()
                self.weight: Any = take(n_bytes)

            def __deepcopy__(self, _memo: object) -> Net:
                return type(self)(4 * self.weight.numel())

        class Trainer:
            def __init__(self, model: Any = None) -> None:
                self.model = model
                self.models: list[Any] = []

        class Optimizer(torch.optim.SGD):
            def __init__(self, model: Any) -> None:
                super().__init__(model.parameters(), lr=0.1)

            def step(self, *_: Any) -> None:
                for parameter in self.param_groups[0]["params"]:
                    self.state[parameter]["momentum"] = take(4 * parameter.numel())

        self.machine = machine
        machine.shell.user_ns.update(
            torch=torch, take=take, Net=Net, Trainer=Trainer, Optimizer=Optimizer, copy=copy
        )
        gpu.touch()

    def run(self, *cells: str) -> list[str]:
        """Run cells; what each printed, without line breaks."""
        printed = []
        for source in cells:
            printed.append(self.machine.say(source))
            assert gpumemwidget.last_failure() is None
        return printed


def take_host_for_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors in host memory be taken for those of a GPU."""
    monkeypatch.setattr(
        "gpumemwidget.ownership.graph.torch_reader._name_device", lambda _device: "cuda:0"
    )


@pytest.fixture
def notebook(
    make_machine: Callable[..., Machine],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Simulation:
    """A notebook with a model and its optimizer."""
    take_host_for_gpu(monkeypatch)
    # However busy the machine is.
    monkeypatch.setattr(outputs, "RebindWatch", partial(RebindWatch, search_s=60.0))
    simulation = Simulation(make_machine(total_bytes=TOTAL))
    simulation.machine.run("%load_ext gpumemwidget")
    simulation.run(SETUP)
    return simulation


# -- The old value lives on ------------------------------------------------------------------------


def test_a_trainer_and_an_optimizer_hold_the_old_model(notebook: Simulation) -> None:
    """All that has to go is named, with the one line that frees the old model at once."""
    *_, said, then = notebook.run("trainer = Trainer(model)", "model = Net()", "model.eval();")
    before_bytes = notebook.machine.last.devices[0].allocated.after_bytes
    notebook.run("del optimizer, trainer")
    after_bytes = notebook.machine.last.devices[0].allocated.after_bytes

    assert said == (
        "`model` was reassigned, and its old value still takes 50.00 MiB of cuda:0, held by "
        "`optimizer` and `trainer.model`; `del optimizer, trainer` frees it."
    )
    assert then == ""
    assert (before_bytes, after_bytes) == (2 * MODEL, MODEL)


def test_a_trained_model_counts_with_its_gradients(notebook: Simulation) -> None:
    """What autograd keeps of a model is no holder, and a loss that has its graph is one."""
    notebook.run("trainer = Trainer(model)", "loss = (model.weight * 2).sum()\nloss.backward()")

    (said,) = notebook.run("model = Net()")

    assert said == (
        "`model` was reassigned, and its old value still takes 100.00 MiB of cuda:0, held by "
        "`optimizer`, `trainer.model` and `loss`; `del optimizer, trainer, loss` frees it."
    )


def test_a_displayed_model_is_told_with_its_release(notebook: Simulation) -> None:
    """``Out`` holds what the last line of a cell showed, and ``del`` would not be enough."""
    notebook.run("del optimizer", "model")

    (said,) = notebook.run("model = Net()")

    number = notebook.machine.shell.execution_count - 2
    assert said == (
        "`model` was reassigned, and its old value still takes 50.00 MiB of cuda:0, held by "
        f"`Out[{number}]`; `%memrelease Out[{number}]` frees it."
    )


def test_a_traceback_holds_the_old_model(notebook: Simulation) -> None:
    """The variables of the functions that failed live as long as the last exception."""
    notebook.run("del optimizer", "def train(net):\n    raise ValueError('diverged')")
    notebook.run("train(model)")

    (said,) = notebook.run("model = Net()")

    assert "held by `last exception: train() line 2: net`;" in said
    assert said.endswith("`%memrelease --exceptions` frees it.")


def test_the_old_optimizer_is_held_by_its_scheduler(notebook: Simulation) -> None:
    """Its states are what it holds: the parameters are the model's."""
    notebook.run("optimizer.step()", "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)")

    (said,) = notebook.run("optimizer = Optimizer(model)")

    assert said == (
        "`optimizer` was reassigned, and its old value still takes 50.00 MiB of cuda:0, held by "
        "`scheduler.optimizer`; `del scheduler` frees it."
    )


def test_ignored_names_are_not_told(notebook: Simulation) -> None:
    """A holder that is ignored is ignored here, too."""
    notebook.run("trainer = Trainer(model)", "%memleak ignore model")

    assert notebook.run("model = Net()") == [""]


# -- Only a reference cycle holds the old value ----------------------------------------------------

#: The fitter and its model refer to each other.
FITTER = "class Fitter:\n    def __init__(self, model): self.model = model; model.owner = self"
#: A layer in a layer, as models have them.
REFIT = "model = torch.nn.Sequential(torch.nn.Sequential(Net())); fitter = Fitter(model)"


@pytest.fixture
def no_collections() -> Iterator[None]:
    """No garbage is collected until the test asks for it."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
def test_a_model_in_a_reference_cycle_waits_for_the_collector(notebook: Simulation) -> None:
    """From the first run on that makes it anew; the cycle and what frees it are named."""
    notebook.run("del optimizer", FITTER, REFIT)

    first, second = notebook.run(REFIT, REFIT)

    assert first == (
        "`model` was reassigned, and its old value still takes 50.00 MiB of cuda:0 in a reference "
        "cycle (`model.owner.model`): `gc.collect()` frees it; before line 1 it would keep old "
        "values from piling up."
    )
    assert second == first


@pytest.mark.usefixtures("no_collections")
def test_collecting_frees_what_is_in_a_cycle(notebook: Simulation) -> None:
    """And before the line that was named, it keeps the peak at two models."""
    notebook.run("del optimizer", FITTER, REFIT, REFIT)

    notebook.run("gc.collect();")
    after_bytes = notebook.machine.last.devices[0].allocated.after_bytes
    peaks = []
    for _ in range(3):
        notebook.run(f"gc.collect()\n{REFIT}")
        peaks.append(notebook.machine.last.devices[0].allocated.peak_bytes)

    assert after_bytes == MODEL
    assert peaks == [2 * MODEL] * 3


# -- Nothing to say --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param(["best = model", "model = Net()"], id="kept-by-a-name"),
        pytest.param(["models = [model]", "model = Net()"], id="kept-in-a-list"),
        pytest.param(["runs = {'lr': {'a': model}}", "model = Net()"], id="kept-in-tables"),
        pytest.param(
            ["trainer = Trainer(); trainer.models.append(model)", "model = Net()"], id="ensemble"
        ),
        pytest.param(["pair = torch.nn.ModuleList([model])", "model = Net()"], id="module-list"),
        pytest.param(
            ["gan = Trainer(model)", "model = Net()\ngan.other = model"], id="holder-of-both"
        ),
        pytest.param(["model = torch.nn.Sequential(model)"] * 2, id="within-the-new-one"),
        pytest.param(
            ["ema = copy.deepcopy(model)", "del model, optimizer", "model = Net()"], id="ema"
        ),
        pytest.param(
            [
                "kept = []\nfor fold in range(3):\n    model = Net()\n    kept.append(model)",
                "kept = []\nfor fold in range(3):\n    model = Net()\n    kept.append(model)",
            ],
            id="k-fold-kept",
        ),
        pytest.param(
            ["del optimizer", *["for fold in range(3):\n    model = Net()"] * 2], id="k-fold"
        ),
        pytest.param(["del model, optimizer", "model = Net()"], id="deleted-in-a-cell-before"),
        pytest.param(["del optimizer", "model = Net()"], id="gone-with-the-assignment"),
        pytest.param(["del optimizer", "del model\nmodel = Net()"], id="deleted-before"),
        pytest.param(["del optimizer", "model = None\nmodel = Net()"], id="none-before"),
        pytest.param(["del optimizer", "model = None"], id="only-dropped"),
        pytest.param(["folds = [Trainer(model)]", "model = Net()"], id="kept-in-a-list-of-runs"),
        pytest.param(["copy.kept = model", "model = Net()", "del copy.kept"], id="in-a-library"),
        pytest.param(
            ["trainer = Trainer(model)", "model = torch.nn.Sequential(Net())"], id="another-kind"
        ),
        pytest.param(
            ["trainer = Trainer()", "trainer.model = model\nmodel = Net()"], id="handed-on"
        ),
        pytest.param(["model = Net(18 << 20)"] * 2, id="small-new"),
        pytest.param(["del optimizer", "model = (model, Net())[1]"], id="needed-to-make-it"),
        pytest.param(["x = take(60 << 20)"] * 2, id="a-tensor"),
        pytest.param(
            [
                "del optimizer",
                "model = Net()\nfor step in range(2):\n    batch = take(150 << 20)\n    del batch",
            ],
            id="peak-of-training",
        ),
        pytest.param(["trainer = Trainer(model)", "model = Net()\nraise SystemError"], id="failed"),
        pytest.param(["trainer = Trainer(model)", "model = model.half()"], id="the-same-one"),
        pytest.param(["trainer = Trainer(model)", "del model"], id="only-deleted"),
    ],
)
def test_nothing_is_said(notebook: Simulation, cells: list[str]) -> None:
    """What is kept on purpose, small, needed, or no peak's cause."""
    for said in notebook.run(*cells):
        assert "reassigned" not in said


def test_noting_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the values nor their tensors are held, and no code of theirs is called."""
    take_host_for_gpu(monkeypatch)

    class Loud(torch.nn.Linear):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    module: Any = torch.nn.Linear(3, 2)
    gone = [weakref.ref(module), *map(weakref.ref, module.parameters())]
    module.__class__ = Loud
    names: dict[str, object] = {"module": module, "n": 3}

    noted = note_values(names, "module = n = 1")
    names.clear()
    del module

    assert [each.name for each in noted] == ["module"]
    assert [ref() for ref in gone] == [None, None, None]
