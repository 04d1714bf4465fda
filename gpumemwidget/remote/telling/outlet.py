"""Write what is measured in this process to its sinks, and keep what was written."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Collection

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.model.devices import HOST, DeviceInfo, Sample
from gpumemwidget.model.processes import ProcessInfo, ProcessRole
from gpumemwidget.recording.sampler import Clock
from gpumemwidget.remote.messages import Began, Message, encode
from gpumemwidget.remote.process_log import ProcessLog
from gpumemwidget.remote.telling.launch import name_program
from gpumemwidget.remote.telling.teller import Teller, send_kept_state

#: Seconds in which lines gather, unless told otherwise.
_BATCH_EVERY_S = 0.5
#: Maximum number of bytes that wait where nothing can be sent: some minutes of samples.
_MAX_WAITING_BYTES = 1024 * 1024
#: Share of it that is left where it is too much: to drop lines takes a look at all of them.
_ROOM_SHARE = 0.75
#: Maximum seconds to wait for what is sent at the end.
_CLOSE_S = 2.0
#: How the line of a sample begins, and that of a ``Began``.
_SAMPLE = b"["
_BEGAN = b'{"type":"%s"' % str(Began.__struct_config__.tag).encode()


class BatchSink:
    """Sends lines together, on a thread of its own: neither a task nor a program's end waits.

    What can't be sent is kept, within bounds: where too much waits, samples are dropped, and then
    other lines, the oldest first.

    Attributes:
        on_failure: is called with what ``send`` raises.

    Args:
        send: sends some lines. What it raises is no failure of the sink: it is called with the same
            lines again when the next ones have come.
        every_s: the seconds in which lines gather.
        at_end: is called when all is sent, or could not be.
    """

    def __init__(
        self,
        send: Callable[[bytes], object],
        *,
        every_s: float | None = None,
        at_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._send = send
        self._every_s = _BATCH_EVERY_S if every_s is None else every_s
        self._at_end = at_end
        self.on_failure: Callable[[Exception], object] = lambda _: None
        self._lock = threading.Lock()
        #: The lines that wait, and their bytes; then the batch that is on its way.
        self._lines: list[bytes] = []
        self._n_bytes = 0
        self._batch = b""
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpumemwidget-sending", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Take a line; nothing is done once this is closed."""
        if self._closed.is_set():
            return
        with self._lock:
            self._lines.append(line)
            self._n_bytes += len(line)
            if self._n_bytes > _MAX_WAITING_BYTES:
                self._drop()
        self._wake.set()

    def close(self) -> None:
        """Send what waits, and give up after some seconds. May be called twice."""
        self._closed.set()
        self._wake.set()
        self._thread.join(_CLOSE_S)

    def _drop(self) -> None:
        """Make room for more than one line, as this goes through all of them."""
        for prefixes in ((_SAMPLE,), (_SAMPLE, b"{")):
            kept = []
            for line in self._lines:
                is_over = self._n_bytes > _ROOM_SHARE * _MAX_WAITING_BYTES
                if is_over and line.startswith(prefixes) and not line.startswith(_BEGAN):
                    self._n_bytes -= len(line)
                else:
                    kept.append(line)
            self._lines = kept

    def _run(self) -> None:
        is_closed = False
        while not is_closed:
            self._wake.wait()
            is_closed = self._closed.wait(self._every_s)
            self._wake.clear()
            try:
                while self._take_batch():
                    self._send(self._batch)
                    self._batch = b""
            except Exception as exc:  # noqa: BLE001 - the receiver may be gone for a while
                self.on_failure(exc)
        self._at_end()

    def _take_batch(self) -> bool:
        """Take what waits, unless the batch before could not be sent; return if there is any."""
        if not self._batch:
            with self._lock:
                self._batch = b"".join(self._lines)
                self._lines.clear()
                self._n_bytes = 0
        return bool(self._batch)


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
