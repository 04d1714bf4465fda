"""Find what a failed cell's card shows: the line that asked for memory, and the remedies.

Remedies are found when the cell has ended and its traceback still exists, so a release frees what
is promised here.

A recorded stack begins in PyTorch and ends in IPython; in between are the user's own lines. A name
that the cell does not mention it does not need: this errs on the side of too many names, so
whatever stands in a string of the cell counts, for that may be another magic's code.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType
from typing import Any, Literal

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.device_parts import build_breakdown
from gpumemwidget.errors import forgets_frames
from gpumemwidget.model.devices import HOST, Frame
from gpumemwidget.model.ooms import OomEvent, Remedy, RemedyKind
from gpumemwidget.model.ownership import DeviceAccount, MemoryAccount, Owned
from gpumemwidget.ownership.account import describe_memory, may_read_graphs, read_blocks
from gpumemwidget.ownership.graph.objects import (
    is_a,
    is_one_of,
    list_bases,
    list_referents,
    paused_collector,
    read_cell,
    read_type_dict,
)
from gpumemwidget.ownership.holdings import Holdings, join_marks, take_holdings
from gpumemwidget.ownership.partition import ReleasePartition, join_overlapping
from gpumemwidget.ownership.shell import LAST_EXCEPTION, Shell
from gpumemwidget.tracing.sources import Sources, is_library, name_module

#: Remedies that free less are left out (bytes).
_MIN_BYTES = 1024**2

_Is = Literal["exact", "at least", "at most", "about"]


@forgets_frames
def find_remedies(
    shell: Shell,
    hardware: Hardware,
    event: OomEvent,
    at_oom: DeviceAccount | None,
    *,
    mentions: Collection[str],
    budget_s: float,
) -> tuple[MemoryAccount | None, tuple[Remedy, ...]]:
    """Walk the heap once; return the owners after the cell's end, and the remedies.

    Args:
        shell: the running IPython; the cell has ended, and its traceback still exists.
        hardware: the allocators' figures and blocks.
        event: the state of the device at the OOM.
        at_oom: who owned what on that device, as read within the failing allocation. Without it
            the owners after the cell's end are taken in its place, and returned.
        mentions: the words of the cell's code.
        budget_s: seconds for all of it. Where the walk stops early, figures are ``about``.

    Returns:
        The owners after the cell's end (``None`` with ``at_oom``), and the remedies in the order
        of ``Remedy.rank``.
    """
    with paused_collector():
        is_at_end = at_oom is None
        blocks = read_blocks(shell, hardware, event.device)
        holdings = take_holdings(
            shell,
            # The walk's evaluation takes the rest.
            budget_s=0.8 * budget_s,
            depth="holders" if is_at_end else "release",
            reads_graphs=may_read_graphs(hardware),
            blocks=blocks,
        )
        taken = None
        if at_oom is None:
            taken, _ = describe_memory(holdings, shell, hardware, blocks, event.device)
            devices = {part.device: part for part in taken.devices}
            at_oom = devices.get(event.device)
        remedies: list[Remedy] = []
        if holdings is not None:
            has_blocks = event.device in blocks.devices
            releases = _Releases(holdings, event.device, has_blocks=has_blocks)
            remedies += releases.release_exception(None if is_at_end else at_oom)
            remedies += releases.list_releases(mentions)
        remedies += _list_settings(event)
        uses = () if event.device == HOST else hardware.read_libraries(event.device)
        cached_bytes = sum(use.cached_bytes or 0 for use in uses if use.can_empty)
        if cached_bytes:
            remedies.append(Remedy(RemedyKind.LIBRARY_CACHES, cached_bytes, "at most"))
        if at_oom is not None:
            remedies += _list_savings(at_oom, mentions, is_at_end=is_at_end)
    breakdown = build_breakdown(event.state)
    if breakdown is not None and breakdown.asleep_bytes:
        # What sleeps has no memory behind it that a release could give.
        remedies = [replace(remedy, gives_is="at most") for remedy in remedies]
    # 1 % of the request, but 64 MiB are listed however large it was.
    least = max(_MIN_BYTES, min((event.requested_bytes or 0) // 100, 64 << 20))
    remedies = [
        remedy for remedy in remedies if remedy.gives_bytes is None or remedy.gives_bytes >= least
    ]
    return taken, tuple(sorted(remedies, key=lambda remedy: remedy.rank))


class _Releases:
    """Computes what releases would free on one device."""

    def __init__(self, holdings: Holdings, device: str, *, has_blocks: bool) -> None:
        self._holdings = holdings
        self._device = device
        #: Without the blocks, sizes are rounded as the allocator rounds them at least.
        self._is: _Is = "exact" if has_blocks or device == HOST else "at least"
        if not holdings.graph.is_complete:
            self._is = "about"

    def release_exception(self, at_oom: DeviceAccount | None) -> Iterator[Remedy]:
        """Yield the release of the last exception, which often frees the whole failed step.

        What an earlier exception held at the OOM may be left in cycles, and goes too.
        """
        if LAST_EXCEPTION not in self._holdings.rows:
            return
        gives, gives_is = self._judge(ReleasePartition(self._holdings, (), exceptions=True))
        if not self._holdings.graph.is_complete and gives < _MIN_BYTES:
            # Whatever it may be, it is often most of all.
            yield Remedy(RemedyKind.LAST_EXCEPTION, None, gives_is)
            return
        had_earlier = at_oom is not None and any(
            line.root == "exception" and set(line.rows) <= {LAST_EXCEPTION} for line in at_oom.owned
        )
        is_exact = gives_is == "exact"
        yield Remedy(
            RemedyKind.LAST_EXCEPTION, gives, "at least" if had_earlier and is_exact else gives_is
        )

    def list_releases(self, mentions: Collection[str]) -> Iterator[Remedy]:
        """Yield the releases of displayed values, and of names not mentioned."""
        displayed = ReleasePartition(self._holdings, (), out=True)
        if displayed.dropped:
            yield Remedy(RemedyKind.OUT, *self._judge(displayed))
        names = sorted(self._list_names(mentions), key=lambda remedy: remedy.rank)
        for loses_training_state in (False, True):
            alike = [row for row in names if row.loses_training_state is loses_training_state]
            # More than the four largest of a sort are no help.
            yield from alike[:4]

    def _list_names(self, mentions: Collection[str]) -> Iterator[Remedy]:
        """Yield the releases of variables that the cell does not mention, one by one.

        Variables that free much more together than one by one are one remedy besides.
        """
        holdings = self._holdings
        unused = {
            row.name: row
            for row in holdings.rows.values()
            if row.root == "name" and row.name not in mentions
        }
        marks = join_marks(row.mark for row in unused.values())
        places = [
            place
            for place in holdings.list_storages(marks)
            if holdings.graph.storages[place].device == self._device
        ]
        for unit in join_overlapping([holdings.marks[place] & marks for place in places]):
            names = tuple(name for name, row in unused.items() if row.mark & unit)
            alone = list(filter(None, (self._release_names((name,)) for name in names)))
            yield from alone
            together = self._release_names(names) if len(names) > 1 else None
            if together is not None:
                found = sum(release.gives_bytes or 0 for release in alone)
                if (together.gives_bytes or 0) - found >= max(_MIN_BYTES, found // 10):
                    yield together

    def _release_names(self, names: tuple[str, ...]) -> Remedy | None:
        """Return the release of names; ``None`` if it frees nothing or would move something."""
        partition = ReleasePartition(self._holdings, names)
        gives, gives_is = self._judge(partition)
        # The cell may be working with memory that would have to be moved to the CPU.
        if not gives or partition.moved:
            return None
        loses_training_state = bool(partition.dropped & self._holdings.training_marks)
        return Remedy(RemedyKind.NAMES, gives, gives_is, names, loses_training_state)

    def _judge(self, partition: ReleasePartition) -> tuple[int, _Is]:
        """Return the bytes that go with what is dropped, and how exactly they are known."""
        dying = partition.sum_dying()
        is_more = self._is == "exact" and dying.is_at_least
        return dying.on(self._device), "at least" if is_more else self._is


def _list_settings(event: OomEvent) -> Iterator[Remedy]:
    """Yield changes to the settings of the allocator, the process or the machine."""
    if event.cached_bytes:
        yield Remedy(RemedyKind.CACHED_BLOCKS, event.cached_bytes, "exact")
    # The first one's name is new in PyTorch 2.9.
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    settings = "".join(os.environ.get(name, "") for name in names)
    if (
        event.is_fragmented
        and event.device.startswith("cuda:")
        and "expandable_segments:True" not in settings
    ):
        yield Remedy(RemedyKind.EXPANDABLE_SEGMENTS, event.unallocated_bytes, "at most")
    if event.limit_bytes is not None:
        free, room = event.device_free_bytes, event.room_bytes
        beyond = None if free is None or room is None else free - room
        yield Remedy(RemedyKind.LIMIT, beyond, "at most")
    breakdown = build_breakdown(event.state)
    others_bytes = sum(
        part.n_bytes
        for part in (() if breakdown is None else breakdown.parts)
        if part.key in ("children", "others")
        or ("others" in part.merged and {"allocated", "outside", "free"}.isdisjoint(part.merged))
    )
    if others_bytes:
        yield Remedy(RemedyKind.OTHER_PROCESSES, others_bytes, "at most")


def _list_savings(
    at_oom: DeviceAccount, mentions: Collection[str], *, is_at_end: bool
) -> Iterator[Remedy]:
    """Yield changes to the cell by which the same work needs less memory."""
    # The roots under which the account has the functions that ran out of memory.
    running = {"thread", "exception"} if is_at_end else {"thread"}
    saved = sum(
        line.n_bytes
        for line in at_oom.owned
        if line.kind == "saved for backward"
        and (is_at_end or line.root != "exception")
        and _is_this_cells(line, mentions)
    )
    # Tensors that only the running functions hold.
    made = sum(
        line.n_bytes for line in at_oom.owned if line.kind == "tensor" and line.root in running
    )
    if saved + made:
        yield Remedy(RemedyKind.SMALLER_BATCH, (saved + made) // 2, "about")
    gradients = sum(line.n_bytes for line in at_oom.owned if line.kind == "gradient")
    if gradients:
        yield Remedy(RemedyKind.GRADIENTS, gradients, "at most")
    if saved:
        # Whoever mentions one of these may be training, in a way that can't be seen from here.
        training = {"backward", "fit", "grad", "train", "training_step"}
        is_inference = training.isdisjoint(mentions)
        kind = RemedyKind.NO_GRAD if is_inference else RemedyKind.CHECKPOINTING
        yield Remedy(kind, saved, "at most")


def _is_this_cells(owned: Owned, mentions: Collection[str]) -> bool:
    """Return whether memory may be the running cell's: variables not mentioned in it are older."""
    if owned.root == "name":
        return any(name in mentions for name in (*owned.rows, *owned.steps[:1]))
    return owned.root != "out"


