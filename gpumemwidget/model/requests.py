"""Requests of users, as frozen records that are checked when they are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpumemwidget.errors import BadInputError, name_type

#: Number of allocator events that a trace keeps by default: some 300 MB while it runs.
DEFAULT_EVENTS = 1_000_000
#: Maximum number of allocator events that a trace may keep.
MAX_EVENTS = 20_000_000


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    """A release that somebody asks for.

    Attributes:
        names: rows of the variables panel, each once: variables, ``"Out[7]"``,
            ``"last exception"``.
        keep: leave copies on the CPU under the names instead of setting them to ``None``.
        out: drop all displayed values too.
        exceptions: drop all that IPython holds of the last exception too.
        grads: set the gradients of all leaves that variables lead to to ``None``; goes without
            names.
        cublas: free cuBLAS's workspaces too.
        compile_caches: forget what ``torch.compile`` made too.
        may_move: whether tensors that something else holds too may be moved to the CPU in place;
            ``False`` refuses a release that would have to.

    Raises:
        BadInputError: nothing is named, a name is not text, or names stand beside ``grads``.
    """

    names: tuple[str, ...] = ()
    keep: bool = False
    out: bool = False
    exceptions: bool = False
    grads: bool = False
    cublas: bool = False
    compile_caches: bool = False
    may_move: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", check_names(self.names))
        has_flag = self.out or self.exceptions or self.grads or self.cublas or self.compile_caches
        if not (self.names or has_flag):
            raise BadInputError(
                "nothing to release: name the variables, or give --out, --exceptions, --grads, "
                "--cublas or --compile"
            )
        if self.names and self.grads:
            # A parameter that is moved to the CPU must not wait there with its gradient elsewhere.
            raise BadInputError(
                "--grads is about the gradients of all variables and goes without names: release "
                f"{self.names[0]} on its own; nothing was changed"
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
class TraceRequest:
    """A trace that somebody asks for, of a cell or of a ``with`` block.

    Attributes:
        device: the one device to trace and report; ``None`` for all.
        n_events: maximum number of allocator events to keep, the newest.
        n_lines: lines of each source that the report shows; ``None`` for its default.
        depth: how many calls deep a line opens; ``None`` for all that are big enough.
        snapshot: a file to write for PyTorch's own memory viewer.
        export: a file to write the trace itself to.
        force: whether these files may take the places of others.
        live: whether a chart is shown while the cell runs.

    Raises:
        BadInputError: a count is out of range, or ``force`` is given without a file.
    """

    device: str | None = None
    n_events: int = DEFAULT_EVENTS
    n_lines: int | None = None
    depth: int | None = None
    snapshot: Path | None = None
    export: Path | None = None
    force: bool = False
    live: bool = True

    def __post_init__(self) -> None:
        if not (isinstance(self.n_events, int) and 1 <= self.n_events <= MAX_EVENTS):
            raise BadInputError(f"{self.n_events!r} events can't be kept: give 1 to {MAX_EVENTS}")
        if self.depth is not None and not (isinstance(self.depth, int) and self.depth >= 0):
            raise BadInputError(f"{self.depth!r} is no depth: give 0 or a whole number above it")
        if self.force and self.snapshot is None and self.export is None:
            raise BadInputError("--force goes with --export FILE or --snapshot FILE: name the file")
