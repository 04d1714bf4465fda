"""Read and write the file of PyTorch's memory viewer: a pickle, which may come from anywhere.

Nothing that the pickle names is looked up, so that it can make plain containers and nothing else.
Its opcodes are checked before it is loaded: nine bytes can ask for gigabytes (an index in the
memo), and numbers of many bits can be chosen to have one hash, so that a dict of them takes time
with the square of their number.

The viewer: https://docs.pytorch.org/memory_viz, and ``python torch/cuda/_memory_viz.py``. The
format of pickles: https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpumemwidget.backends.cuda.events import parse_traces
from gpumemwidget.errors import FileError
from gpumemwidget.failures import describe_exception
from gpumemwidget.model.traces import AllocatorTrace
from gpumemwidget.progress import Stage, report_progress

_GIB = 1 << 30
_PART_BYTES = 1 << 20
_MAKE = "make one with torch.cuda.memory._dump_snapshot() or %%memtrace --snapshot"
_WORKED_OUT = "what stood before the file's first event is worked out backwards from its end"
#: Exceptions of ``pickle`` for a file that is cut short or no pickle (``MemoryError`` if it
#: announces something larger than any memory), and of the parser for other shapes than a
#: snapshot's.
_DAMAGES = (
    *(pickle.UnpicklingError, EOFError, MemoryError, UnicodeDecodeError),
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError),
)


def load_snapshot(path: str | Path, *, max_bytes: int = 2 * _GIB) -> tuple[AllocatorTrace, ...]:
    """Return the traces of a file that ``torch.cuda.memory._dump_snapshot`` or a trace wrote.

    The file has the segments at its end alone: the traces have nothing ``before`` and are not
    whole, so that they are followed backwards.

    Args:
        path: the file.
        max_bytes: maximum size of the file; in memory a snapshot takes some ten times that.

    Returns:
        A trace of each device that has memory or events, by index.

    Raises:
        FileError: the file can't be read, is too large, is no snapshot, is cut short, or asks for
            something to be run.
    """
    data = _read(Path(path), max_bytes)
    try:
        check_pickle(data)
        snapshot = _PlainUnpickler(io.BufferedReader(_Parts(data), _PART_BYTES)).load()
        if not isinstance(snapshot, dict) or not isinstance(snapshot.get("segments"), list):
            raise FileError(f"{path} is no memory snapshot of PyTorch's: {_MAKE}")
        if not any(snapshot["device_traces"]):
            raise FileError(
                f"{path} holds no events: record a history before it is written "
                "(torch.cuda.memory._record_memory_history())"
            )
        return _parse(snapshot)
    except FileError:  # which is a ValueError, too
        raise
    except _ForbiddenError as error:
        raise FileError(
            f"{path} asks for {error} to be run, which no memory snapshot does: nothing was run; "
            "choose another file"
        ) from None
    except _DAMAGES as error:
        why = describe_exception(error)[:100]
        raise FileError(
            f"{path} is damaged, or no memory snapshot of PyTorch's ({why}): {_MAKE}"
        ) from None


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


class _Parts(io.RawIOBase):
    """Bytes as a file that is read part by part, so that a Ctrl-C is heard in between."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._place = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = self._data[self._place : self._place + len(buffer)]
        buffer[: len(part)] = part
        self._place += len(part)
        report_progress(Stage.READ_BYTES, self._place, len(self._data))
        return len(part)


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        if path.stat().st_size > max_bytes:
            raise FileError(
                f"{path} holds more than {max_bytes / _GIB:.3g} GiB: record fewer events "
                "(max_entries)"
            )
        return path.read_bytes()
    except OSError as error:
        raise FileError(
            f"{path} can't be read: {error.strerror or error}; choose another file"
        ) from None


def _parse(snapshot: dict[str, Any]) -> tuple[AllocatorTrace, ...]:
    device_traces = snapshot["device_traces"]
    # Every device has the event of the snapshot itself, in use or not.
    indices = {segment["device"] for segment in snapshot["segments"]}
    indices |= {
        index
        for index, raw in enumerate(device_traces)
        if any(event["action"] != "snapshot" for event in raw)
    }
    end_us = max(raw[-1]["time_us"] for raw in device_traces if raw)
    traces = parse_traces(snapshot, before=(), start_us=0, end_us=end_us, touched=indices)
    _check_types(traces)
    return tuple(
        dataclasses.replace(
            trace,
            # The trace begins with its own first event.
            start_us=trace.events.times_us[0] if trace.events.times_us else trace.end_us,
            is_whole=False,
            notes=(_WORKED_OUT,),
        )
        for trace in traces
    )


def _check_types(traces: Sequence[AllocatorTrace]) -> None:
    """Raise ``TypeError`` where segments, blocks or frames have other types than theirs.

    The events are columns of numbers, whose types the columns have checked.
    """
    segments = [segment for trace in traces for segment in trace.after]
    blocks = [block for segment in segments for block in segment.blocks]
    counts = [count for segment in segments for count in (segment.address, segment.n_bytes)]
    counts += [count for block in blocks for count in (block.address, block.n_bytes)]
    counts += [block.requested_bytes or 0 for block in blocks]
    stacks = {block.frames for block in blocks}
    stacks.update(stack for trace in traces for stack in trace.events.stack_table)
    frames = {frame for stack in stacks for frame in stack}
    counts += [frame.line for frame in frames]
    if any(type(count) is not int or count < 0 for count in counts):
        raise TypeError("a count that is none")
    if any(type(frame.function) is not str for frame in frames):
        raise TypeError("a function without a name")


# -- The opcodes -----------------------------------------------------------------------------------

#: Maximum number of bytes of an integer in a snapshot.
_INTEGER_BYTES = 8
#: Number of opcodes matched at once: the matcher's own memory grows with it.
_N_AT_ONCE = 1000


def _measure(most: int) -> bytes:
    """Return the pattern of a length in one byte and as many bytes."""
    sizes = (re.escape(bytes([n])) + b".{%d}" % n for n in range(most + 1))
    return b"(?:" + b"|".join(sizes) + b")"


#: Opcodes of a known and small size, of those that ``pickle.dump`` uses for plain containers.
_PLAIN = re.compile(
    b"(?:[]})(taesu.N\x85-\x89\x94]|[Khq\x80].|M..|[Jj].{4}|[G\x95].{8}"
    b"|\x8a" + _measure(_INTEGER_BYTES) + b"|\x8c" + _measure(255) + b"){1,%d}" % _N_AT_ONCE,
    re.DOTALL,
)
#: Opcodes that look something up, which loading refuses: opcodes behind them don't matter.
_LOOKS_UP = b"ciPQ\x82\x83\x84\x93"
_TEXT, _LONG_BINPUT = b"X"[0], b"r"[0]


def check_pickle(data: bytes) -> None:
    """Refuse a pickle whose numbers ask for memory or time out of proportion to its size.

    A file of nothing but empty lists, which is no snapshot, still takes some 60 times its size.

    Raises:
        pickle.UnpicklingError: the pickle asks for that, or has opcodes of no snapshot.
    """
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
        argument = int.from_bytes(data[place + 1 : place + 5], "little")
        if opcode in _LOOKS_UP:
            return
        if opcode == _TEXT:
            place += 5 + argument
        # Every object in the memo takes a byte of the pickle at least.
        elif opcode == _LONG_BINPUT and argument < len(data):
            place += 5
        else:
            raise pickle.UnpicklingError(f"cut short, or of no snapshot, at byte {place:,}")


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
