"""Whole devices as reports: what is drawn is what there is, whatever could be read."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemwidget.device_parts import build_breakdown, build_segment_map
from gpumemwidget.model.breakdowns import (
    Breakdown,
    BreakdownPart,
    PartKey,
    SegmentMap,
)
from gpumemwidget.model.devices import HOST, Block, LibraryUse, Segment
from gpumemwidget.model.ownership import BlockNames, MemoryKind
from gpumemwidget.report.charts.device import list_leaves, plot_segments
from gpumemwidget.report.devices import describe_part, report_breakdown
from gpumemwidget.report.render.palette import PART_COLORS
from gpumemwidget.report.render.wording import find_look, name_part
from tests.breakdowns.readings import accounts, make_segment, segments, states
from tests.report.breakdown_examples import (
    GIB,
    make_map,
)

_KEYS: tuple[PartKey, ...] = tuple(
    key
    for key in get_args(PartKey)
    if key not in ("kind", "process", "rest", "library", "library cache")
)
_KINDS: tuple[MemoryKind, ...] = tuple(kind for kind in get_args(MemoryKind) if kind != "unknown")


class TestWords:
    """One sentence for each part."""

    @pytest.mark.parametrize("device", ["cuda:0", "xpu:0", HOST])
    def test_each_part_has_a_name_a_sentence_and_a_colour(self, device: str) -> None:
        """None longer than a person reads in passing."""
        breakdown = Breakdown(device, "a device", 100, (), None, None, None)
        parts = [BreakdownPart(key, 1) for key in _KEYS]
        parts += [BreakdownPart("kind", 1, kind=kind) for kind in _KINDS]
        cupy = LibraryUse("CuPy", 1, 1, can_empty=True)
        jax, rmm = LibraryUse("JAX", 1, 1, 9 * GIB), LibraryUse("RMM", 1, 1)
        for library in (cupy, jax, rmm, LibraryUse("TensorFlow", 1)):
            parts.append(BreakdownPart("library", 1, library=library))
            parts.append(BreakdownPart("library cache", 1, library=library))

        for part in parts:
            sentence = describe_part(part, breakdown)

            assert 10 < len(sentence) < 180
            assert sentence[0].isupper()
            assert sentence.endswith(".")
            assert 3 < len(name_part(part, device)) <= 30
            assert find_look(part) in {*PART_COLORS, "free"}

    @pytest.mark.parametrize(
        ("key", "changes", "words", "others"),
        [
            ("releasable", {}, "torch.cuda.empty_cache()", "torch.xpu"),
            ("releasable", {"device": "xpu:0"}, "torch.xpu.empty_cache()", "torch.cuda"),
            ("fragmented", {"largest_free_block_bytes": 1}, "expandable_segments:True", "grow"),
            ("fragmented", {"has_expandable": True}, "", "expandable"),
            ("free", {"reserved_bytes": 10 * GIB, "limit_bytes": 12 * GIB}, "only 2.00", "80"),
        ],
    )
    def test_advice_fits_the_device(
        self, key: PartKey, changes: dict[str, Any], words: str, others: str
    ) -> None:
        """Its own module's calls, the way its segments grow, the room that a limit leaves."""
        part = BreakdownPart(key, 50 * GIB)
        plain = Breakdown("cuda:0", "GPU", 80 * GIB, (part,), GIB, None, None)

        told = describe_part(part, replace(plain, **changes))

        assert words in told
        assert others not in told


def _read_bars(html: str) -> list[list[float]]:
    """For each bar the widths of its parts, in percent."""
    bars = re.findall(r'<div class="gmw-e(?: gmw-bo)?".*?</div>', html)
    return [[float(n) for n in re.findall(r'style="[^"]*width:([\d.e+-]+)%', bar)] for bar in bars]


