"""The messages of which a recording is made, in a file or sent through an engine.

Each message is a line of JSON that can be read without those before it. msgspec writes and reads
them, and holds each value to the type of its field. Nothing that is read is run.

The first message is a ``Began``. Times are seconds since then, on a clock that never goes back.
Samples are the bulk: ``["sample", 1200, {"cuda:0": [512, 2097152]}]`` is a moment, in milliseconds,
with allocated and reserved of each device.
"""

from __future__ import annotations

import contextlib
import functools
import re
from enum import Enum
from typing import Annotated, Any, TypeAlias

import msgspec

from gpumemwidget.errors import RecordingError
from gpumemwidget.model.devices import BytesByDevice, DeviceInfo, DeviceUse
from gpumemwidget.model.ooms import OomCard
from gpumemwidget.model.processes import DevicePeak, ProcessInfo, RunningSpan, SpanRecord

#: Raised by whoever changes the meaning of a field; new fields and messages need no new version.
VERSION = 1
#: Maximum number of processes that are followed at once.
MAX_PROCESSES = 2000
#: Maximum length of a line, in bytes. A card of an OOM has some tens of thousands.
MAX_LINE_BYTES = 4 * 1024 * 1024
#: Maximum number of bits of a whole number: a request that runs out of memory may have exbibytes.
MAX_BITS = 63
#: Maximum size of any other number, and of those in samples.
_MAX_NUMBER = 2**53
#: Maximum number of characters of a text, and of items in a list.
_MAX_TEXT, _MAX_ITEMS = 16 * 1024, 1024
#: Numbers above the maximum have that many digits, or an exponent.
_LARGE = re.compile(rb"[0-9](?:[eE]|[0-9]{15})")
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=-_MAX_NUMBER, le=_MAX_NUMBER)]
_Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=_MAX_TEXT)]


class Began(msgspec.Struct, frozen=True, tag="began"):
    """The recording begins."""

    process: ProcessInfo
    version: int = VERSION


class Devices(msgspec.Struct, frozen=True, tag="devices"):
    """What is known of the devices with counters, from here on."""

    devices: tuple[DeviceInfo, ...]


class Figures(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Allocated and reserved bytes of a device; ``None``: unknown.

    The garbage collector does not track it: of 288,000 samples that took a third of the reading.
    """

    allocated_bytes: _Number | None
    reserved_bytes: _Number | None


class Counters(msgspec.Struct, frozen=True, tag="sample", array_like=True, gc=False):
    """A sample, the bulk of all messages: msgspec itself holds its numbers to their limits."""

    time_ms: _Number
    #: By device.
    counters: Annotated[dict[_Name, Figures], msgspec.Meta(max_length=_MAX_ITEMS)]


class Uses(msgspec.Struct, frozen=True, tag="use"):
    """Whole GPUs, and what this process takes of them, as the driver reports it."""

    time_s: float
    uses: tuple[DeviceUse, ...]
    own_bytes: BytesByDevice = ()


class Peaks(msgspec.Struct, frozen=True, tag="peaks"):
    """The highest figures since the recording began: when they are new, and now and then again."""

    time_s: float
    peaks: tuple[DevicePeak, ...]


class SpanBegan(msgspec.Struct, frozen=True, tag="span_began"):
    """Another span is the innermost that is open: one has begun, or has ended."""

    #: ``None``: none is open.
    span: RunningSpan | None


class SpanEnded(msgspec.Struct, frozen=True, tag="span"):
    """A span has ended, or several of a name that are counted in one record."""

    span: SpanRecord


class RanOut(msgspec.Struct, frozen=True, tag="oom"):
    """A span or the program ended with an OOM."""

    time_s: float
    card: OomCard


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The recording ends."""

    time_s: float
    #: The line of the error that ended the program; ``""`` for none.
    error: str = ""


_Rare: TypeAlias = Began | Devices | Uses | Peaks | SpanBegan | SpanEnded | RanOut | Ended
Message: TypeAlias = Counters | _Rare

_encoder = msgspec.json.Encoder()


def encode(message: Message) -> bytes:
    """Return a message as a line, with its end.

    Texts and lists that ``decode`` would refuse are cut: those of an OOM's card are the program's.
    """
    # The name of a file may be no UTF-8, and half of a surrogate pair has none.
    with contextlib.suppress(UnicodeEncodeError):
        line = _encoder.encode(message)
        if not _may_be_long(line):
            return line + b"\n"
    return _encoder.encode(_make_readable(msgspec.to_builtins(message))) + b"\n"


def _make_readable(value: Any) -> Any:
    """Return a value with its texts and lists cut, and without halves of surrogate pairs."""
    if type(value) is str:
        return value[:_MAX_TEXT].encode(errors="replace").decode()
    if type(value) is dict:
        return {key: _make_readable(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return list(map(_make_readable, value[:_MAX_ITEMS]))
    return value


@functools.lru_cache(maxsize=1)
def _make_decoders() -> tuple[msgspec.json.Decoder[Counters], msgspec.json.Decoder[_Rare]]:
    # When the first line is read: it takes some milliseconds.
    return msgspec.json.Decoder(Counters), msgspec.json.Decoder(_Rare)


def decode(line: bytes) -> Message:
    """Return the message of a line.

    Raises:
        RecordingError: it is too long, or is no message.
    """
    if len(line) > MAX_LINE_BYTES:
        raise RecordingError(f"a line of {len(line)} bytes is no message")
    samples, others = _make_decoders()
    try:
        if is_sample(line):
            return samples.decode(line)
        message = others.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordingError(f"a line is no message: {error}") from None
    # Most lines can have nothing large, and need no look at every field.
    if (_may_be_long(line) or _LARGE.search(line)) and not _is_sound(message):
        raise RecordingError("a line is no message: a number, a text or a list in it is too large")
    return message


def is_sample(line: bytes) -> bool:
    """Return whether a line is a sample: only those are lists."""
    return line.startswith(b"[")


def _may_be_long(line: bytes) -> bool:
    """Return whether a line has room for a text or a list that is too long."""
    return len(line) > 2 * _MAX_ITEMS


def refuse_newer(line: bytes) -> str:
    """Return why a recording with this first line can't be read, if it has a newer format."""
    version = VERSION
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        version = msgspec.json.decode(line[:MAX_LINE_BYTES], type=_Version).version
    if version <= VERSION:
        return ""
    return (
        f"was written by a newer gpumemwidget (version {version} of the format, and this one reads "
        f"{VERSION}): upgrade gpumemwidget"
    )


class _Version(msgspec.Struct, frozen=True, tag="began"):
    """The part of a ``Began`` that stays in any version."""

    version: int


def _is_sound(value: Any) -> bool:
    """Return whether the numbers, texts and lists in a message are such as can be shown."""
    kind = type(value)
    if value is None or kind is bool or isinstance(value, Enum):
        return True
    if kind is str:
        return len(value) <= _MAX_TEXT
    if kind is int:
        return bool(value.bit_length() <= MAX_BITS)
    if kind is float:
        return bool(-_MAX_NUMBER <= value <= _MAX_NUMBER)
    if kind is tuple or kind is list:
        return len(value) <= _MAX_ITEMS and all(map(_is_sound, value))
    return all(_is_sound(getattr(value, name)) for name in kind.__match_args__)
