"""A snapshot file of PyTorch's as a trace: whatever wrote it, the lines are those of its code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePath

from gpumemwidget.backends.snapread import load_snapshot
from gpumemwidget.errors import FileError
from gpumemwidget.libraries import is_library
from gpumemwidget.measure.sources import Source, Sources, read_source
from gpumemwidget.measure.tracing import describe_device
from gpumemwidget.records import CellDevice, CellRecord
from gpumemwidget.traces import AllocatorTrace, CellTrace, DeviceTrace

__all__ = ["read_snapshot"]

#: What figures that no allocator gives let ours raise: sizes beyond all bounds, settings of text.
_ODDITIES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
#: As IPython names cells: in a terminal, in a kernel.
_CELL = re.compile(r"^<ipython-input-|[/\\]ipykernel_\d+[/\\]\d+\.py$")


def read_snapshot(path: Path) -> CellTrace:
    """The trace in a file that PyTorch's own memory viewer reads.

    Which cell or block it is of, the file does not say. Its lines are those of the file of the
    user's from which most was allocated.

    Raises:
        FileError: it can't be read, or is no such file.
    """
    traces = load_snapshot(path)
    filename = _find_main(traces)
    text = "".join(read_source(filename)) if filename else ""
    name = PurePath(filename).name if filename else path.name
    sources = Sources(Source(name, filename, "file", text))
    start_us = min((trace.start_us for trace in traces), default=0)
    end_us = max((trace.end_us for trace in traces), default=0)
    try:
        devices = tuple(
            describe_device(trace, sources=sources, start_us=start_us) for trace in traces
        )
    except _ODDITIES as exc:
        why = f"{type(exc).__name__}: {exc}".splitlines()[0][:80]
        raise FileError(
            f"{path} is damaged: its figures are those of no device ({why}); choose another file"
        ) from None
    record = CellRecord(
        execution_count=None,
        cell_id=None,
        first_line=path.name,
        started_at=start_us / 1e6,
        start_s=0.0,
        duration_s=(end_us - start_us) / 1e6,
        status="ok",
        devices=tuple(map(_describe_counters, devices)),
    )
    return CellTrace(record, devices)


def _find_main(traces: Sequence[AllocatorTrace]) -> str:
    """The user's file that most was allocated from; ``""`` where the stacks tell of none."""
    n_bytes: Counter[str] = Counter()
    for trace in traces:
        files = [_choose([each.filename for each in stack]) for stack in trace.events.stack_table]
        for stack, size in zip(trace.events.stacks, trace.events.sizes, strict=True):
            n_bytes[files[stack]] += size
    del n_bytes[""]
    return n_bytes.most_common(1)[0][0] if n_bytes else ""


def _choose(filenames: Sequence[str]) -> str:
    """Of a stack, innermost first, the outermost cell, or else file of the user's."""
    users = [each for each in filenames if each and not is_library(each)]
    cells = [each for each in users if _CELL.search(each)]
    return (cells or users or [""])[-1]


def _describe_counters(device: DeviceTrace) -> CellDevice:
    return CellDevice(
        device=device.device,
        allocated=device.allocated,
        reserved=device.reserved,
        peak_is=device.peak_is,
        num_alloc_retries=None,
        num_ooms=None,
    )
