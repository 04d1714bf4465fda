"""Names bound anew while their old values take memory beside the new ones.

Real tensors in host memory, which are taken for those of a simulated GPU whose figures follow them.
On a real one: ``tests/gpu/test_rebinds.py``.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import gpumemwidget
from gpumemwidget.growth.rebinds import find_overlap, note_values
from gpumemwidget.growth.statements import parse_statements
from gpumemwidget.jupyter import leaks
from gpumemwidget.model.cells import CellDevice, Span
from gpumemwidget.model.growth import Rebinding
from gpumemwidget.session.rebinds import RebindWatch
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
    monkeypatch.setattr(leaks, "RebindWatch", partial(RebindWatch, search_s=60.0))
    simulation = Simulation(make_machine(total_bytes=TOTAL))
    simulation.machine.run("%load_ext gpumemwidget")
    simulation.run(SETUP)
    return simulation


# -- The old value lives on ------------------------------------------------------------------------


def test_a_trainer_and_an_optimizer_hold_the_old_model(notebook: Simulation) -> None:
    """All that has to go is named, with the one line that frees the old model."""
    *_, said, then = notebook.run("trainer = Trainer(model)", "model = Net()", "model.eval();")

    assert said == (
        "`model` was reassigned, and its old value still takes 50.00 MiB of cuda:0, held by "
        "`optimizer` and `trainer.model`; `del optimizer, trainer` frees it."
    )
    assert then == ""


def test_the_line_frees_it(notebook: Simulation) -> None:
    """What is to be typed frees the old model at once."""
    notebook.run("trainer = Trainer(model)", "model = Net()")
    before_bytes = notebook.machine.last.devices[0].allocated.after_bytes

    notebook.run("del optimizer, trainer")

    assert before_bytes == 2 * MODEL
    assert notebook.machine.last.devices[0].allocated.after_bytes == MODEL


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


# -- The peak held both ----------------------------------------------------------------------------


def test_the_old_value_stood_while_the_new_one_was_made(notebook: Simulation) -> None:
    """The line is that of the cell as it was typed, magics and all."""
    notebook.run("del optimizer")

    (said,) = notebook.run("%time 1\n\nmodel = Net()")

    assert said.endswith(
        "`model` was made while its old value still existed, so the peak held both: "
        "`del model` before line 3 would have saved 50.00 MiB."
    )


def test_the_cell_that_makes_all_anew_names_all(notebook: Simulation) -> None:
    """The old optimizer holds the old parameters, so both have to go before."""
    notebook.run("optimizer.step()")

    (said,) = notebook.run("model = Net()\noptimizer = Optimizer(model)")

    assert said == (
        "`model` and `optimizer` were made while their old values still existed, so the peak held "
        "both: `del model, optimizer` before line 1 would have saved 50.00 MiB."
    )


def test_a_plain_tensor_is_told_too(notebook: Simulation) -> None:
    """The smaller one of the two is what could have been saved."""
    notebook.run("x = take(100 << 20)")

    (said,) = notebook.run("x: torch.Tensor = take(60 << 20)")

    assert said.endswith("`del x` before line 1 would have saved 60.00 MiB.")


def test_one_lives_on_and_another_made_the_peak(notebook: Simulation) -> None:
    """Both are told of the same cell, each for itself."""
    notebook.run("trainer = Trainer(model)", "x = take(60 << 20)")

    (said,) = notebook.run("model = Net()\nx = take(60 << 20)")

    assert "`del optimizer, trainer` frees it." in said
    assert said.endswith("`del x` before line 2 would have saved 60.00 MiB.")


#: Makes a new value, and reads the old one.
NEEDS_X = "(x, take(60 << 20))[1]"
#: Cells that follow the one that makes the first ``x``, and read it to make the next one.
NEEDING = {
    "wrapped": [f"@torch.no_grad()\ndef renew():\n    return {NEEDS_X}", "x = renew()"],
    "cached": [f"@functools.lru_cache\ndef renew():\n    return {NEEDS_X}", "x = renew()"],
    "two-levels": [
        f"def inner():\n    return {NEEDS_X}\ndef renew():\n    return inner()",
        "x = renew()",
    ],
    "method": [
        f"class Maker:\n    def renew(self):\n        return {NEEDS_X}\nmaker = Maker()",
        "x = maker.renew()",
    ],
    "operator": [
        f"class Maker:\n    __slots__ = ()\n    def __neg__(self):\n        return {NEEDS_X}",
        "maker = Maker()",
        "x = -maker",
    ],
    "metaclass": [
        f"class Meta(type):\n    def __call__(cls):\n        return {NEEDS_X}",
        "class Maker(metaclass=Meta):\n    pass",
        "x = Maker()",
    ],
    "comprehension": [f"def renew():\n    return [{NEEDS_X} for _ in 'a'][0]", "x = renew()"],
    "class-body": [
        f"def renew():\n    class Made:\n        y = {NEEDS_X}\n    return Made.y",
        "x = renew()",
    ],
    "partial": [f"renew = functools.partial(lambda: {NEEDS_X})", "x = renew()"],
    "callback": [f"def renew(_):\n    return {NEEDS_X}", "x = list(map(renew, 'a'))[0]"],
    "table": [f"makers = {{'x': [lambda: {NEEDS_X}]}}", "x = makers['x'][0]()"],
    "generator": [f"values = ({NEEDS_X} for _ in 'ab')", "x = next(values)"],
    "hook": [
        f"net = torch.nn.Identity()\nnet.register_forward_hook(lambda *_: {NEEDS_X});",
        "x = net(1)",
    ],
    "patched": [f"copy.renew = lambda: {NEEDS_X}", "x = copy.renew()", "del copy.renew"],
    "eval": [f"x = eval('{NEEDS_X}')"],
    "eval-by-another-name": ["run = eval", f"x = run('{NEEDS_X}')"],
    "eval-of-builtins": ["import builtins", f"x = builtins.eval('{NEEDS_X}')"],
    "globals": ["x = (globals()['x'], take(60 << 20))[1]"],
    "shell": ["x = (get_ipython().user_ns['x'], take(60 << 20))[1]"],
    "main": [
        "def renew():\n    import __main__ as main\n    return (main.x, take(60 << 20))[1]",
        "x = renew()",
    ],
    "replaced-later": [f"def renew():\n    return {NEEDS_X}", "x = renew()\nrenew = take"],
    "deleted-later": [f"def renew():\n    return {NEEDS_X}", "x = renew()\ndel renew"],
    "magic": ["def show():\n    x.shape", "%time show()\nx = take(60 << 20)"],
    "command": ["!true {x.shape}\nx = take(60 << 20)"],
}


@pytest.mark.parametrize("cells", NEEDING.values(), ids=NEEDING)
def test_no_del_that_breaks_the_cell(notebook: Simulation, cells: list[str]) -> None:
    """A value that may be needed to make the next one is not to be deleted before."""
    notebook.run("x = take(60 << 20)")

    for said in notebook.run(*cells):
        assert "would have saved" not in said


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param(
            ["trainer = Trainer(model)", "model = Net()\ntrainer = Trainer(model)"], id="trainer"
        ),
        pytest.param(["kept = [model]", "model = Net()\nkept = [model]"], id="list"),
        pytest.param(["kept = [model]", "model = Net()\nkept.clear()"], id="cleared"),
        pytest.param(["kept = Trainer(model)", "model = Net()\ndel kept.model"], id="attribute"),
        pytest.param(["other = model", "model = Net()\nother = model"], id="name"),
    ],
)
def test_no_del_that_saves_nothing(notebook: Simulation, cells: list[str]) -> None:
    """What held the old value beside its name let go of it only after the name did."""
    notebook.run("del optimizer")

    for said in notebook.run(*cells):
        assert "would have saved" not in said


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(
            "@torch.no_grad()\ndef renew(n):\n    return [take(n) for _ in 'a'][0]\n"
            "x = renew(60 << 20)",
            id="functions",
        ),
        pytest.param(
            "import dataclasses\nfrom torch import nn\n"
            "@dataclasses.dataclass\nclass Config:\n    n_bytes: int = 60 << 20\n"
            "class Own(Net):\n    depth = 1\n    width = depth + 1\n"
            "    def __init__(self, config):\n        super().__init__(config.n_bytes)\n"
            "config = Config()\nx = Own(config).eval()",
            id="classes",
        ),
        pytest.param(
            "torch.manual_seed(0)\ngc.collect()\nprint(end='')\n"
            "net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())\n"
            "y = net(torch.ones(2, 2))\nx = functools.partial(take, 60 << 20)()",
            id="library",
        ),
        pytest.param("%%time\nx = take(60 << 20)", id="cell-magic"),
    ],
)
def test_code_that_cannot_read_the_name_is_told(notebook: Simulation, cell: str) -> None:
    """Following the user's functions, classes and objects shows that none needs the old value."""
    *_, said = notebook.run(cell, cell)

    assert "`x` was made while its old value still existed" in said


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
        pytest.param(["x = take(18 << 20)"] * 2, id="small"),
        pytest.param(["x = take(60 << 20)", "x = (x, take(60 << 20))[1]"], id="needed-to-make-it"),
        pytest.param(
            [
                "x = take(60 << 20)\ndef renew():\n    return (x, take(60 << 20))[1]",
                "x = renew()",
            ],
            id="needed-by-a-function",
        ),
        pytest.param(
            [
                "del optimizer",
                "model = Net()\nfor step in range(2):\n    batch = take(150 << 20)\n    del batch",
            ],
            id="peak-of-training",
        ),
        pytest.param(["trainer = Trainer(model)", "model = Net()\nraise SystemError"], id="failed"),
        pytest.param(["trainer = Trainer(model)", "model = model.half()"], id="the-same-one"),
        pytest.param(["model.itself = model", "del optimizer", "model = Net()"], id="rubbish"),
        pytest.param(["trainer = Trainer(model)", "del model"], id="only-deleted"),
    ],
)
def test_nothing_is_said(notebook: Simulation, cells: list[str]) -> None:
    """What is kept on purpose, small, needed, or no peak's cause."""
    for said in notebook.run(*cells):
        assert "reassigned" not in said
        assert "still existed" not in said


