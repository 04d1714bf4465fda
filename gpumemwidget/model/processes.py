"""Records of recorded processes: what each is, its spans, its state, a release in several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from gpumemwidget.model.cells import CellDevice, Status
from gpumemwidget.model.devices import BytesByDevice, DeviceInfo, DeviceUse, PeakIs, Reading
from gpumemwidget.model.ooms import OomCard
from gpumemwidget.model.releases import ReleasePlan, ReleaseReport

#: The part of a process in a bigger whole. ``rank``: one of torch.distributed's processes;
#: ``engine``: of ipyparallel; ``worker``: of Dask or Ray; ``actor``: of Ray.
ProcessRole = Literal["program", "notebook", "rank", "engine", "worker", "actor"]


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A recorded process, which it describes itself when its recording begins."""

    #: Unlike that of any other recording, also of the same process.
    id: str
    host: str
    pid: int
    #: ``python train.py``
    name: str
    #: When its recording began, in seconds since the epoch, UTC, by its own host's clock.
    started_at: float
    role: ProcessRole = "program"
    #: The rank, or the engine's number.
    number: int | None = None
    #: The worker's address or the actor's name.
    label: str = ""


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """A stretch of a process's work: a named span, a step, a cell, a task.

    Times are seconds since the process's recording began.
    """

    name: str
    #: When the first of the counted spans began.
    start_s: float
    #: The sum of all counted spans.
    duration_s: float
    status: Status
    #: Empty where the memory was not measured.
    devices: tuple[CellDevice, ...]
    #: The number of a step or a cell.
    number: int | None = None
    #: Number of spans that are counted in this record: where very many end, of each name and status
    #: the one with the highest peak is recorded, and the others are counted.
    n_spans: int = 1
    #: How many of them were not measured: too many were open at once.
    n_unmeasured: int = 0
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
    #: Most other spans that were open at once meanwhile.
    shared_with: int = 0


@dataclass(frozen=True, slots=True)
class ProcessState:
    """All that is known of a recorded process at one moment."""

    info: ProcessInfo
    #: ``lost``: its recording has no end, and the process is gone or silent.
    status: Literal["running", "ended", "failed", "lost"]
    #: When it was heard last, in seconds since its recording began.
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
    #: The newest spans, in the order of their ends.
    spans: tuple[SpanRecord, ...] = ()
    #: Number of older spans that are no longer kept.
    n_dropped_spans: int = 0
    ooms: tuple[OomCard, ...] = ()
    #: The line of the error that ended it; ``""`` for none.
    error: str = ""
    #: Number of parts of its record that could not be read.
    n_unread: int = 0

    @property
    def heard_at(self) -> float:
        """When it was heard last, in seconds since the epoch by the clock of its host."""
        return self.info.started_at + self.heard_s


@dataclass(frozen=True, slots=True)
class GpuPart:
    """A recorded process on a GPU."""

    process: ProcessState
    #: The GPU's name in that process.
    device: str
    reading: Reading | None
    peak: DevicePeak | None
    #: The process's bytes on the GPU: with its CUDA context where the driver knows it, else what
    #: PyTorch has reserved. 0 once it has ended.
    n_bytes: int | None
    has_context: bool


@dataclass(frozen=True, slots=True)
class GpuShare:
    """A GPU of any host, once, with the recorded processes on it."""

    host: str
    #: ``None`` where the driver has none: then it is known by its name in one process.
    uuid: str | None
    name: str
    total_bytes: int | None
    #: Bytes in use by everybody, as they were last known; ``None``: unknown.
    used_bytes: int | None
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
    #: The process's peak less the median of all peaks, in bytes.
    above_median_bytes: int
    n_processes: int


#: The plan or the report of a release in a process; text: why it was refused.
Outcome: TypeAlias = ReleasePlan | ReleaseReport | str


@dataclass(frozen=True, slots=True)
class RemoteRelease:
    """The outcome of a release in each process."""

    #: Processes with their plan, their report, or why there is none.
    outcomes: tuple[tuple[ProcessState, Outcome], ...]
    #: True if it was carried out; ``False``: it was only planned, as asked, or as one refused.
    is_done: bool
    #: True if it was asked to plan only.
    is_dry_run: bool = False
    #: True if a Ctrl-C came while it was carried out.
    is_interrupted: bool = False

    @property
    def refused(self) -> tuple[ProcessState, ...]:
        """The processes that refused their plan, so that nothing was released anywhere.

        If ``is_done``: those that failed, stopped or did not answer after all had planned, while
        the others released.
        """
        return tuple(state for state, outcome in self.outcomes if _is_refused(outcome))


def _is_refused(outcome: Outcome) -> bool:
    if isinstance(outcome, str):
        return True
    stop = outcome.refusal if isinstance(outcome, ReleasePlan) else outcome.stopped
    return stop is not None
