"""Record this process: samples, exact peaks of its steps and spans, and the card of an OOM.

For programs without a notebook, and for the workers of an engine. What is recorded goes to a sink:
a file, or the engine's own channel.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import secrets
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from types import TracebackType
from typing import Any, Literal, TypeAlias

from gpumemwidget.backends.hardware import keep_hardware
from gpumemwidget.backends.hooks import OptimizerStepHook
from gpumemwidget.errors import BusyError, Notes, describe_exception
from gpumemwidget.model.cells import Status
from gpumemwidget.model.devices import HOST, DeviceInfo, Reading, Sample
from gpumemwidget.model.processes import ProcessInfo, ProcessRole
from gpumemwidget.oom.detection import find_oom
from gpumemwidget.recording.running_cell import find_first_line
from gpumemwidget.recording.sampler import Clock, Sampler
from gpumemwidget.remote.messages import MAX_BITS, MessageFile
from gpumemwidget.remote.writer.program import (
    ProgramShell,
    choose_path,
    describe_program,
    name_program,
    read_rank,
)
from gpumemwidget.remote.writer.record_writer import BatchSink, RecordWriter, Sink, is_sending
from gpumemwidget.remote.writer.spans import OpenSpan, Spans
from gpumemwidget.session.interrupts import run_to_end
from gpumemwidget.session.oom_watch import OomWatch
from gpumemwidget.session.session import find_session

#: Makers of recordings: the program itself, ``gpumemwidget run``, an engine.
Maker: TypeAlias = Literal["program", "run", "engine"]


class Recorder:
    """Records this process, from ``start`` until ``close``.

    It changes nothing of the program: a failure of ours is reported once on stderr, and the program
    goes on.

    Attributes:
        writer: writes the recording.

    Args:
        sink: takes the lines of the recording.
        sink_name: by which it can be removed.
        role: the process's part in a bigger whole, with its number or its label.
        find_lane: returns what the calling thread works on: spans of other lanes lie beside it.
        maker: what wants the recording: the program itself, ``gpumemwidget run`` or an engine. Each
            may have one, with exact peaks of its own.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        role: ProcessRole = "program",
        number: int | None = None,
        label: str = "",
        sink_name: str = "",
        find_lane: Callable[[], Hashable] = threading.get_ident,
        maker: Maker = "engine",
    ) -> None:
        self.maker = maker
        self._find_lane = find_lane
        self._clock = Clock()
        self._hardware = keep_hardware(f"recordings by {maker}")
        self._failures: Notes[str] = Notes()
        self._lock = threading.Lock()
        self._step_lock = threading.Lock()
        self._is_closed = False
        self._pid = os.getpid()
        #: When the recording began, on the clock.
        self._origin_s = self._clock.now()
        process = ProcessInfo(
            id=secrets.token_hex(8),
            host=socket.gethostname(),
            pid=self._pid,
            name=name_program(),
            started_at=self._clock.wall(),
            role=role,
            number=number,
            label=label[:200],
        )
        self.writer = RecordWriter(sink, process, sink_name=sink_name)
        self._spans = Spans(self._hardware, self.now)
        #: The devices as the driver listed them last, the names in the last sample, and when the
        #: driver is due to be asked again.
        self._devices: dict[str, DeviceInfo] = {}
        self._names: set[str] = set()
        self._use_due_s = 0.0
        self._within = threading.local()
        #: Spans that ended while their thread was within code of ours.
        self._to_end: deque[tuple[OpenSpan, Status]] = deque()
        self._steps: OptimizerStepHook | None = None
        self._finalizer: Any = None
        self._step: OpenSpan | None = None
        self._n_steps = 0
        #: The device and the request of the OOM that was written last, until another span begins.
        self._last_oom: object = None
        #: When the last cards were written, in seconds since the recording began: at most eight
        #: are written within a minute.
        self._cards_s: deque[float] = deque(maxlen=8)
        self._ooms = OomWatch(ProgramShell(), self._hardware, self.report)
        self._sampler = Sampler(
            self._read,
            clock=self._clock,
            on_sample=self._write_sample,
            on_error=lambda exc: self.report("sampling the memory", exc),
            interval_s=0.1,
            idle_interval_s=0.1,
        )

    def start(self, *, counts_steps: bool) -> None:
        """Begin to sample and to notice OOMs.

        Args:
            counts_steps: make a span of each stretch between two steps of PyTorch's optimizers.
        """
        _recorders.append(self)
        with self._guarding("beginning the recording"):
            self._spans.start()
            self._ooms.open()
            self._ooms.start()
        if counts_steps:
            self._step = self.begin_span("the program")
        with self._guarding("beginning the recording"):
            if counts_steps:
                self._steps = OptimizerStepHook(self._end_step)
                self._steps.open()
            self._sampler.start()
            atexit.register(self._close_at_exit)
            multiprocessing = sys.modules.get("multiprocessing.util")
            if multiprocessing is not None:
                # A process that it has started runs no other exit handlers.
                self._finalizer = vars(multiprocessing)["Finalize"](
                    None, self._close_at_exit, exitpriority=0
                )

    def now(self) -> float:
        """Return the seconds since the recording began."""
        return round(self._clock.now() - self._origin_s, 6)

    # -- Spans -------------------------------------------------------------------------------------

    def begin_span(
        self, name: str, number: int | None = None, *, lane: Hashable | None = None
    ) -> OpenSpan | None:
        """Begin a span; return what ``end_span`` takes. See ``Spans.begin``."""
        if not self._is_mine() or self._is_within:
            return None
        return run_to_end(self._begin_span, name, number, lane)

    def _begin_span(self, name: str, number: int | None, lane: Hashable | None) -> OpenSpan | None:
        span, self._last_oom = None, None
        with self._guarding("beginning a span"):
            if all(span is self._step for span in self._spans.open_spans):
                self._ooms.start()
            index = getattr(type(number), "__index__", lambda _: None)(number)
            if number is not None and (index is None or index.bit_length() > MAX_BITS):
                name, index = f"{name} {number}", None
            # One line of text, which can be written to a file.
            name = find_first_line(str(name)) or "span"
            lane = self._find_lane() if lane is None else lane
            span = self._spans.begin(name, index, lane=lane)
            if span is not None:
                self.writer.begin_span(span.running)
        return span

    def end_span(self, span: OpenSpan | None, status: Status = "ok") -> None:
        """End a span that ``begin_span`` began. May be called twice."""
        if span is not None and self._is_mine():
            run_to_end(self._end_span, span, status)

    def _end_span(self, span: OpenSpan, status: Status) -> None:
        if self._is_within:
            self._to_end.append((span, status))
            return
        with self._guarding("ending a span"):
            record = self._spans.end(span, status)
            if record is not None:
                open_spans = self._spans.open_spans
                self.writer.end_span(record, open_spans[-1].running if open_spans else None)

    def _end_step(self, _optimizer: object) -> None:
        # A forked child has the hook, and maybe the lock as another thread held it.
        if self._is_mine():
            run_to_end(self._begin_next_step)

    def _begin_next_step(self) -> None:
        with self._step_lock:
            self._n_steps += 1
            step, self._step = self._step, None
            if step is not None and self._n_steps == 1:
                step.ended_as = "start to step", 1
            self.end_span(step)
            self._step = self.begin_span("step", self._n_steps + 1)

    # -- The end -----------------------------------------------------------------------------------

    def note_error(self, error: BaseException, *, is_last: bool = False) -> None:
        """Write the card of an OOM, if an error that ends a span or the program is one.

        An error passes one span after the other, and is written once. Of a flood only so many are
        written a minute: each takes a look at all that the program holds.

        Args:
            error: the error.
            is_last: write it in any case, as the program ends with it.
        """
        if self._is_mine():
            run_to_end(self._describe_oom, error, is_last)

    def _describe_oom(self, error: BaseException, is_last: bool) -> None:
        with self._guarding("describing an OOM"):
            sign = find_oom(error)
            key = None if sign is None else (sign.where, sign.device, sign.requested_bytes)
            now_s = self.now()
            is_flood = (
                len(self._cards_s) == self._cards_s.maxlen and now_s - self._cards_s[0] < 60.0
            )
            if key is None or key == self._last_oom or (is_flood and not is_last):
                return
            self._last_oom = key
            self._cards_s.append(now_s)
            card = self._ooms.end(sign, describe_program)
            if card is not None:
                self.writer.write_oom(card, self.now())
            self._ooms.start()

    def close(self, error: str = "") -> None:
        """End the recording. May be called twice.

        Args:
            error: the line of the error that ended the program, if one did.
        """
        if not self._is_mine():
            return
        with self._lock:
            is_closed, self._is_closed = self._is_closed, True
        if not is_closed:
            run_to_end(self._close, error)

    def _close_at_exit(self) -> None:
        """End the recording with the program, and with the error that ended it."""
        # An interpreter that somebody types into goes on after an error.
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        if error is not None:
            self.note_error(error, is_last=True)
        self.close(describe_end(error))

    def _close(self, error: str) -> None:
        atexit.unregister(self._close_at_exit)
        if self._finalizer is not None:
            self._finalizer.cancel()
        self._sampler.stop()
        has_stopped = self._sampler.join()
        self._ooms.close()
        if self._steps is not None:
            self._steps.close()
        status: Status = "error" if error else "ok"
        with self._step_lock:
            if self._step is not None and self._n_steps:
                # The stretch after the last step is no step.
                self._step.ended_as = f"after step {self._n_steps}", None
            for span in reversed(self._spans.open_spans):
                self._end_span(span, status)
            self._spans.close()
        # A driver that hangs would keep the program from its end.
        if has_stopped:
            with self._guarding("ending the recording"):
                self._write_sample(Sample(self._clock.now(), self._hardware.read()), is_last=True)
        with self._guarding("ending the recording"):
            self.writer.close(self.now(), error)
        if self in _recorders:
            _recorders.remove(self)

    def _write_sample(self, sample: Sample, *, is_last: bool = False) -> None:
        with self._staying_within():
            now_s, names = self.now(), {reading.device for reading in sample.readings}
            is_due = is_last or now_s >= self._use_due_s
            # A driver that hangs does so here, where no span waits for it.
            if is_due or names != self._names:
                self._names = names
                self._devices = {info.device: info for info in self._hardware.list_all_devices()}
            time_s = sample.time_s - self._origin_s
            self.writer.write_sample(time_s, sample.readings, self._devices)
            if is_due:
                self._use_due_s = now_s + 2.0
                self._write_use(now_s)
            peaks = self._spans.find_peaks(sample.readings)
            self.writer.write_peaks(self.now(), peaks, is_last=is_last)

    def _write_use(self, now_s: float) -> None:
        names = self._names - {HOST}
        infos = [info for info in self._devices.values() if info.device in names]
        uses = [use for info in infos if (use := self._hardware.read_use(info)) is not None]
        own = [(info.device, self._hardware.read_own_use(info.device)) for info in infos]
        known = tuple((device, n_bytes) for device, n_bytes in own if n_bytes is not None)
        self.writer.write_use(now_s, tuple(uses), known)

    def _is_mine(self) -> bool:
        # A forked child is another process.
        return os.getpid() == self._pid

    @property
    def _is_within(self) -> bool:
        """True while this thread is within code of ours, which a finalizer or a handler interrupts.

        A span that begins there is not measured: it would wait for this thread's own locks.
        """
        return getattr(self._within, "is_within", False) or is_sending()

    @contextlib.contextmanager
    def _staying_within(self) -> Iterator[None]:
        was_within, self._within.is_within = self._is_within, True
        try:
            yield
        finally:
            self._within.is_within = was_within
            while self._to_end and not was_within:
                self._end_span(*self._to_end.popleft())

    @contextlib.contextmanager
    def _guarding(self, what: str) -> Iterator[None]:
        with self._staying_within():
            try:
                yield
            except Exception as exc:  # noqa: BLE001 - a failure of ours is never the program's
                self.report(what, exc)

    def _read(self) -> tuple[Reading, ...]:
        with self._staying_within():
            return self._hardware.read()

    def report(self, what: str, exc: Exception) -> None:
        """Say a kind of failure of ours once."""
        report_failure(self._failures, what, exc, "the program")


