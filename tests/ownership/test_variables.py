"""What the rows of the variables panel say, also of many names and big columns."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from gpumemwidget.errors import UnknownNameError
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ownership import DeviceBytes, JointRelease
from gpumemwidget.model.releases import ReleaseSum
from gpumemwidget.ownership.account import describe_rows, sum_frees
from gpumemwidget.ownership.holdings import take_holdings
from tests.ownership.notebook import Notebook


def test_rows_are_by_storage_and_biggest_first(notebook: Notebook) -> None:
    """A view holds the whole storage; what two rows share neither frees."""
    notebook.run(
        "import torch\n"
        "x = torch.ones(1000)\n"
        "v = x[10:]\n"
        "items = [v, torch.ones(500, dtype=torch.float64)]\n"
        "alone = torch.zeros(4, 5, dtype=torch.int8)\n"
        "n = 5"
    )

    rows = notebook.list_rows()

    assert list(rows) == ["items", "v", "x", "alone"]
    assert [row.kind for row in rows.values()] == ["container", "view", "tensor", "tensor"]
    assert [row.held_bytes for row in rows.values()] == [
        DeviceBytes((("host", 8000),)),
        DeviceBytes((("host", 4000),)),
        DeviceBytes((("host", 4000),)),
        DeviceBytes((("host", 20),)),
    ]
    assert [row.frees_bytes for row in rows.values()] == [
        DeviceBytes((("host", 4000),)),
        DeviceBytes(),
        DeviceBytes(),
        DeviceBytes((("host", 20),)),
    ]
    assert rows["x"].shared_with == ("v", "items")
    assert (rows["v"].shape, rows["v"].dtype) == ((990,), "float32")
    assert (rows["alone"].shape, rows["alone"].dtype) == ((4, 5), "int8")
    assert rows["items"].type_name == "list"
    assert not any(row.held_elsewhere for row in rows.values())


def test_a_view_held_elsewhere_keeps_the_whole(notebook: Notebook) -> None:
    """Another tensor on the same storage counts as a holder, even one that only a graph holds.

    Nobody can tell whether another user of the storage goes too: that row's figure is a lower
    bound.
    """
    notebook.run("import torch\nx = torch.ones(1000)\ny = torch.ones(10, requires_grad=True)")
    notebook.elsewhere.append(notebook.ip.user_ns["x"][:2])
    notebook.elsewhere.append(notebook.ip.user_ns["y"].square().sum())

    rows = notebook.list_rows()

    assert (rows["x"].held_elsewhere, rows["y"].held_elsewhere) == (True, True)
    assert rows["x"].frees_bytes == DeviceBytes(is_at_least=True)
    assert rows["y"].frees_bytes == DeviceBytes()


@pytest.mark.saved_tensors
def test_a_graph_shared_with_an_unnamed_tensor_is_not_promised(notebook: Notebook) -> None:
    """What a graph saved stays while any output of it lives, named or not."""
    notebook.run(
        "import torch\na = torch.ones(10, requires_grad=True)\nb = (a * 2).exp()\nloss = b.sum()\n"
        "del b"
    )
    own = notebook.list_rows()["loss"].frees_bytes
    loss = notebook.ip.user_ns["loss"]
    notebook.elsewhere.append(loss.grad_fn.next_functions[0][0])
    del loss

    shared = notebook.list_rows()["loss"]

    # The result of exp, the factor (a number of 8 bytes), and the loss itself.
    assert own == DeviceBytes((("host", 40 + 8 + 4),))
    assert shared.frees_bytes == DeviceBytes((("host", 4),), is_at_least=True)
    assert shared.held_elsewhere


def test_rows_with_a_module_or_an_optimizer_hold_training_state(notebook: Notebook) -> None:
    """Also deep in an object of the user's; not what was computed with them, or shows them."""
    notebook.run(
        "import torch\n"
        "model = torch.nn.Linear(10, 1)\n"
        "opt = torch.optim.SGD(model.parameters())\n"
        "class Trainer: pass\n"
        "trainer = Trainer(); trainer.parts = {'m': [model]}\n"
        "loss = model(torch.ones(2, 10)).sum()\n"
        "weights = [model.weight.detach().clone()]"
    )
    notebook.run("model")
    notebook.run("torch.nn.Linear(3, 3)")
    notebook.run("def train():\n    mine = model\n    1 / 0\ntrain()")

    rows = notebook.list_rows()

    assert {name for name, row in rows.items() if row.holds_training_state} == {
        "model",
        "opt",
        "trainer",
        "Out[3]",
    }
    assert {"loss", "weights", "last exception"} < rows.keys()


