"""Find holders that no name leads to: libraries, running functions, C++.

That something is held by one of them is known by counting. An object with more references than the
walk from the user's names can account for is also held by something else, and so "frees" is not
guessed. The count of a Python object is Python's; of tensors and storages torch tells a second one,
of C++.

That walk stops at modules, for behind them lies the whole process. Tensors that Python can see and
that it did not meet are explained from the other end: up from the tensor, holder by holder, to a
module's global or to an object that nobody holds. What stands there becomes a root of its own, and
its walk explains all else that it holds.
"""

from __future__ import annotations

import contextvars
import gc
import math
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from types import FrameType, ModuleType
from typing import Any

from gpumemwidget.ownership.graph.kinds import Kind
from gpumemwidget.ownership.graph.objects import (
    is_a,
    is_running,
    list_referrers,
    name_class,
    read_attribute,
    read_locals,
    read_namespace,
)
from gpumemwidget.ownership.graph.walk import Graph, find_scope
from gpumemwidget.ownership.paths import Root
from gpumemwidget.progress import Stage, report_progress
from gpumemwidget.tracing.sources import is_library

_CHECK_EVERY = 512

#: Maximum number of objects that one climb follows on each level.
_MOST_TARGETS = 16
_MOST_STEPS_UP = 24
_MOST_CLIMBS = 64
#: References to a tensor that are our own when its holders are counted.
_OWN_REFS = 5
#: Holders of less than this are not searched for (bytes).
_LEAST_BYTES = 4096
#: Modules whose functions run the user's: front ends, debuggers, test runners. Their variables are
#: not walked, for behind a test runner's lie all of its tests.
_MACHINERY = re.compile(
    r"(IPython|ipykernel|traitlets|tornado|zmq|asyncio|threading|concurrent|selectors|runpy"
    r"|jupyter_client|debugpy|_?pydevd\w*|gpumemwidget|pytest|_pytest|pluggy|xdist|execnet"
    r"|__channelexec__)(\..*)?"
)


def list_held_elsewhere(
    graph: Graph,
    root_refs: dict[int, int],
    among: Iterable[int] | None = None,
) -> list[int]:
    """Return the places that something else holds too, which the walk has not seen.

    Args:
        graph: the walk's result; nothing else of ours may hold its objects.
        root_refs: for each place, how many references the roots have to it.
        among: only these places; all where they are not given.
    """
    leads = graph.flag_reaching_memory()
    places = list(compress(range(len(leads)), leads))
    if among is not None:
        places = [place for place in among if leads[place]]
    # Exactly as many references of our own as a fresh object in a fresh list has.
    base = next(map(sys.getrefcount, [object()]))
    counts = map(sys.getrefcount, map(graph.objects.__getitem__, places))
    infos = graph.storages
    found = {place for place in places if place in infos and infos[place].is_borrowed}
    kinds, python_refs = graph.kinds, graph.python_refs
    in_cpp: list[int] = []
    for place, count in zip(places, counts, strict=True):
        excess = count - base - python_refs[place]
        if excess and place in root_refs:
            excess -= root_refs[place]
        kind = kinds[place]
        if kind is Kind.TENSOR or kind is Kind.STORAGE:
            excess, unseen = _count_users(graph, place, kind, excess)
            if unseen > 0:
                in_cpp.append(place)
        elif excess > 0 and kind is not Kind.PLAIN:
            excess = _allow_for_own(graph, place, kind, excess)
        if excess > 0:
            found.add(place)
    found.update(set(in_cpp) - _list_uncounted(graph, in_cpp))
    return sorted(found)


def _count_users(graph: Graph, place: int, kind: Kind, excess: int) -> tuple[int, int]:
    """Return how many references to a tensor or storage are unaccounted for: Python's and C++'s."""
    reader = graph.reader
    if kind is Kind.TENSOR:
        users, holds = reader.count_tensor_users(graph.objects[place]), reader.cpp_holds_tensor
    else:
        users, holds = reader.count_storage_users(graph.objects[place]), reader.cpp_holds_storage
    if holds and users > 1:
        excess -= 1
    return excess, users - 1 - graph.cpp_refs[place]


