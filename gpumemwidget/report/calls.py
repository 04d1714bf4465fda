"""Which of the calls below a line are shown: those that hold the most, as deep as they are.

A line that runs a model has hundreds of calls below it. A person wants to see where its memory
went, which is a few paths down the tree: so the biggest call that can be seen is opened, again
and again, until there are enough rows. A call that does nothing but call another is one row with
it, and so are modules that differ in a number alone: the layers of a model.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from gpumemwidget.traces import Call, LineUse

__all__ = ["CallRow", "list_calls", "name_file"]

#: What stands between every module and its ``forward``, and tells nothing.
_PLUMBING = frozenset({"_wrapped_call_impl", "_call_impl", "_fn", "decorate_context"})
#: The call that stands for those that were too many.
_OTHER = "other"
#: Functions of a chain that are named.
_N_NAMED = 3
_FOLDERS = ("site-packages", "dist-packages")
_NUMBER = re.compile(r"\d+", re.ASCII)


@dataclass(frozen=True, slots=True)
class CallRow:
    """A row below a line."""

    #: From 1.
    level: int
    #: The module of the model, else the functions.
    name: str
    #: The functions where the module is the name, and where the innermost was.
    detail: str
    use: LineUse | None
    #: For the rest: what they allocated, still hold and held at the peak together.
    n_more: int = 0
    more_bytes: tuple[int, int, int] = (0, 0, 0)


@dataclass(slots=True)
class _Node:
    """A call, or a chain of calls of which each makes only the next."""

    chain: tuple[Call, ...]
    shown: list[_Node] = field(default_factory=list)

    @property
    def use(self) -> LineUse:
        return self.chain[0].use

    @property
    def module(self) -> str | None:
        return next((call.module for call in reversed(self.chain) if call.module), None)

    def open(self) -> list[_Node]:
        return [_follow(call) for call in self.chain[-1].calls]


def list_calls(
    calls: Sequence[Call],
    *,
    depth: int | None,
    most: int,
    least_bytes: int,
    files: Mapping[str, str],
) -> Iterator[CallRow]:
    """The rows below a line, each followed by those below it.

    Args:
        calls: the line's.
        depth: how many levels are shown, each module alone; ``None`` for as many as fit.
        most: how many calls are shown.
        least_bytes: calls that allocated less are among the rest.
        files: what the user's own files and cells are called.
    """
    if depth is None:
        calls = _merge(calls)
    root = _Node(())
    nodes = [_follow(call) for call in calls]
    _open_biggest(root, nodes, depth=depth, most=most, least_bytes=least_bytes)
    yield from _walk(root, nodes, 1, files)


def _merge(calls: Iterable[Call]) -> tuple[Call, ...]:
    """The calls with those of modules that differ in a number alone as one, biggest first."""
    alike: dict[tuple[str, str, str], list[Call]] = {}
    merged = []
    for call in calls:
        # The module of a layer is often known only one or two calls further down.
        module = _follow(call).module
        if module is None:
            merged.append(replace(call, calls=_merge(call.calls)))
        else:
            key = (_NUMBER.sub("#", module), call.function, call.filename)
            alike.setdefault(key, []).append(call)
    merged.extend(_join(group) for group in alike.values())
    return tuple(sorted(merged, key=lambda call: -_weigh(call.use)))


def _join(calls: Sequence[Call]) -> Call:
    first = calls[0]
    below = _merge(each for call in calls for each in call.calls)
    if len(calls) == 1:
        return replace(first, calls=below)
    uses = [call.use for call in calls]
    # Their highest points are of different moments, so there is none of all together.
    use = LineUse(
        allocated_bytes=sum(use.allocated_bytes for use in uses),
        n_allocs=sum(use.n_allocs for use in uses),
        net_bytes=sum(use.net_bytes for use in uses),
        at_peak_bytes=sum(use.at_peak_bytes for use in uses),
        highest_bytes=0,
    )
    modules = [call.module for call in calls if call.module is not None]
    module = _name_range(modules) if len(modules) == len(calls) else None
    return replace(first, use=use, module=module, calls=below)


def _name_range(names: Sequence[str]) -> str:
    """``transformer.h.0…11.mlp``: each number that differs from its first to its last."""
    texts = _NUMBER.split(names[0])
    columns = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    spans = [(min(column), max(column)) for column in columns]
    numbers = [str(low) if low == high else f"{low}…{high}" for low, high in spans]
    return "".join(itertools.chain(*itertools.zip_longest(texts, numbers, fillvalue="")))


def _follow(call: Call) -> _Node:
    chain = [call]
    while len(call.calls) == 1 and _is_same(call.use, call.calls[0].use):
        call = call.calls[0]
        chain.append(call)
    return _Node(tuple(chain))


def _is_same(use: LineUse, other: LineUse) -> bool:
    return use.allocated_bytes == other.allocated_bytes and use.n_allocs == other.n_allocs


def _weigh(use: LineUse) -> int:
    return max(use.allocated_bytes, use.at_peak_bytes, abs(use.net_bytes))


def _open_biggest(
    root: _Node, nodes: list[_Node], *, depth: int | None, most: int, least_bytes: int
) -> None:
    order = itertools.count()
    waiting = [(-_weigh(node.use), next(order), 1, root, node) for node in nodes]
    heapq.heapify(waiting)
    n_shown = 0
    while waiting and n_shown < most:
        weight, _, level, above, node = heapq.heappop(waiting)
        if -weight < least_bytes or (depth is not None and level > depth):
            continue
        above.shown.append(node)
        n_shown += 1
        for part in node.open():
            heapq.heappush(waiting, (-_weigh(part.use), next(order), level + 1, node, part))


def _walk(
    node: _Node,
    parts: Sequence[_Node],
    level: int,
    files: Mapping[str, str],
) -> Iterator[CallRow]:
    for part in node.shown:
        name, detail = _describe(part, files)
        yield CallRow(level, name, detail, part.use)
        yield from _walk(part, part.open(), level + 1, files)
    n_more = len(parts) - len(node.shown)
    if node.shown and n_more:
        uses = [part.use for part in parts]
        seen = [part.use for part in node.shown]
        rest = (
            sum(use.allocated_bytes for use in uses) - sum(use.allocated_bytes for use in seen),
            sum(use.net_bytes for use in uses) - sum(use.net_bytes for use in seen),
            sum(use.at_peak_bytes for use in uses) - sum(use.at_peak_bytes for use in seen),
        )
        calls = "1 more call" if n_more == 1 else f"{n_more} more calls"
        yield CallRow(level, calls, "", None, n_more, rest)


def _describe(node: _Node, files: Mapping[str, str]) -> tuple[str, str]:
    """The name, and what is said more quietly."""
    if node.chain[-1].function == _OTHER and not node.chain[-1].filename:
        return "other calls", ""
    module = node.module
    names = [call.function for call in node.chain if call.function not in _PLUMBING]
    names = list(dict.fromkeys(names))
    if not names:
        return module or node.chain[-1].function, ""
    if len(names) > _N_NAMED:
        names = [names[0], "…", names[-1]]
    functions = " › ".join(names)
    if len(names) > _N_NAMED:
        names = [names[0], "…", names[-1]]
    functions = " › ".join(names)
    place = _name_place(node.chain, files)
    if module is None:
        return functions, place
    return module, f"{functions}, {place}" if place else functions


def _name_place(chain: Sequence[Call], files: Mapping[str, str]) -> str:
    """``In[7], line 3``: the user's own innermost line; else ``torch/nn/functional.py:134``."""
    for call in reversed(chain):
        if call.filename in files:
            return f"{files[call.filename]}, line {call.line}"
    last = chain[-1]
    name = name_file(last.filename)
    # ``torch.nn.functional.linear`` says as much.
    is_told = name.startswith(last.function.rpartition(".")[0].replace(".", "/") or "/")
    return "" if is_told or not name else f"{name}:{last.line}"


def name_file(filename: str) -> str:
    """A file by its path in its package, or by its own name and its folder's."""
    parts = PurePath(filename.replace("\\", "/")).parts
    for folder in _FOLDERS:
        if folder in parts[:-1]:
            last = len(parts) - 1 - parts[::-1].index(folder)
            return "/".join(parts[last + 1 :])
    return "/".join(parts[-2:]).lstrip("/")
