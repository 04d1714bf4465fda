"""The simulated GPU and the libraries of the trainers' tests."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from gpumemwidget.testing import simulate_gpus
from gpumemwidget.testing.machine import SimulatedMachine
from tests.integrations.common import GIB, MIB


@pytest.fixture
def gpus() -> Iterator[SimulatedMachine]:
    """A GPU of 64 GiB, of which 1 MiB is in use."""
    with simulate_gpus(total_bytes=64 * GIB) as machine:
        machine.allocate(MIB)
        yield machine


@pytest.fixture(params=["transformers", "lightning"])
def models(request: pytest.FixtureRequest) -> Any:
    """The model and the trainer of a library, where that is installed."""
    pytest.importorskip(request.param)
    return import_module(f"tests.integrations.{request.param}_models")
