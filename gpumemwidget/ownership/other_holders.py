"""Find holders that no name leads to: libraries, running functions, C++.

That something is held by one of them is known by counting. An object with more references than the
walk from the user's names can account for is also held by something else, and so "frees" is not
guessed. The count of a Python object is Python's; of tensors and storages torch has a second one,
of C++.

That walk stops at modules, for behind them lies the whole process. Tensors that Python can see and
that it did not meet are explained from the other end: up from the tensor, holder by holder, to a
module's variable or to an object that nobody holds. What stands there becomes a root of its own.
"""

from __future__ import annotations

import contextvars
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from types import FrameType, ModuleType
from typing import Any

from gpumemwidget.model.devices import HOST
from gpumemwidget.ownership.graph.kinds import Kind
from gpumemwidget.ownership.graph.objects import (
    is_a,
    iterate_frames,
    list_items,
    name_class,
    read_attribute,
    read_locals,
    read_namespace,
)
from gpumemwidget.ownership.graph.walk import Graph, find_scope
from gpumemwidget.ownership.paths import Root
from gpumemwidget.tracing.sources import is_library

#: Modules whose functions run the user's: front ends, debuggers, test runners. Their variables are
#: not walked, for behind a test runner's lie all of its tests.
MACHINERY = re.compile(
    r"(IPython|ipykernel|traitlets|tornado|zmq|asyncio|threading|concurrent|selectors|runpy"
    r"|jupyter_client|debugpy|_?pydevd\w*|gpumemwidget|pytest|_pytest|pluggy|xdist|execnet"
    r"|__channelexec__)(\..*)?"
)


def list_held_elsewhere(
    graph: Graph,
    root_refs: dict[int, int],
    among: Iterable[int] | None = None,
) -> list[int]:
    """Return the places, ``among`` these, that something else holds too.

    The roots have ``root_refs`` references to a place; nothing else of ours may hold its object.
    """
    leads = graph.flag_reaching_memory()
    if among is None:
        places = list(compress(range(len(leads)), leads))
    else:
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
        return excess - (id(target) in graph.reader.held_classes)
    if kind is Kind.FUNCTION and excess <= graph.n_unpackings.get(find_scope(target.__code__), 0):
        # Torch shows the hook that unpacks, and not the one that packed and lives as long: it is
        # defined in the same scope.
        return 0
    if kind is Kind.HIDDEN and graph.hidden.is_script(type(target)):
        # A scripted module is held by its own methods.
        return 0
    if kind is Kind.NODE and graph.cpp_refs[place]:
        # The node of a function written in Python always owned its context.
        return excess - (graph.reader.cpp_holds_node or place in graph.contexts)
    return excess


def enter_running(graph: Graph) -> list[Root]:
    """Enter and walk what running functions and context variables hold; return their roots.

    The user's own functions come first: what they pass on has a name of theirs.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    # While autograd's own thread asks, the user's functions run on the main one.
    own = {threading.get_ident(), threading.main_thread().ident}
    roots: list[Root] = []
    for of_library in (False, True):
        for ident, frame in iterate_frames():
            if is_library(frame.f_code.co_filename) is of_library:
                word = "running" if ident in own else f"thread {names.get(ident, ident)}"
                roots.extend(_enter_variables(graph, frame, word))
    for variable, value in contextvars.copy_context().items():
        place = graph.add_root(value)
        if place is not None and not MACHINERY.fullmatch(name_class(type(value))):
            word = f"context variable {variable.name}"
            roots.append(Root(place, word, "thread", context_variable=variable.name))
    graph.walk()
    return roots


def enter_outside(graph: Graph) -> list[int]:
    """Enter and walk tensors and autograd nodes that nothing known leads to.

    The graph of a computed tensor is held in C++, where no reference count shows it. Listing all
    objects takes some 100 ms in a large process, and is left out when the time is up.

    Returns:
        The places of tensors whose memory was not met before.
    """
    if graph.is_late():
        return []
    reader, find = graph.reader, graph.kind_finder.find
    met = {(info.device, info.address) for info in graph.storages.values()}
    living = graph.kind_finder.list_living(Kind.NODE, Kind.TENSOR)
    outside = [target for target in living if graph.find(target) is None]
    living.clear()
    unmet: list[int] = []
    with reader.quiet():
        for target in outside:
            if find(type(target)) is Kind.NODE:
                graph.add_root(target)
                continue
            parts = reader.read_tensor(target)
            is_unmet = False
            for storage in (parts.storage, *parts.inner_storages):
                info = None if storage is None else reader.read_storage(storage)
                if info is not None and not info.is_borrowed:
                    # On the host there are thousands of scalars and the like.
                    is_large = info.device != HOST or info.n_bytes >= 4096
                    is_unmet |= is_large and (info.device, info.address) not in met
            place = graph.add_root(target) if is_unmet or parts.is_computed else None
            if is_unmet and place is not None:
                unmet.append(place)
    graph.walk()
    return unmet


def find_module_roots(graph: Graph, places: Iterable[int]) -> list[Root]:
    """Return a root for each of these objects that is a variable of a module."""
    wanted = {id(graph.objects[place]): place for place in places}
    main = sys.modules.get("__main__")
    roots: dict[int, Root] = {}
    for name, module in list(sys.modules.items()) if wanted else ():
        if type(name) is not str or module is main or not is_a(module, ModuleType):
            continue
        for key, value in list_items(read_namespace(module)):
            place = wanted.get(id(value))
            if place is not None:
                word = f"{name}.{key}" if type(key) is str else f"{name}[…]"
                roots.setdefault(place, Root(place, word, "module"))
    return list(roots.values())


def list_rootless(graph: Graph, known: Iterable[int], others: Sequence[int]) -> list[Root]:
    """Return roots for those of the other places through which alone some memory is reached.

    The others are in the order in which they were met, so that holders come last.
    """
    reached = graph.reach(known)
    roots: list[Root] = []
    for place in reversed(others):
        found = graph.reach([place], beyond=reached)
        reached |= found
        if not found.isdisjoint(graph.storages):
            roots.append(Root(place, "no name", "nowhere"))
    return roots


def _enter_variables(graph: Graph, frame: FrameType, word: str) -> Iterator[Root]:
    # Code may run in a namespace of a class of the user's.
    module = dict.get(frame.f_globals, "__name__")
    if type(module) is not str or MACHINERY.fullmatch(module):
        return
    where = f"{word}: {frame.f_code.co_name}() line {frame.f_lineno}"
    for name, value in read_locals(frame).items():
        place = graph.add_root(value)
        if place is not None:
            yield Root(place, f"{where}: {name}", "thread", thread=word)
