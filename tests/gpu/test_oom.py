"""OOMs on a real GPU: the card says what stood, holds nothing, and what it promises is true."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from gpumemwidget.jupyter import outputs as cell_outputs
from gpumemwidget.model.ooms import OomCard, RemedyKind
from gpumemwidget.report.oom import word_remedy
from gpumemwidget.session.oom_watch import OomWatch
from gpumemwidget.session.session import Session
from gpumemwidget.units import format_bytes
from tests.gpu.processes import MIB, SHELL, run_python
from tests.shell import open_shell

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

#: More than any device has: it fails at once, and fills nothing.
HUGE = 1 << 43
LINEAR = "torch.nn.modules.linear.Linear.forward"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[InteractiveShell]:
    """A shell with the extension loaded, and a model on the device that was used once."""
    with open_shell(tmp_path) as shell:
        run(shell, "%load_ext gpumemwidget")
        run(
            shell,
            "import torch\n"
            "model = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.ReLU(), "
            "torch.nn.Linear(4096, 4096)).cuda()\n"
            "x = torch.randn(16384, 4096, device='cuda')\n"
            "model(x).sum().backward()\n"
            "torch.cuda.synchronize()",
        )
        yield shell
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
        run(shell, "%unload_ext gpumemwidget")
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def cards(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> list[OomCard]:
    """The cards that were shown; each still is."""
    cards: list[OomCard] = []
    show = cell_outputs.show_card

    def keep(card: OomCard, session: Session) -> None:
        cards.append(card)
        show(card, session)

    monkeypatch.setattr(cell_outputs, "show_card", keep)
    return cards


def run(shell: InteractiveShell, source: str) -> None:
    shell.run_cell(source, store_history=True)


def read_allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(0)


def find_gives(card: OomCard, kind: str) -> int:
    return next(way.gives_bytes or 0 for way in card.ways if way.kind.value == kind)


def hold_to_counters(card: OomCard) -> None:
    """What is said of the device adds up."""
    event = card.event
    assert event.device == "cuda:0"
    assert card.owned_bytes == event.allocated_bytes
    assert card.breakdown is not None
    (allocated,) = (part for part in card.breakdown.parts if part.key == "allocated")
    assert allocated.n_bytes == event.allocated_bytes
    assert sum(part.n_bytes for part in allocated.parts) == event.allocated_bytes
    # The driver's total: PyTorch's leaves out what the driver keeps for itself.
    torchs_total = torch.cuda.mem_get_info(0)[1]
    assert event.state.use is not None
    assert event.device_total_bytes == torchs_total + (event.state.use.driver_bytes or 0)
    assert event.largest_free_block_bytes is not None
    assert event.unallocated_bytes is not None
    assert event.largest_free_block_bytes <= event.unallocated_bytes
    for process in event.state.processes or ():
        if process.relation == "own" and process.n_bytes is not None:
            assert process.n_bytes > (event.reserved_bytes or 0)
    assert not any(each.kind == "unknown" for each in card.owners)


# -- Where it happens ------------------------------------------------------------------------------


def test_in_forward(
    shell: InteractiveShell, cards: list[OomCard], capsys: pytest.CaptureFixture[str]
) -> None:
    """The line of the cell's, its text and the layer that it called."""
    before = read_allocated()
    capsys.readouterr()

    run(
        shell,
        "def step():\n    h = model(x)\n    return model(x[:1].expand(1 << 32, 4096))\nstep()",
    )

    (card,) = cards
    hold_to_counters(card)
    assert (card.event.requested_bytes or 0) > torch.cuda.mem_get_info(0)[1]
    assert card.event.limit_bytes is None
    assert (card.place or "").endswith("], line 3")
    assert card.text == "return model(x[:1].expand(1 << 32, 4096))"
    assert card.function == LINEAR
    assert card.notes == ()
    shown = capsys.readouterr().out
    assert 0 < shown.index("OutOfMemoryError") < shown.index("Out of memory on cuda:0")
    # h, and what its graph has saved: all of the failed step.
    held = read_allocated() - before
    assert find_gives(card, "last exception") == held
    run(shell, "%memrelease --exceptions")
    assert read_allocated() == before


