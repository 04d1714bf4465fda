"""The rules by which two readings become a record, one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpumemwidget.model.cells import CellDevice, CellRecord, Span
from gpumemwidget.model.devices import Reading
from gpumemwidget.recording.running_cell import (
    RunningCell,
    build_record,
    find_first_line,
    has_only_own_magics,
)
from tests.recording.scripted import gpu, host


def make_cell(*before: Reading, partial: bool = False, start_failed: bool = False) -> RunningCell:
    return RunningCell(
        execution_count=7,
        cell_id="abc",
        first_line="x = 1",
        started_at=1_800_000_000.0,
        start_s=10.0,
        before=before,
        partial=partial,
        start_failed=start_failed,
    )


def record_of(cell: RunningCell, *after: Reading, known_devices: Sequence[str] = ()) -> CellRecord:
    return build_record(cell, after, end_s=12.5, status="ok", known_devices=known_devices)


class TestFirstLine:
    """What a record calls its cell."""

    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            ("x = 1", "x = 1"),
            ("x = 1\ny = 2\n", "x = 1"),
            ("\n  \n\t\n   x = 1  \ny = 2", "x = 1"),
            ("x = 1\ry = 2", "x = 1"),
            ("%%memtrace " + "-" * 300 + "\nx = 1", "x = 1"),
            ("", ""),
            (" \n\n ", ""),
            ("%%memtrace\nmodel = load()", "model = load()"),
            ("%%memtrace --device cuda:0\n\n  model = load()\n", "model = load()"),
            ("%%memtrace", "%%memtrace"),
            ("%%memtraced\nx", "%%memtraced"),
            ("a" * 120, "a" * 120),
            ("a" * 121, "a" * 119 + "…"),
            ("é" * 500 + "\nx", "é" * 119 + "…"),
            ("x = '\ud83d'", "x = '?'"),
        ],
    )
    def test_says_what_the_cell_does(self, source: str, expected: str) -> None:
        """The first line with anything on it, but not the magic that asks for our own report."""
        assert find_first_line(source) == expected


class TestOwnMagics:
    """Which cells are gpumemwidget's alone, so that a table may leave them out."""

    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            ("%memdash", True),
            ("%load_ext gpumemwidget", True),
            ("\n# the state now\n  %memvars\n%memledger --all\n", True),
            ("%memtrace on", True),
            # What changes the user's memory is part of its story.
            ("%memrelease x", False),
            ("%memrelease x --dry-run", True),
            ("%memrelease x --dry-runs", False),
            ("%load_ext gpumemwidget\nimport torch", False),
            ("%load_ext autoreload", False),
            ("%%memtrace\nmodel = load()", False),
            ("%memstatistics", False),
            ("x = 1", False),
            ("", False),
        ],
    )
    def test_has_only_own_magics(self, source: str, expected: bool) -> None:
        """Comments and blank lines do not count; a release and a traced cell are the user's."""
        assert has_only_own_magics(source) is expected


