"""Plan a release: what is freed, what is moved, what remains and why; or refuse it.

Nothing is changed. The plan that a person sees is strings and numbers alone, so that holding on to
it holds no memory. The objects themselves are held only while a release is being carried out.

Refused are wrong names, and two users of memory that no cell shows: a CUDA graph that is being
captured, which any call that synchronises or frees would break; and another thread that computes
with the chosen objects. A cell on the main thread is waited for elsewhere.
"""

from __future__ import annotations

import builtins
import difflib
import gc
import re
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import BadInputError, UnknownNameError, forgets_frames
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ownership import DeviceBytes
from gpumemwidget.model.releases import (
    ReleasePlan,
    ReleaseRequest,
    Stop,
    StopKind,
)
from gpumemwidget.ownership.account import read_blocks
from gpumemwidget.ownership.graph.kinds import Kind
from gpumemwidget.ownership.graph.objects import (
    is_one_of,
    iterate_frames,
    list_referents,
    read_attributes,
    read_locals,
)
from gpumemwidget.ownership.graph.torch_reader import find_torch
from gpumemwidget.ownership.holdings import Holdings, join_marks, take_holdings
from gpumemwidget.ownership.partition import ReleasePartition
from gpumemwidget.ownership.shell import LAST_EXCEPTION, Shell, ShellReference

#: Seconds for the walk: memory that it misses would not be freed.
RELEASE_BUDGET_S = 10.0


@dataclass(slots=True)
class ReleaseTargets:
    """The objects that a release is about, from its plan to its end."""

    #: The names that are variables, and the ids of the objects to be dropped.
    user_names: tuple[str, ...]
    ids: frozenset[int]
    #: Rows of displayed values that were named one by one.
    out_rows: tuple[str, ...]
    #: The walk, with the user's objects, and what goes, is moved and stays of its storages; let go
    #: of them before memory is to be freed.
    partition: ReleasePartition | None = None
    #: Tensors among what goes that hold themselves by gradients or attributes; weak.
    cycles: list[weakref.ref[Any]] = field(default_factory=list)

    def let_go(self) -> None:
        """Hold none of the user's objects any more."""
        self.partition = None


@forgets_frames
def plan_release(shell: Shell, hardware: Hardware, request: ReleaseRequest) -> ReleasePlan:
    """Return what a release would do; nothing is changed.

    Raises:
        UnknownNameError: there is no such row.
        BadInputError: a name is not of the user's memory.
    """
    return draw_up(shell, hardware, request)[1]


def draw_up(
    shell: Shell, hardware: Hardware, request: ReleaseRequest
) -> tuple[ReleaseTargets, ReleasePlan]:
    """Return the objects that a release is about, and its plan; see ``plan_release``."""
    names, keep = request.names, request.keep
    ipython_rows = {reference.row: reference.root for reference in shell.list_references()}
    user_names = tuple(name for name in names if name not in ipython_rows)
    check_bound(shell, user_names, rows=ipython_rows)
    refusal = find_capture()
    holdings: Holdings | None = None
    if not refusal:
        blocks = read_blocks(shell, hardware)
        holdings = take_holdings(shell, budget_s=RELEASE_BUDGET_S, blocks=blocks)
        check_functions(shell, user_names, holdings)

    out_rows = () if keep else tuple(name for name in names if ipython_rows.get(name) == "out")
    if LAST_EXCEPTION in names and not keep:
        request = replace(request, exceptions=True)
    # Objects that hold nothing are shared by all who mention them: 5, True, ().
    ids = frozenset(
        id(shell.user_ns[name])
        for name in user_names
        if not keep and (gc.is_tracked(held := shell.user_ns[name]) or list_referents(held))
    )
    targets = ReleaseTargets(user_names, ids, out_rows)
    plan = ReleasePlan(
        request=request,
        moves=(),
        drops=tuple(reference.path for reference in find_references(shell, request, targets)),
        frees_bytes=DeviceBytes(),
        host_needed_bytes=DeviceBytes(),
        host_available_bytes=hardware.available_host_bytes(),
        refusal=refusal,
        empty_names=tuple(name for name in user_names if not holds_memory(holdings, name)),
        caches=hardware.list_caches() if request.libraries else (),
    )
    if holdings is not None:
        plan = _plan_memory(plan, targets, holdings)
        plan = replace(plan, refusal=find_user(shell, holdings, names) or plan.refusal)
    return targets, plan


