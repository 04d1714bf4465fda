"""Writes a snapshot to the file that PyTorch's own memory viewer reads.

The viewer: https://docs.pytorch.org/memory_viz, and ``python torch/cuda/_memory_viz.py``.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpumemwidget.errors import FileError
from gpumemwidget.records import Frame, Segment
from gpumemwidget.traces import ACTIONS, AllocatorRules, AllocatorTrace, TraceEvents

__all__ = ["format_snapshot", "write_snapshot"]

_MIB = 1 << 20
#: Segments of small blocks are of this size.
_SMALL_SEGMENT_BYTES = 2 * _MIB
#: From below 2 MiB to 32 GiB and more, each twice the one before.
_N_INTERVALS = 16


def format_snapshot(traces: Sequence[AllocatorTrace]) -> dict[str, Any]:
    """Traces in the dictionaries of ``torch.cuda.memory._snapshot()``."""
    indices = {trace.device: int(trace.device.partition(":")[2]) for trace in traces}
    device_traces: list[list[dict[str, Any]]] = [[] for _ in range(1 + max(indices.values()))]
    known: dict[Frame, dict[str, Any]] = {}
    for trace in traces:
        device_traces[indices[trace.device]].extend(_format_events(trace.events, known))
    return {
        "segments": [
            _format_segment(segment, indices[trace.device], known)
            for trace in traces
            for segment in trace.after
        ],
        "device_traces": device_traces,
        "allocator_settings": _format_rules(traces[0].rules),
        "external_annotations": [],
    }


def _format_events(
    events: TraceEvents, known: dict[Frame, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    stacks = [_format_stack(stack, known) for stack in events.stack_table]
    for place, code in enumerate(events.actions):
        action = ACTIONS[code]
        yield {
            "action": action,
            ("device_free" if action == "oom" else "addr"): events.addresses[place],
            "size": events.sizes[place],
            "stream": events.streams[place],
            "time_us": events.times_us[place],
            "frames": stacks[events.stacks[place]],
        }


def _format_segment(
    segment: Segment, index: int, known: dict[Frame, dict[str, Any]]
) -> dict[str, Any]:
    allocated = [each for each in segment.blocks if each.state == "active_allocated"]
    active = [each for each in segment.blocks if each.state != "inactive"]
    is_small = segment.is_small
    if is_small is None:
        is_small = segment.n_bytes <= _SMALL_SEGMENT_BYTES
    return {
        "device": index,
        "address": segment.address,
        "total_size": segment.n_bytes,
        "allocated_size": sum(each.n_bytes for each in allocated),
        "active_size": sum(each.n_bytes for each in active),
        "requested_size": sum(each.requested_bytes or 0 for each in allocated),
        "stream": 0,
        "segment_type": "small" if is_small else "large",
        "segment_pool_id": segment.pool_id,
        "is_expandable": segment.is_expandable,
        "frames": [],
        "blocks": [
            {
                "address": each.address,
                "size": each.n_bytes,
                "requested_size": each.requested_bytes or 0,
                "state": each.state,
                "frames": _format_stack(each.frames, known),
            }
            for each in segment.blocks
        ],
    }


def _format_stack(
    stack: tuple[Frame, ...], known: dict[Frame, dict[str, Any]]
) -> list[dict[str, Any]]:
    return [
        known.setdefault(
            each, {"name": each.function, "filename": each.filename, "line": each.line}
        )
        for each in stack
    ]


def _format_rules(rules: AllocatorRules) -> dict[str, Any]:
    divisions = {}
    for power in range(_N_INTERVALS):
        start = 0 if power == 0 else _MIB << power
        held = [n_steps for since, n_steps in rules.roundup_divisions if since <= start]
        divisions[str(1 << power)] = held[-1] if held else 0
    return {
        "max_split_size": -1 if rules.max_split_bytes is None else rules.max_split_bytes,
        "expandable_segments": rules.is_expandable,
        "roundup_power2_divisions": divisions,
    }


def write_snapshot(snapshot: Mapping[str, Any], path: Path) -> None:
    """Write what ``torch.cuda.memory._snapshot()`` gave, whole or not at all.

    A file of that name is replaced.

    Raises:
        FileError: it can't be written.
    """
    # Beside it, so that it can take its place at once.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            with part.open("wb") as file:
                pickle.dump(snapshot, file)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(
            f"the snapshot can't be written to {path}: {error.strerror or error}; choose another "
            "file"
        ) from error