def _list_uncounted(graph: Graph, places: Sequence[int]) -> set[int]:
    """Return those of these tensors and storages whose known holders in C++ can't be counted.

    These are what the reducers of ``DistributedDataParallel`` hold (parameters, gradients, and what
    gradients are views of), and the bases of views that functions derive.
    """
    if not places:
        return set()
    kinds, objects, reader = graph.kinds, graph.objects, graph.reader
    uncounted: set[int] = set()
    for wrapper in graph.opaque:
        if kinds[wrapper] is Kind.WRAPPER:
            listed = read_attribute(objects[wrapper], "_module_parameters")
            found = map(graph.find, listed if type(listed) is list else ())
            pending = [place for place in found if place is not None]
            while pending:
                place = pending.pop()
                if place not in uncounted and kinds[place] in (Kind.TENSOR, Kind.STORAGE):
                    uncounted.add(place)
                    pending.extend(graph.edges[place])
    with reader.quiet():
        for place in places:
            bases = (place,) if kinds[place] is Kind.TENSOR else graph.tensors_on.get(place, ())
            pairs = (
                (objects[view], objects[b]) for b in bases for view in graph.views_of.get(b, ())
            )
            if any(reader.is_derived_by_functions(*pair) for pair in pairs):
                uncounted.add(place)
    return uncounted


def _allow_for_own(graph: Graph, place: int, kind: Kind, excess: int) -> int:
    """Return the excess without the references that are known to exist."""
    target: Any = graph.objects[place]
    if kind is Kind.CLASS:
        return excess - graph.kind_finder.count_own_refs(target)
    if kind is Kind.FUNCTION and excess <= graph.n_unpackings.get(find_scope(target.__code__), 0):
        # Torch tells the hook that unpacks, and not the one that packed and lives as long: it is
        # defined in the same scope.
        return 0
    if kind is Kind.HIDDEN and graph.hidden.is_script(type(target)):
        # A scripted module is held by its own methods.
        return 0
    if kind is Kind.NODE and graph.cpp_refs[place]:
        # The node of a function written in Python always owned its context.
        return excess - (graph.reader.cpp_holds_node or place in graph.contexts)
    return excess


def list_outside(graph: Graph) -> list[Any]:
    """Return the tensors and autograd nodes that the walk has not met (100 ms on a big heap)."""
    living = graph.kind_finder.list_living(Kind.NODE, Kind.TENSOR)
    return [each for each in living if graph.find(each) is None]


def list_seen_from_outside(graph: Graph, outside: Iterable[object] | None) -> set[int]:
    """Return the places of autograd nodes that tensors or nodes outside of the walk lead to.

    Their holders are counted in C++ alone.

    Args:
        graph: the walk's result.
        outside: what ``list_outside`` returns; it is asked for where this is ``None``.
    """
    reader, find = graph.reader, graph.kind_finder.find
    leads = graph.flag_reaching_memory()
    nodes = {place for place, kind in enumerate(graph.kinds) if kind is Kind.NODE and leads[place]}
    if not nodes or graph.is_late():
        # Too late they may not even be listed. Not to know is to be careful.
        return nodes
    listed = list_outside(graph) if outside is None else outside
    pending = [each for each in listed if graph.find(each) is None]
    met: dict[int, object] = {}
    found: set[int] = set()
    with reader.quiet():
        while pending:
            if len(met) % _CHECK_EVERY == 0 and graph.is_late():
                return found | nodes
            each = pending.pop()
            place = graph.find(each)
            if place is not None:
                found.add(place)
            elif id(each) in met:
                continue
            elif find(type(each)) is Kind.NODE:
                if not graph.allowance.may_read(each):
                    return found | nodes
                following, _, _ = reader.read_node(each)
                graph.allowance.note(each, following)
                pending.extend(following)
            elif find(type(each)) is Kind.TENSOR:
                node = reader.read_tensor(each).grad_fn
                if node is not None:
                    pending.append(node)
            met[id(each)] = each
    return found


def enter_running(graph: Graph) -> list[Root]:
    """Enter and walk what running functions and the context hold; return their roots."""
    roots = [*_enter_threads(graph), *_enter_context(graph)]
    graph.walk()
    return roots


