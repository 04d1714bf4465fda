"""Predictions of steps: figures, verdicts, owners, sizes of batches, and what would need less."""

from __future__ import annotations

import functools
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gpumemwidget
from gpumemwidget.errors import BadInputError, PredictionError
from gpumemwidget.report.page import Redaction
from gpumemwidget.session.interrupts import raise_lost_interrupts

MIB = 1 << 20
FILE = Path(__file__).name


class Block(nn.Module):
    """A layer with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Some layers and a head."""

    def __init__(self, width: int = 128, n_blocks: int = 4, n_classes: int = 2000) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(n_blocks)])
        self.head = nn.Linear(width, n_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


@pytest.fixture
def parts() -> tuple[Any, ...]:
    model = Net()
    x, y = torch.randn(4096, 128), torch.zeros(4096, dtype=torch.long)
    return model, torch.optim.AdamW(model.parameters()), x, y


# -- Figures ---------------------------------------------------------------------------------------


def test_what_stands_is_counted_to_the_byte() -> None:
    """A layer without gradients: its weights, its input, its output, one cuBLAS workspace."""
    layer = nn.Linear(1024, 1024, bias=False).requires_grad_(False)
    x = torch.randn(1024, 1024)

    prediction = gpumemwidget.predict(layer, x, on="T4", steps=1)

    standing = {owner.kind: owner.n_bytes for owner in prediction.record.owners}
    assert standing["parameter"] == 4 * MIB
    assert standing["tensor"] == 4 * MIB
    assert sum(standing.values()) == prediction.allocated_peak_bytes
    assert prediction.record.device.name == "T4"
    assert prediction.record.device.total_bytes == round(14.56 * (1 << 30))


@pytest.mark.parametrize(
    ("written", "known"),
    [
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("nvidia h100 80gb hbm3", "H100"),
    ],
)
def test_a_gpu_is_known_by_its_drivers_name(written: str, known: str) -> None:
    """As ``nvidia-smi`` shows it: the prediction is for the same memory and chip."""
    layer, x = torch.nn.Linear(8, 8), torch.ones(2, 8)

    ours, drivers = (
        gpumemwidget.predict(layer, x, on=name, steps=1).record for name in (known, written)
    )

    assert drivers.device == ours.device
    assert drivers.reserved == ours.reserved


def test_the_owners_are_all_of_the_peak(parts: tuple[Any, ...]) -> None:
    """Each has its purpose, its path and its line; together they are what is allocated."""
    record = gpumemwidget.predict(train, *parts, on="T4").record

    assert sum(owner.n_bytes for owner in record.owners) == record.allocated.expected
    paths = {owner.path: owner for owner in record.owners if owner.kind == "parameter"}
    assert paths["model.head.weight"].n_bytes == 2000 * 128 * 4
    kept = [owner for owner in record.owners if owner.kind == "saved for backward"]
    hidden = next(owner for owner in kept if owner.path == "blocks.0.mlp.0")
    assert hidden.n_bytes == 4096 * 512 * 4
    assert hidden.phase == "forward"
    assert hidden.line is not None
    assert hidden.line.line == Block.forward.__code__.co_firstlineno + 1
    state = sum(owner.n_bytes for owner in record.owners if owner.kind == "optimizer state")
    assert state >= 2 * sum(each.nbytes for each in parts[0].parameters())


def test_the_bounds_hold_the_expected_peak(parts: tuple[Any, ...]) -> None:
    """What is reserved is never less than what is allocated."""
    prediction = gpumemwidget.predict(train, *parts, on="T4")

    assert (
        prediction.record.reserved.at_least
        <= prediction.reserved_peak_bytes
        <= prediction.record.reserved.at_most
    )
    assert prediction.reserved_peak_bytes >= prediction.allocated_peak_bytes


def test_nothing_is_changed(parts: tuple[Any, ...]) -> None:
    """Parameters, gradients, the optimizer and the random numbers are as before."""
    model, optimizer, *_ = parts
    before = [each.clone() for each in model.parameters()]
    state = torch.get_rng_state()

    gpumemwidget.predict(train, *parts, on="1GiB", remedies=True)

    assert all(map(torch.equal, before, model.parameters()))
    assert all(each.grad is None for each in model.parameters())
    assert not optimizer.state
    assert torch.equal(state, torch.get_rng_state())


# -- Verdicts --------------------------------------------------------------------------------------


def test_verdicts(parts: tuple[Any, ...]) -> None:
    """Of a device that is large enough, too small, and of none."""
    fits = gpumemwidget.predict(train, *parts, on="4GiB")
    full = gpumemwidget.predict(train, *parts, on="700MiB", remedies=False)
    alone = gpumemwidget.predict(train, *parts)

    assert (fits.fits, full.fits, alone.fits) == (True, False, None)
    assert full.record.full_at is not None
    # What it needs does not depend on what there is.
    assert full.allocated_peak_bytes == fits.allocated_peak_bytes == alone.allocated_peak_bytes
    assert "Fits in 4.00 GiB" in fits.to_text()
    assert "Does not fit in 700.00 MiB" in full.to_text()
    assert "there is no GPU here to compare with" in alone.to_text()
    assert alone.record.device.total_bytes is None


def test_a_limit_of_the_process_decides_what_fits(
    parts: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak is the same, and compared with the part of the device that may be reserved."""
    free = gpumemwidget.predict(train, *parts, on="2GiB")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:0.05")

    limited = gpumemwidget.predict(train, *parts, on="2GiB", remedies=False)

    assert (free.fits, limited.fits) == (True, False)
    assert limited.reserved_peak_bytes == free.reserved_peak_bytes


def test_a_single_run_tells_of_the_next_one(parts: tuple[Any, ...]) -> None:
    """The optimizer's state is there from the second run on."""
    once = gpumemwidget.predict(train, *parts, on="T4", steps=1)
    twice = gpumemwidget.predict(train, *parts, on="T4", steps=2)

    assert ["--steps 2" in each for each in once.record.assumptions].count(True) == 1
    assert not any("--steps 2" in each for each in twice.record.assumptions)
    assert once.allocated_peak_bytes < twice.allocated_peak_bytes


def test_the_report_tells_the_peak(parts: tuple[Any, ...]) -> None:
    """Its phase, its line, what makes it, and the lines of the step."""
    prediction = gpumemwidget.predict(train, *parts, on="T4")

    text = " ".join(prediction.to_text().split())
    line = train.__code__.co_firstlineno + 2
    assert f"the peak is at line {line} · " in text
    assert " · in backward, run 2 of 3 · " in text
    assert "saved for backward" in text
    assert "optimizer.zero_grad()" in text
    assert "<svg" in prediction.to_html()


# -- What would need less --------------------------------------------------------------------------


def test_remedies_are_predicted_again(parts: tuple[Any, ...]) -> None:
    """The best first; each with its line, and less than the step as it is."""
    prediction = gpumemwidget.predict(train, *parts, on="T4", remedies=True)

    names = [remedy.name for remedy in prediction.remedies]
    assert "checkpointing of model.blocks" in names
    assert "half the batch, gradients accumulated over two" in names
    saved = [remedy.saved_bytes for remedy in prediction.remedies]
    assert saved == sorted(saved, reverse=True)
    for remedy in prediction.remedies:
        assert remedy.reserved_peak_bytes == prediction.reserved_peak_bytes - remedy.saved_bytes
        assert remedy.fits
        assert remedy.command
    assert "Ways to need less" in prediction.to_text()


def test_a_redacted_remedy_has_its_kind_alone(parts: tuple[Any, ...]) -> None:
    """What is to be done can be read, and no module's name."""
    found = gpumemwidget.predict(train, *parts, on="T4", remedies=True).remedies

    shown = Redaction().redact(found)

    assert [remedy.name.split(" of ")[0] for remedy in shown] == [
        remedy.name.split(" of ")[0] for remedy in found
    ]
    assert "model" not in str(shown)


def test_checkpointing_is_what_one_would_write(parts: tuple[Any, ...]) -> None:
    """The remedy's peak is that of a step with the line that it tells to write."""
    model, _, x, y = parts
    told = {
        remedy.name: remedy
        for remedy in gpumemwidget.predict(train, *parts, on="T4", remedies=True).remedies
    }["checkpointing of model.blocks"]
    checkpoint: Any = torch.utils.checkpoint.checkpoint  # type: ignore[attr-defined]
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

    written = gpumemwidget.predict(
        train, model, torch.optim.AdamW(model.parameters()), x, y, on="T4"
    )

    assert written.reserved_peak_bytes == told.reserved_peak_bytes
    assert written.allocated_peak_bytes == told.allocated_peak_bytes


def test_a_step_without_backward_may_forbid_gradients() -> None:
    """What forward keeps for a backward that never comes is told."""
    model, x = Net(), torch.randn(4096, 128)

    prediction = gpumemwidget.predict(model, x, on="T4", remedies=True)

    assert prediction.remedies[0].name == "no_grad"


# -- The largest batch -----------------------------------------------------------------------------


def test_the_largest_batch_was_predicted(parts: tuple[Any, ...]) -> None:
    """The answer fits, and a size that is little larger does not."""
    model, optimizer, x, y = parts

    found = gpumemwidget.largest_batch(
        lambda batch: train(model, optimizer, *batch), (x, y), on="2GiB"
    )

    assert found.predictions[found.size].fits
    larger = [size for size in found.predictions if size > found.size]
    assert larger
    assert min(larger) <= 1.05 * found.size
    assert not any(found.predictions[size].fits for size in larger)
    assert f"The largest batch that fits in 2.00 GiB: {found.size:,}" in found.to_text()


def test_the_longest_sequence() -> None:
    """The second dimension is searched, and tensors without it stay as they are."""
    layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    x = torch.randn(2, 128, 64)

    found = gpumemwidget.largest_batch(layer, x, 1, on="1GiB")

    assert found.size > 128
    assert found.predictions[found.size].fits


def test_no_size_may_fit(parts: tuple[Any, ...]) -> None:
    """Then the answer is 0, and what was tried is told."""
    model, optimizer, x, y = parts

    found = gpumemwidget.largest_batch(
        lambda batch: train(model, optimizer, *batch), (x, y), on="601MiB"
    )

    assert found.size == 0
    assert 1 in found.predictions
    assert "Not even a batch of 1 fits in 601.00 MiB" in found.to_text()


# -- Refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gpumemwidget.predict(3), "can't be called"),  # type: ignore[arg-type]
        (
            lambda: gpumemwidget.predict(nn.ReLU(), torch.ones(2), on="T5"),
            "nor a GPU that is known",
        ),
        (lambda: gpumemwidget.predict(nn.ReLU(), torch.ones(2), on=-1), "neither an amount"),
        (lambda: gpumemwidget.predict(nn.ReLU(), torch.ones(2), on=True), "neither an amount"),
        (
            lambda: gpumemwidget.predict(nn.ReLU(), torch.ones(2), on=1.5),  # type: ignore[arg-type]
            "neither an amount",
        ),
        (lambda: gpumemwidget.predict(nn.ReLU(), torch.ones(2), device="cpu"), "no device of CUDA"),
        (
            lambda: gpumemwidget.predict(nn.ReLU(), torch.ones(2), device="cuda:-1"),
            "no device of CUDA",
        ),
        (lambda: gpumemwidget.predict(nn.ReLU(), torch.ones(2), steps=0), "no whole number"),
        (lambda: gpumemwidget.largest_batch(nn.ReLU(), torch.ones(2)), "no GPU to compare with"),
        (lambda: gpumemwidget.largest_batch(nn.ReLU(), 3, on="T4"), "no tensor with a dimension"),
        (
            lambda: gpumemwidget.largest_batch(nn.ReLU(), torch.ones(2), -1, on="T4"),
            "is no dimension",
        ),
    ],
)
def test_bad_input_is_told(call: Callable[[], object], words: str) -> None:
    """In one line, with the value and what to do."""
    with pytest.raises(BadInputError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("on", [1, "600MiB", "601MiB"])
def test_a_device_without_room_fits_nothing(on: str | int) -> None:
    """Not even what else would need less: segments that grow have no addresses there."""
    prediction = gpumemwidget.predict(nn.Linear(8, 8), torch.ones(2, 8), on=on, remedies=True)

    assert prediction.fits is False


def test_a_tensor_beyond_every_device_is_refused() -> None:
    with pytest.raises(PredictionError, match=r"more than 16\.00 TiB at once .*line"):
        gpumemwidget.predict(lambda: torch.empty(1 << 50, device="cuda"), on="T4")


def test_a_size_that_cannot_be_carried_out_is_told() -> None:
    with pytest.raises(PredictionError, match=r"^With a batch of 8: "):
        gpumemwidget.largest_batch(lambda x: x.view(4, 2) + 1, torch.ones(4, 2), on="T4")


@pytest.mark.parametrize("what", ["remove", "mkdir", "rename"])
def test_what_the_step_does_to_the_world_is_refused(what: str, tmp_path: Path) -> None:
    """Before it is done, whoever does it."""
    path = tmp_path / "there"
    path.write_text("kept")
    calls = {
        "remove": path.unlink,
        "mkdir": (tmp_path / "new").mkdir,
        "rename": lambda: path.rename(tmp_path / "other"),
    }

    def step(x: torch.Tensor) -> None:
        x.sum()
        calls[what]()

    with pytest.raises(PredictionError, match="changes files or processes"):
        gpumemwidget.predict(step, torch.ones(2), on="T4")

    assert [each.name for each in tmp_path.iterdir()] == ["there"]


# -- Ctrl-C ----------------------------------------------------------------------------------------


class Interrupting:
    """Gets a Ctrl-C where Python drops it: while it is deleted."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("n_operators", [1, 1000])
def test_an_interrupt_that_python_drops_ends_the_prediction(n_operators: int) -> None:
    """Soon, or at its end; Python's own hook is the one from before."""

    def step(x: torch.Tensor) -> None:
        Interrupting()
        for _ in range(n_operators):
            x = x + 1

    before = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt):
        gpumemwidget.predict(step, torch.zeros(8), on="T4", steps=1)

    assert sys.unraisablehook is before


