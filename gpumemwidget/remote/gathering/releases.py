"""Release names in other processes, where their engine can run code for the user: all or none.

First every process plans. If one of them can't, or would refuse, nothing is released anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from gpumemwidget.errors import BadInputError, UnknownNameError, describe_exception
from gpumemwidget.model.processes import ProcessState
from gpumemwidget.model.releases import ReleasePlan, ReleaseReport, ReleaseRequest
from gpumemwidget.remote.gathering.collector import Collector, Source

#: The plan or the report of a release in a process; text: why it was refused.
Outcome: TypeAlias = ReleasePlan | ReleaseReport | str

#: ``@rank0``, ``@engine 3``, ``@all``.
_ADDRESS = re.compile(r"@?\s*(?P<role>[a-z]+)\s*(?P<number>\d+)?")


@runtime_checkable
class ReleasingSource(Protocol):
    """A source whose engine can run code in its processes."""

    def release(
        self, keys: Sequence[str], request: ReleaseRequest, *, dry_run: bool
    ) -> Mapping[str, Outcome]:
        """Release names in some processes; a text says why one could not."""
        ...


@dataclass(frozen=True, slots=True)
class RemoteRelease:
    """The outcome of a release in each process."""

    #: Processes with their plan, their report, or why there is none.
    outcomes: tuple[tuple[ProcessState, Outcome], ...]
    #: True if it was carried out; ``False``: it was only planned, as asked, or as one refused.
    is_done: bool

    @property
    def refused(self) -> tuple[ProcessState, ...]:
        """The processes that refused their plan, so that nothing was released anywhere.

        If ``is_done``: those that failed, stopped or did not answer after all had planned, while
        the others released.
        """
        return tuple(state for state, outcome in self.outcomes if _refuses(outcome))


def release_elsewhere(
    collector: Collector, address: str, request: ReleaseRequest, *, dry_run: bool = False
) -> RemoteRelease:
    """Release names in the processes of an address.

    Args:
        collector: has the processes.
        address: ``"rank0"``, ``"engine 3"``, ``"worker"`` for all of a role, ``"all"``, or a label.
        request: the names, as they are called there.
        dry_run: only plan.

    Raises:
        UnknownNameError: there is no such process.
        BadInputError: its engine can't run code there.
    """
    chosen = _choose(collector, address)
    plans = _ask(chosen, request, dry_run=True)
    is_refused = any(_refuses(plan) for _, plan in plans)
    if dry_run or is_refused:
        return RemoteRelease(plans, is_done=False)
    return RemoteRelease(_ask(chosen, request, dry_run=False), is_done=True)


def _refuses(outcome: Outcome) -> bool:
    if isinstance(outcome, str):
        return True
    stop = outcome.refusal if isinstance(outcome, ReleasePlan) else outcome.stopped
    return stop is not None


def _choose(collector: Collector, address: str) -> list[tuple[ProcessState, Source, str]]:
    entries = [entry for entry in collector.list_entries() if entry[0].status == "running"]
    name = address.removeprefix("@").strip()
    match = _ADDRESS.fullmatch(name)
    chosen = [
        entry
        for entry in entries
        if match is not None
        and match["role"] in ("all", entry[0].info.role)
        and (match["number"] is None or entry[0].info.number == int(match["number"]))
    ]
    if not chosen:
        chosen = [entry for entry in entries if name in (entry[0].info.label, entry[0].info.id)]
    if not chosen:
        known = ", ".join(dict.fromkeys(f"@{_name(state)}" for state, _, _ in entries))
        there = f"there are: {known}" if known else "none runs"
        raise UnknownNameError(f"no process @{name} is running; {there}")
    for state, source, _ in chosen:
        if not isinstance(source, ReleasingSource):
            raise BadInputError(
                f"@{_name(state)} is only listened to: names are released in the processes of "
                "ipyparallel, Dask and Ray, which run code for you"
            )
    return chosen


def _name(state: ProcessState) -> str:
    info = state.info
    return info.role if info.number is None else f"{info.role}{info.number}"


def _ask(
    chosen: Sequence[tuple[ProcessState, Source, str]], request: ReleaseRequest, *, dry_run: bool
) -> tuple[tuple[ProcessState, Outcome], ...]:
    answers: dict[tuple[int, str], Outcome] = {}
    sources = {id(source): source for _, source, _ in chosen}
    for source in sources.values():
        assert isinstance(source, ReleasingSource)
        keys = [key for _, each, key in chosen if each is source]
        try:
            outcomes = source.release(keys, request, dry_run=dry_run)
        except Exception as exc:  # noqa: BLE001 - other engines may have released theirs
            why = f"{source.name} could not be asked ({describe_exception(exc)})"
            outcomes = dict.fromkeys(keys, why)
        answers.update({(id(source), key): outcome for key, outcome in outcomes.items()})
    silent = "it did not answer"
    return tuple((state, answers.get((id(source), key), silent)) for state, source, key in chosen)
