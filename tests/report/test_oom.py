"""The card of an OOM: its bar adds up, its words are true, and the biggest way out comes first."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumemwidget.records import Reading, ReleasePlan, ReleaseReport
from gpumemwidget.report.division import divide_device
from gpumemwidget.report.document import Part, UseBar
from gpumemwidget.report.oom import describe_cached, describe_released, report_oom, sort_ways
from gpumemwidget.traces import OomEvent, WayOut
from tests.report.oom_examples import (
    GIB,
    make_card,
    make_empty_card,
    make_event,
    make_host_card,
    read_recorded_card,
)

MIB = 1024**2


def _list_labels(bar: UseBar | None) -> list[str]:
    assert bar is not None
    return [part.label for part in bar.parts]


def _check_sums(parts: tuple[Part, ...], whole: int) -> None:
    assert sum(part.n_bytes for part in parts) == whole
    for part in parts:
        assert part.n_bytes > 0
        if part.parts:
            _check_sums(part.parts, part.n_bytes)


def test_bar_adds_up_to_the_device() -> None:
    """What was read stands as it is; a part that nobody claims is told."""
    card = make_card()

    bar, trouble = divide_device(card.event, card.kinds)

    assert _list_labels(bar) == [
        "allocated",
        "reserved but unallocated",
        "this process outside PyTorch",
        "other processes",
        "free",
    ]
    assert bar is not None
    _check_sums(bar.parts, card.event.device_total_bytes or 0)
    assert trouble == ""


def test_what_nobody_claims_is_a_part_of_its_own() -> None:
    """Known parts that are less than the device leave a rest without a guess."""
    bar, _ = divide_device(make_event(others_bytes=9 * GIB))

    assert _list_labels(bar)[-1] == "not accounted for"
    assert bar is not None
    _check_sums(bar.parts, bar.total_bytes)


@pytest.mark.parametrize(
    ("unknown", "label", "detail"),
    [
        (("others_bytes",), "other processes", "all that remains"),
        (
            ("others_bytes", "outside_bytes"),
            "this process outside PyTorch and other processes",
            "together",
        ),
        (
            ("others_bytes", "outside_bytes", "device_free_bytes"),
            "this process outside PyTorch, other processes and free",
            "together",
        ),
        (
            ("allocated_bytes", "reserved_bytes"),
            "PyTorch",
            "all that remains",
        ),
    ],
)
def test_unknown_parts_are_one(unknown: tuple[str, ...], label: str, detail: str) -> None:
    """What could not be read is what remains, under all its names."""
    bar, trouble = divide_device(make_event(**dict.fromkeys(unknown)))

    assert bar is not None
    [part] = [part for part in bar.parts if part.look == "rest"]
    assert (part.label, part.detail) == (label, detail)
    _check_sums(bar.parts, bar.total_bytes)
    assert trouble == ""


def test_parts_that_are_more_than_the_device_are_told() -> None:
    """Readings of two moments make no negative part: the bar is as long as they are."""
    bar, trouble = divide_device(make_event(others_bytes=12 * GIB))

    assert bar is not None
    _check_sums(bar.parts, bar.total_bytes)
    assert trouble == (
        "These parts are 2.00 GiB more than cuda:0 has: they were not read at one moment."
    )


def test_limit_is_a_mark() -> None:
    """It stands where it is below the device's own end."""
    limited, _ = divide_device(make_event(limit_bytes=70 * GIB))
    unlimited, _ = divide_device(make_event(limit_bytes=80 * GIB))

    assert limited is not None
    assert limited.mark_bytes == 70 * GIB
    assert unlimited is not None
    assert unlimited.mark_bytes is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"largest_free_block_bytes": 2 * GIB}, False),
        ({"requested_bytes": 3 * GIB}, True),
        ({"requested_bytes": 4 * GIB}, False),
        ({"requested_bytes": 3 * GIB, "limit_bytes": 68 * GIB}, False),
        ({"requested_bytes": None}, True),
        ({"largest_free_block_bytes": None}, False),
        ({"reserved_bytes": None}, False),
        ({"device": "host"}, False),
    ],
)
def test_fragmented_is_what_would_do_in_one_piece(
    changes: dict[str, object], expected: bool
) -> None:
    """The largest free block is too small, and all of them with what is free would be enough."""
    assert make_event(**changes).is_fragmented is expected


