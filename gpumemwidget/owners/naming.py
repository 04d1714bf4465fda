"""What a person would call an object that the walk has met."""

from __future__ import annotations

from collections import deque

from gpumemwidget.owners.kinds import Kind, is_one_of
from gpumemwidget.owners.walk import Graph

__all__ = ["find_kind_name"]


def find_kind_name(graph: Graph, place: int) -> str:
    """What a person would call an object: ``tensor``, ``view``, ``parameter``, ``module``."""
    target, reader = graph.objects[place], graph.reader
    cls = type(target)
    if graph.kinds[place] is Kind.TENSOR:
        if is_one_of(cls, reader.parameter_type):
            return "parameter"
        with reader.quiet():
            return "view" if reader.is_view(target) else "tensor"
    for kind, classes in (
        ("module", (reader.module_type,)),
        ("optimizer", (reader.optimizer_type,)),
        ("exception", (BaseException,)),
        ("container", (dict, list, tuple, set, frozenset, deque)),
    ):
        if is_one_of(cls, *classes):
            return kind
    return "object"