def report_failure(known: Notes[str], what: str, exc: Exception, user: str) -> None:
    """Say a kind of failure of ours once on stderr, and that what it happened in goes on."""
    if known.add(f"{what}: {type(exc).__name__}"):
        # A program may have no stderr, or have closed it.
        why = describe_exception(exc)
        with contextlib.suppress(Exception):
            sys.stderr.write(f"gpumemwidget: {what} failed ({why}); {user} goes on\n")


class FileRecording:
    """A recording of this program into a file, which is being made.

    As a context manager it ends with the block, and notes the error that ends that; without, it
    ends with the program.

    Attributes:
        path: the file.
        recorder: makes it.
    """

    def __init__(
        self,
        to: str | os.PathLike[str] | None = None,
        *,
        counts_steps: bool = True,
        maker: Maker = "program",
    ) -> None:
        _refuse_second(maker)
        rank = read_rank()
        file = MessageFile(choose_path(to, script=(sys.argv or [""])[0], rank=rank))
        self.path = file.path
        role: ProcessRole = "program" if rank is None else "rank"
        # On a thread: a share that hangs holds up neither a step nor the program's end.
        self._sink = BatchSink(file.write, every_s=0.0)
        self.recorder = Recorder(self._sink, role=role, number=rank, maker=maker)
        self._sink.on_failure = functools.partial(self.recorder.report, "writing the recording")
        self.recorder.start(counts_steps=counts_steps)

    @property
    def is_whole(self) -> bool:
        """True where all that was recorded so far is in the file."""
        return self._sink.has_sent_all

    def close(self, error: str = "") -> None:
        """End the recording. May be called twice.

        Args:
            error: the line of the error that ended the program, if one did.
        """
        self.recorder.close(error)

    def __enter__(self) -> FileRecording:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.recorder.note_error(error, is_last=True)
        self.close(describe_end(error))

    def __repr__(self) -> str:
        return f"<recording to {self.path}>"


