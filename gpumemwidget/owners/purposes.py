"""What a storage is for: a parameter, a gradient, an optimizer's state, an activation."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable

from gpumemwidget.owners.attributes import read_attribute
from gpumemwidget.owners.kinds import Kind, is_a, is_one_of
from gpumemwidget.owners.paths import Paths
from gpumemwidget.owners.walk import Graph
from gpumemwidget.records import MemoryKind

__all__ = ["Purposes"]

_COMPILER = re.compile(r"torch\._(inductor|dynamo|functorch)\b")


class Purposes:
    """Tells what each storage of a walk is for.

    A storage may be several things at once; the first of these is said: parameter, gradient,
    optimizer state, buffer, saved for backward (and reached in no other way), compile cache.

    Args:
        graph: what was walked.
        paths: the best paths in it.
    """

    def __init__(self, graph: Graph, paths: Paths) -> None:
        self._graph = graph
        self._paths = paths
        self._parameters: set[int] = set()
        self._states: set[int] = set()
        self._buffers: set[int] = set()
        self._parameter_classes: dict[int, bool] = {}
        for place in paths.list_special("module"):
            self._note(self._buffers, (self._read(place, "_buffers"),), depth=1)
        for place in paths.list_special("optimizer"):
            self._note(self._parameters, (self._read(place, "param_groups"),), depth=3)
            state = self._read(place, "state")
            if is_a(state, dict):
                # The keys are the parameters.
                self._note(self._states, list(dict.values(state)), depth=8)

    def find(self, storage: int) -> MemoryKind:
        """What the storage at this place is for."""
        tensors = self._graph.tensors_on.get(storage, ())
        for each in tensors:
            if each in self._parameters or self._is_parameter(each):
                return "parameter"
        for places, word in (
            (self._graph.grads, "gradient"),
            (self._states, "optimizer state"),
            (self._buffers, "buffer"),
        ):
            if not places.isdisjoint(tensors):
                return word  # type: ignore[return-value]  # the words are the kinds'
        if self._paths.passes_graph(storage):
            return "saved for backward"
        root = self._paths.find_root(storage)
        if root is not None and root.kind == "module" and _COMPILER.match(root.word):
            return "compile cache"
        return "tensor"

    def _is_parameter(self, place: int) -> bool:
        cls = type(self._graph.objects[place])
        known = self._parameter_classes.get(id(cls))
        if known is None:
            known = is_one_of(cls, self._graph.reader.parameter_type)
            self._parameter_classes[id(cls)] = known
        return known

    def _read(self, place: int, name: str) -> object:
        return read_attribute(self._graph.objects[place], name)

    def _note(self, into: set[int], targets: Iterable[object], *, depth: int) -> None:
        """Note the tensors in these containers, so many levels down."""
        graph = self._graph
        pending = deque((graph.find(each), depth) for each in targets)
        met: set[int] = set()
        while pending:
            place, left = pending.popleft()
            if place is None or place in met:
                continue
            met.add(place)
            if graph.kinds[place] is Kind.TENSOR:
                into.add(place)
            elif left and graph.kinds[place] is Kind.PLAIN:
                pending.extend((part, left - 1) for part in graph.edges[place])
