"""What a person would call what the walk has met, and what IPython holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from gpumemwidget.errors import GpuMemError
from gpumemwidget.owners.kinds import Kind, is_one_of
from gpumemwidget.owners.walk import Graph
from gpumemwidget.records import IPythonReference

__all__ = ["LENDER", "describe_error", "describe_references", "find_kind_name"]

_MOST_REFERENCES = 5
#: What holds borrowed memory too.
LENDER = "whatever lent it to torch (NumPy, a file)"


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


def describe_error(exc: BaseException) -> str:
    """An exception in one line."""
    if isinstance(exc, KeyboardInterrupt):
        return "interrupted"
    first = str(exc).strip().split("\n", 1)[0]
    if isinstance(exc, GpuMemError):
        return first
    return f"{type(exc).__name__}: {first}" if first else type(exc).__name__


def describe_references(references: Iterable[IPythonReference]) -> str:
    """``"Out[3], Out[5] and 14 places more"``, those first that a person has seen; ``""`` for none.

    One displayed value is held under up to a dozen names, most of them IPython's own affair.
    """
    paths = list(dict.fromkeys(reference.path for reference in references))
    known = [path for path in paths if path.startswith(("Out[", "sys."))] or paths
    shown = known[:_MOST_REFERENCES]
    n_more = len(paths) - len(shown)
    if not n_more:
        return ", ".join(shown)
    return f"{', '.join(shown)} and {n_more} {'place' if n_more == 1 else 'places'} more"