class TestBar:
    """The bar, and what others tell of it."""

    @given(st.data())
    def test_whatever_was_read_is_drawn(self, data: st.DataObject) -> None:
        """The pieces are all of the device; text, HTML and the figure can be made."""
        state = data.draw(states())
        breakdown = build_breakdown(state, data.draw(accounts(state)))
        if breakdown is None:
            return

        report = report_breakdown([breakdown])

        assert sum(part.n_bytes for part in list_leaves(breakdown.parts)) == breakdown.total_bytes
        assert max(map(len, report.text.splitlines())) <= 80
        for widths in _read_bars(report.html):
            assert min(widths) >= 0
            assert sum(widths) == pytest.approx(100, abs=0.5)


def _tell(block: Block, names: BlockNames | None, line: str) -> str:
    segment = Segment("cuda:0", 0, block.n_bytes, False, (0, 0), (block,))
    (piece,) = plot_segments(SegmentMap("cuda:0", (segment,), names, {0: line})).pieces
    return piece.tooltip


class TestMap:
    """Where the blocks lie."""

    @given(segments())
    def test_all_of_the_segments_is_drawn(self, found: tuple[()]) -> None:
        """Side by side; the legend has as much of each state as there is."""
        built = build_segment_map(found)
        if built is None:
            assert found == ()
            return

        chart = plot_segments(built)

        ends = [0, *(piece.end for piece in chart.pieces)]
        assert [piece.start for piece in chart.pieces] == ends[:-1]
        assert ends[-1] == built.reserved_bytes == sum(n_bytes for _, n_bytes in chart.looks)

    def test_thousands_of_blocks_stay_small(self) -> None:
        """In a notebook's file; what is in use is as much as ever."""
        found = make_map(n_segments=300, n_blocks=60)

        chart = plot_segments(found)

        free = ("pending", "releasable", "fragmented", "pools")
        used = sum(n_bytes for look, n_bytes in chart.looks if look not in free)
        blocks = [block for segment in found.segments for block in segment.blocks]
        assert used == sum(block.n_bytes for block in blocks if block.state != "inactive")
        assert len(chart.to_html()) < 60_000
        assert chart.min_bytes > 0

    def test_a_segment_with_nothing_in_use_looks_otherwise_than_gaps(self) -> None:
        """Of one that grows only whole pages are given back."""
        mib = 1024**2
        built = build_segment_map(
            [
                make_segment(("i", 20 * mib), address=1 << 41),
                make_segment(
                    ("a", 10 * mib),
                    ("i", 40 * mib),
                    ("a", mib),
                    page_bytes=20 * mib,
                    address=1 << 40,
                ),
                make_segment(("i", 2 * mib), pool_id=(1, 0), address=1 << 42),
                make_segment(("p", mib), address=1 << 43),
            ]
        )
        assert built is not None

        chart = plot_segments(built)

        assert [(piece.look, (piece.end - piece.start) // mib) for piece in chart.pieces] == [
            ("allocated", 10),
            ("fragmented", 10),
            ("releasable", 20),
            ("fragmented", 10),
            ("allocated", 1),
            ("releasable", 20),
            ("pools", 2),
            ("pending", 1),
        ]
        assert [start // mib for start in chart.starts] == [51, 71, 73]

    def test_a_block_tells_its_size_owner_and_line(self) -> None:
        """And what was asked for; that there is no name only where one was looked for."""
        block = Block(0, 2048, 2000, "active_allocated")
        names: tuple[BlockNames | None, ...] = (
            {0: ("parameter", "model.fc.weight")},
            {0: ("tensor", "")},
            {},
            None,
        )

        told = [_tell(block, each, "In [7], line 3") for each in names]

        rest = "1.95 KiB requested · In [7], line 3"
        assert told == [
            f"2.00 KiB · parameters · model.fc.weight · {rest}",
            f"2.00 KiB · other tensors · no variable · {rest}",
            f"2.00 KiB · unattributed · {rest}",
            f"2.00 KiB · allocated · {rest}",
        ]
