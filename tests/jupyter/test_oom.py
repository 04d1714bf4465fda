"""From an OOM to its card, in a real shell, on a GPU that is simulated and on the real host.

On a real GPU: ``tests/gpu/test_oom.py``.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from gpumemwidget.backends.cuda import oom_observer as ooms
from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.model.breakdowns import BreakdownPart
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ooms import OomCard, RemedyKind
from gpumemwidget.oom import remedies
from gpumemwidget.ownership.graph import torch_reader as storages
from gpumemwidget.session.oom_watch import OomWatch
from gpumemwidget.session.session import current_session
from gpumemwidget.testing import DeviceFullError
from gpumemwidget.tracing import sources
from gpumemwidget.tracing.sources import is_library
from gpumemwidget.units import format_bytes
from tests.backends.test_oom_observer import FakeCuda

MIB = 1 << 20


class Gpu:
    """Tensors whose bytes a simulated allocator of 200 MiB counts."""

    def __init__(self) -> None:
        self.cuda = FakeCuda()
        self.cuda.initialise()

    @property
    def allocated_bytes(self) -> int:
        gc.collect()
        current: int = self.cuda.allocator.stats(0)["allocated_bytes"]["all"]["current"]
        return current

    def make(self, n_mib: int, error: type[Exception] = torch.OutOfMemoryError) -> torch.Tensor:
        """A tensor; the error that PyTorch raises where there is no room."""
        n_bytes = n_mib * MIB
        try:
            handle = self.cuda.allocate(n_bytes)
        except DeviceFullError:
            handle = 0
        if not handle:
            raise error(f"CUDA out of memory. Tried to allocate {format_bytes(n_bytes)}. GPU 0")
        tensor = torch.empty(n_bytes, dtype=torch.uint8)
        weakref.finalize(tensor, self.cuda.allocator.free, handle)
        return tensor


@pytest.fixture(autouse=True)
def nothing_of_other_tests() -> None:
    """Collect what was put aside while a test held it: else a card would count its tensors."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """The simulated GPU, with its tensors on ``cuda:0`` for whoever walks."""
    gpu = Gpu()

    def refuse(**_options: object) -> None:
        raise RuntimeError("the tensors lie elsewhere")

    gpu.cuda.torch.cuda.memory.memory_snapshot = refuse
    read = storages.TorchReader.read_storage

    def read_storage(self: storages.TorchReader, storage: Any) -> storages.StorageInfo | None:
        info = read(self, storage)
        return info if info is None or info.n_bytes < MIB else info._replace(device="cuda:0")

    monkeypatch.setattr(storages.TorchReader, "read_storage", read_storage)
    # What stands for PyTorch here is none of the user's code.
    for module in (sources, remedies):
        monkeypatch.setattr(
            module, "is_library", lambda filename: "/tests/" in filename or is_library(filename)
        )
    monkeypatch.setattr(ooms, "_attached", [])
    monkeypatch.setattr(
        ooms,
        "TorchImportHook",
        lambda join: SimpleNamespace(expect=lambda: join(gpu.cuda.torch), cancel=lambda: None),
    )
    monkeypatch.setattr(
        "gpumemwidget.jupyter.extension.detect_hardware",
        lambda: Hardware([CudaBackend(gpu.cuda.torch), HostBackend()]),
    )
    return gpu


@pytest.fixture
def loaded(
    gpu: Gpu, shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> Iterator[InteractiveShell]:
    """The shell with the extension, ``gpu`` and ``torch``."""
    shell.user_ns["gpu"] = gpu
    run(shell, "%load_ext gpumemwidget")
    run(shell, "import torch")
    capsys.readouterr()
    yield shell
    run(shell, "%unload_ext gpumemwidget")
    run(shell, "%xdel gpu")
    shell.last_execution_result = None


def strip_ansi(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def run(shell: InteractiveShell, source: str) -> None:
    shell.run_cell(source, store_history=True)


STEP = """\
def step():
    h = gpu.make(30)
    return gpu.make(180)