@settings(max_examples=200, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            name: st.none() | st.integers(0, 100)
            for name in (
                "requested_bytes",
                "allocated_bytes",
                "reserved_bytes",
                "largest_free_block_bytes",
                "device_free_bytes",
                "device_total_bytes",
                "limit_bytes",
                "others_bytes",
                "outside_bytes",
            )
        }
    ),
    st.sampled_from(["cuda:0", "host"]),
    st.lists(st.tuples(st.sampled_from(["parameter", "tensor", "unknown"]), st.integers(0, 60))),
)
def test_any_bar_adds_up(
    figures: dict[str, int | None], device: str, kinds: list[tuple[str, int]]
) -> None:
    """No reading makes a part that is negative or empty, or a sum that is not the whole."""
    bar, trouble = divide_device(OomEvent(device=device, **figures), kinds)  # type: ignore[arg-type]

    if bar is not None:
        _check_sums(bar.parts, bar.total_bytes)
        assert bar.total_bytes == figures["device_total_bytes"] or trouble


def test_first_lines_say_what_was_asked_for_and_where() -> None:
    """Before anything else; the room that is told is the one below the limit where that is less."""
    lines = report_oom(make_card()).text.splitlines()
    limited = report_oom(make_card(event=make_event(limit_bytes=68 * GIB + 100 * MIB)))

    assert lines[0] == "Out of memory on cuda:0 · 2.00 GiB asked for · 611.00 MiB free"
    assert lines[2].startswith("In[7], line 3 · logits = model(batch.to(device)")
    assert "100.00 MiB left below the limit of 68.10 GiB" in " ".join(limited.text.split())


def test_limit_of_the_host_counts_addresses() -> None:
    """What is resident says nothing of what the limit leaves."""
    event = make_event(
        device="host",
        requested_bytes=3 * GIB,
        reserved_bytes=GIB,
        addresses_bytes=6 * GIB,
        limit_bytes=8 * GIB,
        device_free_bytes=20 * GIB,
    )

    first, *_ = report_oom(make_host_card(event=event)).text.split("\n\n")

    assert "2.00 GiB of addresses left below the limit of 8.00 GiB" in " ".join(first.split())
    unknown = dataclasses.replace(event, addresses_bytes=None)
    assert "20.00 GiB available" in report_oom(make_host_card(event=unknown)).text


def test_host_has_its_own_words() -> None:
    """Nothing of PyTorch's allocator, which has no part in it."""
    text = report_oom(make_host_card()).text

    assert text.startswith(
        "Out of memory on the host · 8.00 TiB asked for · there are 16.00 GiB in all"
    )
    assert not [word for word in ("reserved", "PyTorch", "fragmented", "cached") if word in text]


def test_ways_say_how_much_would_do() -> None:
    """What was asked for less the room that there was; nothing where no way can do."""
    limited = make_card(event=make_event(limit_bytes=68 * GIB + 100 * MIB))

    assert "Ways out: about 1.40 GiB more would do\n" in report_oom(make_card()).text
    assert "Ways out: about 1.90 GiB more would do\n" in report_oom(limited).text
    assert "Ways out: none gives that much\n" in report_oom(make_host_card()).text
    assert "Ways out\n" in report_oom(make_card(event=make_event(requested_bytes=None))).text


