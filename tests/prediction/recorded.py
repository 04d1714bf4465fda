"""Recorded histories of PyTorch's caching allocator, carried out by the simulated one."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpumemwidget.allocator.caching import CachingAllocator, DeviceFullError
from gpumemwidget.allocator.rules import AllocatorSettings
from gpumemwidget.model.devices import Segment
from gpumemwidget.model.traces import AllocatorTrace, TraceAction

FOLDER = Path(__file__).parent / "recordings"
NAMES = sorted(path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz"))
GIB = 1 << 30
MIB = 1 << 20

#: Action, address, bytes and stream, as PyTorch's history has them.
Entry = tuple[TraceAction, int, int, int]


def replay_steps(name: str) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """Carry out a recorded run; return the figures of each step, simulated and recorded."""
    run = read_run(name)
    allocator = CachingAllocator(140 * GIB)
    addresses = iter(run["segments"])

    def follow_driver(action: TraceAction, *_: Any) -> None:
        if action is TraceAction.SEGMENT_ALLOC:
            allocator.next_address = next(addresses, 0)

    allocator.next_address = next(addresses)
    allocator.on_event = follow_driver
    blocks, found = [], []
    ends = {step["end"] for step in run["steps"]}
    for place, event in enumerate(run["events"], 1):
        if event > 0:
            blocks.append(allocator.allocate(event))
        else:
            allocator.free(blocks[event])
        if place in ends:
            found.append({"end": place, **read_figures(allocator)})
        if place in ends or place == run["built"]:
            allocator.reset_peaks()
    assert next(addresses, 0) == 0  # the driver gave no other segment
    return found, run["steps"]


def read_figures(allocator: CachingAllocator) -> dict[str, int]:
    """The bytes that are allocated and reserved, and their peaks."""
    stats = allocator.to_stats()
    return {
        "allocated_peak_bytes": stats["allocated_bytes"]["all"]["peak"],
        "reserved_peak_bytes": stats["reserved_bytes"]["all"]["peak"],
        "allocated_bytes": allocator.allocated_bytes,
        "reserved_bytes": allocator.reserved_bytes,
    }


def list_events(trace: AllocatorTrace) -> list[Entry]:
    """The entries of a recorded history."""
    events = trace.events
    return [
        (TraceAction(code), address, size, stream)
        for code, address, size, stream in zip(
            events.actions, events.addresses, events.sizes, events.streams, strict=True
        )
    ]


def simulate_trace(trace: AllocatorTrace) -> tuple[list[Entry], CachingAllocator]:
    """Carry out a recorded history from its recorded start; return what the simulation noted.

    Requests and frees are carried out; all that the driver does must follow from them, but for an
    emptied cache, which shows in the history only by what it gave back.
    """
    settings = AllocatorSettings(
        max_split_bytes=trace.rules.max_split_bytes,
        is_expandable=trace.rules.is_expandable,
        roundup_divisions=trace.rules.roundup_divisions,
    )
    allocator = CachingAllocator.from_snapshot(
        trace.before, total_bytes=80 * GIB, settings=settings
    )
    noted: list[Entry] = []
    allocator.on_event = lambda action, address, n_bytes, stream, _: noted.append(
        (action, address, n_bytes, stream)
    )
    events = list_events(trace)
    for place, (action, address, _, stream) in enumerate(events):
        if place < len(noted):
            continue
        if action is TraceAction.FREE_REQUESTED:
            follower = events[place + 1] if place + 1 < len(events) else None
            waits = follower is None or follower[:2] != (TraceAction.FREE_COMPLETED, address)
            allocator.free(allocator.active_blocks[address], is_used_elsewhere=waits)
        elif action is TraceAction.FREE_COMPLETED:
            allocator.complete_free(allocator.active_blocks[address])
        elif action in (TraceAction.SEGMENT_FREE, TraceAction.SEGMENT_UNMAP):
            allocator.empty_cache()
        else:
            requests = (TraceAction.ALLOC, TraceAction.OOM)
            request = next(event for event in events[place:] if event[0] in requests)
            if action in (TraceAction.SEGMENT_ALLOC, TraceAction.SEGMENT_MAP):
                allocator.next_address = address
            with contextlib.suppress(DeviceFullError):
                allocator.allocate(request[2], stream=stream)
    return noted, allocator


def drop_stacks(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Return segments whose blocks have no stacks, which the simulation does not restore."""
    return tuple(
        [
            replace(segment, blocks=tuple([replace(each, frames=()) for each in segment.blocks]))
            for segment in segments
        ]
    )


def read_run(name: str) -> dict[str, Any]:
    """Return a recorded run, as the README describes it."""
    return json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))  # type: ignore[no-any-return]