step()"""


# -- On a device -----------------------------------------------------------------------------------


def test_what_is_said(loaded: InteractiveShell, cards: list[OomCard]) -> None:
    """Who asked for what and where, who had the memory, and the ways out."""
    run(loaded, "kept = gpu.make(40)")

    run(loaded, STEP)

    (card,) = cards
    assert card.event.device == "cuda:0"
    assert card.event.requested_bytes == 180 * MIB
    assert card.event.allocated_bytes == 70 * MIB
    number = loaded.execution_count - 1
    assert card.execution_count == number
    assert (card.place, card.text) == (f"In [{number}], line 3", "return gpu.make(180)")
    assert [(each.owner, each.kind, each.n_bytes) for each in card.owners] == [
        ("kept", "tensor", 40 * MIB),
        ("running: step() line 3: h", "tensor", 30 * MIB),
    ]
    assert card.owned_bytes == 70 * MIB
    assert card.breakdown is not None
    assert card.breakdown.parts[0].parts == (BreakdownPart("kind", 70 * MIB, kind="tensor"),)
    assert (card.n_caught, card.notes) == (0, ())
    assert [(way.kind.value, way.gives_bytes) for way in card.ways] == [
        ("names", 40 * MIB),
        ("last exception", 30 * MIB),
        ("smaller batch", 15 * MIB),
    ]


def test_what_is_promised_is_kept(
    loaded: InteractiveShell, gpu: Gpu, cards: list[OomCard], capsys: pytest.CaptureFixture[str]
) -> None:
    """The last exception gives what the card says, and nothing of ours holds any of it."""
    before = gpu.allocated_bytes
    run(loaded, STEP)
    held = gpu.allocated_bytes

    run(loaded, "%memrelease --exceptions")

    way = next(way for way in cards[0].ways if way.kind is RemedyKind.LAST_EXCEPTION)
    assert way.gives_bytes == held - before == 30 * MIB
    assert gpu.allocated_bytes == before
    assert "30.00 MiB on cuda:0" in capsys.readouterr().out


def test_nothing_is_held(loaded: InteractiveShell, cards: list[OomCard]) -> None:
    """No error, frame or tensor: once IPython lets go they are gone."""
    run(
        loaded,
        "import weakref\nclass Held: pass\n"
        "def step():\n"
        "    held = Held()\n"
        "    seen.append(weakref.ref(held))\n"
        "    gpu.make(300)\n"
        "seen = []\n"
        "for _ in range(4):\n"
        "    try:\n        step()\n    except torch.OutOfMemoryError:\n        pass\n"
        "step()",
    )
    seen = loaded.user_ns["seen"]
    gc.collect()
    alive = [ref() is not None for ref in seen]

    run(loaded, "%memrelease --exceptions")
    gc.collect()

    assert len(cards) == 1
    assert alive == [False] * 4 + [True]
    assert [ref() for ref in seen] == [None] * 5


def test_the_traceback_is_the_users_own(
    loaded: InteractiveShell, gpu: Gpu, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the same with us and without us, and the card stands below it."""
    run(loaded, STEP)
    with_us = strip_ansi(capsys.readouterr().out)
    run(loaded, "%unload_ext gpumemwidget")
    capsys.readouterr()
    run(loaded, STEP)
    without = strip_ansi(capsys.readouterr().out)

    def forget_numbers(traceback: str) -> str:
        return re.sub(r"(In ?\[|-input-)\d+", r"\1N", traceback.rstrip())

    traceback, _, card = with_us.partition("\nYou are about 10.00 MiB short.")
    assert forget_numbers(traceback) == forget_numbers(without)
    assert "What you can do" in card


def test_ooms_that_are_caught(loaded: InteractiveShell, cards: list[OomCard]) -> None:
    """They are counted in the record and have no card."""
    run(
        loaded,
        "for n in (300, 250, 40):\n"
        "    try:\n        x = gpu.make(n)\n    except torch.OutOfMemoryError:\n        pass",
    )

    assert cards == []
    record = list(current_session().monitor.ledger)[-1]
    assert record.status == "ok"
    assert record.devices[0].num_ooms == 2


