"""Random object graphs: the account adds up, and what it says goes is what goes.

The proof is by brute force: the chosen rows are removed really, and torch's own weak references
tell which storages are gone then.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumemwidget.errors import BadInputError
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ownership import MemoryAccount, Owned
from gpumemwidget.ownership.account import take_memory_account, take_running_account
from gpumemwidget.ownership.why import explain
from gpumemwidget.report.release import list_commands
from tests.ownership.graphs import LIBRARY, Action, World
from tests.ownership.notebook import Notebook

_numbers = st.integers(0, 40)
_actions = st.lists(
    st.tuples(st.sampled_from(World.list_actions()), _numbers, _numbers), min_size=1, max_size=30
)
#: Each takes a second: fewer are tried than elsewhere.
_settings = settings(max_examples=settings().max_examples // 8)
pytestmark = pytest.mark.usefixtures("capsys")


@pytest.fixture(autouse=True)
def _no_library() -> Iterator[None]:
    yield
    sys.modules.pop(LIBRARY, None)


def _build(notebook: Notebook, actions: list[Action]) -> World:
    world = World(notebook)
    world.run(actions)
    gc.collect()
    return world


def _take(notebook: Notebook) -> MemoryAccount:
    account = take_memory_account(notebook.shell, notebook.hardware)
    assert account.is_complete
    return account


def _list_owned(account: MemoryAccount) -> list[Owned]:
    """The storages on the host."""
    (host,) = [each for each in account.devices if each.device == HOST]
    return [each for each in host.owned if each.kind != "other"]


def _choose(rows: list[str], which: list[int]) -> list[str]:
    return list(dict.fromkeys(rows[number % len(rows)] for number in which)) if rows else []


def _remove(notebook: Notebook, name: str, root: str) -> None:
    """Remove a row really."""
    if root == "name":
        del notebook.ip.user_ns[name]
    else:
        notebook.drop(name)


@_settings
@given(_actions)
def test_every_storage_is_in_the_account_once(notebook: Notebook, actions: list[Action]) -> None:
    """As many lines of each size as there are living storages of that size."""
    world = _build(notebook, actions)

    account = _take(notebook)

    living = Counter(
        n_bytes for reference, n_bytes in world.tracker.watched if not reference.expired()
    )
    listed = Counter(each.n_bytes for each in _list_owned(account) if each.n_bytes in living)
    # Scalars are as big as others of the process.
    odd = {n_bytes for n_bytes in living if n_bytes >= 4_000}
    assert {n: listed[n] for n in odd} == {n: living[n] for n in odd}


@_settings
@given(_actions)
def test_the_account_adds_up(notebook: Notebook, actions: list[Action]) -> None:
    """To what malloc has handed out; each line has a path, and rows that hold it."""
    _build(notebook, actions)

    account = _take(notebook)

    for device in account.devices:
        assert device.allocated_bytes is None or device.allocated_bytes == sum(
            each.n_bytes for each in device.owned
        )
    rows = {variable.name for variable in account.variables}
    for each in _list_owned(account):
        assert each.owner
        assert set(each.rows) <= rows
        if each.root in {"name", "out", "exception"}:
            assert each.steps[0] == each.rows[0]


@_settings
@given(_actions)
def test_a_running_cell_is_told_the_same(notebook: Notebook, actions: list[Action]) -> None:
    """What names lead to has the same lines, with as many bytes in all."""
    _build(notebook, actions)

    account = _take(notebook)
    running = take_running_account(notebook.shell, notebook.hardware, HOST, budget_s=30.0)

    assert _list_named(running) == _list_named(account)
    (device,) = running.devices
    # While a cell runs, a heap in many pieces is not counted: it would take too long.
    assert device.allocated_bytes in (None, sum(each.n_bytes for each in device.owned))


def _list_named(account: MemoryAccount) -> Counter[tuple[str, str, int]]:
    roots = ("name", "out", "exception")
    lines = [each for each in _list_owned(account) if each.root in roots]
    return Counter((each.owner, each.kind, each.n_bytes) for each in lines)


@_settings
@given(_actions, st.lists(_numbers, min_size=1, max_size=4))
def test_what_only_some_rows_hold_goes_with_them(
    notebook: Notebook, actions: list[Action], which: list[int]
) -> None:
    """The lines that list these rows and nothing else, in bytes, are what their removal frees."""
    world = _build(notebook, actions)
    account = _take(notebook)
    chosen = _choose([variable.name for variable in account.variables], which)
    roots = {variable.name: variable.root for variable in account.variables}
    before = world.tracker.count_bytes()

    for name in chosen:
        _remove(notebook, name, roots[name])
    gc.collect()

    freed = before - world.tracker.count_bytes()
    only = [
        each
        for each in _list_owned(account)
        if each.rows and set(each.rows) <= set(chosen) and not each.held_elsewhere
    ]
    assert sum(each.n_bytes for each in only) == freed


@_settings
@given(_actions, _numbers)
def test_who_else_holds_it_is_named_and_nobody_else(
    notebook: Notebook, actions: list[Action], which: int
) -> None:
    """Where nobody else is named all of it goes with the row, else some of it stays."""
    world = _build(notebook, actions)
    account = _take(notebook)
    names = [variable.name for variable in account.variables if variable.root == "name"]
    if not names:
        return
    name = names[which % len(names)]
    held = sum(each.n_bytes for each in _list_owned(account) if name in each.rows)
    before = world.tracker.count_bytes()

    explanation = explain(notebook.shell, name)
    _remove(notebook, name, "name")
    gc.collect()

    freed = before - world.tracker.count_bytes()
    others = [holder for holder in explanation.holders if holder.path != name]
    assert explanation.is_complete
    if others or explanation.named_bytes:
        assert freed < held
    else:
        assert freed >= dict(explanation.held_bytes.by_device).get(HOST, 0)


@_settings
@given(_actions, _numbers)
def test_what_is_recommended_frees_what_it_promises(
    notebook: Notebook, actions: list[Action], which: int
) -> None:
    """Of any variable or part of one: the commands go through, and free just as much."""
    world = _build(notebook, actions)
    paths = [each.owner for each in _list_owned(_take(notebook)) if each.root == "name"]
    paths += notebook.list_rows()
    if not paths:
        return
    try:
        explanation = explain(notebook.shell, paths[which % len(paths)])
    except BadInputError:
        # A path with a step that says what holds it, and is not typed.
        return
    before = world.tracker.count_bytes()

    if explanation.cure is not None:
        notebook.follow(explanation.cure)

    freed = before - world.tracker.count_bytes()
    commands = [] if explanation.cure is None else list_commands(explanation.cure)
    promised = explanation.cure.frees_bytes.on(HOST) if explanation.cure and commands else 0
    assert freed == promised, f"{explanation.name}: {commands}"


@_settings
@given(_actions, st.lists(_numbers, min_size=1, max_size=4), st.booleans())
def test_what_the_plan_frees_is_what_goes(
    notebook: Notebook, actions: list[Action], which: list[int], out: bool
) -> None:
    """The bytes of the storages that expire are those of the plan, no more and no fewer."""
    world = _build(notebook, actions)
    chosen = _choose(list(notebook.list_rows()), which)
    if not chosen:
        return
    before = world.tracker.count_bytes()

    plan = notebook.plan(*chosen, out=out)
    single = {name: row.frees_bytes for name, row in notebook.list_rows().items()}
    report = notebook.release(*chosen, out=out)

    freed = before - world.tracker.count_bytes()
    assert report.stopped is None
    assert dict(plan.frees_bytes.by_device).get(HOST, 0) == freed
    if len(chosen) == 1 and not out:
        assert single[chosen[0]] == plan.frees_bytes
