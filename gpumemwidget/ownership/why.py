"""Explain what holds some memory, as paths that a person can act on.

What was asked about reaches some storages. Whatever leads into that part of the graph from outside
of it holds them as well, and is named by its own best path. Paths that differ in an index alone are
told as one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import BadInputError, UnknownNameError, forgets_frames
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ownership import DeviceBytes, Explanation, Holder, Owned, RootKind
from gpumemwidget.ownership.account import FULL_BUDGET_S, UNNAMED_ROOTS, take_memory_account
from gpumemwidget.ownership.graph.kinds import Kind
from gpumemwidget.ownership.graph.objects import name_class, paused_collector
from gpumemwidget.ownership.graph.walk import flag_reaching
from gpumemwidget.ownership.holdings import Account, add_up, take_account
from gpumemwidget.ownership.labels import (
    LENDER,
    UNSEEN,
    PathStep,
    StepKind,
    find_kind_name,
)
from gpumemwidget.ownership.partition import ReleasePartition, find_joint
from gpumemwidget.ownership.paths import Steps, find_fix
from gpumemwidget.ownership.shell import Shell

#: Maximum number of holders that are listed.
_MOST_HOLDERS = 20
_NUMBER = re.compile(r"\d")
_QUOTED = re.compile(r"\['([^'\"\]]*)'\]")
_UNSEEN = PathStep(StepKind.ROOT, UNSEEN)
_LENDER = PathStep(StepKind.LENDER, LENDER)


#: A path's steps as text.
_Path = tuple[str, ...]


class _Way(NamedTuple):
    """One way into the memory from outside, which it enters at the place ``part``."""

    steps: Steps
    root: RootKind
    part: int

    @property
    def path(self) -> _Path:
        """The steps as text."""
        return tuple(step.text for step in self.steps)


@forgets_frames
def explain(shell: Shell, expression: str) -> Explanation:
    """Explain what holds the memory of a variable, or of a part of one.

    Args:
        shell: the running IPython.
        expression: a path as ``%memvars`` prints it: ``x``, ``model.layers[0].weight``, ``Out[7]``.
            It is looked up, not evaluated: no code of the user's runs.

    Raises:
        UnknownNameError: nothing has the name that it begins with.
        BadInputError: it goes on with something that can't be found without running code.
    """
    # With double quotes, as paths are spelled.
    expression = _QUOTED.sub(r'["\1"]', expression.strip())
    with paused_collector():
        account = take_account(shell, budget_s=FULL_BUDGET_S, depth="holders")
        if account is None:
            raise BadInputError("torch is not imported: no name holds a tensor yet")
        target = _find_target(shell, account, expression)
        if target is None:
            value = shell.user_ns.get(expression)
            name = name_class(type(value))
            nothing = DeviceBytes()
            cut = account.graph.find_cut()
            return Explanation(expression, "object", name, nothing, nothing, (), cut=cut)
        return _Inquiry(account, *target, expression).answer()


def explain_unnamed(shell: Shell, hardware: Hardware) -> Explanation:
    """Explain what holds the memory that no name, displayed value or exception leads to.

    On the host, where most of what is allocated is no tensor's, only tensors are told.
    """
    account = take_memory_account(shell, hardware)
    lines = [
        each
        for device in account.devices
        for each in device.owned
        if each.root in UNNAMED_ROOTS and not (each.device == HOST and each.kind == "other")
    ]
    holders = [
        Holder(
            path=_spell_together([each.steps for each in owned]),
            root=owned[0].root,
            fix=owned[0].fix or find_fix(owned[0].root, (_UNSEEN,), kind=owned[0].kind),
            held_bytes=_sum_lines(owned),
        )
        for owned in _group(lines, lambda each: each.steps)
    ]
    return _cut_list(
        holders,
        Explanation(
            name="",
            kind="memory",
            type_name="",
            held_bytes=_sum_lines(lines),
            frees_bytes=DeviceBytes(),
            holders=(),
            is_complete=account.is_complete,
        ),
    )


def _cut_list(holders: Sequence[Holder], explanation: Explanation) -> Explanation:
    """Return the explanation with these holders, as many as are listed."""
    ordered = sorted(holders, key=lambda each: (-each.held_bytes.total_bytes, each.path))
    n_more = max(0, len(holders) - _MOST_HOLDERS)
    return replace(explanation, holders=tuple(ordered[:_MOST_HOLDERS]), n_more=n_more)


class _Inquiry:
    """The search for what holds the object at ``place``, a part of that at ``parent``."""

    def __init__(self, account: Account, place: int, parent: int | None, expression: str) -> None:
        self._account = account
        self._graph = account.graph
        self._place = place
        self._parent = parent
        self._expression = expression
        self._paths = account.find_paths()
        self._leads = self._graph.flag_reaching_memory()
        self._reached = self._reach({place})
        self._storages = self._find_storages()
        leading = flag_reaching(self._graph.edges, self._storages)
        #: All objects on the ways from the target to its storages.
        self._within = self._storages | {each for each in self._reached if leading[each]}
        self._below: dict[int, set[int]] = {}
        self._ways: list[_Way] = []

    def answer(self) -> Explanation:
        """The explanation."""
        account, graph = self._account, self._graph
        self._add_roots()
        self._add_holders()
        self._add_unseen()
        frees_bytes = self._sum_frees()
        is_row = self._expression in account.rows
        return _cut_list(
            [self._describe(ways) for ways in _group(self._ways, lambda each: each.path)],
            Explanation(
                name=self._expression,
                kind=find_kind_name(graph, self._place),
                type_name=name_class(type(graph.objects[self._place])),
                held_bytes=account.sum_places(self._storages, rounded=False),
                frees_bytes=frees_bytes,
                holders=(),
                is_complete=graph.is_complete,
                joint=find_joint(account, [self._expression], frees_bytes) if is_row else None,
            ),
        )

    def _describe(self, ways: list[_Way]) -> Holder:
        storages = set().union(*(self._find_below(way.part) for way in ways))
        return Holder(
            path=_spell_together([way.path for way in ways]),
            root=ways[0].root,
            fix=find_fix(ways[0].root, ways[0].steps),
            held_bytes=self._account.sum_places(storages, rounded=False),
        )

    def _find_below(self, part: int) -> set[int]:
        below = self._below.get(part)
        if below is None:
            below = self._below[part] = self._reach({part}) & self._storages
        return below

    def _sum_frees(self) -> DeviceBytes:
        """Return what is freed if the object's name, or its place in its holder, is dropped."""
        account = self._account
        if self._expression in account.rows:
            return ReleasePartition(account, [self._expression]).sum_dying()
        starts = {root.place for root in account.list_roots()} | set(account.elsewhere)
        cut = None if self._parent is None else (self._parent, self._place)
        others = self._reach(starts, through_classes=True, cut=cut)
        return account.sum_places(self._storages - others)

    # -- the part of the graph that it is about ----------------------------------------------------

    def _reach(
        self,
        starts: set[int],
        *,
        through_graphs: bool = True,
        through_classes: bool = False,
        cut: tuple[int, int] | None = None,
    ) -> set[int]:
        """Return these places and all they lead to that leads to memory, ``cut`` left out.

        Autograd graphs are part of it or not, and so is an instance's class, which may keep all
        instances.
        """
        left_out = {Kind.NODE: not through_graphs, Kind.CLASS: not through_classes}
        kinds, edges, leads = self._graph.kinds, self._graph.edges, self._leads
        reached = set(starts)
        pending = list(starts)
        while pending:
            place = pending.pop()
            for part in edges[place]:
                if part in reached or not leads[part] or (place, part) == cut:
                    continue
                if not left_out.get(kinds[part], False):
                    reached.add(part)
                    pending.append(part)
        return reached

    def _find_storages(self) -> set[int]:
        """Return the object's own storages, and those that only its autograd graphs hold."""
        storages = self._graph.storages.keys()
        own = self._reach({self._place}, through_graphs=False) & storages
        if self._place in self._paths.optimizers:
            # An optimizer reaches the parameters too, and nobody means it by these.
            own = {each for each in own if self._paths.passes(each, {self._place})} or own
        saved = {each for each in self._reached & storages if self._paths.passes_graph(each)}
        # Another storage may look at the same memory, as DLPack makes one.
        infos = self._graph.storages
        memory = {(infos[each].device, infos[each].address) for each in own | saved}
        return {each for each, info in infos.items() if (info.device, info.address) in memory}

    # -- what leads into it ------------------------------------------------------------------------

    def _add_roots(self) -> None:
        for root in self._account.list_roots():
            if root.place in self._within:
                self._ways.append(_Way(root.steps, root.kind, root.place))

    def _add_holders(self) -> None:
        within, paths = self._within, self._paths
        for place, parts in enumerate(self._graph.edges):
            if not parts or place in self._reached or within.isdisjoint(parts):
                continue
            root = paths.find_root(place)
            if root is None:
                # The holder was met on the way up from an unknown one, and no root leads to it.
                continue
            for part in dict.fromkeys(parts):
                if part in within:
                    self._ways.append(_Way(paths.name_part(place, part), root.kind, part))

    def _add_unseen(self) -> None:
        """Add the holders that reference counts show and no walk has met."""
        known = {root.place for root in self._account.outer}
        for place in self._account.elsewhere:
            if place in known or place not in self._within or self._is_lent_within(place):
                continue
            info = self._graph.storages.get(place)
            is_lent = info is not None and info.is_borrowed
            self._ways.append(_Way((_LENDER if is_lent else _UNSEEN,), "nowhere", place))

    def _is_lent_within(self, place: int) -> bool:
        """Return whether a part is one of two known storages over the same memory."""
        infos = self._graph.storages
        below = {infos[each].address for each in self._find_below(place)}
        same = [info for info in infos.values() if info.address in below]
        return len(same) > len(below) and any(info.is_borrowed for info in same)