def test_what_has_to_go_together_is_told_where_a_row_alone_frees_nothing(
    notebook: Notebook,
) -> None:
    """With the exact bytes of the same look; not where nobody could release the rest."""
    notebook.run(
        "import torch\n"
        "shared = torch.ones(1000); views = [shared[:10]]; pair = {'s': shared}\n"
        "kept = torch.ones(500); alone = torch.ones(100)"
    )
    notebook.elsewhere.append(notebook.ip.user_ns["kept"])

    rows = notebook.list_rows()
    total = sum_frees(notebook.shell, ["shared", "alone"], budget_s=60.0)
    plan = notebook.plan("shared")

    together = DeviceBytes((("host", 4000),))
    assert rows["shared"].joint == JointRelease(("shared", "views", "pair"), together)
    assert plan.joint == rows["shared"].joint
    assert (rows["kept"].joint, rows["alone"].joint) == (None, None)
    assert total == ReleaseSum(
        DeviceBytes((("host", 400),)),
        JointRelease(("shared", "alone", "views", "pair"), DeviceBytes((("host", 4400),))),
    )
    released = notebook.release(*rows["shared"].joint.names)
    assert released.plan.frees_bytes == together


def test_frees_of_an_unknown_row_is_refused(notebook: Notebook) -> None:
    """A row that is gone is named, and what to do."""
    notebook.run("import torch")

    with pytest.raises(UnknownNameError, match="'gone' holds nothing now: look at the variables"):
        sum_frees(notebook.shell, ["gone"], budget_s=60.0)


def test_without_torch_there_are_no_rows_and_torch_stays_out() -> None:
    """Nothing here imports torch: in a process without it the panel is empty."""
    program = (
        "import sys\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "from gpumemwidget.jupyter.extension import IPythonShell\n"
        "from gpumemwidget.ownership.account import list_variables\n"
        "shell = InteractiveShell.instance()\n"
        "shell.user_ns['x'] = [1]\n"
        "assert list_variables(IPythonShell(shell)) == ()\n"
        "assert 'torch' not in sys.modules\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr


def test_a_context_that_outlives_its_graph_holds_what_it_keeps(notebook: Notebook) -> None:
    """Its next nodes are gone, and up to PyTorch 2.11 asking for them is an error."""
    notebook.run(
        "import torch\n"
        "kept = []\n"
        "class Double(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x):\n"
        "        ctx.copy = x.clone()\n"
        "        kept.append(ctx)\n"
        "        return 2 * x\n"
        "    @staticmethod\n"
        "    def backward(ctx, gradient):\n"
        "        return 2 * gradient\n"
        "_ = Double.apply(torch.ones(1000, requires_grad=True)).sum()\n"
        "del _"
    )

    rows = notebook.list_rows()

    assert rows["kept"].held_bytes.on("host") >= 4000


# -- Many names, big columns -----------------------------------------------------------------------


def test_many_names_that_share_many_tensors(notebook: Notebook) -> None:
    """The time does not grow with the names times the tensors times the names."""
    shared = [torch.ones(1) for _ in range(3000)]
    notebook.put(**{f"v{number}": [shared] for number in range(1000)})
    del shared

    started_s = time.process_time()
    rows = notebook.list_rows()
    taken_s = time.process_time() - started_s

    assert len(rows) == 1000
    assert rows["v7"].held_bytes == DeviceBytes(((HOST, 12_000),))
    assert rows["v7"].frees_bytes == DeviceBytes()
    assert rows["v7"].shared_with == tuple(f"v{number}" for number in range(1000) if number != 7)
    assert taken_s < 1


@pytest.mark.usefixtures("movable")
def test_when_there_is_no_time_to_find_out_what_would_be_moved(notebook: Notebook) -> None:
    """A row then frees what goes with its name alone, or more; others are exact."""
    notebook.run(
        "import torch\n"
        "model = torch.nn.Linear(10, 1); model.own = torch.ones(7)\n"
        "kept = model.weight; alone = torch.ones(11)"
    )
    holdings = take_holdings(notebook.shell, budget_s=10.0, depth="rows")
    assert holdings is not None

    exact = {row.name: row for row in describe_rows(holdings)}
    late = {row.name: row for row in describe_rows(holdings, deadline_s=0.0)}

    assert exact["model"].frees_bytes == DeviceBytes(((HOST, 4 * (10 + 1 + 7)),))
    assert late["model"].frees_bytes == DeviceBytes(((HOST, 4 * (1 + 7)),), is_at_least=True)
    assert late["model"].held_bytes == exact["model"].held_bytes
    assert late["alone"] == exact["alone"]


def test_a_big_column_of_text_and_a_tensor(notebook: Notebook) -> None:
    """An array of objects is looked through as fast as a list."""
    column = np.array([*["text"] * 2_000_000, None], dtype=object)
    column[-1] = torch.ones(500)
    notebook.put(column=column)
    del column

    started_s = time.process_time()
    rows = notebook.list_rows()
    taken_s = time.process_time() - started_s

    assert rows["column"].held_bytes == DeviceBytes(((HOST, 2000),))
    assert rows["column"].frees_bytes == DeviceBytes(((HOST, 2000),))
    assert taken_s < 2
