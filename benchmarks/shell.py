"""A real IPython for the benchmarks: its own folder, and no output to a terminal in the way."""

from __future__ import annotations

import os
import tempfile
from types import SimpleNamespace

from IPython.core.interactiveshell import InteractiveShell

__all__ = ["run", "start_shell"]


def start_shell() -> InteractiveShell:
    """The process's shell, as a kernel would have it."""
    os.environ["IPYTHONDIR"] = tempfile.mkdtemp(prefix="gpumemwidget-bench-")
    shell = InteractiveShell.instance()
    # IPython writes its history from another thread, and whoever makes a system call next gives it
    # the interpreter for up to a millisecond: that would be counted as a cost of the call.
    shell.history_manager.db_cache_size = 1_000_000
    # ipyexperiments asks the shell for its kernel, and the kernel for its shell.
    shell.kernel = SimpleNamespace(shell=shell)
    return shell


def run(shell: InteractiveShell, cell: str) -> None:
    """Run a cell as a person would, and fail if it fails."""
    shell.run_cell(cell, store_history=True).raise_error()
