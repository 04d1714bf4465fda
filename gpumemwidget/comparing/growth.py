"""Find the peaks that may have grown from one result to another: the check of ``--fail-above``."""

from __future__ import annotations

from collections.abc import Iterator

from gpumemwidget.comparing.totals import (
    PEAK,
    PROCESS_PEAKS,
    Side,
    Total,
    count_namesakes,
    list_both,
    name_processes,
    strip_number,
)
from gpumemwidget.errors import BadInputError
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.processes import ProcessState
from gpumemwidget.units import format_bytes

#: Words on a process whose peak so far may not be its highest.
_UNFINISHED = {
    "failed": "has failed",
    "lost": "has no end: it was killed, or its recording is cut off",
    "running": "is still running",
}


def list_growth(a: Side, b: Side, share: float) -> list[str]:
    """Return a sentence for each reason why a peak has grown, or may have, by more than a share.

    The peaks are those on GPUs; where neither side has a GPU, those on the host. One that only one
    side has may have grown, and so may all of a process in ``b`` that has not ended well.

    Raises:
        BadInputError: neither side has a peak.
    """
    firsts, seconds = list_both(a, b)
    keys = [key for key in {**firsts, **seconds} if key[1] in (PEAK, PROCESS_PEAKS)]
    keys = [key for key in keys if key[0] != HOST] or keys
    if not keys:
        raise BadInputError("neither side has a peak: nothing can be said of its growth")
    found = list(_list_doubts(_list_states(b)))
    unclear: set[str] = set()
    for side, parts in (("A", a), ("B", b)):
        for name, number in count_namesakes(_list_states(parts)).items():
            unclear.add(name)
            found.append(
                f"{number} processes are called {name} in {side}, and which is meant is not known: "
                "name one file"
            )
    for key in keys:
        where = "on the host" if key[0] == HOST else f"on {key[0]}"
        old, new = firsts.get(key), seconds.get(key)
        for total, side in ((old, "A"), (new, "B")):
            if total is not None and total.n_bytes is None:
                found.append(f"not every peak {where} is known in {side}")
        olds, news = _list_peaks(old), _list_peaks(new)
        for what in dict.fromkeys([*olds, *news]):
            old_bytes, new_bytes = olds.get(what), news.get(what)
            if strip_number(what) in unclear:
                continue
            if old_bytes is None or new_bytes is None:
                side = "A" if old_bytes is None else "B"
                found.append(f"no peak of {what} {where} is known in {side}")
            elif new_bytes - old_bytes > share * old_bytes:
                found.append(
                    f"{what} {where} has grown from {format_bytes(old_bytes)} to "
                    f"{format_bytes(new_bytes)}, by more than {100 * share:.6g} %"
                )
    return found


def _list_states(side: Side) -> list[ProcessState]:
    parts = side if isinstance(side, tuple) else ()
    return [part for part in parts if isinstance(part, ProcessState)]


def _list_doubts(states: list[ProcessState]) -> Iterator[str]:
    for name, state in name_processes(states).items():
        if state.status in _UNFINISHED:
            yield f"{name} {_UNFINISHED[state.status]}, in B"
        if state.n_unread:
            yield f"{name} has parts that could not be read, in B"
        if not state.peaks:
            yield f"{name} has no peak, in B"


def _list_peaks(total: Total | None) -> dict[str, int]:
    if total is None:
        return {}
    if total.measure == PROCESS_PEAKS:
        return {what: n_bytes for (what, _), n_bytes in total.rows.items()}
    return {} if total.n_bytes is None else {"the memory": total.n_bytes}
