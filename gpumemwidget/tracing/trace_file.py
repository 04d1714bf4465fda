"""Write a traced cell to a file of JSON, and read it, or a snapshot of PyTorch's, as a trace.

    {"format": "gpumemwidget trace", "version": 1, "units": …, "trace": {…}}

``trace`` has the fields of the records in ``model/traces.py``. Any other file is refused, with the
first place that is wrong, so that nobody looks at guessed figures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import types
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gpumemwidget.errors import FileError, describe_exception
from gpumemwidget.model.cells import CellDevice, CellRecord
from gpumemwidget.model.devices import Frame
from gpumemwidget.model.traces import AllocatorTrace, CellTrace
from gpumemwidget.recording.files import find_target, refuse_target, write_whole
from gpumemwidget.tracing.sources import Source, Sources, is_library, read_source

_FORMAT = "gpumemwidget trace"
_VERSION = 1
_SUFFIX = ".json"
_UNITS = {"_bytes": "bytes", "_s": "seconds, times_s since the cell's start"}
#: Maximum size of a file that is read: traces take a few MB.
_MAX_BYTES = 512 << 20

#: Exceptions that impossible figures of a snapshot cause in our code, such as huge sizes or
#: settings of text.
_DAMAGES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
#: File names of IPython's cells, in a terminal and in a kernel.
_CELL = re.compile(r"^<ipython-input-|[/\\]ipykernel_\d+[/\\]\d+\.py$")


class _WrongValueError(Exception):
    """A value does not fit its field."""


def check_target(path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Return the file to write a trace to; refuse a wrong one before anything is traced.

    Raises:
        FileError: its suffix is not ``.json``, its folder does not exist, or the file does.
    """
    target = find_target(path)
    if target.suffix.lower() != _SUFFIX:
        raise FileError(
            f"{target.name!r} is not a name for a trace: give one that ends in {_SUFFIX}"
        )
    refuse_target(target, force=force)
    return target


def write_trace(trace: CellTrace, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write a trace to a file, which appears whole or not at all.

    Args:
        trace: the traced cell or block.
        path: a name that ends in ``.json``; ``~`` is the home folder.
        force: replace a file that is there.

    Returns:
        The path of the file that was written.

    Raises:
        FileError: it can't be written there; nothing was.
    """
    target = check_target(path, force=force)
    write_whole(target, format_trace(trace).encode(), force=force)
    return target


def read_trace(path: str | os.PathLike[str]) -> CellTrace:
    """Read a trace that ``write_trace`` has written.

    Raises:
        FileError: it can't be read, or is not such a file.
    """
    source = find_target(path)
    try:
        if source.stat().st_size > _MAX_BYTES:
            raise FileError(f"{source} is too big for a trace of ours: give another file")
        content = source.read_bytes()
    except OSError as exc:
        raise FileError(f"can't read {source}: {exc.strerror or exc}") from None
    try:
        return parse_trace(content)
    except FileError as exc:
        raise FileError(f"{source}: {exc}") from None


def format_trace(trace: CellTrace) -> str:
    """Return a trace as the file's text."""
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "units": _UNITS,
        "trace": trace,
    }
    # ASCII, as surrogates that belong to no pair can't be written as UTF-8.
    return json.dumps(content, default=_to_plain, separators=(",", ":")) + "\n"


def parse_trace(content: bytes | str) -> CellTrace:
    """Return the trace in a file's content.

    Raises:
        FileError: the content is not ours, cut short, damaged or of another version.
    """
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as exc:
        why = "it lies too deep" if isinstance(exc, RecursionError) else str(exc)
        raise FileError(f"this is no trace of gpumemwidget's, or is cut short ({why})") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise FileError('this is no trace of gpumemwidget\'s: it does not say "format"')
    if data.get("version") != _VERSION:
        raise FileError(
            f"this trace is of version {str(data.get('version'))[:20]}, and we read version "
            f"{_VERSION}: read it with the gpumemwidget that wrote it"
        )
    try:
        trace: CellTrace = _read(CellTrace, data.get("trace"), "trace")
        _check(trace)
    except _WrongValueError as exc:
        raise FileError(f"this trace is damaged: {exc}") from None
    except RecursionError:
        raise FileError("this trace is damaged: its calls lie too deep") from None
    return trace


def _to_plain(value: Any) -> Any:
    """Return what JSON has for a record or a member of an enum."""
    if isinstance(value, Enum):
        return value.value
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


#: The types of a record's fields.
_read_hints = functools.cache(get_type_hints)


