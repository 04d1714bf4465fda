"""Parse the caching allocator's snapshot, which torch gives or a file has, into records.

A history of a million events is 600 MB of dictionaries, so a few thousand at a time are parsed into
columns of numbers, and then dropped.

The file is that of PyTorch's memory viewer: a pickle, which may come from anywhere. Nothing that it
names is looked up, so that it can make plain containers and nothing else. The viewer:
https://docs.pytorch.org/memory_viz, and ``python torch/cuda/_memory_viz.py``.
"""

from __future__ import annotations

import bisect
import dataclasses
import io
import os
import pickle
import re
from array import array
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from gpumemwidget.errors import FileError
from gpumemwidget.model.devices import Block, Frame, Segment
from gpumemwidget.model.traces import (
    AllocatorRules,
    AllocatorTrace,
    NoteKind,
    TraceAction,
    TraceEvents,
    TraceNote,
)
from gpumemwidget.progress import Stage, report_progress

#: PyTorch's sizes of the pages of segments that grow, for small and for large requests.
SMALL_PAGE_BYTES, LARGE_PAGE_BYTES = 2 << 20, 20 << 20


def parse_segments(
    raw: Iterable[Mapping[str, Any]],
    *,
    kind: str = "cuda",
    large_page_bytes: int = LARGE_PAGE_BYTES,
) -> tuple[Segment, ...]:
    """Return torch's dictionaries as segments, by device and address."""
    stacks = StackTable()
    segments = [_parse_segment(segment, stacks, kind, large_page_bytes) for segment in raw]
    segments.sort(key=lambda segment: (int(segment.device.partition(":")[2]), segment.address))
    return tuple(segments)


def read_allocator_settings(torch: Any) -> str:
    """Return the allocator's settings as text, ``expandable_segments:True``; ``""``: none.

    Those of the environment at the start come first, then those of the last call that set any. Of
    an option that is in both the last one counts: ``AllocatorConfig`` in
    https://github.com/pytorch/pytorch/blob/main/c10/core/AllocatorConfig.h
    """
    read_settings = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # noqa: SLF001 - no public call
    settings = "" if read_settings is None else read_settings()
    # The newest name first.
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    environment = next(filter(None, (os.environ.get(name, "") for name in names)), "")
    return ",".join(dict.fromkeys(filter(None, (environment, settings))))


def read_large_page_bytes(torch: Any) -> int:
    """Return the setting ``large_segment_size_mb``, in bytes."""
    found = re.findall(r"large_segment_size_mb\s*:\s*(\d+)", read_allocator_settings(torch))
    return int(found[-1]) << 20 if found else LARGE_PAGE_BYTES


def _parse_segment(
    raw: Mapping[str, Any], stacks: StackTable, kind: str, large_page_bytes: int
) -> Segment:
    blocks = [
        Block(
            address=block["address"],
            n_bytes=block["size"],
            requested_bytes=None if state == "inactive" else block.get("requested_size"),
            state=state,
            frames=stacks.find(block.get("frames", ())),
        )
        for block in raw["blocks"]
        # Another name in the documentation of newer releases.
        for state in [block["state"].replace("awaiting", "pending")]
    ]
    first, second = raw.get("segment_pool_id", (0, 0))
    page_bytes = SMALL_PAGE_BYTES if raw.get("segment_type") == "small" else large_page_bytes
    return Segment(
        device=f"{kind}:{raw['device']}",
        address=raw["address"],
        n_bytes=raw["total_size"],
        is_private=(first, second) != (0, 0),
        pool_id=(first, second),
        blocks=tuple(blocks),
        page_bytes=page_bytes if raw.get("is_expandable", False) else None,
        stream=raw.get("stream", 0),
    )


# -- Stacks ----------------------------------------------------------------------------------------

RawStack = Sequence[Mapping[str, Any]]


