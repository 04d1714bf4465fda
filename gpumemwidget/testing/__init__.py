"""Simulated GPUs, for demonstrations and tests where there is no GPU.

``simulate_gpus`` comes before ``%load_ext gpumemwidget``; a notebook's own lines then allocate on
simulated GPUs:

    from gpumemwidget.testing import simulate_gpus

    gpus = simulate_gpus(2)
    %load_ext gpumemwidget

docs/testing.md has examples.
"""

from gpumemwidget.allocator.caching import DeviceFullError
from gpumemwidget.testing.machine import SimulatedDriver, simulate_gpus
from gpumemwidget.testing.simulated_gpus import SimulatedGpus, simulate_torch

__all__ = [
    "DeviceFullError",
    "SimulatedDriver",
    "SimulatedGpus",
    "simulate_gpus",
    "simulate_torch",
]
