"""The host's lines: each change belongs to the innermost line of the cell that ran."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.backends.host import find_malloc
from gpumemwidget.leaks.steps import LoopEvents
from gpumemwidget.model.traces import HostLines, NoteKind, TraceNote
from gpumemwidget.tracing.line_watch import LineReadings, LineWatch, describe_lines, watch_lines
from gpumemwidget.tracing.sources import Source, Sources

MIB = 1 << 20
FILENAME = "<cell-7>"
_HAS_MONITORING = sys.version_info >= (3, 12)
needs_monitoring = pytest.mark.skipif(
    not _HAS_MONITORING, reason="before Python 3.12 reading ends for good when it costs too much"
)


class Heap:
    """A malloc whose count moves only when a cell says so."""

    def __init__(self, in_use_bytes: int = 100 * MIB) -> None:
        self.in_use_bytes = in_use_bytes

    def read(self) -> int:
        return self.in_use_bytes

    def take(self, n_mib: float) -> None:
        self.in_use_bytes += int(n_mib * MIB)

    def give(self, n_mib: float) -> None:
        self.in_use_bytes -= int(n_mib * MIB)


class Ran:
    """A cell that was read, and what became of it."""

    def __init__(self, source: str, readings: LineReadings, error: BaseException | None) -> None:
        self.readings = readings
        self.error = error
        self.host = describe_lines(readings, Sources(Source("In [7]", FILENAME, "cell", source)))

    @property
    def changes(self) -> dict[int, float]:
        """By line, its change in MiB."""
        return {line.line: line.net_bytes / MIB for line in self.host.lines if line.net_bytes}

    @property
    def unread(self) -> float:
        """What changed in pauses, in MiB."""
        return self.host.unread_bytes / MIB


def run(
    source: str,
    heap: Heap | None = None,
    *,
    read: Callable[[], int] | None = None,
    names: dict[str, Any] | None = None,
    execute: Callable[[CodeType, dict[str, Any]], object] = exec,
    is_timed: bool = False,
) -> Ran:
    """Read a cell while it runs, and check that what is told of it adds up.

    Time goes on with each look at the clock alone, unless ``is_timed``: on a machine that is busy
    each reading would seem dear.
    """
    heap = Heap() if heap is None else heap
    namespace = {"heap": heap, "take": heap.take, "give": heap.give, **(names or {})}
    watch = watch_lines(read or heap.read, on_interrupt=lambda: None)
    if not is_timed:
        watch._readings._clock_ns = itertools.count().__next__
        watch._readings.call_ns = 0
    code = compile(source, FILENAME, "exec")
    error = None

    is_read = watch.start(lambda frame: frame.f_code is code)
    try:
        execute(code, namespace)
    except BaseException as exc:  # noqa: BLE001 - told to the test
        error = exc
    finally:
        readings = watch.stop()

    assert is_read
    ran = Ran(source, readings, error)
    check_sums(ran.host)
    return ran


def check_sums(host: HostLines) -> None:
    """What is said adds up to what malloc counted at the end."""
    lines = sum(line.net_bytes for line in host.lines)
    total = host.before_bytes + lines + host.outside_bytes + host.unread_bytes
    assert total == host.after_bytes


# -- To which line a change belongs ----------------------------------------------------------------


def test_an_error_that_ends_the_cell_is_the_cell_s_own() -> None:
    """Its traceback has the cell's frames alone, and the lines until then are told."""
    ran = run("take(1)\ndef f():\n    take(2)\n    1 / 0\nf()\ntake(4)\n")

    assert isinstance(ran.error, ZeroDivisionError)
    files = []
    traceback = ran.error.__traceback__
    while traceback is not None:
        files.append(traceback.tb_frame.f_code.co_filename)
        traceback = traceback.tb_next
    assert files == [__file__, FILENAME, FILENAME]
    assert ran.changes == {1: 1, 3: 2}


def test_other_threads_are_not_read() -> None:
    """Their lines have nothing; what they take counts for the line that runs meanwhile."""
    ran = run(
        "import threading\ndef f():\n    take(1)\n"
        "t = threading.Thread(target=f)\nt.start()\nt.join()\ntake(2)\n"
    )

    assert ran.changes.get(3) is None
    assert sum(ran.changes.values()) == 3
    assert ran.changes[7] == 2


