"""Find the line that adds memory: the one after which more is in use, again and again."""

from __future__ import annotations

import functools
import linecache
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.model.devices import HOST
from gpumemwidget.tracing.line_watch import LineReadings, LineWatch, Place, watch_lines
from gpumemwidget.tracing.sources import IsEntry

#: Time that reading may always take: only a cell or a few steps that grow are read.
_GRACE_NS = 200_000_000
#: Share of the growth that a line must have kept or, if its text says that it stores, taken.
_MIN_SHARE = 0.25
#: Share of a graph's growth that a line must have kept if it makes what another line stores.
_SMALL_SHARE = 0.1
#: Shares of the growth that differ by no more are about the same.
_NEAR_SHARE = 0.05
#: The rank of a line that makes what another one stores.
_STORED = 2
#: Amounts are of the same size if they differ by no more than this share.
_SAME = 0.01
#: Number of the last amounts among which the one that is given back is searched for.
_N_SEARCHED = 1000
_NAME = re.compile(r"[A-Za-z_]\w*")
#: The names that a line binds: ``recon, mu`` in ``recon, mu = vae(x)``, and nothing in ``f(mu=1)``.
_BOUND = re.compile(r"[^=(!<>]*(?==[^=])")
#: A line that runs a backward pass, or drops the gradients of the last one.
_BACKWARD = re.compile(r"\bbackward\(|\bzero_grad\(")
#: The methods that store into a container.
_STORING = r"(append(left)?|add\w*|extend|insert|put\w*|push|set\w*|update|register\w*)"


def start_lines(
    hardware: Hardware,
    device: str,
    where: IsEntry | FrameType,
    files: Sequence[str],
    *,
    on_interrupt: Callable[[], None],
) -> LineWatch | None:
    """Read a device's memory at each line of a cell and of files; ``None`` if that can't be done.

    Args:
        hardware: the machine's memory.
        device: ``cuda:0``, ``host``.
        where: see ``LineWatch.start``.
        files: the names of further files.
        on_interrupt: called for a Ctrl-C that landed in our own code: it sends another.
    """
    counter = _find_counter(hardware, device)
    if counter is None:
        return None
    watch = watch_lines(counter, on_interrupt=on_interrupt, grace_ns=_GRACE_NS)
    return watch if watch.start(where, also=files) else None


@dataclass(frozen=True, slots=True)
class LineChanges:
    """How much each line added that stayed, while lines were read.

    Attributes:
        taken: bytes that each line took, by file and line.
        kept: the amounts of these that no later line gave back.
        grown_bytes: how much was added in all.
    """

    taken: Mapping[Place, int]
    kept: Mapping[Place, Sequence[int]]
    grown_bytes: int

    def find(self, holder: str, *, in_graph: bool, largest_bytes: int) -> tuple[str, int] | None:
        """Return the file and the line that added the most; ``None`` if none added a good part.

        Amounts alone can't tell what is kept from what is given back later. So a line that stores
        into the holder, or makes what another line stores, goes before one that has kept more. Of
        a graph, which keeps what many lines made, the latter must have kept a part. Of lines that
        have kept about as much, the one that took a storage of the right size is told. A line with
        a backward pass, which frees a graph and makes gradients, never makes what a graph keeps.

        Args:
            holder: the path of what holds it: ``trainer.history[…]``.
            in_graph: whether an autograd graph holds it.
            largest_bytes: the size of the largest storage that is held.
        """
        ranking = _Ranking(holder, dict.fromkeys(place[0] for place in self.taken if place))
        found: list[tuple[int, float, bool, tuple[str, int]]] = []
        for place, taken_bytes in self.taken.items():
            if place is None or self.grown_bytes <= 0:
                continue
            if in_graph and _BACKWARD.search(linecache.getline(*place)):
                continue
            rank, amounts = ranking.rank(place), self.kept.get(place, ())
            taken, kept = taken_bytes / self.grown_bytes, sum(amounts) / self.grown_bytes
            is_stored = rank > _STORED or (
                rank == _STORED and (not in_graph or kept >= _SMALL_SHARE)
            )
            if kept >= _MIN_SHARE or (is_stored and taken >= _MIN_SHARE):
                fits = any(_is_same(n_bytes, largest_bytes) for n_bytes in amounts)
                found.append((rank if is_stored else 0, kept, fits, place))
        if not found:
            return None
        highest, most, *_ = max(found)
        near = [each for each in found if each[0] == highest and each[1] >= most - _NEAR_SHARE]
        return max(near, key=lambda each: (each[2], each[1]))[-1]


