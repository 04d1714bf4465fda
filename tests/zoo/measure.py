"""What we, ``del`` and accelerate achieve on a pattern, in bytes of its storages.

Each gets the same cells in a fresh notebook, and the same names. Measured is what is there right
after, without a further collection.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec

from gpumemwidget.backends.hardware import Hardware
from gpumemwidget.model.devices import HOST
from gpumemwidget.report.release import describe_stays, word_remnant, word_stop
from tests.zoo.harness import Scene, play
from tests.zoo.pattern import Pattern

__all__ = [
    "HAS_ACCELERATE",
    "Outcome",
    "is_named",
    "measure_accelerate",
    "measure_del",
    "measure_ours",
]

HAS_ACCELERATE = find_spec("accelerate") is not None

#: CUDA's caching allocator hands out multiples of this.
_CUDA_GRAIN = 512

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
    #: The same, each storage rounded up as CUDA's allocator does.
    rounded_bytes: int
    stopped: str | None
    remains: tuple[str, ...]
    #: By how much the allocator's own figure fell (0 on the host), and what it still has more than
    #: before the pattern.
    allocator_freed_bytes: int
    left_bytes: int
    #: By how much the allocator's own figure rose while we explained.
    explaining_took_bytes: int


def measure_ours(pattern: Pattern, *, device: str, hardware: Hardware | None = None) -> Outcome:
    """Explain, then release."""
    with play(pattern, device=device, hardware=hardware) as scene:
        allocated = scene.read_allocated()
        paths = tuple(scene.explain())
        explained = scene.read_allocated()
        before = scene.watch.list_alive()
        report = scene.release()
        after = scene.watch.list_alive()
        released = scene.read_allocated()
    gone = [n_bytes for address, n_bytes in before.items() if address not in after]
    stays = describe_stays(report.plan.stays, is_done=True)
    name = HOST if device == "cpu" or pattern.is_on_host else f"{device}:0"
    return Outcome(
        paths=paths,
        planned_bytes=dict(report.plan.frees_bytes.by_device).get(name, 0),
        freed_bytes=sum(gone),
        rounded_bytes=sum(-(-n_bytes // _CUDA_GRAIN) * _CUDA_GRAIN for n_bytes in gone),
        stopped=None if report.stopped is None else word_stop(report.stopped),
        remains=(*stays, *map(word_remnant, report.remains)),
        allocator_freed_bytes=explained - released,
        left_bytes=released,
        explaining_took_bytes=explained - allocated,
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


def _measure(pattern: Pattern, cell: str, *, device: str) -> int:
    with play(pattern, device=device) as scene:
        before = scene.count_bytes()
        _run(scene, cell)
        return before - scene.count_bytes()


def _run(scene: Scene, cell: str) -> None:
    scene.run(cell)
    result = scene.notebook.ip.last_execution_result
    assert result.success, f"{scene.pattern.id}: {result.error_in_exec!r}"
