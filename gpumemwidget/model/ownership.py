"""Owners of memory: the account of all bytes, the rows of variables, explanations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import auto
from typing import Literal

from gpumemwidget.model.devices import BytesByDevice, NamedByWords


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Bytes on each device, and whether they are a lower bound.

    A search of the user's objects that ran out of time has found this much or more. The record has
    no iterator: whoever shows a figure goes through a formatter, which says "at least".
    """

    #: Pairs of a device and its bytes, biggest first; a device without any is left out.
    by_device: BytesByDevice = ()
    is_at_least: bool = False  #: true if there may be more, as not everything was looked at

    @property
    def total_bytes(self) -> int:
        """The bytes on all devices together."""
        return sum(n_bytes for _, n_bytes in self.by_device)

    def on(self, device: str) -> int:
        """Return the bytes on one device; 0 where it has none."""
        return dict(self.by_device).get(device, 0)


#: The purpose of memory. ``tensor`` is a plain tensor; ``other`` is memory of no tensor (on the
#: host that of Python's objects and of libraries); about ``unknown`` nothing could be found. In a
#: breakdown they are parts in this order.
MemoryKind = Literal[
    "parameter",
    "gradient",
    "optimizer state",
    "saved for backward",
    "buffer",
    "tensor",
    "cuBLAS workspace",
    "CUDA-graph pool",
    "compile cache",
    "other",
    "unknown",
]


#: The beginning of a path. ``module``: a global of an imported library; ``thread``: a variable of a
#: function that is running; ``nowhere``: no variable leads to it.
RootKind = Literal["name", "out", "exception", "module", "thread", "nowhere"]


@dataclass(frozen=True, slots=True)
class Owned:
    """A line of the account: one storage, or a piece of memory that is no tensor's."""

    device: str
    #: Bytes as the allocator counts them, so that the lines of a device add up to all of them.
    n_bytes: int
    kind: MemoryKind
    #: The path a person would type, in pieces: ``("model", ".layers", "[0]", ".weight")``. Where no
    #: name leads to it, the words that say what it is, as one piece.
    steps: tuple[str, ...]
    root: RootKind
    rows: tuple[str, ...] = ()  #: the rows (``Variable.name``) that hold it, that of the path first
    #: True where something that is not one of the rows holds it as well.
    held_elsewhere: bool = False
    #: The line that allocated it, where a history was recorded: ``In [7], line 3``.
    allocated_at: str | None = None
    #: How much of it is beyond what was asked for; ``None`` where that is not known.
    rounding_bytes: int | None = None
    #: The way to make the holder let go, where no variable leads to the memory.
    fix: Fix | None = None
    #: The bytes that tensors show of it, where that is a small part: a slice keeps all.
    shown_bytes: int | None = None

    @property
    def owner(self) -> str:
        """The path as one text."""
        return "".join(self.steps)


@dataclass(frozen=True, slots=True)
class Slices:
    """Storages of which tensors show a small part, though they keep all of it."""

    n_storages: int = 0
    n_bytes: int = 0
    shown_bytes: int = 0  #: the bytes that clones of these tensors would take


