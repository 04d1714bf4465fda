"""A failure of ours is shown once and never becomes the cell's; a Ctrl-C is never lost."""

from __future__ import annotations

from typing import NoReturn

import pytest
from IPython.core.interactiveshell import InteractiveShell

import gpumemwidget
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.jupyter.outputs import Outputs
from gpumemwidget.session.session import Session, current_session


def _fail(*_args: object) -> NoReturn:
    raise RuntimeError("the driver is gone")


@pytest.fixture
def session(loaded: InteractiveShell) -> Session:
    return current_session()


@pytest.mark.parametrize("method", ["start_span", "read_exact"])
def test_a_failing_read_is_told_once_and_the_cells_run(
    shell: InteractiveShell,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    method: str,
) -> None:
    monkeypatch.setattr(session.monitor.hardware, method, _fail)
    results = [shell.run_cell("6 * 7", store_history=True) for _ in range(3)]

    assert [result.result for result in results] == [42, 42, 42]
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1
    assert "RuntimeError: the driver is gone" in shown[0]
    assert [record.status for record in session.monitor.ledger][1:] == ["ok", "ok", "ok"]


def test_a_bug_of_ours_is_told_once_and_kept_for_a_report(
    shell: InteractiveShell,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever it is that raises; the next cell is recorded again."""
    with monkeypatch.context() as patch:
        patch.setattr(session.monitor, "end_cell", lambda **_options: 1 / 0)
        results = [shell.run_cell("6 * 7", store_history=True) for _ in range(2)]
    shell.run_cell("8 * 9", store_history=True)

    assert [result.success for result in results] == [True, True]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpumemwidget: recording a cell's end failed (ZeroDivisionError: ")
    assert "Traceback (most recent call last)" in (gpumemwidget.last_failure() or "")
    assert [record.first_line for record in session.monitor.ledger][-1] == "8 * 9"


def test_unload_takes_everything_away_even_if_one_part_fails(
    shell: InteractiveShell,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Outputs, "close", lambda *_args, **_options: 1 / 0)

    shell.run_cell("%unload_ext gpumemwidget")

    assert "closing a cell's output failed" in capsys.readouterr().err
    assert "memstat" not in shell.magics_manager.magics["line"]


def test_devices_that_cannot_be_looked_up_keep_nobody_from_loading(
    shell: InteractiveShell,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Hardware, "read_devices", _fail)

    result = shell.run_cell("%load_ext gpumemwidget", store_history=True)
    shell.run_cell("6 * 7", store_history=True)

    assert result.success
    assert "looking up the devices failed (RuntimeError: " in capsys.readouterr().err
    assert current_session().monitor.ledger[-1].first_line == "6 * 7"


def test_a_cell_whose_end_never_came_leaves_no_record(
    shell: InteractiveShell, session: Session
) -> None:
    """The next cell is recorded as if nothing had been."""
    ends = [
        callback
        for callback in shell.events.callbacks["post_run_cell"]
        if type(getattr(callback, "__self__", None)).__module__.startswith("gpumemwidget")
    ]
    for end in ends:
        shell.events.unregister("post_run_cell", end)
    shell.run_cell("lost = 1", store_history=True)
    for end in ends:
        shell.events.register("post_run_cell", end)

    shell.run_cell("x = 1", store_history=True)
    shell.run_cell("1 / 0", store_history=True)

    records = session.monitor.ledger.records[1:]
    assert [(record.first_line, record.status) for record in records] == [
        ("x = 1", "ok"),
        ("1 / 0", "error"),
    ]
