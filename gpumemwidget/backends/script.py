"""Scripted sessions on simulated devices, as recordings: what to play where there is no GPU.

A script is a list of timed steps. ``play_script`` carries them out on simulated allocators and
writes down what these count, so that peaks are exact in the playback. ``demo_script`` makes one
that looks like training:

    backend = ReplayBackend.from_script(demo_script(2), clock=time.monotonic, loop=True)
    monitor = ReplayMonitor(backend.playback)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from gpumemwidget.backends.base import Relation
from gpumemwidget.backends.company import COMPANY_ACTIONS, Company, Scene
from gpumemwidget.backends.recording import Recording
from gpumemwidget.backends.stage import Stage
from gpumemwidget.errors import BadInputError
from gpumemwidget.records import DeviceInfo, Frame

__all__ = ["Step", "demo_script", "play_script"]

_MIB = 1024 * 1024
_GIB = 1024 * _MIB


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a script does."""

    time_s: float
    #: ``retry`` and ``oom`` let the allocator run full whatever it holds. The others are about
    #: company: ``process`` lets one take so much of a device in all, and ``child`` lets one below
    #: this process have so much of the host's memory (0: it ends); ``outside`` is what this process
    #: itself takes beside its context and PyTorch's allocator, ``pin`` what it has pinned of the
    #: host's; ``limit`` sets PyTorch's limit (0: none); ``lose`` is a GPU that answers no more.
    action: Literal[
        "touch",
        "allocate",
        "free",
        "empty_cache",
        "retry",
        "oom",
        "process",
        "child",
        "outside",
        "pin",
        "limit",
        "lose",
    ]
    device: int = 0
    #: What ``allocate`` calls the block and ``free`` frees, unique among the blocks in use; what a
    #: process runs.
    name: str = ""
    n_bytes: int = 0
    #: What is running meanwhile, innermost first, for the history.
    stack: tuple[Frame, ...] = ()
    #: Of a process.
    pid: int = 0
    relation: Relation = "other"


def play_script(
    steps: Sequence[Step],
    *,
    n_devices: int | None = None,
    total_bytes: int = 80 * _GIB,
    about: str = "scripted",
    snapshots: bool = False,
    history: bool = False,
    scene: Scene | None = None,
) -> Recording:
    """What simulated devices count while a script runs.

    The first event, at 0 s, is that of devices which nobody has touched. Steps of the same time
    are one event. A step that finds a device full is an out-of-memory error, and the block that it
    did not get need not be freed.

    Args:
        steps: in the order of their times.
        n_devices: how many devices there are; as many as the steps name, if not given.
        total_bytes: the memory of each.
        about: what the recording says of itself.
        snapshots: take the allocators' snapshot with every event.
        history: write the allocators' events down too, and take the snapshots that it needs.
        scene: what the driver tells of who is on the devices; it tells nothing, if not given and no
            step is about that.

    Raises:
        BadInputError: a step goes back in time, has no such device, or frees what is not there.
    """
    if n_devices is None:
        n_devices = 1 + max((step.device for step in steps), default=0)
    if scene is None and any(step.action in COMPANY_ACTIONS for step in steps):
        scene = Scene()
    company = None if scene is None else Company(scene, steps, total_bytes)
    is_instance = scene is not None and scene.is_instance
    infos = tuple(
        DeviceInfo(
            device=f"cuda:{index}",
            name="Simulated GPU MIG 1g.10gb" if is_instance else "Simulated GPU",
            total_bytes=total_bytes,
            uuid=f"{'MIG' if is_instance else 'GPU'}-00000000-0000-0000-0000-{index:012d}",
        )
        for index in range(n_devices)
    )
    stage = Stage(n_devices, total_bytes, company, snapshots=snapshots, history=history)
    events = [stage.to_event(0.0)]
    for time_s, group in groupby(steps, key=lambda step: step.time_s):
        if time_s < events[-1].time_s:
            raise BadInputError(f"the step at {time_s} s comes after one at {events[-1].time_s} s")
        stage.now_s = time_s
        for step in group:
            stage.carry_out(step)
        events.append(stage.to_event(time_s))
    devices = infos
    if company is not None:
        devices = tuple(replace(info, total_bytes=company.pytorch_total_bytes) for info in infos)
    return Recording(devices=devices, visible=infos, events=tuple(events), about=about)


