"""Growth in a shell: what is said, when, and what ends it."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from IPython.core.interactiveshell import InteractiveShell

from gpumemwidget.leaks import steps
from gpumemwidget.leaks.runs import make_cell_key
from tests.leaks.conftest import say

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
def run(loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run a cell; what it displayed and printed, as one line."""
    # In the heap of a process that ran many tests, a count takes long.
    monkeypatch.setattr(steps, "_GRACE_NS", 60_000_000_000)

    say(loaded, _SETUP)
    yield partial(say, loaded)
    say(loaded, "history.clear(); del loss, x")


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
    wrong = run("%memleak unignore nothing")
    heeded = run("%memleak unignore history")
    again = run(_GROWS)

    assert """history[…]["loss"]'s graph""" in listed
    assert "No growing memory was found" in ignored
    assert "Ignored: history." in ignored
    assert grown == ""
    assert "'nothing' is not ignored: %memleak lists what is" in wrong
    assert "Ignored" not in heeded
    assert "in each of the last 5 runs" in again


def test_several_variables_are_ignored_at_once(run: Run) -> None:
    """Each by its own name."""
    assert "Ignored: one, two." in run("%memleak ignore one two")
    assert "Ignored: two." in run("%memleak unignore one")


@pytest.mark.parametrize(
    "line", ["%memleak ignore", "%memleak ignore ''", "%memleak forget history"]
)
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
        # A value that is replaced by a larger one.
        ["n = 0", *["n += 1000\ndata = torch.randn(n, 512)"] * 5],
        # Another cell keeps tensors, and this one what torch does not know of.
        ["import numpy as np; models, arrays = [], []"]
        + ["models.append(torch.randn(2048, 512))", "arrays.append(np.ones(500_000))"] * 2
        + ["models.append(torch.randn(1024, 512))", "arrays.append(np.ones(500_000))"] * 2,
    ],
    ids=["freed", "edited", "failed", "bound anew", "bounded", "replaced", "another's"],
)
def test_what_is_no_leak_is_not_told(run: Run, cells: list[str]) -> None:
    """Nor kept in the list."""
    run("loss = x = None")
    said = [run(cell) for cell in cells]

    assert "run" not in " ".join(said).replace("Traceback (most recent call last)", "")
    assert "Memory that grows" not in run("%memleak")


@pytest.mark.parametrize(
    ("cell", "holder"),
    [
        ("seen = torch.cat([seen, torch.randn(2048, 512)])", "seen"),
        ("for _ in range(9): cache['x' * len(cache)] = torch.randn(512, 512)", "cache[…]"),
    ],
    ids=["joined", "by key"],
)
def test_what_grows_without_a_list_is_told(run: Run, cell: str, holder: str) -> None:
    """A tensor that is joined to itself, and a cache with ever new keys."""
    run("seen, cache = torch.randn(1, 512), {}")
    said = [run(cell) for _ in range(4)]

    assert f"held by {holder}. " in said[3]
    run("del seen, cache")


def test_two_cells_in_turn_are_told_by_themselves(run: Run) -> None:
    """Each with its own line, its own bytes and its own holder."""
    run("first, second = [], []")
    for _ in range(4):
        one = run("first.append(torch.randn(2048, 512))")
        two = run("second.append(torch.randn(1024, 512))")

    assert "One float32[2048, 512] a run, from line 1 (first.append" in one
    assert "held by first[…]" in one
    assert "second" not in one
    assert "One float32[1024, 512] a run, from line 1 (second.append" in two
    assert "first" not in two
    run("del first, second")


def test_two_cells_that_fill_one_list_keep_their_own_lines(run: Run) -> None:
    """Also in runs in which no lines are read."""
    for _ in range(4):
        one = run("history.append(torch.randn(2048, 512))")
        two = run("n = 0\nhistory.append(torch.randn(1024, 512))")

    assert "from line 1 (history.append(torch.randn(2048, 512)))" in one
    assert "from line 2 (history.append(torch.randn(1024, 512)))" in two
    assert run("%memleak").count("history[…]") == 2
    run("loss = x = None")


