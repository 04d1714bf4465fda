"""Explain what holds some memory, as paths that a person can act on.

An object reaches storages. Those whose best path leads through it are its own; the others belong to
variables with names of their own, and stay whatever becomes of it. What leads from elsewhere to its
own storages holds these too, and is named by its own best path; paths that differ in an index alone
are one holder. What cuts all of them at once is tried out on the graph before it is recommended.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple, TypeVar

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import BadInputError, UnknownNameError, forgets_frames
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ownership import (
    Cure,
    DeviceBytes,
    Explanation,
    Fix,
    FixKind,
    Holder,
    Owned,
    RootKind,
)
from gpumemwidget.ownership.account import FULL_BUDGET_S, UNNAMED_ROOTS, take_memory_account
from gpumemwidget.ownership.graph.kinds import Kind
from gpumemwidget.ownership.graph.objects import name_class, paused_collector
from gpumemwidget.ownership.graph.walk import flag_reaching
from gpumemwidget.ownership.holdings import Holdings, add_up, take_holdings
from gpumemwidget.ownership.labels import (
    LENDER,
    UNSEEN,
    PathStep,
    StepKind,
    find_kind_name,
    open_index,
    spell_steps,
)
from gpumemwidget.ownership.partition import ReleasePartition
from gpumemwidget.ownership.paths import Paths, Root, Steps, find_cut, find_fix
from gpumemwidget.ownership.shell import Shell
from gpumemwidget.tracing.sources import is_library

#: Maximum number of holders that are listed.
_MOST_HOLDERS = 20
_UNSEEN = PathStep(StepKind.ROOT, UNSEEN)


#: A path's steps as text.
_Path = tuple[str, ...]


class _Way(NamedTuple):
    """One way into the memory from outside: a root, or a reference from ``holder`` to ``part``."""

    steps: Steps
    part: int
    #: Where it begins; ``None`` for a holder that no walk has met.
    begin: Root | None = None
    holder: int | None = None

    @property
    def path(self) -> _Path:
        return tuple(step.text for step in self.steps)

    @property
    def root(self) -> RootKind:
        return "nowhere" if self.begin is None else self.begin.kind

    @property
    def fold(self) -> _Path:
        """The steps by which similar ways are put together: all of an exception's have one cut."""
        return self.path[:1] if self.root == "exception" else self.path


class _Target(NamedTuple):
    """The object that is asked about: its places, and that of the holder that was named with it."""

    places: frozenset[int]
    #: The holder in the expression; ``None`` where the object is a root.
    parent: int | None = None


class _Cut(NamedTuple):
    """What is typed to cut a way, and what that takes away from the graph."""

    fix: Fix
    links: frozenset[tuple[int, int]] = frozenset()
    #: Words of roots.
    words: frozenset[str] = frozenset()


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
    expression = re.sub(r"\['([^'\"\]]*)'\]", r'["\1"]', expression.strip())
    with paused_collector():
        holdings = take_holdings(shell, budget_s=FULL_BUDGET_S, depth="holders")
        if holdings is None:
            raise BadInputError("torch is not imported: no name holds a tensor yet")
        target = _find_target(shell, holdings, expression)
        if target is None:
            value = shell.user_ns.get(expression)
            name = name_class(type(value))
            nothing = DeviceBytes()
            cut = holdings.graph.find_cut()
            return Explanation(expression, "object", name, nothing, nothing, (), cut=cut)
        return _Inquiry(holdings, target, expression).answer()


