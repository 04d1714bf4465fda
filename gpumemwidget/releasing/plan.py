"""Plan a release: what is freed, what is moved, what remains and why. Changes nothing.

The plan that a person sees is strings and numbers alone, so that holding on to it holds no memory.
The objects themselves are held only while a release is being carried out.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import forgets_frames
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
from gpumemwidget.ownership.graph.objects import list_referents, read_attributes
from gpumemwidget.ownership.holdings import Account, take_account
from gpumemwidget.ownership.partition import ReleasePartition
from gpumemwidget.ownership.shell import LAST_EXCEPTION, Shell, ShellReference
from gpumemwidget.releasing.refusals import (
    check_bound,
    check_functions,
    find_capture,
    find_user,
    holds_memory,
)

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
    account: Account | None = None
    if not refusal:
        blocks = read_blocks(shell, hardware)
        account = take_account(shell, budget_s=RELEASE_BUDGET_S, blocks=blocks)
        check_functions(shell, user_names, account)

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
        empty_names=tuple(name for name in user_names if not holds_memory(account, name)),
        caches=hardware.list_caches() if request.libraries else (),
    )
    if account is not None:
        plan = _plan_memory(plan, targets, account)
        plan = replace(plan, refusal=find_user(shell, account, names) or plan.refusal)
    return targets, plan


def _plan_memory(plan: ReleasePlan, targets: ReleaseTargets, account: Account) -> ReleasePlan:
    """Return the plan with what it frees, moves and leaves; ``targets`` get the storages."""
    request = plan.request
    partition = ReleasePartition(
        account,
        request.names,
        keep=request.keep,
        out=request.out,
        exceptions=request.exceptions,
    )
    targets.partition = partition
    targets.cycles = _find_cycles(account, partition.dropped)
    moved = partition.list_moved()
    needed = DeviceBytes()
    if moved:
        copied = account.sum_places(moved, rounded=False)
        needed = replace(copied, by_device=((HOST, copied.total_bytes),))
    available = plan.host_available_bytes
    refusal = None
    if available is not None and needed.total_bytes > available:
        refusal = Stop(StopKind.HOST_MEMORY, needs_bytes=needed, available_bytes=available)
    return replace(
        plan,
        moves=partition.describe_moves(),
        frees_bytes=account.sum_places(partition.list_going(), dropped=partition.dropped),
        collects_bytes=account.sum_places(account.list_rubbish()),
        host_needed_bytes=needed,
        refusal=refusal,
        stays=partition.list_stays(),
        cut=account.graph.find_cut(),
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


def _find_cycles(account: Account, dropped: int) -> list[weakref.ref[Any]]:
    """Return tensors that only what is dropped holds (marks), or nothing, and that hold themselves.

    A gradient with a graph (``backward(create_graph=True)``) and its parameter hold each other in
    C++ (https://github.com/pytorch/pytorch/issues/71068), and so do a tensor and a view or result
    of it that is one of its attributes: the garbage collector sees no cycle there.
    """
    graph, marks = account.graph, account.marks
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
