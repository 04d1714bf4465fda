"""Records of devices: counters, segments, whole use, the processes on them, limits.

Bytes and seconds throughout. ``None`` is "unknown", never 0. A device is named as PyTorch names it
(``"cuda:0"``), and the process's own memory is ``"host"``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal, TypeAlias

from gpumemwidget.errors import BadInputError, name_type

#: The name of the process's own memory among the devices.
HOST = "host"

#: The name for each GPU by itself, as in budgets.
EVERY_GPU = "every GPU"

#: The figure of the driver's that a note names where it can't be read.
MEMORY_IN_USE = "memory in use"

#: Pairs of a device's name and bytes.
BytesByDevice: TypeAlias = tuple[tuple[str, int], ...]

#: How exact a peak is. ``exact``: the high-water mark itself. ``at least``: the mark was cut short
#: (somebody else reset it, or the span began before the recording). ``sampled``: the highest of the
#: values that were read at intervals.
PeakIs = Literal["exact", "at least", "sampled"]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device's name, total and limit, which seldom change while the process lives."""

    device: str
    name: str  #: ``"NVIDIA H200"``; for the host ``"host memory"``
    #: The whole device's memory; for the host the machine's, or its cgroup's limit.
    total_bytes: int | None
    limit_bytes: int | None = None
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class Chip:
    """The facts of a GPU that decide which kernels it runs."""

    capability: tuple[int, int]
    n_multiprocessors: int
    threads_per_multiprocessor: int


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters of one device at one moment.

    On CUDA these are the caching allocator's own. On the host *allocated* is what malloc has handed
    out and *reserved* is the resident size.
    """

    device: str
    allocated_bytes: int | None
    reserved_bytes: int | None
    #: High-water marks since the span began (see ``MemoryBackend.start_span``).
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    peak_is: PeakIs | None = None
    #: Running totals since the process began.
    num_alloc_retries: int | None = None
    num_ooms: int | None = None


def find_outside_bytes(own_bytes: int | None, reserved_bytes: int | None) -> int | None:
    """Return what this process has of a GPU, by its driver, beside what PyTorch has reserved.

    ``None`` where one of the two is unknown, and where the driver has less than PyTorch: memory
    that sleeps, or another process's.
    """
    if own_bytes is None or reserved_bytes is None or own_bytes < reserved_bytes:
        return None
    return own_bytes - reserved_bytes


@dataclass(frozen=True, slots=True)
class Sample:
    """The readings of all devices at one moment of the session's clock."""

    time_s: float  #: seconds on the monitor's clock (``Monitor.clock``)
    readings: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """The use of a whole device at one moment, other processes included, as its driver has it."""

    device: str
    used_bytes: int | None
    free_bytes: int | None
    total_bytes: int | None
    utilization_percent: int | None = None
    #: Bytes that the driver keeps for itself, which are not in ``used_bytes``; ``None``: they
    #: are unknown, and are in ``used_bytes``.
    driver_bytes: int | None = None
    #: The driver's words on why the bytes are unknown; ``""`` where they are known.
    failure: str = ""
    #: True where the device's memory is the host's (DGX Spark, Jetson). The bytes are the system's
    #: then: what is not available is in use, and files that can be dropped are free.
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """A process on a device, and its bytes there, as the driver has them."""

    pid: int
    #: ``python train.py``; ``None`` where the process can't be seen, as from within a container.
    name: str | None
    #: ``child``: below this process in the tree of processes.
    relation: Literal["own", "child", "other"]
    n_bytes: int | None  #: ``None`` where the driver gives no bytes (Windows, or no permission)


@dataclass(frozen=True, slots=True)
class LibraryUse:
    """What another library than PyTorch has of a GPU in this process."""

    name: str  #: what users call it: ``CuPy``
    #: The bytes that its arrays are in; ``None`` where it can't be asked.
    used_bytes: int | None = None
    cached_bytes: int | None = None  #: the bytes that it keeps for later; ``None``: unknown
    #: The library's own limit on the device; ``None``: it has none, or does not say it.
    limit_bytes: int | None = None
    can_empty: bool = False  #: whether it can give back what it keeps for later


