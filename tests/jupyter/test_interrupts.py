"""Ctrl-C while our callbacks of IPython events run: it ends the cell, and the records are right."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from gpumemwidget.jupyter import extension
from gpumemwidget.session.session import Session, current_session
from tests.jupyter.notebook import Notebook, open_notebook


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


def _interrupt_call(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, number: int = signal.SIGINT
) -> None:
    """Let a Ctrl-C, or another signal, come in the next call of a method."""
    real: Callable[[], object] = getattr(owner, name)

    def interrupted() -> object:
        monkeypatch.setattr(owner, name, real)
        signal.raise_signal(number)
        return real()

    monkeypatch.setattr(owner, name, interrupted)


def test_one_before_the_cell_ends_the_cell(
    shell: InteractiveShell, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cell's own code does not run, and it is recorded as interrupted."""
    _interrupt_call(monkeypatch, session.hardware, "start_span")

    result = shell.run_cell("x = 1", store_history=True)

    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert shell.user_ns["x"] == 0
    record = session.monitor.ledger[-1]
    assert (record.first_line, record.status) == ("x = 1", "interrupted")
    _check_at_rest(shell, session)


def test_one_behind_the_cell_ends_the_cell_too(
    shell: InteractiveShell, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the cell did is recorded once, and what waits behind it is not run by a front end."""
    n_cells = len(session.monitor.ledger)
    _interrupt_call(monkeypatch, session.hardware, "read_exact")

    result = shell.run_cell("x = 1", store_history=True)

    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert shell.user_ns["x"] == 1
    assert len(session.monitor.ledger) == n_cells + 1
    assert session.monitor.ledger[-1].first_line == "x = 1"
    _check_at_rest(shell, session)


@pytest.mark.parametrize(("event", "x"), [("pre_run_cell", 0), ("post_run_cell", 1)])
def test_one_in_the_first_lines_of_a_callback_is_not_lost(
    shell: InteractiveShell,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    event: str,
    x: int,
) -> None:
    """It ends the cell, whose record is made all the same."""
    n_cells = len(session.monitor.ledger)

    def interrupt(*_: object) -> None:
        shell.events.unregister(event, interrupt)
        _interrupt_call(monkeypatch, extension, "InterruptHold")

    shell.events.register(event, interrupt)
    shell.events.callbacks[event].insert(0, shell.events.callbacks[event].pop())

    result = shell.run_cell("x = 1", store_history=True)

    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert shell.user_ns["x"] == x
    assert len(session.monitor.ledger) == n_cells + 1
    record = session.monitor.ledger[-1]
    assert (record.first_line, record.status) == ("x = 1", "interrupted")
    _check_at_rest(shell, session)


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


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="needs POSIX timers")
def test_a_timeout_at_a_cells_end_is_the_cells_error(
    shell: InteractiveShell,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The record is made before the user's exception is shown, and Python's handler is back."""

    def stop(*_: object) -> None:
        raise TimeoutError("10 s are over")

    before = signal.signal(signal.SIGALRM, stop)
    _interrupt_call(monkeypatch, session.hardware, "read_exact", signal.SIGALRM)

    result = shell.run_cell("x = 1", store_history=True)

    handler = signal.signal(signal.SIGALRM, before)
    printed = "".join(capsys.readouterr())
    assert isinstance(result.error_in_exec, TimeoutError)
    assert "TimeoutError: 10 s are over" in printed
    assert "Error in callback" not in printed
    assert handler is stop
    assert session.monitor.ledger[-1].first_line == "x = 1"
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
@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="needs POSIX timers")
def test_a_timeout_while_the_card_of_an_oom_is_made(notebook: Notebook) -> None:
    """The card is shown all the same, and the user's exception behind it."""
    notebook.run(
        "import signal\n"
        "import gpumemwidget.oom.remedies as remedies\n"
        "def stop(*_):\n"
        "    raise TimeoutError('10 s are over')\n"
        "before, find = signal.signal(signal.SIGALRM, stop), remedies.find_remedies\n"
        "def find_late(*args, **options):\n"
        "    remedies.find_remedies = find\n"
        "    signal.raise_signal(signal.SIGALRM)\n"
        "    return find(*args, **options)\n"
        "remedies.find_remedies = find_late"
    )

    cell = notebook.run("buffer = bytearray(1 << 55)")
    after = notebook.run("signal.signal(signal.SIGALRM, before) is stop")

    assert cell.kinds == ["error", "display_data", "error"]
    assert "Out of memory on the host" in cell.text
    assert cell.text.endswith("TimeoutError: 10 s are over")
    assert (after.status, after.text) == ("ok", "True")


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
