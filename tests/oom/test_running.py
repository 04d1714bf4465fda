"""The account in the moment of an OOM: within the allocation, on whatever thread that runs."""

from __future__ import annotations

import _thread
import gc
import threading
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch

from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ownership import MemoryAccount, Owned
from gpumemwidget.ownership.account import has_backward_beside, take_running_account
from gpumemwidget.ownership.graph import objects as collector
from tests.ownership.notebook import Notebook

_N = 60_013


def _take(notebook: Notebook, budget_s: float = 10.0) -> MemoryAccount:
    return take_running_account(notebook.shell, notebook.hardware, HOST, budget_s=budget_s)


def _list_lines(account: MemoryAccount, n_elements: int = _N) -> list[Owned]:
    (device,) = account.devices
    return [each for each in device.owned if each.n_bytes == 4 * n_elements]


def _find_owner(account: MemoryAccount, n_elements: int = _N) -> str:
    (line,) = _list_lines(account, n_elements)
    return line.owner


@pytest.fixture
def seen(notebook: Notebook) -> list[MemoryAccount]:
    """What the notebook's ``look()`` saw."""
    seen: list[MemoryAccount] = []
    notebook.put(look=lambda: seen.append(_take(notebook)))
    return seen


def test_variables_of_running_functions(notebook: Notebook, seen: list[MemoryAccount]) -> None:
    """Each is named by the innermost function of the user's that has it, its line and its word."""
    notebook.run(
        "import torch\n"
        "def forward(x):\n    hidden = torch.ones(60_013)\n    look()\n"
        "def train():\n    batch = torch.ones(60_017)\n    forward(batch)\n"
        "kept = torch.ones(60_023)\n"
        "train()"
    )

    (account,) = seen
    (device,) = account.devices
    lines = {n: _list_lines(account, n)[0] for n in (60_013, 60_017, 60_023)}

    assert {n: (each.owner, each.root) for n, each in lines.items()} == {
        60_013: ("running: forward() line 4: hidden", "thread"),
        60_017: ("running: forward() line 4: x", "thread"),
        60_023: ("kept", "name"),
    }
    # While a cell runs, a heap in many pieces is not counted: it would take too long.
    assert device.allocated_bytes in (None, sum(each.n_bytes for each in device.owned))
    assert account.is_complete
    assert account.variables == ()


@pytest.mark.saved_tensors
def test_activations_of_a_running_forward(notebook: Notebook, seen: list[MemoryAccount]) -> None:
    """What was saved for backward has its kind, and the variable whose graph it is in."""
    notebook.run(
        "import torch\n"
        "w = torch.ones(60_013, requires_grad=True)\n"
        "def forward(x):\n    x = x.exp() * 1\n    look()\n"
        "forward(w)"
    )

    lines = {each.owner: each.kind for each in _list_lines(seen[0])}

    assert lines == {
        "w": "tensor",
        "running: forward() line 5: x": "tensor",
        "running: forward() line 5: x's graph: saved by ExpBackward0": "saved for backward",
    }


@pytest.mark.saved_tensors
def test_within_a_backward(notebook: Notebook, seen: list[MemoryAccount]) -> None:
    """On the thread that runs it: the graph stands still and is looked through."""
    notebook.run(
        "import torch\n"
        "class Look(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x): return x * 1\n"
        "    @staticmethod\n    def backward(ctx, grad):\n"
        "        scratch = torch.ones(60_017)\n        look()\n        return grad\n"
        "w = torch.ones(60_013, requires_grad=True)\n"
        "def train():\n    loss = Look.apply(w.exp()).sum()\n    loss.backward()\n"
        "train()"
    )

    (account,) = seen
    lines = [each for each in _list_lines(account) if each.kind == "saved for backward"]

    assert [each.owner for each in lines] == [
        "running: backward() line 8: ctx: saved by ExpBackward0"
    ]
    assert _find_owner(account, 60_017) == "running: backward() line 8: scratch"
    assert account.is_complete


