"""Reads the file of PyTorch's memory viewer back: a pickle, which may come from anywhere.

Nothing that the pickle names is looked up, so that it can make plain containers and nothing else.
"""

from __future__ import annotations

import dataclasses
import gzip
import pickle
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from gpumemwidget.backends.events import parse_traces
from gpumemwidget.errors import FileError
from gpumemwidget.traces import AllocatorTrace

__all__ = ["load_snapshot"]

_GIB = 1 << 30
_GZIP_MAGIC = b"\x1f\x8b"
_MAKE = "make one with torch.cuda.memory._dump_snapshot() or %%memtrace --snapshot"
_WORKED_OUT = "what stood before the file's first event is worked out backwards from its end"
_NO_TIMES = "the file has no times, as those of PyTorch before 2.1: its events stand in their order"
#: What a pickle that is cut short, or is none, lets ``pickle`` raise; with ``MemoryError`` where
#: it says that something of a size comes that no memory has.
_DAMAGES = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError),
    *(AttributeError, OverflowError, MemoryError, zlib.error, UnicodeDecodeError),
)
#: What other shapes than a snapshot's let the parser raise.
_ODDITIES = (KeyError, TypeError, ValueError, OverflowError, AttributeError, IndexError)


def load_snapshot(path: str | Path, *, max_bytes: int = 4 * _GIB) -> tuple[AllocatorTrace, ...]:
    """The traces in a file that ``torch.cuda.memory._dump_snapshot`` or a trace has written.

    It may be packed with gzip. A file knows what stood at its end alone: the traces have nothing
    ``before`` and are not whole, so that they are followed backwards.

    Args:
        path: the file.
        max_bytes: the largest one that is read, unpacked; in memory it takes some ten times that.

    Returns:
        One for each device that has memory or events, by index.

    Raises:
        FileError: the file can't be read, is too large, is no snapshot, is cut short, or asks for
            something to be run.
    """
    snapshot = _check(_read(Path(path), max_bytes), path)
    # A snapshot is noted on each device, in use or not.
    indices = {each["device"] for each in snapshot["segments"]}
    indices |= {
        index
        for index, raw in enumerate(snapshot["device_traces"])
        if any(type(each) is not dict or each.get("action") != "snapshot" for each in raw)
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
            each,
            # Its own first event: what stood there is what stood before.
            start_us=each.events.times_us[0] if each.events.times_us else each.end_us,
            is_whole=False,
            notes=notes,
        )
        for each in traces
    )


class _PlainUnpickler(pickle.Unpickler):
    """Makes plain containers."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Nothing may be looked up."""
        raise _ForbiddenError(f"{module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> Any:
        """Nor may anything that lies elsewhere."""
        raise _ForbiddenError(f"a persistent object ({type(pid).__name__})")


class _ForbiddenError(Exception):
    """What a pickle asked for."""


class _BoundedFile:
    """Reads a file up to a bound, so that a small one can't unpack to any size.

    Args:
        file: open, at its start.
        max_bytes: what may be read in all.
    """

    def __init__(self, file: IO[bytes], max_bytes: int) -> None:
        self._file = file
        self._left = max_bytes

    def read(self, n_bytes: int = -1) -> bytes:
        """As a file's own."""
        return self._count(self._file.read(min(n_bytes, self._left + 1)))

    def readline(self) -> bytes:
        """As a file's own."""
        return self._count(self._file.readline(self._left + 1))

    def _count(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            raise _TooLargeError
        return data


class _TooLargeError(Exception):
    """There is more in the file than is read."""


def _read(path: Path, max_bytes: int) -> Any:
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == _GZIP_MAGIC
            file.seek(0)
            source: IO[bytes] = gzip.GzipFile(fileobj=file) if is_packed else file  # type: ignore[assignment]  # it reads as one
            return _PlainUnpickler(_BoundedFile(source, max_bytes)).load()
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
    """The snapshot, if it has the shape of one and events in it."""
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
        isinstance(each, dict) and _is_count(each.get("time_us", 0)) for each in events
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
            isinstance(each, dict)
            and _is_count(each.get("size"))
            and _is_count(each.get("address", 0))
            and _is_count(each.get("requested_size", 0))
            for each in raw["blocks"]
        )
    )


def _modernise(segment: dict[str, Any]) -> dict[str, Any]:
    """A segment as today's releases have it: those before 2.1 had a history for each block."""
    blocks = [
        {**each, "frames": _take_frames(each)} if "history" in each else each
        for each in segment["blocks"]
    ]
    return {**segment, "blocks": blocks}


def _take_frames(block: Mapping[str, Any]) -> Any:
    history = block["history"]
    newest = history[0] if isinstance(history, list) and history else {}
    return newest.get("frames", ()) if isinstance(newest, dict) else ()


def _check_frames(traces: Sequence[AllocatorTrace]) -> None:
    """Raise where a frame is not of what a frame is made of."""
    for trace in traces:
        stacks = [block.frames for segment in trace.after for block in segment.blocks]
        for frame in {each for stack in (*stacks, *trace.events.stack_table) for each in stack}:
            if not isinstance(frame.function, str) or not _is_count(frame.line):
                raise TypeError("frames")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__} {str(error).partition(chr(10))[0][:80]}".strip()


def _refuse(path: str | Path, why: str) -> FileError:
    return FileError(f"{path} is damaged, or no memory snapshot of PyTorch's ({why}): {_MAKE}")
