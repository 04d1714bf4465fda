"""PyTorch's allocator on a real GPU does what the simulated one does, with each setting."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest

from gpumemwidget.allocator.blocks import SimulatedBlock
from gpumemwidget.allocator.caching import CachingAllocator, DeviceFullError
from gpumemwidget.allocator.rules import parse_settings
from gpumemwidget.model.traces import TraceAction
from tests.gpu.processes import run_program

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

MIB = 1 << 20
#: Maximum bytes that the process may reserve: few enough that random requests meet the limit.
LIMIT_BYTES = 600 * MIB
#: Carries out ``steps`` under ``limit_bytes``, and prints the history that PyTorch recorded.
PROGRAM = """
import json, torch
torch.cuda.init()
total_bytes = torch.cuda.mem_get_info(0)[1]
torch.cuda.set_per_process_memory_fraction((limit_bytes + 0.5) / total_bytes)
torch.cuda.memory._record_memory_history(context=None)
blocks = []
for action, value in steps:
    if action == "allocate":
        try:
            blocks.append(torch.cuda.caching_allocator_alloc(value, 0))
        except torch.cuda.OutOfMemoryError:
            pass
    elif action == "free" and blocks:
        torch.cuda.caching_allocator_delete(blocks.pop(value % len(blocks)))
    elif action == "empty_cache":
        torch.cuda.empty_cache()
events = torch.cuda.memory._snapshot()["device_traces"][0]
print(json.dumps({
    "events": [[e["action"], e.get("addr", 0), e["size"]] for e in events],
    "allocated_bytes": torch.cuda.memory_allocated(0),
    "reserved_bytes": torch.cuda.memory_reserved(0),
    "retries": torch.cuda.memory_stats(0)["num_alloc_retries"],
}))
"""


def make_steps(seed: int) -> list[tuple[str, int]]:
    """A program that asks for some more than it frees, and now and then empties the cache."""
    chance = random.Random(seed)
    steps = []
    for _ in range(1500):
        drawn = chance.random()
        if drawn < 0.52:
            largest = chance.choice([1000, MIB, 9 * MIB, 80 * MIB])
            steps.append(("allocate", chance.randrange(1, largest)))
        elif drawn < 0.995:
            steps.append(("free", chance.randrange(1000)))
        else:
            steps.append(("empty_cache", 0))
    return steps


def simulate(text: str, steps: list[tuple[str, int]], segments: Iterator[int]) -> Any:
    """What the program prints, simulated; the driver's addresses are given."""
    settings = parse_settings(f"{text},per_process_memory_fraction:1", total_bytes=LIMIT_BYTES)
    allocator = CachingAllocator(1 << 40, settings=settings)
    events: list[list[Any]] = []

    def note(action: TraceAction, address: int, n_bytes: int, *_: Any) -> None:
        events.append([action.word, address, n_bytes])
        if action is TraceAction.SEGMENT_ALLOC:
            allocator.next_address = next(segments, 0)

    allocator.on_event = note
    allocator.next_address = next(segments, allocator.next_address)
    blocks: list[SimulatedBlock] = []
    for action, value in steps:
        if action == "allocate":
            with contextlib.suppress(DeviceFullError):
                blocks.append(allocator.allocate(value))
        elif action == "free" and blocks:
            allocator.free(blocks.pop(value % len(blocks)))
        elif action == "empty_cache":
            allocator.empty_cache()
    return {
        "events": events,
        "allocated_bytes": allocator.allocated_bytes,
        "reserved_bytes": allocator.reserved_bytes,
        "retries": allocator.to_stats()["num_alloc_retries"],
    }


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments:False",
        "expandable_segments:True",
        "max_split_size_mb:40",
        "max_split_size_mb:30,max_non_split_rounding_mb:64",
        "roundup_power2_divisions:4",
        "roundup_power2_divisions:[1:8,4:2,16:1,>:4]",
    ],
)
def test_a_random_program_is_simulated_exactly(text: str) -> None:
    """Each segment, page, block and retry is the real allocator's, on a device that gets full."""
    steps = make_steps(seed=len(text))
    source = f"steps = {steps!r}\nlimit_bytes = {LIMIT_BYTES}\n{PROGRAM}"

    real = run_program(source, PYTORCH_CUDA_ALLOC_CONF=text)
    addresses = [address for action, address, _ in real["events"] if action == "segment_alloc"]
    simulated = simulate(text, steps, iter(addresses))

    # An expandable segment has other addresses here, and an error's free memory differs.
    for found in (real, simulated):
        found["events"] = [
            [action, 0 if "expandable_segments:True" in text or action == "oom" else address, size]
            for action, address, size in found["events"]
            if action != "snapshot"
        ]
    assert simulated == real
    assert real["retries"] > 5
