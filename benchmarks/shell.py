"""A real IPython for the benchmarks: its own folder, and no output to a terminal in the way."""

from __future__ import annotations

import os
import tempfile
from time import perf_counter

from IPython.core.interactiveshell import InteractiveShell

__all__ = ["run", "start_shell", "time_cells"]

_BLOCK = 25


def start_shell() -> InteractiveShell:
    """The process's shell, as a kernel would have it."""
    os.environ["IPYTHONDIR"] = tempfile.mkdtemp(prefix="gpumemwidget-bench-")
    shell = InteractiveShell.instance()
    # IPython writes its history from another thread, and whoever makes a system call next gives it
    # the interpreter for up to a millisecond: that would be counted as a cost of the call.
    shell.history_manager.db_cache_size = 1_000_000
    return shell


def run(shell: InteractiveShell, cell: str) -> None:
    """Run a cell as a person would, and fail if it fails."""
    shell.run_cell(cell, store_history=True).raise_error()


def time_cells(shell: InteractiveShell, source: str = "pass") -> list[float]:
    """Return the seconds of each of some cells, which do nothing if no source is given.

    The first one is left out: it finds cold caches after a change of sides.
    """
    seconds = []
    for _ in range(_BLOCK + 1):
        start_s = perf_counter()
        run(shell, source)
        seconds.append(perf_counter() - start_s)
    return seconds[1:]
