"""Ctrl-C while our callbacks of IPython events run: it ends the cell, and the records are right."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import gpumemwidget
from gpumemwidget.jupyter import extension as extensions
from gpumemwidget.session.interrupts import InterruptHold, ProtectedCallback
from gpumemwidget.session.session import Session, current_session
from tests.jupyter.notebook import Notebook, open_notebook

_PACKAGE = str(Path(gpumemwidget.__file__).parent)
_END = InterruptHold.end.__code__
#: Maximum number of moments to try: with more, something sends for ever.
_MOST_MOMENTS = 2000
_EVERY = pytest.mark.parametrize(
    "every", [10, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)


class Injector:
    """Sends SIGINT at one of the moments at which a callback of ours is called, runs or returns.

    Args:
        callback: the second of the event's two callbacks; the first one is traced too.
        at: the number of the moment.
    """

    def __init__(self, callback: ProtectedCallback[Any], at: int) -> None:
        self._entries = (ProtectedCallback.run.__code__, ProtectedCallback.settle.__code__)
        self._callback = callback
        self._at = at
        self._outermost: FrameType | None = None
        self._n_moments = 0
        self.has_sent = False

    def __enter__(self) -> Injector:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _argument: object) -> Callable[..., Any] | None:
        if self._outermost is None:
            is_entry = frame.f_code in self._entries
            if not is_entry or frame.f_locals["self"] is not self._callback:
                return None
            self._outermost = frame
        elif not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if frame.f_code is self._entries[1] or frame.f_code is _END:
            frame.f_trace_opcodes = True
        is_over = frame.f_code is _END and event == "return"
        self._hit()
        if frame is self._outermost and event == "return":
            self._outermost = None
        if is_over:
            # From here on SIGINT is handled as if we were not there.
            sys.settrace(None)
            assert frame.f_back is not None
            frame.f_back.f_trace = None
            return None
        return self._trace

    def _hit(self) -> None:
        self._n_moments += 1
        if self._n_moments > self._at:
            sys.settrace(None)
            self.has_sent = True
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def session(shell: InteractiveShell) -> Session:
    shell.run_cell("%load_ext gpumemwidget", store_history=True)
    # So that what is imported at the first cell is.
    shell.run_cell("x = 0", store_history=True)
    return current_session()


def _check_at_rest(shell: InteractiveShell, session: Session) -> None:
    """Nothing is left of the interrupt, and the next cell is recorded as any other."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert session.monitor.running is None
    assert not shell.ast_transformers
    n_cells = len(session.monitor.ledger)

    assert shell.run_cell("y = 1", store_history=True).success

    assert len(session.monitor.ledger) == n_cells + 1
    record = session.monitor.ledger[-1]
    assert (record.first_line, record.status) == ("y = 1", "ok")


@_EVERY
def test_at_any_moment_before_the_cell_it_ends_the_cell(
    shell: InteractiveShell, session: Session, every: int
) -> None:
    """The cell's own code does not run, and it is recorded as interrupted."""
    for moment in range(0, _MOST_MOMENTS, every):
        with Injector(extensions._extensions[shell].events._pre_run_cell, moment) as injector:
            result = shell.run_cell("x = 1", store_history=True)
        if not injector.has_sent:
            break

        assert isinstance(result.error_in_exec, KeyboardInterrupt), f"moment {moment}"
        assert shell.user_ns["x"] == 0
        record = session.monitor.ledger[-1]
        assert (record.first_line, record.status) == ("x = 1", "interrupted"), f"moment {moment}"
        _check_at_rest(shell, session)

    assert 100 < moment < _MOST_MOMENTS - every


@_EVERY
def test_at_any_moment_behind_the_cell_it_ends_the_cell_too(
    shell: InteractiveShell, session: Session, every: int
) -> None:
    """What the cell did is recorded once, and what waits behind it is not run by a front end."""
    for moment in range(0, _MOST_MOMENTS, every):
        n_cells = len(session.monitor.ledger)
        with Injector(extensions._extensions[shell].events._post_run_cell, moment) as injector:
            result = shell.run_cell(f"x = {moment}", store_history=True)
        if not injector.has_sent:
            break

        assert isinstance(result.error_in_exec, KeyboardInterrupt), f"moment {moment}"
        assert shell.user_ns["x"] == moment
        assert len(session.monitor.ledger) == n_cells + 1, f"moment {moment}"
        record = session.monitor.ledger[-1]
        assert record.first_line == f"x = {moment}"
        assert record.status in ("ok", "interrupted")
        _check_at_rest(shell, session)

    assert 100 < moment < _MOST_MOMENTS - every


