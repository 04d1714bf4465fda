"""Find the device that a prediction is for: one that is here, as it is now, or one that is not."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from gpumemwidget.allocator.rules import UNLIMITED_BYTES, AllocatorSettings, parse_settings
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.snapshot import read_allocator_settings
from gpumemwidget.errors import BadInputError, PredictionError
from gpumemwidget.model.devices import Block, Chip, Segment
from gpumemwidget.model.predictions import PredictionDevice
from gpumemwidget.prediction.forecast import Target
from gpumemwidget.prediction.operations import H200, GpuFacts
from gpumemwidget.units import format_bytes, parse_bytes


def find_absent_target(torch: Any, on: str | int) -> Target:
    """Return a device that is not here, with nothing on it but a CUDA context.

    It is given by the name of a GPU (``"T4"``), or by the memory that PyTorch finds there
    (``"15GiB"``, or a number of bytes).

    Raises:
        BadInputError: it is neither.
    """
    name = _find_gpu(on) if isinstance(on, str) else None
    # A GPU that is known by its memory alone is taken to be an H200.
    total_bytes, chip = (_parse_bytes(on), H200) if name is None else _GPUS[name]
    name = format_bytes(total_bytes) if name is None else name
    device = PredictionDevice(name, total_bytes, max(0, total_bytes - CONTEXT_BYTES))
    facts = _describe_chip(torch, chip)
    settings = _read_settings(torch, total_bytes)
    return Target(_limit(device, settings), facts, settings)


def find_present_target(torch: Any, hardware: Hardware, device: str) -> Target:
    """Return a device, ``cuda:0``, as it is now: what is in use, is cached, is taken by others.

    A device that is not in use is not brought into use. Where there is none of the name, nothing is
    known of its size.

    Raises:
        PredictionError: PyTorch does not show the blocks of the device.
    """
    touched = {info.device: info for info in hardware.list_devices()}
    # PyTorch's own total comes first: the driver's is more than what can be had.
    infos = {**{info.device: info for info in hardware.list_all_devices()}, **touched}
    info = infos.get(device)
    use = None if info is None else hardware.read_use(info)
    segments = _list_segments(hardware, device)
    total_bytes = None if info is None else info.total_bytes
    free_bytes = None if use is None else use.free_bytes
    if free_bytes is None and device in touched and total_bytes is not None:
        free_bytes = total_bytes - sum(segment.n_bytes for segment in segments)
    settings = _read_settings(torch, total_bytes or UNLIMITED_BYTES)
    limits = hardware.read_limits()
    known_limits = {
        limit.device: limit.limit_bytes for limit in limits if limit.limit_bytes is not None
    }
    settings = replace(settings, allowed_bytes=known_limits.get(device, settings.allowed_bytes))
    known = "H200" if info is None else _find_gpu(info.name) or "H200"
    chip = hardware.read_chip(device) or _GPUS[known][1]
    facts = _describe_chip(torch, chip)
    n_workspaces = _count_workspaces(torch, segments, facts.cublas_bytes)
    found = _limit(_describe_device(device, total_bytes, free_bytes, segments), settings)
    return Target(found, facts, settings, segments, n_workspaces)


def _list_segments(hardware: Hardware, device: str) -> list[Segment]:
    segments = [segment for segment in hardware.read_segments() if segment.device == device]
    readings = [reading for reading in hardware.read_as_user() if reading.device == device]
    if not segments and any(reading.reserved_bytes for reading in readings):
        raise PredictionError(
            f"PyTorch does not show the blocks on {device} now. End the recording of its history "
            "(torch.cuda.memory._record_memory_history(None)), or use its own allocator."
        )
    return segments


def _describe_device(
    name: str, total_bytes: int | None, free_bytes: int | None, segments: Sequence[Segment]
) -> PredictionDevice:
    if total_bytes is None or free_bytes is None:
        return PredictionDevice(name, None, None)
    reserved_bytes = sum(segment.n_bytes for segment in segments)
    # What sleeps is reserved and free at once, so that this may be more than the device has. A
    # device that is not in use gets a context with its first tensor.
    room = max(0, reserved_bytes + free_bytes - (0 if segments else CONTEXT_BYTES))
    allocated_bytes = sum(block.n_bytes for block in _list_used(segments))
    return PredictionDevice(name, total_bytes, room, allocated_bytes, reserved_bytes)


def _limit(device: PredictionDevice, settings: AllocatorSettings) -> PredictionDevice:
    """Return a device with the room that the process's limit leaves."""
    if settings.allowed_bytes is None or device.available_bytes is None:
        return device
    room = min(device.available_bytes, settings.allowed_bytes)
    return replace(device, available_bytes=room)


