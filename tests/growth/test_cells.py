"""Growth in a shell: what is said, when, and what ends it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

_SETUP = """
import torch
model = torch.nn.Sequential(
    torch.nn.Linear(512, 512), torch.nn.Tanh(), torch.nn.Linear(512, 512), torch.nn.Tanh()
)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
history = []
"""
_GROWS = """\
x = torch.randn(2048, 512)
loss = model(x).square().mean()
history.append({"loss": loss})
"""
_LOOP = """\
for step in range(30):
    x = torch.randn(512, 512)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(model(x).mean())
"""

Run = Callable[[str], str]


@pytest.fixture
def run(loaded: InteractiveShell) -> Iterator[Run]:
    """Run a cell; what it displayed and printed, as one line."""

    def run(cell: str) -> str:
        with capture_output() as captured:
            loaded.run_cell(cell, store_history=True)
        shown = [output.data["text/plain"] for output in captured.outputs]
        return " ".join(" ".join([captured.stdout, captured.stderr, *shown]).split())

    run(_SETUP)
    yield run
    run("history.clear(); del loss, x")


@pytest.mark.saved_tensors
def test_a_cell_that_keeps_more_each_time_is_told_from_its_third_run_on(run: Run) -> None:
    """With the bytes, the line, the holder, the runs that are left, and what cuts it."""
    first, second, third, fourth = (run(_GROWS) for _ in range(4))

    assert (first, second) == ("", "")
    assert third.startswith("host memory: +12.")
    assert "in each of the last 3 runs of this cell 3 tensors a run, the largest " in third
    assert "float32[2048, 512], from line 2" in third
    assert """held by history[…]["loss"]'s graph. Memory runs out in about """ in third
    assert "%memrelease history" in third
    assert "last 4 runs" in fourth


@pytest.mark.parametrize("magic", ["%memledger", "%memdash"])
def test_the_recorded_cells_say_which_of_them_grow(run: Run, magic: str) -> None:
    """In the ledger, and in the dashboard's copy for a page without a kernel."""
    for _ in range(2):
        run(_GROWS)
    before = run(magic)
    run(_GROWS)
    after = run(magic)

    assert "grows" not in before
    assert re.search(r"grows first line .* \+1\d\.\d\d MiB a run x = ", after)


@pytest.mark.saved_tensors
def test_what_is_listed_can_be_ignored_and_told_again(run: Run) -> None:
    """By the name of the variable, or as the list names the holder."""
    for _ in range(3):
        run(_GROWS)

    listed = run("%memleak")
    ignored = run("%memleak ignore history")
    grown = run(_GROWS)
    wrong = run("%memleak heed nothing")
    heeded = run("%memleak heed history")
    again = run(_GROWS)

    assert """history[…]["loss"]'s graph""" in listed
    assert "No cell and no loop is known to grow" in ignored
    assert "Ignored: history." in ignored
    assert grown == ""
    assert "'nothing' is not ignored: %memleak lists what is" in wrong
    assert "Ignored" not in heeded
    assert "in each of the last 5 runs" in again


@pytest.mark.parametrize("line", ["%memleak ignore", "%memleak forget history"])
def test_a_line_that_says_too_little_is_refused_in_one_line(run: Run, line: str) -> None:
    """With what the magic takes."""
    assert run(line).startswith("UsageError: %memleak")


@pytest.mark.parametrize(
    "cells",
    [
        # Another cell frees what it took.
        [_GROWS, "history.clear()"] * 4,
        # It is another cell each time.
        [_GROWS.replace("2048", str(2048 + k)) for k in range(5)],
        # It fails, and says nothing then.
        [_GROWS + "raise ValueError"] * 4,
        # A name that is bound anew.
        ["weights = torch.randn(2048, 512)"] * 4,
        # A container that says how much it keeps.
        ["import collections; kept = collections.deque(maxlen=100)"]
        + ["kept.append(torch.randn(2048, 512))"] * 4,
    ],
    ids=["freed", "edited", "failed", "bound anew", "bounded"],
)
def test_what_is_no_leak_is_not_told(run: Run, cells: list[str]) -> None:
    """Nor kept in the list."""
    run("loss = x = None")
    said = [run(cell) for cell in cells]

    assert "run" not in " ".join(said).replace("Traceback (most recent call last)", "")
    assert "No cell and no loop is known to grow" in run("%memleak")


def test_comments_and_magics_above_make_no_other_cell(run: Run) -> None:
    """The code is the same."""
    run(_GROWS)
    run(f"# Once more.\n{_GROWS}")

    assert "last 3 runs" in run(f"%%memtrace\n{_GROWS}")


@pytest.mark.saved_tensors
def test_a_loop_that_keeps_graphs_is_told_with_its_line(run: Run) -> None:
    """From the step on at which it began."""
    said = run(_LOOP)

    assert "host memory grows " in said
    # On a slow machine it is told before the last step.
    assert re.search(r"a step since step 1, for \d\d steps ", said)
    assert "from line 7 (history.append(model(x).mean())), held by history[…]'s graph." in said


def test_a_loop_that_trains_and_keeps_numbers_is_not_told(run: Run) -> None:
    """Nor one that collects results without training."""
    numbers = run(_LOOP.replace("model(x).mean()", "model(x).mean().item()"))
    results = run(
        "with torch.no_grad():\n"
        "    outputs = [model(torch.randn(512, 512)) for _ in range(30)]\n"
        "    for _ in range(30):\n        history.append(model(torch.randn(512, 512)))"
    )

    assert (numbers, results) == ("", "")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python tells of loops from 3.12 on")
@pytest.mark.saved_tensors
def test_a_loop_without_an_optimizer_is_followed(run: Run) -> None:
    """In a function of another cell, too."""
    run(
        "def evaluate(total=0):\n"
        "    for _ in range(30):\n"
        "        total = total + model(torch.randn(512, 512)).mean()\n"
        "    return total"
    )

    said = run("total = evaluate()")

    assert "from line 3 of In[3]" in said
    assert "held by total's graph" in said


def test_unloading_leaves_no_hook(loaded: InteractiveShell) -> None:
    """Neither an optimizer's nor one of Python's."""
    loaded.run_cell("import torch", store_history=True)
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
    n_hooks = len(hooks)

    loaded.extension_manager.unload_extension("gpumemwidget")

    assert len(hooks) == n_hooks - 1
    if sys.version_info >= (3, 12):
        assert not {sys.monitoring.get_tool(n) for n in (3, 4, 5)} - {None}
