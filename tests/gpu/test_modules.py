"""Modules and backward on a real GPU: each allocation is told of the call that made it."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator

import pytest
import torch

from gpumemwidget.backends.cuda.module_calls import CallRecorder
from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.model.traces import Call
from gpumemwidget.tracing.device_trace import describe_device
from gpumemwidget.tracing.sources import Source, Sources

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.version_info < (3, 12), reason="no sys.monitoring before Python 3.12"),
]

CELL = "/tmp/ipykernel_7/modules.py"
MIB = 1 << 20
N_LAYERS = 24

_MODEL = """
import torch
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(512, 2048, device="cuda")
        self.down = torch.nn.Linear(2048, 512, device="cuda")
    def forward(self, x):
        return self.down(self.up(x).relu())
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.h = torch.nn.ModuleList([Layer() for _ in range(n_layers)])
    def forward(self, x):
        for layer in self.h:
            x = layer(x)
        return x
model = Net()
x = torch.ones(1024, 512, device="cuda")
model(x).sum().backward()
model.zero_grad()
"""
_TEXT = """y = model(x)
loss = y.sum()
loss.backward()
"""


def _list_calls(calls: tuple[Call, ...]) -> Iterator[Call]:
    for call in calls:
        yield call
        yield from _list_calls(call.calls)


def test_layers_that_are_alike_are_told_together(hardware: Hardware) -> None:
    """With what all of them allocated for the line that calls them; and backward its own."""
    names = {"n_layers": N_LAYERS}
    exec(compile(_MODEL, "/tmp/ipykernel_7/model.py", "exec"), names)
    linecache.cache[CELL] = (len(_TEXT), None, _TEXT.splitlines(keepends=True), CELL)
    recorder = CallRecorder()
    assert hardware.start_trace(n_events=100_000) == ()
    recorder.start()
    exec(compile(_TEXT, CELL, "exec"), names)
    marks = recorder.stop()
    torch.cuda.synchronize()
    trace = next(each for each in hardware.end_trace() if each.device == "cuda:0")

    found = describe_device(
        trace,
        sources=Sources(Source("In [7]", CELL, "cell", _TEXT)),
        start_us=trace.start_us,
        marks=marks,
    )

    assert recorder.take_notes() == ()
    lines = found.units[0].lines
    told = {
        call.modules: call.use.allocated_bytes
        for call in _list_calls(lines[0].calls)
        if call.modules and call.modules[0].endswith((".up", ".down"))
    }
    assert told == {
        tuple(f"h.{number}.up" for number in range(N_LAYERS)): N_LAYERS * 8 * MIB,
        tuple(f"h.{number}.down" for number in range(N_LAYERS)): N_LAYERS * 2 * MIB,
    }
    gradients = sum(each.numel() * 4 for each in names["model"].parameters())
    assert lines[2].use is not None
    assert lines[2].use.net_bytes >= gradients
    assert found.unplaced.allocated_bytes == 0
    # Nothing of it had to be inferred.
    assert found.notes == ()
