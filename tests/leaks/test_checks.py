"""``assert_no_growth`` and ``watch_loop``: growth is shown with its holder, and only growth."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.utils.capture import capture_output
from torch.utils.data import DataLoader, IterableDataset

import gpumemwidget
from gpumemwidget.errors import BadInputError
from gpumemwidget.session.leak_watch import LeakWatch
from gpumemwidget.session.session import current_session
from gpumemwidget.testing import simulate_gpus
from gpumemwidget.testing.machine import SimulatedMachine
from tests.shell import open_shell

MIB = 1 << 20


@pytest.fixture
def gpus() -> Iterator[SimulatedMachine]:
    """Two simulated GPUs, the first of them in use."""
    with simulate_gpus(2) as gpus:
        gpus.touch(0)
        yield gpus


class Training:
    """A model with Adam, and steps of 64 examples."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def step(self) -> torch.Tensor:
        """Make a step, and return its loss."""
        loss = self.model(torch.ones(256, 512)).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


def explain(run: Callable[[], object], limit: int | str = "1MiB", **options: Any) -> str:
    """Return what is told of a block that grows too much."""

    def check() -> None:
        with gpumemwidget.assert_no_growth(limit, **options):
            run()

    with pytest.raises(AssertionError) as caught:
        check()
    return str(caught.value)


# -- Growth ----------------------------------------------------------------------------------------


def test_a_training_that_keeps_nothing_passes() -> None:
    """The optimizer's state and the gradients, which come with the first step, are no growth."""
    training = Training()

    with gpumemwidget.assert_no_growth("1MiB"):
        for _ in range(8):
            training.step()


@pytest.mark.saved_tensors
def test_kept_graphs_are_told_with_their_holder() -> None:
    """The message has the bytes, the steps of the optimizer, who holds it, and what to do."""
    training = Training()
    outputs = []

    def train() -> None:
        for _ in range(8):
            training.step()
            outputs.append(training.model[0](torch.ones(1024, 512)).relu().sum())

    lines = explain(train).splitlines()

    # malloc adds a little to each tensor.
    assert re.match(r"host memory grew by 24\.\d\d MiB, and the limit is 1\.00 MiB\.$", lines[0])
    assert re.match(r"host memory grows 4\.\d\d MiB a step since step 2, for 6 steps: ", lines[1])
    assert re.search(r"held by running: \S+ line \d+: outputs\[…\]'s graph\.$", lines[1])
    assert lines[2:] == [
        "Keep .item() or .detach() of it, not the tensor: it keeps its whole graph."
    ]


def test_growth_is_counted_from_the_last_warm_up(gpus: SimulatedMachine) -> None:
    """To the byte: as much as is allowed passes, and one byte more does not."""
    sizes = [64 * MIB, 32 * MIB, MIB, MIB, MIB]

    def run() -> None:
        for size in gpumemwidget.watch_loop(sizes):
            gpus.allocate(size)

    with gpumemwidget.assert_no_growth(3 * MIB):
        run()
    text = explain(run, 3 * MIB - 1, warmups=2)

    assert text == (
        "cuda:0 grew by 3.00 MiB, and the limit is 3.00 MiB.\n"
        "It grew 1.00 MiB a step since step 2, for 3 steps.\n"
        "No variable holds it at the end of the block: with the loop itself in the block, and not "
        "in a function that has returned, the holder is named."
    )


def test_the_variable_of_a_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that a module keeps is told by its name, as many layers as a model may have."""
    monkeypatch.setitem(globals(), "CACHE", [])
    cache: list[torch.Tensor] = globals()["CACHE"]
    layers = [torch.zeros(512, 512) for _ in range(6)]

    def run() -> None:
        for _ in gpumemwidget.watch_loop(layers):
            cache.append(torch.zeros(1024, 512))

    text = explain(run, warmups=1)

    assert "5 steps: one float32[1024, 512] a step, held by" in text
    assert f"{__name__}.CACHE[…]" in text or "cache[…]" in text


def test_watched_loops_go_before_optimizers(gpus: SimulatedMachine) -> None:
    """Where a loop is marked, steps are its turns; what optimizers did before is forgotten."""
    training = Training()

    def run() -> None:
        training.step()
        training.step()
        for _ in gpumemwidget.watch_loop(range(3)):
            for _ in range(2):
                gpus.allocate(4 * MIB)
                training.step()

    text = explain(run, warmups=1)

    assert "It grew 8.00 MiB a step since step 1, for 2 steps" in text


def test_the_device_that_counts(gpus: SimulatedMachine) -> None:
    """It is each GPU in use, those that come into use meanwhile too, or the one that is named."""
    with gpumemwidget.assert_no_growth(0, device="cuda:1"):
        gpus.allocate(MIB, 0)
    with gpumemwidget.assert_no_growth("1MiB"):
        kept = [torch.zeros(4 * MIB)]

    on_host = explain(lambda: kept.append(torch.zeros(4 * MIB)), device="host")
    on_second = explain(lambda: gpus.allocate(2 * MIB, 1))

    assert re.match(r"host memory grew by 16\.\d\d MiB", on_host)
    assert on_second.startswith("cuda:1 grew by 2.00 MiB")


def test_rubbish_made_after_the_last_step_hides_no_growth() -> None:
    """What an evaluation behind the loop leaves to the collector was not there in the steps."""
    kept = []

    def run() -> None:
        for _ in gpumemwidget.watch_loop(range(4)):
            kept.append(torch.ones(4 * MIB // 4))
        cycle: list[object] = [torch.ones(64 * MIB // 4)]
        cycle.append(cycle)

    text = explain(run)

    assert re.match(r"host memory grew by 8\.\d\d MiB, and the limit is 1\.00 MiB\.", text)


@pytest.mark.parametrize("n_steps", [0, 6])
def test_what_waits_for_the_collector_is_no_growth(n_steps: int) -> None:
    """Tensors in cycles are freed before they are counted, with steps and without."""
    gc.disable()
    try:
        with gpumemwidget.assert_no_growth("1MiB"):
            for _ in gpumemwidget.watch_loop(range(n_steps)):
                cycle: list[object] = [torch.zeros(MIB)]
                cycle.append(cycle)
            cycle = [torch.zeros(MIB)]
            cycle.append(cycle)
            del cycle
    finally:
        gc.enable()


def test_an_error_in_the_block_passes_through(gpus: SimulatedMachine) -> None:
    """It is the test's own, whatever has grown until then; nothing stays behind."""
    error = ValueError("the user's")

    def run() -> None:
        with gpumemwidget.assert_no_growth(0):
            gpus.allocate(MIB)
            raise error

    with pytest.raises(ValueError, match="the user's") as caught:
        run()

    assert caught.value is error


