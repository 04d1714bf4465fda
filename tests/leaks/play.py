"""Run the programs of the collections in a shell with the extension, and see what it says."""

from __future__ import annotations

import gc
import tempfile
from dataclasses import dataclass
from pathlib import Path

from IPython.utils.capture import capture_output

from gpumemwidget.model.leaks import Leak
from gpumemwidget.session.leak_watch import LeakWatch
from gpumemwidget.session.session import current_session
from tests.leaks.programs import Program
from tests.shell import open_shell


@dataclass(frozen=True)
class Found:
    """A leak that was found.

    Attributes:
        run: the number of the run of the cell, from 1.
        leak: what was found.
    """

    run: int
    leak: Leak


def play(program: Program, device: str, *, limit: str = "") -> list[Found]:
    """Run a program's cells, and return what was found in each.

    Args:
        program: its cells.
        device: ``cpu`` or ``cuda``.
        limit: how much of each GPU the program may have: ``2GiB``; ``""`` for all.
    """
    found: list[Found] = []
    with tempfile.TemporaryDirectory() as folder, open_shell(Path(folder)) as shell:
        shell.user_ns["DEVICE"] = device
        n_runs: dict[str, int] = {}
        with capture_output():
            shell.run_cell("%load_ext gpumemwidget", store_history=True)
            if limit:
                shell.run_cell(f"%memlimit {limit}", store_history=True).raise_error()
            leaks: list[Leak] = []
            current_session().attach(LeakWatch).found.add(leaks.append)
            for cell in program.runs:
                n_runs[cell] = n_runs.get(cell, 0) + 1
                result = shell.run_cell(cell, store_history=True)
                assert result.success or program.raises, result
                found += [Found(n_runs[cell], leak) for leak in leaks]
                leaks.clear()
            failure = current_session().last_failure
            shell.run_cell("%unload_ext gpumemwidget", store_history=True)
        assert failure is None, failure
    # The next one begins as in a new kernel.
    gc.collect()
    return found