def enter_surroundings(
    graph: Graph, outside: Iterable[object], *, budget_s: float, climbs: bool
) -> list[Root]:
    """Enter and walk what holds the tensors that the graph has not met.

    Args:
        graph: the walk from all rows and running functions; it is extended.
        outside: the tensors that it has not met, among other things.
        budget_s: seconds after which no other holder is looked for.
        climbs: whether the holders of the biggest are looked for.

    Returns:
        The roots that were entered; what was found without a root has the kind ``nowhere``.
    """
    deadline_s = time.perf_counter() + budget_s
    roots: list[Root] = []
    unmet, sizes = _list_unmet(graph, outside)
    n_unmet = len(unmet)
    targets = [
        tensor
        for tensor, n_bytes in zip(unmet, sizes, strict=True)
        # Two lists, the zip's tuple, the variable and the call hold it: if that is all, nothing
        # else does.
        if n_bytes >= _LEAST_BYTES and sys.getrefcount(tensor) > _OWN_REFS
    ][: _MOST_CLIMBS if climbs else 0]
    report_progress(Stage.FIND_HOLDERS, 0, n_unmet)
    chains = _climb(graph, targets, ours=(unmet, outside), deadline_s=deadline_s)
    targets.clear()
    unmet.reverse()
    while unmet:
        report_progress(Stage.FIND_HOLDERS, n_unmet - len(unmet), n_unmet)
        chain, word = chains.pop(id(unmet[-1]), ([unmet[-1]], None))
        if graph.find(unmet[-1]) is None:
            root = _enter_first(graph, chain, word)
            roots.extend([] if root is None else [root])
            graph.walk()
        del chain
        unmet.pop()
        if time.perf_counter() > deadline_s:
            break
    return roots


def find_module_roots(graph: Graph, places: Sequence[int]) -> list[Root]:
    """Return a root for each of these objects that a module holds beside all that was met."""
    targets = [graph.objects[place] for place in places]
    chains = _climb(graph, targets)
    words = {place: chains[id(graph.objects[place])][1] for place in places}
    return [Root(place, word, "module") for place, word in words.items() if word is not None]


