"""What gives memory beside a release: settings, and work that needs less of it.

What less work would need is told from what stood at the OOM; it is never more than an estimate or a
bound, and says so.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from gpumemwidget.devices import ProcessUse
from gpumemwidget.owners.account import ELSEWHERE, Account
from gpumemwidget.owners.base import Shell
from gpumemwidget.records import HOST, DeviceAccount, Owned
from gpumemwidget.traces import OomEvent, WayOut

__all__ = ["list_savings", "list_settings", "sum_float32"]

#: Whoever mentions one of these may be training, in a way that can't be seen from here.
_TRAINING = frozenset({"backward", "fit", "grad", "train", "training_step"})

#: So many other processes are named.
_MOST_PROCESSES = 3

# -- What the allocator and the system may be told -------------------------------------------------


def list_settings(shell: Shell, event: OomEvent) -> Iterator[WayOut]:
    """What the allocator, the process or the machine may be told."""
    if event.cached_bytes:
        yield WayOut(
            kind="cached blocks",
            text="empty PyTorch's cache",
            gives_bytes=event.cached_bytes,
            gives_is="exact",
            command=_write_torch(shell, f"{_find_module(event.device)}.empty_cache()"),
            can_do=True,
        )
    if (
        event.is_fragmented
        and event.device.startswith("cuda:")
        and event.unallocated_bytes
        and "expandable_segments:True" not in _read_settings()[1]
    ):
        name, settings = _read_settings()
        wanted = ",".join([*([settings] if settings else []), "expandable_segments:True"])
        yield WayOut(
            kind="expandable segments",
            text="let segments grow, so that free memory does not lie in pieces: restart the "
            "kernel and set this before torch is imported",
            gives_bytes=event.unallocated_bytes,
            gives_is="at most",
            command=f"%env {name}={wanted}",
        )
    yield from _list_limits(event)
    if event.others_bytes:
        yield WayOut(
            kind="other processes",
            text=_name_others(event.others),
            gives_bytes=event.others_bytes,
            gives_is="at most",
            command="!ps aux --sort=-rss | head" if event.device == HOST else "!nvidia-smi",
        )


def _name_others(others: Sequence[ProcessUse]) -> str:
    """What to do about other processes, those that take most by name."""
    if not others:
        return "end other processes that take memory"
    names = [
        f"{each.name} (pid {each.pid})" if each.name else f"process {each.pid}"
        for each in others[:_MOST_PROCESSES]
    ]
    if len(others) > len(names):
        names.append(f"{len(others) - len(names)} more")
    return f"end what else is on the device: {', '.join(names)}"


def _read_settings() -> tuple[str, str]:
    """The environment variable of the allocator's settings, and what it is set to."""
    torch: Any = sys.modules.get("torch")
    # Since 2.9 there is one name for all accelerators, and the older one makes torch warn.
    version = re.match(r"(\d+)\.(\d+)", str(getattr(torch, "__version__", "")))
    is_new = version is not None and (int(version[1]), int(version[2])) >= (2, 9)
    name = "PYTORCH_ALLOC_CONF" if is_new else "PYTORCH_CUDA_ALLOC_CONF"
    return name, os.environ.get(name) or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def _list_limits(event: OomEvent) -> Iterator[WayOut]:
    limit, total = event.limit_bytes, event.device_total_bytes
    if limit is None:
        return
    room = [each for each in (event.device_free_bytes, total and total - limit) if each is not None]
    if event.device == HOST:
        yield WayOut(
            kind="limit",
            text="raise the cap on the process's addresses (ulimit -v), where it was started",
            gives_bytes=min(room, default=None),
            gives_is="at most",
        )
        return
    yield WayOut(
        kind="limit",
        text="take away or raise the limit of this process",
        gives_bytes=min(room, default=None),
        gives_is="at most",
        command=f"%memlimit off --device {event.device}",
    )


def _find_module(device: str) -> str:
    """Torch's module for a kind of device: ``cuda``, ``xpu``; ``accelerator`` for all others."""
    kind = device.partition(":")[0]
    return kind if kind in ("cuda", "xpu", "mps") else "accelerator"


def _write_torch(shell: Shell, call: str) -> str:
    """A call that works as it is typed, whatever ``torch`` is called in the notebook."""
    torch = sys.modules.get("torch")
    if torch is not None and shell.user_ns.get("torch") is torch:
        return f"torch.{call}"
    return f"import torch; torch.{call}"


# -- What needs less -------------------------------------------------------------------------------


def list_savings(
    at_oom: DeviceAccount, mentions: Collection[str], n_float32: int, *, is_at_end: bool
) -> Iterator[WayOut]:
    """How the same work would need less.

    Args:
        at_oom: who had what.
        mentions: the words of the cell's code.
        n_float32: bytes of what is in float32.
        is_at_end: whether ``at_oom`` was read at the cell's end, and the last exception in it is
            the cell's own.
    """
    # Where the functions that ran into the OOM stand in the account.
    running = {"thread", "exception"} if is_at_end else {"thread"}
    saved = sum(
        each.n_bytes
        for each in at_oom.owned
        if each.kind == "saved for backward"
        and (is_at_end or each.root != "exception")
        and _is_this_cells(each, mentions)
    )
    # What the functions that were running had made, and nothing else holds.
    made = sum(
        each.n_bytes for each in at_oom.owned if each.kind == "tensor" and each.root in running
    )
    if saved + made:
        yield WayOut(
            kind="smaller batch",
            text="halve the batch: half of what activations took",
            gives_bytes=(saved + made) // 2,
            gives_is="about",
        )
    if saved and _TRAINING.isdisjoint(mentions):
        yield WayOut(
            kind="no_grad",
            text="compute under torch.no_grad(), for nothing in this cell mentions backward",
            gives_bytes=saved,
            gives_is="at most",
        )
    elif saved:
        yield WayOut(
            kind="checkpointing",
            text="recompute activations in backward (torch.utils.checkpoint) instead of keeping "
            "them",
            gives_bytes=saved,
            gives_is="at most",
        )
    if n_float32:
        yield WayOut(
            kind="lower precision",
            text="compute in bfloat16 (torch.autocast, or .to(torch.bfloat16)): half of what is in "
            "float32",
            gives_bytes=n_float32 // 2,
            gives_is="at most",
        )


def _is_this_cells(owned: Owned, mentions: Collection[str]) -> bool:
    """Whether it may be the running cell's: what it does not mention is from before."""
    if owned.root == "name":
        return any(each in mentions for each in (*owned.rows, *owned.steps[:1]))
    return owned.root != "out"


def sum_float32(account: Account, device: str) -> int:
    """Bytes on the device that float32 tensors look at."""
    graph = account.graph
    reader = graph.reader
    n_bytes = 0
    with reader.quiet():
        for place, tensors in graph.tensors_on.items():
            info = graph.storages.get(place)
            # Of what no row reaches nobody could choose how it is computed.
            is_yours = account.marks[place] & ~ELSEWHERE
            if info is None or info.device != device or not is_yours:
                continue
            tensor = graph.objects[tensors[0]]
            if not reader.is_dispatched(type(tensor)) and reader.read_shape(tensor)[1] == "float32":
                n_bytes += info.n_bytes
    return n_bytes
