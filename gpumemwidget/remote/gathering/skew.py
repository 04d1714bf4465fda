"""Find the processes that take much more memory than the others of their kind."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

from gpumemwidget.model.devices import HOST
from gpumemwidget.model.processes import DevicePeak, ProcessState, Skew

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