def demo_script(
    n_devices: int = 1, *, n_steps: int = 12, step_s: float = 1.5, scale: float = 1.0
) -> list[Step]:
    """Training on one or several devices, step by step, with an evaluation at the end.

    Weights are loaded, then each step builds activations up and takes them down while gradients
    appear; the optimizer's state comes with the first step. The last device is touched only when
    training begins. The evaluation runs out of memory once, and goes on with less.

    Args:
        n_devices: 1, 2, 8 or any other number.
        n_steps: how many training steps.
        step_s: the time that each takes.
        scale: a factor on all sizes; at 1.0 a device of 80 GiB comes near to full.

    Returns:
        Steps in the order of their times, beginning at 0 s, that end as they began: with nothing
        in use.
    """
    demo = _Demo(n_devices, step_s, scale)
    steps = [
        *demo.load(),
        *(step for number in range(n_steps) for step in demo.train(number)),
        *demo.evaluate(),
        *demo.tidy(),
    ]
    return sorted(steps, key=lambda step: step.time_s)


class _Demo:
    """Writes the demonstration's steps, with the time at which it stands."""

    _LAYERS = 8
    _LOAD_S = 2.0

    def __init__(self, n_devices: int, step_s: float, scale: float) -> None:
        self._devices = range(n_devices)
        self._step_s = step_s
        self._scale = scale
        self._now_s = 0.0
        self._live: dict[str, int] = {}

    def load(self) -> Iterator[Step]:
        """The weights, layer by layer; on the last of several devices only when training begins."""
        for layer in range(self._LAYERS):
            for device in self._devices:
                if device == 0 or device < len(self._devices) - 1:
                    yield self._allocate(f"weights {layer}", device, 700 + 20 * device)
            self._now_s += self._LOAD_S / self._LAYERS
        last = self._devices[-1]
        if last > 0:
            for layer in range(self._LAYERS):
                yield self._allocate(f"weights {layer}", last, 700 + 20 * last)

    def train(self, number: int) -> Iterator[Step]:
        """Forward, backward, and the optimizer's step."""
        tick_s = self._step_s / (2 * self._LAYERS + 2)
        # No two batches are of the same length.
        length = 1.0 + 0.15 * ((number * 7) % 5 - 2)
        for layer in range(self._LAYERS):
            for device in self._devices:
                yield self._allocate(f"activations {layer}", device, 3600 * length)
            self._now_s += tick_s
        for layer in reversed(range(self._LAYERS)):
            for device in self._devices:
                yield self._allocate("workspace", device, 900)
                yield self._allocate(f"gradients {layer}", device, 700)
                yield self._free("workspace", device)
                yield self._free(f"activations {layer}", device)
            self._now_s += tick_s
        for device in self._devices:
            if number == 0:
                yield self._allocate("optimizer", device, 2 * 700 * self._LAYERS)
            for layer in range(self._LAYERS):
                yield self._free(f"gradients {layer}", device)
        self._now_s += 2 * tick_s

    def evaluate(self) -> Iterator[Step]:
        """A batch that is too large for the first device, and then one that fits."""
        for device in self._devices:
            yield self._allocate("evaluation", device, 30_000)
        self._now_s += self._step_s / 2
        yield Step(self._now_s, "oom", 0)
        self._now_s += self._step_s / 2
        for device in self._devices:
            yield self._free("evaluation", device)
            yield self._allocate("evaluation", device, 12_000)
        self._now_s += self._step_s

    def tidy(self) -> Iterator[Step]:
        """Everything freed, then the cache given back."""
        for name, device in list(self._live.items()):
            yield self._free(name.partition("/")[2], device)
        self._now_s += self._step_s
        yield Step(self._now_s, "empty_cache")
        self._now_s += self._step_s
        yield Step(self._now_s, "touch")

    def _allocate(self, what: str, device: int, size_mib: float) -> Step:
        name = f"{device}/{what}"
        self._live[name] = device
        n_bytes = max(1, round(size_mib * self._scale * _MIB))
        return Step(self._now_s, "allocate", device, name, n_bytes)

    def _free(self, what: str, device: int) -> Step:
        name = f"{device}/{what}"
        del self._live[name]
        return Step(self._now_s, "free", device, name)