def _enter_threads(graph: Graph) -> list[Root]:
    """Enter the variables of the functions that are running now, on any thread.

    The user's own functions come first: what they pass on has a name of theirs.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    # While autograd's own thread asks, the user's functions stand on the main one.
    own = {threading.get_ident(), threading.main_thread().ident}
    roots: list[Root] = []
    top: FrameType | None = None
    frame: FrameType | None = None
    tops = list(sys._current_frames().items())  # noqa: SLF001 - the one way to see them
    try:
        for of_library in (False, True):
            for ident, top in tops:
                frame = top
                word = "running" if ident in own else f"thread {names.get(ident, ident)}"
                while frame is not None:
                    if is_library(frame.f_code.co_filename) is of_library:
                        roots.extend(_enter_variables(graph, frame, word))
                    frame = frame.f_back
    finally:
        # A frame that holds itself lives on until the next collection, with all its callers.
        tops.clear()
        top = frame = None
    return roots


def _enter_context(graph: Graph) -> list[Root]:
    """Enter what the context variables of this thread are set to."""
    roots: list[Root] = []
    for variable, value in contextvars.copy_context().items():
        place = graph.add_root(value)
        if place is not None and not _MACHINERY.fullmatch(name_class(type(value))):
            word = f"context variable {variable.name}"
            roots.append(Root(place, word, "thread", context_variable=variable.name))
    return roots


def _enter_variables(graph: Graph, frame: FrameType, word: str) -> Iterator[Root]:
    # Code may run in a namespace of a class of the user's.
    module = dict.get(frame.f_globals, "__name__")
    if type(module) is not str or _MACHINERY.fullmatch(module):
        return
    where = f"{word}: {frame.f_code.co_name}() line {frame.f_lineno}"
    for name, value in read_locals(frame).items():
        place = graph.add_root(value)
        if place is not None:
            yield Root(place, f"{where}: {name}", "thread", thread=word)


def _list_unmet(graph: Graph, outside: Iterable[object]) -> tuple[list[object], list[int]]:
    """Return the tensors whose storages no row reaches, and their bytes; the biggest first."""
    reader = graph.reader
    met = {(info.device, info.address) for info in graph.storages.values()}
    sizes: list[int] = []
    found: list[object] = []
    with reader.quiet():
        for tensor in outside:
            is_tensor = graph.kind_finder.find(type(tensor)) is Kind.TENSOR
            if not is_tensor or graph.find(tensor) is not None:
                continue
            parts = reader.read_tensor(tensor)
            for storage in (parts.storage, *parts.inner_storages):
                info = None if storage is None else reader.read_storage(storage)
                if info is None or info.is_borrowed or (info.device, info.address) in met:
                    continue
                if not info.is_host or info.n_bytes >= _LEAST_BYTES:
                    sizes.append(info.n_bytes)
                    found.append(tensor)
    order = sorted(range(len(found)), key=sizes.__getitem__, reverse=True)
    return [found[number] for number in order], sorted(sizes, reverse=True)


def _enter_first(graph: Graph, chain: Sequence[object], word: str | None) -> Root | None:
    """Enter the topmost of these objects that can be walked."""
    for each in chain:
        place = graph.add_root(each, is_known_holder=True)
        if place is not None:
            if word is None:
                return Root(place, "no name", "nowhere")
            return Root(place, word, "module")
    return None


def _climb(
    graph: Graph,
    targets: Sequence[object],
    *,
    ours: Sequence[object] = (),
    deadline_s: float = math.inf,
) -> dict[int, tuple[list[object], str | None]]:
    """Search upwards from all of these objects together: each level is a look at the whole process.

    Our own containers of them are no holders. Returns for each object, by its id: itself and some
    that lead to it, the topmost first, and the module's word for that, if a module holds it.
    """
    chains = {id(target): [target] for target in targets}
    words: dict[int, str] = {}
    level = list(targets)
    #: For each object on the level, and for each that was met, the ids of the targets below it.
    rising = {key: {key} for key in chains}
    below = {key: {key} for key in chains}
    namespaces = _list_named_namespaces() if targets else {}
    # Objects that were met are kept, so that no other gets the id of one.
    met: list[object] = []
    for _ in range(_MOST_STEPS_UP):
        # Without its last steps the account says that it is not complete.
        if not level or graph.is_late() or time.perf_counter() > deadline_s:
            break
        holders = list_referrers(level)
        own = set(map(id, (targets, *ours, met, level, graph.objects, *chains.values())))
        following: list[object] = []
        n_rising: Counter[int] = Counter()
        above: dict[int, set[int]] = {}
        for holder in holders:
            if id(holder) in own:
                continue
            name = namespaces.get(id(holder))
            if name is not None:
                _name_in_module(holder, name, rising, chains, words)
            elif not _ends(graph, holder):
                held = (rising[key] for key in map(id, gc.get_referents(holder)) if key in rising)
                known = below.setdefault(id(holder), set())
                new = set().union(*held) - known
                new = {key for key in new if n_rising[key] < _MOST_TARGETS and key not in words}
                for key in new:
                    if not n_rising[key]:
                        chains[key].insert(0, holder)
                    n_rising[key] += 1
                if new:
                    known |= new
                    above[id(holder)] = new
                    following.append(holder)
        met.extend(following)
        # Or the next search would find these lists.
        holders.clear()
        level.clear()
        level.extend(each for each in following if above[id(each)] - words.keys())
        following.clear()
        rising = above
    return {key: (chain, words.get(key)) for key, chain in chains.items()}


def _name_in_module(
    namespace: Any,
    name: str,
    rising: dict[int, set[int]],
    chains: dict[int, list[object]],
    words: dict[int, str],
) -> None:
    """Note the variable of a module that leads to each of the rising targets."""
    for key, value in list(dict.items(namespace)):
        for target in rising.get(id(value), set()) - words.keys():
            words[target] = f"{name}.{key}" if type(key) is str else f"{name}[…]"
            chains[target].insert(0, value)


def _ends(graph: Graph, each: object) -> bool:
    """Return whether there is nothing to search for above a holder.

    What the graph has met has its own holders there; a function that runs is a root; modules and
    the notebook's own namespace hold everything.
    """
    if graph.find(each) is not None or graph.is_boundary(each):
        return True
    return is_a(each, ModuleType) or (type(each) is FrameType and is_running(each))


def _list_named_namespaces() -> dict[int, str]:
    """Return the modules' names by the ids of their namespaces, without the notebook's own."""
    main = sys.modules.get("__main__")
    return {
        id(read_namespace(module)): name
        for name, module in list(sys.modules.items())
        if is_a(module, ModuleType) and module is not main and type(name) is str
    }
