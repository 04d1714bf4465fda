"""Parse the caching allocator's settings: the text of ``PYTORCH_ALLOC_CONF``.

The options are described at
https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf;
their exact meaning is that of
https://github.com/pytorch/pytorch/blob/main/c10/core/AllocatorConfig.cpp
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpumemwidget.backends.cuda.snapshot import LARGE_PAGE_BYTES, parse_rules
from gpumemwidget.errors import BadInputError
from gpumemwidget.model.traces import AllocatorRules

_MIB = 1 << 20
#: Number of intervals of ``roundup_power2_divisions``: from 1 MiB on, each twice as long as the
#: one before. The last holds for all larger sizes.
_N_ROUNDUP_INTERVALS = 16


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
    #: Options of the text that change nothing here, each as ``"name:value"``: unknown ones, those
    #: of pinned memory, the choice of another allocator, and ``garbage_collection_threshold``,
    #: which gives cached segments back early: without it more may be reserved.
    ignored: tuple[str, ...] = ()


def parse_settings(text: str, *, total_bytes: int) -> AllocatorSettings:
    """Return the settings that a text like ``"max_split_size_mb:128"`` makes.

    Args:
        text: the value of ``PYTORCH_ALLOC_CONF`` or of ``PYTORCH_CUDA_ALLOC_CONF``; of an option
            that is given twice, the last one counts.
        total_bytes: the GPU's memory, of which ``per_process_memory_fraction`` is a part.

    Raises:
        BadInputError: the text is no list of options, or an option has a value that PyTorch
            refuses too.
    """
    settings: dict[str, Any] = {}
    ignored = []
    # A comma within brackets separates the parts of a value, and not options.
    for item in filter(None, re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text))):
        name, separator, value = item.partition(":")
        if not (name and separator and value):
            raise BadInputError(
                f"{item!r} is no option of the CUDA allocator: write name:value, with commas "
                "between options"
            )
        try:
            if name == "per_process_memory_fraction":
                settings["allowed_bytes"] = int(_parse_fraction(value) * total_bytes)
            elif name in _OPTIONS:
                field, parse = _OPTIONS[name]
                settings[field] = parse(value)
            else:
                ignored.append(item)
        except ValueError as exc:
            raise BadInputError(f"{name}:{value} can't be used: {exc}") from None
    if "large_segment_bytes" in settings:
        settings.setdefault("max_non_split_rounding_bytes", settings["large_segment_bytes"])
    return AllocatorSettings(ignored=tuple(ignored), **settings)


def _parse_mib(value: str) -> int:
    """Return the bytes of a positive number of MiB."""
    if not value.isdecimal() or int(value) == 0:
        raise ValueError("give a whole number of MiB, at least 1")
    return int(value) * _MIB


def _parse_fraction(value: str) -> float:
    try:
        fraction = float(value)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        raise ValueError("give a number from 0 to 1")
    return fraction


def _parse_bool(value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError("give True or False")
    return value == "True"


def _parse_divisions(value: str) -> tuple[tuple[int, int], ...]:
    """Return the steps to a power of two from each number of bytes on, as ``AllocatorRules`` has.

    Args:
        value: one number of steps for all sizes, or ``[256:1,512:2,>:4]``: the steps of requests of
            256 MiB to 512 MiB, and so on. The first also holds for smaller requests, ``>`` for
            larger ones than the last; intervals that are not named are not divided.
    """
    if not value.startswith("["):
        steps = [_parse_power_of_two(value)] * _N_ROUNDUP_INTERVALS
    else:
        steps = [0] * _N_ROUNDUP_INTERVALS
        last = -1
        for part in filter(None, value.strip("[]").split(",")):
            start, _, n_steps = part.partition(":")
            n_divisions = 0 if n_steps == "0" else _parse_power_of_two(n_steps)
            if start == ">":
                steps[last + 1 :] = [n_divisions] * (_N_ROUNDUP_INTERVALS - last - 1)
                continue
            place = _parse_power_of_two(start).bit_length() - 1
            place = min(place, _N_ROUNDUP_INTERVALS - 1)
            if last < 0:
                steps[:place] = [n_divisions] * place
            steps[place] = n_divisions
            last = place
    by_mib = {str(1 << place): n_divisions for place, n_divisions in enumerate(steps)}
    return parse_rules({"roundup_power2_divisions": by_mib}).roundup_divisions


def _parse_power_of_two(text: str) -> int:
    if not text.isdecimal() or int(text).bit_count() != 1:
        raise ValueError(f"{text!r} is no power of two")
    return int(text)


#: The field and the parser of each option that is a setting by itself.
_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "expandable_segments": ("is_expandable", _parse_bool),
    "large_segment_size_mb": ("large_segment_bytes", _parse_mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _parse_mib),
    "max_split_size_mb": ("max_split_bytes", _parse_mib),
    "roundup_power2_divisions": ("roundup_divisions", _parse_divisions),
}