def describe_end(error: BaseException | None) -> str:
    """Return the line of the error that ended a program; ``""`` for none, and for exit status 0.

    It has at most 1,000 characters.
    """
    if isinstance(error, SystemExit):
        code = 0 if error.code is None else error.code
        # Whoever waits for a process sees the lowest byte of its status.
        status = code & 0xFF if isinstance(code, int) else 1
        return f"exit status {status}" if status else ""
    line = "" if error is None else describe_exception(error)
    return line if len(line) <= 1000 else f"{line[:999]}…"


#: The recorders of this process, at most one of each maker.
_recorders: list[Recorder] = []


def find_recorder(maker: Maker) -> Recorder | None:
    """Return a maker's recorder of this process; ``None`` where there is none."""
    return next((found for found in _list_recorders() if found.maker == maker), None)


def _list_recorders() -> list[Recorder]:
    return [recorder for recorder in _recorders if recorder._is_mine()]  # noqa: SLF001 - of this module


def _refuse_second(maker: Maker) -> None:
    if find_recorder(maker) is not None:
        raise BusyError("this process is being recorded already: close that recording first")
    session = find_session()
    # A process that is forked from a notebook has its parent's.
    if session is not None and session.pid == os.getpid():
        raise BusyError("the extension records every cell here already: %memledger shows them")