@pytest.mark.saved_tensors
def test_what_is_ignored_is_marked_nowhere(run: Run) -> None:
    """In the list of the cells either."""
    for _ in range(3):
        run(_GROWS)

    run("%memleak ignore history")

    assert "a run" not in run("%memledger")


def test_a_trace_in_a_cell_that_grows_has_its_lines(run: Run) -> None:
    """The user's own reading of lines goes before ours."""
    cell = (
        "import gpumemwidget\n"
        "with gpumemwidget.trace() as trace:\n"
        "    history.append(torch.randn(2048, 512))\n"
        "print(trace)"
    )
    said = [run(cell) for _ in range(4)]

    for each in said:
        assert re.search(r"\+4\.0\d MiB +3 +history\.append", each)
    assert "in each of the last 4 runs" in said[3]


def test_comments_and_magics_above_make_no_other_cell(run: Run) -> None:
    """The code is the same."""
    run(_GROWS)
    run(f"# Once more.\n{_GROWS}")

    assert "last 3 runs" in run(f"%%memtrace\n{_GROWS}")


@pytest.mark.parametrize(
    ("source", "is_same"),
    [
        ("x = f('#1')  # once\n\n  # more\ny = 2  \n", True),
        ("%%memtrace\n# twice\nx = f('#1')\ny = 2", True),
        ("x = f('#2')\ny = 2", False),
        ('x = f("#1")\ny = 2', False),
        ("x = f('#1'); y = 2", False),
    ],
)
def test_a_hash_in_a_string_begins_no_comment(source: str, is_same: bool) -> None:
    """What differs in comments and blank lines alone is the same cell, all else is another."""
    key = make_cell_key("x = f('#1')\ny = 2")

    assert (make_cell_key(source) == key) is is_same


@pytest.mark.parametrize("quotes", ["'''", '"""'])
def test_a_hash_in_a_docstring_begins_no_comment(quotes: str) -> None:
    """Nor does one behind an escaped quote."""
    cells = [f"{quotes}a 'b'\n# {letter}\n{quotes}\nx = '\\'# {letter}'" for letter in "cd"]

    assert make_cell_key(cells[0]).count("# c") == 2
    assert make_cell_key(cells[0]) != make_cell_key(cells[1])


@pytest.mark.saved_tensors
def test_a_loop_that_keeps_graphs_is_told_with_its_line(run: Run) -> None:
    """From the step on at which it began."""
    said = run(_LOOP)

    assert "host memory grows " in said
    # On a slow machine it is told before the last step.
    assert re.search(r"a step since step 2, for \d\d steps ", said)
    assert "from line 7 (history.append(model(x).mean())), held by history[…]'s graph." in said


@pytest.mark.saved_tensors
def test_a_loop_that_is_run_again_is_told_each_time(run: Run) -> None:
    """Though the list holds more by then than the steps of one run have added."""
    said = [run(_LOOP) for _ in range(3)]

    assert all("held by history[…]'s graph." in each for each in said)
    assert "history[…]'s graph" in run("%memleak")


@pytest.mark.saved_tensors
def test_the_list_that_grows_is_told_and_no_other_of_its_size(run: Run) -> None:
    """As many graphs, of as many bytes, were there before the loop."""
    run("before = [model(torch.randn(512, 512)).mean() for _ in range(30)]")

    said = run(_LOOP)

    assert "held by history[…]'s graph." in said
    assert "before" not in said


@pytest.mark.saved_tensors
def test_two_loops_of_a_cell_have_lines_of_their_own(run: Run) -> None:
    """With an optimizer each."""
    run("other = torch.optim.SGD(model.parameters(), 0.1); more = []")
    first = _LOOP.replace("30", "60")
    second = first.replace("optimizer", "other").replace("history", "more")

    said = run(first + second)

    told = re.findall(r"step\w*, the largest \S+ \d+\], (.*?)held by (\w+)\[…\]'s graph", said)
    assert told == [
        ("from line 7 (history.append(model(x).mean())), ", "history"),
        ("from line 14 (more.append(model(x).mean())), ", "more"),
    ]
    run("del more")


