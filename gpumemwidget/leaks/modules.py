"""Find what imported modules keep: registries and caches that no variable of the notebook names.

A module of the user's is looked at whole. Libraries have thousands of containers: of each only the
elements that were added since the first look are followed.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType

from gpumemwidget.ownership.graph.objects import (
    is_a,
    list_items,
    read_class_attribute,
    read_namespace,
)
from gpumemwidget.ownership.graph.walk import Graph
from gpumemwidget.ownership.other_holders import MACHINERY
from gpumemwidget.ownership.paths import Root
from gpumemwidget.tracing.sources import is_library

#: The ids of the classes of containers whose last elements are those that were added last: a user's
#: metaclass may have a hash of its own, or none.
_TABLES = frozenset(map(id, (dict, OrderedDict, defaultdict)))
_CONTAINERS = _TABLES | {id(list), id(deque)}


class ModuleContents:
    """What imported modules keep, as far as it may grow."""

    def __init__(self) -> None:
        #: The number of elements that each container of a library had when it was first seen.
        self._sizes: dict[tuple[str, str], int] = {}

    def note_sizes(self) -> None:
        """Note how many elements those containers of libraries have that were not seen before."""
        self._list_added({})

    def enter(
        self, graph: Graph, namespace: Mapping[str, object], *, with_libraries: bool
    ) -> list[Root]:
        """Enter and walk what modules keep; return the roots of it.

        The graph was walked from the user's names. To look at libraries takes 25 ms.
        """
        own = dict(_list_own_modules(namespace))
        found = [
            (f"{name}.{key}", value)
            for name, module in own.items()
            for key, value in list_items(read_namespace(module))
            if type(key) is str
        ]
        found += self._list_added(own) if with_libraries else []
        places = ((word, graph.add_root(target)) for word, target in found)
        roots = [Root(place, word, "module") for word, place in places if place is not None]
        graph.walk()
        return roots

    def _list_added(self, own: Mapping[str, ModuleType]) -> list[tuple[str, object]]:
        """Return what modules other than the user's have added, each with its container's name."""
        found: list[tuple[str, object]] = []
        for name, module in list(sys.modules.items()):
            if type(name) is not str or type(module) is not ModuleType or name in own:
                continue
            if MACHINERY.fullmatch(name):
                continue
            for key, container in list_items(read_namespace(module)):
                cls = id(type(container))
                if cls in _CONTAINERS and type(key) is str:
                    n_known = self._sizes.setdefault((name, key), len(container))
                    if len(container) > n_known:
                        elements = list(dict.values(container) if cls in _TABLES else container)
                        found += [(f"{name}.{key}[…]", element) for element in elements[n_known:]]
        return found


def _list_own_modules(namespace: Mapping[str, object]) -> Iterator[tuple[str, ModuleType]]:
    """Yield the modules that are no libraries, from those that the notebook uses on."""
    pending: list[object] = list(namespace.values())
    met: set[str] = set()
    while pending:
        target = pending.pop()
        name: object = None
        if is_a(target, ModuleType):
            name = dict.get(read_namespace(target), "__name__")
        elif type(target) is FunctionType:
            name = dict.get(target.__globals__, "__name__")
        elif is_a(target, type):
            name = read_class_attribute(target, "__module__")
        if type(name) is not str or name in met:
            continue
        met.add(name)
        module = sys.modules.get(name)
        if not is_a(module, ModuleType) or MACHINERY.fullmatch(name):
            continue
        attributes = read_namespace(module)
        file = dict.get(attributes, "__file__")
        if type(file) is str and not is_library(file):
            yield name, module
            pending += [value for _, value in list_items(attributes)]
