"""Releases and restores of memory: their requests, plans, steps and measured reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from gpumemwidget.errors import BadInputError, name_type
from gpumemwidget.model.devices import BytesByDevice, NamedByWords, Reading
from gpumemwidget.model.ownership import CutSearch, DeviceBytes, JointRelease

_NOTHING = DeviceBytes()


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    """A release that somebody asks for.

    Attributes:
        names: rows of the variables panel, each once: variables, ``"Out[7]"``,
            ``"last exception"``.
        keep: leave copies on the CPU under the names instead of setting them to ``None``.
        out: drop all displayed values too.
        exceptions: drop all that IPython holds of the last exception too.
        cublas: free cuBLAS's workspaces too.
        libraries: have other libraries, such as CuPy, give back what they keep for later.

    Raises:
        BadInputError: nothing is named, or a name is not text.
    """

    names: tuple[str, ...] = ()
    keep: bool = False
    out: bool = False
    exceptions: bool = False
    cublas: bool = False
    libraries: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", check_names(self.names))
        if not (self.names or self.out or self.exceptions or self.cublas or self.libraries):
            raise BadInputError(
                "nothing to release: name the variables, or give --out, --exceptions, "
                "--cublas or --libraries"
            )


def check_names(names: Sequence[object]) -> tuple[str, ...]:
    """Return names of variables, each once.

    Raises:
        BadInputError: a name is not text, but most likely the variable's value.
    """
    texts: dict[str, None] = {}
    for name in names:
        # ``isinstance`` would ask an object of the user's for its ``__class__``.
        if not issubclass(type(name), str):
            raise BadInputError(
                f"a name can't be of type {name_type(name)}: give it as text, "
                "release('model') and not release(model); nothing was changed"
            )
        texts[name] = None  # type: ignore[index]
    return tuple(texts)


@dataclass(frozen=True, slots=True)
class ReleaseSum:
    """The memory that some rows free if they are released together."""

    frees_bytes: DeviceBytes
    joint: JointRelease | None = None


class ReasonKind(NamedByWords):
    """Why memory is moved instead of dropped, or stays where it is."""

    KEPT = auto()  #: as asked, the names keep copies on the CPU
    SHARED = auto()  #: ``holders`` hold it too
    #: Something lent it to torch: on the host a NumPy array, elsewhere another library, whose
    #: memory the device's allocator does not count.
    LENT = auto()
    MAPPED = auto()  #: it goes; being shared memory or a mapped file, it was not counted
    PINNED = auto()  #: it is pinned, and PyTorch keeps it for its next use
    ON_HOST = auto()  #: it is on the host already
    NOT_A_PART = auto()  #: the row only leads to it: through a computation, a function or a key
    NOT_MOVED = auto()  #: no release moved it to the CPU, or it was brought back since
    UNSEEN = auto()  #: something in C++ refers to it
    SAVED = auto()  #: a computation saved it for backward
    COMPUTED = auto()  #: it has a ``grad_fn``
    STORAGE_HELD = auto()  #: something refers to the storage itself
    #: It is sparse, quantised, nested or named, has ``__torch_dispatch__`` or is a part of one that
    #: has, or is on a device with which PyTorch can't exchange a tensor's memory.
    IMMOVABLE = auto()


#: The reasons of memory that no allocator counts: it is not said whether that was freed.
UNCOUNTED = {ReasonKind.LENT, ReasonKind.MAPPED, ReasonKind.PINNED}


@dataclass(frozen=True, slots=True)
class Reason:
    """Why memory is moved instead of dropped, or stays where it is."""

    kind: ReasonKind
    #: The rows, and words for what is no row, that hold it too.
    holders: tuple[str, ...] = ()
    n_more: int = 0
    #: True if the reason is true of something that it has to stay together with.
    is_of_another: bool = False


@dataclass(frozen=True, slots=True)
class ReleaseMove:
    """One thing that a plan moves to the CPU in place, because somebody keeps it."""

    path: str  #: the path of the object: ``model``, ``history[3]``
    kind: str
    device: str
    n_bytes: int
    reason: Reason | None  #: why it is moved instead of dropped; ``None`` on the way back


@dataclass(frozen=True, slots=True)
class ReleaseStay:
    """Memory on one device that a release leaves where it is."""

    name: str  #: the row that holds it: ``model``, ``Out[7]``
    device: str
    held_bytes: DeviceBytes
    reason: Reason


class ReleaseStepKind(Enum):
    """A step of a release, in their order; the value names it where a release stopped."""

    MOVE = "move to CPU"
    UNBIND = "set to None"
    DROP_REFERENCES = "drop IPython's references"
    FREE_WORKSPACES = "free cuBLAS workspaces"  #: where asked for
    COLLECT = "gc.collect"
    EMPTY_CACHE = "empty_cache"
    EMPTY_LIBRARIES = "empty the caches of other libraries"  #: where asked for


class StopKind(NamedByWords):
    """The reason for which a release or a restore may not begin, or was not done to its end."""

    CAPTURE = auto()  #: a CUDA graph is being captured
    THREAD = auto()  #: ``function`` uses the memory at ``line``, and runs in ``thread``
    HOST_MEMORY = auto()  #: the moves need ``needs_bytes`` of the host's ``available_bytes``
    NOT_ON_HOST = auto()  #: a restore: nothing of ``name`` was moved to the CPU and is still there
    IMMOVABLE = auto()  #: a restore: nothing can be moved back
    FAILED = auto()  #: ``error`` was raised; in a release, within ``step``
    INTERRUPTED = auto()  #: a Ctrl-C came; in a release, within ``step``
    INTERRUPTED_BETWEEN = auto()  #: a Ctrl-C came in a release, after ``step`` or before the first


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a release or a restore may not begin, or did not end; the kind explains the fields."""

    kind: StopKind
    thread: str = ""
    function: str = ""
    line: int = 0
    needs_bytes: DeviceBytes | None = None
    available_bytes: int | None = None
    name: str = ""
    step: ReleaseStepKind | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class ReleasePlan:
    """The effects of a release, before anything is changed."""

    #: The request; its ``exceptions`` is true also if ``"last exception"`` is one of the names.
    request: ReleaseRequest
    moves: tuple[ReleaseMove, ...]
    #: Paths of the references of IPython's that are dropped: ``Out[3]``, ``sys.last_value``.
    drops: tuple[str, ...]
    frees_bytes: DeviceBytes  #: allocated bytes that will be freed, ``collects_bytes`` among them
    #: Host memory that the moves need, under ``host``, and what there is.
    host_needed_bytes: DeviceBytes
    host_available_bytes: int | None
    #: Those of them that no variable leads to: rubbish in cycles, which the collection frees.
    collects_bytes: DeviceBytes = _NOTHING
    refusal: Stop | None = None  #: why the plan may not be executed; ``None`` where it may
    stays: tuple[ReleaseStay, ...] = ()
    empty_names: tuple[str, ...] = ()  #: names that hold no tensor memory, as far as Python can see
    cut: CutSearch | None = None  #: the search, if it ended early: the empty names may hold memory
    #: Other libraries, GPUs and the bytes that each keeps there for later; ``None``: unknown.
    caches: tuple[tuple[str, str, int | None], ...] = ()
    #: Rows to release together, where this plan frees next to nothing of the names' memory.
    joint: JointRelease | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one step; fields that do not belong to its kind are empty."""

    n_tensors: int = 0  #: tensors that were moved, or whose cycles were cut
    n_bytes: int = 0
    names: tuple[str, ...] = ()  #: variables that were set to ``None``
    references: tuple[str, ...] = ()  #: paths of the references of IPython's that were dropped
    n_objects: int = 0  #: objects that the garbage collector found
    is_freed: bool = False  #: true if there were workspaces of cuBLAS's, and they were freed
    #: Libraries, GPUs and the bytes that the driver has got back; ``None``: unknown.
    given: tuple[tuple[str, str, int | None], ...] = ()
    refusal: str = ""  #: why cuBLAS's workspaces stay, in one line; ``""`` if they do not
    error: str = ""  #: why the step failed, in one line; ``""`` if it did not


@dataclass(frozen=True, slots=True)
class ReleaseStep:
    """One step of a release as it was carried out."""

    kind: ReleaseStepKind
    status: Literal["done", "skipped", "failed", "not reached"]
    result: StepResult = StepResult()
    #: Fall of the allocated and of the reserved bytes over the step, for each device; negative
    #: where they rose (the host, when something moves there).
    allocated_freed_bytes: BytesByDevice = ()
    reserved_freed_bytes: BytesByDevice = ()


@dataclass(frozen=True, slots=True)
class Remnant:
    """Memory that was to be freed and was found still to be counted."""

    n_bytes: int
    device: str = ""  #: ``""`` for several devices together
    #: The best path to it, then the names of other rows; ``()`` where they were not looked for.
    holders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReleaseReport:
    """The measured effects of a release."""

    #: Its ``stays`` are those of which something is still there, with the bytes of that.
    plan: ReleasePlan
    steps: tuple[ReleaseStep, ...]
    before: tuple[Reading, ...]
    after: tuple[Reading, ...]
    #: Measured over all steps, for each device.
    allocated_freed_bytes: BytesByDevice
    reserved_freed_bytes: BytesByDevice
    remains: tuple[Remnant, ...] = ()
    stopped: Stop | None = None  #: why it may not begin, or stopped; ``None`` if it went through
    #: True if a Ctrl-C came during the release, even if all steps were done by then.
    is_interrupted: bool = False


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The tensors to bring back from the CPU, before anything is changed."""

    names: tuple[str, ...]
    moves: tuple[ReleaseMove, ...]  #: their ``device`` is where each goes, which is where it was
    needs_bytes: DeviceBytes
    refusal: Stop | None = None  #: why the plan may not be executed; ``None`` where it may
    stays: tuple[ReleaseStay, ...] = ()  #: names whose memory can't be brought back


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The measured effects of bringing tensors back."""

    plan: RestorePlan
    result: StepResult
    before: tuple[Reading, ...]
    after: tuple[Reading, ...]
    #: Why it may not begin, or stopped, and everything is as it was; ``None`` if it went through.
    stopped: Stop | None = None
    remains: tuple[Remnant, ...] = ()
    #: True if a Ctrl-C came during the restore, even if it had gone through by then.
    is_interrupted: bool = False