@pytest.mark.parametrize("is_torchs", [True, False])
def test_an_interrupt_waits_while_torchs_own_code_runs(is_torchs: bool) -> None:
    """C++ that calls it may not expect an exception, which would end the process."""
    names = {"signal": signal, "__name__": "torch.test" if is_torchs else "test"}
    exec("def interrupt(): signal.raise_signal(signal.SIGINT)", names)
    interrupt: Any = names["interrupt"]
    done = []

    with pytest.raises(KeyboardInterrupt), raise_lost_interrupts():  # noqa: PT012
        interrupt()
        done.append("more")

    assert done == ["more"] * is_torchs
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


_INTERRUPTED_IMPORT = """
import importlib.abc, signal, sys, torch, gpumemwidget

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name == "sympy.printing":
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
for _ in range(2):
    try:
        gpumemwidget.predict(lambda x: x + 1, torch.zeros(8), on="T4")
        print("predicted")
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_an_interrupt_does_not_leave_a_library_half_imported() -> None:
    """The first prediction imports ``torch._dynamo`` and SymPy; the next one finds them whole."""
    ended = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_IMPORT], capture_output=True, text=True, check=False
    )

    assert ended.stdout.split() == ["interrupted", "predicted"], ended.stderr


# -- Threads ---------------------------------------------------------------------------------------


def test_two_threads_predict_at_once(parts: tuple[Any, ...]) -> None:
    """Each gets its figures, and what both replace is as it was."""
    places = (sys, "unraisablehook"), (os, "remove"), (torch.cuda, "device_count"), (io, "open")
    before = [getattr(*place) for place in places]
    alone = gpumemwidget.predict(train, *parts, on="T4").allocated_peak_bytes

    with ThreadPoolExecutor(3) as pool:
        tasks = [pool.submit(gpumemwidget.predict, train, *parts, on="T4") for _ in range(6)]
        found = {task.result().allocated_peak_bytes for task in tasks}

    assert found == {alone}
    assert [getattr(*place) for place in places] == before
