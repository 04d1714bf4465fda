"""Which GPUs CUDA shows to this process, and in which order, told without asking CUDA.

Asking CUDA would create a context of hundreds of megabytes on a device that the user has not
touched. So ``CUDA_VISIBLE_DEVICES`` is read as CUDA reads it:
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["find_by_uuid", "parse_visible", "strip_uuid"]

_NUMBER = re.compile(r"[+]?\d+")


def parse_visible(text: str | None) -> tuple[int, ...] | tuple[str, ...] | None:
    """The entries of ``CUDA_VISIBLE_DEVICES`` that CUDA takes.

    The first entry that can't be meant ends the list, and one that comes twice empties it. Digits
    count as far as they go (``"1gpu"`` is 1); a list that begins with a UUID is a list of UUIDs.

    Args:
        text: the variable's value; ``None`` where it is not set.

    Returns:
        Numbers in CUDA's order of the machine's GPUs, or the beginnings of UUIDs with their
        ``GPU-`` or ``MIG-``; ``None`` where all GPUs are visible.
    """
    if text is None:
        return None
    entries = text.split(",")
    for prefix in ("GPU-", "MIG-"):
        if text.startswith(prefix):
            uuids: list[str] = []
            for entry in entries:
                if not entry.startswith(prefix):
                    break
                uuids.append(entry)
            return tuple(uuids) if len(set(uuids)) == len(uuids) else ()
    numbers: list[int] = []
    for entry in entries:
        match = _NUMBER.match(entry.strip())
        if match is None:
            break
        numbers.append(int(match[0]))
    return tuple(numbers) if len(set(numbers)) == len(numbers) else ()


def find_by_uuid(beginning: str, uuids: Sequence[str]) -> int | None:
    """The place of the one UUID that begins so; ``None`` where none or several do."""
    places = [place for place, uuid in enumerate(uuids) if uuid.startswith(beginning)]
    return places[0] if len(places) == 1 else None


def strip_uuid(uuid: str) -> str:
    """A UUID without ``GPU-`` or ``MIG-``, in small letters: NVML writes them, torch does not."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")
