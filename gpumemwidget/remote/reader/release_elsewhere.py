"""Release names in other processes, where their engine can run code for the user: all or none.

First every process plans. If one of them can't, or would refuse, nothing is released anywhere.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Protocol, runtime_checkable

from gpumemwidget.errors import BadInputError, UnknownNameError, describe_exception
from gpumemwidget.model.processes import Outcome, ProcessState, RemoteRelease
from gpumemwidget.model.releases import ReleaseRequest
from gpumemwidget.remote.reader.collector import Collector, Source

#: Seconds within which a process has to begin, and seconds that it has to end a release.
BEGIN_S = 5.0
END_S = 60.0
_INTERRUPTED = "interrupted before it answered: what became of it is not known"


@runtime_checkable
class ReleasingSource(Protocol):
    """A source whose engine can run code in its processes."""

    def begin_release(
        self, key: str, request: ReleaseRequest, *, dry_run: bool, not_after: float
    ) -> Future[Outcome] | str:
        """Have a process carry out a release, without waiting for it.

        Args:
            key: the process.
            request: the names.
            dry_run: only plan.
            not_after: a moment in seconds since the epoch: later nobody waits for the outcome, and
                nothing may be changed. A host whose clock is ahead by more than ``BEGIN_S``
                refuses.

        Returns:
            The outcome that will come; text: why the process can't be asked.
        """
        ...


def release_elsewhere(
    collector: Collector, address: str, request: ReleaseRequest, *, dry_run: bool = False
) -> RemoteRelease:
    """Release names in the processes of an address.

    Args:
        collector: has the processes.
        address: ``"engine3"``, ``"engine"`` for all of a role, ``"all"``.
        request: the names, as they are called there.
        dry_run: only plan.

    Raises:
        UnknownNameError: there is no such process.
        BadInputError: its engine can't run code there.
    """
    chosen = _choose(collector, address)
    places = [(source, key) for _, source, key in chosen]
    states = [state for state, _, _ in chosen]
    plans, _ = ask_processes(places, request, dry_run=True)
    outcomes = tuple(zip(states, plans, strict=True))
    planned = RemoteRelease(outcomes, is_done=False, is_dry_run=dry_run)
    if dry_run or planned.refused:
        return planned
    reports, is_interrupted = ask_processes(places, request, dry_run=False)
    return replace(
        planned,
        outcomes=tuple(zip(states, reports, strict=True)),
        is_done=True,
        is_interrupted=is_interrupted,
    )


def _choose(collector: Collector, address: str) -> list[tuple[ProcessState, Source, str]]:
    entries = [entry for entry in collector.list_entries() if entry[0].status == "running"]
    name = address.strip().removeprefix("@").strip()
    if not name:
        raise BadInputError("name the process: @engine1, or @all for all of them")
    # ``@engine3``, ``@engine 3``, ``@all``.
    match = re.fullmatch(r"(?P<role>[a-z]+)\s*(?P<number>\d+)?", name)
    chosen = [
        entry
        for entry in entries
        if match is not None
        and match["role"] in ("all", entry[0].info.role)
        and (match["number"] is None or entry[0].info.number == int(match["number"]))
    ]
    if not chosen:
        known = ", ".join(dict.fromkeys(f"@{_name(state)}" for state, _, _ in entries))
        if not known:
            raise UnknownNameError("no watched process is running")
        raise UnknownNameError(f"no process @{name} is running; there are: {known}")
    for state, source, _ in chosen:
        if not isinstance(source, ReleasingSource):
            raise BadInputError(
                f"@{_name(state)} is only listened to: names are released in the engines of "
                "ipyparallel, which run code for you"
            )
    return chosen


def _name(state: ProcessState) -> str:
    info = state.info
    return info.role if info.number is None else f"{info.role}{info.number}"


def ask_processes(
    places: Sequence[tuple[Source, str]], request: ReleaseRequest, *, dry_run: bool
) -> tuple[list[Outcome], bool]:
    """Have processes plan or carry out a release, side by side, and wait for their outcomes.

    Args:
        places: the processes, each by its source and its key there.
        request: the names.
        dry_run: only plan.

    Returns:
        The outcomes in the order of the places, and whether a Ctrl-C came while they released.

    Raises:
        KeyboardInterrupt: a Ctrl-C came while they planned; nothing was changed.
    """
    asked: list[Future[Outcome] | str] = []
    outcomes: list[Outcome] = []
    # By a plan nothing is changed, so one that takes long is not waited for.
    until_s = time.monotonic() + BEGIN_S + (0.0 if dry_run else END_S)
    try:
        for source, key in places:
            asked.append(_begin(source, key, request, dry_run=dry_run))
        for answer in asked:
            outcomes.append(_wait_for(answer, until_s, dry_run=dry_run))
    except KeyboardInterrupt:
        if dry_run:
            raise
        # Some processes have released by now, and the report must say which.
        for answer in asked[len(outcomes) :]:
            is_there = isinstance(answer, str) or answer.done()
            outcomes.append(_read(answer) if is_there else _INTERRUPTED)
        # The next one may have been asked already.
        outcomes += [_INTERRUPTED] * (len(places) - len(outcomes))
        return outcomes, True
    return outcomes, False


def _begin(
    source: Source, key: str, request: ReleaseRequest, *, dry_run: bool
) -> Future[Outcome] | str:
    assert isinstance(source, ReleasingSource)
    try:
        not_after = time.time() + BEGIN_S
        return source.begin_release(key, request, dry_run=dry_run, not_after=not_after)
    except Exception as exc:  # noqa: BLE001 - other processes may have released theirs
        return f"{source.name} could not be asked ({describe_exception(exc)})"


def _wait_for(answer: Future[Outcome] | str, until_s: float, *, dry_run: bool) -> Outcome:
    if not isinstance(answer, str):
        wait([answer], max(0.0, until_s - time.monotonic()))
        if not answer.done() and dry_run:
            return "it is busy, or does not answer: try again when its task has ended"
        if not answer.done():
            return f"no answer within {BEGIN_S + END_S:.0f} s: what became of it is not known"
    return _read(answer)


def _read(answer: Future[Outcome] | str) -> Outcome:
    if isinstance(answer, str):
        return answer
    try:
        return answer.result()
    except Exception as exc:  # noqa: BLE001 - other processes may have released theirs
        return f"it failed there ({describe_exception(exc)})"
