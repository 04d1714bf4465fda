"""What it takes to tell a long trace: from the allocator's raw events to the record of a device.

The events are those of a training run as torch gives them: a dictionary each, allocations with a
stack of Python whose frames many of them share, backward's without one, frees without one.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from itertools import islice
from time import perf_counter
from typing import Any

import psutil

from benchmarks.rows import Row, format_bytes, format_seconds, judge
from gpumemwidget.backends.snapshot import parse_segments, parse_traces
from gpumemwidget.tracing.device_trace import describe_device
from gpumemwidget.tracing.sources import Source, Sources

MOST_S = {100_000: 1.0, 1_000_000: 8.0}
MOST_BYTES = 1e9

_CELL = "/tmp/ipykernel_7/1.py"
_MODULE = "/usr/lib/python3/dist-packages/torch/nn/modules/module.py"
_LINEAR = "/usr/lib/python3/dist-packages/torch/nn/modules/linear.py"
_TEXT = "\n".join(f"loss = train(step_{line})" for line in range(1, 41))
_START_US = 1_800_000_000_000_000
_ADDRESS = 1 << 40
_SEGMENT_BYTES = 1 << 36
_BLOCK_BYTES = 2 << 20
_N_LAYERS = 48


def measure(quick: bool) -> list[Row]:
    """Both lengths, the shorter one first: a process's highest memory never falls again."""
    rows = []
    n_played = 0
    start_bytes = psutil.Process().memory_info().rss
    for n_events, most_s in MOST_S.items():
        n_played = n_events // 100 if quick else n_events
        taken_s = _tell(n_played)
        what = f"the report's record of a trace of {n_played:,} events"
        rows.append(judge(what, taken_s, most_s, format_seconds))
    taken_bytes = _read_peak_bytes() - start_bytes
    what = f"memory for it at most, torch's {n_played:,} dictionaries included"
    return [*rows, judge(what, taken_bytes, MOST_BYTES, format_bytes)]


def _tell(n_events: int) -> float:
    """Seconds from the dictionaries to the record."""
    snapshot = make_snapshot(n_events)
    before = parse_segments([_make_segment([])])
    sources = Sources(Source("In [7]", _CELL, "cell", _TEXT), read=lambda _: [])
    start = perf_counter()
    (trace,) = parse_traces(
        snapshot, before=before, start_us=_START_US, end_us=_START_US + 2 * n_events, touched={0}
    )
    device = describe_device(trace, sources=sources, start_us=_START_US)
    taken_s = perf_counter() - start
    if device.notes[1:] or device.n_events != n_events:
        raise RuntimeError(f"not all of it was told: {device.n_events} events, {device.notes}")
    return taken_s


def make_snapshot(n_events: int) -> dict[str, Any]:
    """As ``torch.cuda.memory._snapshot()`` gives it at the end of such a run."""
    held: list[tuple[int, int]] = []
    events = list(islice(_play(held), n_events))
    for number, event in enumerate(events):
        event["time_us"] = _START_US + number
    if events[-1]["action"] == "free_requested":
        # Cut off in the middle of a free, which then has not begun.
        events[-1].update(action="snapshot", addr=0)
    return {"segments": [_make_segment(held)], "device_traces": [events], "allocator_settings": {}}


def _play(held: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Steps without an end; what is held is where the last event left it."""
    stacks = [[_make_stack(line, layer) for layer in range(_N_LAYERS)] for line in range(1, 41)]
    top = _ADDRESS
    step = 0
    while True:
        for layer in range(_N_LAYERS):
            # What is kept for backward, and something that is gone at once.
            frames = stacks[step % 40][layer]
            size = _BLOCK_BYTES + 4 * layer + step % 3
            for is_kept in (True, False):
                held.append((top, size))
                yield _make_event("alloc", top, size, frames)
                if is_kept:
                    top += _round_up(size)
                else:
                    yield from _free(held)
        for layer in reversed(range(_N_LAYERS)):
            size = _BLOCK_BYTES - 4 * layer
            held.append((top, size))
            yield _make_event("alloc", top, size, [])
            yield from _free(held)
            top -= _round_up(held[-1][1])
            yield from _free(held)
        step += 1


def _free(held: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    address, size = held[-1]
    yield _make_event("free_requested", address, size, [])
    held.pop()
    yield _make_event("free_completed", address, size, [])


def _make_event(
    action: str, address: int, size: int, frames: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": 0,
        "compile_context": "N/A",
        "user_metadata": "",
        # Torch makes a list for each event, of frames that events share.
        "frames": list(frames),
    }


def _make_stack(line: int, layer: int) -> list[dict[str, Any]]:
    """A linear layer of a model, called by a line of the cell."""
    calls = [
        (_LINEAR, 134, "forward"),
        (_MODULE, 1790, "_call_impl"),
        (_MODULE, 1779, "_wrapped_call_impl"),
        ("/home/me/model.py", 20 + layer, "forward"),
        (_MODULE, 1790, "_call_impl"),
        (_MODULE, 1779, "_wrapped_call_impl"),
        ("/home/me/train.py", 7, "train"),
        (_CELL, line, "<module>"),
        ("/usr/lib/python3/dist-packages/IPython/core/interactiveshell.py", 3670, "run_code"),
        ("<frozen runpy>", 88, "_run_code"),
        ("<frozen runpy>", 198, "_run_module_as_main"),
    ]
    return [
        _FRAMES.setdefault(call, {"filename": call[0], "line": call[1], "name": call[2]})
        for call in calls
    ]


_FRAMES: dict[tuple[str, int, str], dict[str, Any]] = {}


def _make_segment(held: list[tuple[int, int]]) -> dict[str, Any]:
    blocks = []
    end = _ADDRESS
    for address, size in held:
        end = address + _round_up(size)
        blocks.append(
            {
                "address": address,
                "size": end - address,
                "requested_size": size,
                "state": "active_allocated",
                "frames": [],
            }
        )
    rest = _ADDRESS + _SEGMENT_BYTES - end
    blocks.append({"address": end, "size": rest, "requested_size": 0, "state": "inactive"})
    return {
        "device": 0,
        "address": _ADDRESS,
        "total_size": _SEGMENT_BYTES,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "blocks": blocks,
    }


def _round_up(size: int) -> int:
    return -(-size // 512) * 512


def _read_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
