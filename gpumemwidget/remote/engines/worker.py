"""The calls that an engine makes in its workers: begin to record, and end it.

They are given to the engine's own machinery, which imports this module in the worker. Nothing of
them fails a worker's task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

from gpumemwidget.model.processes import ProcessRole
from gpumemwidget.remote.writer.record_writer import BatchSink
from gpumemwidget.remote.writer.recorder import Recorder, find_recorder


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
