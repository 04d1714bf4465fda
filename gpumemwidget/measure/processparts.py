"""The processes on a device as parts of its memory, where the driver's list of them makes sense.

Within a container the driver lists processes by numbers from outside of it, or none at all: then
none of them can be told from this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpumemwidget.devices import BridgePart, DeviceState, PartKey, ProcessUse
from gpumemwidget.measure.shares import Slot, check_bytes, solve
from gpumemwidget.records import HOST
from gpumemwidget.units import format_bytes

__all__ = ["list_processes", "list_unknown"]

#: Processes that a note names.
_MOST_NAMED = 4


def list_unknown(device: str) -> list[Slot]:
    """What else takes memory of the device, where nothing of it is known."""
    keys: tuple[PartKey, ...] = ("outside", "children", "others", "unlisted")
    return [Slot((key,)) for key in (("children", "others") if device == HOST else keys)]


def list_processes(state: DeviceState, counted: Sequence[Slot], notes: list[str]) -> list[Slot]:
    """This process and the others, as far as the list of them can be believed.

    Args:
        state: what was read of the device.
        counted: what is counted of this process there.
        notes: gets a sentence on what is not believed.
    """
    device, processes = state.info.device, state.processes
    unknown = [*counted, *list_unknown(device)]
    if processes is None:
        return unknown
    if device == HOST:
        # Pages that a child shares with this process are resident in both.
        has_children = any(each.relation == "child" for each in processes)
        return unknown if has_children else [*counted, Slot(("others",))]
    children = _add_up("children", [each for each in processes if each.relation == "child"])
    own = [each for each in processes if each.relation == "own"]
    if not own and state.reading is not None:
        notes.append(_describe_strangers(device, processes))
        return unknown
    own_bytes = _sum_processes(own)
    counted_bytes = sum(slot.n_bytes for slot in counted)
    if own_bytes is not None and own_bytes < counted_bytes:
        notes.append(
            f"{device}: the driver's {format_bytes(own_bytes)} for this process are less than the "
            f"{format_bytes(counted_bytes)} that PyTorch alone has, so that figure is another "
            "process's or of another moment."
        )
        return unknown
    silent = [each for each in processes if check_bytes(each.n_bytes) is None]
    if silent:
        notes.append(
            f"{device}: the driver does not tell how much {_name_processes(silent)} "
            f"{'has' if len(silent) == 1 else 'have'}."
        )
    others = _add_up("others", [each for each in processes if each.relation == "other"])
    strangers = [children, others]
    if not state.are_children_told:
        strangers = [_join(*strangers)]
    mine = [*counted, Slot(("outside",))]
    if own_bytes is not None:
        keys = tuple(key for slot in mine for key in slot.keys)
        mine = [Slot(keys, solve(own_bytes, mine))]
    return [*mine, *strangers, Slot(("unlisted",))]


def _sum_processes(processes: Iterable[ProcessUse]) -> int | None:
    """``None`` where that of one is not known."""
    amounts = [check_bytes(each.n_bytes) for each in processes]
    known = [each for each in amounts if each is not None]
    return sum(known) if len(known) == len(amounts) else None


def _add_up(key: PartKey, processes: Sequence[ProcessUse]) -> Slot:
    """Processes as one part, made of each of them."""
    n_bytes = _sum_processes(processes)
    if n_bytes is None:
        return Slot((key,))
    parts = [
        BridgePart("process", each.n_bytes, process=each) for each in processes if each.n_bytes
    ]
    parts.sort(key=lambda part: -part.n_bytes)
    return Slot((key,), (BridgePart(key, n_bytes, parts=tuple(parts)),))


def _join(children: Slot, others: Slot) -> Slot:
    """Both as one part that is made of all of them, as any of the others may be a child."""
    keys = (*children.keys, *others.keys)
    if children.parts is None or others.parts is None:
        return Slot(keys)
    each = [part for slot in (children, others) for made in slot.parts or () for part in made.parts]
    each.sort(key=lambda part: -part.n_bytes)
    n_bytes = sum(part.n_bytes for part in each)
    return Slot(keys, (BridgePart("rest", n_bytes, merged=keys, parts=tuple(each)),))


def _describe_strangers(device: str, processes: Sequence[ProcessUse]) -> str:
    if not processes:
        return (
            f"{device}: the driver lists no process there, not even this one, as in a container or "
            "without permission, so they are not told apart."
        )
    return (
        f"{device}: listed are {_name_processes(processes)}; one of these may be this process, by "
        "another number."
    )


def _name_processes(processes: Sequence[ProcessUse]) -> str:
    names = [
        f"pid {each.pid}"
        + ("" if check_bytes(each.n_bytes) is None else f" ({format_bytes(each.n_bytes)})")
        for each in processes[:_MOST_NAMED]
    ]
    if len(processes) > _MOST_NAMED:
        names.append(f"{len(processes) - _MOST_NAMED} more")
    return ", ".join(names)
