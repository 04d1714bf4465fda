"""A refusal or an interrupt holds nothing of what was walked, though IPython keeps it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType, FunctionType

import pytest

from gpumemwidget.errors import BadInputError, GpuMemError
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.releases import ReleaseRequest
from gpumemwidget.ownership.account import (
    list_variables,
    sum_frees,
    take_memory_account,
    take_running_account,
)
from gpumemwidget.ownership.graph.torch_reader import TorchReader
from gpumemwidget.ownership.graph.walk import Graph
from gpumemwidget.ownership.why import explain
from gpumemwidget.releasing.plan import plan_release
from gpumemwidget.releasing.restore import plan_restore
from tests.ownership.notebook import Notebook

_REFUSED: dict[str, Callable[[Notebook], object]] = {
    "a function": lambda nb: plan_release(nb.shell, nb.hardware, ReleaseRequest(("step",))),
    "a part that code would make": lambda nb: explain(nb.shell, "x.part"),
    "a row that is gone": lambda nb: sum_frees(nb.shell, ["Out[99]"], budget_s=60.0),
    "nothing to restore": lambda nb: plan_restore(nb.shell, ["nothing"]),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_a_refusal_holds_nothing(notebook: Notebook, case: str) -> None:
    """No graph of a walk is alive while the refusal's traceback is."""
    notebook.run("import torch; x = torch.ones(1001)\ndef step(): pass")
    gc.collect()

    with pytest.raises(GpuMemError) as caught:
        _REFUSED[case](notebook)

    assert isinstance(caught.value, BadInputError)
    assert caught.value.__traceback__ is not None
    assert [each for each in gc.get_objects() if type(each) is Graph] == []


_ASKED: dict[str, Callable[[Notebook], object]] = {
    "the account": lambda nb: take_memory_account(nb.shell, nb.hardware),
    "the account of a running cell": lambda nb: take_running_account(
        nb.shell, nb.hardware, HOST, budget_s=10.0
    ),
    "the rows": lambda nb: list_variables(nb.shell),
    "what holds it": lambda nb: explain(nb.shell, "x"),
}


def make_interrupt(function: FunctionType) -> Callable[[FrameType, str, object], None]:
    """Return a function for ``sys.setprofile`` that interrupts where ``function`` is called."""

    def interrupt(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code is function.__code__:
            sys.setprofile(None)
            raise KeyboardInterrupt

    return interrupt


@pytest.mark.parametrize(
    "function", [Graph.walk, Graph.flag_reaching_memory, TorchReader.read_storage]
)
@pytest.mark.parametrize("case", _ASKED)
def test_an_interrupt_holds_nothing(notebook: Notebook, case: str, function: FunctionType) -> None:
    """Ctrl-C in the middle of a walk: the collector is on again, and what was walked is let go."""
    notebook.run("import torch; x = [torch.ones(1001)]")
    gc.collect()

    sys.setprofile(make_interrupt(function))
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            _ASKED[case](notebook)
    finally:
        sys.setprofile(None)

    assert caught.value.__traceback__ is not None
    assert gc.isenabled()
    assert [each for each in gc.get_objects() if type(each) is Graph] == []
    assert _ASKED[case](notebook)


def test_an_interrupt_leaves_the_frames_of_what_is_being_handled(notebook: Notebook) -> None:
    """An exception of the user's, in whose handler it was asked, keeps its variables."""
    notebook.put(ask=lambda: _ASKED["the account"](notebook))
    notebook.run("import torch\ndef fail():\n    kept = torch.ones(1001)\n    1 / 0")
    notebook.put(interrupt=make_interrupt(Graph.walk))
    notebook.run(
        "import sys\n"
        "try: fail()\n"
        "except ZeroDivisionError as error:\n"
        "    sys.setprofile(interrupt)\n"
        "    try: ask()\n"
        "    except KeyboardInterrupt: pass\n"
        "    finally: sys.setprofile(None)\n"
        "    variables = dict(error.__traceback__.tb_next.tb_frame.f_locals)"
    )

    assert "kept" in notebook.ip.user_ns["variables"]  # type: ignore[operator]
