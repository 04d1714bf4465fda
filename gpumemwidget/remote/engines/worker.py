"""The calls that an engine makes in its workers: begin to record, end it, release names there.

They are given to the engine's own machinery, which imports this module in the worker. Nothing of
them fails a worker's task.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable

from gpumemwidget.backends.hardware import detect_hardware
from gpumemwidget.errors import GpuMemError
from gpumemwidget.model.processes import Outcome, ProcessRole
from gpumemwidget.model.releases import ReleaseRequest
from gpumemwidget.releasing.plan import plan_release
from gpumemwidget.releasing.release import execute_release
from gpumemwidget.remote.writer.program import ProgramShell
from gpumemwidget.remote.writer.record_writer import BatchSink
from gpumemwidget.remote.writer.recorder import Recorder, find_recorder
from gpumemwidget.session.session import find_session


def join(
    send: Callable[[bytes], None],
    *,
    role: ProcessRole,
    number: int | None = None,
    label: str = "",
    listener: str = "notebook",
    find_lane: Callable[[], Hashable] = threading.get_ident,
) -> Recorder:
    """Record this worker from now on, also beside an extension that is loaded in it.

    If the worker is recorded already, the new listener gets what was recorded so far, and then all
    that comes.

    Args:
        send: sends lines of messages to the notebook, from any thread. What it raises is no
            failure: what waits is kept, within bounds.
        role: the worker's part.
        number: its number, where it has one.
        label: its address or name.
        listener: which notebook listens, where several may.
        find_lane: returns what the calling thread works on: spans of other lanes lie beside it.
    """
    sink, recording = BatchSink(send), find_recorder("engine")
    if recording is not None:
        recording.writer.add_sink(listener, sink)
        return recording
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


def leave(listener: str = "notebook") -> None:
    """Send a listener nothing more; the last one ends the recording. May be called twice."""
    recording = find_recorder("engine")
    if recording is not None and recording.writer.remove_sink(listener):
        recording.close()


def release(request: ReleaseRequest, dry_run: bool, not_after: float) -> Outcome:
    """Carry out a release in this worker, or only plan it; see ``ReleasingSource``.

    The names are the loaded extension's, or else the globals of ``__main__``.
    """
    if time.time() > not_after:
        late = "the request came too late, or the clocks of the two hosts differ"
        return f"{late}: nothing was changed"
    session = find_session()
    hardware = detect_hardware() if session is None else session.hardware
    try:
        if session is not None:
            return session.plan_release(request) if dry_run else session.release(request)
        execute = plan_release if dry_run else execute_release
        return execute(ProgramShell(), hardware, request)
    except GpuMemError as exc:
        return str(exc)
    finally:
        if session is None:
            hardware.close()
