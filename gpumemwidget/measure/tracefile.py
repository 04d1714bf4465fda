"""A traced cell as a file of JSON, and read back: the lines, the timeline, what made the peak.

    {"format": "gpumemwidget trace", "version": 1, "units": …, "trace": {…}}

``trace`` has the names of the records' fields (``traces.py``). A file that is not exactly that is
refused with the place at which it isn't, so that nobody looks at figures that were guessed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gpumemwidget.errors import FileError
from gpumemwidget.measure.files import find_target, refuse_target, write_whole
from gpumemwidget.traces import CellTrace

__all__ = ["check_target", "format_trace", "parse_trace", "read_trace", "write_trace"]

_FORMAT = "gpumemwidget trace"
_VERSION = 1
_SUFFIX = ".json"
_UNITS = {"_bytes": "bytes", "_s": "seconds, times_s since the cell's start"}
#: A file beyond this is no trace that we wrote: ours have a few MB.
_MOST_BYTES = 512 << 20


class _WrongError(Exception):
    """A value is not what its place asks for."""


def check_target(path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """The file that a trace is to be written to, refused before anything is traced.

    Raises:
        FileError: its suffix is not ``.json``, its folder is not there, or it is there already.
    """
    target = find_target(path)
    if target.suffix.lower() != _SUFFIX:
        raise FileError(f"{target.name!r} is no name for a trace: give one that ends in {_SUFFIX}")
    refuse_target(target, force=force)
    return target


def write_trace(trace: CellTrace, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write a trace to a file, which appears whole or not at all.

    Args:
        trace: the traced cell or block.
        path: a name that ends in ``.json``; ``~`` is the home folder.
        force: take the place of a file that is there.

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
        if source.stat().st_size > _MOST_BYTES:
            raise FileError(f"{source} is too big for a trace of ours: give another file")
        content = source.read_bytes()
    except OSError as exc:
        raise FileError(f"can't read {source}: {exc.strerror or exc}") from None
    try:
        return parse_trace(content)
    except FileError as exc:
        raise FileError(f"{source}: {exc}") from None


def format_trace(trace: CellTrace) -> str:
    """A trace as the file's text."""
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "units": _UNITS,
        "trace": _to_plain(trace),
    }
    # As ASCII: surrogates that belong to no pair can't be written as UTF-8.
    return json.dumps(content, separators=(",", ":")) + "\n"


def parse_trace(content: bytes | str) -> CellTrace:
    """A trace from the file's content.

    Raises:
        FileError: it is not ours, cut short, damaged or of another version.
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
    except _WrongError as exc:
        raise FileError(f"this trace is damaged: {exc}") from None
    except RecursionError:
        raise FileError("this trace is damaged: its calls lie too deep") from None
    return trace


# -- To plain values and back ----------------------------------------------------------------------


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {
            field.name: _to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, tuple):
        return [_to_plain(each) for each in value]
    return value


@functools.cache
def _list_fields(kind: Any) -> Mapping[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _read(kind: Any, value: Any, where: str) -> Any:
    """A record from its plain values."""
    fields = _list_fields(kind)
    if not isinstance(value, dict) or value.keys() != fields.keys():
        raise _WrongError(f"{where} has not the fields that it should have")
    return kind(
        **{name: _read_value(hint, value[name], f"{where}.{name}") for name, hint in fields.items()}
    )


def _read_value(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        return _read_any_of(arguments, value, where)
    if origin is Literal:
        if type(value) is str and value in arguments:
            return value
        raise _WrongError(f"{where} is none of what it may be")
    if origin is tuple:
        return _read_column(arguments[0], value, where)
    if dataclasses.is_dataclass(hint):
        return _read(hint, value, where)
    return _read_plain(hint, value, where)


def _read_any_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    *others, last = [kind for kind in kinds if kind is not type(None)]
    if value is None and type(None) in kinds:
        return None
    for kind in others:
        try:
            return _read_value(kind, value, where)
        except _WrongError:
            continue
    return _read_value(last, value, where)


def _read_column(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, list):
        raise _WrongError(f"{where} is no list")
    if kind is int and all(type(each) is int for each in value):
        return tuple(value)  # The timeline's, of which there are many.
    return tuple(_read_value(kind, each, f"{where}[{n}]") for n, each in enumerate(value))


def _read_plain(kind: Any, value: Any, where: str) -> Any:
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if kind in (int, str) and type(value) is kind:
        return value
    raise _WrongError(f"{where} is no {'number' if kind in (int, float) else 'text'}")


def _check(trace: CellTrace) -> None:
    """What whoever draws it relies on."""
    for n, device in enumerate(trace.devices):
        where = f"trace.devices[{n}]"
        if not device.units:
            raise _WrongError(f"{where}.units is empty")
        timeline = device.timeline
        if timeline is None:
            continue
        columns = [
            *(timeline.allocated_bytes, timeline.reserved_bytes),
            *(layer.held_bytes for layer in timeline.layers),
        ]
        if not timeline.times_s or any(len(each) != len(timeline.times_s) for each in columns):
            raise _WrongError(f"{where}.timeline has columns of different lengths")
        if not 0 <= timeline.peak < len(timeline.times_s):
            raise _WrongError(f"{where}.timeline.peak is none of its moments")
        if list(timeline.times_s) != sorted(timeline.times_s):
            raise _WrongError(f"{where}.timeline goes back in time")