@pytest.mark.saved_tensors
def test_a_short_loop_that_grew_does_not_hide_the_next_one(run: Run) -> None:
    """It ends while its lines are read, and its function goes on."""
    short = "for _ in range(12):\n    probe.step()\n    results.append(torch.randn(512, 512))\n"
    run(
        "probe = torch.optim.SGD(model.parameters(), 0.1)\n"
        f"def train(results):\n{textwrap.indent(short + _LOOP, '    ')}"
    )

    said = run("train([])")

    assert "from line 12 of In [3] (history.append(model(x).mean()))" in said


@pytest.mark.saved_tensors
def test_a_small_loop_within_a_training_loop_does_not_hide_it(run: Run) -> None:
    """It begins to look like growth at its thirtieth turn, in the fourth step."""
    run("model = torch.nn.Sequential(*map(torch.nn.Linear, (128, 256), (256, 10)))")
    run("optimizer = torch.optim.SGD(model.parameters(), 0.1)")
    keep = (
        "out = model(x)\n"
        "    for number in range(10):\n"
        "        history.append(out[number::10].softmax(1).square().mean())"
    )

    said = run(
        _LOOP.replace("512, 512", "256, 128").replace("history.append(model(x).mean())", keep)
    )

    # On a slow machine it is told at the cell's end.
    assert re.search(r"a step since step 2, for \d\d steps", said)
    run("del out")


@pytest.mark.saved_tensors
def test_parts_of_what_grows_are_told_once(run: Run) -> None:
    """Of a tensor and its graph the graph alone is large enough at first."""
    said = run(
        _LOOP.replace("30", "40")
        .replace("(512, 512)", "(32, 512)")
        .replace("model(x).mean()", "torch.nn.functional.mse_loss(model(x), x)")
    )

    assert said.count("held by history[…]") == 1


@pytest.mark.saved_tensors
def test_steps_are_those_of_one_optimizer(run: Run) -> None:
    """Another one that steps beside it does not halve what is added in a step."""
    run("other = torch.optim.SGD(model.parameters(), 0.1)")

    said = run(_LOOP.replace("optimizer.step()", "optimizer.step(); other.step()"))

    assert re.search(r"host memory grows 3\.\d\d MiB a step", said)


def test_a_loop_that_trains_and_keeps_numbers_is_not_told(run: Run) -> None:
    """Nor one that collects results without training."""
    numbers = run(_LOOP.replace("model(x).mean()", "model(x).mean().item()"))
    results = run(
        "with torch.no_grad():\n"
        "    outputs = [model(torch.randn(512, 512)) for _ in range(30)]\n"
        "    for _ in range(30):\n        history.append(model(torch.randn(512, 512)))"
    )

    assert (numbers, results) == ("", "")


@pytest.mark.saved_tensors
def test_a_loop_without_an_optimizer_may_have_its_backward_pass_in_a_later_cell(run: Run) -> None:
    """As an RNN that is unrolled by hand, and the layers of a model that is called once."""
    run(
        "cell = torch.nn.RNNCell(256, 256)\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        layers = (torch.nn.Linear(256, 256) for _ in range(20))\n"
        "        self.layers = torch.nn.ModuleList(layers)\n"
        "    def forward(self, x):\n"
        "        for layer in self.layers: x = torch.relu(layer(x))\n"
        "        return x\n"
        "net = Net()"
    )

    unrolled = run(
        "h, outs = torch.zeros(512, 256), []\n"
        "for _ in range(40):\n"
        "    h = cell(torch.randn(512, 256), h)\n"
        "    outs.append(h)"
    )
    called = run("out = net(torch.randn(1024, 256))")

    assert unrolled == called == ""


