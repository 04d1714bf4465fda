"""The text of ``PYTORCH_ALLOC_CONF`` becomes the allocator's settings."""

from __future__ import annotations

import re

import pytest

from gpumemwidget.allocator.rules import AllocatorSettings, parse_settings
from gpumemwidget.errors import BadInputError

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", AllocatorSettings()),
        (
            "max_split_size_mb:128, expandable_segments : True",
            AllocatorSettings(max_split_bytes=128 * MIB, is_expandable=True),
        ),
        (
            "expandable_segments:True,expandable_segments:False",
            AllocatorSettings(is_expandable=False),
        ),
        (
            "garbage_collection_threshold:0.8,per_process_memory_fraction:0.25",
            AllocatorSettings(allowed_bytes=4 * GIB),
        ),
        (
            "max_non_split_rounding_mb:30",
            AllocatorSettings(max_non_split_rounding_bytes=30 * MIB),
        ),
        (
            # As in PyTorch, the one is the other's default.
            "large_segment_size_mb:12",
            AllocatorSettings(large_segment_bytes=12 * MIB, max_non_split_rounding_bytes=12 * MIB),
        ),
        ("roundup_power2_divisions:4", AllocatorSettings(roundup_divisions=((0, 4),))),
        (
            # Interval by interval: 64 MiB and less, 128, 256, 512, 1024, and above.
            "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]",
            AllocatorSettings(
                roundup_divisions=(
                    *((0, 8), (128 * MIB, 2), (256 * MIB, 4), (512 * MIB, 2)),
                    *((1024 * MIB, 4), (2048 * MIB, 1)),
                )
            ),
        ),
        (
            # The interval of 1024 MiB is not named, and so not divided.
            "roundup_power2_divisions:[128:8,512:1,2048:8,>:2]",
            AllocatorSettings(
                roundup_divisions=(
                    *((0, 8), (256 * MIB, 0), (512 * MIB, 1), (1024 * MIB, 0)),
                    *((2048 * MIB, 8), (4096 * MIB, 2)),
                )
            ),
        ),
        (
            "backend:native,pinned_use_background_threads:True,max_split_size_mb:64,new:[1,2]",
            AllocatorSettings(max_split_bytes=64 * MIB),
        ),
    ],
)
def test_each_option_is_read(text: str, settings: AllocatorSettings) -> None:
    """Known options set their fields, the others nothing."""
    assert parse_settings(text, total_bytes=16 * GIB) == settings


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb",
        "max_split_size_mb:many",
        "expandable_segments:yes",
        "per_process_memory_fraction:most",
        "roundup_power2_divisions:[many:2]",
    ],
)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    """The error names the option, its value, and what to do."""
    with pytest.raises(BadInputError, match=re.escape(f"{text!r} in PYTORCH_ALLOC_CONF")):
        parse_settings(text, total_bytes=16 * GIB)
