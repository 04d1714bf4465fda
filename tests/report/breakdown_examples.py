"""Whole devices to report: a busy one, one seen from a container, the host, their children."""

from __future__ import annotations

import random
from dataclasses import replace

from gpumemwidget.device_parts import build_breakdown
from gpumemwidget.model.breakdowns import Breakdown, SegmentMap
from gpumemwidget.model.devices import HOST, ChildProcess, DeviceState, DeviceUse
from gpumemwidget.model.ownership import DeviceAccount, MemoryKind
from tests.breakdowns.readings import (
    make_account,
    make_host_state,
    make_owned,
    make_process,
    make_segment,
    make_state,
)
from tests.report.examples import HOSTILE, MIB, own

GIB = 1024 * MIB


def _build(state: DeviceState, account: DeviceAccount | None = None) -> Breakdown:
    breakdown = build_breakdown(state, account)
    assert breakdown is not None
    return breakdown


def make_busy_breakdown(**changes: object) -> Breakdown:
    """A training run on an H100, with children, other processes, a limit and a budget."""
    account = make_account(
        make_owned(2 * GIB, "parameter", rounding=3 * MIB),
        make_owned(2 * GIB, "gradient", rounding=2 * MIB),
        make_owned(4 * GIB, "optimizer state", rounding=31 * MIB),
        make_owned(3 * GIB, "saved for backward", rounding=12 * MIB),
        make_owned(GIB, "tensor"),
        make_owned(223 * MIB, "unknown", "nowhere", rounding=512),
        make_owned(33 * MIB, "cuBLAS workspace", "nowhere"),
        make_owned(768 * MIB, "CUDA-graph pool", "nowhere"),
    )
    state = make_state()
    state = replace(state, info=replace(state.info, limit_bytes=60 * GIB))
    changes = {"budget_bytes": 10 * GIB, **changes}
    return replace(_build(state, account), **changes)  # type: ignore[arg-type]


def make_container_breakdown() -> Breakdown:
    """The driver's numbers of processes are not those of this container; an old driver, too."""
    state = make_state(processes=(make_process(31337, "other", 29 * GIB, None),), segments=())
    assert state.use is not None
    assert state.use.used_bytes is not None
    used_bytes = state.use.used_bytes + 480 * MIB
    return _build(replace(state, use=replace(state.use, used_bytes=used_bytes, driver_bytes=None)))


def make_asleep_breakdown() -> Breakdown:
    """A GPU that shares the host's memory, where most of what PyTorch has reserved sleeps."""
    used_bytes = 4 * GIB + 300 * MIB + 20 * GIB
    use = DeviceUse(
        "cuda:0", used_bytes, 100 * GIB, used_bytes + 100 * GIB, driver_bytes=0, is_shared=True
    )
    own = make_process(10, "own", 4 * GIB + 300 * MIB)
    return _build(make_state(processes=(own,), use=use, segments=()))


def make_untouched_breakdown() -> Breakdown:
    """A GPU that this process has not touched, with many processes on it."""
    names = [HOSTILE, None, *(f"python rank.py --rank {number}" for number in range(10))]
    processes = (
        make_process(1000 + number, "other", GIB - number * MIB, name)
        for number, name in enumerate(names)
    )
    return _build(make_state(reading=None, segments=(), processes=tuple(processes)))


def make_host_breakdown() -> Breakdown:
    """A machine of 64 GiB with a child and pinned memory."""
    processes = (make_process(10, "own", 6 * GIB), make_process(11, "child", 2 * GIB))
    rest = "Python's own objects and libraries"
    owned = (
        own(("data",), 3 * GIB, device=HOST),
        own(("no name",), GIB, device=HOST, root="nowhere"),
        own((rest,), GIB, "other", device=HOST, root="nowhere"),
    )
    return _build(make_host_state(processes=processes), DeviceAccount(HOST, 5 * GIB, owned))


def make_many_children() -> list[ChildProcess]:
    """As many as are read, of which one is on a GPU: there may be more."""
    children = [ChildProcess(pid, 1, f"rank {pid}", pid * MIB) for pid in range(1, 257)]
    children[0] = replace(children[0], devices=(("cuda:0", GIB),))
    return children


def make_children() -> tuple[ChildProcess, ...]:
    """A rank on a GPU, a worker that is not, and one that can't be read."""
    return (
        ChildProcess(4711, 4242, "python worker.py --rank 1", 2 * GIB, (("cuda:0", 3 * GIB),)),
        ChildProcess(4712, 4242, f"python {HOSTILE}", 310 * MIB),
        ChildProcess(4713, 4711, "nvcc", None, (("cuda:0", None),)),
    )


def make_map(n_segments: int = 10, n_blocks: int = 12) -> SegmentMap:
    """Segments that were cut at random, some large and many small ones."""
    chance = random.Random(5)
    kinds: tuple[MemoryKind, ...] = (
        "parameter",
        "gradient",
        "optimizer state",
        "saved for backward",
        "tensor",
        "unknown",
    )
    segments = []
    for number in range(n_segments):
        is_small = number % 3 == 2
        unit = 64 * 1024 if is_small else chance.choice([2, 8, 32]) * MIB
        states = "i" if number % 5 == 4 else "aai"
        blocks = [(chance.choice(states), unit * chance.randint(1, 8)) for _ in range(n_blocks)]
        segments.append(
            make_segment(
                *blocks,
                address=number << 40,
                pool_id=(int(number % 10 == 9), 0),
                page_bytes=(2 if is_small else 20) * MIB if number % 4 == 3 else None,
            )
        )
    segments.sort(key=lambda each: -each.n_bytes)
    every = [block for segment in segments for block in segment.blocks]
    names: dict[int, tuple[MemoryKind, str]] = {}
    for place, block in enumerate(each for each in every if each.state == "active_allocated"):
        kind = kinds[place % len(kinds)]
        names[block.address] = kind, HOSTILE if kind == "unknown" else f"model.layers[{place}]"
    lines = dict.fromkeys(names, "In [7], line 3")
    return SegmentMap("cuda:0", tuple(segments), names, lines)
