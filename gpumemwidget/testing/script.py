"""Scripted sessions on simulated GPUs, as recordings: something to play where there is no GPU.

    player = RecordingPlayer(play_script(demo_script(2)), clock=time.monotonic)

``play_scene`` adds to the demonstration what else is on the GPUs of a shared machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from gpumemwidget.backends.cuda.backend import CudaBackend
from gpumemwidget.backends.cuda.events import parse_events
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.backends.protocol import Relation
from gpumemwidget.errors import BadInputError
from gpumemwidget.model.segments import Frame
from gpumemwidget.testing.allocator import DeviceFullError
from gpumemwidget.testing.driver import DriverKind, SimulatedDriver, SimulatedProcesses
from gpumemwidget.testing.gpus import SimulatedGpus
from gpumemwidget.testing.recorder import Recorder, list_allocator_events
from gpumemwidget.testing.recording import Recording
from gpumemwidget.testing.torch_module import simulate_torch

__all__ = ["SceneKind", "ScriptRunner", "Step", "demo_script", "play_scene", "play_script"]

#: A driver's kind, or ``lost GPU``: the last GPU stops answering half-way.
SceneKind = Literal["plain", "no permission", "MIG", "host PIDs", "lost GPU"]

_MIB = 1024 * 1024
_GIB = 1024 * _MIB
_TOTAL_BYTES = 80 * _GIB
_MIG_TOTAL_BYTES = 10 * _GIB
_OWN_PID = 4100
#: How busy a GPU is said to be at an event at which its allocated memory has changed.
_BUSY_PERCENT = 93


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that happens in a script.

    Of the program: ``touch``, ``allocate``, ``free``, ``empty_cache``; ``oom``, which makes an
    allocation fail whatever is free; ``limit`` sets PyTorch's limit (0: none); ``pin`` and
    ``libraries`` say what it holds in all of pinned memory, and of the GPU beside PyTorch.
    Of others: ``process`` says what one takes of the GPU in all, ``child`` what a child of the
    program has of the host's memory (0: it is gone); ``lose`` makes the GPU stop answering.
    """

    time_s: float
    action: Literal[
        "touch",
        "allocate",
        "free",
        "empty_cache",
        "oom",
        "limit",
        "pin",
        "libraries",
        "process",
        "child",
        "lose",
    ]
    device: int = 0
    #: The block's name, unique among the blocks in use; of a process, what it runs.
    name: str = ""
    n_bytes: int = 0
    #: The frames that a history notes, innermost first.
    stack: tuple[Frame, ...] = ()
    #: The number of a process.
    pid: int = 0
    #: Relation of a process to the program.
    relation: Relation = "other"


