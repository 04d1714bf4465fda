"""Read and write the file of PyTorch's memory viewer: a pickle, which may come from anywhere.

Nothing that the pickle names is looked up, so that it can make plain containers and nothing else.
Its opcodes are checked before it is loaded: a pickle may ask for memory or time beyond its size.
Nine bytes can ask for gigabytes (an index in the memo, a length), and numbers of many bits can be
chosen to have one hash, so that a dict of them takes time with the square of their number.

The viewer: https://docs.pytorch.org/memory_viz, and ``python torch/cuda/_memory_viz.py``. The
format of pickles: https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

import dataclasses
import gzip
import os
import pickle
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from gpumemwidget.backends.cuda.events import parse_traces
from gpumemwidget.errors import FileError
from gpumemwidget.failures import describe_exception
from gpumemwidget.model.segments import Frame, Segment
from gpumemwidget.model.traces import ACTIONS, AllocatorRules, AllocatorTrace, TraceEvents
from gpumemwidget.progress import Stage, report_progress

__all__ = ["check_pickle", "format_snapshot", "load_snapshot", "write_snapshot"]

_GIB = 1 << 30
_PART_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_MAKE = "make one with torch.cuda.memory._dump_snapshot() or %%memtrace --snapshot"
_WORKED_OUT = "what stood before the file's first event is worked out backwards from its end"
_NO_TIMES = "the file has no times, as those of PyTorch before 2.1: its events stand in their order"
#: Exceptions of ``pickle`` for a file that is cut short or no pickle; ``MemoryError`` if it
#: announces something larger than any memory.
_DAMAGES = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError),
    *(AttributeError, OverflowError, MemoryError, zlib.error, UnicodeDecodeError),
)
#: Exceptions of the parser for other shapes than a snapshot's.
_ODDITIES = (KeyError, TypeError, ValueError, OverflowError, AttributeError, IndexError)


def load_snapshot(path: str | Path, *, max_bytes: int = 2 * _GIB) -> tuple[AllocatorTrace, ...]:
    """Return the traces of a file that ``torch.cuda.memory._dump_snapshot`` or a trace wrote.

    The file may be packed with gzip. It has the segments at its end alone: the traces have nothing
    ``before`` and are not whole, so that they are followed backwards.

    Args:
        path: the file.
        max_bytes: maximum size of an unpacked file; in memory it takes some ten times that.

    Returns:
        A trace of each device that has memory or events, by index.

    Raises:
        FileError: the file can't be read, is too large, is no snapshot, is cut short, or asks for
            something to be run.
    """
    snapshot = _check(_read(Path(path), max_bytes), path)
    # Every device has the event of the snapshot itself, in use or not.
    indices = {segment["device"] for segment in snapshot["segments"]}
    indices |= {
        index
        for index, raw in enumerate(snapshot["device_traces"])
        if any(type(event) is not dict or event.get("action") != "snapshot" for event in raw)
    }
    times_us = [
        raw[place].get("time_us", 0)
        for raw in snapshot["device_traces"]
        for place in (0, -1)
        if raw
    ]
    try:
        traces = parse_traces(
            snapshot, before=(), start_us=0, end_us=max(times_us), touched=indices
        )
        _check_frames(traces)
    except _ODDITIES as error:
        raise _refuse(path, f"a field is not what it should be: {_describe(error)}") from None
    notes = (_WORKED_OUT,) if min(times_us) > 0 else (_WORKED_OUT, _NO_TIMES)
    return tuple(
        dataclasses.replace(
            trace,
            # The trace begins with its own first event.
            start_us=trace.events.times_us[0] if trace.events.times_us else trace.end_us,
            is_whole=False,
            notes=notes,
        )
        for trace in traces
    )


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that makes plain containers only."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Refuse to look anything up."""
        raise _ForbiddenError(f"{module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> Any:
        """Refuse anything that lies outside of the pickle."""
        raise _ForbiddenError(f"a persistent object ({type(pid).__name__})")


class _ForbiddenError(Exception):
    """A pickle asks for something to be looked up."""


class _Parts:
    """Bytes as a file that is read part by part, so that a Ctrl-C is heard in between."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._place = 0

    def peek(self, _n_bytes: int) -> bytes:
        """Return the next part, without moving on."""
        return bytes(self._data[self._place : self._place + _PART_BYTES])

    def read(self, n_bytes: int = -1) -> bytes:
        """Return the next bytes, as a file does."""
        end = len(self._data) if n_bytes < 0 else self._place + n_bytes
        data = bytes(self._data[self._place : end])
        self._place += len(data)
        report_progress(Stage.READ_BYTES, self._place, len(self._data))
        return data

    def readline(self) -> bytes:
        """Return the next line, as a file does."""
        rest = self.peek(0)
        end = rest.find(b"\n") + 1
        return self.read(end or len(rest))


class _TooLargeError(Exception):
    """The file is larger than the maximum."""


def _read_bounded(file: IO[bytes], max_bytes: int) -> bytes:
    parts = bytearray()
    while part := file.read(min(_PART_BYTES, max_bytes + 1 - len(parts))):
        parts += part
        if len(parts) > max_bytes:
            raise _TooLargeError
    return bytes(parts)


def _read(path: Path, max_bytes: int) -> Any:
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == _GZIP_MAGIC
            file.seek(0)
            source: IO[bytes] = gzip.GzipFile(fileobj=file) if is_packed else file  # type: ignore[assignment]  # it reads as one
            data = _read_bounded(source, max_bytes)
        check_pickle(data)
        return _PlainUnpickler(_Parts(data)).load()
    except FileError as error:
        raise _refuse(path, str(error)) from None
    except _ForbiddenError as error:
        raise FileError(
            f"{path} asks for {error} to be run, which no memory snapshot does: nothing was run; "
            "choose another file"
        ) from None
    except _TooLargeError:
        raise FileError(
            f"{path} holds more than {max_bytes / _GIB:.3g} GiB: record fewer events (max_entries)"
        ) from None
    except gzip.BadGzipFile as error:
        raise _refuse(path, _describe(error)) from None
    except OSError as error:
        raise FileError(
            f"{path} can't be read: {error.strerror or error}; choose another file"
        ) from None
    except _DAMAGES as error:
        raise _refuse(path, _describe(error)) from None


def _check(snapshot: Any, path: str | Path) -> dict[str, Any]:
    """Return the snapshot, if it has the shape of one and events in it."""
    if isinstance(snapshot, list) and snapshot and _is_segment(snapshot[0]):
        snapshot = {"segments": snapshot, "device_traces": []}
    segments = snapshot.get("segments") if isinstance(snapshot, dict) else None
    if not isinstance(segments, list):
        raise FileError(f"{path} is no memory snapshot of PyTorch's: {_MAKE}")
    device_traces = snapshot.get("device_traces")
    if not isinstance(device_traces, list) or not any(device_traces):
        raise FileError(
            f"{path} holds no events: record a history before it is written "
            "(torch.cuda.memory._record_memory_history())"
        )
    events = [
        raw[place] for raw in device_traces if isinstance(raw, list) for place in (0, -1) if raw
    ]
    is_whole = all(isinstance(raw, list) for raw in device_traces) and all(
        isinstance(event, dict) and _is_count(event.get("time_us", 0)) for event in events
    )
    if not is_whole or not all(map(_is_segment, segments)):
        raise _refuse(path, "its segments or events are of another kind")
    if not isinstance(snapshot.get("allocator_settings", {}), dict):
        raise _refuse(path, "its allocator_settings are of another kind")
    return {"allocator_settings": {}, **snapshot, "segments": list(map(_modernise, segments))}


def _is_segment(raw: Any) -> bool:
    return (
        isinstance(raw, dict)
        and all(_is_count(raw.get(name)) for name in ("device", "address", "total_size"))
        and isinstance(raw.get("blocks"), list)
        and all(
            isinstance(block, dict)
            and _is_count(block.get("size"))
            and _is_count(block.get("address", 0))
            and _is_count(block.get("requested_size", 0))
            for block in raw["blocks"]
        )
    )


def _modernise(segment: dict[str, Any]) -> dict[str, Any]:
    """Return a segment in today's form: releases before 2.1 had a history for each block."""
    blocks = [
        {**block, "frames": _take_frames(block)} if "history" in block else block
        for block in segment["blocks"]
    ]
    return {**segment, "blocks": blocks}


def _take_frames(block: Mapping[str, Any]) -> Any:
    history = block["history"]
    newest = history[0] if isinstance(history, list) and history else {}
    return newest.get("frames", ()) if isinstance(newest, dict) else ()


def _check_frames(traces: Sequence[AllocatorTrace]) -> None:
    """Raise ``TypeError`` where a frame has other types than a frame's."""
    for trace in traces:
        stacks = [block.frames for segment in trace.after for block in segment.blocks]
        for frame in {frame for stack in (*stacks, *trace.events.stack_table) for frame in stack}:
            if not isinstance(frame.function, str) or not _is_count(frame.line):
                raise TypeError("frames")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _describe(error: BaseException) -> str:
    return describe_exception(error)[:100]


def _refuse(path: str | Path, why: str) -> FileError:
    return FileError(f"{path} is damaged, or no memory snapshot of PyTorch's ({why}): {_MAKE}")


#: Maximum number of opcodes that make an object or a reference and have no argument. An upper
#: bound of their number is counted; each takes up to some 70 bytes.
_MOST_ENTRIES = 40_000_000
_ENTRIES = b"]})(t2ldN\x85\x86\x87\x88\x89\x8f\x91\x94"
#: Maximum number of bytes of an integer in a snapshot, and of characters as text.
_INTEGER_BYTES = 8
_INTEGER_CHARACTERS = 22
_SLICE_BYTES = 16 << 20
#: Number of opcodes matched at once: the matcher's own memory grows with it.
_N_AT_ONCE = 1000


def _measure(most: int) -> bytes:
    """Return the pattern of a length in one byte and as many bytes."""
    sizes = (re.escape(bytes([n])) + b".{%d}" % n for n in range(most + 1))
    return b"(?:" + b"|".join(sizes) + b")"


#: Opcodes of a known and small size.
_PLAIN = re.compile(
    b"(?:[]})(t2lduaes.01N\x85-\x89\x8f-\x91\x94]|[Khq\x80].|M..|[Jj].{4}|[G\x95].{8}"
    b"|\x8a" + _measure(_INTEGER_BYTES) + b"|[\x8cUC]" + _measure(255) + b"){1,%d}" % _N_AT_ONCE,
    re.DOTALL,
)
#: Opcodes with a length before their bytes, and how many bytes the length has.
_SIZED = {0x58: 4, 0x54: 4, 0x42: 4, 0x8D: 8, 0x8E: 8, 0x96: 8}
#: Opcodes with a line of text.
_TEXT = b"ILFSVgp"
#: Opcodes of integers that may have any size: as text, and in bytes.
_INTEGER_TEXT = b"IL"
_LONG_INTEGERS = (0x8A, 0x8B)
#: Opcodes that look something up, which loading refuses: opcodes behind them don't matter.
_LOOKS_UP = b"ciPQ\x82\x83\x84\x93"
_LONG_BINPUT, _PUT = 0x72, 0x70


def check_pickle(data: bytes) -> None:
    """Refuse a pickle that would take much more memory than it has bytes.

    Raises:
        FileError: the pickle asks for that, or has opcodes of no snapshot.
    """
    n_entries = 0
    for start in range(0, len(data), _SLICE_BYTES):
        part = data[start : start + _SLICE_BYTES]
        n_entries += len(part) - len(part.translate(None, _ENTRIES))
    if n_entries > _MOST_ENTRIES:
        raise FileError(
            f"it holds up to {n_entries:,} entries, and {_MOST_ENTRIES:,} are read at most: record "
            "fewer events (max_entries)"
        )
    place = next_report = 0
    while place < len(data):
        if place >= next_report:
            report_progress(Stage.CHECK_BYTES, place, len(data))
            next_report = place + _PART_BYTES
        plain = _PLAIN.match(data, place)
        if plain is not None:
            place = plain.end()
            continue
        opcode = data[place]
        if opcode in _LOOKS_UP:
            return
        place = _skip(data, place, opcode)


def _skip(data: bytes, place: int, opcode: int) -> int:
    """Return the place behind an opcode with an argument, and check the argument."""
    start = place + 1
    if opcode in _SIZED:
        width = _SIZED[opcode]
        size = int.from_bytes(data[start : start + width], "little")
        return _step(data, start + width, size)
    if opcode == _LONG_BINPUT:
        return _check_index(data, start + 4, int.from_bytes(data[start : start + 4], "little"))
    if opcode in _TEXT:
        end = data.find(b"\n", start) + 1
        if not end:
            raise FileError("it is cut short")
        if opcode in _INTEGER_TEXT and end - start > _INTEGER_CHARACTERS:
            raise _refuse_integer(place)
        if opcode == _PUT:
            text = data[start : end - 1]
            is_number = len(text) < 20 and text.isdigit()
            return _check_index(data, end, int(text) if is_number else len(data))
        return end
    if opcode in _LONG_INTEGERS:
        raise _refuse_integer(place)
    raise FileError(f"cut short or of no snapshot at byte {place:,}: opcode {opcode:#04x}")


def _refuse_integer(place: int) -> FileError:
    return FileError(f"cut short, or an integer of more than 64 bits, at byte {place:,}")


def _step(data: bytes, start: int, size: int) -> int:
    if size > len(data) - start:
        raise FileError(f"it is cut short: {size:,} bytes should come, and fewer do")
    return start + size


def _check_index(data: bytes, end: int, index: int) -> int:
    # Every object in the memo takes a byte of the pickle at least.
    if index >= len(data):
        raise FileError(f"its memo's index {index:,} is beyond its {len(data):,} bytes")
    return end


_MIB = 1 << 20
#: Size of the segments for small blocks.
_SMALL_SEGMENT_BYTES = 2 * _MIB
#: Number of the intervals of roundings, from below 2 MiB to 32 GiB and more, by powers of two.
_N_INTERVALS = 16


def format_snapshot(traces: Sequence[AllocatorTrace]) -> dict[str, Any]:
    """Return traces as the dictionaries of ``torch.cuda.memory._snapshot()``."""
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
    allocated = [block for block in segment.blocks if block.state == "active_allocated"]
    active = [block for block in segment.blocks if block.state != "inactive"]
    is_small = segment.is_small
    if is_small is None:
        is_small = segment.n_bytes <= _SMALL_SEGMENT_BYTES
    return {
        "device": index,
        "address": segment.address,
        "total_size": segment.n_bytes,
        "allocated_size": sum(block.n_bytes for block in allocated),
        "active_size": sum(block.n_bytes for block in active),
        "requested_size": sum(block.requested_bytes or 0 for block in allocated),
        "stream": 0,
        "segment_type": "small" if is_small else "large",
        "segment_pool_id": segment.pool_id,
        "is_expandable": segment.is_expandable,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.n_bytes,
                "requested_size": block.requested_bytes or 0,
                "state": block.state,
                "frames": _format_stack(block.frames, known),
            }
            for block in segment.blocks
        ],
    }


def _format_stack(
    stack: tuple[Frame, ...], known: dict[Frame, dict[str, Any]]
) -> list[dict[str, Any]]:
    return [
        known.setdefault(
            frame, {"name": frame.function, "filename": frame.filename, "line": frame.line}
        )
        for frame in stack
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