def _plan_memory(plan: ReleasePlan, targets: ReleaseTargets, holdings: Holdings) -> ReleasePlan:
    """Return the plan with what it frees, moves and leaves; ``targets`` get the storages."""
    request = plan.request
    partition = ReleasePartition(
        holdings,
        request.names,
        keep=request.keep,
        out=request.out,
        exceptions=request.exceptions,
    )
    targets.partition = partition
    targets.cycles = _find_cycles(holdings, partition.dropped)
    moved = partition.list_moved()
    needed = DeviceBytes()
    if moved:
        copied = holdings.sum_places(moved, rounded=False)
        needed = replace(copied, by_device=((HOST, copied.total_bytes),))
    available = plan.host_available_bytes
    refusal = None
    if available is not None and needed.total_bytes > available:
        refusal = Stop(StopKind.HOST_MEMORY, needs_bytes=needed, available_bytes=available)
    return replace(
        plan,
        moves=partition.describe_moves(),
        frees_bytes=holdings.sum_places(partition.list_going(), dropped=partition.dropped),
        collects_bytes=holdings.sum_places(holdings.list_rubbish()),
        host_needed_bytes=needed,
        refusal=refusal,
        stays=partition.list_stays(),
        cut=holdings.graph.find_cut(),
        joint=partition.find_joint(),
    )


def find_references(
    shell: Shell, request: ReleaseRequest, targets: ReleaseTargets
) -> list[ShellReference]:
    """Return the references of IPython's that a release drops."""
    return [
        reference
        for reference in shell.list_references()
        if (reference.root == "out" and (request.out or id(reference.target) in targets.ids))
        or reference.row in targets.out_rows
        or (reference.root == "exception" and request.exceptions)
    ]


def _find_cycles(holdings: Holdings, dropped: int) -> list[weakref.ref[Any]]:
    """Return tensors that only what is dropped holds (marks), or nothing, and that hold themselves.

    A gradient with a graph (``backward(create_graph=True)``) and its parameter hold each other in
    C++ (https://github.com/pytorch/pytorch/issues/71068), and so do a tensor and a view or result
    of it that is one of its attributes: the garbage collector sees no cycle there.
    """
    graph, marks = holdings.graph, holdings.marks
    if not graph.is_complete:
        # A holder that was not met may still use them.
        return []
    cycles: list[weakref.ref[Any]] = []
    # No mark runs to what leads to no memory, a tensor on ``meta`` say: who holds it is not known.
    leads = graph.flag_reaching_memory()
    with graph.reader.quiet():
        for place, kind in enumerate(graph.kinds):
            if kind is not Kind.TENSOR or not leads[place] or marks[place] & ~dropped:
                continue
            tensor = graph.objects[place]
            is_cut = bool(read_attributes(tensor)) and place in graph.reach(graph.edges[place])
            if not is_cut and not graph.grads.isdisjoint(graph.edges[place]):
                parts = graph.reader.read_tensor(tensor)
                has_grad = parts.grad is not None and not parts.is_computed
                is_cut = has_grad and graph.reader.read_tensor(parts.grad).is_computed
            if is_cut:
                cycles.append(weakref.ref(tensor))
    return cycles


# -- Refusals --------------------------------------------------------------------------------------

_UNCHANGED = "nothing was changed"


