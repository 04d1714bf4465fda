"""Tell of this process to its sinks, and keep what was told."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Collection

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.model.devices import HOST, DeviceInfo, Sample
from gpumemwidget.model.processes import ProcessInfo, ProcessRole
from gpumemwidget.recording.sampler import Clock
from gpumemwidget.remote.messages import Message, encode
from gpumemwidget.remote.process_log import ProcessLog
from gpumemwidget.remote.telling.launch import name_program
from gpumemwidget.remote.telling.sinks import BatchSink
from gpumemwidget.remote.telling.teller import Teller, send_kept_state

#: Seconds between two questions to the driver.
_USE_EVERY_S = 2.0
#: Maximum number of characters of a worker's address or an actor's name.
_MAX_LABEL = 200
#: Seconds after which the process and its peaks are told again.
_REPEAT_EVERY_S = 30.0


class Outlet:
    """Writes one recording of this process to its sinks: a file, or the notebooks that listen.

    ``begin`` tells which process it is, ``tell_sample`` and ``teller`` what it does, ``close`` that
    the recording ends. A sink that comes late is told first what was told so far.

    Attributes:
        log: what was told so far.
        teller: tells of spans and OOMs.
        origin_s: when the recording began, on the clock.

    Args:
        sink: takes the lines of the messages.
        hardware: the machine's memory.
        clock: the clock of the samples and spans.
        sink_name: by which another sink can take its place.
    """

    def __init__(
        self,
        sink: BatchSink,
        hardware: Hardware,
        clock: Clock,
        *,
        sink_name: str = "",
    ) -> None:
        self._sinks = {sink_name: sink}
        self._hardware = hardware
        self._clock = clock
        self.origin_s = clock.now()
        self.log = ProcessLog()
        self.teller = Teller(self._pass_on)
        #: Devices as they were listed last, and the names of samples for which that was asked.
        self._devices: dict[str, DeviceInfo] = {}
        self._asked: set[str] = set()
        self._use_due_s = 0.0
        self._repeat_due_s = _REPEAT_EVERY_S

    def begin(self, *, role: ProcessRole, number: int | None, label: str) -> None:
        """Tell which process this is."""
        self.teller.begin(
            ProcessInfo(
                id=secrets.token_hex(8),
                host=socket.gethostname(),
                pid=os.getpid(),
                name=name_program(),
                started_at=self._clock.wall(),
                role=role,
                number=number,
                label=label[:_MAX_LABEL],
            )
        )

    def add_sink(self, name: str, sink: BatchSink) -> None:
        """Tell one more sink what was told so far, and all that comes.

        It takes the place of the one with that name, if there is one.
        """

        def add() -> None:
            send_kept_state(self.log, lambda message: sink.write(encode(message)))
            self._sinks[name] = sink

        replaced = self._sinks.get(name)
        self.teller.call_between(add)
        if replaced is not None:
            replaced.close()

    def leave(self, name: str) -> bool:
        """Tell a sink nothing more, and return whether it is the last one.

        The last one stays until ``close``, whose end it is told. A name of no sink changes nothing.
        """
        is_last = list(self._sinks) == [name]
        if name in self._sinks and not is_last:
            self._sinks.pop(name).close()
        return is_last

    def now(self) -> float:
        """Return the seconds since the recording began."""
        return round(self._clock.now() - self.origin_s, 6)

    def tell_sample(self, sample: Sample, *, with_use: bool = False) -> None:
        """Tell the counters of a moment, and every other second, or if asked to, of whole GPUs."""
        names = {reading.device for reading in sample.readings}
        # A driver that hangs does so here, where no span waits for it.
        if not names <= self._asked:
            self._asked |= names
            self._devices = {info.device: info for info in self._hardware.list_all_devices()}
        self.teller.tell_sample(sample, self._devices, origin_s=self.origin_s)
        now_s = self.now()
        if with_use or now_s >= self._use_due_s:
            self._use_due_s = now_s + _USE_EVERY_S
            self._tell_use(now_s, names - {HOST})
        if now_s >= self._repeat_due_s:
            self._repeat_due_s = now_s + _REPEAT_EVERY_S
            self._repeat(now_s)

    def close(self, error: str = "") -> None:
        """Tell that the recording ends, with the line of the error that ended the program."""
        self._repeat(self.now())
        self.teller.end(self.now(), error)
        for sink in tuple(self._sinks.values()):
            sink.close()

    def _repeat(self, now_s: float) -> None:
        if self.log.info is not None:
            self.teller.repeat(now_s, self.log.info, self.log.peaks)

    def _tell_use(self, now_s: float, devices: Collection[str]) -> None:
        self._devices = {info.device: info for info in self._hardware.list_all_devices()}
        infos = [info for info in self._devices.values() if info.device in devices]
        uses = [use for info in infos if (use := self._hardware.read_use(info)) is not None]
        own = [(info.device, self._hardware.read_own_use(info.device)) for info in infos]
        known = tuple((device, n_bytes) for device, n_bytes in own if n_bytes is not None)
        self.teller.tell_use(now_s, tuple(uses), known)

    def _pass_on(self, message: Message) -> None:
        self.log.take(message)
        line = encode(message)
        for sink in tuple(self._sinks.values()):
            sink.write(line)
