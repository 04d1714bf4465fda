"""Calls of modules and of backward are seen as they run, and nothing of it is seen by the user."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpumemwidget.backends.cuda.module_calls import CallRecorder
from gpumemwidget.model.traces import CallMark, NoteKind, TraceNote
from tests.backends.children import run_python

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12"
)


class Block(nn.Module):
    """Two modules below one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.act = nn.ReLU()

    def forward(self, x: Any) -> Any:
        return self.act(self.fc(x))


class Net(nn.Module):
    """A model with a list, and something that may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: Any) -> Any:
        for block in self.h:
            x = block(x)
        return x


@pytest.fixture
def recorder() -> Iterator[CallRecorder]:
    """One whose clock goes on by a microsecond with each look."""
    ticks = count(start=1)
    recorder = CallRecorder(clock_ns=lambda: next(ticks) * 1000)
    yield recorder
    recorder.stop()
    assert_clean()


def assert_clean() -> None:
    """Nothing of ours is left in the interpreter."""
    assert "gpumemwidget" not in [sys.monitoring.get_tool(tool) for tool in range(6)]


def tell(marks: tuple[CallMark, ...]) -> list[tuple[str, int, int | None]]:
    return [(mark.name or mark.kind, mark.start_us, mark.end_us) for mark in marks]


def test_calls_have_their_path_in_the_outermost_module(recorder: CallRecorder) -> None:
    """It has its class's name; times are nested as the calls are."""
    net, x = Net(), torch.ones(1, 4)
    recorder.start()
    net(x)
    net.h[1].fc(x)

    marks = recorder.stop()

    assert tell(marks) == [
        ("Net", 1, 14),
        ("h.0", 2, 7),
        ("h.0.fc", 3, 4),
        ("h.0.act", 5, 6),
        ("h.1", 8, 13),
        ("h.1.fc", 9, 10),
        ("h.1.act", 11, 12),
        ("Linear", 15, 16),
    ]
    assert {mark.thread for mark in marks} == {threading.get_ident()}
    assert {mark.kind for mark in marks} == {"module"}
    assert recorder.take_notes() == ()


def test_a_compiled_model_has_the_paths_that_a_person_types(recorder: CallRecorder) -> None:
    """``model.h[0]`` goes through the wrapper, whose own attribute nobody names."""

    class OptimizedModule(nn.Module):
        def __init__(self, wrapped: nn.Module) -> None:
            super().__init__()
            self._orig_mod = wrapped

        def forward(self, x: Any) -> Any:
            return self._orig_mod(x)

    net = OptimizedModule(Net())
    recorder.start()
    net(torch.ones(1, 4))

    assert [mark.name for mark in recorder.stop()] == [
        *("OptimizedModule", "Net", "h.0", "h.0.fc", "h.0.act", "h.1", "h.1.fc", "h.1.act")
    ]


def test_backward_has_its_callers_stack(recorder: CallRecorder) -> None:
    """The innermost frame first, down to the program's own."""
    x = torch.ones(3, requires_grad=True)

    def train() -> None:
        (x * 2).sum().backward()

    recorder.start()
    train()
    torch.autograd.grad((x * 2).sum(), x)

    first, second = recorder.stop()

    assert (first.kind, first.name, first.start_us, first.end_us) == ("backward", "", 1, 2)
    functions = [frame.function for frame in first.frames]
    place = functions.index("train")
    assert functions[place + 1] == "test_backward_has_its_callers_stack"
    assert first.frames[place].filename == __file__
    line = train.__code__.co_firstlineno + 1
    assert first.frames[place].line == line
    assert "backward" in functions[:place]
    assert "grad" in [frame.function for frame in second.frames]


def test_an_error_that_is_caught_within_a_module_ends_only_what_it_left(
    recorder: CallRecorder,
) -> None:
    """The module that caught it runs on."""

    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad = nn.Linear(3, 3)
            self.good = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            try:
                self.bad(x)
            except RuntimeError:
                return self.good(x)

    recorder.start()
    Catching()(torch.ones(1, 4))
    marks = recorder.stop()

    assert tell(marks) == [("Catching", 1, 5), ("bad", 2, 3), ("good", 3, 4)]


def test_a_call_that_runs_at_the_end_has_no_end(recorder: CallRecorder) -> None:
    """As in a cell that stops the trace from within."""

    class Stopping(nn.Module):
        def forward(self, x: Any) -> Any:
            self.marks = recorder.stop()
            return x

    module = Stopping()
    recorder.start()
    module(torch.ones(1))

    assert tell(module.marks) == [("Stopping", 1, None)]
    assert recorder.stop() == ()