# -- From a running frame on -----------------------------------------------------------------------


class Tensor:
    """What a function's local variable holds."""


class Begun:
    """Reading that a function of a cell begins by ``begin``, at the frame that calls it."""

    def __init__(self, **options: Any) -> None:
        self.heap = Heap()
        self.outlives_frame: bool = options.pop("outlives_frame", False)
        self.watch: LineWatch = watch_lines(self.heap.read, on_interrupt=lambda: None, **options)
        if not options:
            self.watch._readings._clock_ns = itertools.count().__next__
            self.watch._readings.call_ns = 0

    def begin(self) -> None:
        assert self.watch.start(sys._getframe(1), outlives_frame=self.outlives_frame)

    def run(self, source: str) -> dict[str, Any]:
        """Run a cell; return its namespace."""
        namespace = {
            "begin": self.begin,
            "take": self.heap.take,
            "Tensor": Tensor,
            "ref": weakref.ref,
            "is_on": lambda: self.watch.is_on,
            "list_hooks": list_hooks,
        }
        exec(compile(source, FILENAME, "exec"), namespace)
        return namespace

    @property
    def changes(self) -> dict[int | None, float]:
        """By line, its change in MiB; ``None`` for what changed outside the lines."""
        changes = self.watch.stop().changes
        return {place and place[1]: n_bytes / MIB for place, n_bytes in changes.items()}


def list_hooks() -> list[object]:
    """What is set in Python now that follows code, and the caller's frame."""
    monitoring = getattr(sys, "monitoring", None)
    tools = [monitoring.get_tool(tool) for tool in (3, 4, 5)] if monitoring else []
    return [hook for hook in (sys.gettrace(), sys._getframe(1).f_trace, *tools) if hook is not None]


_ENDS = {"returns": "    return", "fails": "    {}['no such key']", "fails below": "    fail()"}


@pytest.mark.parametrize("end", _ENDS.values(), ids=_ENDS)
def test_reading_ends_with_the_function_that_it_began_in(end: str) -> None:
    """Nothing is followed in the rest of the cell, and what the function held is gone."""
    begun = Begun()

    cell = begun.run(
        "def fail():\n    take(1)\n    1 / 0\n"
        "def step():\n    tensor = Tensor()\n    take(2)\n    return ref(tensor)\n"
        "def train():\n    global kept, stepped\n    tensor = Tensor()\n    kept = ref(tensor)\n"
        f"    begin()\n    stepped = step()\n    take(4)\n    was_on.append(is_on())\n{end}\n"
        "was_on = []\ntry:\n    train()\nexcept (KeyError, ZeroDivisionError):\n    pass\n"
        "ended = not is_on(), list_hooks(), kept(), stepped()\n"
        "take(8)\nstep()\n"
    )

    assert cell["was_on"] == [True]
    assert cell["ended"] == (True, [], None, None)
    assert begun.changes == {6: 2, 14: 4, **({2: 1} if "fail()" in end else {})}


def test_no_frame_is_held_while_reading_goes_on() -> None:
    """What a function held is gone once it has returned, also where it began the reading."""
    begun = Begun(outlives_frame=True)

    cell = begun.run(
        "def enter():\n    global kept\n    tensor = Tensor()\n    kept = ref(tensor)\n"
        "    begin()\n    take(1)\n"
        "def main():\n    tensor = Tensor()\n    enter()\n    return ref(tensor)\n"
        "other = main()\n"
        "is_kept = kept() is not None or other() is not None\ntake(2)\nwas_on = is_on()\n"
    )

    assert not cell["is_kept"]
    assert cell["was_on"]
    assert begun.changes == {6: 1, 13: 2}
    assert list_hooks() == []


def test_a_generator_that_yields_has_not_ended() -> None:
    """Its lines are read when it goes on; from Python 3.12 on reading ends as it does."""
    begun = Begun()

    cell = begun.run(
        "def load():\n    begin()\n    take(1)\n    yield is_on()\n    take(2)\n    yield is_on()\n"
        "was_on = list(load())\nended = not is_on()\n"
    )

    assert cell["was_on"] == [True, True]
    assert cell["ended"] == _HAS_MONITORING
    assert begun.changes.items() >= {3: 1, 5: 2}.items()
    assert list_hooks() == []


