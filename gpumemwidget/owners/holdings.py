"""What each of the user's names holds and what would go away with it: the variables panel."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from gpumemwidget.errors import UnknownNameError, forgets_frames
from gpumemwidget.owners.account import ELSEWHERE, Account, Row, take_account
from gpumemwidget.owners.base import Shell
from gpumemwidget.owners.collector import paused_collector
from gpumemwidget.owners.kinds import Kind, name_class
from gpumemwidget.owners.naming import find_kind_name
from gpumemwidget.owners.sorting import Sorting
from gpumemwidget.records import Holding

__all__ = ["describe_rows", "list_holdings", "sum_frees"]

#: The panel is filled after every cell, so its walk may not take long; a release may.
LIST_BUDGET_S = 1.0


@forgets_frames
def list_holdings(shell: Shell) -> tuple[Holding, ...]:
    """What the user's names, displayed values and the last exception hold, biggest first.

    By storage, each counted once in a row. ``held_bytes`` is what the row reaches; ``frees_bytes``
    what goes away if exactly this row is released, what would be moved to the CPU in place
    included, on CUDA rounded up to the allocator's 512 bytes. The latter errs on the side of too
    little: what something unknown holds as well is left out, and ``held_elsewhere`` is true.

    Args:
        shell: the running IPython.

    Returns:
        The rows that hold memory; ``()`` where torch is not imported.
    """
    deadline_s = time.perf_counter() + LIST_BUDGET_S
    with paused_collector():
        account = take_account(shell, budget_s=LIST_BUDGET_S, scope="names")
        return () if account is None else describe_rows(account, deadline_s=deadline_s)


def describe_rows(account: Account, *, deadline_s: float = math.inf) -> tuple[Holding, ...]:
    """The rows of an account that hold memory, as ``list_holdings`` gives them.

    Args:
        account: who holds what.
        deadline_s: on ``time.perf_counter``; from then on it is not found out what a release would
            move to the CPU, and rows of which that matters free what is said or more.
    """
    holdings = [
        _describe_row(account, row, is_late=time.perf_counter() > deadline_s)
        for row in account.rows.values()
        if account.groups.find(row.mark)
    ]
    return tuple(
        sorted(holdings, key=lambda row: (-sum(each[1] for each in row.held_bytes), row.name))
    )


@forgets_frames
def sum_frees(shell: Shell, names: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """What goes away if exactly these rows are released together, for each device.

    Args:
        shell: the running IPython.
        names: names of rows: ``"model"``, ``"Out[7]"``, ``"last exception"``.

    Raises:
        UnknownNameError: there is no such row.
    """
    account = take_account(shell, budget_s=LIST_BUDGET_S)
    if account is None:
        return ()
    for name in names:
        if name not in account.rows:
            raise UnknownNameError(f"{name!r} holds nothing now: look at the variables again")
    return Sorting(account, names).sum_frees()


def _describe_row(account: Account, row: Row, *, is_late: bool) -> Holding:
    graph = account.graph
    reached = 0
    for carried in account.groups.find(row.mark):
        reached |= carried
    held_bytes = account.sum_held(row.mark)
    sorting = Sorting(account, [row.name])
    is_cut = is_late and sorting.can_move
    target = graph.objects[row.places[0]]
    cls = type(target)
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    if graph.kinds[row.places[0]] is Kind.TENSOR and not graph.reader.is_dispatched(cls):
        with graph.reader.quiet():
            shape, dtype = graph.reader.read_shape(target)
    return Holding(
        name=row.name,
        root=row.root,
        kind=find_kind_name(graph, row.places[0]),
        type_name=name_class(cls),
        shape=shape,
        dtype=dtype,
        held_bytes=held_bytes,
        frees_bytes=sorting.sum_dying() if is_cut else sorting.sum_frees(),
        shared_with=account.name_holders(reached & ~row.mark),
        held_elsewhere=bool(reached & ELSEWHERE),
        is_at_least=is_cut or not graph.is_complete,
    )
