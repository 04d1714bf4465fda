"""A release is refused while somebody else computes; a refusal or an interrupt holds nothing."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import Any

import pytest
import torch

from gpumemwidget.errors import BadInputError, GpuMemError
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ownership import DeviceBytes
from gpumemwidget.model.releases import ReleaseRequest, Stop, StopKind
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
from gpumemwidget.releasing.release import plan_restore
from gpumemwidget.report.release import word_stop
from tests.ownership.notebook import Notebook, Tracker

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


# -- Others at work --------------------------------------------------------------------------------


class _Gate:
    """Holds a thread up in the middle of what it does."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self._reached.set()
        self._open.wait()

    @contextmanager
    def held(self, work: Callable[..., Any], *args: object) -> Iterator[None]:
        thread = threading.Thread(target=work, args=args, name="trainer")
        thread.start()
        self._reached.wait()
        try:
            yield
        finally:
            self._open.set()
            thread.join()


@pytest.fixture
def gate() -> _Gate:
    """Where the other thread waits."""
    return _Gate()


def test_a_thread_with_a_module_in_its_hands(notebook: Notebook, gate: _Gate) -> None:
    """The thread, the function and the line are named; nothing is changed."""
    notebook.put(model=torch.nn.Linear(3, 3), other=torch.ones(3))

    def train(net: torch.nn.Module) -> None:
        gate()
        net.zero_grad()

    with gate.held(train, notebook.ip.user_ns["model"]):
        report = notebook.release("model")
        elsewhere = notebook.plan("other").refusal
        refused = notebook.ip.user_ns["model"]
    after = notebook.plan("model").refusal

    assert report.stopped is not None
    assert (report.stopped.kind, report.stopped.thread) == (StopKind.THREAD, "trainer")
    assert {step.status for step in report.steps} == {"not reached"}
    assert isinstance(refused, torch.nn.Linear)
    assert (elsewhere, after) == (None, None)


def test_a_thread_that_mentions_the_name(notebook: Notebook, gate: _Gate) -> None:
    """A function of the notebook's reads ``model`` from its namespace whenever it goes on."""
    notebook.put(gate=gate, opt=torch.ones(3))
    notebook.run(
        "import torch\n"
        "model = torch.nn.Linear(3, 3)\n"
        "def serve():\n"
        "    gate()\n"
        "    return model(torch.ones(3))"
    )

    with gate.held(notebook.ip.user_ns["serve"]):
        refusal = notebook.plan("model").refusal
        other = notebook.plan("opt").refusal

    assert word_stop(refusal) == (
        "Thread 'trainer' is in serve(), line 4, which uses this memory: wait until it ends. "
        "Nothing was changed."
    )
    assert other is None


def test_looking_leaves_nothing_in_the_frames(
    notebook: Notebook, tracker: Tracker, gate: _Gate
) -> None:
    """A variable that the thread drops after we looked is gone, and none is lost before."""
    notebook.put(x=torch.ones(3))
    second = _Gate()
    kept: list[float] = []

    def work(hold: list[torch.Tensor]) -> None:
        batch = hold.pop()
        gate()
        kept.append(batch.sum().item())
        del batch
        second()

    hold = [tracker.make(10)]
    thread = threading.Thread(target=work, args=(hold,))
    thread.start()
    gate._reached.wait()
    notebook.plan("x")
    gate._open.set()
    second._reached.wait()
    left = tracker.count_bytes()
    second._open.set()
    thread.join()

    assert kept == [10.0]
    assert left == 0


def test_a_traced_thread_keeps_its_variables(notebook: Notebook) -> None:
    """Before Python 3.13 a tracer's frame writes the dictionary back that we would empty."""
    notebook.put(x=torch.ones(3))
    gate = _Gate()
    result: list[int] = []

    def trace(frame: Any, event: str, _arg: object) -> Any:
        if event == "line" and frame.f_code.co_name == "count" and "n" in frame.f_locals:
            gate()
        return trace

    def count(into: list[int]) -> None:
        n = 5
        into.append(n)

    def work() -> None:
        sys.settrace(trace)
        count(result)
        sys.settrace(None)

    with gate.held(work):
        notebook.plan("x")

    assert result == [5]


def test_a_capture_is_left_alone(
    notebook: Notebook, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While torch says that the stream is being captured, nothing is looked at or begun."""
    notebook.put(x=tracker.make(10))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda _: True, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    plan = notebook.plan("x")

    assert plan.refusal == Stop(StopKind.CAPTURE)
    assert plan.frees_bytes == DeviceBytes()
    assert tracker.count_bytes() == 40