@dataclass(frozen=True, slots=True)
class DeviceAccount:
    """The owners of all allocated memory of one device."""

    device: str
    #: The allocator's own figure, read with the walk; ``None`` where it can't be had.
    allocated_bytes: int | None
    #: Biggest first. Together they are ``allocated_bytes``, where that is known.
    owned: tuple[Owned, ...]

    def sum_kinds(self) -> tuple[tuple[MemoryKind, int], ...]:
        """Bytes of each kind, biggest first."""
        sums: dict[MemoryKind, int] = {}
        for line in self.owned:
            sums[line.kind] = sums.get(line.kind, 0) + line.n_bytes
        return tuple(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


class MemorySource(NamedByWords):
    """Where a storage's memory comes from."""

    OWN = auto()  #: the allocator that torch has for the device
    #: A NumPy array, another library: it may use the memory longer than torch does.
    LENT = auto()
    MAPPED = auto()  #: shared memory, or a file: on the host, and not malloc's
    PINNED = auto()  #: torch's own host memory that a GPU may copy from: not malloc's either


@dataclass(frozen=True, slots=True)
class AccountNote:
    """Memory of tensors that the allocator of their device does not count."""

    device: str
    n_bytes: int
    source: MemorySource = MemorySource.LENT


@dataclass(frozen=True, slots=True)
class LibraryArray:
    """An array of another library than PyTorch on a GPU."""

    device: str
    #: The first name or item that holds it: ``batches[2]``.
    path: str
    #: Bytes of its memory, of which it may be a view.
    n_bytes: int
    #: ``CuPy`` or ``JAX``.
    library: str
    #: Its type and shape: ``float32 (1024, 1024)``.
    what: str

    @property
    def name(self) -> str:
        """The variable that the path begins with."""
        return self.path.partition("[")[0]


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """The account of owners: every allocated byte of every device, once."""

    devices: tuple[DeviceAccount, ...]
    variables: tuple[Variable, ...]  #: the rows of the variables panel, of the same walk
    #: False where the walk stopped at its budget of time: then more is named than is known.
    is_complete: bool
    duration_s: float
    notes: tuple[AccountNote, ...] = ()
    #: Arrays of other libraries, whose memory PyTorch's allocator does not count.
    library_arrays: tuple[LibraryArray, ...] = ()
    unread_libraries: tuple[str, ...] = ()  #: libraries with arrays that could not be read: ``JAX``
    #: False if there was too much to look at: ``library_arrays`` may lack some.
    has_all_library_arrays: bool = True


class FixKind(NamedByWords):
    """A way to make a holder let go of memory."""

    RELEASE_ROW = auto()  #: release the variable ``path``
    RELEASE_DISPLAYED = auto()  #: release the displayed value ``path``
    RELEASE_EXCEPTIONS = auto()
    RELEASE_CUBLAS = auto()
    RESET_COMPILER = auto()
    DELETE = auto()  #: delete ``path``
    DELETE_CUDA_GRAPH = auto()
    DELETE_LENDER = auto()  #: delete what lent its memory to torch
    CLEAR_GRADIENT = auto()  #: set the gradient ``path`` to ``None``
    CLEAR_CACHE = auto()  #: empty the cache of the function ``path``
    CLOSE = auto()  #: close ``path``, a generator or a widget
    CLOSE_WIDGETS = auto()  #: close all widgets of ``path``, the class
    DROP_GRAPH = auto()  #: call backward, or drop ``path``, whose autograd graph holds it
    SET_CONTEXT_VARIABLE = auto()  #: set the context variable ``path`` to something else
    END_FUNCTION = auto()  #: let the running function return
    COLLECT = auto()  #: run the garbage collector
    END_UNSEEN = auto()  #: end what holds it in C++


@dataclass(frozen=True, slots=True)
class Fix:
    """An action of the user's after which a path no longer holds memory."""

    kind: FixKind
    #: The object of the action, as it is typed: ``trainer.model``; ``""`` where none is named.
    path: str = ""
    module: str = ""


@dataclass(frozen=True, slots=True)
class Holder:
    """One path by which memory is held, and what makes it let go."""

    #: ``trainer.model.fc.weight``, ``Out[3][0]``, ``last exception: train() line 12: batch``.
    path: str
    root: RootKind
    fix: Fix
    held_bytes: DeviceBytes
    #: Number of variables of a failed function's frames that hold it, ``path`` being the innermost,
    #: and of these frames; 0 for a holder that is no exception.
    n_variables: int = 0
    n_frames: int = 0


@dataclass(frozen=True, slots=True)
class Cure:
    """Everything to cut at once so that memory is freed, and nothing that has a name of its own."""

    #: What to delete or release, each once; parts of the same list in an order that keeps indices.
    fixes: tuple[Fix, ...]
    #: True if the memory is in a reference cycle, which only the garbage collector frees.
    needs_collection: bool
    frees_bytes: DeviceBytes


@dataclass(frozen=True, slots=True)
class CutSearch:
    """A search for memory that ended before it had looked at all objects."""

    n_objects: int
    #: The seconds that it had; ``None`` where not time, but the limit on autograd nodes ended it.
    limit_s: float | None


@dataclass(frozen=True, slots=True)
class JointRelease:
    """Rows that have to be released together, to free memory that they share."""

    #: All rows, those that were asked about first: ``("x", "model", "Out[7]")``.
    names: tuple[str, ...]
    frees_bytes: DeviceBytes


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why some memory is still there."""

    #: The expression that was asked about: ``x``, ``model.layers[0].weight``; ``""`` for all
    #: memory that no variable leads to.
    name: str
    kind: str  #: ``tensor``, ``module``, …; the class's qualified name
    type_name: str
    held_bytes: DeviceBytes  #: all memory that it reaches, as the row of a variable counts it
    frees_bytes: DeviceBytes  #: the memory that is freed if the name alone is released
    #: Holders of what is not another name's, biggest first; paths that differ by an index are one.
    holders: tuple[Holder, ...]
    n_more: int = 0  #: paths beyond those shown
    is_complete: bool = True  #: false where the search ran out of time: other paths may hold it too
    #: How to free what is not another name's; ``None`` where no command would free most of it.
    cure: Cure | None = None
    #: Variables that the rest of the memory belongs to, biggest first.
    named_bytes: tuple[tuple[str, DeviceBytes], ...] = ()
    slices: Slices = Slices()
    cut: CutSearch | None = None  #: the search, if it ended early and found no memory
    #: What to release together with a variable that frees next to nothing alone.
    joint: JointRelease | None = None


@dataclass(frozen=True, slots=True)
class Variable:
    """A row of the variables panel: the memory of one name, of ``Out`` or the last exception."""

    name: str  #: the text that a user types or ticks: ``model``, ``Out[7]``, ``last exception``
    root: Literal["name", "out", "exception"]
    #: ``tensor``, ``view``, ``parameter``, ``module``, ``optimizer``, ``container``, ``object``.
    kind: str
    type_name: str
    shape: tuple[int, ...] | None
    dtype: str | None
    held_bytes: DeviceBytes  #: bytes of the distinct storages reached
    frees_bytes: DeviceBytes  #: the memory that is freed if exactly this row is released
    shared_with: tuple[str, ...] = ()  #: names of other rows that reach some of the same storages
    #: True where something that is not one of the rows holds part of it as well.
    held_elsewhere: bool = False
    #: True if the row is a module or an optimizer, or holds one, as a trainer does.
    holds_training_state: bool = False
    #: Rows to release together, where this row alone frees next to nothing.
    joint: JointRelease | None = None


#: For each block's address, on one device: what it is for, and the path that leads to it.
BlockNames = Mapping[int, tuple[MemoryKind, str]]
