"""Bring recorded processes together on the GPUs that they share, each GPU once."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

from gpumemwidget.model.devices import HOST, DeviceUse
from gpumemwidget.model.processes import DevicePeak, GpuPart, GpuShare, ProcessState, Skew


def share_gpus(states: Sequence[ProcessState]) -> tuple[GpuShare, ...]:
    """Return the GPUs that these processes use, host by host.

    A GPU is known by its UUID: its index is another one in each process that sees other GPUs.
    """
    groups: dict[tuple[str, str], list[tuple[ProcessState, int]]] = {}
    for state in states:
        for place, info in enumerate(state.devices):
            if info.device != HOST:
                key = info.uuid or f"{state.info.id} {info.device}"
                groups.setdefault((state.info.host, key), []).append((state, place))
    shares = []
    for (host, _), members in groups.items():
        infos = [state.devices[place] for state, place in members]
        use = _find_use(members)
        total = infos[0].total_bytes
        shares.append(
            GpuShare(
                host=host,
                uuid=infos[0].uuid,
                name=infos[0].name,
                total_bytes=total if use is None or use.total_bytes is None else use.total_bytes,
                used_bytes=None if use is None else use.used_bytes,
                free_bytes=None if use is None else use.free_bytes,
                parts=tuple(
                    _make_part(state, state.devices[place].device) for state, place in members
                ),
            )
        )
    return tuple(sorted(shares, key=lambda share: (share.host, share.uuid or "")))


def _find_use(members: Sequence[tuple[ProcessState, int]]) -> DeviceUse | None:
    """Return the newest use of a GPU that a running process has read; ``None`` if there is none.

    What a process read at its end counts memory that it has given back since.
    """
    found = [
        (state, use)
        for state, place in members
        for use in state.uses
        if state.status == "running"
        and use.device == state.devices[place].device
        and use.used_bytes is not None
    ]
    _, use = max(found, key=lambda pair: pair[0].heard_at, default=(None, None))
    return use


def _make_part(state: ProcessState, device: str) -> GpuPart:
    reading = next((found for found in state.readings if found.device == device), None)
    own_bytes = dict(state.own_bytes).get(device)
    n_bytes = own_bytes
    if own_bytes is None and reading is not None:
        n_bytes = reading.reserved_bytes
    if state.status != "running":
        n_bytes = 0
    return GpuPart(
        process=state,
        device=device,
        reading=reading,
        peak=next((peak for peak in state.peaks if peak.device == device), None),
        n_bytes=n_bytes,
    )


#: Minimum share of the median by which a peak stands out, and minimum number of bytes.
_LEAST_SHARE = 0.05
_LEAST_BYTES = 64 * 1024**2


def find_skews(states: Sequence[ProcessState]) -> tuple[Skew, ...]:
    """Return the processes whose peak is well above the median of those with the same role.

    Compared are the peaks of *allocated* on each process's fullest GPU; with fewer than three
    processes there is no median to speak of.

    Returns:
        The biggest difference first.
    """
    found = []
    for role in {state.info.role for state in states}:
        peaks = [
            (state, peak)
            for state in states
            if state.info.role == role and (peak := _find_fullest(state)) is not None
        ]
        if len(peaks) < 3:
            continue
        middle = median_low(peak.allocated_bytes or 0 for _, peak in peaks)
        for state, peak in peaks:
            above = (peak.allocated_bytes or 0) - middle
            if above >= max(_LEAST_BYTES, _LEAST_SHARE * middle):
                found.append(Skew(state, peak, above, len(peaks)))
    return tuple(sorted(found, key=lambda skew: -skew.above_median_bytes))


def _find_fullest(state: ProcessState) -> DevicePeak | None:
    peaks = [p for p in state.peaks if p.device != HOST and p.allocated_bytes is not None]
    return max(peaks, key=lambda peak: peak.allocated_bytes or 0, default=None)