class MeasuredSpan:
    """A block that is measured; see ``gpumemwidget.span``.

    Args:
        name: what the block does.
        number: which one of that name it is.
    """

    def __init__(self, name: str, number: int | None = None) -> None:
        # A name with a number, as in ``span("epoch 3")``.
        numbered = re.fullmatch(r"(.*\S)\s+(\d{1,15})", str(name))
        if number is None and numbered is not None:
            name, number = numbered[1], int(numbered[2])
        self._name, self._number = name, number
        #: Recorders with the span that began in each, for every open block.
        self._begun: list[list[tuple[Recorder, OpenSpan | None]]] = []

    def __enter__(self) -> None:
        n_begun = len(self._begun)
        try:
            run_to_end(self._begin)
        except BaseException as exc:
            # A timeout, say, that came meanwhile: the block does not begin.
            if len(self._begun) > n_begun:
                self.__exit__(type(exc), exc, None)
            raise

    def _begin(self) -> None:
        self._begun.append(
            [
                (recorder, recorder.begin_span(self._name, self._number))
                for recorder in _list_recorders()
            ]
        )

    def __exit__(
        self,
        _type: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        run_to_end(self._end, error)

    def _end(self, error: BaseException | None) -> None:
        # A loop over a generator that has the block has ended, or the program in order.
        is_ok = error is None or isinstance(error, GeneratorExit)
        if isinstance(error, SystemExit):
            is_ok = not describe_end(error)
        status: Status = "ok" if is_ok else "error"
        if isinstance(error, KeyboardInterrupt):
            status = "interrupted"
        for recorder, span in reversed(self._begun.pop()):
            if isinstance(error, Exception):
                recorder.note_error(error)
            recorder.end_span(span, status)
