"""The text of ``PYTORCH_ALLOC_CONF`` becomes the allocator's settings."""

from __future__ import annotations

import pytest

from gpumemwidget.errors import BadInputError
from gpumemwidget.prediction.allocator.settings import AllocatorSettings, parse_settings

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
            AllocatorSettings(allowed_bytes=4 * GIB, ignored=("garbage_collection_threshold:0.8",)),
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
            AllocatorSettings(
                max_split_bytes=64 * MIB,
                ignored=("backend:native", "pinned_use_background_threads:True", "new:[1,2]"),
            ),
        ),
    ],
)
def test_each_option_is_read(text: str, settings: AllocatorSettings) -> None:
    """Known options set their fields, the others are listed."""
    assert parse_settings(text, total_bytes=16 * GIB) == settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size_mb", "'max_split_size_mb' is no option .* write name:value"),
        ("max_split_size_mb:many", "max_split_size_mb:many can't be used: give a whole number"),
        ("expandable_segments:yes", "expandable_segments:yes can't be used: give True or False"),
        ("per_process_memory_fraction:80", "can't be used: give a number from 0 to 1"),
        ("roundup_power2_divisions:3", "can't be used: '3' is no power of two"),
        ("roundup_power2_divisions:[100:2]", "can't be used: '100' is no power of two"),
    ],
)
def test_what_pytorch_refuses_is_refused(text: str, message: str) -> None:
    """The error names the option, its value, and what to write."""
    with pytest.raises(BadInputError, match=message):
        parse_settings(text, total_bytes=16 * GIB)
