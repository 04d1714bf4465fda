"""Ask a driver with a time limit: one that hangs must hold up no cell, no Ctrl-C and no unloading.

A call into a driver's library can hang for ever, as when a GPU has fallen off its bus, and nothing
in Python can end it. So each question runs on a thread of its own, and whoever asks waits a moment
for the answer, where a Ctrl-C is heard. While a question is unanswered no other is asked.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from gpumemwidget.backends.protocol import DeviceMonitor, ProcessesByBytes
from gpumemwidget.model.devices import DeviceInfo, DeviceUse, HardwareNote

_T = TypeVar("_T")

#: Seconds to wait for an answer, which takes milliseconds; and for the first one, as NVML's start
#: takes a second or more for each GPU that no other program uses.
_LIMIT_S = 2.0
_FIRST_LIMIT_S = 10.0
_SILENT = "the driver does not answer"


class TimeLimitedMonitor:
    """Asks a ``DeviceMonitor``, and goes on without an answer that takes too long.

    Args:
        monitor: the source for whole devices.
    """

    def __init__(self, monitor: DeviceMonitor) -> None:
        self._monitor = monitor
        #: The thread whose question took too long.
        self._late: threading.Thread | None = None
        self._limit_s = _FIRST_LIMIT_S
        #: The devices that were listed last.
        self._infos: tuple[DeviceInfo, ...] = ()

    def list_infos(self, uuids: Mapping[str, str] | None = None) -> tuple[DeviceInfo, ...]:
        """Return all devices that this process can see; those known before, if none answers.

        Args:
            uuids: the UUIDs of devices in use, as PyTorch has them; see ``DeviceMonitor.match``.
        """

        def ask() -> tuple[DeviceInfo, ...]:
            if uuids is not None:
                self._monitor.match(uuids)
            return self._monitor.list_infos()

        self._infos = self._ask(ask, self._infos)
        return self._infos

    def read_use(self, device: str) -> DeviceUse | None:
        """Return the use of a whole device, or that the driver does not answer."""
        is_known = any(info.device == device for info in self._infos)
        unknown = DeviceUse(device, None, None, None, failure=_SILENT) if is_known else None
        return self._ask(lambda: self._monitor.read_use(device), unknown)

    def list_processes(self, device: str) -> ProcessesByBytes | None:
        """Return the processes on a device; ``None`` where the driver does not list them."""
        return self._ask(lambda: self._monitor.list_processes(device), None)

    def take_notes(self) -> tuple[HardwareNote, ...]:
        """Return notes on what failed since the last call, each failure once."""
        return self._monitor.take_notes()

    def close(self) -> None:
        """Let go of the driver's library, unless it hangs."""
        self._ask(self._monitor.close, None)
        self._infos = ()

    def _ask(self, question: Callable[[], _T], unknown: _T) -> _T:
        """Return the answer to a question; ``unknown`` if there is none within the limit."""
        if self._late is not None and self._late.is_alive():
            return unknown
        self._late = None
        answers: queue.SimpleQueue[tuple[_T, BaseException | None]] = queue.SimpleQueue()

        def answer() -> None:
            try:
                answers.put((question(), None))
            except BaseException as exc:  # noqa: BLE001 - raised where the question was asked
                answers.put((unknown, exc))

        thread = threading.Thread(target=answer, name="gpumemwidget-driver", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return question()  # A process that ends starts no thread any more.
        try:
            found, exc = answers.get(timeout=self._limit_s)
        except queue.Empty:
            self._late = thread
            return unknown
        finally:
            self._limit_s = _LIMIT_S
        if exc is not None:
            raise exc
        return found
