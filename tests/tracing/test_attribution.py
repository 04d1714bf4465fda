"""Who allocated: the cell's line, the running backward, a module, or nobody that can be named."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpumemwidget.model.devices import Frame
from gpumemwidget.model.traces import Call, CallMark, DeviceTrace, NoteKind, Origin, TraceNote
from gpumemwidget.tracing.device_trace import describe_device
from tests.tracing.device import EARLIER, MIB, START_US, Device, at, make_sources

TORCH = "/usr/lib/python3/dist-packages/torch"
MODULE = f"{TORCH}/nn/modules/module.py"

STEP = """class Net:
    def forward(self, x):
        return self.fc(x)

def step(x):
    loss = net(x)
    loss.backward()
    opt.step()

def twice(x):
    net(x)
    net(x)
"""


def in_step(
    line: int, *inner: Frame, function: str = "step", cell_line: int = 1
) -> tuple[Frame, ...]:
    """The stack of a line of an earlier cell's function."""
    return at(cell_line, *inner, Frame(EARLIER, line, function))


def trace(
    stacks: Sequence[tuple[Frame, ...]], text: str, *, marks: Sequence[CallMark] = ()
) -> DeviceTrace:
    """The record of one allocation of 1 MiB for each stack; all of them stay."""
    device = Device()
    device.allocate(2 * MIB)
    device.start()
    for frames in stacks:
        device.allocate(MIB, "", frames)
    sources = make_sources(text, STEP)
    return describe_device(device.end(), sources=sources, start_us=START_US, marks=marks)


def list_lines(found: DeviceTrace, unit: int = 0) -> dict[int, int]:
    """MiB by line."""
    return {
        line.line: line.use.allocated_bytes // MIB
        for line in found.units[unit].lines
        if line.use is not None
    }


def when(number: int) -> int:
    """The time of an allocation's event: each second one has a segment before it."""
    return START_US + 1 + number + number // 2 + 1


BEGUN = (
    Frame(f"{TORCH}/autograd/__init__.py", 231, "_make_grads"),
    Frame(f"{TORCH}/autograd/__init__.py", 374, "backward"),
    Frame(f"{TORCH}/_tensor.py", 631, "backward"),
)
RECOMPUTED = (
    Frame(EARLIER, 3, "forward"),
    Frame(MODULE, 1790, "_call_impl"),
    Frame(f"{TORCH}/utils/checkpoint.py", 308, "backward"),
    Frame(f"{TORCH}/autograd/function.py", 317, "apply"),
)
OUTSIDE = (
    Frame("/usr/lib/python3/dist-packages/IPython/core/displayhook.py", 9, "__call__"),
    Frame("<frozen runpy>", 198, "_run_module_as_main"),
)
THREAD = (Frame(EARLIER, 6, "step"), Frame("/usr/lib/python3.11/threading.py", 9, "_bootstrap"))


def test_what_had_gone_into_a_backward_is_placed_there() -> None:
    """The last stack that was seen is that of a backward: its line, in the function, too."""
    found = trace(
        [in_step(6), in_step(7, *BEGUN), (), RECOMPUTED, in_step(8), at(2)], "step(x)\ny = 1\n"
    )

    assert list_lines(found) == {1: 5, 2: 1}
    assert list_lines(found, 1) == {3: 1, 6: 1, 7: 2, 8: 1}
    assert found.notes == (TraceNote(NoteKind.BACKWARD_INFERRED, n_bytes=2 * MIB),)


def test_the_stack_of_a_free_is_not_taken_for_what_runs() -> None:
    """It is that of the block's allocation, if the history was not asked for more."""
    device = Device()
    device.start()
    piece = device.allocate(MIB, "", at(1))
    device.allocate(MIB, "", at(3, *BEGUN))
    device.free(piece)
    device.events[-2:] = [(*event[:4], at(1)) for event in device.events[-2:]]
    device.allocate(MIB, "", ())
    sources = make_sources("x = f()\ndel x\nx.backward()")

    found = describe_device(device.end(), sources=sources, start_us=START_US)

    assert list_lines(found) == {1: 1, 3: 2}


def test_calls_that_were_seen_are_no_inference() -> None:
    """Between its begin and its end what has no stack is the call's, whatever the text says."""
    mark = CallMark("backward", START_US, when(1), 1, "", in_step(7, *BEGUN[1:]))
    found = trace([at(2), (), ()], "a\nb\nx.backward()", marks=[mark])

    assert list_lines(found) == {1: 1, 2: 2}
    assert list_lines(found, 1) == {7: 1}
    assert found.notes == (TraceNote(NoteKind.BACKWARD_INFERRED, n_bytes=MIB),)