class StackTable:
    """Stacks of Python frames, numbered in the order in which they come; 0 is the empty stack.

    A history of a million events has some hundred stacks. Torch gives the same dictionary for the
    same frame, so that most stacks are known by the identities of their frames, unread.
    """

    def __init__(self) -> None:
        self.stacks: list[tuple[Frame, ...]] = [()]
        self._places: dict[tuple[Frame, ...], int] = {(): 0}
        self._frames: dict[Frame, Frame] = {}
        #: Numbers by the identities of the frames' dictionaries, which are kept alive for that.
        self._known: dict[tuple[int, ...], int] = {(): 0}
        self._parsed: dict[int, tuple[object, Frame | None]] = {}

    def find(self, stack: RawStack) -> tuple[Frame, ...]:
        """Return the Python frames of a stack, innermost first."""
        return self.stacks[self.place([stack])[0]]

    def place(self, stacks: Iterable[RawStack]) -> list[int]:
        """Return the number of each stack."""
        known = self._known
        raw = list(stacks)
        keys = [tuple(map(id, stack)) for stack in raw]
        places = [known.get(key, -1) for key in keys]
        if -1 in places:
            for index, place in enumerate(places):
                if place < 0:
                    places[index] = self._add(keys[index], raw[index])
            # Where torch shares no frames between stacks, no identity is met twice.
            if len(self._parsed) > 200_000:
                self._parsed.clear()
                known.clear()
                known[()] = 0
        return places

    def place_frames(self, frames: tuple[Frame, ...]) -> int:
        """Return the number of a stack that is made of records already."""
        place = self._places.get(frames)
        if place is None:
            place = self._places[frames] = len(self.stacks)
            self.stacks.append(frames)
        return place

    def _add(self, key: tuple[int, ...], raw: RawStack) -> int:
        place = self._known.get(key)
        if place is None:
            found = map(self._parse, raw)
            place = self.place_frames(tuple(entry for entry in found if entry is not None))
            self._known[key] = place
        return place

    def _parse(self, raw: Mapping[str, Any]) -> Frame | None:
        known = self._parsed.get(id(raw))
        if known is None:
            frame = None
            # A history may have frames of C++, too.
            foreign = ("??", ".c", ".cc", ".cpp", ".cu", ".h", ".hpp", ".cuh", ".so")
            if not raw["filename"].endswith(foreign):
                frame = Frame(raw["filename"], raw["line"], raw["name"])
                frame = self._frames.setdefault(frame, frame)
            known = self._parsed[id(raw)] = (raw, frame)
        return known[1]


# -- Events ----------------------------------------------------------------------------------------

_get_time: Callable[[Mapping[str, Any]], int] = itemgetter("time_us")


def parse_traces(
    snapshot: Mapping[str, Any],
    *,
    before: Iterable[Segment],
    start_us: int,
    end_us: int,
    touched: Container[int],
    marked_by_us: int | None = None,
    max_entries: int | None = None,
) -> tuple[AllocatorTrace, ...]:
    """Return a trace of each touched device, by index.

    Args:
        snapshot: from ``torch.cuda.memory._snapshot()``. Its events are taken out of it.
        before: the segments at the start, of all devices.
        start_us: microseconds since the epoch, as all times are; earlier events are left out.
        end_us: when the snapshot was taken.
        touched: indices of the devices that are in use.
        marked_by_us: when the snapshot at the start was done, in microseconds. A snapshot is itself
            an event, behind which the trace begins. Where that event is missing, the history has
            dropped it, and the trace is not whole.
        max_entries: the number of events that the history keeps for each device, where that is
            known: without a mark, a full history may have dropped some.
    """
    stood = tuple(before)
    after = parse_segments(
        segment for segment in snapshot["segments"] if segment["device"] in touched
    )
    rules = parse_rules(snapshot.get("allocator_settings") or {})
    traces = []
    table = StackTable()
    for index, raw in enumerate(snapshot["device_traces"]):
        if index not in touched:
            continue
        device = f"cuda:{index}"
        own_before = tuple(segment for segment in stood if segment.device == device)
        first = _find_mark(raw, start_us, marked_by_us)
        is_whole = first is not None
        if first is None:
            first = bisect.bisect_left(raw, start_us, key=_get_time)
            # A device that was first touched within the span was not there to be marked.
            needs_mark = marked_by_us is not None and (bool(own_before) or max_entries is None)
            is_whole = not needs_mark and (max_entries is None or len(raw) < max_entries)
        del raw[:first]
        traces.append(
            AllocatorTrace(
                device=device,
                before=own_before,
                events=parse_events(raw, table),
                after=tuple(segment for segment in after if segment.device == device),
                start_us=start_us,
                end_us=end_us,
                rules=rules,
                is_whole=is_whole,
            )
        )
    return tuple(traces)


def parse_events(raw: list[dict[str, Any]], table: StackTable | None = None) -> TraceEvents:
    """Return one device's events as columns, and empty the list of their dictionaries.

    Events of kinds that say nothing about memory are left out.

    Args:
        raw: torch's events, the oldest first; empty afterwards.
        table: numbers the stacks; several devices may share a table.
    """
    table = StackTable() if table is None else table
    code_of = {action.word: int(action) for action in TraceAction}
    oom = int(TraceAction.OOM)
    actions = bytearray()
    addresses, sizes, times_us = array("Q"), array("q"), array("q")
    streams, stacks = array("q"), array("i")
    raw.reverse()
    while raw:
        chunk = raw[-8_192:]
        del raw[-8_192:]
        chunk.reverse()
        codes = [code_of.get(event["action"], -1) for event in chunk]
        if -1 in codes:
            chunk = [event for event, code in zip(chunk, codes, strict=True) if code >= 0]
            codes = [code for code in codes if code >= 0]
        found = [event.get("addr", 0) for event in chunk]
        if oom in codes:
            for place, code in enumerate(codes):
                if code == oom:
                    found[place] = chunk[place].get("device_free", 0)
        actions += bytes(codes)
        addresses.extend(found)
        sizes.extend([event["size"] for event in chunk])
        times_us.extend([event.get("time_us", 0) for event in chunk])
        streams.extend([event.get("stream", 0) for event in chunk])
        stacks.extend(table.place([event.get("frames", ()) for event in chunk]))
    return TraceEvents(
        actions=bytes(actions),
        addresses=addresses,
        sizes=sizes,
        times_us=times_us,
        streams=streams,
        stacks=stacks,
        stack_table=tuple(table.stacks),
    )


