"""Recordings of real or simulated devices: made with ``python -m tools.record``, and played."""

from tools.recordings.player import RecordingPlayer, ReplayBackend, ReplayMonitor
from tools.recordings.recording import Recorder, Recording, load_recording, save_recording

__all__ = [
    "Recorder",
    "Recording",
    "RecordingPlayer",
    "ReplayBackend",
    "ReplayMonitor",
    "load_recording",
    "save_recording",
]