class TestRecord:
    """A whole cell, or what is known of it."""

    def test_holds_both_ends_and_the_peak(self) -> None:
        """All figures of both devices, in the order of the readings."""
        cell = make_cell(gpu(100, reserved=200, retries=3, ooms=1), host(50, reserved=60))

        record = record_of(
            cell,
            gpu(150, reserved=400, peak=390, retries=5, ooms=2),
            host(40, reserved=80, peak=90),
        )

        assert record == CellRecord(
            execution_count=7,
            cell_id="abc",
            first_line="x = 1",
            started_at=1_800_000_000.0,
            start_s=10.0,
            duration_s=2.5,
            status="ok",
            devices=(
                CellDevice(
                    device="cuda:0",
                    allocated=Span(100, 150, 390),
                    reserved=Span(200, 400, 400),
                    peak_is="exact",
                    num_alloc_retries=2,
                    num_ooms=1,
                ),
                CellDevice(
                    device="host",
                    allocated=Span(50, 40, 90),
                    reserved=Span(60, 80, 90),
                    peak_is="exact",
                    num_alloc_retries=None,
                    num_ooms=None,
                ),
            ),
        )

    def test_a_gpu_seen_before_but_not_at_the_start_is_unknown_there(self) -> None:
        """Its start could not be read: 0 would be a lie, and the mark is an older span's."""
        cell = make_cell(host(5))

        record = record_of(cell, gpu(30, peak=70), host(5), known_devices=("cuda:0", "host"))

        lost, _ = record.devices
        assert lost == CellDevice(
            "cuda:0", Span(None, 30, None), Span(None, 30, None), None, None, None
        )

    def test_the_host_never_begins_at_zero(self) -> None:
        """A process always has memory."""
        record = record_of(make_cell(), host(30))

        (device,) = record.devices
        assert device.allocated == Span(None, 30, None)

    def test_a_gpu_lost_in_the_cell_stays_in_the_record(self) -> None:
        """Its end is unknown, and the host still stands last."""
        cell = make_cell(gpu(10), gpu(20, device="cuda:1"), host(5))

        record = record_of(cell, gpu(20, device="cuda:1"), host(5))

        assert [device.device for device in record.devices] == ["cuda:0", "cuda:1", "host"]
        assert record.devices[0] == CellDevice(
            "cuda:0", Span(10, None, None), Span(10, None, None), None, None, None
        )

    def test_one_unknown_counter_leaves_the_other(self) -> None:
        """Where malloc tells nothing, the resident size is still good."""
        before = Reading("host", None, 100, None, 100, "sampled")
        after = Reading("host", None, 80, None, 130, "sampled")

        record = record_of(make_cell(before), after)

        (device,) = record.devices
        assert device.allocated == Span(None, None, None)
        assert device.reserved == Span(100, 80, 130)
        assert device.peak_is == "sampled"

    def test_a_peak_is_never_below_what_was_seen(self) -> None:
        """The kernel rounds VmHWM; what stood at an end was there for certain."""
        record = record_of(
            make_cell(
                host(500),
            ),
            host(400, peak=450),
        )

        (device,) = record.devices
        assert device.allocated.peak_bytes == 500

    def test_totals_that_fell_were_reset(self) -> None:
        """After torch.cuda.reset_accumulated_memory_stats() nobody knows how many there were."""
        record = record_of(make_cell(gpu(1, retries=5, ooms=2)), gpu(1, retries=1, ooms=2))

        (device,) = record.devices
        assert (device.num_alloc_retries, device.num_ooms) == (None, 0)


class TestOutside:
    """What this process has of a GPU beside what PyTorch has reserved."""

    def test_the_peak_is_the_highest_of_all_readings(self) -> None:
        """Of the samples, the cell's start and its end."""
        cell = make_cell(gpu(10, reserved=10))
        cell.own_before = (("cuda:0", 40),)
        cell.note_outside((("cuda:0", 95),), [gpu(20, reserved=25)])
        cell.note_outside((("cuda:0", 50),), [gpu(20, reserved=25)])

        record = build_record(
            cell, [gpu(0)], end_s=12.5, status="ok", own_after=(("cuda:0", 30), ("cuda:1", 7))
        )

        first, second = record.devices
        assert first.outside == Span(30, 30, 70)
        assert second.outside == Span(0, 7, 7)

    @pytest.mark.parametrize(
        ("near", "peak"),
        [
            ([10, 90], 30),  # PyTorch has reserved memory while the driver was asked
            ([90, 10], 30),  # or freed it
            ([150, 10], 20),  # memory that sleeps
            ([None, 10], 20),
            ([], 120),  # PyTorch is not on this GPU
        ],
    )
    def test_what_pytorch_moves_meanwhile_is_not_outside(
        self, near: list[int | None], peak: int
    ) -> None:
        """A sample counts what was outside by both readings, just before and after it."""
        cell = make_cell(gpu(10, reserved=10))
        cell.own_before = (("cuda:0", 30),)
        cell.note_outside((("cuda:0", 120),), [Reading("cuda:0", 1, n_bytes) for n_bytes in near])

        record = build_record(
            cell, [gpu(10, reserved=10)], end_s=12.5, status="ok", own_after=(("cuda:0", 25),)
        )

        (device,) = record.devices
        assert device.outside == Span(20, 15, peak)


class TestPartial:
    """The cell that loads the extension began without us."""

    @pytest.mark.parametrize("is_touched", [True, False])
    def test_a_peak_is_at_least_what_we_saw(self, is_touched: bool) -> None:
        """It may have been higher before we came, unless the GPU was touched after that."""
        before = [gpu(1)] if is_touched else []

        record = record_of(make_cell(*before, host(1), partial=True), gpu(2), host(2))

        kinds = [device.peak_is for device in record.devices]
        assert kinds == ["at least" if is_touched else "exact", "at least"]