def test_card_of_nothing_says_so() -> None:
    """Without a single figure there are no table and no bar, and no number that is not known."""
    text = report_oom(make_empty_card()).text

    assert text.startswith(
        "Out of memory on cuda:0 · the error does not say how much was asked for\n\n"
        "How full it was is not known."
    )
    assert "0 B" not in text


def test_figures_without_a_whole_are_told_as_they_are() -> None:
    """A device of unknown size has no bar."""
    text = report_oom(make_card(event=make_event(device_total_bytes=None))).text

    assert "65.03 GiB allocated, 68.00 GiB reserved; how big the device is, is not known." in text


def test_ways_are_sorted_by_what_they_give() -> None:
    """Those of which it is not known come last, in the order in which they were."""
    ways = [
        WayOut("no_grad", "a", None, "about"),
        WayOut("out", "b", 5, "exact"),
        WayOut("limit", "c", None, "about"),
        WayOut("names", "d", 9, "at least"),
    ]

    assert [way.text for way in sort_ways(ways)] == ["d", "b", "a", "c"]


def test_owners_and_everything_else_are_all_that_is_allocated() -> None:
    """At most ten, and one row for the rest."""
    text = report_oom(make_card()).text

    assert "Biggest owners of the 65.03 GiB allocated" in text
    assert "everything else" in text
    table = text.split("Biggest owners")[1].split("\n\n")[0]
    assert len(table.splitlines()) == 13


def test_owners_of_next_to_nothing_are_among_the_rest() -> None:
    """A row of them would be read for nothing, unless there are no others."""
    recorded = report_oom(read_recorded_card()).text
    tiny = make_host_card(owners=make_host_card().owners[1:], event=make_event(device="host"))

    assert "tokens" not in recorded.split("Biggest owners")[1].split("\n\n")[0]
    assert "everything else                                         65.31 MiB  0.1 %" in recorded
    assert "dataset.tensors[0]" in report_oom(tiny).text


def _make_release(**changes: object) -> ReleaseReport:
    plan = ReleasePlan(("x",), False, (), (), (("cuda:0", 3 * GIB),), 0, None)
    values: dict[str, object] = {
        "plan": plan,
        "steps": (),
        "before": (),
        "after": (Reading("cuda:0", 2 * GIB, 4 * GIB),),
        "allocated_freed_bytes": (("cuda:0", 3 * GIB - MIB),),
        "reserved_freed_bytes": (),
        **changes,
    }
    return ReleaseReport(**values)  # type: ignore[arg-type]


def test_release_is_told_with_its_promise() -> None:
    """What was promised on the card, what was measured, what stands now."""
    way = WayOut("names", "Release x", 3 * GIB, "at least")

    told = describe_released(way, _make_release(remains=("y holds it too",)), "cuda:0")

    assert told == (
        "Freed 3.00 GiB on cuda:0, where at least 3.00 GiB were promised. "
        "Now 2.00 GiB allocated, 4.00 GiB reserved.",
        ("y holds it too",),
    )


def test_release_without_a_promise_has_that_of_its_plan() -> None:
    """A way of which it was not known what it gives."""
    way = WayOut("names", "Release x", None, "exact")

    line, _ = describe_released(way, _make_release(after=()), "cuda:0")

    assert line == "Freed 3.00 GiB on cuda:0, where 3.00 GiB were promised."


def test_release_that_stopped_says_why() -> None:
    """Nothing is said to have been freed."""
    way = WayOut("names", "Release x", 3 * GIB, "exact")

    line, _ = describe_released(way, _make_release(stopped="a graph is captured"), "cuda:0")

    assert line == "Stopped: a graph is captured"


def test_cached_blocks_are_told_as_what_is_reserved() -> None:
    """Their release does nothing to what is allocated."""
    assert describe_cached("cuda:0", 5 * GIB, 4 * GIB) == (
        "Gave back 1.00 GiB on cuda:0. Now 4.00 GiB reserved."
    )
    assert "can't be read" in describe_cached("cuda:0", None, 4 * GIB)
