"""Scripted sessions on simulated GPUs, as recordings: something to play where there is no GPU.

player = RecordingPlayer(play_script(demo_script(2)), clock=time.monotonic)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.errors import BadInputError
from gpumemwidget.testing.allocator import DeviceFullError
from gpumemwidget.testing.driver import SimulatedDriver
from gpumemwidget.testing.gpus import SimulatedGpus
from gpumemwidget.testing.recorder import Recorder
from gpumemwidget.testing.recording import Recording
from gpumemwidget.testing.torch_module import simulate_torch

_MIB = 1024 * 1024
_OWN_PID = 4100


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a scripted program does; ``oom`` is an allocation that fails in any case."""

    time_s: float
    action: Literal["touch", "allocate", "free", "empty_cache", "oom"]
    device: int = 0
    #: The block's name, unique among the blocks in use.
    name: str = ""
    n_bytes: int = 0


def play_script(
    steps: Sequence[Step],
    *,
    n_devices: int | None = None,
    snapshots: bool = False,
) -> Recording:
    """Return what simulated GPUs of 80 GiB count while a script runs.

    The first event, at 0 s, is that of GPUs which nobody has used yet. Steps of the same time give
    one event. A block that finds the GPU full is an out-of-memory error, and need not be freed.

    Args:
        steps: in the order of their times.
        n_devices: the number of GPUs; as many as the steps name, if not given.
        snapshots: record the allocators' segments with every event.

    Raises:
        BadInputError: a step goes back in time, names a GPU that is not there, or frees or takes
            what it can't.
    """
    if n_devices is None:
        n_devices = 1 + max((step.device for step in steps), default=0)
    now_s = 0.0

    gpus = SimulatedGpus(n_devices)
    driver = SimulatedDriver(gpus, own_pid=_OWN_PID)
    hardware = Hardware([CudaBackend(simulate_torch(gpus))], driver)
    recorder = Recorder(hardware, driver, clock_ns=lambda: round(now_s * 1e9), about="scripted")
    recorder.tick()
    #: The handles of blocks in use, by name; ``None`` for a block that found no room.
    handles: dict[str, int | None] = {}
    for time_s, group in groupby(steps, key=lambda step: step.time_s):
        if time_s < now_s:
            raise BadInputError(f"the step at {time_s} s comes after one at {now_s} s")
        now_s = time_s
        for step in group:
            _carry_out(step, gpus, handles)
        recorder.tick(with_segments=snapshots)
    recording = recorder.to_recording()
    hardware.close()
    return recording


def _carry_out(step: Step, gpus: SimulatedGpus, handles: dict[str, int | None]) -> None:
    if step.action == "allocate":
        if step.name in handles:
            raise BadInputError(f"{step.name!r} at {step.time_s} s is in use: free it first")
        try:
            handles[step.name] = gpus.allocate(step.n_bytes, step.device)
        except DeviceFullError:
            handles[step.name] = None
    elif step.action == "free":
        if step.name not in handles:
            raise BadInputError(f"{step.name!r} at {step.time_s} s is not in use")
        handle = handles.pop(step.name)
        if handle is not None:
            gpus.free(handle)
    elif step.action == "empty_cache":
        gpus.empty_cache()
    elif step.action == "oom":
        gpus.oom(step.device)
    else:
        gpus.touch(step.device)


def demo_script(n_devices: int = 1, *, n_steps: int = 12, step_s: float = 1.5) -> list[Step]:
    """Return a script of training on one or several GPUs, with an evaluation at the end.

    Weights are loaded, then each step builds activations up and takes them down while gradients
    appear; the optimizer's state comes with the first step. The evaluation runs out of memory once,
    and goes on with less. At the end everything is freed.

    Args:
        n_devices: the number of GPUs; each takes somewhat less than the one before.
        n_steps: the number of training steps.
        step_s: the seconds that each takes.
    """
    steps: list[Step] = []
    now_s = 0.0
    layers = range(8)
    tick_s = step_s / (2 * len(layers) + 2)

    def allocate(name: str, size_mib: float) -> None:
        for device in range(n_devices):
            n_bytes = round(size_mib * (1 - device / 20) * _MIB)
            steps.append(Step(now_s, "allocate", device, f"{name} on {device}", n_bytes))

    def free(name: str) -> None:
        for device in range(n_devices):
            steps.append(Step(now_s, "free", device, f"{name} on {device}"))

    for layer in layers:
        allocate(f"weights {layer}", 700)
        now_s += tick_s
    for number in range(n_steps):
        # No two batches are of the same length.
        length = 1.0 + 0.15 * ((number * 7) % 5 - 2)
        for layer in layers:
            allocate(f"activations {layer}", 3600 * length)
            now_s += tick_s
        for layer in reversed(layers):
            allocate("workspace", 900)
            allocate(f"gradients {layer}", 700)
            free("workspace")
            free(f"activations {layer}")
            now_s += tick_s
        if number == 0:
            allocate("optimizer", 2 * 700 * len(layers))
        for layer in layers:
            free(f"gradients {layer}")
        now_s += 2 * tick_s
    allocate("evaluation", 30_000)
    now_s += step_s / 2
    steps.append(Step(now_s, "oom"))
    now_s += step_s / 2
    free("evaluation")
    allocate("evaluation", 12_000)
    now_s += step_s
    for name in ("evaluation", "optimizer", *(f"weights {layer}" for layer in layers)):
        free(name)
    now_s += step_s
    steps.append(Step(now_s, "empty_cache"))
    return steps