def test_a_function_s_end_is_noticed_in_a_pause() -> None:
    """However often it was called before, while nothing was read."""
    begun = Begun(grace_ns=-(10**18))

    cell = begun.run(
        "def train(n):\n    if n:\n        begin()\n"
        "    for _ in range(n):\n        train(0)\n    return n\n"
        "train(1000)\nended = not list_hooks()\n"
    )
    begun.watch.stop()

    assert cell["ended"]


# -- Real memory -----------------------------------------------------------------------------------


def test_a_cell_that_allocates_nothing_shows_nothing() -> None:
    """Our own bookkeeping is not in the figures."""
    malloc = find_malloc()
    assert malloc is not None
    source = (
        "x = 0\nfor i in range(3000):\n    x = i\n"
        "def f():\n    return 1\nfor i in range(500):\n    f()\n"
    )

    largest = []
    for _ in range(3):
        ran = run(source, read=malloc.read_in_use, is_timed=True)
        amounts = [line.net_bytes for line in ran.host.lines]
        amounts += [ran.host.outside_bytes, ran.host.unread_bytes]
        largest.append(max(map(abs, amounts)))

    # Another thread of the test runner may take memory during one of the runs.
    assert min(largest) < 4096


# -- What it costs ---------------------------------------------------------------------------------


def test_a_loop_of_cheap_lines_is_not_read_each_time() -> None:
    """What changed in between is one sum."""
    n = 300_000
    ran = run(f"for i in range({n}):\n    heap.in_use_bytes += 1000\n    j = i\n", is_timed=True)

    assert ran.host.after_bytes == 100 * MIB + n * 1000
    assert ran.host.unread_bytes > 0
    assert ran.changes.keys() <= {2}


@needs_monitoring
def test_lines_are_read_again_after_a_pause() -> None:
    """What comes after a hot loop is each line's own again."""
    source = (
        "for i in range(200_000):\n    j = i\n"
        "import time\nfor i in range(40):\n    time.sleep(0.025)\n    take(1)\n"
    )

    ran = run(source, is_timed=True)

    # On a machine that is busy the first turns may still fall into the pause.
    assert ran.changes.get(6, 0) >= 20
    assert ran.changes.get(6, 0) + ran.unread == 40


@needs_monitoring
def test_a_long_call_of_a_library_keeps_what_it_takes() -> None:
    """However long it takes, as an import: its line ran all the time."""
    library = compile(
        "def work(end_s):\n"
        "    def step():\n        return clock()\n"
        "    while step() < end_s:\n        pass\n"
        "    take(50)\n"
        "    while step() < end_s + 0.1:\n        pass\n",
        "/usr/lib/python3/dist-packages/library.py",
        "exec",
    )
    heap = Heap()
    names: dict[str, Any] = {"take": heap.take, "clock": time.perf_counter}
    exec(library, names)

    ran = run(
        "take(30)\nwork(clock() + 0.2)\nfor i in range(40):\n    time.sleep(0.002)\ntake(7)\n",
        heap,
        names={**names, "time": time},
        is_timed=True,
    )

    assert ran.changes[1] == 30
    assert ran.changes[2] == 50


# -- Hostile cells ---------------------------------------------------------------------------------


def test_what_python_traces_with_is_as_before() -> None:
    """Nothing of ours stays, and on Python 3.12 and later nothing is seen within the cell."""
    before = sys.gettrace(), threading.gettrace(), sys.getprofile()

    ran = run("import sys\nseen = sys.gettrace()\n", names=(names := {}))

    assert (sys.gettrace(), threading.gettrace(), sys.getprofile()) == before
    assert ran.error is None
    assert names == {}
    if _HAS_MONITORING:
        monitoring = sys.monitoring  # type: ignore[attr-defined]
        assert [monitoring.get_tool(tool) for tool in (3, 4, 5)] == [None] * 3


@needs_monitoring
@pytest.mark.parametrize("theirs", [3, 4, 5])
def test_another_tool_may_have_one_of_the_numbers(theirs: int) -> None:
    """There is one for what follows loops, and one for the lines."""
    monitoring = sys.monitoring  # type: ignore[attr-defined]
    turns = []

    def run_code(code_obj: CodeType, names: dict[str, Any]) -> None:
        exec(code_obj, names)

    def note_turn(key: tuple[int, int]) -> bool:
        turns.append(key)
        return True

    loops = LoopEvents(note_turn, clock=itertools.count().__next__)
    monitoring.use_tool_id(theirs, "theirs")
    try:
        loops.open(run_code.__code__)
        ran = run("for i in range(5):\n    take(1)\n", execute=run_code)
    finally:
        loops.close()
        monitoring.free_tool_id(theirs)

    assert turns
    assert ran.changes == {2: 5}