@dataclass(frozen=True, slots=True)
class KernelUse:
    """The part of a GPU that a Jupyter kernel takes, with the processes that it has started."""

    kernel_id: str  #: the id by which the Jupyter server knows the kernel
    device: str
    n_bytes: int | None


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """A process below this one: a worker of a DataLoader, a rank that a cell has launched."""

    pid: int
    parent_pid: int
    name: str  #: the program and its script in 60 characters at most: ``python train.py``
    #: The resident size, shared pages included; ``None`` where it can't be read.
    resident_bytes: int | None
    #: Devices on which the driver lists the process, with its bytes there.
    devices: tuple[tuple[str, int | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of Python that was running at an event, such as the allocation of a block."""

    filename: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a segment, as the caching allocator's snapshot has it."""

    address: int
    #: The size that the allocator counts: the requested bytes, rounded up, and a rest too small to
    #: be split off.
    n_bytes: int
    #: The bytes that were asked for; ``None`` where this release of torch does not keep it.
    requested_bytes: int | None
    #: ``active_pending_free``: freed, but another stream may still be using it.
    state: Literal["active_allocated", "active_pending_free", "inactive"]
    #: The stack that allocated the block, innermost first; ``()`` where no history was recorded.
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """One allocation from the driver, with its blocks in the order of their addresses."""

    device: str
    address: int
    n_bytes: int
    #: True if the segment belongs to a private pool: a CUDA graph's, or a ``MemPool``.
    is_private: bool
    pool_id: tuple[int, int]  #: the pool's id in torch; ``(0, 0)`` is the common pool
    blocks: tuple[Block, ...]
    #: Size of the pages of a segment that grows (``expandable_segments``), of which free ones are
    #: given back one by one; ``None`` for all other segments.
    page_bytes: int | None = None
    stream: int = 0


@dataclass(frozen=True, slots=True)
class DeviceState:
    """All that was read of one device at one moment, or at nearly one.

    ``%memstat`` reads neither processes nor segments.
    """

    info: DeviceInfo
    #: ``None`` where the user has not touched the device, so nothing of it was read.
    reading: Reading | None
    use: DeviceUse | None  #: ``None`` where no driver knows it
    #: The processes on the device: this process first, then its children, then the others; each
    #: biggest first. ``None`` where the driver does not list them, or under other pids than here
    #: (as in a container), or was not asked.
    processes: tuple[ProcessUse, ...] | None = None
    #: ``()`` where the allocator can't be asked, or was not asked.
    segments: tuple[Segment, ...] = ()
    #: Bytes of pinned host memory that PyTorch's allocator has from the system, its cache included;
    #: ``None`` for GPUs, and where nobody has pinned any.
    pinned_bytes: int | None = None
    #: False if the counters changed while the rest was read: then the figures may not fit.
    is_at_one_moment: bool = True
    libraries: tuple[LibraryUse, ...] = ()


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that this process may reserve on a device; the allocator holds it."""

    device: str
    #: ``None``: there is no limit; or it is unknown, if a device in use has no total here.
    limit_bytes: int | None
    #: The device's total, as PyTorch counts it; ``None`` where the device is not in use yet.
    total_bytes: int | None
    reserved_bytes: int | None
    is_waiting: bool = False  #: the limit is set as soon as CUDA is in use
    #: A waiting limit that was given as a share of the total, which is not known yet.
    share: float | None = None


@dataclass(frozen=True, slots=True)
class LimitRequest:
    """A limit as it was asked for: in bytes, or as a share of the device; neither: no limit."""

    limit_bytes: int | None = None
    share: float | None = None

    @property
    def is_off(self) -> bool:
        """True if no limit is asked for."""
        return self.limit_bytes is None and self.share is None


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory that a cell may have allocated on a device before a warning."""

    #: ``EVERY_GPU`` includes GPUs that come into use later. On the host the resident size counts.
    device: str
    budget_bytes: int


def check_device(device: object, known: Sequence[str]) -> None:
    """Refuse a device that is not one of those here, or not given by its name.

    Args:
        device: the value that somebody gave; ``None`` is not refused.
        known: the devices that may be named.

    Raises:
        BadInputError: there is no such device, or it is no text, but a ``torch.device`` say.
    """
    if device is None:
        return
    if type(device) is not str:
        raise BadInputError(
            f"a device's name can't be of type {name_type(device)}: give text such as 'cuda:0'; "
            "%memstat lists them"
        )
    if device not in known:
        choice = f"choose from {', '.join(known)}" if known else "there is none"
        raise BadInputError(f"no device {device!r} here: {choice}")


@functools.lru_cache(maxsize=64)
def rank_device(device: str) -> tuple[bool, str, int, str]:
    """Return the key to sort devices by: by kind, ``cuda:10`` after ``cuda:9``, the host last."""
    kind, _, index = device.partition(":")
    is_numbered = index.isascii() and index.isdigit() and len(index) < 10
    return device == HOST, kind, int(index) if is_numbered else -1, device


# -- Notes -----------------------------------------------------------------------------------------


class NamedByWords(Enum):
    """Members whose values are their names as words, as JSON has them."""

    @staticmethod
    def _generate_next_value_(name: str, *_: object) -> str:
        return name.lower().replace("_", " ")


class HardwareNoteKind(NamedByWords):
    """The subject of a note of the hardware's, with the figures that it has."""

    MESSAGE = auto()  #: a sentence made elsewhere, in ``text``: a file error's, a recording's
    NO_TOTAL = auto()  #: neither PyTorch nor a driver knows the total of ``device``
    #: The figure named by ``what`` can't be read on ``device``, for the error in ``text``.
    UNREAD = auto()
    #: Nothing is read of whole devices, as the driver's library fails with ``text``; or not yet, as
    #: only CUDA knows the order of GPUs of different models.
    NO_DRIVER = auto()
    GPUS_UNNUMBERED = auto()
    #: The allocator's blocks are not read, as the PyTorch in ``text`` would fetch all events.
    BLOCKS_COSTLY = auto()
    NOT_RECORDED = auto()  #: devices of this PyTorch are not recorded, for the error in ``text``
    LIMIT_FAILED = auto()  #: a limit that waited was not set, for the error in ``text``
    #: No history is read: the device is none of CUDA's; the allocator in ``text`` keeps none; CUDA
    #: refuses to begin, read or end one with the error in ``text``.
    NOT_TRACED = auto()
    NO_HISTORY = auto()
    HISTORY_REFUSED = auto()


@dataclass(frozen=True, slots=True)
class HardwareNote:
    """Something that could not be read or done; the kind says what the other fields are."""

    kind: HardwareNoteKind
    text: str = ""
    device: str = ""
    what: str = ""
