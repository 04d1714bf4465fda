"""Read how much malloc has handed out: the host's counterpart of *allocated* on a GPU.

glibc keeps the count and tells it through ``mallinfo2`` (2.33 and later). Other allocators keep
none that can be asked for the same way, so with these the figure is unknown.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

#: Bytes of a probe, few enough to come from the heap: freeing a block that malloc took from
#: ``mmap`` would raise its threshold for good (mallopt(3), M_MMAP_THRESHOLD).
_PROBE_BYTES = 64 * 1024
#: Maximum number of probes: threads outside Python may free memory in the middle of one.
_PROBE_ATTEMPTS = 5


class _MallInfo2(ctypes.Structure):
    """``struct mallinfo2`` of malloc.h, mallinfo(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )
    hblkhd: int
    uordblks: int

    def sum_in_use(self) -> int:
        """Return the bytes handed out, from the heaps and mapped one by one."""
        return self.uordblks + self.hblkhd


class Glibc:
    """glibc's malloc.

    ``mallinfo2`` walks the free chunks of every arena: 0.3 µs on a heap that has few, 8 ms on
    a heap with half a million. Callers that ask often keep an eye on the time.

    Raises:
        AttributeError: the C library has no ``mallinfo2`` (musl, macOS, glibc before 2.33).
        OSError: the process's own symbols can't be looked up (Windows).
        TypeError: the process's own symbols can't be looked up (Windows).
    """

    def __init__(self) -> None:
        # Not PyDLL: a long walk or trim must not hold up Python's other threads.
        library = ctypes.CDLL(None)
        self._mallinfo2 = _declare(library.mallinfo2, _MallInfo2)
        self._trim = _declare(library.malloc_trim, ctypes.c_int, ctypes.c_size_t)
        # The process's own malloc, which is another library's where one is preloaded.
        self._malloc = _declare(library.malloc, ctypes.c_void_p, ctypes.c_size_t)
        self._free = _declare(library.free, None, ctypes.c_void_p)

    def read_in_use(self) -> int:
        """Return the bytes handed out and not yet freed."""
        info: _MallInfo2 = self._mallinfo2()
        return info.sum_in_use()

    def make_counter(self) -> Callable[[], int]:
        """Return a call that gives the bytes in use, and holds the interpreter's lock meanwhile.

        Letting go of the lock at every line would let other threads in at every line.
        """
        mallinfo2 = _declare(ctypes.PyDLL(None).mallinfo2, _MallInfo2)
        return lambda: mallinfo2().sum_in_use()

    def trim(self) -> None:
        """Give free memory at the top of the heaps and whole free pages back: malloc_trim(3)."""
        self._trim(0)

    def counts(self) -> bool:
        """Return whether this count follows the malloc that the process really uses.

        With jemalloc, tcmalloc or the like preloaded, ``mallinfo2`` is still there and tells of a
        glibc heap that nobody uses.
        """
        for _ in range(_PROBE_ATTEMPTS):
            before_bytes = self.read_in_use()
            block = self._malloc(_PROBE_BYTES)
            held_bytes = self.read_in_use()
            self._free(block)
            after_bytes = self.read_in_use()
            rise_bytes, fall_bytes = held_bytes - before_bytes, held_bytes - after_bytes
            if min(rise_bytes, fall_bytes) >= _PROBE_BYTES:
                return True
        return False


def _declare(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


def find_malloc() -> Glibc | None:
    """Return the process's malloc, or ``None`` where it can't tell what is in use."""
    try:
        glibc = Glibc()
    except (AttributeError, OSError, TypeError):
        return None
    return glibc if glibc.counts() else None