def test_a_debugger_s_place_is_not_taken() -> None:
    """Where somebody traces this thread, lines are not told before Python 3.12."""
    events = []

    def trace(frame: Any, event: str, argument: object) -> None:
        events.append(event)

    watch = watch_lines(Heap().read, on_interrupt=lambda: None)
    sys.settrace(trace)
    try:
        is_read = watch.start(lambda _frame: False)
        is_kept = sys.gettrace() is trace
        watch.stop()
    finally:
        sys.settrace(None)

    assert is_kept
    assert is_read == _HAS_MONITORING


def test_a_cell_that_sets_its_own_trace_keeps_it() -> None:
    """``sys.settrace`` in the cell is the cell's affair."""
    source = (
        "import sys\ntake(1)\nevents = []\n"
        "def trace(frame, event, argument):\n    events.append(event)\n"
        "sys.settrace(trace)\nsys.setprofile(trace)\n(lambda: take(2))()\n"
        "is_kept = sys.gettrace() is trace\nsys.settrace(None)\nsys.setprofile(None)\ntake(4)\n"
    )
    seen: dict[str, Any] = {}

    def execute(code: CodeType, namespace: dict[str, Any]) -> None:
        exec(code, namespace)
        seen.update(namespace)

    ran = run(source, execute=execute)

    assert ran.error is None
    assert seen["is_kept"]
    assert "call" in seen["events"]
    assert ran.changes[2] == 1
    assert ran.host.after_bytes == 107 * MIB
    assert sys.gettrace() is None


def test_deep_recursion_ends_as_it_would() -> None:
    """The limit is the cell's own error, which shows nothing of ours; what comes after is read."""
    ran = run("take(1)\ndef f(n):\n    return f(n + 1)\ntry:\n    f(0)\nfinally:\n    take(2)\n")

    error = ran.error
    assert ran.host.after_bytes == 103 * MIB
    if _HAS_MONITORING:
        assert ran.changes == {1: 1, 7: 2}
    assert isinstance(error, RecursionError)
    assert (error.__context__, error.__cause__) == (None, None)
    names = {each.filename for each in traceback.extract_tb(error.__traceback__)}
    assert not any("gpumemwidget" in name for name in names)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_not_read() -> None:
    """It runs on, without us, and the parent goes on to be read."""
    source = (
        "import os, sys\nchild = os.fork()\n"
        "if not child:\n"
        "    monitoring = getattr(sys, 'monitoring', None)\n"
        "    tools = [monitoring.get_tool(n) for n in (3, 4, 5)] if monitoring else []\n"
        "    os._exit(7 if sys.gettrace() is None and not any(tools) else 8)\n"
        "status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\ntake(status)\n"
    )

    ran = run(source)

    assert ran.error is None
    assert ran.changes == {8: 7}


def test_an_interrupt_is_the_cell_s() -> None:
    """Ctrl-C ends a busy cell as it would; one that lands in our own code is sent again."""

    def send_again() -> None:
        threading.Timer(0.02, signal.raise_signal, (signal.SIGINT,)).start()

    heap = Heap()
    watch = watch_lines(heap.read, on_interrupt=send_again)
    code = compile("while True:\n    heap.take(0)\n", FILENAME, "exec")
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))

    timer.start()
    watch.start(lambda frame: frame.f_code is code)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            exec(code, {"heap": heap})
    finally:
        watch.stop()
        timer.join()

    assert caught.traceback[1].frame.code.raw is code
    if _HAS_MONITORING:
        files = {each.frame.code.raw.co_filename for each in caught.traceback}
        assert files == {__file__, FILENAME}
    assert sys.gettrace() is None


def test_an_error_of_ours_is_not_the_cell_s() -> None:
    """Where reading fails in mid-cell the cell goes on, and the report says so."""
    counts = iter([100 * MIB] * 8)

    ran = run("for i in range(10):\n    take(1)\ndone = True\n", read=counts.__next__)

    assert ran.error is None
    assert ran.host.notes == (TraceNote(NoteKind.FAILED, "StopIteration"),)


