"""Serve JupyterLab's panel and its item in the status bar.

The page's side is the JupyterLab extension in ``labextension/``. It asks a kernel whose notebook
has the focus for its comms of the target ``gpumemwidget``, and speaks to the one that it finds: so
nothing is sent to pages that have no such extension.

A page says every ten seconds that it looks (``{"kind": "look", "page": id, "is_seen": bool}``), and
then gets the memory of each device, when it has changed, at most once a second. It asks for the
dashboard's model and for the kernels on the GPUs when it shows them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from comm import create_comm, get_comm_manager

from gpumemwidget.model.devices import HOST, DeviceInfo, Reading, Sample
from gpumemwidget.session.session import Session
from gpumemwidget.widgets.page import Message, describe_failure, schedule_on_main

#: By which pages find the comm. ``labextension/src/link.ts`` has the same.
_TARGET = "gpumemwidget"
#: Type of the output of ``%memdash --side``. ``labextension/src/note.ts`` has the same.
SIDE_MIME = "application/vnd.gpumemwidget.side+json"
#: Seconds between two messages on the memory, at least.
_INTERVAL_S = 1.0
#: Seconds of silence after which a page is gone; a busy kernel hears nothing meanwhile.
_LOST_AFTER_S = 25.0
#: Maximum number of pages that are remembered, those that spoke last.
_MAX_PAGES = 50


class LabLink:
    """A session's line to the pages that have JupyterLab's panel.

    Args:
        session: the session, which attaches this.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._monitor = session.monitor
        self._lock = threading.RLock()
        #: When each page spoke that can be seen.
        self._pages: dict[str, float] = {}
        self._n_shown = 0
        self._infos: dict[str, DeviceInfo] | None = None
        self._sent: object = None
        self._sent_s = 0.0
        self._open_dashboard: Callable[[], str] | None = None
        self._comm: Any = None
        self._answers: dict[str, Callable[[Message], None]] = {
            "look": self._hear_look,
            "dashboard": lambda _: schedule_on_main(self._send_dashboard),
            "kernels": lambda _: schedule_on_main(self._send_kernels),
        }
        self._listening = ExitStack()

    def open(self, open_dashboard: Callable[[], str]) -> None:
        """Be there for pages.

        Args:
            open_dashboard: makes the dashboard, if there is none, and returns its model's id.
        """
        self._open_dashboard = open_dashboard
        # A comm that is not primary opens in no page: pages find it in the kernel's list of comms.
        self._comm = create_comm(target_name=_TARGET, primary=False)
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
        """Leave the pages. May be called twice."""
        with self._lock:
            self._pages.clear()
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

    def _hear_look(self, request: Message) -> None:
        page, is_seen = str(request["page"]), bool(request["is_seen"])
        with self._lock:
            is_new = page not in self._pages
            self._pages.pop(page, None)
            if is_seen:
                self._pages[page] = self._monitor.clock.now()
            while len(self._pages) > _MAX_PAGES:
                del self._pages[next(iter(self._pages))]
            if not self._pages:
                self._monitor.unwant_samples(self)
                return
            if is_new:
                self._sent = self._infos = None
                self._send({"kind": "side", "n_shown": self._n_shown})
                self._send_memory(self._session.hardware.read())
            self._monitor.want_samples(self)

    def _send_dashboard(self) -> None:
        if self._open_dashboard is None:
            return
        try:
            model_id = self._open_dashboard()
        except Exception as exc:  # noqa: BLE001 - shown in the panel
            self._send({"kind": "failed", "message": describe_failure(exc)})
        else:
            self._send({"kind": "dashboard", "model_id": model_id})

    def _send_kernels(self) -> None:
        hardware = self._session.hardware
        try:
            uses = hardware.list_kernels()
            infos = [info for info in hardware.list_all_devices() if info.device != HOST]
        except Exception as exc:  # noqa: BLE001 - shown in the panel
            self._send({"kind": "failed", "message": describe_failure(exc)})
            return
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
            for info in infos
        ]
        self._send({"kind": "kernels", "gpus": gpus})

    # -- What pages are told -----------------------------------------------------------------------

    def _note_cell(self) -> None:
        """Read limits and names anew: the cell may have changed them. It may have run long, too."""
        with self._lock:
            self._infos = None
            now_s = self._monitor.clock.now()
            self._pages = dict.fromkeys(self._pages, now_s)

    def _take_samples(self, samples: Sequence[Sample]) -> None:
        now_s = self._monitor.clock.now()
        with self._lock:
            if not self._pages:
                return
            if self._monitor.running is None:
                self._drop_lost(now_s)
            if now_s - self._sent_s >= _INTERVAL_S:
                self._send_memory(samples[-1].readings)

    def _drop_lost(self, now_s: float) -> None:
        self._pages = {
            page: heard_s
            for page, heard_s in self._pages.items()
            if now_s - heard_s < _LOST_AFTER_S
        }
        if not self._pages:
            self._monitor.unwant_samples(self)

    def _send_memory(self, readings: Sequence[Reading]) -> None:
        """Send the memory of each device, unless it is as it was sent last."""
        devices = [reading.device for reading in readings]
        if self._infos is None or not self._infos.keys() >= set(devices):
            listed = self._session.hardware.list_all_devices()
            self._infos = {info.device: info for info in listed}
        find_budget = self._monitor.budgets.find
        memory = [
            _describe_memory(self._infos[reading.device], reading, find_budget(reading.device))
            for reading in readings
            if reading.device in self._infos
        ]
        self._sent_s = self._monitor.clock.now()
        if memory != self._sent:
            self._sent = memory
            self._send({"kind": "memory", "devices": memory})

    def _send(self, message: Message) -> None:
        comm = self._comm
        if comm is not None:
            comm.send(message)


def _describe_memory(info: DeviceInfo, reading: Reading, budget_bytes: int | None) -> Message:
    """Describe what this notebook has of a device, and whether that is more than it may have."""
    allocated, reserved = reading.allocated_bytes, reading.reserved_bytes
    limit_bytes = info.limit_bytes
    return {
        "device": info.device,
        "name": info.name,
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "total_bytes": info.total_bytes,
        "limit_bytes": limit_bytes,
        "budget_bytes": budget_bytes,
        "is_over_budget": budget_bytes is not None and (allocated or 0) > budget_bytes,
        "is_at_limit": limit_bytes is not None and (reserved or 0) >= limit_bytes,
    }