def test_what_can_not_be_checked_is_refused() -> None:
    """Bad arguments, and blocks of which nothing would be compared, are told in one line."""
    for arguments, words in (
        ({"limit": "many"}, "'many' is not an amount of memory"),
        ({"limit": -1}, "a limit can't be -1: give bytes as an int, 0 or more, or text as in"),
        ({"limit": 0.5}, "a limit can't be of type float"),
        ({"warmups": -1}, "warmups must be a number of steps, 0 or more, not -1"),
        ({"device": "cuda:7"}, "cuda:7"),
    ):
        with pytest.raises(BadInputError, match=words), gpumemwidget.assert_no_growth(**arguments):
            pass
    with pytest.raises(BadInputError, match=r"made 1 step, which warmups=2 leaves out"):  # noqa: SIM117
        with gpumemwidget.assert_no_growth():
            list(gpumemwidget.watch_loop([1]))


# -- Watched loops ---------------------------------------------------------------------------------


def test_a_watched_loop_is_the_loop() -> None:
    """Without the extension it yields the same items; ``len()`` is the loader's, if it has one."""

    class Numbers(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(3)

    class Squares:
        def __getitem__(self, number: int) -> int:
            if number == 3:
                raise IndexError
            return number**2

    loop = gpumemwidget.watch_loop(DataLoader(range(6), batch_size=2))  # type: ignore[arg-type]

    assert len(loop) == 3
    assert [batch.tolist() for batch in loop] == [[0, 1], [2, 3], [4, 5]]
    assert [batch.tolist() for batch in loop] == [[0, 1], [2, 3], [4, 5]], "a second epoch"
    assert list(gpumemwidget.watch_loop(Numbers())) == [0, 1, 2]
    assert list(gpumemwidget.watch_loop(Squares())) == [0, 1, 4]  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(gpumemwidget.watch_loop(iter([1])))


def test_a_watched_loop_holds_no_batch() -> None:
    """A batch is freed when the loop's body deletes it."""
    batches = (torch.zeros(2) for _ in range(2))

    for batch in gpumemwidget.watch_loop(batches):
        seen = weakref.ref(batch)
        del batch

        assert seen() is None


def test_a_loop_that_is_left_is_closed(gpus: SimulatedMachine) -> None:
    """``break`` closes the loader's iterator at once, and the turn that it left is no step."""
    closed = []

    def load() -> Iterator[int]:
        try:
            yield from range(10)
        finally:
            closed.append(True)

    with gpumemwidget.assert_no_growth(0, warmups=1):
        for number in gpumemwidget.watch_loop(load()):
            if number == 2:
                gpus.allocate(MIB)
                break

    assert closed == [True]


def test_what_can_not_be_watched_is_refused() -> None:
    """A loop goes through no number and no text; a path is for ``watch``, and says so."""
    for source, kind in ((7, "int"), (b"runs", "bytes"), (None, "NoneType"), ("runs", "str")):
        with pytest.raises(BadInputError, match=rf"of type {kind}: give what a loop goes through"):
            gpumemwidget.watch_loop(source)  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match=r"of type list; a loop is watched by watch_loop"):
        gpumemwidget.watch([1])  # type: ignore[arg-type]


@pytest.mark.saved_tensors
def test_in_a_cell_the_steps_are_marked(tmp_path: Path) -> None:
    """With the extension loaded, a loop without an optimizer is followed by its turns."""
    with open_shell(tmp_path) as shell, capture_output():
        shell.run_cell("%load_ext gpumemwidget")
        shell.user_ns.update(torch=torch, gpumemwidget=gpumemwidget)
        shell.run_cell("weight = torch.ones(512, 512, requires_grad=True)\nkept = []")
        shell.run_cell(
            "for number in gpumemwidget.watch_loop(range(30)):\n"
            "    kept.append((weight * weight).exp().sum())",
            store_history=True,
        )

        leaks = current_session().attach(LeakWatch).list_leaks()
        shell.run_line_magic("unload_ext", "gpumemwidget")

    assert [(leak.unit, leak.holders[0].path) for leak in leaks] == [("step", "kept[…]'s graph")]