def explain_unnamed(shell: Shell, hardware: Hardware) -> Explanation:
    """Explain what holds the memory that no name, displayed value or exception leads to.

    On the host, where most of what is allocated is no tensor's, only tensors are listed.
    """
    account = take_memory_account(shell, hardware)
    lines = [
        line
        for device in account.devices
        for line in device.owned
        if line.root in UNNAMED_ROOTS and not (line.device == HOST and line.kind == "other")
    ]
    holders = [
        Holder(
            path=_spell_together([line.steps for line in owned]),
            root=owned[0].root,
            fix=owned[0].fix or find_fix(owned[0].root, (_UNSEEN,), kind=owned[0].kind),
            held_bytes=_sum_lines(owned),
        )
        for owned in _group(lines, lambda line: line.steps)
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
    ordered = sorted(holders, key=lambda holder: (-holder.held_bytes.total_bytes, holder.path))
    n_more = max(0, len(holders) - _MOST_HOLDERS)
    return replace(explanation, holders=tuple(ordered[:_MOST_HOLDERS]), n_more=n_more)


class _Inquiry:
    """The search for what holds the memory of one object."""

    def __init__(self, holdings: Holdings, target: _Target, expression: str) -> None:
        self._holdings = holdings
        self._graph = holdings.graph
        self._target = target
        self._expression = expression
        self._paths = holdings.find_paths()
        self._reached = self._graph.reach(target.places)
        self._storages = self._reached & self._graph.storages.keys()
        self._own = self._find_own()
        self._within = self._find_within()
        self._below: dict[int, set[int]] = {}
        self._ways: list[_Way] = []
        #: True if something that nothing leads to holds the memory, until it is collected.
        self._is_in_rubbish = False

    def answer(self) -> Explanation:
        holdings, graph = self._holdings, self._graph
        place = min(self._target.places)
        self._add_roots()
        self._add_holders()
        self._add_unseen()
        row = holdings.rows.get(self._expression)
        if row is None:
            held_bytes = holdings.sum_places(self._storages)
            frees_bytes = holdings.sum_places(self._list_freed_alone() & self._storages)
            joint = None
        else:
            held_bytes = holdings.sum_groups(holdings.groups.find(row.mark), rounded=True)
            partition = ReleasePartition(holdings, [row.name])
            frees_bytes = partition.sum_dying()
            joint = partition.find_joint()
        return _cut_list(
            [self._describe(ways) for ways in _group(self._ways, lambda way: way.fold)],
            Explanation(
                name=self._expression,
                kind=find_kind_name(graph, place),
                type_name=name_class(type(graph.objects[place])),
                held_bytes=held_bytes,
                frees_bytes=frees_bytes,
                holders=(),
                is_complete=graph.is_complete,
                cure=self._find_cure(),
                named_bytes=self._sum_named(),
                slices=holdings.sum_slices(self._own),
                joint=joint,
            ),
        )

    def _describe(self, ways: list[_Way]) -> Holder:
        storages = set().union(*(self._find_below(way.part) for way in ways))
        root, held_bytes = ways[0].root, self._holdings.sum_places(storages)
        if root != "exception" or len(ways) == 1:
            path = _spell_together([way.path for way in ways])
            return Holder(path, root, self._find_fix(ways), held_bytes)
        # The innermost frame, which failed, is first.
        ways.sort(key=lambda way: -len(self._list_places(way)))
        variables: set[tuple[int, str]] = set()
        for way in ways:
            texts = [step.text for step in way.steps[1:] if step.kind is not StepKind.TRACEBACK]
            places = self._list_places(way)
            frame = next((held for held in places if self._graph.kinds[held] is Kind.FRAME), -1)
            variables.add((frame, texts[0] if texts else ""))
        return Holder(
            path=spell_steps(ways[0].steps),
            root=root,
            fix=find_fix(root, ways[0].steps),
            held_bytes=held_bytes,
            n_variables=len(variables),
            n_frames=len({frame for frame, _ in variables if frame >= 0}),
        )

    def _list_places(self, way: _Way) -> list[int]:
        if way.holder is None:
            return [way.part]
        return [way.part, *self._paths.list_places(way.holder)]

    def _find_below(self, part: int) -> set[int]:
        if part not in self._below:
            self._below[part] = self._graph.reach({part}) & self._own
        return self._below[part]

    def _sum_named(self) -> tuple[tuple[str, DeviceBytes], ...]:
        """Return the bytes of each variable to which some of the memory belongs."""
        by_word: dict[str, list[int]] = {}
        for place in sorted(self._storages - self._own):
            root = self._paths.find_root(place)
            assert root is not None
            by_word.setdefault(root.word, []).append(place)
        sums = ((word, self._holdings.sum_places(places)) for word, places in by_word.items())
        return tuple(sorted(sums, key=lambda pair: (-pair[1].total_bytes, pair[0])))

    # -- the part of the graph that it is about ----------------------------------------------------

    def _find_own(self) -> set[int]:
        """Return the storages to which no other variable has a better path."""
        paths, infos, target = self._paths, self._graph.storages, self._target.places
        parts = Paths(self._graph, [Root(place, self._expression, "name") for place in target])
        level, n_steps = min(map(paths.rank, target))
        own = set()
        for place in self._storages:
            root = paths.find_root(place)
            far_level, n_more = parts.rank(place)
            # The object itself is a step of both.
            rank = (level + far_level, n_steps + n_more - 1)
            is_named = root is not None and root.kind == "name" and paths.rank(place) < rank
            if not is_named or paths.passes(place, target):
                own.add(place)
        # Of what owns nothing itself, the question is who else has it.
        own = own or set(self._storages)
        # Another storage may look at the same memory, as DLPack makes one.
        memory = {(infos[storage].device, infos[storage].address) for storage in own}
        return {storage for storage, info in infos.items() if (info.device, info.address) in memory}

    def _find_within(self) -> set[int]:
        """Return the places on the ways from the object to its own storages, both ends too."""
        edges: list[Sequence[int]] = list(self._graph.edges)
        for place in self._target.places:
            # What refers back to the object is outside.
            edges[place] = ()
        leading = flag_reaching(edges, self._own)
        between = {place for place in self._reached if leading[place]}
        return between | self._own | self._target.places

    # -- what leads into it ------------------------------------------------------------------------

    def _add_roots(self) -> None:
        for root in self._holdings.list_roots():
            if root.place in self._within:
                self._ways.append(_Way(root.steps, root.place, root))

    def _add_holders(self) -> None:
        within, paths = self._within, self._paths
        # To what is reached through the object alone it belongs itself.
        outside = self._graph.reach(self._list_starts(), beyond=self._target.places)
        for place, parts in enumerate(self._graph.edges):
            if not parts or place in within or within.isdisjoint(parts):
                continue
            root = paths.find_root(place)
            if root is None or place not in outside:
                # Rubbish, or met on the way up from an unknown holder.
                self._is_in_rubbish |= place not in self._reached
                continue
            for part in dict.fromkeys(parts):
                if part in within:
                    steps = paths.name_part(place, part)
                    self._ways.append(_Way(steps, part, root, place))

    def _add_unseen(self) -> None:
        """Add the holders that reference counts show and no walk has met."""
        known = {root.place for root in self._holdings.outer}
        for place in self._holdings.elsewhere:
            if place in known or place not in self._within or self._is_lent_within(place):
                continue
            info = self._graph.storages.get(place)
            is_lent = info is not None and info.is_borrowed
            holder = PathStep(StepKind.LENDER, LENDER) if is_lent else _UNSEEN
            self._ways.append(_Way((holder,), place))

    def _is_lent_within(self, place: int) -> bool:
        """Return whether a part is one of two known storages over the same memory."""
        infos = self._graph.storages
        below = {infos[storage].address for storage in self._find_below(place)}
        same = [info for info in infos.values() if info.address in below]
        return len(same) > len(below) and any(info.is_borrowed for info in same)

    # -- what cuts it ------------------------------------------------------------------------------

    def _list_starts(self, dropped: Container[str] = ()) -> set[int]:
        """Return where all that is held begins, without these roots."""
        known = {root.place for root in self._holdings.outer}
        roots = self._holdings.list_roots()
        starts = {root.place for root in roots if root.word not in dropped}
        return starts | {held for held in self._holdings.elsewhere if held not in known}

    def _list_freed(self, links: Container[tuple[int, int]], words: Container[str]) -> set[int]:
        """Return the storages that nothing holds any more once these are taken away."""
        held = self._graph.reach(self._list_starts()) & self._graph.storages.keys()
        return held - self._graph.reach(self._list_starts(words), links=links)

    def _list_freed_alone(self) -> set[int]:
        """Return the storages that are freed if what was asked about is dropped, and no more."""
        parent, places = self._target.parent, self._target.places
        if parent is None:
            return self._list_freed((), {self._expression})
        return self._list_freed({(parent, part) for part in places}, ())

    def _find_fix(self, ways: Sequence[_Way]) -> Fix:
        """Return what a person does about ways that differ in indices alone."""
        first, last = (find_fix(way.root, self._list_steps(way)) for way in (ways[0], ways[-1]))
        # The registry has it itself, and not what leads to it.
        is_asked = self._expression in self._holdings.rows and len(ways[0].steps) == 2
        if first.kind is FixKind.CLOSE_WIDGETS and is_asked:
            return Fix(FixKind.CLOSE, self._expression)
        if first == last:
            return first
        texts = _fold([way.path for way in ways])
        steps = (PathStep(step.kind, text) for step, text in zip(ways[0].steps, texts, strict=True))
        return find_fix(ways[0].root, tuple(steps))

    def _list_steps(self, way: _Way) -> Steps:
        """Return the steps of a way; those that can't be cut by themselves are ``FIXED``."""
        if way.begin is None or way.holder is None:
            return way.steps
        links = self._paths.list_links(way.holder, way.part)
        return (*way.begin.steps, *(step for step, _, _ in links))

    def _find_cut(self, way: _Way) -> _Cut | None:
        """Return what cuts a way for good; ``None`` where that can't be typed."""
        root = way.begin
        if root is None or root.kind in ("thread", "nowhere"):
            return None
        if root.kind in ("out", "exception"):
            fix = find_fix(root.kind, root.steps)
            rows = (row.name for row in self._holdings.rows.values() if row.root == root.kind)
            return _Cut(fix, words=frozenset({fix.path} if fix.path.startswith("Out[") else rows))
        fix = self._find_fix([way])
        if root.kind == "module" and fix.kind in (FixKind.CLOSE, FixKind.CLOSE_WIDGETS):
            return self._close_widgets(root, way, fix)
        steps = self._list_steps(way)
        kind, number = find_cut(steps, drops_graphs=True)
        module = root.word.rpartition(".")[0] if root.kind == "module" else ""
        path = spell_steps(steps[:number])
        if module and is_library(str(getattr(sys.modules.get(module), "__file__", ""))):
            # How a library lets go of something is not known from where it has it.
            return None
        if kind is FixKind.RELEASE_ROW:
            kind = FixKind.DELETE if module else kind
            return _Cut(Fix(kind, path, module), words=frozenset({root.word}))
        assert way.holder is not None
        links = self._paths.list_links(way.holder, way.part)
        is_last = kind in (FixKind.DELETE, FixKind.CLEAR_GRADIENT)
        _, holder, part = links[number - 1 - is_last]
        parts = [part]
        if kind is FixKind.CLEAR_CACHE:
            # Keys and results, each of which the cache may have by itself.
            entries = self._graph.edges[holder]
            named = ((entry, self._paths.name_part(holder, entry)) for entry in entries)
            parts += [entry for entry, names in named if names[-1].kind is StepKind.CACHE]
        return _Cut(Fix(kind, path, module), links=frozenset((holder, entry) for entry in parts))

    def _close_widgets(self, root: Root, way: _Way, fix: Fix) -> _Cut:
        # To close a widget closes its channel too, of which only the kernel knows.
        edges = self._graph.edges
        widgets = {way.part} if fix.kind is FixKind.CLOSE else {*edges[root.place]}
        closing = {root.place, *self._holdings.elsewhere}
        pairs = ((place, part) for place in closing for part in edges[place] if part in widgets)
        return _Cut(fix, links=frozenset(pairs))

    def _join_ways(self) -> Iterator[_Way]:
        """Yield the ways, and for several from a variable with nothing else the variable alone."""
        holdings = self._holdings
        by_word: dict[str, list[_Way]] = {}
        for way in self._ways:
            by_word.setdefault("" if way.begin is None else way.begin.word, []).append(way)
        for word, ways in by_word.items():
            row = holdings.rows.get(word)
            if row is None or len(ways) == 1 or set(holdings.list_storages(row.mark)) - self._own:
                yield from ways
            else:
                root = Root(row.places[0], word, row.root)
                yield _Way(root.steps, root.place, root)

    def _find_cure(self) -> Cure | None:
        """Return what frees most of the object's own memory, if that is a few commands."""
        holdings = self._holdings
        cuts: dict[Fix, list[_Cut]] = {}
        for way in self._join_ways():
            cut = self._find_cut(way)
            if cut is not None:
                cuts.setdefault(cut.fix, []).append(cut)
            # A longer command is not read.
            if len(cuts) > 8:
                return None
        found = [cut for group in cuts.values() for cut in group]
        links = frozenset[tuple[int, int]]().union(*(cut.links for cut in found))
        words = frozenset[str]().union(*(cut.words for cut in found))
        freed = self._list_freed(links, words)
        own_bytes = holdings.sum_places(self._own).total_bytes
        if not 0 < own_bytes <= 2 * holdings.sum_places(self._own & freed).total_bytes:
            return None
        if links or not words <= holdings.rows.keys():
            marks = holdings.find_marks(words & holdings.rows.keys())
            frees_bytes = holdings.sum_places(freed, dropped=marks)
        else:
            frees_bytes = ReleasePartition(holdings, sorted(words)).frees_bytes
        # ``%memrelease`` makes these.
        kinds = (FixKind.RELEASE_ROW, FixKind.RELEASE_DISPLAYED, FixKind.RELEASE_EXCEPTIONS)
        rows = [fix for fix in cuts if fix.kind in kinds]
        # The parts of a list from its end on: to delete one moves those behind it.
        parts = sorted(cuts.keys() - rows, key=_split_numbers, reverse=True)
        return Cure(
            fixes=(*parts, *rows),
            # A widget and its handlers refer to each other.
            needs_collection=self._is_in_cycle()
            or FixKind.CLOSE_WIDGETS in {fix.kind for fix in cuts},
            frees_bytes=frees_bytes,
        )

    def _is_in_cycle(self) -> bool:
        """Return whether only the garbage collector frees some of the object's own memory."""
        if self._is_in_rubbish:
            return True
        edges = self._graph.edges
        leading = flag_reaching(edges, self._own)
        places = {place for place in self._reached if leading[place]}
        try:
            TopologicalSorter(
                {place: places.intersection(edges[place]) for place in places}
            ).prepare()
        except CycleError:
            return True
        return False


def _find_target(shell: Shell, holdings: Holdings, text: str) -> _Target | None:
    """Return the object that an expression names; ``None`` for a variable without memory."""
    places = {word: row.places for word, row in holdings.rows.items()}
    for root in holdings.outer:
        if root.kind != "nowhere":
            # Modules and running functions: %memvars has their paths too.
            places.setdefault(root.word, []).append(root.place)
    words = sorted(places, key=len, reverse=True)
    word = next((known for known in words if _begins_with(text, known)), None)
    if word is None:
        if text in shell.list_user_names():
            return None
        raise _describe_unknown(shell, text, words)
    starts = [place for place in places[word] if holdings.marks[place]]
    if text == word:
        return _Target(frozenset(starts)) if starts else None
    paths = holdings.find_paths()
    found = (paths.find_part(start, word, text) for start in starts)
    target = next((part for part in found if part is not None), None)
    if target is not None:
        place, parent = target
        return _Target(frozenset({place}), parent)
    cut = "" if holdings.graph.is_complete else " in the objects that could be looked at in time"
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
        for item in found:
            path = tuple(open_index(step, opens_all=opens_all) for step in read_path(item))
            groups.setdefault((path, item.root), []).append(item)
        if len(groups) <= _MOST_HOLDERS:
            break
    return list(groups.values())


def _fold(paths: Iterable[_Path]) -> list[str]:
    """Return the steps of paths that differ in some keys alone, with just these left open."""
    return [texts[0] if len(set(texts)) == 1 else "[…]" for texts in zip(*paths, strict=True)]


def _spell_together(paths: Iterable[_Path]) -> str:
    """Return one path for many that differ in some keys alone, and their number."""
    paths = dict.fromkeys(paths)
    return "".join(_fold(paths)) + (f" ({len(paths)} of them)" if len(paths) > 1 else "")


def _split_numbers(fix: Fix) -> list[str | int]:
    """Return the path in pieces by which indices are in the order of their values."""
    pieces = re.split(r"(\d+)", fix.path)
    return [int(piece) if n % 2 else piece for n, piece in enumerate(pieces)]


def _sum_lines(lines: Iterable[Owned]) -> DeviceBytes:
    # No lower bound where the search ran out of time: some of these lines may have a name.
    return DeviceBytes(add_up((line.device, line.n_bytes) for line in lines))