def test_a_thread_that_runs_a_backward_has_no_line() -> None:
    """It was seen to run, and nothing of the cell's was below it."""
    mark = CallMark("backward", START_US, None, 2, "", (*BEGUN[1:], *THREAD))
    found = trace([at(1), ()], "x.backward()", marks=[mark])

    assert list_lines(found) == {1: 1}
    assert found.unplaced.allocated_bytes == MIB
    assert found.notes == ()


def test_what_is_not_the_cells_has_no_line() -> None:
    """Threads without a line of the cell's, the shell itself, and autograd before any line."""
    found = trace([(), OUTSIDE, THREAD, at(1)], "x.backward()")

    assert list_lines(found) == {1: 1}
    assert found.unplaced.allocated_bytes == 3 * MIB
    assert list_lines(found, 1) == {6: 1}
    assert [part.origin for part in found.peak] == [
        Origin.OUTSIDE_LINES,
        Origin.BEFORE_CELL,
        Origin.LINE,
    ]


def test_a_history_without_stacks_says_so() -> None:
    """All of it is no line's."""
    found = trace([(), ()], "a")

    assert list_lines(found) == {}
    assert found.unplaced.allocated_bytes == 2 * MIB
    assert found.notes == (TraceNote(NoteKind.NO_STACKS),)


def _linear(number: int) -> tuple[Frame, ...]:
    return (
        Frame(f"{TORCH}/nn/modules/linear.py", 134, "forward"),
        Frame(MODULE, 1790, "_call_impl"),
        Frame(MODULE, 1779, "_wrapped_call_impl"),
        Frame(EARLIER, 3, "forward"),
        Frame(MODULE, 1790, "_call_impl"),
        Frame(MODULE, 1779, "_wrapped_call_impl"),
        Frame(EARLIER, number, "step"),
    )


def _flatten(calls: Sequence[Call], level: int = 0) -> list[tuple[int, tuple[str, ...], str, int]]:
    found = []
    for call in calls:
        mib = call.use.allocated_bytes // MIB
        found.append((level, call.modules, " > ".join(call.functions), mib))
        found += _flatten(call.calls, level + 1)
    return found


@pytest.mark.parametrize("first_end", [1, 2])
def test_calls_below_a_line_are_those_a_person_would_name(first_end: int) -> None:
    """Modules by their paths where their calls were seen, without what only passes calls on.

    One may begin in the microsecond in which the one before it ends.
    """
    marks = [
        CallMark("module", when(1), when(3), 1, "net"),
        CallMark("module", when(1), when(first_end), 1, "net.h.0"),
        CallMark("module", when(2), when(3), 1, "net.h.1"),
        # Another thread's, at the same time.
        CallMark("module", when(0), None, 2, "other"),
    ]
    stacks = [at(1, *_linear(6)) for _ in range(5)]

    found = trace(stacks, "step(x)", marks=marks)

    (line,) = found.units[0].lines
    linear = "torch.nn.modules.linear.forward"
    assert _flatten(line.calls) == [
        (0, (), "step", 5),
        (1, ("net.h.0", "net.h.1"), f"Net.forward > {linear}", 3),
        (1, (), f"Net.forward > {linear}", 2),
    ]


def test_many_calls_are_bounded_and_none_is_lost() -> None:
    """The biggest ones stay, the rest is one of its own with its bytes."""
    stacks = [
        at(1, Frame(f"{TORCH}/f.py", 9, f"run_{number}"))
        for number in range(1, 101)
        for _ in range(3 if number == 7 else 1)
    ]

    found = trace(stacks, "run()")

    (line,) = found.units[0].lines
    assert line.use is not None
    assert len(line.calls) == 2
    assert line.calls[0].functions == ("torch.f.run_7",)
    assert line.calls[0].use.allocated_bytes == 3 * MIB
    assert (line.calls[1].functions, line.calls[1].n_calls) == ((), 99)
    assert sum(call.use.allocated_bytes for call in line.calls) == line.use.allocated_bytes


def test_lines_around_those_of_an_earlier_cell_are_shown() -> None:
    """Three above and three below; of the traced cell all of them."""
    found = trace([in_step(8)], "step(x)\n\nlast")

    assert [line.line for line in found.units[0].lines] == [1, 2, 3]
    assert [(line.line, line.text) for line in found.units[1].lines] == [
        (number, STEP.splitlines()[number - 1]) for number in range(5, 12)
    ]
    assert (found.units[1].name, found.units[1].kind) == ("In [3]", "earlier cell")
