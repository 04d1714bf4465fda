"""Two results beside each other: rows that add up, whatever the two are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import gpumemwidget
from gpumemwidget.comparing import Comparison, compare, find_grown_peaks
from gpumemwidget.errors import BadInputError
from gpumemwidget.model.comparisons import ComparedRow, ComparedTotal
from gpumemwidget.model.ownership import DeviceAccount, MemoryAccount
from gpumemwidget.model.processes import DevicePeak, ProcessInfo, ProcessState
from gpumemwidget.report.comparison import tabulate_comparison
from gpumemwidget.units import format_change
from tests.leaks.conftest import list_shown
from tests.remote.programs import run_python, write_script
from tests.report.trace_examples import make_host_trace, make_trace
from tests.shell import open_loaded_shell

GIB = 1 << 30


def _list_changes(comparison: Comparison) -> dict[tuple[str, str, str], int]:
    return {
        (total.device, row.what, row.where): row.change_bytes
        for total in comparison.totals
        for row in total.rows
    }


def test_nothing_differs_from_itself() -> None:
    """And the report says so in one line."""
    account = MemoryAccount((DeviceAccount("host", 5, ()),), (), is_complete=True, duration_s=0.0)

    found = compare(account, account)

    assert (found.rows, found.change_bytes) == ((), 0)
    assert found.to_text() == "a and b are the same, to the byte"


@pytest.fixture
def notebook() -> Iterator[InteractiveShell]:
    """A shell with a simulated GPU as ``gpus``."""
    with open_loaded_shell() as shell:
        yield shell


def _run(shell: InteractiveShell, *cells: str) -> str:
    """Run cells; what the last one showed, as one line."""
    for cell in cells:
        with capture_output() as captured:
            shell.run_cell(cell, store_history=True)
    return " ".join(" ".join([captured.stdout, captured.stderr, *list_shown(captured)]).split())


def test_traced_cells_are_compared_by_line(notebook: InteractiveShell) -> None:
    """A line that has moved is the same line; what only one has is new or gone."""
    _run(
        notebook,
        "%%memtrace\na = gpus.allocate(1 << 29)\nb = gpus.allocate(1 << 28)",
        "gpus.free(a); gpus.free(b)",
        "%%memtrace\n\n\na = gpus.allocate(1 << 29)\nc = gpus.allocate(3 << 28)",
    )

    shown = _run(notebook, "%memdiff 1 3")

    assert shown.startswith("+512.00 MiB allocated at the peak on cuda:0: ")
    assert "+768.00 MiB (new) c = gpus.allocate(3 << 28)" in shown
    assert "-256.00 MiB (gone) b = gpus.allocate(1 << 28)" in shown
    assert "gpus.allocate(1 << 29)" not in shown
    assert "in all 768.00 MiB 1.25 GiB +512.00 MiB" in shown


def test_the_last_two_runs_of_a_cell_are_the_default(notebook: InteractiveShell) -> None:
    """By what each has added and what was there before it.

    A cell without an id is the same if its whole code is: these begin alike.
    """
    _run(notebook, "import gc", *["gc.collect()\nx = gpus.allocate(1 << 28)"] * 2)
    _run(notebook, "gc.collect()\ny = gpus.allocate(1 << 20)")

    shown = _run(notebook, "%memdiff")

    assert "what In [2] In [3] change before the cell 0 B 256.00 MiB +256.00 MiB" in shown


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%memdiff 1", "takes the numbers of two cells, or nothing"),
        ("%memdiff 1 99", "In [99] is not recorded"),
        ("%memdiff", "no cell has run twice"),
        ("%memdiff a b", "memdiff"),
    ],
)
def test_what_can_not_be_compared(notebook: InteractiveShell, line: str, words: str) -> None:
    """One line with the cause."""
    _run(notebook, "x = 1")

    assert words in _run(notebook, line)


def test_accounts_devices_and_cells(notebook: InteractiveShell) -> None:
    """What the functions return is compared with another of its kind alone."""
    _run(notebook, "import torch, gpumemwidget", "before = gpumemwidget.owners()")
    _run(notebook, "device = gpumemwidget.breakdown('cuda:0')")
    _run(notebook, "gpus.driver.library.set_use(1 << 28)", "t = torch.zeros(1 << 22)")

    by_owner = compare(notebook.user_ns["before"], gpumemwidget.owners())
    by_part = compare(notebook.user_ns["device"], gpumemwidget.breakdown("cuda:0"))

    assert ("host", "tensor", "t") in _list_changes(by_owner)
    assert by_part.change_bytes == (1 << 28) + 16 * GIB // 160
    assert [row.where for row in by_part.rows] == ["Simulated library", ""]
    with pytest.raises(BadInputError, match="no figure in common"):
        compare(notebook.user_ns["before"], notebook.user_ns["device"])
    with pytest.raises(BadInputError, match="int can't be compared"):
        compare(notebook.user_ns["before"], 3)


_TRAIN = """
import sys, gpumemwidget
with gpumemwidget.span("fill"):
    kept = bytearray(int(sys.argv[1]) << 20)
    kept[:] = b"x" * len(kept)
