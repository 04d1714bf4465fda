"""Move storages to another device in place, and find what still holds those that were to go.

Each tensor on a storage is given other memory through ``tensor.data``. The tensor stays the same
object, so a parameter stays in its module and its optimizer. There is one new storage for each old
one, and every tensor keeps its offset, size and strides in it: views stay views, and tied weights
tied. The way back to the device is the same.

A release is proved by its storages: each is expired or it is not, whatever the counters say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

from gpumemwidget.errors import GpuMemError, describe_exception, read_first_line
from gpumemwidget.model.devices import HOST
from gpumemwidget.model.ownership import DeviceBytes
from gpumemwidget.model.releases import UNCOUNTED, ReleaseStay, Remnant
from gpumemwidget.ownership.graph.torch_reader import StorageInfo
from gpumemwidget.ownership.holdings import Holdings, sum_storages, take_holdings
from gpumemwidget.ownership.labels import UNNAMED, UNSEEN, spell_steps
from gpumemwidget.ownership.partition import Move
from gpumemwidget.ownership.paths import Paths
from gpumemwidget.ownership.shell import Shell
from gpumemwidget.progress import Stage, report_progress

#: Shortfall from a plan that is not looked into (bytes): other threads and the interpreter
#: allocate meanwhile.
TOLERANCE_BYTES = 1024**2

#: Maximum number of holders that are named, the biggest first.
_MOST_NAMED = 5

#: Torch's own weak reference to a storage (one of Python's would only watch the wrapper), with what
#: was read of it.
WatchedStorage: TypeAlias = "tuple[Any, StorageInfo]"


def carry_out(holdings: Holdings, moves: Sequence[Move]) -> list[Any]:
    """Move the storages, all of them or none: one object's parts belong together.

    Returns:
        The new storages, in the order of the moves.

    Raises:
        RuntimeError: there was no memory, or a tensor refused; what was moved is back as it was.
    """
    graph = holdings.graph
    base: Any = graph.reader.tensor_type
    torch = graph.reader.torch
    undo: list[tuple[Any, Any]] = []
    made: list[Any] = []
    sizes = [graph.storages[move.place].n_bytes for move in moves]
    done_bytes, total_bytes = 0, sum(sizes)
    with graph.reader.quiet():
        try:
            for move, size in zip(moves, sizes, strict=True):
                report_progress(Stage.MOVE_BYTES, done_bytes, total_bytes)
                done_bytes += size
                device = "cpu" if move.device == HOST else move.device
                new = _copy_storage(torch, graph.objects[move.place], device)
                made.append(new)
                for tensor in move.tensors:
                    with _mode_of(torch, tensor):
                        substitute = _place_on(torch, new, tensor, device)
                        undo.append((tensor, base.data.__get__(tensor)))
                        base.data.__set__(tensor, substitute)
        except BaseException:
            _put_back(torch, undo)
            made.clear()
            raise
        finally:
            undo.clear()
    return made


def _put_back(torch: Any, undo: list[tuple[Any, Any]]) -> None:
    """Give each tensor what it had, the last one first, however often that is interrupted."""
    while undo:
        try:
            while undo:
                tensor, data = undo[-1]
                with _mode_of(torch, tensor):
                    torch._C.TensorBase.data.__set__(tensor, data)  # noqa: SLF001 - see _place_on
                undo.pop()
        except KeyboardInterrupt:
            # Twice the same is the same: half a model on another device is worse than a late end.
            continue


@contextmanager
def _mode_of(torch: Any, tensor: Any) -> Iterator[None]:
    """Set the mode in which a tensor was made, whatever is on now.

    Data that was made under ``torch.inference_mode`` makes an inference tensor of the one that it
    is given to, which can't be trained any more, and the other way round.
    """
    is_inference = torch._C.TensorBase.is_inference(tensor)  # noqa: SLF001 - see _place_on
    with torch.inference_mode(is_inference), torch.no_grad():
        yield


def _copy_storage(torch: Any, storage: Any, device: str) -> Any:
    """Return a copy of the whole storage, once all that is still writing to it is done."""
    _synchronize(torch, storage.device)
    if device == "cpu":
        copy = storage.cpu()
        return storage.clone() if copy is storage else copy
    return torch.UntypedStorage(storage.nbytes(), device=device).copy_(storage)


def _synchronize(torch: Any, device: Any) -> None:
    """Wait for all streams of a device that is in use."""
    module: Any = getattr(torch, device.type, None)
    accelerator = getattr(torch, "accelerator", None)
    if device.type == "mps":
        # MPS has one device, and takes no argument.
        module.synchronize()
    elif hasattr(module, "synchronize"):
        module.synchronize(device)
    elif device.type != "cpu" and accelerator is not None:
        accelerator.synchronize(device)


def _place_on(torch: Any, storage: Any, tensor: Any, device: str) -> Any:
    """Return a tensor on the storage with the other one's offset, size, strides and bits."""
    base = torch._C.TensorBase  # noqa: SLF001 - a subclass may answer otherwise
    placed = torch.empty(0, dtype=base.dtype.__get__(tensor), device=device).set_(
        storage, base.storage_offset(tensor), base.size(tensor), base.stride(tensor)
    )
    # A lazily conjugated or negated tensor's bytes mean their opposite: the bit goes along.
    if base.is_conj(tensor):
        placed = placed.conj()
    if base.is_neg(tensor):
        placed = torch._neg_view(placed)  # noqa: SLF001 - has no public name
    return placed


