"""Write a process's messages to a file, and read such files, also while they are being written."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from gpumemwidget.errors import FileError, RecordingError
from gpumemwidget.progress import Stage, report_progress
from gpumemwidget.remote.messages import (
    MAX_LINE_BYTES,
    MAX_PROCESSES,
    Message,
    decode,
    refuse_newer,
)

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
            with path.open("xb") as file:
                self._stat = os.fstat(file.fileno())
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
                if not os.path.samestat(os.fstat(descriptor), self._stat):
                    raise FileNotFoundError(errno.ENOENT, "another file has its name")
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
                if self._is_first and (why := refuse_newer(line)):
                    self._refusal = f"{self.path} {why}"
                    raise RecordingError(self._refusal)
                message: Message | None = None
                with contextlib.suppress(RecordingError):
                    message = decode(line)
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
        if path.exists():
            raise FileError(
                f"{path} is no regular file: name a recording, or a folder that has some"
            )
    except OSError as exc:
        raise FileError(f"{path} can't be read: {exc.strerror or exc}") from exc
    if path.suffix == ".jsonl":
        raise FileError(f"{path} is not there: name a recording, or a folder that has some")
    raise FileError(
        f"{path} is not there: name a recording, or a folder; for what will be recorded into it, "
        f"create it first: mkdir {shlex.quote(str(path))}"
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