def test_an_error_of_a_signal_s_handler_is_the_cell_s() -> None:
    """Whatever the user's handler raises reaches the cell, also from within our own code."""

    def handle(number: int, frame: Any) -> None:
        raise TimeoutError("time is up")

    previous = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        ran = run("while True:\n    take(0)\n", is_timed=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)

    assert isinstance(ran.error, TimeoutError)
    assert ran.error.__traceback__ is not None
    assert tuple(ran.readings.files) == (FILENAME,)


# -- Random programs: each line has its truth ------------------------------------------------------

_N_FUNCTIONS = 3

#: What a line does: how much it takes or gives back, in units of 4 KiB.
_amounts = st.integers(-20, 20).filter(bool)
_simple = st.one_of(
    st.tuples(st.just("take"), _amounts),
    st.tuples(st.just("both"), _amounts, _amounts),
    st.tuples(st.just("call"), st.integers(0, _N_FUNCTIONS - 1), _amounts),
    st.just(("fail",)),
)


def _nest(blocks: st.SearchStrategy[Sequence[Any]]) -> st.SearchStrategy[Sequence[Any]]:
    """Blocks whose statements may hold some of ``blocks``."""
    statements = st.one_of(
        _simple,
        st.tuples(st.just("loop"), st.integers(0, 3), blocks),
        st.tuples(st.just("generate"), st.integers(0, 3), _amounts, blocks),
        st.tuples(st.just("try"), blocks, blocks),
    )
    return st.lists(statements, min_size=1, max_size=3)


_blocks = _nest(_nest(st.lists(_simple, min_size=1, max_size=3)))


def _write(block: Sequence[Any], indent: str, *, n_functions: int) -> list[str]:
    """A block as source. Functions call those before them alone, so that each program ends."""
    lines = []
    for kind, *arguments in block:
        if kind == "take":
            lines.append(f"{indent}take({arguments[0]})")
        elif kind == "both":
            lines.append(f"{indent}take({arguments[0]}); take({arguments[1]})")
        elif kind == "call":
            number, amount = arguments
            call = f"f{number}()" if number < n_functions else "abs(1)"
            lines.append(f"{indent}{call}; take({amount})")
        elif kind == "loop":
            n, body = arguments
            lines.append(f"{indent}for _ in range({n}):")
            lines += _write(body, f"{indent}    ", n_functions=n_functions)
        elif kind == "generate":
            n, amount, body = arguments
            lines.append(f"{indent}for _ in (take({amount}) for _ in range({n})):")
            lines += _write(body, f"{indent}    ", n_functions=n_functions)
        elif kind == "try":
            body, handler = arguments
            lines.append(f"{indent}try:")
            lines += _write(body, f"{indent}    ", n_functions=n_functions)
            lines.append(f"{indent}except ValueError:")
            lines += _write(handler, f"{indent}    ", n_functions=n_functions)
        else:
            lines.append(f"{indent}raise ValueError")
    return lines


@given(st.lists(_blocks, min_size=_N_FUNCTIONS, max_size=_N_FUNCTIONS), _blocks)
def test_each_line_has_what_it_took(functions: Sequence[Any], cell: Sequence[Any]) -> None:
    """By the frame that called: what each line changed; and what lines still hold adds up."""
    lines: list[str] = []
    for number, body in enumerate(functions):
        lines.append(f"def f{number}():")
        lines += _write(body, "    ", n_functions=number)
    lines += _write(cell, "", n_functions=_N_FUNCTIONS)
    source = "\n".join(lines) + "\n"
    heap = Heap(1 << 40)
    truth: Counter[int] = Counter()

    def take(amount: int) -> None:
        heap.in_use_bytes += amount * 4096
        truth[sys._getframe(1).f_lineno] += amount * 4096

    ran = run(source, heap, names={"take": take})

    assert ran.error is None or isinstance(ran.error, ValueError)
    told = {line.line: line.net_bytes for line in ran.host.lines if line.net_bytes}
    assert told == {line: n_bytes for line, n_bytes in truth.items() if n_bytes}
    assert ran.host.after_bytes - ran.host.before_bytes == sum(truth.values())
    assert (ran.host.outside_bytes, ran.host.unread_bytes) == (0, 0)
