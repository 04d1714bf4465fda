"""The walk against hostile objects: it calls none of their code, and it comes to an end."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from gpumemwidget.model.ownership import DeviceBytes
from gpumemwidget.ownership.graph.torch_reader import MOST_NODES
from gpumemwidget.ownership.holdings import take_holdings
from tests.ownership.hostile import boom
from tests.ownership.notebook import Notebook

pytestmark = pytest.mark.usefixtures("nothing_is_called")


class _HostileTensor(torch.Tensor):
    __torch_function__ = classmethod(boom("__torch_function__"))


class _HostileDispatch(TwoTensor):
    __torch_dispatch__ = classmethod(boom("__torch_dispatch__"))


def test_torch_function_and_dispatch_are_not_called(notebook: Notebook) -> None:
    """Tensor subclasses whose handlers raise: their memory is known, their code is not run."""
    wrapper = TwoTensor(torch.ones(7), torch.ones(7))
    wrapper.__class__ = _HostileDispatch
    notebook.put(x=torch.ones(10).as_subclass(_HostileTensor), y=wrapper)
    del wrapper

    rows = notebook.list_rows()

    assert (rows["x"].frees_bytes, rows["x"].shape) == (DeviceBytes((("host", 40),)), (10,))
    assert (rows["y"].frees_bytes, rows["y"].shape) == (DeviceBytes((("host", 56),)), None)


@pytest.mark.saved_tensors
def test_after_backward_the_graph_has_nothing_saved(notebook: Notebook) -> None:
    """Reading what was freed raises inside torch; the row simply holds less."""
    leaf = torch.ones(10, requires_grad=True)
    loss = leaf.exp().sum()
    notebook.put(x=loss)
    del leaf
    before = dict(notebook.list_rows()["x"].held_bytes.by_device)["host"]
    loss.backward()
    del loss

    after = dict(notebook.list_rows()["x"].held_bytes.by_device)["host"]

    # The result of exp, the loss and the leaf; then the loss, the leaf and its gradient.
    assert (before, after) == (40 + 4 + 40, 4 + 40 + 40)


def test_a_huge_container_does_not_starve_the_others(notebook: Notebook) -> None:
    """When the time is over what was small is known, and all rows say that they are at least."""
    notebook.put(x=[[{}] for _ in range(200_000)], y={"deep": [{"t": torch.ones(10)}]})
    holdings = take_holdings(notebook.shell, budget_s=0.02)
    assert holdings is not None

    held = holdings.sum_held(holdings.rows["y"].mark)

    assert not holdings.graph.is_complete
    assert held == DeviceBytes((("host", 40),), is_at_least=True)


def test_a_graph_too_deep_to_look_at_is_left_alone(notebook: Notebook) -> None:
    """Of a chain of 60,000 nodes only so many get a Python object that its end does not crash.

    Where PyTorch keeps such an object only as long as somebody uses it, as 2.4 does, all are read.
    """
    total = torch.zeros(1, requires_grad=True)
    loss = total
    for _ in range(60_000):
        loss = loss + 1
    notebook.put(x=loss)
    del loss

    first, second = notebook.list_rows()["x"], notebook.list_rows()["x"]
    holdings = take_holdings(notebook.shell, budget_s=10.0)
    assert holdings is not None
    keeps_nodes = holdings.graph.reader.cpp_holds_node
    del holdings
    notebook.release("x")

    assert first.held_bytes.is_at_least is keeps_nodes
    assert first == second
    assert MOST_NODES < 60_000


def test_nodes_that_are_gone_make_room_for_others(notebook: Notebook) -> None:
    """Also once other objects have taken their addresses."""
    loss = torch.zeros(1, requires_grad=True)
    for _ in range(20_000):
        loss = loss + 1
    notebook.put(x=loss)
    del loss
    notebook.list_rows()
    notebook.release("x")
    others = [(notebook,) for _ in range(60_000)]
    notebook.put(y=torch.ones(10, requires_grad=True) * 2)

    holdings = take_holdings(notebook.shell, budget_s=10.0)

    assert holdings is not None
    assert holdings.graph.is_complete
    assert len(others) == 60_000
