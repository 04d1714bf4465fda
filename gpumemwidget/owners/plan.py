"""Draws up a release: what will go, what is moved, what remains and why. Changes nothing.

The plan that a person sees is strings and numbers alone, so that holding on to it holds no memory.
The draft behind it, with the objects themselves, lives only while a release is being carried out.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import BadInputError, forgets_frames
from gpumemwidget.owners.account import Account, take_account
from gpumemwidget.owners.base import LAST_EXCEPTION, Shell
from gpumemwidget.owners.busy import find_capture, find_user
from gpumemwidget.owners.caches import describe_costs
from gpumemwidget.owners.checks import check_functions, check_names, check_types
from gpumemwidget.owners.cycles import find_cycles
from gpumemwidget.owners.grads import Gradients, find_gradients
from gpumemwidget.owners.moves import Move
from gpumemwidget.owners.sorting import GRADS, Sorting
from gpumemwidget.records import IPythonReference, ReleaseMove, ReleasePlan
from gpumemwidget.units import format_bytes

__all__ = ["Draft", "draw_up", "plan_release"]

#: A release may take its time to look: what the walk misses, it would not free.
RELEASE_BUDGET_S = 10.0

#: What a plan is before anything is known.
_NOTHING = ReleasePlan(
    names=(),
    keep=False,
    moves=(),
    drops=(),
    frees_bytes=(),
    host_needed_bytes=0,
    host_available_bytes=None,
)


@dataclass(slots=True)
class Draft:
    """A plan with the objects behind it. Let go of it before memory is to be freed."""

    account: Account | None
    #: The names to be set to ``None``, and the ids of what they are bound to.
    user_names: tuple[str, ...]
    ids: frozenset[int]
    #: Rows of displayed values that were named one by one.
    out_rows: tuple[str, ...]
    #: The storages of each move, in the order of ``plan.moves``.
    moves: list[list[Move]] = field(default_factory=list)
    #: Which of these are carried out as one, all or none.
    units: list[list[int]] = field(default_factory=list)
    #: The storages that will go without being moved.
    dying: list[int] = field(default_factory=list)
    #: What goes with each step, by the step's name.
    planned: dict[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    #: Tensors among them that hold themselves; weak.
    cycles: list[weakref.ref[Any]] = field(default_factory=list)
    #: The leaves whose gradients are set to ``None``; weak.
    grad_owners: list[weakref.ref[Any]] = field(default_factory=list)
    plan: ReleasePlan = _NOTHING


@forgets_frames
def plan_release(
    shell: Shell,
    hardware: Hardware,
    names: Sequence[str],
    *,
    keep: bool = False,
    out: bool = False,
    exceptions: bool = False,
    cublas: bool = False,
    compile_caches: bool = False,
    grads: bool = False,
) -> ReleasePlan:
    """What releasing these rows would do; nothing is changed.

    Args:
        shell: the running IPython.
        hardware: where host memory is asked for.
        names: rows: variables, ``"Out[7]"``, ``"last exception"``.
        keep: leave CPU copies under the names instead of setting them to ``None``.
        out: drop all displayed values too.
        exceptions: drop all that is held of the last exception too.
        cublas: free cuBLAS's workspaces too.
        compile_caches: forget what ``torch.compile`` made too.
        grads: set to ``None`` the gradients of all leaves that the user's names lead to; goes
            without names.

    Raises:
        UnknownNameError: there is no such row.
        BadInputError: nothing was named, or something that is not the user's memory.
    """
    return draw_up(
        shell,
        hardware,
        names,
        keep=keep,
        out=out,
        exceptions=exceptions,
        cublas=cublas,
        compile_caches=compile_caches,
        grads=grads,
    ).plan


def draw_up(
    shell: Shell,
    hardware: Hardware,
    names: Sequence[str],
    *,
    keep: bool,
    out: bool,
    exceptions: bool,
    cublas: bool = False,
    compile_caches: bool = False,
    grads: bool = False,
) -> Draft:
    """The plan as ``plan_release`` gives it, with the objects that it is about."""
    check_types(names)
    names = tuple(dict.fromkeys(names))
    if not (names or out or exceptions or cublas or compile_caches or grads):
        raise BadInputError(
            "nothing to release: name the variables, or give --out, --exceptions, --grads, "
            "--cublas or --compile"
        )
    if names and grads:
        # A parameter that is moved to the CPU must not wait there with its gradient elsewhere.
        raise BadInputError(
            "--grads is about the gradients of all variables and goes without names: release "
            f"{names[0]} on its own; nothing was changed"
        )
    ipython_rows = {reference.row: reference.root for reference in shell.list_references()}
    user_names = tuple(name for name in names if name not in ipython_rows)
    check_names(shell, user_names, rows=ipython_rows)
    refusal = find_capture()
    account = None if refusal else take_account(shell, budget_s=RELEASE_BUDGET_S)
    if not refusal:
        check_functions(shell, user_names, account)

    out_rows = () if keep else tuple(name for name in names if ipython_rows.get(name) == "out")
    exceptions = exceptions or (LAST_EXCEPTION in names and not keep)
    # What holds nothing is one object for all who mention it: 5, True, ().
    ids = frozenset(
        id(shell.user_ns[name])
        for name in user_names
        if not keep and (gc.is_tracked(held := shell.user_ns[name]) or gc.get_referents(held))
    )
    drops = tuple(
        IPythonReference(path=reference.path)
        for reference in shell.list_references()
        if (reference.root == "out" and (out or id(reference.target) in ids))
        or reference.row in out_rows
        or (reference.root == "exception" and exceptions)
    )
    draft = Draft(account=account, user_names=user_names, ids=ids, out_rows=out_rows)
    moves: tuple[ReleaseMove, ...] = ()
    remains: list[str] = []
    if account is not None:
        gradients = find_gradients(account) if grads else None
        refusal = find_user(shell, account, _list_used(account, names, gradients))
        if gradients is not None:
            draft.grad_owners = gradients.watch(account)
            account.replace_marks(gradients.marks)
            remains.extend(gradients.remains)
        sorting = Sorting(account, names, keep=keep, out=out, exceptions=exceptions)
        draft.dying = sorting.dying
        draft.planned = sorting.sum_steps()
        if gradients is not None:
            draft.dying.extend(gradients.dying)
            draft.planned[GRADS] = account.sum_places(gradients.dying)
        draft.cycles = find_cycles(account, sorting.dropped)
        draft.moves = list(sorting.moved.values())
        number_of = {group: number for number, group in enumerate(sorting.moved)}
        draft.units = [[number_of[group] for group in unit] for unit in sorting.units]
        moves = sorting.describe_moves()
        remains += sorting.describe_stays()
        if not account.graph.is_complete:
            remains.append(
                "There is too much to look at all of it: what this frees is at least what is said"
            )
    moved = [move.place for group in draft.moves for move in group]
    held = () if account is None else account.sum_places(moved, rounded=False)
    needed = sum(n_bytes for _, n_bytes in held)
    available = hardware.available_host_bytes()
    draft.plan = ReleasePlan(
        names=names,
        keep=keep,
        moves=moves,
        drops=drops,
        frees_bytes=() if account is None else account.sum_places([*draft.dying, *moved]),
        host_needed_bytes=needed,
        host_available_bytes=available,
        refusal=refusal or _find_refusal(needed, available),
        remains=(*remains, *_describe_empty(shell, draft, keep=keep)),
        out=out,
        exceptions=exceptions,
        cublas=cublas,
        compile_caches=compile_caches,
        costs=describe_costs(cublas=cublas, compile_caches=compile_caches),
        grads=grads,
        n_grads=len(draft.grad_owners),
    )
    return draft


def _list_used(
    account: Account, names: Sequence[str], gradients: Gradients | None
) -> tuple[str, ...]:
    """The rows that no other thread may be using: those named, and those with gradients."""
    marks = 0
    for place in () if gradients is None else gradients.owners:
        marks |= account.marks[place]
    return (*names, *account.name_holders(marks))


def _describe_empty(shell: Shell, draft: Draft, *, keep: bool) -> list[str]:
    """A sentence on each name that holds nothing."""
    account = draft.account
    found = []
    for name in draft.user_names:
        row = None if account is None else account.rows.get(name)
        if account is not None and row is not None and account.list_storages(row.mark):
            continue
        if shell.user_ns[name] is None:
            found.append(f"{name} is None already")
        elif keep:
            found.append(f"{name} holds no tensor memory")
        else:
            found.append(f"{name} holds no tensor memory; it is set to None all the same")
    return found


def _find_refusal(needed: int, available: int | None) -> str | None:
    if available is None or needed <= available:
        return None
    return (
        f"the move to the CPU needs {format_bytes(needed)} of host memory and "
        f"{format_bytes(available)} is available: release fewer names, or what also holds them; "
        "nothing was changed"
    )