def test_an_interrupt_that_ipython_meets_before_the_first_line_is_one(
    shell: InteractiveShell, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IPython reports it apart from one that meets a line of the cell."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shell, "run_code", interrupt)
        result = shell.run_cell("x = 1", store_history=True)

    assert isinstance(result.error_before_exec, KeyboardInterrupt)
    assert session.monitor.ledger[-1].status == "interrupted"
    _check_at_rest(shell, session)


#: Makes the next call of the method that reads at a cell's start, or at its end, bring a SIGINT.
_ARM = """
import signal
hardware = gpumemwidget.monitor().hardware

def arm(method):
    real = getattr(hardware, method)

    def interrupted():
        setattr(hardware, method, real)
        signal.raise_signal(signal.SIGINT)
        return real()

    setattr(hardware, method, interrupted)

reached = []
"""


@pytest.mark.slow
@pytest.mark.kernel
@pytest.mark.parametrize("first", ["", "import asyncio; await asyncio.sleep(0)\n"])
def test_the_front_end_is_told_what_came_before_the_cell(notebook: Notebook, first: str) -> None:
    """Its reply keeps the cells behind it from running, also where the cell awaits."""
    notebook.run(_ARM)
    notebook.run("arm('start_span')")

    cell = notebook.run(f"{first}reached.append(1)\nawait asyncio.sleep(0.2)\nreached.append(2)")
    after = notebook.run("'alive'")

    assert cell.status == "error"
    assert 2 not in notebook.evaluate("reached")
    assert (after.status, after.text) == ("ok", "'alive'")
    statuses = notebook.evaluate("[r.status for r in gpumemwidget.monitor().ledger]")
    assert statuses[-2:] == ["interrupted", "ok"]


@pytest.mark.slow
@pytest.mark.kernel
@pytest.mark.parametrize("first", ["", "import asyncio; await asyncio.sleep(0)\n"])
def test_the_front_end_is_told_what_came_behind_the_cell(notebook: Notebook, first: str) -> None:
    notebook.run(_ARM)

    cell = notebook.run(f"{first}arm('end_span')\nreached.append(1)")
    after = notebook.run("'alive'")

    assert cell.status == "error"
    assert (cell.reply["ename"], cell.text.strip()) == ("KeyboardInterrupt", "KeyboardInterrupt:")
    assert notebook.evaluate("reached") == [1]
    assert (after.status, after.text) == ("ok", "'alive'")
    statuses = notebook.evaluate("[r.status for r in gpumemwidget.monitor().ledger]")
    assert statuses[-2:] == ["ok", "ok"]


@pytest.mark.slow
@pytest.mark.kernel
def test_one_that_stops_an_oom_card_leaves_no_trace_open(notebook: Notebook) -> None:
    """The traced cell's report ends with the cell, and the next cell has none."""
    notebook.run(_ARM)
    notebook.run(
        "import torch\nclass Node: pass\nkept = [Node() for _ in range(5000)]\n"
        "for each in kept: each.others = [each]"
    )

    cell = notebook.run("%%memtrace --no-live\narm('end_span')\ntorch.empty(2**50)")
    after = notebook.run("'alive'")

    shown = "\n".join(map(str, cell.outputs))
    assert "%%memtrace" in shown
    assert "Error in callback" not in shown
    assert (after.status, after.text, len(after.outputs)) == ("ok", "'alive'", 1)
    assert notebook.evaluate("gpumemwidget.monitor().is_sampling") is False


@pytest.mark.slow
@pytest.mark.kernel
def test_a_kernel_that_was_started_with_sigint_ignored(tmp_path: Path) -> None:
    """Ipykernel handles it all the same while a cell runs: an interrupt is recorded as one."""
    with open_notebook(tmp_path, ignores_sigint=True) as notebook:
        notebook.run("%load_ext gpumemwidget\nimport gpumemwidget")
        notebook.run(_ARM)
        msg_id = notebook.start("import time\nprint('waiting')\ntime.sleep(60)")
        notebook.wait_for_output(msg_id, "waiting")
        notebook.interrupt()
        within = notebook.finish(msg_id)
        notebook.run("arm('start_span')")
        before = notebook.run("reached.append(1)")

        statuses = notebook.evaluate("[r.status for r in gpumemwidget.monitor().ledger]")
        assert (within.status, before.status) == ("error", "error")
        assert statuses[1:] == ["ok", "interrupted", "ok", "interrupted"]
        assert notebook.evaluate("reached") == []
