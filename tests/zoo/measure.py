"""What we, ``del`` and accelerate achieve on a pattern, in bytes of its storages.

Each gets the same cells in a fresh notebook, and the same names. Measured is what is there right
after, without a further collection.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.records import HOST
from tests.zoo.harness import Scene, play
from tests.zoo.pattern import Pattern

__all__ = [
    "HAS_ACCELERATE",
    "Outcome",
    "is_named",
    "measure_accelerate",
    "measure_del",
    "measure_ours",
    "put_aside",
]

HAS_ACCELERATE = find_spec("accelerate") is not None

#: What is recommended everywhere.
_DEL = """
import gc
{deletion}
gc.collect()
if torch.cuda.is_available():
    torch.cuda.empty_cache()
"""

#: As accelerate's documentation has it.
_ACCELERATE = """
from accelerate.utils import release_memory
{assignment}release_memory({names})
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an explanation and a release of ours came to."""

    #: Every owner and holder that was named, by its path.
    paths: tuple[str, ...]
    planned_bytes: int
    freed_bytes: int
    stopped: str | None
    remains: tuple[str, ...]


def measure_ours(pattern: Pattern, *, device: str, hardware: Hardware | None = None) -> Outcome:
    """Explain, then release."""
    with play(pattern, device=device, hardware=hardware) as scene:
        paths = tuple(scene.explain())
        before = scene.watch.count_bytes()
        report = scene.release()
        freed = before - scene.watch.count_bytes()
    name = HOST if device == "cpu" else f"{device}:0"
    return Outcome(
        paths=paths,
        planned_bytes=dict(report.plan.frees_bytes).get(name, 0),
        freed_bytes=freed,
        stopped=report.stopped,
        remains=report.remains,
    )


def is_named(owner: str, paths: tuple[str, ...]) -> bool:
    """Whether an owner as a pattern has it, with ``*`` for anything, is among these paths."""
    wanted = re.compile(re.escape(owner).replace(r"\*", ".*"))
    return any(wanted.fullmatch(path) for path in paths)


def measure_del(pattern: Pattern, *, device: str) -> int:
    """Bytes that ``del``, ``gc.collect()`` and ``empty_cache()`` free."""
    names = ", ".join(pattern.names)
    deletion = f"del {names}" if names else ""
    return _measure(pattern, _DEL.format(deletion=deletion), device=device)


def measure_accelerate(pattern: Pattern, *, device: str) -> int:
    """Bytes that accelerate's ``release_memory`` frees."""
    names = ", ".join(pattern.names)
    assignment = f"{names}, = " if names else ""
    cell = _ACCELERATE.format(assignment=assignment, names=names)
    return _measure(pattern, cell, device=device)


@contextmanager
def put_aside() -> Iterator[None]:
    """Spare the collector what was there before: nothing of it is a pattern's.

    Not for our own: we ask the collector for what there is, and must find it as it is.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _measure(pattern: Pattern, cell: str, *, device: str) -> int:
    with play(pattern, device=device) as scene:
        before = scene.watch.count_bytes()
        _run(scene, cell)
        return before - scene.watch.count_bytes()


def _run(scene: Scene, cell: str) -> None:
    scene.run(cell)
    result = scene.notebook.ip.last_execution_result
    assert result.success, f"{scene.pattern.id}: {result.error_in_exec!r}"
