"""Names bound anew on a real GPU: what is said of old values, and what following it saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import gpumemwidget
from gpumemwidget.jupyter import cards
from gpumemwidget.model.cells import Span
from gpumemwidget.session.rebinds import RebindWatch
from gpumemwidget.session.session import current_session
from gpumemwidget.units import format_bytes
from tests.jupyter.conftest import shell  # noqa: F401 - a fixture

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

#: What is told here from: models have 256 MiB, and one that is half as large says nothing.
MIN_BYTES = 150 << 20
#: The bytes of a model.
MODEL = 4 * 4 * (4096 * 4096 + 4096)

SETUP = f"""
import copy, torch
from torch import nn
def make(n_layers=4):
    return nn.Sequential(*[nn.Linear(4096, 4096, device="cuda") for _ in range(n_layers)])
class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
    def train(self, n_steps=2):
        for _ in range(n_steps):
            self.model(torch.randn(8, 4096, device="cuda")).square().mean().backward()
            self.optimizer.step()
assert sum(4 * each.numel() for each in make().parameters()) == {MODEL}
"""
MAKE = "model = make()\noptimizer = torch.optim.AdamW(model.parameters())"
TRAIN = "trainer = Trainer(model, optimizer)\ntrainer.train()"

Run = Callable[..., str]


@pytest.fixture
def run(
    shell: InteractiveShell,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Run]:
    """Runs cells in a notebook; the words that the last one printed."""
    share = MIN_BYTES / torch.cuda.get_device_properties(0).total_memory
    monkeypatch.setattr(cards, "RebindWatch", partial(RebindWatch, min_share=share))

    def run_cells(*cells: str) -> str:
        said = ""
        for source in cells:
            capsys.readouterr()
            shell.run_cell(source, store_history=True)
            said = "".join(capsys.readouterr())
            assert shell.last_execution_result.success, said
        return " ".join(said.split())

    run_cells("%load_ext gpumemwidget", SETUP)
    yield run_cells
    assert gpumemwidget.last_failure() is None
    shell.run_cell("%reset -f")
    torch.cuda.empty_cache()


def read_last() -> Span:
    """The allocated bytes of the GPU over the last cell."""
    devices = current_session().monitor.ledger[-1].devices
    return next(each.allocated for each in devices if each.device == "cuda:0")


def test_a_trainer_holds_the_old_model(run: Run) -> None:
    """The parameters and gradients are told, and the line frees them and the states."""
    said = run(MAKE, TRAIN, MAKE)
    assert said == (
        f"`model` was reassigned, and its old value still takes {format_bytes(2 * MODEL)} of "
        "cuda:0, held by `trainer.model`; `del trainer` frees it."
    )

    run("del trainer")

    assert read_last().change_bytes == pytest.approx(-4 * MODEL, rel=0.02)


def test_a_model_in_a_reference_cycle_is_reported_and_collected(run: Run) -> None:
    """The old trainer and its model refer to each other."""
    remake = f"{MAKE}\nmodel.owner = Trainer(model, optimizer)\nmodel.owner.model = model"
    said = run("import gc; gc.disable()", remake, remake)
    assert said.startswith(
        f"`model` was reassigned, and its old value still takes {format_bytes(MODEL)} of cuda:0 "
        "in a reference cycle (`model.owner.model`): `gc.collect()` frees it"
    )

    run("gc.collect(); gc.enable()")

    assert read_last().change_bytes == pytest.approx(-MODEL, rel=0.02)


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param([f"{MAKE}\n{TRAIN}"] * 3, id="all-in-one-cell"),
        pytest.param(
            ["kept = []", f"for fold in range(2):\n    {MAKE.splitlines()[0]}\n    kept += [model]"]
            * 2,
            id="k-fold-kept",
        ),
        pytest.param([MAKE, "best = model", "model = make()"], id="best"),
        pytest.param(
            [MAKE, "ema = copy.deepcopy(model)", "model, optimizer = ema, None"], id="ema"
        ),
        pytest.param([MAKE, "del model, optimizer", MAKE], id="deleted"),
        pytest.param(["model = make(2)"] * 3, id="small"),
        pytest.param([MAKE, "model = model.half()", "model = model.float()"], id="converted"),
        pytest.param(
            ["x = torch.ones(100 << 20, device='cuda')", "x = x * 2", "x = x + 1"], id="computed"
        ),
    ],
)
def test_nothing_is_said(run: Run, cells: list[str]) -> None:
    """Programs without anything to change, and what is kept on purpose."""
    assert [run(cell) for cell in cells] == [""] * len(cells)
