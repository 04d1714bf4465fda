"""Keep a file open for long in a program that may close it, and never write to another one.

The kernel's of a process's memory is such a file.
"""

from __future__ import annotations

import os
from pathlib import Path


class KeptFile:
    """A file that stays open, under a descriptor that the program may take away.

    A program may close all files that it knows nothing of, as a daemon does, and its own next file
    gets the number. That one must be neither written to nor closed.

    Attributes:
        descriptor: the file's, as long as ``is_open``.

    Args:
        path: the file.
        flags: as of ``os.open``.

    Raises:
        OSError: the file can't be opened.
    """

    def __init__(self, path: Path, flags: int) -> None:
        self.descriptor = os.open(path, flags, 0o644)
        self._stat = os.fstat(self.descriptor)

    @property
    def is_open(self) -> bool:
        """True unless the program has closed the descriptor, or another file has got it."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), self._stat)
        except OSError:
            return False

    def close(self) -> None:
        """Close the file, if it still is this one."""
        if self.is_open:
            os.close(self.descriptor)