@pytest.mark.parametrize(
    ("source", "line", "function", "kinds"),
    [
        pytest.param(
            "def train():\n"
            "    w = torch.zeros(1, device='cuda', requires_grad=True)\n"
            f"    y = model(x).mean() + w.expand({HUGE})[0]\n"
            "    y.backward()\n"
            "train()",
            4,
            "torch.autograd.backward",
            {"gradients", "checkpointing"},
            id="by-autograds-thread-without-a-stack",
        ),
        pytest.param(
            "class Double(torch.autograd.Function):\n"
            "    @staticmethod\n    def forward(ctx, a):\n"
            "        ctx.save_for_backward(a)\n        return a * 2\n"
            "    @staticmethod\n    def backward(ctx, grad):\n"
            "        (a,) = ctx.saved_tensors\n"
            f"        return grad.new_empty({HUGE})\n"
            "Double.apply(x.clone().requires_grad_()).sum().backward()",
            9,
            None,
            set(),
            id="in-the-functions-own",
        ),
    ],
)
def test_in_backward(
    shell: InteractiveShell,
    cards: list[OomCard],
    *,
    source: str,
    line: int,
    function: str | None,
    kinds: set[str],
) -> None:
    """The line, and what the exception holds, to the byte."""
    before = read_allocated()

    run(shell, source)

    (card,) = cards
    hold_to_counters(card)
    assert (card.place or "").endswith(f"], line {line}")
    assert function in (None, card.function)
    assert find_gives(card, "last exception") == read_allocated() - before
    assert {way.kind.value for way in card.ways} >= kinds
    run(shell, "%memrelease --exceptions")
    assert read_allocated() == before


def test_in_an_optimizers_step(shell: InteractiveShell, cards: list[OomCard]) -> None:
    """Under a limit, where the moments find no room: the limit is said, and what it would give."""
    run(
        shell,
        "big = torch.nn.Linear(8192, 8192, bias=False).cuda()\n"
        "big(torch.randn(1, 8192, device='cuda')).sum().backward()",
    )
    run(shell, "optimizer = torch.optim.Adam(big.parameters())\ntorch.cuda.empty_cache()")
    total = torch.cuda.mem_get_info(0)[1]
    fraction = (torch.cuda.memory_reserved(0) + 128 * MIB) / total
    torch.cuda.set_per_process_memory_fraction(fraction, 0)

    run(shell, "optimizer.step()")
    torch.cuda.set_per_process_memory_fraction(1.0, 0)

    (card,) = cards
    hold_to_counters(card)
    assert card.event.requested_bytes == 256 * MIB
    assert card.event.limit_bytes == int(fraction * total)
    assert card.text == "optimizer.step()"
    assert (card.function or "").startswith("torch.optim.")
    assert find_gives(card, "limit") > 0
    assert ("gradient", 256 * MIB) in {(each.kind, each.n_bytes) for each in card.owners}
    # That gradient stands in a list of the step's too, which the exception keeps: without it the
    # rest goes.
    before = read_allocated()
    run(shell, "big.zero_grad(); model.zero_grad()")
    assert before - read_allocated() == find_gives(card, "gradients") - 256 * MIB > 0
    run(shell, "%memrelease --exceptions")
    assert before - read_allocated() == find_gives(card, "gradients")


def test_in_a_thread(shell: InteractiveShell, cards: list[OomCard]) -> None:
    """Whose error comes to the cell: the line is the thread's own."""
    run(
        shell,
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def work():\n"
        f"    torch.empty({HUGE}, device='cuda')\n"
        "with ThreadPoolExecutor(1) as pool:\n    pool.submit(work).result()",
    )

    (card,) = cards
    hold_to_counters(card)
    assert (card.place or "").endswith("], line 3")


def test_the_first_touch_in_the_cell() -> None:
    """Torch is imported, CUDA initialised and out of memory in one and the same cell."""
    out = run_python(
        SHELL
        + f"""
from gpumemwidget.jupyter import outputs as cell_outputs
def show(card, session):
    print("CARD", card.event.requested_bytes, card.event.frames != (), card.notes)
cell_outputs.show_card = show
cell("import torch\\ntorch.empty({HUGE}, dtype=torch.uint8, device='cuda')")
cell("%unload_ext gpumemwidget")
"""
    )

    assert f"CARD {HUGE} True ()" in out


def test_one_after_those_that_were_caught(shell: InteractiveShell, cards: list[OomCard]) -> None:
    """Its owners come from the traceback that still stands, and nothing is missing."""
    before = read_allocated()

    run(
        shell,
        "def search():\n"
        "    for n in range(3):\n"
        f"        try:\n            torch.empty({HUGE}, device='cuda')\n"
        "        except torch.OutOfMemoryError:\n            h = model(x)\n"
        f"    torch.empty({2 * HUGE}, dtype=torch.uint8, device='cuda')\n"
        "search()",
    )

    (card,) = cards
    assert card.event.requested_bytes == 2 * HUGE
    assert card.n_caught == 3
    assert card.owned_bytes == card.event.allocated_bytes
    assert len(card.notes) == 1
    assert find_gives(card, "last exception") == read_allocated() - before
    run(shell, "%memrelease --exceptions")
    assert read_allocated() == before


