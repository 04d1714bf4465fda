"""Find out which GPUs CUDA shows to this process, and in which order, without asking CUDA.

Asking CUDA would create a context of hundreds of megabytes on a device that the user has not
touched. So ``CUDA_VISIBLE_DEVICES`` is read as CUDA reads it:
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

_NUMBER = re.compile(r"[+]?\d+")


@dataclass(slots=True, eq=False)
class Gpu:
    """One GPU or MIG instance as the driver's library knows it, compared by identity."""

    handle: Any
    name: str
    uuid: str | None
    total_bytes: int | None
    #: The GPU of an instance.
    parent: Gpu | None = None
    #: Reasons why figures could not be read the last time, by the figures' names.
    failures: dict[str, str] = field(default_factory=dict)


def parse_visible(text: str | None) -> tuple[int, ...] | tuple[str, ...] | None:
    """Return the entries of ``CUDA_VISIBLE_DEVICES`` that CUDA takes.

    The first invalid entry ends the list, and an entry that comes twice empties it. Digits count as
    far as they go (``"1gpu"`` is 1); a list that begins with a UUID is a list of UUIDs.

    Args:
        text: the variable's value; ``None`` where it is not set.

    Returns:
        Numbers in CUDA's order of the machine's GPUs, or the beginnings of UUIDs with their
        ``GPU-`` or ``MIG-``; ``None`` where all GPUs are visible.
    """
    if text is None:
        return None
    entries = text.split(",")
    found: tuple[int, ...] | tuple[str, ...]
    prefix = text[:4]
    if prefix in ("GPU-", "MIG-"):
        found = tuple(takewhile(lambda entry: entry.startswith(prefix), entries))
    else:
        matches = (_NUMBER.match(entry.strip()) for entry in entries)
        found = tuple(int(match[0]) for match in takewhile(bool, matches) if match)
    return found if len(set(found)) == len(found) else ()


def number_gpus(
    gpus: Sequence[Gpu | None], instances: Sequence[Gpu], visible: str | None, *, by_bus: bool
) -> dict[str, Gpu] | None:
    """Return the GPUs under PyTorch's names.

    Args:
        gpus: in the order of the bus; ``None`` holds the place of a GPU that can't be read.
        instances: the MIG instances of all of them.
        visible: ``CUDA_VISIBLE_DEVICES``.
        by_bus: whether ``CUDA_DEVICE_ORDER`` is ``PCI_BUS_ID``.

    Returns:
        ``None`` where the order can't be known: CUDA puts the fastest first unless it is told
        otherwise, so GPUs of different models may stand in any order.
    """
    entries = parse_visible(visible)
    chosen: list[Gpu | None]
    if entries == ():
        chosen = []
    elif entries is not None and isinstance(entries[0], str):
        chosen = _choose_by_uuid(gpus, instances, [str(entry) for entry in entries])
    elif not by_bus and len({gpu.name for gpu in gpus if gpu is not None}) > 1:
        return None
    else:
        chosen = list(gpus)
        if entries is not None:
            numbers = takewhile(lambda number: number < len(gpus), map(int, entries))
            chosen = [gpus[number] for number in numbers]
        # If there are MIG instances, CUDA shows one of them and no other GPU:
        # https://docs.nvidia.com/datacenter/tesla/mig-user-guide/ (CUDA device enumeration)
        of_chosen = [instance for instance in instances if instance.parent in chosen]
        chosen = [of_chosen[0]] if of_chosen else chosen
    return {f"cuda:{index}": gpu for index, gpu in enumerate(chosen) if gpu is not None}


def correct_numbers(
    numbered: dict[str, Gpu], known: Sequence[Gpu], told: Mapping[str, str]
) -> dict[str, Gpu]:
    """Return the GPUs that were numbered, if CUDA tells the same UUIDs; else those it tells alone.

    Args:
        numbered: the GPUs under the names that were worked out.
        known: all GPUs and instances.
        told: devices in use and their UUIDs without ``GPU-``.
    """
    by_uuid = {strip_uuid(gpu.uuid): gpu for gpu in known if gpu.uuid is not None}
    if all(_agree(numbered.get(device), by_uuid.get(uuid)) for device, uuid in told.items()):
        return numbered
    in_order = sorted(told, key=lambda device: int(device.rpartition(":")[2]))
    return {device: by_uuid[told[device]] for device in in_order if told[device] in by_uuid}


def strip_uuid(uuid: str) -> str:
    """Return a UUID without ``GPU-`` or ``MIG-``, which torch leaves out, in small letters."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _agree(numbered: Gpu | None, told: Gpu | None) -> bool:
    """Return whether two GPUs are the same; CUDA before 11.4 tells an instance's GPU instead."""
    return numbered is told or (
        told is not None and numbered is not None and numbered.parent is told
    )


def _choose_by_uuid(
    gpus: Sequence[Gpu | None], instances: Sequence[Gpu], beginnings: Sequence[str]
) -> list[Gpu | None]:
    is_mig = beginnings[0].startswith("MIG-")
    known = [gpu for gpu in (instances if is_mig else gpus) if gpu is not None and gpu.uuid]
    found: list[Gpu | None] = []
    for beginning in beginnings:
        begins_so = [gpu for gpu in known if str(gpu.uuid).startswith(beginning)]
        if len(begins_so) != 1:
            break
        found += begins_so
    if len(set(found)) < len(found):
        return []
    # CUDA shows only the first of several instances.
    return found[:1] if is_mig else found
