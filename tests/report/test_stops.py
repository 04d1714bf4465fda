"""The sentences on why a release or a restore may not begin, or stopped."""

from __future__ import annotations

import pytest

from gpumemwidget.model.ownership import DeviceBytes
from gpumemwidget.model.releases import ReleaseStepKind, Stop, StopKind
from gpumemwidget.report.release import word_stop

#: A stop of each kind, and others whose fields change the sentence.
_WORDS = {
    Stop(StopKind.CAPTURE): "A CUDA graph is being captured, and freeing or copying memory would "
    "break it: release after the capture. Nothing was changed.",
    Stop(
        StopKind.THREAD, thread="t", function="serve", line=4
    ): "Thread 't' is in serve(), line 4, "
    "which uses this memory: wait until it ends. Nothing was changed.",
    Stop(
        StopKind.HOST_MEMORY,
        needs_bytes=DeviceBytes((("host", 512),), is_at_least=True),
        available_bytes=100,
    ): "The move to the CPU needs at least 512 B of host memory, and 100 B is available: release "
    "fewer names, or release what else holds them too. Nothing was changed.",
    Stop(
        StopKind.NOT_ON_HOST, name="x"
    ): "Nothing to restore: x holds nothing that a release moved "
    "to the CPU and that is still there.",
    Stop(StopKind.IMMOVABLE): "Nothing can be moved back.",
    Stop(StopKind.FAILED, step=ReleaseStepKind.MOVE, error="x: ValueError: what?"): "Failed at "
    '"move to CPU": x: ValueError: what?',
    Stop(
        StopKind.FAILED, error="ValueError: no room"
    ): "Failed: ValueError: no room. Everything is where it was.",
    Stop(StopKind.INTERRUPTED, step=ReleaseStepKind.COLLECT): 'Interrupted at "gc.collect".',
    Stop(StopKind.INTERRUPTED): "Interrupted. Everything is where it was.",
    Stop(StopKind.INTERRUPTED_BETWEEN): "Interrupted before the first step.",
    Stop(StopKind.INTERRUPTED_BETWEEN, step=ReleaseStepKind.COLLECT): "Interrupted after "
    '"gc.collect".',
}


@pytest.mark.parametrize("stop", _WORDS, ids=lambda stop: stop.kind.name)
def test_a_stop_is_said_in_a_sentence(stop: Stop) -> None:
    """It names the cause and what has become of the memory, or the next step."""
    assert word_stop(stop) == _WORDS[stop]


def test_every_kind_of_stop_has_a_sentence() -> None:
    """A new kind comes with its words."""
    assert {stop.kind for stop in _WORDS} == set(StopKind)
