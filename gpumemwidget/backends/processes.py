"""The processes below this one: workers of a DataLoader, ranks that a cell has launched.

Whoever was seen below this process stays its child, by number and start: a rank that lets itself be
adopted by another is the notebook's all the same.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path

from gpumemwidget.backends.base import Relation
from gpumemwidget.backends.commands import name_process
from gpumemwidget.backends.procfiles import ProcessFacts, ProcessReader, find_reader
from gpumemwidget.devices import MOST_CHILDREN, ChildProcess

__all__ = ["ProcessTree"]

#: Of more children that have ended the last are remembered.
_MOST_ENDED = 1024
#: How long a process that is nobody of ours is not looked at again (its number may be another's by
#: then), and at how many of them a look looks again.
_TRUSTED_S = 30.0
_MOST_AGAIN = 64


class ProcessTree:
    """The operating system as a ``ProcessSource``.

    Each look lists the numbers of all processes and reads those that are new, and those below this
    one: a fraction of a millisecond, and some 15 µs more for each process of a first look.

    Args:
        reader: where processes are read.
        get_own_pid: the number of this process, which is another's after a fork.
        clock: seconds.
    """

    def __init__(
        self,
        reader: ProcessReader | None = None,
        *,
        get_own_pid: Callable[[], int] = os.getpid,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader = find_reader(Path("/proc")) if reader is None else reader
        self._get_own_pid = get_own_pid
        self._clock = clock
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._pid = self._get_own_pid()
        self._below: dict[int, ProcessFacts] = {}
        #: Those of ours that have ended, the latest last, with their names.
        self._ended: dict[int, str | None] = {}
        self._names: dict[int, str | None] = {}
        #: Who is nobody of ours, and until when that is taken for granted; the next first.
        self._others: dict[int, float] = {}

    @property
    def own_pid(self) -> int:
        """This process's number."""
        return self._get_own_pid()

    @property
    def are_numbers_certain(self) -> bool:
        """Whether processes have the numbers here that they have for the whole machine."""
        return self._reader.are_numbers_the_machines()

    def list_children(self) -> tuple[ChildProcess, ...]:
        """The running processes below this one; of more than 256 those with most host memory."""
        with self._enter():
            self._look()
            running = sorted(pid for pid, facts in self._below.items() if not facts.is_zombie)
            found = [
                ChildProcess(
                    pid=pid,
                    parent_pid=self._below[pid].parent_pid,
                    name=self._names[pid] or f"process {pid}",
                    resident_bytes=self._reader.read_resident_bytes(pid),
                )
                for pid in running
            ]
        if len(found) > MOST_CHILDREN:
            found = sorted(found, key=lambda each: -(each.resident_bytes or 0))[:MOST_CHILDREN]
            found.sort(key=lambda each: each.pid)
        return tuple(found)

    def describe(
        self, pids: Collection[int], *, are_ours: bool | None
    ) -> Mapping[int, tuple[Relation, str | None]]:
        """See ``ProcessSource``.

        Where it is not known whose the numbers are, a process of this number is taken for the one
        that is meant if it has opened a GPU for computing.
        """
        if are_ours is False:
            return dict.fromkeys(pids, ("other", None))
        with self._enter():
            self._look()
            return {
                pid: self._describe(pid)
                if are_ours or self._reader.uses_gpu(pid) is True
                else ("other", None)
                for pid in pids
            }

    def _describe(self, pid: int) -> tuple[Relation, str | None]:
        if pid == self._pid:
            return "own", self._name(pid, self._reader.read(pid), {}, with_arguments=False)
        if pid in self._below:
            return "child", self._names[pid]
        facts = self._reader.read(pid)
        if facts is None and pid in self._ended:
            return "child", self._ended[pid]
        return "other", None if facts is None else self._name(pid, facts, {}, with_arguments=False)

    def _enter(self) -> threading.Lock:
        """The lock; in a forked child a new one, for a thread of the parent may have held it."""
        if self._get_own_pid() != self._pid:
            self._begin()
        return self._lock

    # -- The tree ----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Find who is below this process now."""
        pids = self._reader.list_pids()
        self._refresh(pids)
        self._forget_others(pids)
        unknown = pids - self._others.keys() - self._below.keys() - {self._pid}
        found = [facts for pid in unknown if (facts := self._reader.read(pid)) is not None]
        self._take_in(found)
        until_s = self._clock() + _TRUSTED_S
        self._others.update((facts.pid, until_s) for facts in found if facts.pid not in self._below)
        self._name_all()

    def _forget_others(self, pids: set[int]) -> None:
        """Drop those that have ended, and some of those that were not looked at for long."""
        for pid in self._others.keys() - pids:
            del self._others[pid]
        now_s = self._clock()
        for pid, until_s in list(islice(self._others.items(), _MOST_AGAIN)):
            if until_s <= now_s:
                del self._others[pid]

    def _refresh(self, pids: set[int]) -> None:
        """Read those below anew; those that have ended are remembered for a while."""
        for pid, before in list(self._below.items()):
            now = self._reader.read(pid) if pid in pids else None
            if now is not None and now.start == before.start:
                self._below[pid] = now
                continue
            del self._below[pid]
            self._ended.pop(pid, None)
            self._ended[pid] = self._names.pop(pid, None)
        while len(self._ended) > _MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    def _take_in(self, found: Iterable[ProcessFacts]) -> None:
        """Of processes that are new, those whose parent is one of ours, and theirs."""
        own = self._reader.read(self._pid)
        # Who has left its parent is still in the session that this process leads, if it leads one.
        session = own.session if own is not None and own.session == self._pid else None
        by_parent: dict[int, list[ProcessFacts]] = {}
        new = []
        for facts in found:
            by_parent.setdefault(facts.parent_pid, []).append(facts)
            if session is not None and facts.session == session:
                new.append(facts)
        for pid in (self._pid, *self._below):
            new += by_parent.pop(pid, ())
        while new:
            facts = new.pop()
            self._below[facts.pid] = facts
            self._ended.pop(facts.pid, None)
            new += by_parent.pop(facts.pid, ())

    # -- Names -------------------------------------------------------------------------------------

    def _name_all(self) -> None:
        # Each time: what has just been forked may become another program under the same number.
        commands: dict[int, Sequence[str]] = {}
        for pid in sorted(self._below):
            self._names[pid] = self._name(pid, self._below[pid], commands, with_arguments=True)

    def _name(
        self,
        pid: int,
        facts: ProcessFacts | None,
        commands: dict[int, Sequence[str]],
        *,
        with_arguments: bool,
    ) -> str | None:
        """Its name now; ``commands`` has those that were read a moment ago, by number."""
        if facts is None or (facts.is_zombie and pid in self._names):
            return self._names.get(pid)
        command = self._read_command(pid, commands)
        forked_from = None
        if pid in self._below and command:
            above = self._read_command(facts.parent_pid, commands)
            if list(above) == list(command):
                forked_from = name_process(command)
        return name_process(
            command, facts.thread_name, with_arguments=with_arguments, forked_from=forked_from
        )

    def _read_command(self, pid: int, commands: dict[int, Sequence[str]]) -> Sequence[str]:
        if pid not in commands:
            commands[pid] = self._reader.read_command(pid)
        return commands[pid]
