"""Scripted sessions on simulated devices, as recordings: what to play where there is no GPU.

A script is a list of timed steps. ``play_script`` carries them out on simulated allocators and
writes down what these count, so that peaks are exact in the playback. ``demo_script`` makes one
that looks like training:

    backend = ReplayBackend.from_script(demo_script(2), clock=time.monotonic, loop=True)
    monitor = ReplayMonitor(backend.playback)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from gpumemwidget.backends.allocator import DeviceFullError, ReplayAllocator
from gpumemwidget.backends.events import parse_events
from gpumemwidget.backends.recording import Event, Recording
from gpumemwidget.backends.snapshot import parse_segments
from gpumemwidget.errors import BadInputError
from gpumemwidget.records import DeviceInfo, DeviceUse, Frame, Reading

__all__ = ["Step", "demo_script", "play_script"]

_MIB = 1024 * 1024
_GIB = 1024 * _MIB
#: The shares of a device that a context takes beside the allocator's memory, and that others use:
#: of 80 GiB 512 and 320 MiB.
_CONTEXT_SHARE = 1 / 160
_OTHERS_SHARE = 1 / 256
_BUSY_PERCENT = 93


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a script does."""

    time_s: float
    #: ``retry`` and ``oom`` let the allocator run full whatever it holds.
    action: Literal["touch", "allocate", "free", "empty_cache", "retry", "oom"]
    device: int = 0
    #: What ``allocate`` calls the block and ``free`` frees; unique among the blocks in use.
    name: str = ""
    n_bytes: int = 0
    #: What is running meanwhile, innermost first, for the history.
    stack: tuple[Frame, ...] = ()


def play_script(
    steps: Sequence[Step],
    *,
    n_devices: int | None = None,
    total_bytes: int = 80 * _GIB,
    about: str = "scripted",
    snapshots: bool = False,
    history: bool = False,
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

    Raises:
        BadInputError: a step goes back in time, has no such device, or frees what is not there.
    """
    if n_devices is None:
        n_devices = 1 + max((step.device for step in steps), default=0)
    infos = tuple(
        DeviceInfo(
            device=f"cuda:{index}",
            name="Simulated GPU",
            total_bytes=total_bytes,
            uuid=f"GPU-00000000-0000-0000-0000-{index:012d}",
        )
        for index in range(n_devices)
    )
    stage = _Stage(n_devices, total_bytes, snapshots=snapshots, history=history)
    events = [stage.to_event(0.0)]
    for time_s, group in groupby(steps, key=lambda step: step.time_s):
        if time_s < events[-1].time_s:
            raise BadInputError(f"the step at {time_s} s comes after one at {events[-1].time_s} s")
        stage.now_s = time_s
        for step in group:
            stage.carry_out(step)
        events.append(stage.to_event(time_s))
    return Recording(devices=infos, visible=infos, events=tuple(events), about=about)


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


class _Stage:
    """The simulated devices while a script runs."""

    def __init__(self, n_devices: int, total_bytes: int, *, snapshots: bool, history: bool) -> None:
        self.now_s = 0.0
        self._takes_snapshots = snapshots or history
        self._has_history = history
        self._total_bytes = total_bytes
        self._others_bytes = int(total_bytes * _OTHERS_SHARE)
        self._context_bytes = int(total_bytes * _CONTEXT_SHARE)
        # What the allocator can have at most is what these leave.
        room_bytes = total_bytes - self._others_bytes - self._context_bytes
        self._allocator = ReplayAllocator(
            n_devices, total_bytes=room_bytes, clock_ns=lambda: round(self.now_s * 1e9)
        )
        if history:
            self._allocator.record_history()
        #: ``None`` for a block that was not to be had.
        self._handles: dict[str, int | None] = {}
        self._was_allocated: dict[int, int] = {}

    def carry_out(self, step: Step) -> None:
        if step.action == "allocate":
            if step.name in self._handles:
                raise BadInputError(f"{step.name!r} at {step.time_s} s is in use: free it first")
            try:
                self._handles[step.name] = self._allocator.allocate(
                    step.n_bytes, step.device, stack=step.stack
                )
            except DeviceFullError:
                self._handles[step.name] = None
        elif step.action == "free":
            if step.name not in self._handles:
                raise BadInputError(f"{step.name!r} at {step.time_s} s is not in use")
            handle = self._handles.pop(step.name)
            if handle is not None:
                self._allocator.free(handle, stack=step.stack)
        elif step.action == "empty_cache":
            self._allocator.empty_cache(stack=step.stack)
        elif step.action == "touch":
            self._allocator.touch(step.device)
        else:
            getattr(self._allocator, step.action)(step.device, stack=step.stack)

    def to_event(self, time_s: float) -> Event:
        readings, uses = [], []
        for index in range(self._allocator.n_devices):
            stats = self._allocator.stats(index)
            allocated = stats["allocated_bytes"]["all"]
            reserved = stats["reserved_bytes"]["all"]
            used_bytes = self._others_bytes
            if index in self._allocator.list_touched():
                used_bytes += self._context_bytes + reserved["current"]
                readings.append(
                    Reading(
                        device=f"cuda:{index}",
                        allocated_bytes=allocated["current"],
                        reserved_bytes=reserved["current"],
                        allocated_peak_bytes=allocated["peak"],
                        reserved_peak_bytes=reserved["peak"],
                        peak_is="exact",
                        num_alloc_retries=stats["num_alloc_retries"],
                        num_ooms=stats["num_ooms"],
                    )
                )
                self._allocator.reset_peak(index)
            was_busy = allocated["current"] != self._was_allocated.get(index, 0)
            self._was_allocated[index] = allocated["current"]
            uses.append(
                DeviceUse(
                    device=f"cuda:{index}",
                    used_bytes=used_bytes,
                    free_bytes=self._total_bytes - used_bytes,
                    total_bytes=self._total_bytes,
                    utilization_percent=_BUSY_PERCENT if was_busy else 0,
                )
            )
        segments, traced = None, []
        if self._takes_snapshots:
            snapshot = self._allocator.take_snapshot()
            segments = parse_segments(snapshot["segments"])
            for index, raw in enumerate(snapshot["device_traces"]):
                if raw:
                    traced.append((f"cuda:{index}", parse_events(raw)))
        if self._has_history:
            self._allocator.record_history(clear_history=True)
        return Event(time_s, "tick", tuple(readings), tuple(uses), segments, tuple(traced))


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