def test_on_a_thread_that_is_none_of_pythons(notebook: Notebook) -> None:
    """As autograd's own: the functions of the main thread are running all the same."""
    seen: list[MemoryAccount] = []
    done = threading.Event()

    def look() -> None:
        seen.append(_take(notebook))
        done.set()

    def call_elsewhere() -> None:
        _thread.start_new_thread(look, ())
        assert done.wait(30)

    notebook.put(call_elsewhere=call_elsewhere)
    notebook.run(
        "import torch\ndef train():\n    batch = torch.ones(60_013)\n    call_elsewhere()\ntrain()"
    )

    assert _find_owner(seen[0]) == "running: train() line 4: batch"


def _engine_run_backward(call: Callable[[], bool]) -> bool:
    """Has the name of torch's function that waits for a backward."""
    return call()


def _ask_elsewhere(n_devices: int = 1, *, start: Callable[..., Any] | None = None) -> bool:
    """What is answered on another thread, while this one waits."""
    answers: list[bool] = []
    done = threading.Event()

    def ask() -> None:
        answers.append(has_backward_beside(n_devices))
        done.set()

    (start or (lambda target: _thread.start_new_thread(target, ())))(ask)
    assert done.wait(30)
    return answers[0]


def _start_thread(target: Callable[[], None]) -> None:
    threading.Thread(target=target).start()


def test_a_backward_that_runs_beside_is_noticed() -> None:
    """It stands still only for its own thread and its caller, and only on one device."""
    assert not has_backward_beside(2)
    assert not _engine_run_backward(lambda: has_backward_beside(1))
    assert _engine_run_backward(lambda: has_backward_beside(2))
    assert not _engine_run_backward(_ask_elsewhere)
    assert _engine_run_backward(lambda: _ask_elsewhere(2))
    assert _engine_run_backward(lambda: _ask_elsewhere(start=_start_thread))


def test_a_graph_that_changes_is_left_alone(
    notebook: Notebook, seen: list[MemoryAccount], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No node is read; the account says that there is more."""
    asked: list[object] = []
    nodes = "gpumemwidget.ownership.graph.torch_reader.TorchReader.read_node"
    monkeypatch.setattr(nodes, lambda _, node: asked.append(node))
    monkeypatch.setattr("gpumemwidget.ownership.account.has_backward_beside", lambda _: True)

    notebook.run("import torch; w = torch.ones(60_013, requires_grad=True); y = w.exp(); look()")

    assert sorted(each.owner for each in _list_lines(seen[0])) == ["w", "y"]
    assert not seen[0].is_complete
    assert asked == []


def test_when_the_time_for_the_walk_is_up(notebook: Notebook) -> None:
    """What was not met is there as bytes: the sum is what is allocated all the same."""
    notebook.run("import torch; x = torch.ones(60_013); wide = [[[]] for _ in range(10_000)]")
    notebook.run("wide[-1].append(torch.ones(60_017))")

    account = _take(notebook, budget_s=0.0)

    (device,) = account.devices
    assert not account.is_complete
    assert _find_owner(account) == "x"
    assert _list_lines(account, 60_017) == []
    # While a cell runs, a heap in many pieces is not counted: it would take too long.
    assert device.allocated_bytes in (None, sum(each.n_bytes for each in device.owned))


def test_nothing_of_it_is_held(notebook: Notebook) -> None:
    """Neither a frame nor a variable outlives what it looked at, without a collection."""
    watches: list[ref[Any]] = []

    def look(tensor: torch.Tensor) -> None:
        watches.append(ref(tensor))
        _take(notebook)

    notebook.put(look=look)
    gc.collect()
    with collector.paused_collector():
        notebook.run("import torch\ndef train():\n    x = torch.ones(3)\n    look(x)\ntrain()")

        assert [each() for each in watches] == [None]
