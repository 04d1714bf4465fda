"""The calls that an engine makes in its workers: begin to record, end it, release names there.

They are given to the engine's own machinery, which imports this module in the worker. Nothing of
them fails a worker's task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TypeAlias

import msgspec

from gpumemwidget.backends.hardware import detect_hardware
from gpumemwidget.errors import GpuMemError
from gpumemwidget.model.processes import Outcome, ProcessRole
from gpumemwidget.model.releases import ReleasePlan, ReleaseReport, ReleaseRequest
from gpumemwidget.ownership.shell import Shell
from gpumemwidget.releasing.plan import plan_release
from gpumemwidget.releasing.release import execute_release
from gpumemwidget.remote.telling.program import ProgramShell
from gpumemwidget.remote.telling.recorder import Recorder, find_recorder
from gpumemwidget.remote.telling.relay import Relay, find_relay
from gpumemwidget.remote.telling.sinks import BatchSink
from gpumemwidget.session.session import find_session

#: A recording of this worker; the second, where the extension is loaded in it.
Recording: TypeAlias = Recorder | Relay


class _Answer(msgspec.Struct, frozen=True):
    """An outcome on its way to the notebook."""

    plan: ReleasePlan | None = None
    report: ReleaseReport | None = None
    refusal: str = ""


def join(
    send: Callable[[bytes], None],
    *,
    role: ProcessRole,
    number: int | None = None,
    label: str = "",
    listener: str = "notebook",
    find_lane: Callable[[], Hashable] = threading.get_ident,
) -> Recording:
    """Record this worker from now on, and return what does.

    Of a worker that is recorded already, the new listener is told what was told so far, and then
    all that comes. It takes the place of the one with its name: that notebook was restarted.
    Where the extension is loaded, what that records is told.

    Args:
        send: sends lines of messages to the notebook, from any thread. What it raises is no
            failure: what waits is kept, within bounds.
        role: the worker's part.
        number: its number, where it has one.
        label: its address or name.
        listener: which notebook listens, where several may.
        find_lane: returns what the calling thread works on: spans of other lanes lie beside it.
    """
    sink, session = BatchSink(send), find_session()
    recording = find_recording()
    if recording is not None:
        recording.outlet.add_sink(listener, sink)
        return recording
    if session is not None:
        relay = Relay(sink, session, role=role, number=number, label=label, sink_name=listener)
        relay.start()
        return relay
    recorder = Recorder(
        sink,
        role=role,
        number=number,
        label=label,
        sink_name=listener,
        find_lane=find_lane,
    )
    recorder.start(counts_steps=False)
    return recorder


def find_recording() -> Recording | None:
    """Return what records this worker; ``None`` where nothing does."""
    return find_recorder("engine") or find_relay()


def leave(listener: str = "notebook") -> None:
    """Tell a listener nothing more; the last one ends the recording. May be called twice."""
    for recording in (find_recorder("engine"), find_relay()):
        if recording is not None:
            recording.leave(listener)


def release(request: bytes, *, dry_run: bool, shell: Shell | None = None) -> bytes:
    """Release names of this worker; return the outcome for ``read_outcome``.

    Args:
        request: what ``write_request`` returned.
        dry_run: only plan.
        shell: whose names they are; ``None``: the loaded extension's, or else the globals of
            ``__main__``.
    """
    answer = _Answer()
    try:
        wanted = msgspec.json.decode(request, type=ReleaseRequest)
        answer = _release(wanted, dry_run=dry_run, shell=shell)
    except GpuMemError as exc:
        answer = _Answer(refusal=str(exc))
    return msgspec.json.encode(answer)


def _release(request: ReleaseRequest, *, dry_run: bool, shell: Shell | None) -> _Answer:
    session = find_session() if shell is None else None
    if session is not None:
        if dry_run:
            return _Answer(plan=session.plan_release(request))
        return _Answer(report=session.release(request))
    shell, hardware = shell or ProgramShell(), detect_hardware()
    try:
        if dry_run:
            return _Answer(plan=plan_release(shell, hardware, request))
        return _Answer(report=execute_release(shell, hardware, request))
    finally:
        hardware.close()


def refuse(reason: str) -> bytes:
    """Return a refusal for ``read_outcome``."""
    return msgspec.json.encode(_Answer(refusal=reason))


def write_request(request: ReleaseRequest) -> bytes:
    """Return a request as ``release`` takes it in a worker."""
    return msgspec.json.encode(request)


def read_outcome(data: bytes) -> Outcome:
    """Return what ``release`` did in a worker.

    Raises:
        msgspec.MsgspecError: it is nothing that ``release`` returned.
    """
    answer = msgspec.json.decode(data, type=_Answer)
    return answer.report or answer.plan or answer.refusal
