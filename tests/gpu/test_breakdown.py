"""The breakdown on a real GPU is the whole device, as the driver tells it, whatever others do."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.device_parts import build_breakdown
from gpumemwidget.model.breakdowns import Breakdown, BreakdownPart, PartKey
from gpumemwidget.model.devices import DeviceState
from gpumemwidget.model.ownership import DeviceAccount
from gpumemwidget.ownership.account import take_memory_account
from tests.gpu.processes import GIB, MIB, Neighbour, read_nvml
from tests.ownership.notebook import Notebook

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

#: Parts of what PyTorch has reserved.
RESERVED_KEYS: tuple[PartKey, ...] = (
    *("allocated", "rounding", "pending", "releasable", "fragmented", "pools"),
)


def take_state(hardware: Hardware, device: str = "cuda:0") -> DeviceState:
    """All that is read of one device."""
    return next(each for each in hardware.take_device_states() if each.info.device == device)


def take_breakdown(
    hardware: Hardware, device: str = "cuda:0", account: DeviceAccount | None = None
) -> Breakdown:
    """The breakdown of now; it is whole."""
    breakdown = build_breakdown(take_state(hardware, device), account)
    assert breakdown is not None
    check_breakdown(breakdown)
    return breakdown


def check_breakdown(breakdown: Breakdown) -> None:
    """What holds of every breakdown: its parts are all of it, and none is negative."""
    assert sum(part.n_bytes for part in breakdown.parts) == breakdown.total_bytes
    pending = list(breakdown.parts)
    while pending:
        part = pending.pop()
        assert part.n_bytes >= 0, part
        if part.parts:
            assert sum(each.n_bytes for each in part.parts) == part.n_bytes, part
        pending += part.parts


def sum_parts(breakdown: Breakdown, *keys: PartKey) -> int:
    return sum(part.n_bytes for part in breakdown.parts if part.key in keys)


def list_processes(breakdown: Breakdown, key: PartKey) -> list[BreakdownPart]:
    return [each for part in breakdown.parts if part.key == key for each in part.parts]


def check_against_driver(breakdown: Breakdown, index: int = 0) -> None:
    """To 1 MiB, while nobody takes or frees."""
    memory, _ = read_nvml(index)
    assert breakdown.total_bytes == memory.total
    assert breakdown.used_bytes is not None
    assert abs(breakdown.used_bytes - memory.used) <= MIB
    assert abs(sum_parts(breakdown, "free") - memory.free) <= MIB
    assert abs(sum_parts(breakdown, "driver") - memory.reserved) <= MIB
    used = ("outside", "children", "others", "unlisted")
    assert abs(sum_parts(breakdown, *RESERVED_KEYS, *used) - memory.used) <= MIB


def check_against_torch(breakdown: Breakdown, index: int = 0) -> None:
    """To the byte."""
    assert breakdown.allocated_bytes == torch.cuda.memory_allocated(index)
    assert breakdown.reserved_bytes == torch.cuda.memory_reserved(index)
    assert sum_parts(breakdown, *RESERVED_KEYS) == torch.cuda.memory_reserved(index)
    assert sum_parts(breakdown, "allocated", "rounding") == torch.cuda.memory_allocated(index)


_TRAINED = """
import torch
layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 129, 512, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
activations = model(torch.randn(8, 129, 512, device="cuda"))
"""


def test_a_trained_model(notebook: Notebook, hardware: Hardware) -> None:
    """The parts are the device's total, the driver's figures and PyTorch's; kinds have bytes."""
    notebook.run(_TRAINED)
    torch.cuda.synchronize()
    account = take_memory_account(notebook.shell, notebook.hardware, budget_s=20.0)
    device = next(each for each in account.devices if each.device == "cuda:0")

    breakdown = take_breakdown(hardware, account=device)

    check_against_driver(breakdown)
    check_against_torch(breakdown)
    kinds = {
        part.kind: part.n_bytes
        for whole in breakdown.parts
        for part in (whole, *whole.parts)
        if part.key == "kind"
    }
    model = notebook.ip.user_ns["model"]
    n_bytes = sum(each.numel() for each in model.parameters()) * 4
    # Without what blocks are rounded to: to the byte.
    assert kinds["parameter"] == kinds["gradient"] == n_bytes
    assert kinds["optimizer state"] >= 2 * n_bytes
    assert kinds["saved for backward"] > 0
    # The context of CUDA, and nothing that would be another's.
    assert 100 * MIB < sum_parts(breakdown, "outside") < 4 * GIB
    assert not any(part.merged for part in breakdown.parts)