def test_whoever_catches_many_waits_for_none(
    loaded: InteractiveShell, cards: list[OomCard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third on the counters are read, and the last one's traceback tells the rest."""
    taken: list[int] = []
    take = OomWatch._take_account

    def count(self: OomWatch, seen: Any) -> None:
        taken.append(seen.event.requested_bytes)
        take(self, seen)

    monkeypatch.setattr(OomWatch, "_take_account", count)
    run(
        loaded,
        "def search():\n"
        "    for n in range(1000, 300, -100):\n"
        "        try:\n            gpu.make(n)\n        except torch.OutOfMemoryError:\n"
        "            h = gpu.make(24)\n"
        "    gpu.make(300)\n"
        "search()",
    )

    (card,) = cards
    assert taken == [1000 * MIB, 900 * MIB]
    assert card.event.requested_bytes == 300 * MIB
    assert card.n_caught == 7
    assert card.owned_bytes == 24 * MIB
    assert [each.owner for each in card.owners] == ["last exception: search() line 7: h"]
    assert card.notes == ("Measured after the error, while the traceback still holds its frames",)


@pytest.mark.parametrize(
    ("source", "requested_mib", "ends"),
    [
        (
            "kept = []\nfor n in (300, 400):\n    try:\n        gpu.make(n)\n"
            "    except torch.OutOfMemoryError as exc:\n        kept.append(exc)\nraise kept[0]",
            300,
            (1, 4),
        ),
        (
            "try:\n    gpu.make(300)\nexcept torch.OutOfMemoryError:\n    pass\n"
            "raise RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling')",
            None,
            (1, 5),
        ),
        (
            "from concurrent.futures import ThreadPoolExecutor\ndef work():\n    gpu.make(300)\n"
            "with ThreadPoolExecutor(1) as pool:\n    pool.submit(work).result()",
            300,
            (0, 3),
        ),
    ],
    ids=["caught and raised later", "of a library", "in a thread"],
)
def test_the_one_that_ends_the_cell(
    loaded: InteractiveShell,
    cards: list[OomCard],
    source: str,
    requested_mib: int | None,
    ends: tuple[int, int],
) -> None:
    """By the size that it asked for, if PyTorch's allocator refused it, and by its own line."""
    n_caught, line = ends
    run(loaded, source)

    (card,) = cards
    assert card.event.device == "cuda:0"
    assert card.event.requested_bytes == (requested_mib and requested_mib * MIB)
    assert card.n_caught == n_caught
    assert (card.place or "").endswith(f"], line {line}")


def test_in_a_traced_cell(loaded: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    """Under ``%%memtrace`` the card comes first, then the report."""
    run(loaded, f"%%memtrace\n{STEP}")

    shown = strip_ansi(capsys.readouterr().out)
    assert 0 < shown.index("OutOfMemoryError") < shown.index("Out of memory on cuda:0")
    assert shown.index("Out of memory on cuda:0") < shown.rindex("allocated")


def test_below_capture_and_time(loaded: InteractiveShell, cards: list[OomCard]) -> None:
    """Magics that run the cell themselves hide its error, or its line."""
    run(loaded, "%%capture\ngpu.make(300)")
    run(loaded, "%%time\nx = 1\ngpu.make(300)")

    assert [card.text for card in cards[:1]] == ["gpu.make(300)"]
    assert cards[0].place == f"In [{cards[0].execution_count}], line 2"
    if list(current_session().monitor.ledger)[-1].status == "ok":
        assert len(cards) == 1  # IPython 8 shows the error itself, and takes the cell for done.
        return
    assert (cards[1].place or "").endswith("], line 3")
    assert cards[1].text == "gpu.make(300)"


# -- Failures of ours ------------------------------------------------------------------------------


def test_a_card_that_fails(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, below the user's traceback; the cell is recorded."""
    monkeypatch.setattr(OomWatch, "_build", lambda *_args: {}["ours"])

    run(loaded, STEP)

    out, err = map(strip_ansi, capsys.readouterr())
    assert out.rstrip().splitlines()[-1].startswith("OutOfMemoryError: CUDA out of memory.")
    (line,) = err.splitlines()
    assert line.startswith("gpumemwidget: showing the card of an OOM failed (KeyError: 'ours')")
    assert list(current_session().monitor.ledger)[-1].status == "error"


def test_a_look_that_fails(
    loaded: InteractiveShell,
    cards: list[OomCard],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Within the allocation nothing of ours is raised; what was read until then is shown."""
    calls = iter([True])

    def fail(self: OomWatch, seen: object) -> None:
        if next(calls, False):
            raise KeyError("ours")

    monkeypatch.setattr(OomWatch, "_take_account", fail)

    run(
        loaded,
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(1) as pool:\n    pool.submit(gpu.make, 300).result()",
    )

    out, err = map(strip_ansi, capsys.readouterr())
    assert "OutOfMemoryError: CUDA out of memory." in out
    (line,) = err.splitlines()
    assert line.startswith("gpumemwidget: reading what stood at an OOM failed (KeyError: 'ours')")
    assert [card.event.requested_bytes for card in cards] == [300 * MIB]


def test_an_interrupt_within_it(
    loaded: InteractiveShell, cards: list[OomCard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ctrl-C that lands in our look is the cell's, a moment later."""
    take = OomWatch._take_account

    def interrupt(self: OomWatch, seen: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        take(self, seen)

    monkeypatch.setattr(OomWatch, "_take_account", interrupt)
    run(
        loaded,
        "import time\n"
        "try:\n    gpu.make(300)\n"
        "except torch.OutOfMemoryError:\n    was_raised = True\n"
        "for _ in range(500):\n    time.sleep(0.01)",
    )

    assert loaded.user_ns["was_raised"]
    assert list(current_session().monitor.ledger)[-1].status == "interrupted"
    assert cards == []


# -- On the host -----------------------------------------------------------------------------------


@pytest.fixture
def on_host(shell: InteractiveShell) -> Iterator[InteractiveShell]:
    run(shell, "%load_ext gpumemwidget")
    run(shell, "import torch")
    yield shell
    run(shell, "%unload_ext gpumemwidget")


@pytest.mark.parametrize(
    ("call", "asked"),
    [
        ("bytearray(2**60)", None),
        ("torch.empty(2**44, dtype=torch.uint8)", 2**44),
        ("import numpy; numpy.ones((2**22, 2**22), dtype='uint8')", None),
    ],
)
def test_the_hosts_card(
    on_host: InteractiveShell, cards: list[OomCard], call: str, asked: int | None
) -> None:
    """What Python, PyTorch and NumPy can't get of the process's own memory."""
    run(on_host, f"def step():\n    h = torch.ones(2**24)\n    {call}\nstep()")

    (card,) = cards
    assert (card.event.device, card.event.requested_bytes) == (HOST, asked)
    assert card.event.device_free_bytes is not None
    assert (card.place or "").endswith("], line 3")
    assert card.text == call
    exception = next(way for way in card.ways if way.kind is RemedyKind.LAST_EXCEPTION)
    assert (exception.gives_bytes, exception.gives_is) == (64 * MIB, "exact")