# -- What it promises ------------------------------------------------------------------------------


def test_nothing_is_allocated_to_look(
    shell: InteractiveShell, cards: list[OomCard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at the OOM nor at the card: allocated, reserved and the user's peaks stay."""
    seen: list[tuple[int, ...]] = []

    def read() -> tuple[int, ...]:
        return (
            torch.cuda.memory_allocated(0),
            torch.cuda.memory_reserved(0),
            torch.cuda.max_memory_allocated(0),
            torch.cuda.max_memory_reserved(0),
        )

    def count(part: Callable[..., None]) -> Callable[..., None]:
        def watched(*args: Any) -> None:
            seen.append(read())
            part(*args)
            seen.append(read())

        return watched

    for owner, name in ((OomWatch, "_keep"), (cell_outputs.OomCards, "end")):
        monkeypatch.setattr(owner, name, count(vars(owner)[name]))

    run(shell, f"h = model(x)\ntorch.empty({HUGE}, device='cuda')")

    assert len(seen) == 4
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]


def test_gradients_and_names(shell: InteractiveShell, cards: list[OomCard]) -> None:
    """What the other ways promise their releases give, to the byte."""
    run(shell, "unused = torch.empty(256 * 1024**2, dtype=torch.uint8, device='cuda')")
    run(shell, f"model(x)\ntorch.empty({HUGE}, device='cuda')")
    (card,) = cards
    names = next(
        way for way in card.ways if way.kind is RemedyKind.NAMES and way.names == ("unused",)
    )

    before = read_allocated()
    run(shell, f"%memrelease {' '.join(names.names)}")
    after_names = read_allocated()
    run(shell, "model.zero_grad()")
    after_grads = read_allocated()

    assert before - after_names == names.gives_bytes == 256 * MIB
    assert after_names - after_grads == find_gives(card, "gradients")
    assert all(each.grad is None for each in shell.user_ns["model"].parameters())


def test_fragments(shell: InteractiveShell, cards: list[OomCard]) -> None:
    """Enough is reserved, in pieces too small: growing segments are named."""
    run(
        shell,
        "def take(n_mib):\n"
        "    return torch.empty(n_mib * 1024**2, dtype=torch.uint8, device='cuda')\n"
        # What the model's step left cached would be cut up for them, side by side.
        "torch.cuda.empty_cache()\n"
        "pieces, kept = [take(64) for _ in range(8)], []\n"
        "while pieces:\n"
        "    pieces.pop()\n"
        "    kept.append(take(40))",
    )
    total = torch.cuda.mem_get_info(0)[1]
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved(0) / total, 0)

    run(shell, "take(128)")
    torch.cuda.set_per_process_memory_fraction(1.0, 0)

    (card,) = cards
    hold_to_counters(card)
    event = card.event
    assert event.unallocated_bytes is not None
    assert event.largest_free_block_bytes is not None
    assert event.largest_free_block_bytes < 128 * MIB <= event.unallocated_bytes
    assert find_gives(card, "expandable segments") == event.unallocated_bytes


def test_the_card_of_an_oom_says_the_limit(
    shell: InteractiveShell, cards: list[OomCard], capsys: pytest.CaptureFixture[str]
) -> None:
    """And the way out of it is one that works."""
    run(shell, "torch.cuda.empty_cache()")
    limit_bytes = torch.cuda.memory_reserved(0) + 64 * MIB
    run(shell, f"%memlimit {limit_bytes}B")
    capsys.readouterr()

    run(shell, f"kept = torch.empty({256 * MIB}, dtype=torch.uint8, device='cuda')")

    (card,) = cards
    assert card.event.limit_bytes == limit_bytes
    assert find_gives(card, "limit") > 0
    (way,) = (each for each in card.ways if each.kind is RemedyKind.LIMIT)
    _, command = word_remedy(way, card.event)
    assert command == "%memlimit off --device cuda:0"
    # The text's lines are as narrow as a page's.
    shown = " ".join(capsys.readouterr().out.split())
    assert f"left below the limit of {format_bytes(limit_bytes)}" in shown
    run(shell, str(command))
    run(shell, f"kept = torch.empty({256 * MIB}, dtype=torch.uint8, device='cuda')")
    assert shell.user_ns["kept"].numel() == 256 * MIB
    assert len(cards) == 1