class ScriptRunner:
    """Carries out the steps of a script on simulated GPUs, and records what they count.

    Args:
        n_devices: the number of GPUs.
        total_bytes: the memory of each.
        kind: what the driver tells.
        snapshots: record the allocators' segments with every event.
        history: record the allocators' history and segments.
        about: what the recording says of itself.

    Attributes:
        gpus: the GPUs.
        driver: what else is on them.
    """

    def __init__(
        self,
        n_devices: int = 1,
        *,
        total_bytes: int = _TOTAL_BYTES,
        kind: DriverKind = "plain",
        snapshots: bool = False,
        history: bool = False,
        about: str = "scripted",
    ) -> None:
        self._now_s = 0.0
        self._has_snapshots = snapshots or history
        self._has_history = history
        self.gpus = SimulatedGpus(
            n_devices,
            total_bytes=SimulatedDriver.leave_for_pytorch(total_bytes),
            clock_ns=lambda: round(self._now_s * 1e9),
            name="Simulated GPU MIG 1g.10gb" if kind == "MIG" else "Simulated GPU",
        )
        processes = SimulatedProcesses(_OWN_PID, are_pids_certain=kind != "host PIDs")
        self.driver = SimulatedDriver(self.gpus, total_bytes, kind=kind, processes=processes)
        torch = simulate_torch(self.gpus, version="2.13.0")
        self._hardware = Hardware([CudaBackend(torch)], self.driver)
        self._recorder = Recorder(
            self._hardware, self.driver, clock=lambda: self._now_s, about=about
        )
        #: The events of each device's history, one list for each event of the recording.
        self._histories: list[list[tuple[str, list[dict[str, object]]]]] = []
        #: The handles of blocks in use, by name; ``None`` for a block that found no room.
        self._handles: dict[str, int | None] = {}
        self._pinned: int | None = None
        self._allocated = [0] * n_devices
        if history:
            self.gpus.record_history()
        self._record()

    def run(self, time_s: float, steps: Sequence[Step]) -> None:
        """Carry out steps of the same time, and record what stands after them.

        Raises:
            BadInputError: a step can't be carried out, or the time lies in the past.
        """
        if time_s < self._now_s:
            raise BadInputError(f"the step at {time_s} s comes after one at {self._now_s} s")
        self._now_s = time_s
        for step in steps:
            self._carry_out(step)
        self._record()

    def finish(self) -> Recording:
        """Return the recording, and close the simulation."""
        recording = self._recorder.to_recording()
        self._hardware.close()
        if not self._has_history:
            return recording
        events = (
            replace(
                event,
                traced=tuple(
                    (device, list_allocator_events(parse_events(raw))) for device, raw in history
                ),
            )
            for event, history in zip(recording.events, self._histories, strict=True)
        )
        return replace(recording, events=tuple(events))

    def _carry_out(self, step: Step) -> None:
        gpus, driver, n_bytes, device = self.gpus, self.driver, step.n_bytes, step.device
        if step.action == "allocate":
            if step.name in self._handles:
                raise BadInputError(f"{step.name!r} at {step.time_s} s is in use: free it first")
            try:
                self._handles[step.name] = gpus.allocate(n_bytes, device, stack=step.stack)
            except DeviceFullError:
                self._handles[step.name] = None
        elif step.action == "free":
            if step.name not in self._handles:
                raise BadInputError(f"{step.name!r} at {step.time_s} s is not in use")
            handle = self._handles.pop(step.name)
            if handle is not None:
                gpus.free(handle, stack=step.stack)
        elif step.action == "limit":
            # PyTorch cuts the product of share and total to whole bytes.
            share = (n_bytes + 0.5) / gpus.get_total(device) if n_bytes else 1.0
            gpus.set_fraction(min(1.0, share), device)
        elif step.action == "pin":
            if self._pinned is not None:
                gpus.pinned.free(self._pinned)
            self._pinned = gpus.pinned.allocate(n_bytes) if n_bytes else None
        elif step.action == "process":
            driver.set_process(step.pid, n_bytes, device, name=step.name, relation=step.relation)
        elif step.action == "child":
            driver.processes.set_child(step.pid, step.name, n_bytes)
        else:
            actions: dict[str, Callable[[], None]] = {
                "touch": lambda: gpus.touch(device),
                "empty_cache": lambda: gpus.empty_cache(stack=step.stack),
                "oom": lambda: gpus.oom(device, stack=step.stack),
                "libraries": lambda: driver.set_libraries(n_bytes, device),
                "lose": lambda: driver.lose(device),
            }
            actions[step.action]()

    def _record(self) -> None:
        for index, before in enumerate(self._allocated):
            allocated = self.gpus.stats(index)["allocated_bytes"]["all"]["current"]
            self.driver.utilization_percent[index] = _BUSY_PERCENT if allocated != before else 0
            self._allocated[index] = allocated
        if self._has_history:
            history = []
            for index, raw in enumerate(self.gpus.take_snapshot()["device_traces"]):
                # The snapshots are the recorder's, and no part of the script.
                entries = [each for each in raw if each["action"] != "snapshot"]
                if entries:
                    history.append((f"cuda:{index}", entries))
            self._histories.append(history)
            self.gpus.record_history(clear_history=True)
        self._recorder.tick(with_segments=self._has_snapshots)


