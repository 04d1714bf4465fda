"""The messages of which a recording is made, sent through an engine or in a file.

Each message is a line of JSON that can be read without those before it. msgspec writes and reads
them, and holds each value to the type of its field. Nothing that is read is run.

The first message is a ``Began``. Times are seconds since then, on a clock that never goes back.
Samples are the bulk: ``["sample", 1200, {"cuda:0": [512, 2097152]}]`` is a moment, in milliseconds,
with allocated and reserved of each device.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from gpumemwidget.errors import FileError, RecordingError
from gpumemwidget.model.devices import BytesByDevice, DeviceInfo, DeviceUse
from gpumemwidget.model.encoding import make_readable
from gpumemwidget.model.ooms import OomCard
from gpumemwidget.model.processes import DevicePeak, ProcessInfo, RunningSpan, SpanRecord
from gpumemwidget.progress import Stage, report_progress

#: Raised by whoever changes the meaning of a field; new fields and messages need no new version.
#: ``Began``, which has it, can be read in any version.
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
    values = make_readable(msgspec.to_builtins(message), max_text=_MAX_TEXT, max_items=_MAX_ITEMS)
    return _encoder.encode(values) + b"\n"


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


# -- A process's file, also while it is being written ----------------------------------------------

#: Maximum number of bytes that are read of a file in one step.
_MAX_READ_BYTES = 1024 * 1024


class MessageFile:
    """A new file that messages are appended to. It is open only while they are.

    Raises:
        FileError: it is there already, or can't be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("xb").close()
        except FileExistsError:
            raise FileError(f"{path} is there already: choose another name") from None
        except OSError as exc:
            raise FileError(f"can't write {path}: {exc.strerror or exc}; choose another") from exc
        #: Number of bytes in the file of lines that could not be written to their end.
        self._n_written = 0

    def write(self, lines: bytes) -> None:
        """Append lines.

        Raises:
            FileError: the system refuses: the disk is full, the share or the file is gone. Called
                with the same lines again, it goes on where it was refused.
        """
        try:
            # Whoever reads meanwhile sees whole lines. A file that is gone is not made anew.
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            try:
                while self._n_written < len(lines):
                    self._n_written += os.write(descriptor, lines[self._n_written :])
            finally:
                os.close(descriptor)
        except OSError as exc:
            raise FileError(
                f"can't write {self.path}: {exc.strerror or exc}; the last minutes are kept until "
                "it can be written again"
            ) from exc
        self._n_written = 0


class MessageReader:
    """Reads the messages of a file as they come.

    Of a file whose first line is no recording's, or that of a newer version, nothing more is read.
    One that begins with other bytes than before was written anew, and is read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin()

    def _begin(self) -> None:
        """Forget what was read."""
        self._offset = 0
        self._head = b""
        self._is_first = True
        #: True once the first line was no recording's.
        self._is_foreign = False
        #: Why the recording can't be read: it is of a newer version.
        self._refusal = ""
        #: The beginning of a line whose end is not yet written.
        self._begun = b""

    def read(self) -> Iterator[Message | None]:
        """Yield the messages that were written since the last call; ``None``: a line that is none.

        Raises:
            FileError: the file can't be read.
            RecordingError: it was written by a newer gpumemwidget.
        """
        if self._refusal:
            raise RecordingError(self._refusal)
        while not self._is_foreign:
            data = self._read_bytes()
            if not data:
                return
            *lines, self._begun = (self._begun + data).split(b"\n")
            if len(self._begun) > MAX_LINE_BYTES:
                lines.append(self._begun)
                self._begun = b""
            for line in lines:
                message: Message | None = None
                with contextlib.suppress(RecordingError):
                    message = decode(line)
                if type(message) is Began and message.version > VERSION:
                    self._refusal = (
                        f"{self.path} was written by a newer gpumemwidget (version "
                        f"{message.version} of the format, and this one reads {VERSION}): upgrade "
                        "gpumemwidget"
                    )
                    raise RecordingError(self._refusal)
                # Other programs have lines of JSON too, and maybe gigabytes of them.
                self._is_foreign = self._is_first and message is None
                if self._is_foreign:
                    return
                yield message
                self._is_first = False
            if len(data) < _MAX_READ_BYTES:
                return

    def _read_bytes(self) -> bytes:
        try:
            size_bytes = self.path.stat().st_size
            if size_bytes == self._offset:
                return b""
            # Without a buffer: twice a second for each process it costs more than the reading.
            with self.path.open("rb", buffering=0) as file:
                # A new file may have the inode of one that was deleted.
                if file.read(len(self._head)) != self._head:
                    self._begin()
                file.seek(self._offset)
                data = file.read(max(0, min(size_bytes - self._offset, _MAX_READ_BYTES)))
        except OSError as exc:
            raise FileError(f"{self.path} can't be read: {exc.strerror or exc}") from exc
        # The recording's id is among them.
        self._head += data[: 256 - len(self._head)]
        self._offset += len(data)
        report_progress(Stage.READ_BYTES, self._offset, size_bytes)
        return data


def list_recordings(path: Path) -> tuple[list[Path], int]:
    """Return the recordings that a path leads to: a file itself, or those in a folder.

    Returns:
        At most ``MAX_PROCESSES``, those written to last, by name; and the number of older ones.

    Raises:
        FileError: nothing is there, or what is there is neither a file nor a folder.
    """
    try:
        if path.is_dir():
            with os.scandir(path) as entries:
                found = [entry for entry in entries if _may_be_recording(entry)]
            if len(found) > MAX_PROCESSES:
                found.sort(key=_read_time, reverse=True)
            paths = sorted(entry.path for entry in found[:MAX_PROCESSES])
            return list(map(Path, paths)), len(found) - len(paths)
        if path.is_file():
            return [path], 0
    except OSError as exc:
        raise FileError(f"{path} can't be read: {exc.strerror or exc}") from exc
    what = "is no regular file" if path.exists() else "is not there"
    raise FileError(
        f"{path} {what}: name a recording or a folder; if its recordings are still to come, create "
        "the folder first"
    )


def _may_be_recording(entry: os.DirEntry[str]) -> bool:
    try:
        # A pipe of that name would keep its reader waiting.
        return entry.name.endswith(".jsonl") and entry.is_file()
    except OSError:
        # A loop of links, or a share that is gone: reading it fails, for this file alone.
        return True


def _read_time(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat().st_mtime
    except OSError:
        return 0.0
