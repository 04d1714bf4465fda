"""What holds some memory: every path that has to be cut, and how."""

from __future__ import annotations

import pytest

from gpumemwidget.errors import BadInputError, UnknownNameError
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ownership import DeviceBytes, Explanation
from gpumemwidget.ownership.why import explain
from gpumemwidget.report.why import word_fix
from tests.ownership.notebook import Notebook


def _explain(notebook: Notebook, expression: str) -> Explanation:
    return explain(notebook.shell, expression)


def _list_ways(explanation: Explanation) -> dict[str, str]:
    """The holders' paths, each with its cut."""
    return {holder.path: word_fix(holder.fix).text for holder in explanation.holders}


def test_every_other_holder_is_named(notebook: Notebook) -> None:
    """Aliases, containers, closures and views, each with what it holds and how it is cut."""
    notebook.run(
        "import torch\nx = torch.ones(1009)\nalias = x\nbox = {'k': [x]}\nview = x[:3]\n"
        "def make(t):\n    return lambda: t\n"
        "step = make(x)\nclass A: pass\na = A(); a.b = x"
    )

    explanation = _explain(notebook, "x")

    assert _list_ways(explanation) == {
        "x": "%memrelease x",
        "alias": "%memrelease alias",
        'box["k"][0]': 'del box["k"][0]',
        "view": "%memrelease view",
        "step's closure: t": "%memrelease step",
        "a.b": "del a.b",
    }
    assert {holder.held_bytes for holder in explanation.holders} == {DeviceBytes(((HOST, 4036),))}
    assert explanation.frees_bytes == DeviceBytes()
    assert explanation.joint is not None
    assert set(explanation.joint.names) == {"x", "alias", "box", "view", "step", "a"}


@pytest.mark.saved_tensors
def test_a_graph_that_a_name_keeps(notebook: Notebook) -> None:
    """A running total of losses keeps what it saved; the cut says how not to."""
    notebook.run("import torch\nx = torch.ones(1019, requires_grad=True)\ntotal = x.exp().sum()")

    explanation = _explain(notebook, "total")

    assert explanation.held_bytes == explanation.frees_bytes == DeviceBytes(((HOST, 4 + 4 * 1019),))
    assert _list_ways(_explain(notebook, "x")) == {
        "x": "%memrelease x",
        "total's graph: saved by AccumulateGrad": (
            "call backward(), or drop total (keep total.detach() or .item())"
        ),
    }


def test_a_part_of_a_name(notebook: Notebook) -> None:
    """A path as the account prints it is found, and frees what goes with it alone."""
    notebook.run(
        "import torch\nhistory = [{'logits': torch.ones(1021 + i)} for i in range(3)]\n"
        "model = torch.nn.Linear(5, 7)"
    )

    for expression in ('history[1]["logits"]', "history[1]['logits']"):
        explanation = _explain(notebook, expression)
        assert explanation.held_bytes == explanation.frees_bytes == DeviceBytes(((HOST, 4 * 1022),))
        assert _list_ways(explanation) == {'history[1]["logits"]': 'del history[1]["logits"]'}
    assert _explain(notebook, "model.weight").kind == "parameter"


def test_a_part_that_others_hold_too(notebook: Notebook) -> None:
    """To cut one path frees nothing where another leads to the object, nor its gradient."""
    notebook.run(
        "import torch\nmodel = torch.nn.Linear(101, 103)\n"
        "opt = torch.optim.SGD(model.parameters())\nmodel(torch.ones(1, 101)).sum().backward()"
    )

    explanation = _explain(notebook, "model.weight")

    assert explanation.held_bytes == DeviceBytes(((HOST, 2 * 4 * 101 * 103),))
    assert explanation.frees_bytes == DeviceBytes()


def test_displayed_values_and_memory_that_is_lent(notebook: Notebook) -> None:
    """What IPython shows has a row of its own; a NumPy array is a holder that torch can't see."""
    notebook.run("import torch, numpy as np; a = np.ones(2000); x = torch.from_numpy(a)")
    notebook.run("x")

    assert _list_ways(_explain(notebook, "x")) == {
        "x": "%memrelease x",
        "Out[2]": "%memrelease Out[2]",
        "whatever lent it to torch (NumPy, CuPy, JAX, a file)": (
            "delete the array or file whose memory it shares"
        ),
    }


def test_a_name_without_memory(notebook: Notebook) -> None:
    """It is said to hold nothing, and is no error."""
    notebook.run("import torch; n = 3")

    explanation = _explain(notebook, "n")

    assert (explanation.held_bytes, explanation.holders) == (DeviceBytes(), ())
    assert explanation.type_name == "int"


def test_refusals_name_the_next_step(notebook: Notebook) -> None:
    """Unknown names get close ones; what code would have to compute is not computed."""
    notebook.run(
        "import torch\ncalls = []\nclass A:\n    @property\n    def x(self):\n"
        "        calls.append(1)\n        return torch.ones(5)\n"
        "model = A(); model.t = torch.ones(1049)"
    )

    with pytest.raises(UnknownNameError, match="'modle' is not a variable: did you mean model"):
        _explain(notebook, "modle")
    with pytest.raises(BadInputError, match=r"'\.x' of model was not found"):
        _explain(notebook, "model.x")
    assert notebook.ip.user_ns["calls"] == []


def test_many_holders_are_folded(notebook: Notebook) -> None:
    """Paths that differ in an index or in a key's number are one holder with a count."""
    notebook.run(
        "import torch; x = torch.ones(1061); rows = [[x] for _ in range(50)]\n"
        "named = {f'step {i}': [x] for i in range(60)}"
    )

    assert _list_ways(_explain(notebook, "x")).keys() == {
        "x",
        "rows[…][0] (50 of them)",
        "named[…][0] (60 of them)",
    }
