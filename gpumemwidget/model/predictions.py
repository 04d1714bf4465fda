"""Records of predictions: the memory that a step would take, before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from gpumemwidget.model.ownership import MemoryKind
from gpumemwidget.model.traces import DeviceTrace

#: The part of a step that is running: ``forward`` is all that is neither of the others.
Phase: TypeAlias = Literal["forward", "backward", "optimizer"]

#: The purpose of memory at a predicted peak. ``temporary`` goes within its phase; ``workspace`` is
#: within an operator, or a library's that stays; ``other memory`` was there before, and is not the
#: step's.
PredictedKind: TypeAlias = MemoryKind | Literal["temporary", "workspace", "other memory"]


@dataclass(frozen=True, slots=True)
class Bytes:
    """A predicted amount: at least, expected, at most."""

    at_least: int
    expected: int
    at_most: int


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """A line of a cell or a file."""

    name: str  #: ``In [3]``, ``train.py``; ``""``: the step's own cell or file
    line: int


@dataclass(frozen=True, slots=True)
class PredictedOwner:
    """Memory in use at the predicted peak, of one purpose and place."""

    kind: PredictedKind
    #: A parameter's, a gradient's or a batch's path; of all else the module that made it, or the
    #: operator where no module was called.
    path: str
    phase: Phase | None  #: when it was allocated; ``None``: before the step
    #: The user's innermost line that allocated it; ``None``: before the step.
    line: SourcePlace | None
    n_bytes: int
    n_blocks: int


@dataclass(frozen=True, slots=True)
class PeakPlace:
    """The operator at which the peak is reached."""

    operator: str  #: ``aten::nll_loss_backward``
    phase: Phase
    module: str  #: the path of the innermost module; ``""``: none
    line: SourcePlace | None
    run: int


@dataclass(frozen=True, slots=True)
class PredictionDevice:
    """The device that a prediction is for, as the step would find it."""

    name: str  #: ``cuda:0``; of a device that is not here its name: ``T4``, ``15.00 GiB``
    total_bytes: int | None  #: the memory of the device; ``None``: there is none to compare with
    #: The part that PyTorch may reserve: without other processes, and what is no allocator's.
    available_bytes: int | None
    #: Bytes that PyTorch has allocated and reserved before the step.
    allocated_bytes: int = 0
    reserved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PredictedRemedy:
    """A change to the step with which it was predicted again."""

    name: str  #: ``bfloat16 autocast``
    command: str  #: the line to write
    saved_bytes: int
    reserved_peak_bytes: int
    allocated_peak_bytes: int
    fits: bool | None  #: ``None``: too close to say, or there is no device to compare with


@dataclass(frozen=True, slots=True)
class PredictionRecord:
    """The memory that a step would take of a device."""

    device: PredictionDevice
    allocated: Bytes
    reserved: Bytes
    fits: bool | None  #: ``None``: too close to say, or there is no device to compare with
    peak: PeakPlace
    #: In use at the peak, biggest first; together ``allocated.expected``.
    owners: tuple[PredictedOwner, ...]
    trace: DeviceTrace  #: the run of the step with the peak; its times are numbers of operators
    #: Peaks of each run of the step: allocated and reserved bytes.
    runs: tuple[tuple[int, int], ...]
    assumptions: tuple[str, ...]
    full_at: PeakPlace | None = None
    remedies: tuple[PredictedRemedy, ...] = ()  #: changes that were tried and help, the best first
    untried: tuple[str, ...] = ()  #: sentences on remedies that could not be tried
