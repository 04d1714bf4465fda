"""The card of an OOM: its bar adds up, its words are true, and the biggest way out comes first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.model.breakdowns import Breakdown, BreakdownPart
from gpumemwidget.model.devices import ProcessUse
from gpumemwidget.model.ooms import OomEvent, Remedy, RemedyKind
from gpumemwidget.model.ownership import DeviceAccount, MemoryKind, Owned
from gpumemwidget.model.releases import Remnant
from gpumemwidget.oom.detection import divide_device
from gpumemwidget.report.charts.device import list_marks
from gpumemwidget.report.oom import (
    describe_released,
    judge_now,
    report_oom,
)
from gpumemwidget.report.render.wording import name_part
from tests.report.examples import make_release
from tests.report.oom_examples import GIB, OWN, make_card, make_event

UNKNOWN = ProcessUse(4711, "python serve.py", "other", None)
_BYTES = st.none() | st.integers(0, 100)
_RELATIONS = st.sampled_from(["own", "child", "other"])


def _check_sums(parts: tuple[BreakdownPart, ...], whole: int | None) -> None:
    assert sum(part.n_bytes for part in parts) == whole
    for part in parts:
        assert part.n_bytes > 0
        if part.parts:
            _check_sums(part.parts, part.n_bytes)


def _divide(event: OomEvent) -> Breakdown:
    breakdown = divide_device(event, None)
    assert breakdown is not None
    _check_sums(breakdown.parts, event.device_total_bytes)
    return breakdown


def _list_names(breakdown: Breakdown) -> list[str]:
    return [name_part(each, breakdown.device, lists_merged=True) for each in breakdown.parts]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"processes": (OWN,)}, "not attributed by the driver"),
        ({"processes": (OWN, UNKNOWN)}, "other processes"),
        ({"processes": None}, "this process outside PyTorch and other processes"),
        ({"allocated_bytes": None}, "reserved by PyTorch"),
    ],
)
def test_unknown_parts_are_one(changes: dict[str, Any], name: str) -> None:
    """What could not be read is what remains, under all its names."""
    assert name in _list_names(_divide(make_event(**changes)))


def test_limit_is_a_mark() -> None:
    """It stands where it is below the device's own end."""
    assert list_marks(_divide(make_event(limit_bytes=70 * GIB))) == [(70 * GIB, False)]
    assert list_marks(_divide(make_event(limit_bytes=80 * GIB))) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"largest_free_block_bytes": 2 * GIB}, False),
        ({"requested_bytes": 4 * GIB}, False),
        ({"requested_bytes": 3 * GIB, "limit_bytes": 68 * GIB}, False),
        ({"largest_free_block_bytes": None}, False),
        ({"device": "host"}, False),
    ],
)
def test_fragmented_is_what_would_do_in_one_piece(changes: dict[str, Any], expected: bool) -> None:
    """The largest free block is too small, and all of them with what is free would be enough."""
    assert make_event(**changes).is_fragmented is expected


@given(
    st.fixed_dictionaries(
        {
            "requested_bytes": _BYTES,
            "allocated_bytes": _BYTES,
            "reserved_bytes": _BYTES,
            "largest_free_block_bytes": _BYTES,
            "device_free_bytes": _BYTES,
            "device_total_bytes": _BYTES,
            "limit_bytes": _BYTES,
        }
    ),
    st.none() | st.lists(st.builds(ProcessUse, st.just(1), st.none(), _RELATIONS, _BYTES)),
    st.sampled_from(["cuda:0", "host"]),
    st.lists(
        st.tuples(st.sampled_from(["parameter", "tensor", "unknown"]), st.integers(0, 60)),
        unique_by=lambda kind: kind[0],
    ),
)
def test_any_bar_adds_up(
    figures: dict[str, int | None],
    processes: list[ProcessUse] | None,
    device: str,
    kinds: list[tuple[MemoryKind, int]],
) -> None:
    """No reading makes a part that is negative or empty, or a sum that is not the whole."""
    listed = None if processes is None else tuple(processes)
    event = make_event(device, processes=listed, **figures)
    owned = tuple(Owned(device, n_bytes, kind, (), "name") for kind, n_bytes in kinds)

    breakdown = divide_device(event, DeviceAccount(device, None, owned))

    if breakdown is not None:
        _check_sums(breakdown.parts, event.device_total_bytes)


@pytest.mark.parametrize(
    ("ways", "verdict"),
    [
        (
            [
                Remedy(RemedyKind.OUT, 3 * GIB, "at most"),
                Remedy(RemedyKind.LAST_EXCEPTION, 2 * GIB, "exact"),
            ],
            "You are about 1.40 GiB short. Releasing the last exception would be enough.",
        ),
        (
            [Remedy(RemedyKind.OUT, 3 * GIB, "at most"), Remedy(RemedyKind.NAMES, GIB, "exact")],
            "You are about 1.40 GiB short. Dropping the displayed values may be enough.",
        ),
        (
            [
                Remedy(RemedyKind.OUT, GIB, "exact"),
                Remedy(
                    RemedyKind.NAMES, 9 * GIB, "exact", names=("opt",), loses_training_state=True
                ),
            ],
            "You are about 1.40 GiB short. Releasing opt would be enough, but lose training state.",
        ),
        (
            [Remedy(RemedyKind.OUT, GIB, "exact"), Remedy(RemedyKind.NO_GRAD, None, "about")],
            "You are about 1.40 GiB short. Nothing listed here frees enough by itself.",
        ),
    ],
)
def test_the_verdict_comes_first(ways: list[Remedy], verdict: str) -> None:
    """How much was missing, and the first remedy that is enough, harmless ones before others."""
    text = report_oom(make_card(ways=tuple(ways))).text

    assert " ".join(text.split("\n\n")[0].split()) == verdict


def test_the_verdict_is_told_anew_when_a_remedy_was_used() -> None:
    """With what is free and cached now: that was other when the error came."""
    free = make_event(device_free_bytes=GIB, reserved_bytes=68 * GIB, allocated_bytes=66 * GIB)
    full = make_event(device_free_bytes=GIB, reserved_bytes=68 * GIB, allocated_bytes=68 * GIB)

    assert judge_now(free) == (
        True,
        "There is room now: the cell requested 2.00 GiB, and about 3.00 GiB is available.",
    )
    assert judge_now(full) == (False, "You are still about 1.00 GiB short.")
    unknown = judge_now(make_event(device_free_bytes=None))
    assert unknown == (False, "How much is available now is unknown.")


def test_release_is_told_with_its_promise() -> None:
    """What was promised on the card, what was measured, what stands now."""
    way = Remedy(RemedyKind.NAMES, 3 * GIB, "at least")
    report = make_release(remains=(Remnant(GIB, "cuda:0", ("y.grad", "x")),))

    line, *remains = describe_released(way, report, "cuda:0")

    assert line == (
        "Freed 1.40 GiB on cuda:0 (predicted: at least 3.00 GiB). "
        "Now 371.00 MiB allocated, 568.00 MiB reserved."
    )
    assert remains[-1] == "1.00 GiB on cuda:0 was meant to go and is still held by y.grad and x"
