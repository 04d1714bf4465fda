"""Rules of PyTorch's caching allocator: how requests are rounded and blocks split, by its settings.

The settings are described at
https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf;
their exact meaning is that of
https://github.com/pytorch/pytorch/blob/main/c10/core/AllocatorConfig.cpp, that of rounding and
splitting of ``round_size`` and ``should_split`` in
https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpumemwidget.backends.snapshot import LARGE_PAGE_BYTES, parse_rules
from gpumemwidget.errors import BadInputError
from gpumemwidget.model.traces import AllocatorRules

#: Size of the smallest block; every block is a multiple of it.
MIN_BLOCK_BYTES = 512
#: Largest request that comes from segments for small blocks.
SMALL_BYTES = 1 << 20
#: More than any device has. In a trace a larger size is wrong, and sums of such would overflow; a
#: prediction counts up to it what does not fit.
UNLIMITED_BYTES = 1 << 44


@dataclass(frozen=True, slots=True)
class AllocatorSettings(AllocatorRules):
    """All settings that change which memory the caching allocator reserves."""

    #: ``max_non_split_rounding_mb``: how much larger than a request an unsplit block may be, if the
    #: request has at least ``max_split_bytes``.
    max_non_split_rounding_bytes: int = LARGE_PAGE_BYTES
    #: ``large_segment_size_mb``: size of the segments that requests from 1 to 10 MiB share, and of
    #: the pages of expandable segments for large requests.
    large_segment_bytes: int = LARGE_PAGE_BYTES
    #: ``per_process_memory_fraction``: maximum bytes that the process may reserve; ``None`` without
    #: a limit.
    allowed_bytes: int | None = None


def parse_settings(text: str, *, total_bytes: int) -> AllocatorSettings:
    """Return the settings that a text like ``"max_split_size_mb:128"`` makes.

    Options that change nothing here are left out: unknown ones, those of pinned memory, the choice
    of another allocator, and ``garbage_collection_threshold``, which gives cached segments back
    early: without it more may be reserved.

    Args:
        text: the value of ``PYTORCH_ALLOC_CONF`` or of ``PYTORCH_CUDA_ALLOC_CONF``; of an option
            that is given twice, the last one counts.
        total_bytes: the GPU's memory, of which ``per_process_memory_fraction`` is a part.

    Raises:
        BadInputError: an option has a value that can't be read, and that PyTorch refuses too.
    """
    settings: dict[str, Any] = {}
    # The field of each option that is a number of MiB.
    sizes = {
        "large_segment_size_mb": "large_segment_bytes",
        "max_non_split_rounding_mb": "max_non_split_rounding_bytes",
        "max_split_size_mb": "max_split_bytes",
    }
    # A comma within brackets separates the parts of a value, and not options.
    for item in filter(None, re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text))):
        name, _, value = item.partition(":")
        try:
            if name in sizes:
                settings[sizes[name]] = _parse_positive(value) << 20
            elif name == "per_process_memory_fraction":
                settings["allowed_bytes"] = int(float(value) * total_bytes)
            elif name == "expandable_segments":
                settings["is_expandable"] = {"True": True, "False": False}[value]
            elif name == "roundup_power2_divisions":
                settings["roundup_divisions"] = _parse_divisions(value)
        except (KeyError, ValueError, OverflowError):
            raise BadInputError(
                f"{item!r} in PYTORCH_ALLOC_CONF can't be read: set it as PyTorch's notes on CUDA "
                "memory say"
            ) from None
    if "large_segment_bytes" in settings:
        settings.setdefault("max_non_split_rounding_bytes", settings["large_segment_bytes"])
    return AllocatorSettings(**settings)


def _parse_positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(text)
    return int(text)


def _parse_divisions(value: str) -> tuple[tuple[int, int], ...]:
    """Return the steps to a power of two from each number of bytes on, as ``AllocatorRules`` has.

    Args:
        value: one number of steps for all sizes, or ``[256:1,512:2,>:4]``: the steps of requests of
            256 MiB to 512 MiB, and so on. The first also holds for smaller requests, ``>`` for
            larger ones than the last; intervals that are not named are not divided.
    """
    # From 1 MiB on, each interval is twice as long as the one before. The last one holds for all
    # larger sizes.
    n_intervals = 16
    if not value.startswith("["):
        steps = [_parse_positive(value)] * n_intervals
    else:
        steps = [0] * n_intervals
        last = -1
        for part in filter(None, value.strip("[]").split(",")):
            start, _, n_steps = part.partition(":")
            if start == ">":
                steps[last + 1 :] = [int(n_steps)] * (n_intervals - last - 1)
                continue
            place = min(_parse_positive(start).bit_length(), n_intervals) - 1
            if last < 0:
                steps[:place] = [int(n_steps)] * place
            steps[place] = int(n_steps)
            last = place
    by_mib = {str(1 << place): n_steps for place, n_steps in enumerate(steps)}
    return parse_rules({"roundup_power2_divisions": by_mib}).roundup_divisions


# -- Rounding and splitting ---------------------------------------------------------------------


def choose_fitting(rules: AllocatorRules) -> Callable[[int, int], int]:
    """Return the function that gives the bytes of a block, by its request and its free block's.

    These are the request, rounded up, and what is left of the free block if that is not split off.
    """
    round_up = choose_rounding(rules)
    # Blocks up to the one size are split from any larger free block, blocks from the other never.
    always_split = math.inf if rules.is_expandable else SMALL_BYTES
    never_split = math.inf if rules.max_split_bytes is None else rules.max_split_bytes

    def fit(requested_bytes: int, free_bytes: int) -> int:
        n_bytes = round_up(requested_bytes)
        rest_bytes = free_bytes - n_bytes
        is_split = rest_bytes >= MIN_BLOCK_BYTES and (
            n_bytes <= always_split or (rest_bytes > SMALL_BYTES and n_bytes < never_split)
        )
        return n_bytes if is_split else max(n_bytes, free_bytes)

    return fit


def choose_rounding(rules: AllocatorRules) -> Callable[[int], int]:
    """Return the function that rounds a request up: its block has as many bytes, or more."""
    if all(n_divisions <= 1 for _, n_divisions in rules.roundup_divisions):
        return _round_up

    def round_by_divisions(n_bytes: int) -> int:
        divisions = 0
        for start, n_divisions in rules.roundup_divisions:
            if n_bytes < start:
                break
            divisions = n_divisions
        if divisions <= 1 or n_bytes <= MIN_BLOCK_BYTES * divisions:
            return _round_up(n_bytes)
        floor = 1 << (n_bytes.bit_length() - 1)
        step = floor >> (divisions.bit_length() - 1)
        return -(-n_bytes // step) * step

    return round_by_divisions


def _round_up(n_bytes: int) -> int:
    return max(n_bytes + MIN_BLOCK_BYTES - 1 & -MIN_BLOCK_BYTES, MIN_BLOCK_BYTES)