"""


def _compare_files(folder: Path, *options: object) -> tuple[int, str, str]:
    ended = run_python(folder, "-m", "gpumemwidget", "compare", *options)
    return ended.status, ended.out, ended.err


def test_recordings_in_a_terminal(tmp_path: Path) -> None:
    """A table, or Markdown; status 1 where a peak has grown beyond the bound.

    A file that can't be read, among others, is status 2.
    """
    script = write_script(tmp_path, _TRAIN)
    for name, size in (("a.jsonl", 10), ("b.jsonl", 200)):
        run_python(tmp_path, "-m", "gpumemwidget", "run", "--to", name, script, size)

    shown = _compare_files(tmp_path, "a.jsonl", "b.jsonl")
    gate = _compare_files(tmp_path, "a.jsonl", "b.jsonl", "--fail-above", "10%", "--markdown")
    less = _compare_files(tmp_path, "b.jsonl", "a.jsonl", "--fail-above", "10%")
    same = _compare_files(tmp_path, "a.jsonl", "a.jsonl", "--fail-above", "0%")
    missing = _compare_files(tmp_path, "a.jsonl", "none.jsonl")
    (tmp_path / "runs").mkdir()
    whole = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "runs/whole.jsonl").write_text(whole)
    (tmp_path / "runs/newer.jsonl").write_text(whole.replace('"version":', '"version":9', 1))
    unread = _compare_files(tmp_path, "runs", "runs", "--fail-above", "900%")

    assert (shown[0], shown[2]) == (0, "")
    assert "at the processes' peaks on the host: train.py +" in shown[1]
    assert gate[0] == 1
    assert "| train.py |" in gate[1]
    assert "train.py on the host has grown from" in gate[2]
    assert (less[0], same[0], missing[0]) == (0, 0, 2)
    assert "a.jsonl and a.jsonl are the same" in same[1]
    assert "none.jsonl" in missing[2]
    assert (unread[0], "newer.jsonl" in unread[2]) == (2, True)


@pytest.mark.parametrize("share", ["much", "2", "0.02", "nan%", "inf%", "%", ""])
def test_a_bound_is_a_percentage(tmp_path: Path, share: str) -> None:
    """Whether "2" is 2 % or 200 % nobody can know: it is refused in one line."""
    ended = _compare_files(tmp_path, "a", "b", "--fail-above", share)

    assert ended[0] == 2
    assert ended[2] == (
        f"gpumemwidget: argument --fail-above: {share!r} is no percentage: write it as 2% (see "
        "--help)\n"
    )


def _make_state(number: int, **peaks: int | None) -> ProcessState:
    info = ProcessInfo("id", "h", 1, "python t.py", 0.0, "rank", number)
    devices = {"gpu0": "cuda:0", "gpu1": "cuda:1", "host": "host"}
    found = tuple(DevicePeak(devices[name], n, n) for name, n in peaks.items())
    return ProcessState(info, "ended", 1.0, peaks=found)


def _make_program(label: str, n_bytes: int) -> ProcessState:
    state = _make_state(0, gpu0=n_bytes)
    return replace(state, info=replace(state.info, number=None, label=label))


_RANK = _make_state(0, gpu0=5)
_NAME_ONE = "and which is meant is not known: name one file"
_NAMESAKES = (_make_program("t.py", 5), _make_program("t.py", 9))


@pytest.mark.parametrize(
    ("a", "b", "reasons"),
    [
        ((_RANK,), (_RANK,), []),
        ((_make_state(0, gpu0=0),), (_make_state(0, gpu0=0),), []),
        ((_RANK,), (_make_state(0, gpu1=5),), []),
        ((_RANK,), (_make_state(0, gpu0=4, host=9),), []),
        ((_make_state(0, host=5),), (_make_state(0, host=5),), []),
        (
            (_make_state(0, gpu0=0),),
            (_make_state(0, gpu0=1),),
            ["rank 0 on cuda:0 has grown from 0 B to 1 B, by more than 2 %"],
        ),
        (
            (_RANK,),
            (_RANK, _make_state(1, gpu0=1)),
            ["no peak of rank 1 on cuda:0 is known in A"],
        ),
        (
            (_RANK, _make_state(1, gpu0=0)),
            (_RANK,),
            ["no peak of rank 1 on cuda:0 is known in B"],
        ),
        (
            (_RANK,),
            (_make_state(0, gpu0=5, gpu1=0),),
            ["no peak of rank 0 on cuda:1 is known in A"],
        ),
        (
            (_make_state(0, gpu0=5, host=9),),
            (_make_state(0, host=9),),
            ["no peak of rank 0 on cuda:0 is known in B"],
        ),
        (
            (_make_state(0, gpu0=None),),
            (_make_state(0, gpu0=None),),
            ["not every peak on cuda:0 is known in A", "not every peak on cuda:0 is known in B"],
        ),
        ((_RANK,), (_RANK, _make_state(1)), ["rank 1 has no peak, in B"]),
        ((_RANK,), (replace(_RANK, status="running"),), ["rank 0 is still running, in B"]),
        ((_RANK,), (replace(_RANK, status="failed"),), ["rank 0 has failed, in B"]),
        (
            (_RANK,),
            (replace(_RANK, status="lost"),),
            ["rank 0 has no end: it was killed, or its recording is cut off, in B"],
        ),
        (
            (_RANK,),
            (replace(_RANK, n_unread=1),),
            ["rank 0 has parts that could not be read, in B"],
        ),
        (
            (*_NAMESAKES, _RANK),
            (_make_program("t.py", 5), _RANK),
            [f"2 processes are called t.py in A, {_NAME_ONE}"],
        ),
        (
            (_make_program("t.py", 5), _make_program("s.py", 5)),
            (*_NAMESAKES, _make_program("s.py", 6)),
            [
                f"2 processes are called t.py in B, {_NAME_ONE}",
                "s.py on cuda:0 has grown from 5 B to 6 B, by more than 2 %",
            ],
        ),
        (
            (_make_program("t.py", 5), _make_program("t.py (no. 2)", 5)),
            (_make_program("t.py (no. 2)", 5), _make_program("t.py", 5)),
            [],
        ),
    ],
)
def test_growth_that_can_not_be_ruled_out_is_reported(
    a: tuple[ProcessState, ...], b: tuple[ProcessState, ...], reasons: list[str]
) -> None:
    """A check that guards a build passes only where both sides have each peak."""
    assert find_grown_peaks(a, b, 0.02) == reasons


def test_markdown_shows_names_as_they_are() -> None:
    """Heads and cells with markup in them are code, on one line."""
    row = ComparedRow("x|`y`", "@torch.no_grad()\n<img src=x>", 0, 5)

    shown = tabulate_comparison("a|b", "*c*", [ComparedTotal("cuda:0", "in use", 0, 5, (row,))])

    code = "<code>x&#124;&#96;y&#96;</code>"
    assert shown.splitlines() == [
        f"**+5 B in use on cuda:0: {code} (`@torch.no_grad() <img src=x>`) +5 B**",
        "",
        "in use on cuda:0",
        "",
        "| what | <code>a&#124;b</code> | `*c*` | change | where |",
        "|---|---:|---:|---:|---|",
        f"| {code} | 0 B | 5 B | +5 B | `@torch.no_grad() <img src=x>` |",
        "| in all | 0 B | 5 B | +5 B |  |",
    ]


def test_what_one_side_alone_has_is_no_change(notebook: InteractiveShell) -> None:
    """Beside a prediction a cell has figures of its own: a note lists them, no table."""
    layer = torch.nn.Linear(64, 64)
    prediction = gpumemwidget.predict(lambda x: layer(x).sum(), torch.ones(8, 64), on="T4")
    _run(notebook, "x = gpus.allocate(1 << 20)")

    found = compare(prediction, gpumemwidget.monitor().ledger[-1])

    assert found.change_bytes == sum(row.change_bytes for row in found.rows)
    assert found.to_text().startswith(f"{format_change(found.change_bytes)} allocated at the peak")
    assert [total.measure for total in found.totals if total.rows] == ["allocated at the peak"]
    assert "Known of In [1] alone: allocated at the end on cuda:0 (1.00 MiB)" in found.to_text()


def test_a_line_of_the_host_that_took_nothing_is_not_gone() -> None:
    """It is in both cells."""
    trace = make_host_trace()
    assert trace.host is not None
    first, *others = trace.host.lines
    after_bytes = trace.host.after_bytes - first.net_bytes
    lines = (replace(first, net_bytes=0), *others)

    found = compare(
        trace, replace(trace, host=replace(trace.host, lines=lines, after_bytes=after_bytes))
    )

    assert found.rows == (ComparedRow("line", first.text, first.net_bytes, 0),)


def test_predictions_and_a_run() -> None:
    """Two by purpose and path; a prediction and its traced run by line, whatever the GPU is."""
    layer = torch.nn.Linear(64, 64)

    def step(x: torch.Tensor) -> None:
        layer(x).square().mean().backward()

    small, large = (gpumemwidget.predict(step, torch.ones(n, 64), on="T4") for n in (64, 128))
    found = compare(small, large)
    same = compare(small, small)
    run = compare(small, make_trace())

    (total,) = found.totals
    assert (total.device, found.a_name, found.b_name) == ("T4", "a", "b")
    assert sum(row.change_bytes for row in total.rows) == total.change_bytes > 0
    assert ("tensor", "x") in [(row.what, row.where) for row in total.rows]
    assert same.rows == ()
    assert {row.what for row in run.rows} <= {"line", "before the cell", "not attributed"}
    assert sum(row.change_bytes for row in run.rows) == run.change_bytes


@pytest.mark.parametrize("command", [["compare", "a.jsonl", "a.jsonl"], ["load", "a.jsonl"]])
@pytest.mark.parametrize(
    ("output", "error"),
    [
        ("closed pipe", ""),
        ("/dev/full", "gpumemwidget: can't write the output: No space left on device\n"),
    ],
)
def test_output_that_can_not_be_written_is_no_growth(
    tmp_path: Path, command: list[str], output: str, error: str
) -> None:
    """The status is 2, without a traceback; a reader that has ended is no error to report."""
    script = write_script(tmp_path, _TRAIN)
    run_python(tmp_path, "-m", "gpumemwidget", "run", "--to", "a.jsonl", script, 1)
    reads, writes = os.pipe()
    os.close(reads)
    program = [sys.executable, "-m", "gpumemwidget", *command]

    with os.fdopen(writes, "w") if output == "closed pipe" else Path(output).open("w") as target:
        ended = subprocess.run(
            program, cwd=tmp_path, stdout=target, stderr=subprocess.PIPE, text=True, check=False
        )

    assert (ended.returncode, ended.stderr) == (2, error)
