"""How much memory a working day's history takes: eight hours at 10 Hz, eight GPUs and the host."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

from benchmarks.rows import Row, format_bytes, judge
from gpumemwidget.model.devices import HOST, Reading, Sample
from gpumemwidget.recording.history import History

#: Bytes that the history may take, however long the day.
MOST_BYTES = 50e6
_DEVICES = (*(f"cuda:{index}" for index in range(8)), HOST)
_HOURS = 8
_RATE_HZ = 10


def measure(quick: bool) -> list[Row]:
    """The history's bytes at the end, as the interpreter counts them."""
    hours = 0.05 if quick else _HOURS
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    history = History()
    for sample in _make_samples(int(hours * 3600 * _RATE_HZ)):
        history.append(sample)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    what = f"history of {hours:g} h at {_RATE_HZ} Hz, {len(_DEVICES) - 1} GPUs and the host"
    kept = f", {len(history)} samples kept"
    return [judge(what, after - before, MOST_BYTES, format_bytes, kept)]


def _make_samples(count: int) -> Iterator[Sample]:
    """A day of training: every counter moves at every sample, so that nothing can be shared."""
    for index in range(count):
        # Multiplying by an odd number modulo a power of two visits every value, in no visible
        # order, and costs far less than a random number.
        allocated = 2**30 + index * 0x9E3779B1 % 2**36
        yield Sample(
            time_s=index / _RATE_HZ,
            readings=tuple(
                _make_reading(device, allocated + 512 * place)
                for place, device in enumerate(_DEVICES)
            ),
        )


def _make_reading(device: str, allocated: int) -> Reading:
    return Reading(
        device=device,
        allocated_bytes=allocated,
        reserved_bytes=allocated + 2**21,
        allocated_peak_bytes=allocated + 2**20,
        reserved_peak_bytes=allocated + 2**22,
        peak_is="exact",
        num_alloc_retries=allocated >> 20,
        num_ooms=allocated >> 21,
    )
