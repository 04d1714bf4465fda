"""The programs are what they are told to be: leaks grow from their lines, clean ones do not grow.

The cells run as plain Python. What IPython would keep is kept here too: displayed values in
``Out``, and the last error.
"""

from __future__ import annotations

import ast
import gc
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
import torch

from tests.leaks.programs import CLEAN, LEAKS, Leak, Program, order_cells
from tests.zoo.harness import Watch

_MIB = 1 << 20
#: Maximum growth of a clean program: floats of its history, small displayed tensors.
_SMALL_BYTES = 64 * 1024
#: Minimum share of what a leak keeps that each of its lines has led to.
_MIN_SHARE = 0.25
#: Number of new storages from one reading of what is alive to the next.
_STRIDE = 16
#: Programs that run each time; the others run with ``-m slow``.
_QUICK = {
    "activations_appended_by_hooks",
    "cell_that_fails_halfway_once",
    "kv_cache_object_with_growing_layers",
    "quickstart_train_and_test",
    "replay_list_with_capacity_and_position",
    "validation_losses_without_no_grad",
}

# The first optimizer of a process imports modules.
torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])


class LineWatch(Watch):
    """Knows every storage that a program makes, and the lines of its cells that led to it.

    Attributes:
        readings: bytes alive after every few new storages and after each cell.
    """

    def __init__(self) -> None:
        super().__init__("cpu")
        self.readings: list[int] = []
        self._cells: dict[str, list[str]] = {}
        self._lines: dict[int, list[str]] = {}
        self._n_new = 0
        #: The lines and the bytes of what was alive at the last reading, and at the highest one.
        self._last: list[tuple[list[str], int]] = []
        self._fullest = self._last

    def begin_cell(self, filename: str, text: str) -> None:
        """Forget the readings before a cell, which is compiled under this file name."""
        self._cells[filename] = text.splitlines()
        self.readings.clear()

    def add(self, tensor: torch.Tensor) -> None:
        """Watch a tensor's storage; a sparse tensor has none of its own."""
        if tensor.layout is not torch.strided:
            return
        n_known = len(self._storages)
        super().add(tensor)
        if len(self._storages) > n_known:
            self._lines[next(reversed(self._storages))] = self._list_running()
            self._n_new += 1
            if self._n_new % _STRIDE == 0:
                self.read()

    def read(self) -> int:
        """Return the bytes that are alive now, and forget the storages that are not."""
        for key, (reference, _, _) in list(self._storages.items()):
            if reference.expired():
                del self._storages[key], self._lines[key]
        self._last = [(self._lines[key], each[2]) for key, each in self._storages.items()]
        self.readings.append(sum(n_bytes for _, n_bytes in self._last))
        if self.readings[-1] == max(self.readings):
            self._fullest = self._last
        return self.readings[-1]

    def sum_lines(self, *, at_fullest: bool) -> tuple[Counter[str], Counter[str]]:
        """Return the bytes by innermost line, and by any line that was running.

        Args:
            at_fullest: whether to sum up what was alive at the highest reading, not at the last.
        """
        innermost: Counter[str] = Counter()
        through: Counter[str] = Counter()
        for lines, n_bytes in self._fullest if at_fullest else self._last:
            innermost[lines[0]] += n_bytes
            through.update(dict.fromkeys(lines, n_bytes))
        return innermost, through

    def _list_running(self) -> list[str]:
        """Return the lines of cells that are running, innermost first."""
        lines = []
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code is not Player.run_cell.__code__:
            cell = self._cells.get(frame.f_code.co_filename)
            if cell is not None:
                lines.append(cell[frame.f_lineno - 1].strip())
            frame = frame.f_back
        return lines


