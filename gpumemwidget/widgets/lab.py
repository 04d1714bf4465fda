"""Serve JupyterLab's panel and its item in the status bar.

The page's side is the JupyterLab extension in ``labextension/``. It asks a notebook's kernel for
its comms of the target ``gpumemwidget``, and speaks to the one that it finds. A page without the
extension never hears of it, and passes over its messages.

A page says when it begins and ends to look (``{"kind": "look", "page": id, "is_seen": bool}``), and
after each cell that it still does. It gets the memory of each device when that has changed, at most
once a second: an idle notebook sends nothing, so that a server sees that it is idle. A page
asks for the dashboard's model and for the kernels on the GPUs when it shows them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from comm import create_comm, get_comm_manager

from gpumemwidget.model.devices import HOST, DeviceInfo, Reading, Sample
from gpumemwidget.session.session import Session
from gpumemwidget.widgets.page import Message, Viewers, describe_failure, schedule_on_main

#: Type of the output of ``%memdash --side``. ``labextension/src/note.ts`` has the same.
SIDE_MIME = "application/vnd.gpumemwidget.side+json"
#: Seconds between two messages on the memory, at least.
_INTERVAL_S = 1.0


class LabLink:
    """A session's line to the pages that have JupyterLab's panel."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._monitor = session.monitor
        #: A cell's end takes it: nothing asks a driver under it.
        self._lock = threading.RLock()
        self._pages: Viewers[None] = Viewers(speak_when_idle=False)
        self._n_shown = 0
        self._infos: dict[str, DeviceInfo] | None = None
        #: The description of each device that was sent last.
        self._sent: dict[str, Message] = {}
        self._sent_s = 0.0
        self._comm: Any = None
        self._answers: dict[str, Callable[[Message], None]] = {
            "look": self._hear_look,
            "kernels": partial(self._answer_soon, self._describe_kernels),
        }
        self._listening = ExitStack()

    def open(self, open_dashboard: Callable[[], str]) -> None:
        """Register the comm that pages look for; ``open_dashboard`` returns a dashboard's id."""
        self._answers["dashboard"] = partial(
            self._answer_soon, lambda: {"model_id": open_dashboard()}
        )
        # A comm that is not primary opens in no page: pages find it in the kernel's list of comms,
        # by the name of its target (``labextension/src/link.ts``).
        self._comm = create_comm(target_name="gpumemwidget", primary=False)
        get_comm_manager().register_comm(self._comm)
        self._comm.on_msg(self._handle_message)
        for stop in (
            self._monitor.sampled.add(self._take_samples),
            self._monitor.cell_ended.add(lambda _: self._note_cell()),
        ):
            self._listening.callback(stop)

    def show(self) -> None:
        """Let each page that has the panel open it: now, or as soon as it hears of this kernel."""
        self._n_shown += 1
        self._send({"kind": "side", "n_shown": self._n_shown})

    def close(self) -> None:
        """Close the comm, and stop sampling for it. May be called twice."""
        with self._lock:
            self._pages.said.clear()
            self._monitor.unwant_samples(self)
        self._listening.close()
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.close()

    # -- What pages ask ----------------------------------------------------------------------------

    def _handle_message(self, message: Message) -> None:
        try:
            content = message["content"]["data"]
            self._answers[content["kind"]](content)
        except Exception as exc:  # noqa: BLE001 - a page may send anything
            self._session.report_failure("Answering JupyterLab's panel", exc)
        except KeyboardInterrupt:
            # A Ctrl-C between cells stops nothing of the user's; the page asks again after a cell.
            return

    def _hear_look(self, request: Message) -> None:
        page, is_seen = str(request["page"]), bool(request["is_seen"])
        with self._lock:
            is_new = is_seen and page not in self._pages.said
            if is_seen:
                self._pages.hear(page, None, self._monitor.clock.now())
            else:
                self._pages.said.pop(page, None)
            if not self._pages.said:
                self._monitor.unwant_samples(self)
                return
        if is_new:
            self._sent, self._infos = {}, None
            self._sent_s = self._monitor.clock.now()
            self._send({"kind": "side", "n_shown": self._n_shown})
            self._send_memory(self._session.hardware.read())
        self._monitor.want_samples(self)

    def _answer_soon(self, describe: Callable[[], Message], request: Message) -> None:
        """Answer on the main thread, or send why that failed."""
        schedule_on_main(partial(self._answer, request["kind"], describe))

    def _answer(self, kind: str, describe: Callable[[], Message]) -> None:
        try:
            message = {"kind": kind, **describe()}
        except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - shown in the panel
            message = {"kind": "failed", "of": kind, "message": describe_failure(exc)}
        self._send(message)

    def _describe_kernels(self) -> Message:
        hardware = self._session.hardware
        uses = hardware.list_kernels()
        gpus = [
            {
                "uuid": info.uuid or info.device,
                "device": info.device,
                "name": info.name,
                "total_bytes": info.total_bytes,
                "kernels": {
                    use.kernel_id: use.n_bytes for use in uses if use.device == info.device
                },
            }
            for info in hardware.list_all_devices()
            if info.device != HOST
        ]
        return {"gpus": gpus}

    # -- What is sent to pages ---------------------------------------------------------------------

    def _note_cell(self) -> None:
        """Read anew what the cell may have changed, send it all, and wait for the pages."""
        self._infos, self._sent = None, {}
        with self._lock:
            self._pages.wait_anew(self._monitor.clock.now())

    def _take_samples(self, samples: Sequence[Sample]) -> None:
        now_s = self._monitor.clock.now()
        with self._lock:
            if not self._pages.said:
                return
            if self._monitor.running is None:
                self._pages.drop_lost(now_s)
            if not self._pages.said:
                self._monitor.unwant_samples(self)
            if now_s - self._sent_s < _INTERVAL_S:
                return
            self._sent_s = now_s
        self._send_memory(samples[-1].readings)

    def _send_memory(self, readings: Sequence[Reading]) -> None:
        """Send the memory of each device, unless it is as it was sent last."""
        by_device = {reading.device: reading for reading in readings}
        infos, sent = self._infos, self._sent
        if infos is None or not infos.keys() >= by_device.keys():
            # If a cell ends meanwhile, it wants them read once more.
            asked: dict[str, DeviceInfo] = {}
            self._infos = asked
            infos = {info.device: info for info in self._session.hardware.list_all_devices()}
            if self._infos is asked:
                self._infos = infos
        find_budget = self._monitor.budgets.find
        own = dict(self._monitor.read_own_uses())
        memory = {
            device: _describe_memory(
                info, by_device.get(device), own.get(device), find_budget(device)
            )
            for device, info in infos.items()
        }
        if any(_has_changed(each, sent.get(device)) for device, each in memory.items()):
            # A cell that ended meanwhile wants all of it sent once more.
            if self._sent is sent:
                self._sent = memory
            self._send({"kind": "memory", "devices": [*memory.values()]})

    def _send(self, message: Message) -> None:
        comm = self._comm
        if comm is not None:
            comm.send(message)