def test_threads_have_their_own_calls(recorder: CallRecorder) -> None:
    """Those of one do not end those of another."""
    net, other = Net(), nn.Identity()
    started, ended = threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def forward(self, x: Any) -> Any:
            started.set()
            ended.wait(10)
            return x

    recorder.start()
    thread = threading.Thread(target=Waiting(), args=(torch.ones(1),))
    thread.start()
    started.wait(10)
    net(torch.ones(1, 4))
    other(torch.ones(1))
    ended.set()
    thread.join()
    marks = recorder.stop()

    waiting = next(mark for mark in marks if mark.name == "Waiting")
    inner = [mark for mark in marks if mark.thread != waiting.thread]
    assert len(inner) == 8
    assert waiting.end_us is not None
    assert all(mark.start_us > waiting.start_us for mark in inner)
    assert all(mark.end_us is not None and mark.end_us < waiting.end_us for mark in inner)


def test_no_module_is_held() -> None:
    """Neither while it is recorded nor afterwards, and no tensor of a call."""
    recorder = CallRecorder()
    recorder.start()
    net, x = Net(), torch.ones(1, 4)
    watched = [weakref.ref(each) for each in (net, net.h[0], x)]
    net(x)

    del net, x
    gc.collect()

    assert [each() for each in watched] == [None, None, None]
    assert len(recorder.stop()) == 7


def test_the_marks_are_bounded() -> None:
    """Calls beyond run as ever, and the next recording sees all again."""
    recorder = CallRecorder(n_marks=3)
    recorder.start()
    net, x = Net(), torch.ones(1, 4)
    for _ in range(5):
        net(x)
    assert [mark.name for mark in recorder.stop()] == ["Net", "h.0", "h.0.fc"]

    again = CallRecorder()
    again.start()
    net(x)
    assert len(again.stop()) == 7
    assert_clean()


def test_modules_are_asked_nothing(recorder: CallRecorder) -> None:
    """Whatever a module does when it is asked for something is not done for us."""
    asked: list[str] = []

    class Hostile(nn.Module):
        def __getattribute__(self, name: str) -> Any:
            frame = sys._getframe(1)
            if "gpumemwidget" in frame.f_code.co_filename and "tests" not in (
                frame.f_code.co_filename
            ):
                asked.append(name)
            return super().__getattribute__(name)

        def __eq__(self, other: object) -> bool:
            raise ValueError("asked")

        def __hash__(self) -> int:
            raise ValueError("asked")

        def __bool__(self) -> bool:
            raise ValueError("asked")

        def forward(self, x: Any) -> Any:
            return x

    module = Hostile()
    recorder.start()
    assert module(torch.ones(1)) is not None

    assert [mark.name for mark in recorder.stop()] == ["Hostile"]
    assert asked == []


def test_a_failure_of_ours_is_a_note_and_not_the_users(recorder: CallRecorder) -> None:
    """The call returns what it would, and a sentence says what went wrong."""

    class Odd(nn.Module):
        def forward(self, x: Any) -> Any:
            return x

    module = Odd()
    module._modules = {"odd": object.__new__(type("Slotted", (), {"__slots__": ()}))}
    recorder.start()
    for _ in range(3):
        assert module(torch.ones(1)) is not None
    recorder.stop()

    (note,) = recorder.take_notes()
    assert note.kind is NoteKind.FAILED
    assert note.text.startswith("AttributeError")
    assert recorder.take_notes() == ()


def test_tracebacks_show_no_frame_of_ours(recorder: CallRecorder) -> None:
    """An error in a module looks as it does without us."""
    recorder.start()
    with pytest.raises(RuntimeError) as caught:
        nn.Linear(2, 2)(torch.ones(1, 3))

    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert not any("gpumemwidget/backends" in file for file in files)


def test_tools_of_others_are_left_alone(recorder: CallRecorder) -> None:
    """Where no place is free there are no marks, and a note."""
    monitoring = sys.monitoring
    for tool in (3, 4, 5):
        monitoring.use_tool_id(tool, "theirs")
    try:
        recorder.start()
        nn.Identity()(torch.ones(1))
        assert recorder.stop() == ()
        assert [monitoring.get_tool(tool) for tool in (3, 4, 5)] == ["theirs"] * 3
    finally:
        for tool in (3, 4, 5):
            monitoring.free_tool_id(tool)

    assert recorder.take_notes() == (TraceNote(NoteKind.CALLS_UNSEEN),)


def test_torch_that_is_imported_meanwhile_is_seen() -> None:
    """The first cell of a notebook imports it and trains at once."""
    run_python(
        """
        import sys
        from gpumemwidget.backends.cuda.module_calls import CallRecorder
        recorder = CallRecorder()
        recorder.start()
        assert "torch" not in sys.modules
        import torch
        torch.nn.Identity()(torch.ones(1))
        assert [mark.name for mark in recorder.stop()] == ["Identity"]
        other = CallRecorder()
        other.start()
        other.stop()
        assert [sys.monitoring.get_tool(tool) for tool in (3, 4, 5)] == [None] * 3
        """,
        Path.cwd(),
    )
