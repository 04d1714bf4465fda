"""Records of recorded processes: what each is, its spans, its state, a release in several."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from gpumemwidget.model.cells import CellDevice, Status
from gpumemwidget.model.devices import HOST, BytesByDevice, DeviceInfo, DeviceUse, PeakIs, Reading
from gpumemwidget.model.ooms import OomCard

#: The part of a process in a bigger whole. ``rank``: one of torch.distributed's processes;
#: ``engine``: of ipyparallel; ``worker``: of Dask or Ray; ``actor``: of Ray.
ProcessRole = Literal["program", "notebook", "rank", "engine", "worker", "actor"]


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A recorded process, which it describes itself when its recording begins."""

    id: str  #: unlike that of any other recording, also of the same process
    host: str
    pid: int
    name: str
    #: When its recording began, in seconds since the epoch, UTC, by its own host's clock.
    started_at: float
    role: ProcessRole = "program"
    number: int | None = None  #: the rank, or the engine's number
    label: str = ""  #: the worker's address or the actor's name


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """A stretch of a process's work: a named span, a step, a cell, a task.

    Times are seconds since the process's recording began.
    """

    name: str
    start_s: float  #: when the first of the counted spans began
    duration_s: float  #: the sum of all counted spans
    status: Status
    devices: tuple[CellDevice, ...]  #: empty where the memory was not measured
    number: int | None = None  #: the number of a step or a cell
    #: Number of spans that are counted in this record: where very many end, of each name and status
    #: the one with the highest peak is recorded, and the others are counted.
    n_spans: int = 1
    #: Most other spans that were open at once meanwhile: what they took is in these peaks too.
    shared_with: int = 0


@dataclass(frozen=True, slots=True)
class RunningSpan:
    """A span that has begun and not yet ended; the innermost, where there are several."""

    name: str
    start_s: float
    number: int | None = None


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """The highest figures of a process on a device, in bytes."""

    device: str
    allocated_bytes: int | None
    reserved_bytes: int | None
    #: How exact *allocated* is; on the host, where *reserved* is the resident size, how exact that.
    peak_is: PeakIs | None = None
    #: The span with the highest allocated (on the host: resident) bytes; ``None`` where that was
    #: outside all spans.
    span: str | None = None
    number: int | None = None
    shared_with: int = 0  #: most other spans that were open at once meanwhile


@dataclass(frozen=True, slots=True)
class ProcessState:
    """All that is known of a recorded process at one moment."""

    info: ProcessInfo
    #: ``lost``: its recording has no end, and the process is gone or silent.
    status: Literal["running", "ended", "failed", "lost"]
    heard_s: float
    devices: tuple[DeviceInfo, ...] = ()
    #: The newest counters; one that was not known at the end is as it was known last.
    readings: tuple[Reading, ...] = ()
    #: The whole GPUs as its driver had them last, other processes included.
    uses: tuple[DeviceUse, ...] = ()
    #: The process's own bytes on each GPU, its CUDA context included, where the driver knew them.
    own_bytes: BytesByDevice = ()
    peaks: tuple[DevicePeak, ...] = ()
    running: RunningSpan | None = None
    spans: tuple[SpanRecord, ...] = ()
    n_dropped_spans: int = 0
    ooms: tuple[OomCard, ...] = ()
    error: str = ""
    n_unread: int = 0  #: number of parts of its record that could not be read

    @property
    def heard_at(self) -> float:
        """When it was heard last, in seconds since the epoch by the clock of its host."""
        return self.info.started_at + self.heard_s


@dataclass(frozen=True, slots=True)
class GpuPart:
    """A recorded process on a GPU."""

    process: ProcessState
    device: str
    reading: Reading | None
    peak: DevicePeak | None
    #: The process's bytes on the GPU: with its CUDA context where the driver knows it, else what
    #: PyTorch has reserved. 0 once it has ended.
    n_bytes: int | None


@dataclass(frozen=True, slots=True)
class GpuShare:
    """A GPU of any host, once, with the recorded processes on it."""

    host: str
    #: ``None`` where the driver has none: then it is known by its name in one process.
    uuid: str | None
    name: str
    total_bytes: int | None
    used_bytes: int | None  #: bytes in use by everybody, as they were last known; ``None``: unknown
    #: Bytes that were free then; what the driver keeps for itself is neither free nor in use.
    free_bytes: int | None
    parts: tuple[GpuPart, ...]

    @property
    def other_bytes(self) -> int | None:
        """The bytes that others than the recorded processes use; ``None``: not known."""
        known = [part.n_bytes for part in self.parts]
        if self.used_bytes is None or any(n_bytes is None for n_bytes in known):
            return None
        return max(0, self.used_bytes - sum(n_bytes or 0 for n_bytes in known))


@dataclass(frozen=True, slots=True)
class Skew:
    """A process whose peak on its GPU stands out among those of its like."""

    process: ProcessState
    peak: DevicePeak
    above_median_bytes: int  #: the process's peak less the median of all peaks, in bytes
    n_processes: int


def choose_processes(
    states: Sequence[ProcessState], skewed: Collection[str], most: int
) -> frozenset[str]:
    """Return the ids of the processes that matter most.

    Those that run come first, but where there are too many of them half of the places go to others:
    what stands out, ran out of memory, failed or was lost before the rest, then by memory; of those
    that don't run the newest.
    """

    def rank(state: ProcessState) -> tuple[bool, float]:
        is_fine = not (state.info.id in skewed or state.ooms or state.status in ("failed", "lost"))
        if state.status != "running":
            return is_fine, -state.info.started_at
        return is_fine, -sum(
            peak.reserved_bytes or 0 for peak in state.peaks if peak.device != HOST
        )

    ranked = sorted(states, key=rank)
    running = [state for state in ranked if state.status == "running"]
    gone = [state for state in ranked if state.status != "running"]
    n_gone = min(len(gone), max(most // 2, most - len(running)))
    chosen = [*gone[:n_gone], *running[: most - n_gone]]
    return frozenset(state.info.id for state in chosen)