class OriginalDevices:
    """The devices where storages were before a release moved them; keeps none of them alive.

    As many are remembered as live: those that are gone are forgotten at the next release.
    """

    def __init__(self) -> None:
        #: Torch's weak reference and the device, by the address of a storage's header: as long as
        #: the reference is kept no other storage gets this address.
        self._devices: dict[int, tuple[Any, str]] = {}

    def note(self, torch: Any, storages: Sequence[Any], devices: Iterable[str]) -> None:
        """Remember where the memory of these new storages was; forget those that are gone."""
        refer = torch.multiprocessing.reductions.StorageWeakRef
        for storage, device in zip(storages, devices, strict=True):
            self._devices[storage._cdata] = refer(storage), device  # noqa: SLF001 - its name in torch
        for address, (reference, _) in list(self._devices.items()):
            if reference.expired():
                del self._devices[address]

    def find(self, storage: Any) -> str | None:
        """Return the device where a storage's memory was; ``None`` where that is not known."""
        return self._devices.get(storage._cdata, (None, None))[1]  # noqa: SLF001 - its name in torch

    def forget_all(self) -> None:
        """Remember nothing; the headers go."""
        self._devices.clear()

    def __len__(self) -> int:
        return len(self._devices)


#: The one instance of the process.
original_devices = OriginalDevices()


def watch_storages(holdings: Holdings, places: Iterable[int]) -> list[WatchedStorage]:
    """Return references to the storages at these places of the holdings' graph."""
    graph = holdings.graph
    refer = graph.reader.torch.multiprocessing.reductions.StorageWeakRef
    return [(refer(graph.objects[place]), graph.storages[place]) for place in dict.fromkeys(places)]


def list_left(
    stays: Iterable[ReleaseStay], watched: Iterable[Sequence[WatchedStorage]]
) -> tuple[ReleaseStay, ...]:
    """Return what is left of memory that was to stay, with the bytes of what is alive."""
    left: list[ReleaseStay] = []
    for stay, storages in zip(stays, watched, strict=True):
        alive = [info for reference, info in storages if not reference.expired()]
        if stay.reason.kind in UNCOUNTED:
            left.append(stay)
        elif alive:
            held = DeviceBytes(sum_storages(alive, rounded=False))
            left.append(replace(stay, held_bytes=held))
    return tuple(left)


def list_remains(shell: Shell, watched: Sequence[WatchedStorage]) -> list[Remnant]:
    """Return what is still there, by its holders; nothing within the tolerance."""
    alive = [(reference, info) for reference, info in watched if not reference.expired()]
    if sum(info.n_bytes for _, info in alive) <= TOLERANCE_BYTES:
        return []
    holdings = take_holdings(shell, budget_s=5.0, depth="holders")
    paths = None if holdings is None else holdings.find_paths()
    sums: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for reference, info in alive:
        sums[info.device, _name_holders(holdings, paths, reference.cdata)] += info.n_bytes
    found = sums.most_common()
    remains = [
        Remnant(n_bytes, device, holders) for (device, holders), n_bytes in found[:_MOST_NAMED]
    ]
    rest = sum(n_bytes for _, n_bytes in found[_MOST_NAMED:])
    return [*remains, Remnant(rest)] if rest else remains


def _name_holders(holdings: Holdings | None, paths: Paths | None, handle: int) -> tuple[str, ...]:
    """Return the best path to a storage, and the other rows that reach it."""
    if holdings is None or paths is None:
        return (UNNAMED,)
    storage = holdings.graph.reader.storage_type._new_with_weak_ptr(handle)  # noqa: SLF001 - has no public name
    place = None if storage is None else holdings.graph.find(storage)
    if place is None:
        return (UNNAMED,)
    tensors = holdings.graph.tensors_on.get(place, []) or [place]
    best = min(tensors, key=paths.rank)
    root = paths.find_root(best)
    if root is None:
        # Garbage that waits for its collection, or memory held in C++.
        return (UNSEEN,)
    others = [name for name in holdings.name_holders(holdings.marks[place]) if name != root.word]
    return (spell_steps(paths.list_steps(best)), *others[:_MOST_NAMED])


def describe_error(exc: BaseException) -> str:
    """Return an exception in one line: an error of ours as it is, others with their types."""
    if isinstance(exc, KeyboardInterrupt):
        return "interrupted"
    return read_first_line(exc) if isinstance(exc, GpuMemError) else describe_exception(exc)