def test_others_and_children_have_their_bytes(hardware: Hardware, clean: None) -> None:
    """Each by its number and name; what one takes is in its part alone, and leaves with it."""
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    before = take_breakdown(hardware)

    with Neighbour() as other, Neighbour(is_child=True) as child:
        idle = take_breakdown(hardware)
        check_against_driver(idle)
        for neighbour, n_bytes in ((other, 2 * GIB), (child, 512 * MIB)):
            neighbour.take(n_bytes)
            # While it has them, and is still: the driver says the same at once.
            check_against_driver(take_breakdown(hardware))
        busy = take_breakdown(hardware)
        check_against_torch(busy)
        for neighbour, key, n_bytes in (
            (other, "others", 2 * GIB),
            (child, "children", 512 * MIB),
        ):
            (was,) = [x for x in list_processes(idle, key) if x.process.pid == neighbour.pid]
            (now,) = [x for x in list_processes(busy, key) if x.process.pid == neighbour.pid]
            assert now.n_bytes - was.n_bytes == n_bytes
            assert now.process.n_bytes == now.n_bytes
            assert "tests.gpu.processes" in now.process.name
        assert sum_parts(idle, "free") - sum_parts(busy, "free") == 2 * GIB + 512 * MIB
        assert sum_parts(busy, *RESERVED_KEYS) == sum_parts(before, *RESERVED_KEYS)
        assert abs(sum_parts(busy, "outside") - sum_parts(before, "outside")) <= MIB
        assert [each.pid for each in hardware.list_children()] == [child.pid]
        other.free()
        freed = take_breakdown(hardware)
        check_against_driver(freed)
        assert sum_parts(freed, "free") - sum_parts(busy, "free") == 2 * GIB
    # The driver takes a moment to clear away what has ended.
    until_s = time.monotonic() + 10
    while list_processes(take_breakdown(hardware), "others") or hardware.list_children():
        assert time.monotonic() < until_s
        time.sleep(0.1)
    after = take_breakdown(hardware)
    check_against_driver(after)
    assert abs(sum_parts(after, "free") - sum_parts(before, "free")) <= 2 * MIB
    del kept


def test_while_another_takes_and_frees_without_end(hardware: Hardware, clean: None) -> None:
    """Still all of the device, never negative; and what is ours is ours to the byte."""
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    calm, agreed, n_states = 0, 0, 0
    seen = set()
    with Neighbour() as other, Neighbour(is_child=True) as child:
        other.churn()
        child.churn()
        until_s = time.monotonic() + 4
        while time.monotonic() < until_s:
            low, _ = read_nvml()
            state = take_state(hardware)
            high, _ = read_nvml()
            breakdown = build_breakdown(state)
            check_breakdown(breakdown)
            check_against_torch(breakdown)
            n_states += 1
            seen.add(sum_parts(breakdown, "others"))
            if low.used == high.used and low.free == high.free:
                calm += 1
                is_used = abs(breakdown.used_bytes - low.used) <= MIB
                agreed += is_used and abs(sum_parts(breakdown, "free") - low.free) <= MIB
        other.free()
        child.free()
        still = take_breakdown(hardware)
        check_against_driver(still)
    assert n_states > 50
    # Not every time: between two equal readings a neighbour may have taken and freed the same.
    assert agreed > 5
    assert len(seen) > 5
    del kept


