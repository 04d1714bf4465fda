"""Two results beside each other: rows that add up, whatever the two are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import gpumemwidget
from gpumemwidget.comparing.comparison import Comparison, compare
from gpumemwidget.errors import BadInputError
from gpumemwidget.model.ownership import DeviceAccount, MemoryAccount, MemoryKind, Owned
from tests.leaks.conftest import list_shown
from tests.remote.programs import run_python, write_script
from tests.report.trace_examples import make_trace
from tests.shell import open_loaded_shell

GIB = 1 << 30
_KINDS: list[MemoryKind] = ["parameter", "tensor", "optimizer state"]


@st.composite
def accounts(draw: st.DrawFn) -> MemoryAccount:
    """Accounts of one or two devices whose lines may leave some of the total."""
    devices = []
    for device in draw(st.sampled_from([("cuda:0",), ("cuda:0", "cuda:1"), ("cuda:1", "host")])):
        owned = tuple(
            Owned(device, draw(st.integers(0, 50)), draw(st.sampled_from(_KINDS)), (name,), "name")
            for name in draw(st.lists(st.sampled_from("abc"), max_size=4))
        )
        rest = draw(st.integers(0, 3))
        total = sum(line.n_bytes for line in owned) + rest
        devices.append(DeviceAccount(device, total, owned))
    return MemoryAccount(tuple(devices), (), is_complete=True, duration_s=0.0)


def _list_changes(comparison: Comparison) -> dict[tuple[str, str, str], int]:
    return {
        (total.device, row.what, row.where): row.change_bytes
        for total in comparison.totals
        for row in total.rows
    }


@given(a=accounts(), b=accounts())
def test_rows_add_up_and_are_mirrored(a: MemoryAccount, b: MemoryAccount) -> None:
    """To the change of each total; the other way round each change has the other sign."""
    found, mirrored = compare(a, b), compare(b, a)

    for total in found.totals:
        assert sum(row.change_bytes for row in total.rows) == total.change_bytes
        assert all(row.change_bytes or row.a_bytes != row.b_bytes for row in total.rows)
    # One GPU may have another number on the other side, and keeps the name of the second one.
    changes = sorted(_list_changes(found).values())
    assert changes == sorted(-n_bytes for n_bytes in _list_changes(mirrored).values())


@given(a=accounts())
def test_nothing_differs_from_itself(a: MemoryAccount) -> None:
    """And the report says so in one line."""
    found = compare(a, a)

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
    """By what each has added and what stood before it."""
    _run(notebook, *["x = gpus.allocate(1 << 28)"] * 3, "other = 1")

    shown = _run(notebook, "%memdiff")

    assert "what In[2] In[3] change where from before 256.00 MiB 512.00 MiB +256.00 MiB" in shown


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%memdiff 1", "takes the numbers of two cells, or nothing"),
        ("%memdiff 1 99", "In[99] is not recorded"),
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


def test_recordings_in_a_terminal(tmp_path: Path) -> None:
    """A table, or Markdown; status 1 where a peak has grown beyond the bound."""
    script = write_script(tmp_path, _TRAIN)
    for name, size in (("a.jsonl", 10), ("b.jsonl", 200)):
        run_python(tmp_path, "-m", "gpumemwidget", "run", "--to", name, script, size)

    def run(*options: object) -> tuple[int, str, str]:
        ended = run_python(tmp_path, "-m", "gpumemwidget", "compare", *options)
        return ended.status, ended.out, ended.err

    shown = run("a.jsonl", "b.jsonl")
    gate = run("a.jsonl", "b.jsonl", "--fail-above", "10%", "--markdown")
    less = run("b.jsonl", "a.jsonl", "--fail-above", "0.1")
    same = run("a.jsonl", "a.jsonl", "--fail-above", "0")
    bad = run("a.jsonl", "none.jsonl"), run("a.jsonl", "b.jsonl", "--fail-above", "much")

    assert (shown[0], shown[2]) == (0, "")
    assert "peaks of processes on host: train.py +" in shown[1]
    assert gate[0] == 1
    assert "| train.py |" in gate[1]
    assert "train.py on host has grown from" in gate[2]
    assert (less[0], same[0]) == (0, 0)
    assert "a.jsonl and a.jsonl are the same" in same[1]
    assert [ended[0] for ended in bad] == [2, 2]
    assert "none.jsonl" in bad[0][2]
    assert "much" in bad[1][2]


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
    assert {row.what for row in run.rows} <= {"allocated there", "not attributed"}
    assert sum(row.change_bytes for row in run.rows) == run.change_bytes
