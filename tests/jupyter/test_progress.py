"""How far long work has got, as it is shown below a cell and told to the dashboard."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from functools import partial

import pytest
from IPython.core.interactiveshell import InteractiveShell

from gpumemwidget.progress import Stage, report_progress
from gpumemwidget.widgets.progress_line import pass_progress
from tests.jupyter.notebook import Cell, Notebook

#: Work of a magic's that takes as long as it is said to, and waits for nobody.
_WORK = """
import signal
from gpumemwidget.widgets import progress_line as progress
from gpumemwidget.ownership import account as entries
from gpumemwidget.progress import Stage, report_progress

real = entries.take_memory_account
is_stopped = False
progress._PATIENCE_S = progress._INTERVAL_S = 0.0

def take(*args, **options):
    for done in (1000, 2000):
        report_progress(Stage.WALK_OBJECTS, done)
    if is_stopped:
        signal.raise_signal(signal.SIGINT)
    return real(*args, **options)

entries.take_memory_account = take
import torch
"""
_FIRST = "Looking through objects: 1,000 so far (interrupting the kernel stops it)"
_SECOND = "Looking through objects: 2,000 so far (interrupting the kernel stops it)"


@pytest.fixture
def working(notebook: Notebook) -> Iterator[Notebook]:
    assert notebook.run(_WORK).status == "ok"
    yield notebook
    notebook.run(
        "entries.take_memory_account = real\nprogress._PATIENCE_S, progress._INTERVAL_S = 0.5, 0.25"
    )


def _list_shown(cell: Cell) -> list[str]:
    """What was displayed and updated, in order, as text."""
    kinds = ("display_data", "update_display_data")
    return [
        message["content"]["data"]["text/plain"]
        for _, message in cell.messages
        if message["msg_type"] in kinds
    ]


@pytest.mark.kernel
def test_the_report_of_a_magic_takes_the_place_of_its_progress(working: Notebook) -> None:
    cell = working.run("%memvars")

    shown = _list_shown(cell)
    assert shown[:2] == [_FIRST, _SECOND]
    assert cell.status == "ok"
    (output,) = cell.outputs
    assert "Looking through" not in str(output)
    assert output["data"]["text/plain"].startswith("host: ")


@pytest.mark.kernel
def test_an_interrupted_magic_ends_in_one_line(working: Notebook) -> None:
    """It says how far it was, nothing else of the figures stays, and the next one works."""
    working.run("is_stopped = True")

    cell = working.run("%memvars")

    assert cell.status == "error"
    (error,) = (each for each in cell.outputs if each["output_type"] == "error")
    (line,) = error["traceback"]
    assert line.startswith("KeyboardInterrupt: %memvars was stopped. Looking through objects: ")
    others = [each["data"] for each in cell.outputs if each["output_type"] != "error"]
    assert others == [{"text/plain": "", "text/html": ""}]
    statuses = working.evaluate("[r.status for r in gpumemwidget.monitor().ledger]")
    assert statuses[-1] == "interrupted"
    working.run("is_stopped = False")
    assert working.run("%memvars").status == "ok"


class _Interrupter:
    """A finder of modules during whose search for one of them a Ctrl-C comes."""

    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(self, name: str, *_: object) -> None:
        if name == self.module:
            signal.raise_signal(signal.SIGINT)


def test_an_interrupt_in_a_magics_first_import_is_one_line(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in a terminal; the magic works when it is called again."""
    shell.run_cell("import torch\n%load_ext gpumemwidget")
    module = "gpumemwidget.report.account"
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, module, raising=False)
        patched.setattr(sys, "meta_path", [_Interrupter(module), *sys.meta_path])
        capsys.readouterr()
        result = shell.run_cell("%memvars", store_history=True)
    said = capsys.readouterr()

    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert f"{said.out}{said.err}".strip() == "KeyboardInterrupt: %memvars was stopped."
    assert shell.run_cell("%memvars", store_history=True).success


@pytest.mark.kernel
def test_a_function_in_a_cell_shows_its_progress_and_leaves_nothing(working: Notebook) -> None:
    cell = working.run("found = gpumemwidget.owners()")

    assert _list_shown(cell)[:2] == [_FIRST, _SECOND]
    assert [each["data"] for each in cell.outputs] == [{"text/plain": "", "text/html": ""}]


#: Work as of a click in the dashboard: between the kernel's messages, where it ignores SIGINT.
_CLICK = """
import time
told = []

def work():
    try:
        with progress.pass_progress(told.append):
            for done in range(6000):
                report_progress(Stage.WALK_OBJECTS, done)
                time.sleep(0.01)
        told.append("done")
    except KeyboardInterrupt:
        told.append("stopped")

get_ipython().kernel.io_loop.call_later(0.1, work)
"""


@pytest.mark.kernel
def test_an_interrupt_stops_the_work_of_a_click(working: Notebook) -> None:
    """The kernel lives on, and goes on to ignore SIGINT while it is idle."""
    working.run(_CLICK)
    working.interrupt_until(lambda: working.evaluate("told[-1:]") == ["stopped"])
    working.interrupt()

    assert working.evaluate("told[0]").startswith("Looking through objects: ")
    assert working.run("6 * 7").text == "42"


def test_views_are_told_at_intervals() -> None:
    now_s = [0.0]
    told: list[str] = []

    with pass_progress(told.append, clock=lambda: now_s[0]):
        for done, at_s in enumerate((0.4, 0.5, 0.6, 0.74, 0.76)):
            now_s[0] = at_s
            report_progress(Stage.DESCRIBE_ROWS, done, 5)

    assert [words.partition(" (")[0] for words in told] == [
        "Adding up what each variable would free: 1 of 5",
        "Adding up what each variable would free: 4 of 5",
    ]


#: What each message to the dashboard's views was, once the views show the variables.
_WATCHED = """
import torch
dashboard = gpumemwidget.dashboard()
sent, send = [], dashboard.send
dashboard.send = lambda message, *rest: (sent.append(message["kind"]), send(message, *rest))
dashboard._feed.hear("a", visible=True, variables=True)
progress._PATIENCE_S = 0.0
kept = torch.zeros(1 << 20)
"""


@pytest.mark.kernel
def test_work_that_a_magic_leaves_for_later_adds_nothing_to_its_output(working: Notebook) -> None:
    """The dashboard lists the variables after a release; the cell's output is saved by then."""
    is_listed = partial(working.evaluate, "'variables' in sent")
    msg_id = working.start(_WATCHED)
    working.finish(msg_id)
    working.listen_until(msg_id, is_listed)
    working.evaluate("sent.clear()")

    msg_id = working.start("%memrelease kept")
    released = working.finish(msg_id)
    late = working.listen_until(msg_id, is_listed)

    assert "done" in released.text
    assert "interrupting" not in released.text
    assert [message["msg_type"] for message in late if "display" in message["msg_type"]] == []