def test_while_this_process_takes_and_frees_without_end(hardware: Hardware, clean: None) -> None:
    """A thread allocates in the middle of the readings: all of the device, never negative."""
    stop = threading.Event()

    def work() -> None:
        rng = random.Random(0)
        held: list[torch.Tensor] = []
        while not stop.is_set():
            n_bytes = rng.choice((700, MIB // 2, 3 * MIB, 50 * MIB))
            held.append(torch.empty(n_bytes, dtype=torch.uint8, device="cuda:0"))
            if len(held) > 40:
                del held[rng.randrange(40)]
            if rng.random() < 0.01:
                torch.cuda.empty_cache()
            if rng.random() < 0.3:
                time.sleep(0.001)

    thread = threading.Thread(target=work, name="allocates")
    thread.start()
    try:
        moments = []
        until_s = time.monotonic() + 3
        while time.monotonic() < until_s:
            state = take_state(hardware)
            breakdown = build_breakdown(state)
            check_breakdown(breakdown)
            moments.append(state.is_at_one_moment)
            if state.is_at_one_moment:
                assert sum_parts(breakdown, *RESERVED_KEYS) == breakdown.reserved_bytes
                assert sum_parts(breakdown, "allocated", "rounding") == breakdown.allocated_bytes
    finally:
        stop.set()
        thread.join()
    assert len(moments) > 50
    assert any(moments)
    breakdown = take_breakdown(hardware)
    check_against_torch(breakdown)
    check_against_driver(breakdown)


# -- What empty_cache gives back -------------------------------------------------------------------


def make_plain(held: list[Any], rng: random.Random) -> None:
    """Whole segments that are free, and some that are cut."""
    for n_bytes in (30 * MIB, 3 * MIB, 3 * MIB, 700, 90 * MIB, 5 * MIB, 1000):
        held.append(torch.empty(n_bytes, dtype=torch.uint8, device="cuda"))
    del held[0], held[1], held[2]


def make_random(held: list[Any], rng: random.Random) -> None:
    """Sizes of all kinds, freed here and there."""
    for _ in range(400):
        n_bytes = rng.choice((1, 513, 90_000, MIB, MIB + 1, 4 * MIB, 11 * MIB, 37 * MIB))
        held.append(torch.empty(n_bytes, dtype=torch.uint8, device="cuda"))
        if rng.random() < 0.6:
            del held[rng.randrange(len(held))]
    # Others fill what the many have left free.
    for n_bytes in (200 * MIB, 110 * MIB + 3):
        torch.empty(n_bytes, dtype=torch.uint8, device="cuda")


def make_streams(held: list[Any], rng: random.Random) -> None:
    """Blocks of another stream."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        make_random(held, rng)
    torch.cuda.synchronize()


def make_graph(held: list[Any], rng: random.Random) -> None:
    """A pool of a graph that is alive, beside free segments."""
    x = torch.ones(2 * MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        z = y + 1
        del y
    graph.replay()
    held += [graph, z, x]
    make_plain(held, rng)


def make_dead_graph(held: list[Any], rng: random.Random) -> None:
    """A pool of a graph that is gone."""
    make_graph(held, rng)
    held.clear()
    gc.collect()


def make_pool(held: list[Any], rng: random.Random) -> None:
    """A ``MemPool`` that is alive, with free memory in it."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        held.append(torch.empty(30 * MIB, dtype=torch.uint8, device="cuda"))
        torch.empty(50 * MIB, dtype=torch.uint8, device="cuda")
    held.append(pool)
    make_plain(held, rng)


SHAPES = {
    "plain": make_plain,
    "random": make_random,
    "streams": make_streams,
    "graph": make_graph,
    "dead graph": make_dead_graph,
    "pool": make_pool,
}


@pytest.fixture(params=["segments", "expandable segments"])
def settings(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways in which the allocator gets memory from the driver."""
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or getattr(
        torch._C, "_cuda_cudaCachingAllocator_set_allocator_settings", None
    )
    assert set_settings is not None
    if request.param == "expandable segments":
        set_settings("expandable_segments:True")
    yield request.param
    set_settings("expandable_segments:False")


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_releasable_is_what_comes_back(
    shape: str, settings: str, hardware: Hardware, clean: None
) -> None:
    """``empty_cache`` gives back as much as was said, to the byte, and the driver sees it."""
    for seed in range(4 if shape == "random" else 1):
        held: list[Any] = []
        SHAPES[shape](held, random.Random(seed))
        torch.cuda.synchronize()
        state = take_state(hardware)
        breakdown = build_breakdown(state)
        check_breakdown(breakdown)
        check_against_torch(breakdown)
        check_against_driver(breakdown)
        memory, _ = read_nvml()
        releasable_bytes = sum_parts(breakdown, "releasable")

        torch.cuda.empty_cache()

        freed_bytes = breakdown.reserved_bytes - torch.cuda.memory_reserved(0)
        after = take_breakdown(hardware)
        parts = [(part.key, part.n_bytes) for part in breakdown.parts]
        assert releasable_bytes > 0, parts
        if shape == "dead graph":
            # The allocator does not tell of a pool whether its graph is still there.
            assert releasable_bytes <= freed_bytes, parts
            assert freed_bytes <= releasable_bytes + sum_parts(breakdown, "pools"), parts
        else:
            assert freed_bytes == releasable_bytes, parts
        assert sum_parts(after, "releasable") == 0
        assert sum_parts(after, "fragmented") == sum_parts(breakdown, "fragmented")
        assert sum_parts(after, "pools") == sum_parts(breakdown, "pools") or shape == "dead graph"
        assert abs(memory.used - read_nvml()[0].used - freed_bytes) <= MIB
        check_against_driver(after)
        held.clear()
        gc.collect()
        torch.cuda.empty_cache()
        assert sum_parts(take_breakdown(hardware), "pools") == 0


def test_what_another_stream_may_still_use(hardware: Hardware, clean: None) -> None:
    """Freed while another stream works on it: pending, until that stream is done."""
    stream = torch.cuda.Stream()
    x = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_500_000_000)  # Cycles: most of a second.
        x.add_(1)
    x.record_stream(stream)
    del x

    breakdown = take_breakdown(hardware)

    assert sum_parts(breakdown, "pending") == 64 * MIB
    check_against_torch(breakdown)
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # The allocator looks when it is asked for something.
    assert sum_parts(take_breakdown(hardware), "pending") == 0


def test_the_largest_free_block(hardware: Hardware, clean: None) -> None:
    """As large a request is met from the cache, and one that is larger is not."""
    torch.cuda.empty_cache()
    held = [torch.empty(12 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
    del held[2], held[4]
    n_bytes = take_breakdown(hardware).largest_free_block_bytes
    reserved_bytes = torch.cuda.memory_reserved(0)

    fits = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")

    assert torch.cuda.memory_reserved(0) == reserved_bytes
    del fits
    larger = torch.empty(n_bytes + 512, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved(0) > reserved_bytes
    del larger, held


def test_pinned_memory_is_the_hosts(hardware: Hardware, clean: None) -> None:
    """What the allocator has of it, in powers of two."""
    torch._C._host_emptyCache()
    before_bytes = take_state(hardware, "host").pinned_bytes or 0

    pinned = torch.empty(100 * MIB, dtype=torch.uint8, pin_memory=True)
    held_bytes = take_state(hardware, "host").pinned_bytes
    del pinned
    cached_bytes = take_state(hardware, "host").pinned_bytes
    torch._C._host_emptyCache()
    after_bytes = take_state(hardware, "host").pinned_bytes or 0

    assert held_bytes is not None
    assert held_bytes - before_bytes == 128 * MIB
    assert (cached_bytes, after_bytes) == (held_bytes, before_bytes)
    assert take_breakdown(hardware, "host").device == "host"


def test_nothing_is_changed_by_looking(hardware: Hardware, clean: None) -> None:
    """Counters, peaks, the current device and the driver's figures are as they were."""
    kept = [torch.empty(n * MIB, dtype=torch.uint8, device="cuda") for n in (1, 30, 7)]
    del kept[1]
    take_breakdown(hardware)
    counters, (memory, _) = torch.cuda.memory_stats(0), read_nvml()
    current = torch.cuda.current_device()

    for _ in range(20):
        take_breakdown(hardware)
        hardware.list_children()

    assert torch.cuda.memory_stats(0) == counters
    assert torch.cuda.current_device() == current
    assert abs(read_nvml()[0].used - memory.used) <= MIB
