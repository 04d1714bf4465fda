"""Leaks and old values as a session finds them, for the tests of their reports."""

from __future__ import annotations

from dataclasses import replace

from gpumemwidget.model.devices import HOST
from gpumemwidget.model.growth import Leak, LeakLine, Rebinding
from gpumemwidget.model.ownership import Fix, FixKind
from tests.report.examples import GIB, HOSTILE, MIB, make_leak

#: A cell that collects losses with their graphs, in its third run.
RUN_LEAK = make_leak(
    n_storages=3, line=LeakLine("In[7]", 4, "loss = criterion(model(images), labels)")
)
#: A training loop that collects its outputs, without their graphs; the line is another cell's.
STEP_LEAK = Leak(
    device="cuda:0",
    unit="step",
    each_bytes=int(1.9 * MIB),
    n_seen=40,
    holder="trainer.outputs[…]",
    n_storages=1,
    tensor="float32[64, 7800]",
    in_graph=False,
    in_model=False,
    row="trainer",
    cell="In[9]",
    since=12,
    line=LeakLine("In[8]", 5, "self.outputs.append(logits.detach())"),
    n_left=41_213,
)
#: A loss that is summed up with its graph, on the host, from a line that was not found.
GRAPH_LEAK = Leak(
    device=HOST,
    unit="step",
    each_bytes=3 * MIB,
    n_seen=9,
    holder="total's graph",
    n_storages=3,
    tensor="float32[512, 512]",
    in_graph=True,
    in_model=False,
    row="total",
    cell="In[12]",
    since=1,
    n_left=900_000,
)
#: A module that keeps its inputs.
MODEL_LEAK = Leak(
    device="cuda:1",
    unit="step",
    each_bytes=12 * MIB,
    n_seen=25,
    holder="model.blocks[…].cache[…]",
    n_storages=24,
    tensor="bfloat16[8, 16, 128]",
    in_graph=False,
    in_model=True,
    row="model",
    cell="In[3]",
    since=2,
    line=LeakLine("/home/me/project/blocks.py", 118, "self.cache.append(keys)"),
    n_left=1,
)
#: A cell whose last line displays a tensor.
OUT_LEAK = Leak(
    device="cuda:0",
    unit="run",
    each_bytes=600 * MIB,
    n_seen=4,
    holder="Out[…]",
    n_storages=1,
    tensor="",
    in_graph=False,
    in_model=False,
    cell="In[21]",
    line=LeakLine("In[21]", 1, "model(images)"),
    n_left=118,
)


def make_hostile_leak() -> Leak:
    """Its names and its line are what a hostile notebook puts there."""
    line = LeakLine(HOSTILE, 1, HOSTILE)
    return replace(RUN_LEAK, holder=HOSTILE, row=HOSTILE, cell=HOSTILE, line=line)


def make_kept() -> Rebinding:
    """An old model that an optimizer and a trainer still hold."""
    holders = (
        ("optimizer", Fix(FixKind.RELEASE_ROW, "optimizer")),
        ("trainer.model", Fix(FixKind.RELEASE_ROW, "trainer")),
    )
    return Rebinding(("model",), "cuda:0", 6 * GIB, holders)


def make_peak() -> Rebinding:
    """A model and an optimizer that were made beside the old ones."""
    return Rebinding(("model", "optimizer"), "cuda:0", 3 * GIB, line=4)