def play_script(
    steps: Sequence[Step], *, n_devices: int | None = None, **options: Any
) -> Recording:
    """Return what simulated GPUs count while a script runs.

    The first event, at 0 s, is that of GPUs which nobody has used yet. Steps of the same time give
    one event. A block that finds the GPU full is an out-of-memory error, and need not be freed.

    Args:
        steps: in the order of their times.
        n_devices: the number of GPUs; as many as the steps name, if not given.
        options: for ``ScriptRunner``.

    Raises:
        BadInputError: a step goes back in time, names a GPU that is not there, or frees or takes
            what it can't.
    """
    if n_devices is None:
        n_devices = 1 + max((step.device for step in steps), default=0)
    runner = ScriptRunner(n_devices, **options)
    for time_s, group in groupby(steps, key=lambda step: step.time_s):
        runner.run(time_s, tuple(group))
    return runner.finish()


# -- Scripts ---------------------------------------------------------------------------------------


def demo_script(
    n_devices: int = 1, *, n_steps: int = 12, step_s: float = 1.5, scale: float = 1.0
) -> list[Step]:
    """Return a script of training on one or several GPUs, with an evaluation at the end.

    Weights are loaded, then each step builds activations up and takes them down while gradients
    appear; the optimizer's state comes with the first step. The last of several GPUs is not used
    until training begins. The evaluation runs out of memory once, and goes on with less. At the
    end everything is freed.

    Args:
        n_devices: the number of GPUs.
        n_steps: the number of training steps.
        step_s: the seconds that each takes.
        scale: a factor on all sizes; at 1.0, GPUs of 80 GiB become nearly full.
    """
    demo = _Demo(n_devices, step_s, scale)
    steps = [
        *demo.load(),
        *(step for number in range(n_steps) for step in demo.train(number)),
        *demo.evaluate(),
        *demo.tidy(),
    ]
    return sorted(steps, key=lambda step: step.time_s)


def play_scene(
    n_devices: int = 1,
    kind: SceneKind = "plain",
    *,
    n_steps: int = 12,
    step_s: float = 1.5,
    snapshots: bool = True,
) -> Recording:
    """Return a recording of the demonstration on a shared machine.

    On the first GPU somebody's server takes and frees memory, and a desktop is drawn. Two workers
    of the program load data, memory is pinned for them, a child of the program is on each further
    GPU, and PyTorch's memory on the first is limited to nine tenths.

    Args:
        n_devices: the number of GPUs; with ``MIG`` there is one, which is small.
        kind: what the driver tells.
        n_steps: the number of training steps.
        step_s: the seconds that each takes.
        snapshots: record the allocators' segments with every event.
    """
    if kind == "MIG":
        n_devices = 1
    total_bytes = _MIG_TOTAL_BYTES if kind == "MIG" else _TOTAL_BYTES
    # Others need room on the same GPUs.
    scale = 0.8 * total_bytes / _TOTAL_BYTES
    training = demo_script(n_devices, n_steps=n_steps, step_s=step_s, scale=scale)
    end_s = training[-1].time_s
    steps = [*training, *_list_others(n_devices, total_bytes, end_s)]
    if kind == "lost GPU":
        lost_s = round(end_s / 2, 3)
        steps = [each for each in steps if each.device < n_devices - 1 or each.time_s < lost_s]
        steps.append(Step(lost_s, "lose", n_devices - 1))
    steps.sort(key=lambda step: step.time_s)
    return play_script(
        steps,
        n_devices=n_devices,
        total_bytes=total_bytes,
        kind="plain" if kind == "lost GPU" else kind,
        about=f"scripted, {kind}",
        snapshots=snapshots,
    )


