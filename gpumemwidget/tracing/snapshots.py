"""Read a snapshot file of PyTorch's memory viewer as a trace, whatever wrote it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePath

from gpumemwidget.backends.cuda.snapshot_file import load_snapshot
from gpumemwidget.errors import FileError, describe_exception
from gpumemwidget.model.cells import CellDevice, CellRecord
from gpumemwidget.model.segments import Frame
from gpumemwidget.model.traces import AllocatorTrace, CellTrace
from gpumemwidget.tracing.device_trace import describe_device
from gpumemwidget.tracing.sources import Source, Sources, is_library, read_source

#: Exceptions that impossible figures cause in our code, such as huge sizes or settings of text.
_DAMAGES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
#: File names of IPython's cells, in a terminal and in a kernel.
_CELL = re.compile(r"^<ipython-input-|[/\\]ipykernel_\d+[/\\]\d+\.py$")


def read_snapshot(path: Path) -> CellTrace:
    """Return the trace in a file that PyTorch's memory viewer reads.

    The file does not say which cell or block it is of: the lines are those of the user's file that
    allocated most.

    Raises:
        FileError: the file can't be read, or is no snapshot.
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
    except _DAMAGES as exc:
        why = describe_exception(exc)[:80]
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
        devices=tuple(
            CellDevice(each.device, each.allocated, each.reserved, each.peak_is, None, None)
            for each in devices
        ),
    )
    return CellTrace(record, devices)


def _find_main(traces: Sequence[AllocatorTrace]) -> str:
    """Return the user's file that allocated most; ``""`` if the stacks have none."""
    n_bytes: Counter[str] = Counter()
    for trace in traces:
        files = [_choose_file(stack) for stack in trace.events.stack_table]
        for stack, size in zip(trace.events.stacks, trace.events.sizes, strict=True):
            n_bytes[files[stack]] += size
    del n_bytes[""]
    return n_bytes.most_common(1)[0][0] if n_bytes else ""


def _choose_file(stack: Sequence[Frame]) -> str:
    """Return the outermost cell of a stack (innermost first), or else the user's outermost file."""
    filenames = [frame.filename for frame in stack]
    users = [filename for filename in filenames if filename and not is_library(filename)]
    cells = [filename for filename in users if _CELL.search(filename)]
    return (cells or users or [""])[-1]
