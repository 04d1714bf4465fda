"""Simulated GPUs and recordings, for demonstrations and tests where there is no GPU.

``simulate_gpus`` gives this machine simulated GPUs, on which a notebook's own lines allocate;
``replay`` plays what was recorded on another machine. Both come before ``%load_ext gpumemwidget``:

    from gpumemwidget.testing import simulate_gpus

    gpus = simulate_gpus(2)
    %load_ext gpumemwidget

docs/testing.md has examples.
"""

from gpumemwidget.prediction.allocator.allocator import DeviceFullError
from gpumemwidget.testing.machine import ReplayMonitor, SimulatedDriver, replay, simulate_gpus
from gpumemwidget.testing.player import RecordingPlayer, ReplayBackend
from gpumemwidget.testing.recording import Recorder, Recording, load_recording, save_recording
from gpumemwidget.testing.simulated_gpus import SimulatedGpus, simulate_torch

__all__ = [
    "DeviceFullError",
    "Recorder",
    "Recording",
    "RecordingPlayer",
    "ReplayBackend",
    "ReplayMonitor",
    "SimulatedDriver",
    "SimulatedGpus",
    "load_recording",
    "replay",
    "save_recording",
    "simulate_gpus",
    "simulate_torch",
]