class _Demo:
    """Writes the steps of the demonstration, one after the other."""

    _N_LAYERS = 8
    _LOAD_S = 2.0

    def __init__(self, n_devices: int, step_s: float, scale: float) -> None:
        self._devices = range(n_devices)
        self._step_s = step_s
        self._scale = scale
        self._now_s = 0.0
        #: The device of each block in use, by name.
        self._blocks: dict[str, int] = {}

    def load(self) -> Iterator[Step]:
        """Load the weights layer by layer; on the last of several GPUs when training begins."""
        for layer in range(self._N_LAYERS):
            for device in self._devices:
                if device == 0 or device < len(self._devices) - 1:
                    yield self._allocate(f"weights {layer}", device, 700 + 20 * device)
            self._now_s += self._LOAD_S / self._N_LAYERS
        last = self._devices[-1]
        if last > 0:
            for layer in range(self._N_LAYERS):
                yield self._allocate(f"weights {layer}", last, 700 + 20 * last)

    def train(self, number: int) -> Iterator[Step]:
        """Run forward, backward, and the optimizer's step."""
        tick_s = self._step_s / (2 * self._N_LAYERS + 2)
        # No two batches are of the same length.
        length = 1.0 + 0.15 * ((number * 7) % 5 - 2)
        for layer in range(self._N_LAYERS):
            for device in self._devices:
                yield self._allocate(f"activations {layer}", device, 3600 * length)
            self._now_s += tick_s
        for layer in reversed(range(self._N_LAYERS)):
            for device in self._devices:
                yield self._allocate("workspace", device, 900)
                yield self._allocate(f"gradients {layer}", device, 700)
                yield self._free("workspace", device)
                yield self._free(f"activations {layer}", device)
            self._now_s += tick_s
        for device in self._devices:
            if number == 0:
                yield self._allocate("optimizer", device, 2 * 700 * self._N_LAYERS)
            for layer in range(self._N_LAYERS):
                yield self._free(f"gradients {layer}", device)
        self._now_s += 2 * tick_s

    def evaluate(self) -> Iterator[Step]:
        """Run a batch that is too large for the first GPU, and then one that fits."""
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
        """Free everything, then empty the cache."""
        for name, device in list(self._blocks.items()):
            yield self._free(name.partition("/")[2], device)
        self._now_s += self._step_s
        yield Step(self._now_s, "empty_cache")
        self._now_s += self._step_s
        yield Step(self._now_s, "touch")

    def _allocate(self, what: str, device: int, size_mib: float) -> Step:
        name = f"{device}/{what}"
        self._blocks[name] = device
        n_bytes = max(1, round(size_mib * self._scale * _MIB))
        return Step(self._now_s, "allocate", device, name, n_bytes)

    def _free(self, what: str, device: int) -> Step:
        name = f"{device}/{what}"
        del self._blocks[name]
        return Step(self._now_s, "free", device, name)


def _list_others(n_devices: int, total_bytes: int, end_s: float) -> Iterator[Step]:
    """Yield the steps of a scene that are not about PyTorch's allocator."""
    unit = total_bytes / _TOTAL_BYTES
    yield Step(0.0, "process", 0, "/usr/lib/xorg/Xorg", int(180 * _MIB * unit), pid=1500)
    for number in range(16):
        n_bytes = int((3, 5, 4, 2)[number % 4] * _GIB * unit)
        time_s = round(number * end_s / 16, 3)
        yield Step(time_s, "process", 0, "python serve.py", n_bytes, pid=2077)
    for number in range(2):
        pid, n_bytes = 4120 + number, (380 + 20 * number) * _MIB
        yield Step(1.0, "child", name="pt_data_worker", n_bytes=n_bytes, pid=pid)
        yield Step(end_s, "child", name="pt_data_worker", pid=pid)
    yield Step(1.0, "pin", n_bytes=256 * _MIB)
    yield Step(end_s, "pin")
    yield Step(2.0, "limit", 0, n_bytes=int(0.9 * total_bytes))
    for device in range(n_devices):
        yield Step(2.0, "libraries", device, n_bytes=int((300 + 40 * device) * _MIB * unit))
    for device in range(1, n_devices):
        pid, name = 4200 + device, f"python rank.py --rank {device}"
        yield Step(3.0, "child", name=name, n_bytes=(900 + 10 * device) * _MIB, pid=pid)
        for number in range(3):
            n_bytes = (700 + 600 * number) * _MIB
            time_s = round(3.0 + number * (end_s - 4.0) / 3, 3)
            yield Step(time_s, "process", device, name, n_bytes, pid=pid, relation="child")
        yield Step(end_s, "process", device, name, pid=pid, relation="child")
        yield Step(end_s, "child", name=name, pid=pid)
