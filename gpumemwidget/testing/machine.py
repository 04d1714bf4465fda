"""Simulated GPUs and recordings in the place of this machine's GPUs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.hardware import Hardware, use_hardware
from gpumemwidget.backends.host.backend import HostBackend
from gpumemwidget.errors import BadInputError
from gpumemwidget.session.session import find_session
from gpumemwidget.testing.driver import SimulatedDriver
from gpumemwidget.testing.gpus import SimulatedGpus, simulate_torch
from gpumemwidget.testing.player import RecordingPlayer, ReplayBackend, ReplayMonitor
from gpumemwidget.testing.recording import Recording, load_recording

if TYPE_CHECKING:
    from typing_extensions import Self


class _Place:
    """The place of this machine's GPUs, as long as a simulation or a recording has it."""

    def make_hardware(self) -> Hardware:
        """Return what is found in place of this machine's hardware."""
        raise NotImplementedError

    def take(self) -> None:
        """Let gpumemwidget find what stands here, when it is loaded next."""
        if find_session() is not None:
            raise BadInputError(
                "gpumemwidget is loaded and has this machine's GPUs: run %unload_ext gpumemwidget "
                "first"
            )
        use_hardware(self.make_hardware)

    def close(self) -> None:
        """Let gpumemwidget find this machine's own GPUs again, when it is loaded next."""
        use_hardware(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SimulatedMachine(_Place, SimulatedGpus):
    """Simulated GPUs that gpumemwidget finds on this machine, until ``close``.

    It is its own context manager. What ``simulate_gpus`` returns.

    Attributes:
        driver: the GPUs' driver, which other processes and lost GPUs are told to.
        torch: a stand-in for the module ``torch``, with the GPUs' counters and history.
    """

    def __init__(self, n_devices: int, *, total_bytes: int, expandable: bool) -> None:
        super().__init__(n_devices, total_bytes=total_bytes, expandable=expandable)
        self.driver = SimulatedDriver(self)
        self.torch: ModuleType = simulate_torch(self, version="2.13.0")
        self.take()

    def make_hardware(self) -> Hardware:
        """Return the GPUs and the host's memory as the hardware that is recorded."""
        # A driver that was closed stays so. A copy shares all but that.
        return Hardware([CudaBackend(self.torch), HostBackend()], copy.copy(self.driver))


class ReplayedMachine(_Place, RecordingPlayer):
    """A recording whose devices gpumemwidget finds on this machine, until ``close``.

    It is its own context manager. What ``replay`` returns.
    """

    def __init__(self, recording: Recording, *, clock: Callable[[], float] | None = None) -> None:
        super().__init__(recording, clock=clock)
        self.take()

    def make_hardware(self) -> Hardware:
        """Return the recording's devices as the hardware that is recorded.

        The host's memory is this machine's, unless the recording has it.
        """
        backend = ReplayBackend(self)
        has_host = any(info.device == "host" for info in self.recording.devices)
        return Hardware([backend] if has_host else [backend, HostBackend()], ReplayMonitor(self))


def simulate_gpus(
    n_devices: int = 1, *, total_bytes: int = 80 * 1024**3, expandable: bool = False
) -> SimulatedMachine:
    """Let gpumemwidget find simulated GPUs on this machine, until they are closed.

    Cells then allocate with ``gpus.allocate(n_bytes, device)`` and free with ``gpus.free(handle)``.
    Peaks, traced lines, limits and the dashboard work as on real GPUs. Tensors are not affected.

    Args:
        n_devices: the number of GPUs.
        total_bytes: the memory of each.
        expandable: whether segments grow, as with ``expandable_segments:True``.

    Returns:
        The GPUs, which can stand in a ``with`` statement.

    Raises:
        BadInputError: the extension is loaded already.
    """
    return SimulatedMachine(n_devices, total_bytes=total_bytes, expandable=expandable)


def replay(
    recording: str | Path | Recording, *, clock: Callable[[], float] | None = None
) -> ReplayedMachine:
    """Let gpumemwidget find the devices of a recording on this machine, until they are closed.

    Args:
        recording: one, or the file that has it.
        clock: returns seconds, such as ``time.monotonic``, which the recording follows; without
            it, ``advance`` moves the recording from event to event.

    Returns:
        The player, which can stand in a ``with`` statement.

    Raises:
        FileError: the file can't be read.
        RecordingError: the file is no recording, or it is damaged.
        BadInputError: the extension is loaded already.
    """
    if not isinstance(recording, Recording):
        recording = load_recording(recording)
    return ReplayedMachine(recording, clock=clock)