def parse_rules(settings: Mapping[str, Any]) -> AllocatorRules:
    """Return the allocator's rules of rounding and splitting, from the settings of a snapshot.

    The numbers' meaning: ``CUDAAllocatorConfig`` and ``round_size`` in
    https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp
    """
    max_split = settings.get("max_split_size", -1)
    divisions = settings.get("roundup_power2_divisions") or {}
    steps: list[tuple[int, int]] = []
    for n_mib, n_steps in sorted((int(key), value) for key, value in divisions.items()):
        # The first interval holds for all that is smaller, too.
        start = n_mib << 20 if steps or n_mib > 1 else 0
        if n_steps != (steps[-1][1] if steps else 0):
            steps.append((start, n_steps))
    return AllocatorRules(
        max_split_bytes=max_split if max_split >= 0 else None,
        is_expandable=bool(settings.get("expandable_segments", False)),
        roundup_divisions=tuple(steps),
    )


def _find_mark(
    raw: Sequence[Mapping[str, Any]], start_us: int, marked_by_us: int | None
) -> int | None:
    """Return the index behind the snapshot that marks the start; ``None`` without such a mark."""
    if marked_by_us is None:
        return None
    # Torch makes its times out of the processor's counter: they differ so much from the clock's.
    slack_us = 50
    first = bisect.bisect_left(raw, start_us - slack_us, key=_get_time)
    for place in range(first, len(raw)):
        if raw[place]["action"] == "snapshot":
            is_ours = _get_time(raw[place]) <= marked_by_us + slack_us
            return place + 1 if is_ours else None
    return None


# -- Files -----------------------------------------------------------------------------------------


def load_snapshot(path: Path) -> tuple[AllocatorTrace, ...]:
    """Return the traces of a file that ``torch.cuda.memory._dump_snapshot`` or a trace wrote.

    The file has the segments at its end alone: the traces have nothing ``before`` and are not
    whole.

    Args:
        path: the file, of up to 2 GiB: in memory a snapshot takes some ten times that.

    Returns:
        A trace of each device that has memory or events, by index.

    Raises:
        FileError: the file is too large, or has no events.
        Exception: any other, for a file that can't be read, is cut short or no snapshot, or asks
            for something to be run.
    """
    if path.stat().st_size > 2 << 30:
        raise FileError(f"{path} holds more than 2 GiB: record fewer events (max_entries)")
    with io.BufferedReader(_ReportingFile(path), 1 << 20) as file:
        snapshot = _PlainUnpickler(file).load()
    device_traces = snapshot["device_traces"]
    if not any(device_traces):
        raise FileError(
            f"{path} holds no events: record a history before it is written "
            "(torch.cuda.memory._record_memory_history())"
        )
    indices = {segment["device"] for segment in snapshot["segments"]}
    for index, raw in enumerate(device_traces):
        # Every device has the event of the snapshot itself, in use or not.
        if any(event["action"] != "snapshot" for event in raw):
            indices.add(index)
    end_us = max(raw[-1]["time_us"] for raw in device_traces if raw)
    traces = parse_traces(snapshot, before=(), start_us=0, end_us=end_us, touched=indices)
    return tuple(
        dataclasses.replace(
            trace,
            # The trace begins with its own first event.
            start_us=trace.events.times_us[0] if trace.events.times_us else trace.end_us,
            is_whole=False,
            notes=(TraceNote(NoteKind.START_WORKED_OUT),),
        )
        for trace in traces
    )


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that makes plain containers only."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Refuse to look anything up."""
        raise pickle.UnpicklingError(f"{module_name}.{global_name} was to be run, and was not")


class _ReportingFile(io.FileIO):
    """A file that reports how much of it was read, part by part: a Ctrl-C is heard in between."""

    def readinto(self, buffer: Any) -> int | None:
        n_bytes = super().readinto(buffer)
        report_progress(Stage.READ_BYTES, self.tell(), os.fstat(self.fileno()).st_size)
        return n_bytes


def write_snapshot(snapshot: Mapping[str, Any], path: Path) -> None:
    """Write the result of ``torch.cuda.memory._snapshot()`` to a file, whole or not at all.

    A file of that name is replaced.

    Raises:
        FileError: the file can't be written.
    """
    # A file in the same folder can take the place of the other at once.
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
