"""A release is refused while somebody else computes with what it is about."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gpumemwidget.model.ownership import DeviceBytes
from gpumemwidget.model.releases import Stop, StopKind
from gpumemwidget.report.release import word_stop
from tests.ownership.notebook import Notebook, Tracker


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
