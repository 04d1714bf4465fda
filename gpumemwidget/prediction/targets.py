"""Find the device that a prediction is for: one that is here, as it is now, or one that is not."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpumemwidget.backends.cuda.library_memory import count_cublaslt_bytes
from gpumemwidget.backends.cuda.snapshot import parse_segments, read_allocator_settings
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.model.devices import DeviceInfo, DeviceUse
from gpumemwidget.model.predictions import PredictionDevice
from gpumemwidget.prediction.allocator.allocator import CachingAllocator
from gpumemwidget.prediction.allocator.settings import AllocatorSettings, parse_settings
from gpumemwidget.prediction.forecast import ENDLESS_BYTES, Target
from gpumemwidget.prediction.gpus import CONTEXT_BYTES, KnownGpu, find_gpu, parse_device
from gpumemwidget.prediction.workspaces.planner import MeasuredWorkspaces, WorkspacePlanner
from gpumemwidget.prediction.workspaces.plans import H200, Bound, GpuFacts
from gpumemwidget.units import format_bytes


def find_absent_target(torch: Any, on: str | int, measured: MeasuredWorkspaces) -> Target:
    """Return a device that is not here, with nothing on it but a CUDA context.

    Args:
        torch: the imported module ``torch``.
        on: the name of a GPU (``"T4"``), or the memory that PyTorch finds there (``"15GiB"``, or a
            number of bytes).
        measured: workspaces seen in real runs.

    Raises:
        BadInputError: it is neither.
    """
    known = parse_device(on)
    total_bytes = known.total_bytes if isinstance(known, KnownGpu) else known
    name = known.name if isinstance(known, KnownGpu) else format_bytes(known)
    device = PredictionDevice(name, total_bytes, max(0, total_bytes - CONTEXT_BYTES))
    facts = _describe_known(torch, known if isinstance(known, KnownGpu) else None)
    settings = _read_settings(torch, total_bytes)
    return _make_empty(device, settings, facts, measured)


def find_present_target(
    torch: Any, hardware: Hardware, device: str, measured: MeasuredWorkspaces
) -> Target:
    """Return a device as it is now: what stands on it, what is cached, what others take.

    A device that is not in use is not brought into use. Where there is none of the name, nothing is
    known of its size.

    Args:
        torch: the imported module ``torch``.
        hardware: the machine's memory.
        device: ``cuda:0``.
        measured: workspaces seen in real runs.
    """
    info = next((each for each in hardware.list_all_devices() if each.device == device), None)
    use = None if info is None else hardware.read_use(info)
    if not torch.cuda.is_initialized():
        return _find_untouched(torch, device, info, use, measured)
    index = int(device.partition(":")[2])
    properties = torch.cuda.get_device_properties(index)
    segments = [each for each in torch.cuda.memory.memory_snapshot() if each["device"] == index]
    reserved_bytes = sum(segment["total_size"] for segment in segments)
    total_bytes = int(properties.total_memory)
    # A device that is visible but not in use gets a context with its first tensor.
    free_bytes = total_bytes if use is None or use.free_bytes is None else use.free_bytes
    available_bytes = reserved_bytes + free_bytes - (0 if segments else CONTEXT_BYTES)
    settings = _read_settings(torch, total_bytes)
    limits = [each.limit_bytes for each in hardware.read_limits() if each.device == device]
    if limits and limits[0] is not None:
        settings = replace(settings, allowed_bytes=limits[0])
    facts = GpuFacts(
        (properties.major, properties.minor),
        properties.multi_processor_count,
        getattr(properties, "max_threads_per_multi_processor", 2048),
        _read_version(torch),
    )
    kept_sizes = _list_kept_sizes(
        torch, segments, {facts.cublas_bytes, count_cublaslt_bytes(), facts.dropout_bytes}
    )
    allocated_bytes = sum(segment["allocated_size"] for segment in segments)
    available_bytes = min(available_bytes, total_bytes, settings.allowed_bytes or total_bytes)
    found = PredictionDevice(device, total_bytes, available_bytes, allocated_bytes, reserved_bytes)
    return replace(
        _make_empty(found, settings, facts, measured),
        make_allocator=lambda n_bytes: CachingAllocator.from_snapshot(
            segments, total_bytes=n_bytes, settings=_move_limit(settings, found, n_bytes)
        ),
        make_planner=lambda bound: _make_planner(facts, measured, bound, kept_sizes),
    )


def _find_untouched(
    torch: Any,
    device: str,
    info: DeviceInfo | None,
    use: DeviceUse | None,
    measured: MeasuredWorkspaces,
) -> Target:
    total_bytes = None if info is None else info.total_bytes
    free_bytes = None if use is None else use.free_bytes
    known = None if info is None else find_gpu(info.name)
    found = PredictionDevice(device, None, None)
    if total_bytes is not None and free_bytes is not None:
        found = PredictionDevice(device, total_bytes, max(0, free_bytes - CONTEXT_BYTES))
    facts = _describe_known(torch, known)
    settings = _read_settings(torch, total_bytes or ENDLESS_BYTES)
    return _make_empty(found, settings, facts, measured)


def _make_empty(
    device: PredictionDevice,
    settings: AllocatorSettings,
    facts: GpuFacts,
    measured: MeasuredWorkspaces,
) -> Target:
    """Return a device on which PyTorch has nothing yet."""
    if settings.allowed_bytes is not None and device.available_bytes is not None:
        room = min(device.available_bytes, settings.allowed_bytes)
        device = replace(device, available_bytes=room)

    def make(settings: AllocatorSettings, expandable: Target | None) -> Target:
        return Target(
            device,
            facts,
            lambda n_bytes: CachingAllocator(
                n_bytes, settings=_move_limit(settings, device, n_bytes)
            ),
            lambda bound: WorkspacePlanner(facts, measured, bound=bound),
            expandable,
            _list_assumptions(facts),
        )

    growing = make(replace(settings, is_expandable=True), None)
    return make(settings, None if settings.is_expandable else growing)


def _move_limit(
    settings: AllocatorSettings, device: PredictionDevice, n_bytes: int
) -> AllocatorSettings:
    """Return the settings for a device of another size than it has: the limit moves with it."""
    if settings.allowed_bytes is None or device.available_bytes is None:
        return settings
    moved = settings.allowed_bytes + n_bytes - device.available_bytes
    return replace(settings, allowed_bytes=moved)


def _list_assumptions(facts: GpuFacts) -> tuple[str, ...]:
    """Return what is not known of a GPU that the rules of workspaces were not measured on."""
    if (facts.capability, facts.torch_version) == (H200.capability, H200.torch_version):
        return ()
    major, minor = H200.torch_version
    return (
        f"what operators need inside was measured on an NVIDIA H200 with PyTorch {major}.{minor}, "
        "and is taken to be the same here",
    )


def _make_planner(
    facts: GpuFacts, measured: MeasuredWorkspaces, bound: Bound, kept_sizes: Sequence[int]
) -> WorkspacePlanner:
    planner = WorkspacePlanner(facts, measured, bound=bound)
    planner.mark_kept(kept_sizes)
    return planner


def _list_kept_sizes(
    torch: Any, raw: Sequence[Mapping[str, Any]], sizes: Collection[int]
) -> list[int]:
    """Return the sizes, of those asked about, of the blocks that PyTorch keeps to itself.

    A library's workspace for a thread, as the random state of cuDNN's dropout, has no mark but its
    size, and that no tensor is in it.
    """
    found = {
        block.address: n_bytes
        for segment in parse_segments(raw)
        for block in segment.blocks
        if block.state == "active_allocated"
        and (n_bytes := block.requested_bytes or block.n_bytes) in sizes
    }
    if found:
        kinds = (torch.Tensor, torch.nn.Parameter)
        for each in gc.get_objects():
            if type(each) in kinds and each.is_cuda:
                found.pop(each.untyped_storage().data_ptr(), None)
    return list(found.values())


def _describe_known(torch: Any, known: KnownGpu | None) -> GpuFacts:
    """Return what sizes workspaces on a GPU; of one that is not known, as on an H200."""
    if known is None:
        return replace(H200, torch_version=_read_version(torch))
    return GpuFacts(
        known.capability,
        known.n_multiprocessors,
        known.threads_per_multiprocessor,
        _read_version(torch),
    )


def _read_version(torch: Any) -> tuple[int, int]:
    major, minor = str(torch.__version__).split(".")[:2]
    return int(major), int(minor)


def _read_settings(torch: Any, total_bytes: int) -> AllocatorSettings:
    return parse_settings(read_allocator_settings(torch), total_bytes=total_bytes)