def _list_used(segments: Iterable[Segment]) -> Iterator[Block]:
    for segment in segments:
        yield from (block for block in segment.blocks if block.state == "active_allocated")


def _count_workspaces(torch: Any, segments: Iterable[Segment], n_bytes: int) -> int:
    """Return the number of blocks of this size that no tensor is in.

    Nothing else marks a library's workspace, which PyTorch keeps for a thread.
    """
    addresses = {
        block.address
        for block in _list_used(segments)
        if (block.requested_bytes or block.n_bytes) == n_bytes
    }
    if addresses:
        kinds = (torch.Tensor, torch.nn.Parameter)
        for tensor in gc.get_objects():
            # A sparse tensor has no storage of its own to ask for.
            if type(tensor) in kinds and torch._C._has_storage(tensor):  # noqa: SLF001 - has no public name
                addresses.discard(tensor.untyped_storage().data_ptr())
    return len(addresses)


def _describe_chip(torch: Any, chip: Chip) -> GpuFacts:
    major, minor = str(torch.__version__).split(".")[:2]
    sizes = chip.capability, chip.n_multiprocessors, chip.threads_per_multiprocessor
    return GpuFacts(*sizes, (int(major), int(minor)))


def _read_settings(torch: Any, total_bytes: int) -> AllocatorSettings:
    return parse_settings(read_allocator_settings(torch), total_bytes=total_bytes)


# -- GPUs that are known by name -------------------------------------------------------------------

#: Taken by the CUDA context and by the libraries' kernels, of no allocator.
CONTEXT_BYTES = 600 << 20
#: GPUs that one can rent or buy: the bytes that PyTorch finds, and the chip.
_GPUS = {
    name: (round(gib * (1 << 30)), Chip(capability, n_multiprocessors, n_threads))
    for name, gib, capability, n_multiprocessors, n_threads in (
        ("T4", 14.56, (7, 5), 40, 1024),
        ("P100", 15.89, (6, 0), 56, 2048),
        ("V100-16GB", 15.75, (7, 0), 80, 2048),
        ("V100-32GB", 31.73, (7, 0), 80, 2048),
        ("L4", 21.96, (8, 9), 58, 1536),
        ("A10", 21.98, (8, 6), 72, 1536),
        ("A10G", 21.98, (8, 6), 80, 1536),
        ("A30", 23.49, (8, 0), 56, 2048),
        ("A100-40GB", 39.38, (8, 0), 108, 2048),
        ("A100-80GB", 79.14, (8, 0), 108, 2048),
        ("L40S", 44.31, (8, 9), 142, 1536),
        ("RTX-3060", 11.62, (8, 6), 28, 1536),
        ("RTX-3090", 23.55, (8, 6), 82, 1536),
        ("RTX-4090", 23.49, (8, 9), 128, 1536),
        ("RTX-5090", 31.34, (12, 0), 170, 1536),
        ("RTX-A6000", 47.40, (8, 6), 84, 1536),
        ("H100", 79.10, (9, 0), 132, 2048),
        ("H200", 139.72, (9, 0), 132, 2048),
        ("B200", 178.35, (10, 0), 148, 2048),
    )
}


def _find_gpu(name: str) -> str | None:
    """Return the known name of a GPU, as a person or its driver writes it.

    ``t4``, ``Tesla T4``, ``NVIDIA GeForce RTX 4090`` and ``NVIDIA A100-SXM4-80GB`` are known.
    """
    found = []
    for known in _GPUS:
        # Anything may be between its parts, and nothing of a longer name around it.
        parts = r"(?:[^a-z0-9].*)?".join(known.lower().split("-"))
        if re.search(rf"(?<![a-z0-9]){parts}(?![a-z0-9])", name.lower()):
            found.append(known)
    return max(found, key=len, default=None)


def _parse_bytes(on: object) -> int:
    n_bytes = on if type(on) is int else 0
    if isinstance(on, str):
        with contextlib.suppress(BadInputError):
            n_bytes = parse_bytes(on)
    if n_bytes <= 0:
        raise BadInputError(
            f"{on!r} is neither an amount of memory, as in 15GiB, nor a GPU that is known here: "
            f"{', '.join(_GPUS)}"
        )
    return n_bytes