# -- The cell's code -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FailingLine:
    """A line of the user's, and what it called."""

    #: ``In [7], line 3``; ``None`` where no line of the user's is in the stack.
    place: str | None
    text: str
    #: ``torch.nn.modules.linear.Linear.forward``; ``None`` where the line calls C at once.
    function: str | None


def find_failing_line(frames: Sequence[Frame], sources: Sources) -> FailingLine:
    """Return the user's innermost line in a stack, and the public function that it called."""
    called = takewhile(lambda frame: is_library(frame.filename), frames)
    function = _find_function(called)
    for frame in frames:
        source = sources.find(frame.filename)
        if source is None:
            continue
        number = sources.find_line(frame) or frame.line
        text = source.lines[number - 1].strip() if 0 < number <= len(source.lines) else ""
        return FailingLine(f"{source.name}, line {number}", text, function)
    return FailingLine(None, "", function)


def _find_function(frames: Iterable[Frame]) -> str | None:
    """Return the innermost function that has a public name."""
    for frame in frames:
        if all(_is_public(part) for part in frame.function.split(".")):
            module = name_module(frame.filename) or PurePath(frame.filename).stem
            return f"{module}.{frame.function}"
    return None


def _is_public(name: str) -> bool:
    # ``wrapper.<locals>.inner`` is a decorator's, and says nothing of what was called.
    return not name.startswith(("_", "<")) or (name.startswith("__") and name.endswith("__"))


