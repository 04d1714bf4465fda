"""Describe what each variable holds and what releasing it would free: the variables panel."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from gpumemwidget.errors import UnknownNameError, forgets_frames
from gpumemwidget.model.ownership import DeviceBytes, Variable
from gpumemwidget.model.releases import ReleaseSum
from gpumemwidget.ownership.graph.kinds import Kind
from gpumemwidget.ownership.graph.objects import name_class, paused_collector
from gpumemwidget.ownership.holdings import ELSEWHERE, Account, Row, join_marks, take_account
from gpumemwidget.ownership.labels import find_kind_name
from gpumemwidget.ownership.partition import ReleasePartition, find_joint
from gpumemwidget.ownership.shell import Shell
from gpumemwidget.progress import Stage, report_progress

#: Seconds for a walk that fills the panel after a cell; a release may take longer.
LIST_BUDGET_S = 1.0


@forgets_frames
def list_variables(shell: Shell) -> tuple[Variable, ...]:
    """Return what variables, displayed values and the last exception hold, biggest first.

    By storage, each counted once in a row. ``held_bytes`` is what the row reaches; ``frees_bytes``
    what goes away if exactly this row is released, what would be moved to the CPU in place
    included, on CUDA rounded up to the allocator's 512 bytes. The latter errs on the side of too
    little: what something unknown holds as well is left out, and ``held_elsewhere`` is true.

    Returns:
        The rows that hold memory; ``()`` where torch is not imported.
    """
    deadline_s = time.perf_counter() + LIST_BUDGET_S
    with paused_collector():
        account = take_account(shell, budget_s=LIST_BUDGET_S, depth="rows")
        return () if account is None else describe_rows(account, deadline_s=deadline_s)


def describe_rows(account: Account, *, deadline_s: float = math.inf) -> tuple[Variable, ...]:
    """Return the rows of an account that hold memory, as ``list_variables`` gives them.

    Args:
        account: who holds what.
        deadline_s: on ``time.perf_counter``; from then on it is not found out what a release would
            move to the CPU, and rows of which that matters free what is said or more.
    """
    variables = []
    for number, row in enumerate(account.rows.values()):
        report_progress(Stage.DESCRIBE_ROWS, number, len(account.rows))
        if account.groups.find(row.mark):
            is_late = time.perf_counter() > deadline_s
            variables.append(_describe_row(account, row, is_late=is_late))
    return tuple(sorted(variables, key=lambda row: (-row.held_bytes.total_bytes, row.name)))


@forgets_frames
def sum_frees(shell: Shell, names: Sequence[str], *, budget_s: float) -> ReleaseSum:
    """Return what is freed if exactly these rows are released together.

    Args:
        shell: the running IPython.
        names: names of rows: ``"model"``, ``"Out[7]"``, ``"last exception"``.
        budget_s: seconds after which the search stops, and the sum is a lower bound.

    Raises:
        UnknownNameError: there is no such row.
    """
    account = take_account(shell, budget_s=budget_s)
    if account is None:
        return ReleaseSum(DeviceBytes())
    for name in names:
        if name not in account.rows:
            raise UnknownNameError(f"{name!r} holds nothing now: look at the variables again")
    frees_bytes = ReleasePartition(account, names).sum_frees()
    return ReleaseSum(frees_bytes, find_joint(account, names, frees_bytes))


def _describe_row(account: Account, row: Row, *, is_late: bool) -> Variable:
    graph = account.graph
    reached = join_marks(account.groups.find(row.mark))
    partition = ReleasePartition(account, [row.name])
    if is_late and partition.can_move:
        frees_bytes = replace(partition.sum_dying(), is_at_least=True)
    else:
        frees_bytes = partition.sum_frees()
    target = graph.objects[row.places[0]]
    cls = type(target)
    shape, dtype = None, None
    if graph.kinds[row.places[0]] is Kind.TENSOR and not graph.reader.is_dispatched(cls):
        with graph.reader.quiet():
            shape, dtype = graph.reader.read_shape(target)
    return Variable(
        name=row.name,
        root=row.root,
        kind=find_kind_name(graph, row.places[0]),
        type_name=name_class(cls),
        shape=shape,
        dtype=dtype,
        held_bytes=account.sum_held(row.mark),
        frees_bytes=frees_bytes,
        shared_with=account.name_holders(reached & ~row.mark),
        held_elsewhere=bool(reached & ELSEWHERE),
        holds_training_state=bool(row.mark & account.training_marks),
        joint=None if is_late else find_joint(account, [row.name], frees_bytes),
    )
