"""Release names in other processes, where their engine can run code for the user: all or none.

First every process plans. If one of them can't, or would refuse, nothing is released anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from gpumemwidget.errors import BadInputError, UnknownNameError, describe_exception
from gpumemwidget.model.processes import Outcome, ProcessState, RemoteRelease
from gpumemwidget.model.releases import ReleaseRequest
from gpumemwidget.remote.gathering.collector import Collector, Source

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
    planned = RemoteRelease(plans, is_done=False)
    if dry_run or planned.refused:
        return planned
    return RemoteRelease(_ask(chosen, request, dry_run=False), is_done=True)


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
