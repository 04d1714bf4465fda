"""Leaks and old values as a session finds them, for the tests of their reports."""

from __future__ import annotations

from dataclasses import replace

from gpumemwidget.model.devices import HOST
from gpumemwidget.model.leaks import Leak, LeakHolder, LeakLine, Rebinding
from gpumemwidget.model.ownership import Fix, FixKind
from tests.report.examples import GIB, HOSTILE, MIB, make_leak

#: A cell that collects losses with their graphs, in its third run.
RUN_LEAK = make_leak(
    holders=(replace(make_leak().holders[0], n_storages=3),),
    line=LeakLine("In [7]", 4, "loss = criterion(model(images), labels)"),
)


def _grow(device: str, unit: str, n_seen: int, holder: LeakHolder, **more: object) -> Leak:
    values: dict[str, object] = {"each_bytes": holder.each_bytes, "holders": (holder,), **more}
    return Leak(device=device, unit=unit, n_seen=n_seen, **values)  # type: ignore[arg-type]


#: A training loop that collects its outputs, without their graphs; the line is another cell's.
STEP_LEAK = _grow(
    "cuda:0",
    "step",
    40,
    LeakHolder(
        "trainer.outputs[…]", int(1.9 * MIB), 1, "float32[64, 7800]", False, False, row="trainer"
    ),
    cell="In [9]",
    since=12,
    line=LeakLine("In [8]", 5, "self.outputs.append(logits.detach())"),
    n_left=41_213,
)
#: A loss that is summed up with its graph, on the host, from a line that was not found.
GRAPH_LEAK = _grow(
    HOST,
    "step",
    9,
    LeakHolder("total's graph", 3 * MIB, 3, "float32[512, 512]", True, False, row="total"),
    cell="In [12]",
    since=1,
    n_left=900_000,
)
#: A module that keeps its inputs.
MODEL_LEAK = _grow(
    "cuda:1",
    "step",
    25,
    LeakHolder(
        "model.blocks[…].cache[…]", 12 * MIB, 24, "bfloat16[8, 16, 128]", False, True, row="model"
    ),
    cell="In [3]",
    since=2,
    line=LeakLine("/home/me/project/blocks.py", 118, "self.cache.append(keys)"),
    n_left=1,
)
#: A cell whose last line displays a tensor.
OUT_LEAK = _grow(
    "cuda:0",
    "run",
    4,
    LeakHolder("Out[…]", 600 * MIB, 1, "", False, False),
    cell="In [21]",
    line=LeakLine("In [21]", 1, "model(images)"),
    n_left=118,
)


def make_hostile_leak() -> Leak:
    """Its names and its line are what a hostile notebook puts there."""
    line = LeakLine(HOSTILE, 1, HOSTILE)
    holder = replace(RUN_LEAK.holders[0], path=HOSTILE, row=HOSTILE, tensor=HOSTILE)
    module = replace(holder, row="", container=HOSTILE, module=HOSTILE, in_graph=False)
    return replace(RUN_LEAK, holders=(holder, module), cell=HOSTILE, line=line)


#: A cell that fills two lists, one with slices.
SHARED_LEAK = make_leak(
    device=HOST,
    each_bytes=6 * MIB,
    holders=(
        LeakHolder("outputs[…]", 4 * MIB, 1, "float32[1024, 1024]", False, False, row="outputs"),
        LeakHolder(
            "heads[…]",
            2 * MIB,
            1,
            "float32[1, 512]",
            False,
            False,
            row="heads",
            slice_bytes=2048,
            storage_bytes=2 * MIB,
        ),
    ),
)
#: Adapters that are added to each layer of a model.
ADAPTER_LEAK = make_leak(
    each_bytes=36 * MIB,
    holders=tuple(
        LeakHolder(f"model.layers[…].{name}.lora[…]", 6 * MIB, 8, "", False, True, row="model")
        for name in ("q", "k", "v", "o", "up", "down")
    ),
)
#: A registry of another module, which the notebook does not name.
MODULE_LEAK = make_leak(
    each_bytes=4 * MIB,
    holders=(
        LeakHolder(
            "keeper.KEPT[…]",
            4 * MIB,
            1,
            "float32[1048576]",
            False,
            False,
            container="keeper.KEPT",
            module="keeper",
        ),
    ),
)


def make_kept() -> Rebinding:
    """An old model that an optimizer and a trainer still hold."""
    holders = (
        ("optimizer", Fix(FixKind.RELEASE_ROW, "optimizer")),
        ("trainer.model", Fix(FixKind.RELEASE_ROW, "trainer")),
    )
    return Rebinding("model", "cuda:0", 6 * GIB, holders, line=1)


def make_cycle() -> Rebinding:
    """An old model that is in a reference cycle with its trainer."""
    return Rebinding(
        "model", "cuda:0", 6 * GIB, (("model.owner.model", Fix(FixKind.COLLECT)),), line=3
    )