@pytest.mark.saved_tensors
def test_graphs_of_another_model_than_the_optimizers_are_not_reported(run: Run) -> None:
    """The other model's backward pass may come at the episode's end, as an actor's does."""
    run(
        "actor, critic = (torch.nn.Linear(512, 512) for _ in range(2))\n"
        "critic_optimizer = torch.optim.SGD(critic.parameters(), 0.01)"
    )
    steps = (
        "kept = []\n"
        "for _ in range(40):\n"
        "    x = torch.randn(512, 512)\n"
        "    critic_optimizer.zero_grad()\n"
        "    critic(x).square().mean().backward()\n"
        "    critic_optimizer.step()\n"
        "    kept.append({model}(x).tanh())"
    )

    assert run(steps.format(model="actor")) == ""
    assert "held by kept[…]" in run(steps.format(model="critic"))


@pytest.mark.saved_tensors
def test_watched_loop_may_keep_graphs_until_its_optimizer_steps(run: Run) -> None:
    """As one that accumulates the losses of many batches does."""
    said = run(
        "import gpumemwidget\n"
        "waiting = []\n"
        "for step in gpumemwidget.watch_loop(range(64)):\n"
        "    waiting.append(model(torch.randn(512, 512)).square().mean())\n"
        "    if step % 32 == 31:\n"
        "        optimizer.zero_grad()\n"
        "        torch.stack(waiting).mean().backward()\n"
        "        optimizer.step()\n"
        "        waiting.clear()"
    )

    assert said == ""


@pytest.mark.saved_tensors
def test_a_forked_child_says_nothing(run: Run) -> None:
    """Nor does it end otherwise than without us."""
    # OpenMP's threads are not in a forked child, which would wait for them for ever.
    loop = f"torch.set_num_threads(1)\n{_LOOP}".replace("\n", "\n    ")

    said = run(
        f"import os\nchild = os.fork()\nif not child:\n    {loop}\n    os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )

    assert said == "7"


def test_an_iterator_that_is_left_open_does_not_silence_later_cells(run: Run) -> None:
    """It is followed in its own cell alone."""
    run("import gpumemwidget; left = iter(gpumemwidget.watch_loop(range(9))); next(left)")

    assert "a step since step" in run(_LOOP)
    run("del left")


def test_unloading_within_a_watched_loop_leaves_no_hook(loaded: InteractiveShell) -> None:
    """Though the loop goes on."""
    loaded.run_cell(
        "import gpumemwidget, torch\n"
        "kept = []\n"
        "for number in gpumemwidget.watch_loop(range(60)):\n"
        "    kept.append(torch.randn(256, 1024).requires_grad_() * 2)\n"
        "    if number == 30:\n"
        "        get_ipython().run_line_magic('unload_ext', 'gpumemwidget')",
        store_history=True,
    ).raise_error()

    assert sys.gettrace() is None
    if sys.version_info >= (3, 12):
        assert not {sys.monitoring.get_tool(n) for n in (3, 4)} - {None}


def test_unloading_leaves_no_hook(loaded: InteractiveShell) -> None:
    """Neither an optimizer's nor one of Python's."""
    loaded.run_cell("import torch", store_history=True)
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
    n_hooks = len(hooks)

    loaded.extension_manager.unload_extension("gpumemwidget")

    assert len(hooks) == n_hooks - 1
    if sys.version_info >= (3, 12):
        assert not {sys.monitoring.get_tool(n) for n in (3, 4, 5)} - {None}


def test_growth_without_tensors_has_a_table_of_its_own(loaded: InteractiveShell) -> None:
    """By the cell that adds it, and what it may be; a tensor's growth is none of it."""
    run = partial(say, loaded)
    run("import numpy, torch; kept, tensors = [], []")
    for _ in range(3):
        run("tensors.append(torch.ones(1 << 20))")
    unasked = [run("kept.append(numpy.ones(1 << 20))") for _ in range(3)]
    listed = run("%memleak")
    run("kept.clear(); tensors.clear()")

    assert unasked == [""] * 3
    table = listed[listed.index("Growth without tensors") :]
    assert re.findall(r"In \[\d+\] host \+8\.0. MiB a run", table)
    assert "Arrays of NumPy" in table
    assert "+4.0" not in table