def check_bound(shell: Shell, names: Sequence[str], *, rows: Mapping[str, str]) -> None:
    """Refuse what is no variable of the user's.

    Raises:
        UnknownNameError: there is no such name; close ones are named.
        BadInputError: it is IPython's, Python's or a module.
    """
    known = shell.list_user_names()
    for name in names:
        if name in known:
            continue
        if name in shell.user_ns or hasattr(builtins, name):
            raise BadInputError(
                f"{name!r} is a module, a builtin or IPython's own: name variables, or rows such "
                f"as Out[3]; {_UNCHANGED}"
            )
        if find_part(shell, [name]):
            raise BadInputError(
                f"{name!r} is a part of a variable, and only whole variables can be released: "
                f"%memwhy {name} names what frees it; {_UNCHANGED}"
            )
        close = difflib.get_close_matches(name, [*known, *rows], n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else shell.names_hint
        raise UnknownNameError(f"{name!r} is not a variable: {hint}; {_UNCHANGED}")


def find_part(shell: Shell, names: Sequence[str]) -> str | None:
    """Return the first of these names that is a path to a part of a variable, if any is one."""
    known = shell.list_user_names()
    # A variable, and the begin of a way to a part of it.
    begin = r"([^\W\d]\w*)[.\[]"
    parts = ((name, re.match(begin, name)) for name in names if name not in known)
    return next((name for name, part in parts if part is not None and part[1] in known), None)


def holds_memory(holdings: Holdings | None, name: str) -> bool:
    """Return whether a variable was seen to lead to tensor memory."""
    row = None if holdings is None else holdings.rows.get(name)
    return holdings is not None and row is not None and bool(holdings.list_storages(row.mark))


def check_functions(shell: Shell, names: Sequence[str], holdings: Holdings | None) -> None:
    """Refuse functions and classes, unless they hold memory (in a closure, a cache).

    Raises:
        BadInputError: it is a function or class that holds none.
    """
    for name in names:
        code_types = (FunctionType, BuiltinFunctionType, MethodType, type)
        is_code = is_one_of(type(shell.user_ns[name]), *code_types)
        if is_code and not holds_memory(holdings, name):
            is_cut = holdings is not None and not holdings.graph.is_complete
            found = "was not seen to hold" if is_cut else "holds no"
            raise BadInputError(
                f"{name!r} is a function or a class and {found} tensor memory: name variables; "
                f"{_UNCHANGED}"
            )


def find_capture() -> Stop | None:
    """Return that a CUDA graph is being captured; ``None`` where none is.

    Torch knows it of the current stream of this thread. Captures on others are found by the streams
    that ``torch.cuda.graph`` takes for them.
    """
    torch: Any = find_torch()
    if torch is None or not torch.cuda.is_initialized() or not _is_capturing(torch):
        return None
    return Stop(StopKind.CAPTURE)


def _is_capturing(torch: Any) -> bool:
    cuda = torch.cuda
    # To ask for a device that is not in use, as the current one may be, would start it.
    has_context = torch._C._cuda_hasPrimaryContext(cuda.current_device())  # noqa: SLF001 - no public call asks without creating one
    if has_context and cuda.is_current_stream_capturing():
        return True
    if threading.active_count() == 1:
        return False
    captures = [capture for capture in gc.get_objects() if type(capture) is cuda.graph]
    streams = [vars(capture).get("capture_stream") for capture in captures]
    streams.append(vars(cuda.graph).get("default_capture_stream"))
    for stream in {id(stream): stream for stream in streams if stream is not None}.values():
        # The device first: else what was current before would be set anew, and so started.
        with cuda.device(stream.device), cuda.stream(stream):
            if cuda.is_current_stream_capturing():
                return True
    return False


def find_user(shell: Shell, holdings: Holdings, names: Sequence[str]) -> Stop | None:
    """Return which other thread uses what these rows hold; ``None`` if none does.

    A thread uses it if one of its running functions has one of the tensors, modules or optimizers
    in a variable, or mentions one of the names.
    """
    graph, reader = holdings.graph, holdings.graph.reader
    rows = [holdings.rows[name] for name in names if name in holdings.rows]
    marks = join_marks(row.mark for row in rows)
    chosen = {
        id(graph.objects[place])
        for place, kind in enumerate(graph.kinds)
        if holdings.marks[place] & marks
        and (
            kind is Kind.TENSOR
            or is_one_of(type(graph.objects[place]), reader.module_type, reader.optimizer_type)
        )
    }
    words = {row.name for row in rows if row.root == "name"}
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    for ident, frame in iterate_frames():
        code = frame.f_code
        is_named = frame.f_globals is shell.user_ns and not words.isdisjoint(code.co_names)
        if ident != own and (
            is_named or any(id(value) in chosen for value in read_locals(frame).values())
        ):
            return Stop(
                StopKind.THREAD,
                thread=threads.get(ident, str(ident)),
                function=code.co_name,
                line=frame.f_lineno,
            )
    return None
