"""Peaks are exact for us and unchanged for the user, on an allocator that needs no GPU.

The same is proved on a real one, in three processes: ``tests/gpu/test_peaks.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.backends.peak_overlay import PeakOverlay
from gpumemwidget.testing import DeviceFullError, SimulatedGpus, simulate_torch

MIB = 1 << 20
BYTES = ("allocated_bytes", "reserved_bytes")


def bind(allocator: SimulatedGpus) -> Any:
    """The bindings of ``torch._C`` that read and reset, over a simulated allocator."""
    return simulate_torch(allocator)._C


class Twins:
    """One program on three allocators: with us, without us, and one that keeps the truth."""

    def __init__(self) -> None:
        self.with_us, self.without, self.truth = (
            SimulatedGpus(total_bytes=200 * MIB) for _ in range(3)
        )
        self.bindings = bind(self.with_us)
        self.overlay = PeakOverlay(self.bindings)
        self.held: list[tuple[int, ...]] = []
        self.best = (0, 0)

    @property
    def allocators(self) -> tuple[SimulatedGpus, ...]:
        return (self.with_us, self.without, self.truth)

    def allocate(self, n_bytes: int) -> None:
        handles = []
        for allocator in self.allocators:
            try:
                handles.append(allocator.allocate(n_bytes))
            except DeviceFullError:
                handles.append(0)
        if all(handles):
            self.held.append(tuple(handles))

    def free(self, place: int) -> None:
        if self.held:
            handles = self.held.pop(place % len(self.held))
            for allocator, handle in zip(self.allocators, handles, strict=True):
                allocator.free(handle)

    def empty_cache(self) -> None:
        for allocator in self.allocators:
            allocator.empty_cache()

    def user_resets(self, name: str) -> None:
        getattr(self.bindings, name)(0)
        getattr(bind(self.without), name)(0)
        self._fold_truth()
        getattr(bind(self.truth), name)(0)

    def user_reads(self, name: str) -> tuple[Any, Any]:
        return getattr(self.bindings, name)(0), self.without.stats(0)

    def start_span(self) -> None:
        self.overlay.start_span(0)
        self.truth.reset_peak(0)
        self.best = (0, 0)

    def read_span(self) -> tuple[tuple[int, ...], bool]:
        stats, peak_is = self.overlay.read(0)
        return tuple(stats[name]["all"]["peak"] for name in BYTES), peak_is

    def read_truth(self) -> tuple[int, int]:
        self._fold_truth()
        return self.best

    def _fold_truth(self) -> None:
        stats = self.truth.stats(0)
        allocated, reserved = (stats[name]["all"]["peak"] for name in BYTES)
        self.best = (max(self.best[0], allocated), max(self.best[1], reserved))


STEPS = st.one_of(
    st.tuples(st.just("allocate"), st.sampled_from((1, 512, MIB, 3 * MIB, 30 * MIB, 90 * MIB))),
    st.tuples(st.just("free"), st.integers(0, 9)),
    st.tuples(st.just("empty_cache")),
    st.tuples(
        st.just("user_resets"),
        st.sampled_from(("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")),
    ),
    st.tuples(
        st.just("user_reads"), st.sampled_from(("_cuda_memoryStats", "_accelerator_getDeviceStats"))
    ),
    st.tuples(st.just("start_span")),
    st.tuples(st.just("read_span")),
)


@given(st.lists(STEPS, min_size=5, max_size=80))
def test_any_program_tells_the_user_the_same_and_us_the_truth(steps: list[tuple[Any, ...]]) -> None:
    """Whatever is allocated, freed, reset and read, in whatever order, with spans in between."""
    twins = Twins()
    twins.start_span()

    for name, *args in steps:
        result = getattr(twins, name)(*args)

        if name == "user_reads":
            with_us, without = result
            assert with_us == without
        if name == "read_span":
            peaks, peak_is = result
            assert peak_is == "exact"
            assert peaks == twins.read_truth()
    with_us, without = twins.user_reads("_cuda_memoryStats")
    assert with_us == without
    assert twins.read_span() == (twins.read_truth(), "exact")


def test_reset_behind_our_back_is_noticed() -> None:
    """A mark below what it was known to be makes the peak "at least"; the user's view is reset."""
    allocator = SimulatedGpus()
    bindings = bind(allocator)
    overlay = PeakOverlay(bindings)
    allocator.free(allocator.allocate(128 * MIB))
    overlay.start_span(0)
    handle = allocator.allocate(64 * MIB)
    overlay.read(0)
    allocator.free(handle)

    allocator.reset_peak(0)

    stats, peak_is = overlay.read(0)
    assert peak_is == "at least"
    assert stats["allocated_bytes"]["all"]["peak"] == 64 * MIB
    assert bindings._cuda_memoryStats(0) == allocator.stats(0)
    overlay.start_span(0)
    assert overlay.read(0)[1] == "exact"


def test_private_pool_that_goes_away_is_no_reset() -> None:
    """Statistics of a CUDA graph's pool vanish with it; that must not make a peak "at least"."""
    allocator = SimulatedGpus()
    pools: dict[tuple[int, int], Any] = {(0, 1): {"all": {"current": 5, "peak": 9}}}
    bindings = bind(allocator)
    bindings._cuda_memoryStats = lambda device: {
        **allocator.stats(device),
        "reserved_bytes_by_private_pools": {
            pool: {"all": dict(stats["all"])} for pool, stats in pools.items()
        },
    }
    overlay = PeakOverlay(bindings)
    overlay.start_span(0)
    pools[(0, 1)]["all"]["peak"] = 3

    pools[(0, 2)] = pools.pop((0, 1))

    assert overlay.read(0)[1] == "exact"
    assert bindings._cuda_memoryStats(0)["reserved_bytes_by_private_pools"] == {
        (0, 2): {"all": {"current": 5, "peak": 3}}
    }


def test_uninstall_puts_back_what_was_there_twice() -> None:
    """Afterwards the bindings are the very objects that they were."""
    bindings = bind(SimulatedGpus())
    before = dict(vars(bindings))
    overlay = PeakOverlay(bindings)
    assert vars(bindings) != before

    overlay.uninstall()
    overlay.uninstall()

    assert vars(bindings) == before


def test_refused_arguments_are_refused_in_the_bindings_own_words() -> None:
    """A call that the binding refuses changes nothing that we remember."""
    bindings = bind(SimulatedGpus())
    bindings._cuda_resetPeakMemoryStats = _refuse
    PeakOverlay(bindings)

    with pytest.raises(TypeError, match="its own words"):
        bindings._cuda_resetPeakMemoryStats("cuda")


def _refuse(*_args: object) -> None:
    raise TypeError("its own words")
