"""Scripted sessions of whole devices: other processes, children, pinned memory, limits.

What a driver may or may not tell is a kind of its own each: a GPU that is lost, a user without
permission, an instance of a GPU, a container whose numbers are not the machine's.

    backend = ReplayBackend(Playback(play_scene(8), clock=time.monotonic, loop=True))
    hardware = Hardware([backend], ReplayMonitor(backend.playback))
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from gpumemwidget.backends.company import Scene
from gpumemwidget.backends.recording import Recording
from gpumemwidget.backends.script import Step, demo_script, play_script

__all__ = ["SceneKind", "play_scene"]

SceneKind = Literal["whole", "lost GPU", "no permission", "MIG", "host PIDs"]

_MIB = 1024 * 1024
_GIB = 1024 * _MIB
_TOTAL_BYTES = 80 * _GIB
_INSTANCE_BYTES = 10 * _GIB
_SCENES: dict[SceneKind, Scene] = {
    "whole": Scene(),
    "lost GPU": Scene(),
    "no permission": Scene(numbers="none"),
    "MIG": Scene(is_instance=True),
    "host PIDs": Scene(numbers="machine"),
}
#: Of the demonstration's sizes: others are to have room on the same devices.
_SCALE = 0.8
_SERVER_PID, _DESKTOP_PID, _FIRST_WORKER_PID, _FIRST_RANK_PID = 2077, 1500, 4120, 4200
#: Somebody else's server on the first device, in GiB, again and again.
_SERVER_GIB = (3, 5, 4, 2)


def play_scene(
    n_devices: int = 1,
    kind: SceneKind = "whole",
    *,
    n_steps: int = 12,
    step_s: float = 1.5,
    snapshots: bool = True,
) -> Recording:
    """Training on one or several devices, with company.

    On the first device somebody's server takes and frees memory, and a desktop is drawn. Two
    workers load data, memory is pinned for them, a rank of this notebook's is on each further
    device, and PyTorch's memory on the first is limited to nine tenths.

    Args:
        n_devices: 1, 2, 8 or any other number; an instance is the only one.
        kind: what the driver tells. The last device is lost half way.
        n_steps: how many training steps.
        step_s: the time that each takes.
        snapshots: take the allocators' snapshot with every event.
    """
    total_bytes = _INSTANCE_BYTES if kind == "MIG" else _TOTAL_BYTES
    n_devices = 1 if kind == "MIG" else n_devices
    scale = _SCALE * total_bytes / _TOTAL_BYTES
    training = demo_script(n_devices, n_steps=n_steps, step_s=step_s, scale=scale)
    end_s = training[-1].time_s
    steps = [*training, *_list_company(n_devices, total_bytes, end_s)]
    if kind == "lost GPU":
        lost_s = round(end_s / 2, 3)
        steps = [s for s in steps if s.device < n_devices - 1 or s.time_s < lost_s]
        steps.append(Step(lost_s, "lose", n_devices - 1))
    steps.sort(key=lambda step: step.time_s)
    return play_script(
        steps,
        n_devices=n_devices,
        total_bytes=total_bytes,
        about=f"scripted, {kind}",
        snapshots=snapshots,
        scene=_SCENES[kind],
    )


def _list_company(n_devices: int, total_bytes: int, end_s: float) -> Iterator[Step]:
    """All that is not PyTorch's allocator's, on devices of this size."""
    unit = total_bytes / _TOTAL_BYTES
    yield Step(0.0, "process", 0, "/usr/lib/xorg/Xorg", int(180 * _MIB * unit), pid=_DESKTOP_PID)
    n_changes = 16
    for number in range(n_changes):
        n_bytes = int(_SERVER_GIB[number % len(_SERVER_GIB)] * _GIB * unit)
        time_s = round(number * end_s / n_changes, 3)
        yield Step(time_s, "process", 0, "python serve.py", n_bytes, pid=_SERVER_PID)
    for number in range(2):
        pid, n_bytes = _FIRST_WORKER_PID + number, (380 + 20 * number) * _MIB
        yield Step(1.0, "child", name="pt_data_worker", n_bytes=n_bytes, pid=pid)
        yield Step(end_s, "child", name="pt_data_worker", pid=pid)
    yield Step(1.0, "pin", n_bytes=256 * _MIB)
    yield Step(end_s, "pin")
    yield Step(2.0, "limit", 0, n_bytes=int(0.9 * total_bytes))
    for device in range(n_devices):
        # Libraries beside PyTorch, from the first step on.
        yield Step(2.0, "outside", device, n_bytes=int((300 + 40 * device) * _MIB * unit))
    for device in range(1, n_devices):
        pid, name = _FIRST_RANK_PID + device, f"python rank.py --rank {device}"
        yield Step(3.0, "child", name=name, n_bytes=(900 + 10 * device) * _MIB, pid=pid)
        for number in range(3):
            n_bytes = (700 + 600 * number) * _MIB
            time_s = round(3.0 + number * (end_s - 4.0) / 3, 3)
            yield Step(time_s, "process", device, name, n_bytes, pid=pid, relation="child")
        yield Step(end_s, "process", device, name, pid=pid, relation="child")
        yield Step(end_s, "child", name=name, pid=pid)