# -- The parts -------------------------------------------------------------------------------------


def make_record(*allocated: int) -> CellDevice:
    """The figures of a cell: what was allocated before it, after it, and at its peak."""
    return CellDevice("cuda:0", Span(*allocated), Span(0, 0, 0), "exact", 0, 0)


def overlap(source: str, *, after: int, peak: int, before: int = 100) -> object:
    """What is found in a cell in which ``a`` and ``b`` had 40 bytes each and have them again."""
    old = {"a": {("cuda:0", 1): 40}, "b": {("cuda:0", 2): 40}}
    new = {"a": {("cuda:0", 3): 40}, "b": {("cuda:0", 4): 40}}
    found = find_overlap(
        parse_statements(source),
        old,
        new,
        make_record(before, after, peak),
        {"f": len},
    )
    return found and (found.names, found.line, found.n_bytes)


def test_figures_that_differ_say_nothing() -> None:
    """The peak and the end must both be those of the values alone, but for a tenth."""
    source = "\na = f()\nb = f()"

    assert overlap(source, after=100, peak=140) == (("a", "b"), 2, 40)
    assert overlap(source, after=103, peak=144) == (("a", "b"), 2, 40)
    assert overlap(source, after=100, peak=145) is None
    assert overlap(source, after=105, peak=140) is None
    assert overlap("a = f()\ndel b", after=60, peak=140) is None


def test_only_what_stood_in_the_peak_is_named() -> None:
    """An old value that went before the peak is no part of it, and the level then is the next."""
    found = find_overlap(
        parse_statements("a = f()\nb = f()"),
        {"a": {("cuda:0", 1): 40}, "b": {("cuda:0", 2): 100}},
        {"a": {("cuda:0", 3): 40}, "b": {("cuda:0", 4): 100}},
        make_record(200, 200, 300),
        {"f": len},
    )

    assert found == Rebinding(("b",), "cuda:0", 60, line=2)


def test_what_a_cell_reads_is_needed() -> None:
    """A name that was read before is left out, and its bytes with it."""
    assert overlap("a = f()\nb = f(b)", after=100, peak=140) == (("a",), 1, 40)
    assert overlap("print(a)\na = f()\nprint(b)\nb = f()", after=100, peak=140) is None


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

    noted = note_values(names, "module = n = 1", torch)
    names.clear()
    del module

    assert [(each.name, len(each.storages)) for each in noted] == [("module", 2)]
    assert [ref() for ref in gone] == [None, None, None]