class Player:
    """Runs the cells of a program.

    Attributes:
        watch: what the cells made.
        n_errors: number of runs that ended with an exception.
    """

    def __init__(self, program: Program) -> None:
        self.watch = LineWatch()
        self.n_errors = 0
        self._program = program
        self._names: dict[str, Any] = {"__name__": "__main__", "DEVICE": "cpu", "Out": {}}
        self._last_error: BaseException | None = None

    def play(self) -> list[int]:
        """Run all cells; return the bytes that are alive after each run of the last one.

        Raises:
            Exception: a cell's own, unless the program is said to raise.
        """
        alive = []
        for number, cell in enumerate(self._program.runs, 1):
            try:
                self.run_cell(cell, number)
            except (RuntimeError, KeyboardInterrupt) as error:
                if not self._program.raises:
                    raise
                self._last_error = error
                self.n_errors += 1
            n_bytes = self.watch.read()
            if cell == self._program.runs[-1]:
                alive.append(n_bytes)
        return alive

    def run_cell(self, cell: str, number: int) -> None:
        """Run a cell, and display the value of its last line."""
        filename = f"<cell {number}>"
        self.watch.begin_cell(filename, cell)
        body = ast.parse(cell).body
        last = body[-1]
        displayed = last.value if isinstance(last, ast.Expr) and cell[-1] != ";" else None
        module = ast.Module(body[:-1] if displayed else body, type_ignores=[])
        with self.watch:
            exec(compile(module, filename, "exec", dont_inherit=True), self._names)
            if displayed is not None:
                code = compile(ast.Expression(displayed), filename, "eval", dont_inherit=True)
                self._names["Out"][number] = eval(code, self._names)


@pytest.fixture(autouse=True)
def _quiet_process() -> Iterator[None]:
    """Count on references alone, without the collector, and wait for no other threads' cores."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()
    torch.set_num_threads(n_threads)


def _mark_slow(programs: Sequence[Program]) -> list[Any]:
    return [
        pytest.param(each, id=each.name, marks=() if each.name in _QUICK else pytest.mark.slow)
        for each in programs
    ]


def test_there_are_enough_of_each_kind() -> None:
    """28 clean programs, 10 leaks over runs and 12 within a loop, each of a name of its own."""
    names = [program.name for program in (*CLEAN, *LEAKS)]
    kinds = Counter(leak.found_by for leak in LEAKS)

    assert len(CLEAN) >= 28
    assert kinds["runs"] >= 10
    assert kinds["steps"] >= 12
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() and name.islower() for name in names)
    assert set(names) >= _QUICK


def test_cells_run_in_the_order_that_is_told() -> None:
    """A cell is run again by its number; a number too many or too few is an error."""
    text = """
        x = 1
        # %%
        x += 1
    """

    assert order_cells(text, "1 2 2") == ("x = 1", "x += 1", "x += 1")
    with pytest.raises(ValueError, match="2 cells, but the order is '1 1'"):
        order_cells(text, "1 1")


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.name)
def test_lines_of_leaks_stand_in_their_cells(leak: Leak) -> None:
    """Each is a whole line of a cell, without its indentation."""
    lines = {line.strip() for cell in leak.runs for line in cell.splitlines()}

    assert set(leak.lines) <= lines
    assert leak.runs.count(leak.grown) >= (4 if leak.found_by == "runs" else 1)


@pytest.mark.parametrize("program", _mark_slow(CLEAN))
def test_clean_programs_stop_growing(program: Program) -> None:
    """After its last two runs the last cell leaves no more than after one of the runs before."""
    player = Player(program)

    alive = player.play()

    assert len(alive) >= 4
    assert min(alive[-2:]) - max(alive[:-2]) <= _SMALL_BYTES, alive
    assert (player.n_errors > 0) == program.raises


@pytest.mark.parametrize("leak", _mark_slow([leak for leak in LEAKS if leak.unseen]))
def test_unseen_leaks_grow_from_their_lines(leak: Leak) -> None:
    """2 to 8 MiB in each run, or 0.2 to 2 MiB in each of 30 to 40 steps, most of it from a line.

    The reports on the others say as much: test_collections.py.
    """
    player = Player(leak)

    alive = player.play()

    if leak.found_by == "runs":
        grown = [after - before for before, after in itertools.pairwise(alive)]
        assert all(2 * _MIB <= each <= 8 * _MIB for each in grown), grown
    else:
        lows = _list_lows(player.watch.readings)
        grown = [after - before for before, after in itertools.pairwise(lows)]
        assert all(each > 0 for each in grown), lows
        assert 0.2 * 30 * _MIB <= max(player.watch.readings) - lows[0] <= 2 * 40 * _MIB
    innermost, through = player.watch.sum_lines(at_fullest=leak.found_by == "steps")
    [(line, _)] = innermost.most_common(1)
    assert line in leak.lines
    least_bytes = _MIN_SHARE * innermost.total()
    assert all(through[line] >= least_bytes for line in leak.lines), through


def _list_lows(readings: Sequence[int]) -> list[int]:
    """Return the lowest reading of each of the first five sixths: the last may be past the loop."""
    n = len(readings) // 6
    return [min(readings[start : start + n]) for start in range(0, 5 * n, n)]
