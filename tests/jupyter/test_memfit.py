"""``%%memfit`` in a shell: the card, refusals, and how a prediction compares with the cell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gpumemwidget
from gpumemwidget.model.predictions import PredictedRemedy
from tests.jupyter.machine import Machine

MIB = 1 << 20
_MODEL = """
import torch
model = torch.nn.Linear(256, 256)
x = torch.ones(64, 256)
seen = []
"""


@pytest.fixture
def cells(cells: Machine) -> Machine:
    cells.run(_MODEL)
    return cells


# -- The card --------------------------------------------------------------------------------------


def test_a_cell_is_predicted_and_not_run(cells: Machine) -> None:
    """Its lines are numbered as the notebook shows them; its names stay as they were."""
    said = cells.run(
        "%%memfit --on T4\nloss = model(x).sum()\nloss.backward()\nseen.append(1)\nprint('no')"
    )

    assert said.startswith("Fits on T4")
    assert "3  loss.backward()" in said
    assert "no\n" not in said
    assert cells.run("print(seen, 'loss' in globals(), model.weight.grad)") == "[] False None\n"


_TRAINING = """
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(2)))
optimizer = torch.optim.Adam(model.parameters())
target = torch.ones(64, 512)

def train(x, target):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), target).backward()
    optimizer.step()

x = torch.ones(64, 512)
"""


def test_the_magic_and_the_function_answer_the_same_batch(cells: Machine) -> None:
    """Each with what it needs: first the size that was asked for, then the largest."""
    cells.run(_TRAINING)

    said = cells.run("%%memfit --on 1GiB --batch x,target=12\ntrain(x, target)")
    found = cells.run(
        "print(gpumemwidget.largest_batch(lambda b: train(*b), (x, target), on='1GiB').size)"
    )

    needs = r"needs [\d.]+ MiB of the [\d.]+ MiB that PyTorch may reserve"
    answer = re.match(
        rf"A batch of 12 fits in 1\.00 GiB .* {needs} "
        rf"The largest that fits is ([\d,]+), which {needs}\.",
        " ".join(said.split()),
    )
    assert answer is not None, said
    assert int(answer[1].replace(",", "")) == int(found)
    assert re.search(r"^ *12 ", said, re.MULTILINE)


def test_the_card_of_a_first_step_is_that_of_a_later_one(cells: Machine) -> None:
    """The state that the first one makes is in it; nobody is told to ask for another step."""
    cells.run(_TRAINING)

    first = cells.say("%%memfit --on T4\ntrain(x, target)")
    cells.run("train(x, target)")
    later = cells.say("%%memfit --on T4\ntrain(x, target)")

    assert "--steps" not in first
    peaks = [re.search(r"allocated peak (\S+ \S+)", each) for each in (first, later)]
    assert peaks[0] is not None
    assert peaks[1] is not None
    assert peaks[0][1] == peaks[1][1]


def test_labels_that_are_left_out_of_a_batch_are_named(cells: Machine) -> None:
    """With what to write instead, and the error of the step."""
    cells.run(_TRAINING)

    said = cells.run("%%memfit --on T4 --batch x\ntrain(x, target)")

    assert said.startswith(
        "UsageError: target has the same first length as x: use --batch x,target. With a batch of "
    )
    assert "RuntimeError" in said


@pytest.mark.parametrize(
    ("cell", "refusal"),
    [
        ("%%memfit --on T4\n\nx + targt", "Line 3 fails: NameError: name 'targt' is not defined."),
        ("%%memfit --on T5\nx.sum()", "'T5' is neither an amount of memory"),
        ("%%memfit --on T4\nx.sum(", "line 2: '(' was never closed"),
        ("%%memfit --on T4\n!ls", "line 2 is a magic or a command of the shell"),
        ("%%memfit --on T4\nawait x", "line 2 waits for something"),
        ("%%memfit --on T4\n1 + 1", "The step uses no tensors"),
        ("%%memfit --on T4 --batch x,z\nx.sum()", "there is no variable 'z'"),
        ("%%memfit --batch x=many\nx.sum()", "a batch can't have the size 'many': give 1 or more"),
        ("%%memfit --batch =12\nx.sum()", "name the batch of 12: --batch x=12"),
        (
            "%%memfit --on T4\nx.sum()\nopen('z', 'w')",
            "The step writes a file (open). Leave that out to predict it (line 3 of the cell).",
        ),
    ],
)
def test_what_cannot_be_predicted_is_told_in_one_line(
    cells: Machine, cell: str, refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cause, and where: nothing of the cell was run."""
    monkeypatch.chdir(tmp_path)
    said = cells.run(cell)

    assert said.startswith(f"UsageError: {refusal}")
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "z").exists()


