"""What holds tensors that no name of the notebook leads to: libraries, running functions, C++.

The walk from the user's names stops at modules, for behind them lies the whole process. Tensors
that Python can see and that walk did not meet are explained here from the other end: up from the
tensor, holder by holder, to a module's global or to an object that nobody holds. What stands there
becomes a root of its own, and its walk explains all else that it holds.
"""

from __future__ import annotations

import contextvars
import gc
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any

from gpumemwidget.libraries import is_library
from gpumemwidget.owners.attributes import read_locals
from gpumemwidget.owners.collector import list_referrers
from gpumemwidget.owners.kinds import Kind, is_a, is_running, name_class, read_namespace
from gpumemwidget.owners.paths import Root
from gpumemwidget.owners.walk import Graph

__all__ = ["enter_running", "enter_surroundings", "find_holder"]

#: A search through the references of the whole process is linear in this too.
_MOST_TARGETS = 16
_MOST_STEPS_UP = 24
_MOST_CLIMBS = 64
#: What two of our lists hold, and the call that counts.
_OWN_REFS = 3
#: Of less than this nobody asks what holds it.
_LEAST_BYTES = 4096
_MACHINERY = re.compile(
    r"(IPython|ipykernel|traitlets|tornado|zmq|asyncio|threading|concurrent|selectors|runpy"
    r"|jupyter_client|debugpy|_?pydevd\w*|gpumemwidget|pytest|_pytest|pluggy)(\..*)?"
)


def enter_running(graph: Graph) -> list[Root]:
    """Enter and walk what running functions and the context hold; the roots that were entered."""
    roots = [*_enter_threads(graph), *_enter_context(graph)]
    graph.walk()
    return roots


def enter_surroundings(
    graph: Graph, outside: Iterable[object], *, budget_s: float, most_climbs: int = _MOST_CLIMBS
) -> list[Root]:
    """Enter and walk what holds the tensors that the graph has not met.

    Args:
        graph: the walk from all rows and running functions; it is extended.
        outside: the tensors that it has not met, among other things (``counts.list_outside``).
        budget_s: seconds after which no other holder is looked for.
        most_climbs: for so many tensors it is looked for a holder.

    Returns:
        The roots that were entered; what was found without a root has the kind ``nowhere``.
    """
    deadline = time.perf_counter() + budget_s
    roots: list[Root] = []
    unmet, sizes = _list_unmet(graph, outside)
    n_climbs = 0
    while unmet:
        if graph.find(unmet[-1]) is None:
            chain, word = [unmet[-1]], None
            # Two lists and the call itself hold it: where that is all, there is nothing to find.
            is_held = sys.getrefcount(unmet[-1]) > _OWN_REFS
            if is_held and sizes[-1] >= _LEAST_BYTES and n_climbs < most_climbs:
                n_climbs += 1
                chain, word = _climb(graph, unmet, outside)
            root = _enter_first(graph, chain, word)
            del chain
            roots.extend([] if root is None else [root])
            graph.walk()
        unmet.pop()
        sizes.pop()
        if time.perf_counter() > deadline:
            break
    return roots


def find_holder(graph: Graph, place: int) -> str | None:
    """A module's word for what holds an object, beside all that the graph has met.

    ``None`` where Python can't see any.
    """
    targets = [graph.objects[place]]
    _, word = _climb(graph, targets, ())
    return word


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
            roots.append(Root(place, f"context variable {variable.name}", "thread"))
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
            yield Root(place, f"{where}: {name}", "thread")


def _list_unmet(graph: Graph, outside: Iterable[object]) -> tuple[list[object], list[int]]:
    """The tensors whose storages no row reaches, and the bytes of these; the biggest last."""
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
    order = sorted(range(len(found)), key=sizes.__getitem__)
    return [found[number] for number in order], sorted(sizes)


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
    graph: Graph, unmet: Sequence[object], outside: Iterable[object]
) -> tuple[list[object], str | None]:
    """Up from the last of these tensors to a module, or to whatever nobody holds.

    Returns:
        The objects on the way, the topmost first, and the module's word for it.
    """
    target: object = unmet[-1]
    if graph.is_late():
        return [target], None
    namespaces = _list_named_namespaces()
    met = {id(target)}
    #: What each object on the way holds of those below it.
    below: dict[int, object] = {}
    held: list[object] = []
    level: list[object] = [target]
    for _ in range(_MOST_STEPS_UP):
        # Each step is a look at the whole process; without the last of them the account says so.
        if graph.is_late():
            break
        following: list[object] = []
        referrers = list_referrers(level)
        own = {id(each) for each in (unmet, outside, level, below, held, referrers, following)}
        own.add(id(graph.objects))
        for each in referrers:
            name = namespaces.get(id(each))
            if name is not None:
                found = _find_key(each, level)
                if found is not None:
                    word = f"{name}.{found[0]}" if type(found[0]) is str else f"{name}[…]"
                    return _list_down(found[1], below, target), word
            if name is not None or id(each) in met or id(each) in own or _ends(graph, each):
                continue
            met.add(id(each))
            referents = {id(one) for one in gc.get_referents(each)}
            below[id(each)] = next((one for one in level if id(one) in referents), target)
            following.append(each)
        # Or the next search would find this list.
        referrers.clear()
        if not following:
            break
        held.extend(following)
        level = following[:_MOST_TARGETS]
    return _list_down(level[0], below, target), None


def _ends(graph: Graph, each: object) -> bool:
    """Whether there is nothing to look for above a holder.

    What the graph has met has its own holders there; a function that runs is a root; modules and
    the notebook's own namespace hold everything.
    """
    if graph.find(each) is not None or graph.is_boundary(each):
        return True
    return is_a(each, ModuleType) or (type(each) is FrameType and is_running(each))


def _list_down(top: object, below: dict[int, object], target: object) -> list[object]:
    """From the topmost object down to the tensor."""
    chain = [top]
    while chain[-1] is not target and id(chain[-1]) in below:
        chain.append(below[id(chain[-1])])
    return chain


def _list_named_namespaces() -> dict[int, str]:
    """The namespaces of the modules but the notebook's own, under whatever name it goes."""
    main = sys.modules.get("__main__")
    return {
        id(read_namespace(module)): name
        for name, module in list(sys.modules.items())
        if is_a(module, ModuleType) and module is not main and type(name) is str
    }


def _find_key(namespace: Any, level: Sequence[object]) -> tuple[object, object] | None:
    for key, value in list(dict.items(namespace)):
        if any(value is each for each in level):
            return key, value
    return None
