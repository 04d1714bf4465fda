"""Whole devices to report: a busy one, an idle one, one seen from a container, the host."""

from __future__ import annotations

import random
from dataclasses import replace

from gpumemwidget.breakdowns import build_breakdown
from gpumemwidget.model.breakdowns import Breakdown, SegmentMap
from gpumemwidget.model.devices import (
    HOST,
    ChildProcess,
    DeviceInfo,
    DeviceState,
    DeviceUse,
    ProcessUse,
    Reading,
    Segment,
)
from gpumemwidget.model.ownership import DeviceAccount, MemoryKind
from tests.breakdowns.readings import make_segment
from tests.report.examples import HOSTILE, MIB, own

GIB = 1024 * MIB
_TOTAL = 85_520_809_984
_DRIVER = 503_316_480


def _make_segment(number: int, blocks: str, unit: int, pool: tuple[int, int] = (0, 0)) -> Segment:
    """One block a letter: ``a`` allocated, ``p`` pending, ``i`` inactive."""
    sizes = [(letter, unit) for letter in blocks]
    return make_segment(*sizes, address=(number + 1) << 40, pool_id=pool)


def _make_use(used_bytes: int) -> DeviceUse:
    free = _TOTAL - _DRIVER - used_bytes
    return DeviceUse("cuda:0", used_bytes, free, _TOTAL, 87, driver_bytes=_DRIVER)


def _build(state: DeviceState, account: DeviceAccount | None = None) -> Breakdown:
    breakdown = build_breakdown(state, account)
    assert breakdown is not None
    return breakdown


def make_busy_breakdown(**changes: object) -> Breakdown:
    """A training run on an H100, with children, other processes, a limit and a budget."""
    segments = (
        _make_segment(0, "a" * 30 + "i" * 3 + "a" * 2 + "ip", GIB),
        _make_segment(1, "i" * 5, 512 * MIB),
        _make_segment(2, "ai" * 40, 10 * MIB),
        _make_segment(3, "aaai", 256 * MIB, (1, 0)),
    )
    allocated = 32 * GIB + 400 * MIB + 768 * MIB
    reserved = sum(each.n_bytes for each in segments)
    own_bytes = reserved + 691 * MIB
    others = (9 * GIB + 111 * MIB, 540 * MIB)
    used = own_bytes + 3 * GIB + sum(others) + 9_240_576
    state = DeviceState(
        info=DeviceInfo(
            "cuda:0", "NVIDIA H100 80GB HBM3", 85_017_493_504, limit_bytes=60 * GIB, uuid="GPU-1"
        ),
        reading=Reading("cuda:0", allocated, reserved),
        use=_make_use(used),
        processes=(
            ProcessUse(4242, "ipykernel_launcher", "own", own_bytes),
            ProcessUse(4711, "python worker.py --rank 1", "child", 3 * GIB),
            ProcessUse(900, "python serve.py --model llama-3-8b --port 8000", "other", others[0]),
            ProcessUse(7, None, "other", others[1]),
        ),
        segments=segments,
    )
    account = DeviceAccount(
        "cuda:0",
        allocated,
        (
            own(("x",), 7 * GIB, "parameter", rounding_bytes=3 * MIB),
            own(("x",), 7 * GIB, "gradient", rounding_bytes=2 * MIB),
            own(("x",), 14 * GIB, "optimizer state", rounding_bytes=31 * MIB),
            own(("x",), 2 * GIB, "saved for backward", rounding_bytes=12 * MIB),
            own(("x",), GIB, "tensor", rounding_bytes=0),
            own(("x",), 400 * MIB, "unknown", root="nowhere", rounding_bytes=512),
            own(("x",), 33 * MIB, "cuBLAS workspace", root="nowhere", rounding_bytes=0),
            own(("x",), 768 * MIB, "CUDA-graph pool", root="nowhere", rounding_bytes=0),
            own(("x",), 991 * MIB, "tensor", root="nowhere", rounding_bytes=0),
        ),
    )
    changes = {"budget_bytes": 40 * GIB, **changes}
    return replace(_build(state, account), **changes)  # type: ignore[arg-type]


def make_idle_breakdown() -> Breakdown:
    """One small tensor on an H100, as it was read."""
    state = DeviceState(
        info=DeviceInfo("cuda:0", "NVIDIA H100 80GB HBM3", 85_017_493_504),
        reading=Reading("cuda:0", 4 * MIB, 20 * MIB),
        use=_make_use(573_374_464),
        processes=(ProcessUse(4242, "ipykernel_launcher", "own", 564_133_888),),
        segments=(_make_segment(0, "aiiii", 4 * MIB),),
    )
    return _build(state)


def make_container_breakdown() -> Breakdown:
    """The driver's numbers of processes are not those of this container; an old driver, too."""
    use = _make_use(29 * GIB)
    assert use.used_bytes is not None
    state = DeviceState(
        info=DeviceInfo("cuda:0", "NVIDIA A100-SXM4-40GB", 85_017_493_504),
        reading=Reading("cuda:0", 12 * GIB, 16 * GIB),
        use=replace(use, used_bytes=use.used_bytes + _DRIVER, driver_bytes=None),
        processes=(
            ProcessUse(31337, None, "other", 17 * GIB),
            ProcessUse(31338, None, "other", 12 * GIB),
        ),
    )
    return _build(state)


def make_untouched_breakdown() -> Breakdown:
    """A GPU that this process has not touched, with many processes on it."""
    names = [HOSTILE, None, *(f"python rank.py --rank {number}" for number in range(10))]
    state = DeviceState(
        info=DeviceInfo("cuda:1", "NVIDIA H100 80GB HBM3", None),
        reading=None,
        use=replace(_make_use(13 * GIB), device="cuda:1"),
        processes=tuple(
            ProcessUse(1000 + number, name, "other", GIB - number * MIB)
            for number, name in enumerate(names)
        ),
    )
    return _build(state)


def make_host_breakdown() -> Breakdown:
    """A machine of 128 GiB with a child and pinned memory."""
    state = DeviceState(
        info=DeviceInfo(HOST, "host memory", 128 * GIB),
        reading=Reading(HOST, 5 * GIB, 6 * GIB + 200 * MIB),
        use=DeviceUse(HOST, 24 * GIB, 104 * GIB, 128 * GIB),
        processes=(
            ProcessUse(4242, "ipykernel_launcher", "own", 6 * GIB + 200 * MIB),
            ProcessUse(4711, "python worker.py --rank 1", "child", 2 * GIB),
        ),
        pinned_bytes=GIB + 512 * MIB,
    )
    account = DeviceAccount(
        HOST,
        5 * GIB,
        (
            own(("data",), 3 * GIB, "tensor", device=HOST, root="name", rows=()),
            own(("no name",), GIB, "tensor", device=HOST, root="nowhere", rows=()),
            own(
                ("Python's own objects and libraries",),
                GIB,
                "other",
                device=HOST,
                root="nowhere",
                rows=(),
            ),
        ),
    )
    return _build(state, account)


def make_many_children() -> list[ChildProcess]:
    """Many, of which one is on a GPU."""
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
    largest = max(block.n_bytes for block in every if block.state == "inactive")
    lines = dict.fromkeys(names, "In[7], line 3")
    return SegmentMap("cuda:0", tuple(segments), largest, names, lines)