def _read(hint: Any, value: Any, where: str) -> Any:  # noqa: PLR0911 - one for each kind of type
    """Return a value of JSON as the type of its field; refuse any other value."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        return _read_union(arguments, value, where)
    if dataclasses.is_dataclass(hint):
        return _read_record(hint, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise _WrongValueError(f"{where} is no list")
        if arguments[0] is int and all(type(item) is int for item in value):
            return tuple(value)  # Faster for the timeline's many values.
        return tuple(_read(arguments[0], item, f"{where}[{n}]") for n, item in enumerate(value))
    if origin is Literal or issubclass(hint, Enum):
        allowed = arguments if origin is Literal else [member.value for member in hint]
        if type(value) is not str or value not in allowed:
            raise _WrongValueError(f"{where} is none of what it may be")
        return value if origin is Literal else hint(value)
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if hint is not float and type(value) is hint:
        return value
    named = {int: "number", float: "number", bool: "true or false"}.get(hint, "text")
    raise _WrongValueError(f"{where} is no {named}")


def _read_record(kind: Any, value: Any, where: str) -> Any:
    fields = _read_hints(kind)
    if not isinstance(value, dict) or value.keys() != fields.keys():
        raise _WrongValueError(f"{where} has not the fields that it should have")
    return kind(**{name: _read(fields[name], value[name], f"{where}.{name}") for name in fields})


def _read_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    *others, last = [kind for kind in kinds if kind is not type(None)]
    if value is None and type(None) in kinds:
        return None
    for kind in others:
        with contextlib.suppress(_WrongValueError):
            return _read(kind, value, where)
    return _read(last, value, where)


def _check(trace: CellTrace) -> None:
    """Check what the reports rely on."""
    for n, device in enumerate(trace.devices):
        where = f"trace.devices[{n}]"
        if not device.units:
            raise _WrongValueError(f"{where}.units is empty")
        timeline = device.timeline
        if timeline is None:
            continue
        times_s = timeline.times_s
        columns = [timeline.allocated_bytes, timeline.reserved_bytes]
        columns += [layer.held_bytes for layer in timeline.layers]
        if not times_s or any(len(column) != len(times_s) for column in columns):
            raise _WrongValueError(f"{where}.timeline has columns of different lengths")
        if not 0 <= timeline.peak < len(times_s):
            raise _WrongValueError(f"{where}.timeline.peak is none of its moments")
        if list(times_s) != sorted(times_s):
            raise _WrongValueError(f"{where}.timeline goes back in time")


# -- Snapshots of PyTorch's memory viewer ----------------------------------------------------------


def read_snapshot(path: Path) -> CellTrace:
    """Return the trace in a file that PyTorch's memory viewer reads.

    The file does not say which cell or block it is of: the lines are those of the user's file that
    allocated most.

    Raises:
        FileError: the file can't be read, or is no snapshot.
    """
    from gpumemwidget.backends.cuda.snapshot_file import load_snapshot  # noqa: PLC0415 - where it is used
    from gpumemwidget.tracing.device_trace import describe_device  # noqa: PLC0415 - where it is used

    traces = load_snapshot(path)
    filename = _find_main(traces)
    text = "".join(read_source(filename)) if filename else ""
    name = PurePath(filename).name if filename else path.name
    sources = Sources(Source(name, filename, "file", text))
    start_us = min((trace.start_us for trace in traces), default=0)
    end_us = max((trace.end_us for trace in traces), default=0)
    try:
        devices = tuple(
            describe_device(trace, sources=sources, start_us=start_us) for trace in traces
        )
    except _DAMAGES as exc:
        why = describe_exception(exc)[:80]
        raise FileError(
            f"{path} is damaged: its figures are those of no device ({why}); choose another file"
        ) from None
    record = CellRecord(
        execution_count=None,
        cell_id=None,
        first_line=path.name,
        started_at=start_us / 1e6,
        start_s=0.0,
        duration_s=(end_us - start_us) / 1e6,
        status="ok",
        devices=tuple(
            CellDevice(each.device, each.allocated, each.reserved, each.peak_is, None, None)
            for each in devices
        ),
    )
    return CellTrace(record, devices)


def _find_main(traces: Sequence[AllocatorTrace]) -> str:
    """Return the user's file that allocated most; ``""`` if the stacks have none."""
    n_bytes: Counter[str] = Counter()
    for trace in traces:
        files = [_choose_file(stack) for stack in trace.events.stack_table]
        for stack, size in zip(trace.events.stacks, trace.events.sizes, strict=True):
            n_bytes[files[stack]] += size
    del n_bytes[""]
    return n_bytes.most_common(1)[0][0] if n_bytes else ""


def _choose_file(stack: Sequence[Frame]) -> str:
    """Return the outermost cell of a stack (innermost first), or else the user's outermost file."""
    filenames = [frame.filename for frame in stack]
    users = [filename for filename in filenames if filename and not is_library(filename)]
    cells = [filename for filename in users if _CELL.search(filename)]
    return (cells or users or [""])[-1]
