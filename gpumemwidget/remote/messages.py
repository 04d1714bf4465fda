"""The messages by which a recorded process tells of itself, in a file or through an engine.

Each message is a line of JSON, so a file of them is JSON Lines: whatever is cut off at its end, the
lines before it stand. msgspec writes and reads them, and holds each value to the type of its field.
Nothing that is read is run.

The first message is a ``Began``. Times are seconds since then, on a clock that never goes back.
Samples are the bulk: ``["sample", 1200, [0, 512, -4096, 0]]`` is a moment, in milliseconds, and of
each device of the last ``Devices`` the change of allocated and of reserved since the sample before.
"""

from __future__ import annotations

import functools
from typing import TypeAlias

import msgspec

from gpumemwidget.errors import RecordingError
from gpumemwidget.model.devices import BytesByDevice, DeviceInfo, DeviceUse
from gpumemwidget.model.ooms import OomCard
from gpumemwidget.model.processes import DevicePeak, ProcessInfo, RunningSpan, SpanRecord

#: Raised by whoever changes the meaning of a field; new fields and messages need no new version.
VERSION = 1
#: Maximum length of a line, in bytes. A card of an OOM has some tens of thousands.
MAX_LINE_BYTES = 4 * 1024 * 1024


class Began(msgspec.Struct, frozen=True, tag="began"):
    """The recording begins."""

    process: ProcessInfo
    version: int = VERSION


class Devices(msgspec.Struct, frozen=True, tag="devices"):
    """The devices with counters, from here on; changes in samples count from 0 again."""

    devices: tuple[DeviceInfo, ...]


class Counters(msgspec.Struct, frozen=True, tag="sample", array_like=True):
    """A sample."""

    time_ms: int
    #: Of each device allocated and reserved: the change in bytes; ``None`` where it is unknown.
    changes: list[int | None]


class Uses(msgspec.Struct, frozen=True, tag="use"):
    """Whole GPUs, and what this process takes of them, as the driver tells."""

    time_s: float
    uses: tuple[DeviceUse, ...]
    own_bytes: BytesByDevice = ()


class Peaks(msgspec.Struct, frozen=True, tag="peaks"):
    """The highest figures so far, for a listener that comes later."""

    peaks: tuple[DevicePeak, ...]


class SpanBegan(msgspec.Struct, frozen=True, tag="span_began"):
    """A span begins, within those that are open."""

    span: RunningSpan


class SpanEnded(msgspec.Struct, frozen=True, tag="span"):
    """A span has ended, or several short ones of a name."""

    span: SpanRecord
    #: The innermost span that is still open.
    running: RunningSpan | None = None


class RanOut(msgspec.Struct, frozen=True, tag="oom"):
    """A span or the program ended with an OOM."""

    time_s: float
    card: OomCard


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The recording ends."""

    time_s: float
    #: The line of the error that ended the program; ``""`` for none.
    error: str = ""


Message: TypeAlias = (
    Began | Devices | Counters | Uses | Peaks | SpanBegan | SpanEnded | RanOut | Ended
)

_encoder = msgspec.json.Encoder()


def encode(message: Message) -> bytes:
    """Return a message as a line, with its end."""
    return _encoder.encode(message) + b"\n"


_Rare: TypeAlias = Began | Devices | Uses | Peaks | SpanBegan | SpanEnded | RanOut | Ended


@functools.lru_cache(maxsize=1)
def _make_decoders() -> tuple[msgspec.json.Decoder[Counters], msgspec.json.Decoder[_Rare]]:
    # When the first line is read: it takes some milliseconds.
    return msgspec.json.Decoder(Counters), msgspec.json.Decoder(_Rare)


def decode(line: bytes) -> Message:
    """Return the message of a line.

    Raises:
        RecordingError: it is too long, is no message, or of a version that is not known here.
    """
    if len(line) > MAX_LINE_BYTES:
        raise RecordingError(f"a line of {len(line)} bytes is no message")
    samples, others = _make_decoders()
    try:
        message: Message = samples.decode(line) if line[:1] == b"[" else others.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordingError(f"a line is no message: {error}") from None
    if type(message) is Began and message.version > VERSION:
        raise RecordingError(
            f"it was written by a newer gpumemwidget (version {message.version} of the format, and "
            f"this one reads {VERSION}): upgrade gpumemwidget"
        )
    return message