def _find_target(shell: Shell, account: Account, text: str) -> tuple[int, int | None] | None:
    """Return the places of what an expression names and of its holder; ``None`` without memory."""
    places = {word: row.places for word, row in account.rows.items()}
    for root in account.outer:
        if root.kind != "nowhere":
            # Modules and running functions: %memvars tells their paths too.
            places.setdefault(root.word, []).append(root.place)
    words = sorted(places, key=len, reverse=True)
    word = next((each for each in words if _begins_with(text, each)), None)
    if word is None:
        if text in shell.list_user_names():
            return None
        raise _describe_unknown(shell, text, words)
    starts = [place for place in places[word] if account.marks[place]]
    if text == word:
        return (starts[0], None) if starts else None
    paths = account.find_paths()
    found = (paths.find_part(start, word, text) for start in starts)
    target = next((each for each in found if each is not None), None)
    if target is not None:
        return target
    cut = "" if account.graph.is_complete else " in the objects that could be looked at in time"
    raise BadInputError(
        f"{text[len(word) :]!r} of {word} was not found{cut}, or holds no memory: it may be "
        "computed by code, which is not run; bind it to a name, or take a path from "
        f"%memvars {word}"
    )


def _begins_with(text: str, word: str) -> bool:
    rest = text.removeprefix(word)
    return text.startswith(word) and not (rest[:1].isalnum() or rest[:1] == "_")


