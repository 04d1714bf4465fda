"""Describe the state of a device when memory runs out."""

from __future__ import annotations

from gpumemwidget.backends.cuda.oom_observer import OomMoment
from gpumemwidget.backends.cuda.releasable import divide_unallocated
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.model.devices import HOST, ProcessUse
from gpumemwidget.model.ooms import OomEvent
from gpumemwidget.model.segments import Frame


def describe_moment(hardware: Hardware, moment: OomMoment) -> OomEvent:
    """Return the state of the device on which an allocation is failing now."""
    return describe_oom(
        hardware,
        moment.device,
        requested_bytes=moment.requested_bytes,
        allowed_bytes=moment.allowed_bytes,
        free_bytes=moment.free_bytes,
        frames=moment.read_stack(),
    )


def describe_oom(
    hardware: Hardware,
    device: str,
    *,
    requested_bytes: int | None = None,
    allowed_bytes: int | None = None,
    free_bytes: int | None = None,
    frames: tuple[Frame, ...] = (),
) -> OomEvent:
    """Return the present state of a device, which may be the host, as an event.

    Args:
        hardware: reads the state.
        device: the device that ran out of memory.
        requested_bytes: the bytes that were asked for, where they are known.
        allowed_bytes: the limit of this process, where PyTorch tells it.
        free_bytes: the device's free bytes when memory ran out; ``None``: as they are now.
        frames: the stack that asked for memory.
    """
    is_host = device == HOST
    reading = next((each for each in hardware.read() if each.device == device), None)
    info = next((each for each in hardware.list_devices() if each.device == device), None)
    reserved = None if reading is None else reading.reserved_bytes
    total = 0 if info is None else info.total_bytes
    driver = None
    if allowed_bytes is None and info is not None:
        allowed_bytes = info.limit_bytes
    largest = cached = own = None
    listed: tuple[ProcessUse, ...] | None = None
    use = None if info is None or is_host else hardware.read_use(info)
    if use is not None and use.total_bytes is not None and use.driver_bytes is not None:
        total, driver = use.total_bytes, use.driver_bytes
    if free_bytes is None and use is not None:
        free_bytes = use.free_bytes
    segments = [each for each in hardware.read_segments() if each.device == device]
    if segments:
        parts = divide_unallocated(segments)
        largest, cached = parts.largest_free_block_bytes, parts.releasable_bytes
    own = hardware.read_own_use(device)
    if own is not None and reading is not None and own < (reserved or 0):
        own = None  # The pid is another process's, outside of our container.
    if own is not None and not is_host:
        listed = _list_others(hardware, device)
    if is_host:
        free_bytes = hardware.available_host_bytes()
        own = reserved
    used = None if free_bytes is None or not total else total - free_bytes - (driver or 0)
    limits = allowed_bytes is not None and (not total or allowed_bytes < total - (driver or 0))
    others = None if used is None or own is None else max(used - own, 0)
    unlisted = None
    if others is not None and listed is not None:
        # A process whose bytes are not told may have all bytes that no other process has.
        sizes = [each.n_bytes for each in listed if each.n_bytes is not None]
        if len(sizes) == len(listed) and sum(sizes) <= others:
            unlisted, others = others - sum(sizes), sum(sizes)
    return OomEvent(
        device=device,
        requested_bytes=requested_bytes,
        allocated_bytes=None if reading is None else reading.allocated_bytes,
        reserved_bytes=reserved,
        largest_free_block_bytes=largest,
        device_free_bytes=free_bytes,
        device_total_bytes=total or None,
        limit_bytes=allowed_bytes if limits else None,
        others_bytes=others,
        outside_bytes=None if is_host or own is None or reserved is None else own - reserved,
        frames=frames,
        cached_bytes=cached,
        others=listed or (),
        unlisted_bytes=unlisted,
        driver_bytes=driver,
    )


def _list_others(hardware: Hardware, device: str) -> tuple[ProcessUse, ...] | None:
    """Return the other processes on a GPU, biggest first; ``None`` if ours is not listed."""
    states = hardware.take_device_states(with_segments=False)
    processes = next((each.processes for each in states if each.info.device == device), None)
    if processes is None or all(each.relation != "own" for each in processes):
        return None
    others = [each for each in processes if each.relation != "own"]
    return tuple(sorted(others, key=lambda each: -(each.n_bytes or 0)))