class _Ranking:
    """Tells how likely a line makes what a holder keeps, by its text.

    Args:
        holder: the path of the holder.
        files: those whose lines store into it.
    """

    def __init__(self, holder: str, files: Iterable[str]) -> None:
        # The names of the containers: in ``trainer.logs[…]["loss"]`` it is ``logs``.
        parts = holder.partition("'s graph")[0].split("[…]")
        names = [name for part in parts[:-1] or parts for name in _NAME.findall(part)[-1:]]
        self._name = rf"\b({'|'.join(names)})\b" if names and names != ["Out"] else ""
        self._stores = re.compile(
            rf"{self._name}(\.{_STORING}\((?P<called>.*)|\[.*\]\s*=(?P<set>.*)|\s*[-+*]?=[^=](?P<bound>.*))"
        )
        #: The names that are stored.
        self._stored: set[str] = set()
        for file in files if self._name else ():
            for line in linecache.getlines(file):
                match = self._stores.search(line)
                if match is not None:
                    stored = next(filter(None, match.groupdict().values()), "")
                    self._stored.update(_NAME.findall(stored))

    def rank(self, place: tuple[str, int]) -> int:
        """Return ``_STORED`` for a line that makes what is stored, more for one that stores it."""
        text = linecache.getline(*place)
        if not self._name:
            return 0
        if self._stores.search(text):
            return _STORED + 1
        bound = _BOUND.match(text)
        if bound is not None and self._stored.intersection(_NAME.findall(bound[0])):
            return _STORED
        return 1 if re.search(self._name, text) else 0


def sum_lines(readings: LineReadings) -> LineChanges:
    """Return what lines have added that stayed: what a later line gave back is left out.

    What is given back is taken to be what was added last, and of the same size if there is such.
    So what a forward pass takes and the backward pass gives back counts for neither.

    Args:
        readings: the readings at the lines.
    """
    added: list[tuple[Place, int]] = []
    taken: dict[Place, int] = {}
    for place, change in readings.events:
        if change > 0:
            added.append((place, change))
            taken[place] = taken.get(place, 0) + change
            continue
        left = -change
        last_ones = reversed(range(max(0, len(added) - _N_SEARCHED), len(added)))
        same = next((k for k in last_ones if _is_same(added[k][1], left)), None)
        if same is not None:
            del added[same]
            continue
        while added and left > 0:
            last, n_bytes = added.pop()
            if n_bytes > left:
                added.append((last, n_bytes - left))
            left -= n_bytes
    kept: dict[Place, list[int]] = {}
    for place, n_bytes in added:
        kept.setdefault(place, []).append(n_bytes)
    return LineChanges(taken, kept, sum(readings.changes.values()) + readings.unread_bytes)


def _is_same(n_bytes: int, other: int) -> bool:
    return abs(n_bytes - other) <= _SAME * other


def read_allocated(hardware: Hardware, device: str) -> int:
    """Return the bytes that are allocated on a device now; 0 where that is not known."""
    readings = (each for each in hardware.read() if each.device == device)
    return next((each.allocated_bytes or 0 for each in readings), 0)


def _find_counter(hardware: Hardware, device: str) -> Callable[[], int] | None:
    if device == HOST:
        return hardware.find_host_counter()
    return functools.partial(read_allocated, hardware, device)
