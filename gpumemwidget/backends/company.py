"""Who else is on the simulated devices of a script, and what a driver would tell of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from gpumemwidget.backends.base import Relation
from gpumemwidget.backends.statechanges import Change, Seen
from gpumemwidget.devices import ChildProcess, Limit, PinnedUse, ProcessUse
from gpumemwidget.errors import BadInputError
from gpumemwidget.records import DeviceUse

if TYPE_CHECKING:
    from gpumemwidget.backends.script import Step

__all__ = ["COMPANY_ACTIONS", "Company", "Scene"]

#: What of a script's actions is about company, and not about PyTorch's allocator.
COMPANY_ACTIONS = ("process", "child", "outside", "pin", "limit", "lose")
#: Of a device: what the driver reserves, what a context takes, what belongs to nobody; as on 80 GiB
#: 512, 512 and 9 MiB.
_DRIVER_SHARE = 1 / 160
_CONTEXT_SHARE = 1 / 160
_UNLISTED_SHARE = 1 / 9000
#: How much higher the machine's numbers are than a container's.
_MACHINES_FROM = 3_000_000
_LOST = (
    "{device}: memory in use can't be read: the GPU is lost and does not answer any more "
    "(nvidia-smi tells more).",
    "{device}: processes can't be read: the GPU is lost and does not answer any more "
    "(nvidia-smi tells more).",
)
_NO_PERMISSION = "{device}: processes can't be read: this user has no permission for it."


@dataclass(frozen=True, slots=True)
class Scene:
    """What the driver tells in a script."""

    own_pid: int = 4100
    own_name: str = "python -m ipykernel_launcher"
    #: ``machine``: by other numbers than processes have here, as within a container. ``none``: this
    #: user may not see them.
    numbers: Literal["own", "machine", "none"] = "own"
    #: Whether each device is an instance of a GPU that is cut up.
    is_instance: bool = False


class Company:
    """The processes on simulated devices while a script runs.

    Args:
        scene: what the driver tells.
        steps: all of the script's: what others take at most is kept free from the start.
        total_bytes: the memory of each device.
    """

    def __init__(self, scene: Scene, steps: Iterable[Step], total_bytes: int) -> None:
        self._scene = scene
        self._total_bytes = total_bytes
        self._driver_bytes = int(total_bytes * _DRIVER_SHARE)
        self._context_bytes = int(total_bytes * _CONTEXT_SHARE)
        self._unlisted_bytes = int(total_bytes * _UNLISTED_SHARE)
        #: By device and number: name, relation, bytes.
        self._processes: dict[tuple[int, int], tuple[str, Relation, int]] = {}
        self._outside: dict[int, int] = {}
        self._children: dict[int, ChildProcess] = {}
        self._limits: dict[int, int] = {}
        self._lost: set[int] = set()
        self._pinned: PinnedUse | None = None
        self._last = Seen()
        most: dict[tuple[str, int, int], int] = {}
        for step in steps:
            if step.action in ("process", "outside"):
                key = (step.action, step.device, step.pid)
                most[key] = max(most.get(key, 0), step.n_bytes)
        taken: dict[int, int] = {}
        for (_, device, _), n_bytes in most.items():
            taken[device] = taken.get(device, 0) + n_bytes
        fixed = self._driver_bytes + self._context_bytes + self._unlisted_bytes
        #: What PyTorch's allocator can have of any device at most.
        self.room_bytes = total_bytes - fixed - max(taken.values(), default=0)
        if self.room_bytes <= 0:
            raise BadInputError(
                f"the script's processes leave nothing of {total_bytes} bytes: let them take less"
            )

    @property
    def pytorch_total_bytes(self) -> int:
        """What the whole of a device is to PyTorch: without what the driver has reserved."""
        return self._total_bytes - self._driver_bytes

    def carry_out(self, step: Step) -> None:
        """One step of those that are about company."""
        device, n_bytes = step.device, step.n_bytes
        if step.action == "process":
            self._processes[device, step.pid] = (step.name, step.relation, n_bytes)
            if n_bytes == 0:
                del self._processes[device, step.pid]
        elif step.action == "child":
            self._children[step.pid] = ChildProcess(
                step.pid, self._scene.own_pid, step.name, n_bytes
            )
            if n_bytes == 0:
                del self._children[step.pid]
        elif step.action == "outside":
            self._outside[device] = n_bytes
        elif step.action == "pin":
            self._pinned = _pin(self._pinned, n_bytes)
        elif step.action == "limit":
            self._limits[device] = n_bytes
        else:
            self._lost.add(device)

    def to_use(self, index: int, reserved_bytes: int | None, *, percent: int) -> DeviceUse:
        """The whole device now.

        Args:
            index: of the device.
            reserved_bytes: what PyTorch has of it; ``None`` where it is not in use.
            percent: how busy it is.
        """
        device = f"cuda:{index}"
        if index in self._lost:
            return DeviceUse(device, None, None, None)
        own_bytes = self._find_own(index, reserved_bytes)
        others = [each[2] for (place, _), each in self._processes.items() if place == index]
        used_bytes = self._unlisted_bytes + (own_bytes or 0) + sum(others)
        return DeviceUse(
            device=device,
            used_bytes=used_bytes,
            free_bytes=self._total_bytes - self._driver_bytes - used_bytes,
            total_bytes=self._total_bytes,
            utilization_percent=None if self._scene.is_instance else percent,
            driver_bytes=self._driver_bytes,
        )

    def to_change(self, reserved: dict[int, int | None]) -> Change:
        """What is otherwise than when this was asked last.

        Args:
            reserved: what PyTorch has of each device; ``None`` where it is not in use.
        """
        seen = Seen(
            processes={
                f"cuda:{index}": self._list(index, reserved_bytes)
                for index, reserved_bytes in reserved.items()
            },
            failures={f"cuda:{index}": self._list_failures(index) for index in reserved},
            children=tuple(self._children[pid] for pid in sorted(self._children)),
            pinned=self._pinned,
            limits=tuple(
                Limit(f"cuda:{index}", n_bytes or None, self.pytorch_total_bytes, None)
                for index, n_bytes in sorted(self._limits.items())
            ),
        )
        change, self._last = seen.compare(self._last), seen
        return change

    def _find_own(self, index: int, reserved_bytes: int | None) -> int | None:
        """What this process takes of a device; ``None`` where it is not there."""
        if reserved_bytes is None:
            return None
        return self._context_bytes + self._outside.get(index, 0) + reserved_bytes

    def _list(self, index: int, reserved_bytes: int | None) -> tuple[ProcessUse, ...] | None:
        if index in self._lost or self._scene.numbers == "none":
            return None
        uses = [
            ProcessUse(pid, name, relation, n_bytes)
            for (place, pid), (name, relation, n_bytes) in self._processes.items()
            if place == index
        ]
        own_bytes = self._find_own(index, reserved_bytes)
        if own_bytes is not None:
            scene = self._scene
            uses.append(ProcessUse(scene.own_pid, scene.own_name, "own", own_bytes))
        if self._scene.numbers == "machine":
            uses = [
                replace(use, pid=_MACHINES_FROM + use.pid, name=None, relation="other")
                for use in uses
            ]
        places = {"own": 0, "child": 1, "other": 2}
        uses.sort(key=lambda use: (places[use.relation], -(use.n_bytes or 0), use.pid))
        return tuple(uses)

    def _list_failures(self, index: int) -> tuple[str, ...]:
        sentences: tuple[str, ...] = ()
        if index in self._lost:
            sentences = _LOST
        elif self._scene.numbers == "none":
            sentences = (_NO_PERMISSION,)
        return tuple(sentence.format(device=f"cuda:{index}") for sentence in sentences)


def _pin(before: PinnedUse | None, n_bytes: int) -> PinnedUse:
    """Pinned memory once so much is held: what was held before stays with the allocator."""
    reserved_bytes = max(n_bytes, 0 if before is None else before.reserved_bytes)
    peak_bytes = max(n_bytes, 0 if before is None else before.allocated_peak_bytes or 0)
    return PinnedUse(n_bytes, reserved_bytes, peak_bytes, reserved_bytes)