def _describe_unknown(shell: Shell, text: str, words: list[str]) -> UnknownNameError:
    known = dict.fromkeys([*shell.list_user_names(), *words])
    close = difflib.get_close_matches(text, known, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "%memvars lists what holds memory"
    return UnknownNameError(f"{text!r} is not a variable: {hint}")


_T = TypeVar("_T", _Way, Owned)


def _group(found: Sequence[_T], read_path: Callable[[_T], _Path]) -> list[list[_T]]:
    """Group what has similar paths: but for numbers, and if that leaves many, but for all keys."""
    groups: dict[tuple[_Path, RootKind], list[_T]] = {}
    for opens_all in (False, True):
        groups = {}
        for each in found:
            path = _open_keys(read_path(each), opens_all=opens_all)
            groups.setdefault((path, each.root), []).append(each)
        if len(groups) <= _MOST_HOLDERS:
            break
    return list(groups.values())


def _open_keys(path: _Path, *, opens_all: bool) -> _Path:
    """Return a path with its indices open, and keys with a number or a parameter in them."""
    return tuple(
        "[…]"
        if step.startswith("[") and (opens_all or step[1] != '"' or _NUMBER.search(step))
        else step
        for step in path
    )


def _spell_together(paths: Sequence[_Path]) -> str:
    """Return one path for many that differ in some keys alone, with just these left open."""
    paths = list(dict.fromkeys(paths))
    if len(paths) == 1:
        return "".join(paths[0])
    columns = zip(*paths, strict=True)
    path = "".join(column[0] if len(set(column)) == 1 else "[…]" for column in columns)
    return f"{path} ({len(paths)} of them)"


def _sum_lines(lines: Iterable[Owned]) -> DeviceBytes:
    # No lower bound where the search ran out of time: some of these lines may have a name.
    return DeviceBytes(add_up((each.device, each.n_bytes) for each in lines))