def test_a_line_of_another_cell_is_named_by_its_number(cells: Machine) -> None:
    """In a refusal, and in what is taken for granted."""
    cells.run("def save(y):\n    open('z', 'w')\n\ndef read(y):\n    return y.sum().item()")

    refused = cells.run("%%memfit --on T4\nsave(model(x))")
    told = cells.run("%%memfit --on T4\nread(model(x))")

    assert "(line 2 of In [3])." in refused
    assert "line 5 of In [3]: a value" in told


# -- How it compares -------------------------------------------------------------------------------


def test_a_cell_that_runs_is_compared_with_its_prediction(cells: Machine) -> None:
    """Under it, and in the ledger; with or without the magic that traces it."""
    body = "block = gpu.allocate(10 * 2**20)\ngpu.free(block)"
    monitor = gpumemwidget.monitor()
    monitor.expectations.add(f"%%memfit\n{body}", "cuda:0", 9 * MIB)

    said = cells.run(f"\n{body}\n")

    words = "cuda:0: predicted 9.00 MiB allocated at the peak, was 10.00 MiB (-10.0 %)."
    assert words in said
    assert monitor.ledger[-1].devices[0].predicted_peak_bytes == 9 * MIB
    column = monitor.ledger.to_dataframe()["predicted_peak_bytes"]
    assert column.iloc[-2] == 9 * MIB
    assert words in cells.run(f"%%memtrace\n{body}")
    assert words not in cells.run(f"{body}\n1 / 0")


def test_the_card_of_an_oom_has_what_was_predicted(cells: Machine) -> None:
    """It takes the place of estimates, for a cell that was predicted before it ran."""
    words = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has no room"
    body = f"raise torch.OutOfMemoryError({words!r})"
    remedy = PredictedRemedy(
        "bfloat16 autocast", "with torch.autocast(…):", 3 << 30, 70 << 30, 60 << 30, fits=True
    )
    expectations = gpumemwidget.monitor().expectations
    expectations.add(f"%%memfit\n{body}", "cuda:0", 75 << 30, (remedy,))

    said = " ".join(cells.run(body).split())

    assert "Ways to need less, each predicted alone" in said
    assert "-3.00 GiB bfloat16 autocast: 70.00 GiB reserved, fits" in said


def test_only_the_last_predictions_are_kept(cells: Machine) -> None:
    """A long notebook does not fill memory with them."""
    expectations = gpumemwidget.monitor().expectations
    for place in range(1000):
        expectations.add(f"x = {place}", "cuda:0", place)

    kept = [place for place in range(1000) if expectations.find(f"x = {place}")]

    assert kept == list(range(1000 - len(kept), 1000))
    assert len(kept) < 200


# -- What the prediction begins with ---------------------------------------------------------------


def test_a_prediction_begins_with_what_the_gpus_allocator_has(cells: Machine) -> None:
    """Blocks in use, cached ones, and a library's workspace, while a sparse tensor is alive."""
    cells.run("kept, cached = gpu.allocate(3 * 2**30), gpu.allocate(2**30)\ngpu.free(cached)")
    cells.run("sparse = torch.eye(4).to_sparse()\nlibrary = gpu.allocate(32 * 2**20)")

    said = cells.say("%%memfit\nmodel(x)")

    assert said.startswith("Fits on cuda:0")
    assert "3.03 GiB allocated before" in said
    # The cached block serves the step.
    assert "reserved peak 4.00 GiB" in said


def test_memory_that_sleeps_leaves_room(cells: Machine) -> None:
    """As in vLLM's sleep mode: of 40 GiB that are reserved 38 are free for the step."""
    cells.run("engine = gpu.allocate(40 * 2**30)")
    source = "%%memfit\nbig = x.repeat(15 << 15, 1)"

    awake = cells.say(source)
    cells.driver.sleep(38 << 30)
    asleep = cells.say(source)
    cells.run("big = gpu.allocate(60 * 2**30)")

    assert awake.startswith("Does not fit on cuda:0")
    assert asleep.startswith("Fits on cuda:0")
    assert cells.last.status == "ok"