def list_mentions(source: str, namespace: Mapping[str, object]) -> frozenset[str]:
    """Return all words of a cell's code: names, attributes, and those in its strings.

    Args:
        source: the cell, with its magics as typed or as IPython makes calls of them.
        namespace: the notebook's; functions and classes of its own are looked into.
    """
    words = set(_list_source_words(source))
    pending = list(words)
    met: dict[int, object] = {}
    while pending:
        value = namespace.get(pending.pop())
        new = set().union(*map(_list_code_words, _list_codes(value, namespace, met))) - words
        words |= new
        pending.extend(new)
    return frozenset(words)


def _list_source_words(source: str) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            # The warnings were shown when the cell was compiled.
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        yield from re.findall(r"\w+", source)
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\w+", node.value)


def _list_code_words(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from _list_code_words(constant)


def _list_codes(
    value: object, namespace: Mapping[str, object], met: dict[int, object]
) -> Iterator[CodeType]:
    """Yield the code of the notebook's own functions in a value, as far as it is plain to see."""
    own_name = namespace.get("__name__")
    # Classes of objects that refer to functions and, but for a method's own object, to little else.
    wrappers = (MethodType, property, staticmethod, classmethod)
    pending: list[Any] = [value]
    while pending:
        found = pending.pop()
        cls = type(found)
        # A card must not take long; a cell names few functions.
        if id(found) in met or len(met) >= 2000:
            continue
        met[id(found)] = found
        if cls is FunctionType:
            # That of a decorator has the function that it wraps in its closure.
            pending.extend(map(read_cell, found.__closure__ or ()))
            if found.__globals__ is namespace:
                yield found.__code__
        elif cls is functools.partial:
            pending += [found.func, *found.args, *found.keywords.values()]
        elif any(cls is wrapper for wrapper in wrappers):
            pending += list_referents(found)
        else:
            for base in list_bases(found if is_a(found, type) else cls):
                attributes = read_type_dict(base)
                module = attributes.get("__module__")
                if type(module) is str and module == own_name:
                    kinds = (FunctionType, *wrappers)
                    methods = attributes.values()
                    pending += [method for method in methods if is_one_of(type(method), *kinds)]