def _describe_memory(
    info: DeviceInfo, reading: Reading | None, own_bytes: int | None, budget_bytes: int | None
) -> Message:
    """Describe what this notebook has of a device, and whether that is more than it may have.

    Without a ``reading`` PyTorch does not use the GPU. ``own_bytes`` is what the driver shows for
    this process, if it does.
    """
    allocated = 0 if reading is None else reading.allocated_bytes
    reserved = 0 if reading is None else reading.reserved_bytes
    limit_bytes = info.limit_bytes
    return {
        "device": info.device,
        "name": info.name,
        # PyTorch may have reserved more since the driver was asked.
        "here_bytes": reserved if own_bytes is None else max(own_bytes, reserved or 0),
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "total_bytes": info.total_bytes,
        "limit_bytes": limit_bytes,
        "budget_bytes": budget_bytes,
        "is_over_budget": budget_bytes is not None and (allocated or 0) > budget_bytes,
        "is_at_limit": limit_bytes is not None and (reserved or 0) >= limit_bytes,
    }


def _has_changed(now: Message, before: Message | None) -> bool:
    """Return whether a device's memory is worth a message, other than the one before."""
    if before is None or now["device"] != HOST:
        return now != before
    counters = ("here_bytes", "allocated_bytes", "reserved_bytes")
    # The host's memory always changes a little.
    return any(
        abs((value or 0) - (before[name] or 0)) >= 1 << 26
        if name in counters
        else value != before[name]
        for name, value in now.items()
    )
