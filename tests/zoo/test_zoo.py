"""Each pattern of the zoo, here and on a GPU: what must go goes, and who holds it is named."""

from __future__ import annotations

import functools
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from gpumemwidget.backends.hardware import Hardware, detect_hardware
from gpumemwidget.backends.host import HostBackend
from gpumemwidget.model.devices import HOST
from gpumemwidget.ownership.why import explain
from gpumemwidget.report.release import word_fix
from tests.zoo.harness import play
from tests.zoo.measure import HAS_ACCELERATE, Outcome, is_named, measure_ours
from tests.zoo.pattern import Pattern
from tests.zoo.patterns import PATTERNS
from tests.zoo.table import format_table, measure_row, read_gpu_rows, read_table

HERE = [pattern for pattern in PATTERNS if pattern.runs_here("cpu")]
PLAYED = [
    pytest.param(
        *(pattern, device),
        id=f"{pattern.id}-{device}",
        marks=pytest.mark.gpu if device == "cuda" else (),
    )
    for device in ("cpu", "cuda")
    for pattern in PATTERNS
    if pattern.runs_here(device)
]
_on_each_device = pytest.mark.parametrize(("pattern", "device"), PLAYED)


@functools.cache
def _play(pattern: Pattern, device: str) -> Outcome:
    """Played once, for all tests of a run."""
    with closing(detect_hardware() if device == "cuda" else Hardware([HostBackend()])) as hardware:
        return measure_ours(pattern, device=device, hardware=hardware)


def _name(pattern: Pattern) -> str:
    return pattern.id


def test_the_zoo_is_big_and_each_pattern_is_somebodys() -> None:
    """At least forty patterns, each of a name of its own, with a link to a report."""
    assert len(PATTERNS) >= 40
    assert len({pattern.id for pattern in PATTERNS}) == len(PATTERNS)
    assert len({pattern.title for pattern in PATTERNS}) == len(PATTERNS)
    assert all(pattern.link.startswith("https://") for pattern in PATTERNS)
    assert all(pattern.owners for pattern in PATTERNS)


@_on_each_device
def test_what_must_go_goes(pattern: Pattern, device: str) -> None:
    """To the byte: no less, and nothing that somebody else still holds.

    On a GPU by torch's storages and by the allocator's own figure.
    """
    outcome = _play(pattern, device)

    assert pattern.stops in (outcome.stopped or "")
    assert bool(outcome.stopped) == bool(pattern.stops)
    if pattern.is_counted_by_allocator:
        assert (outcome.allocator_freed_bytes > 0, outcome.left_bytes) == (True, 0)
        return
    assert outcome.freed_bytes == pattern.frees_on(device)
    if device == "cuda" and not pattern.is_on_host:
        assert outcome.allocator_freed_bytes == outcome.rounded_bytes


@_on_each_device
def test_what_goes_was_planned(pattern: Pattern, device: str) -> None:
    """The figure before the click is the one after it; a reason is given where it can't be."""
    outcome = _play(pattern, device)
    reason, n_bytes = pattern.plans_less_because, pattern.frees
    if device == "cuda":
        reason, n_bytes = pattern.plans_less_on_gpu_because, outcome.rounded_bytes

    if reason:
        assert outcome.planned_bytes < n_bytes, "the plan is right now: drop the reason"
    elif device == "cpu" or not pattern.stops:
        assert outcome.planned_bytes == n_bytes


@_on_each_device
def test_who_holds_it_is_named(pattern: Pattern, device: str) -> None:
    """By the paths that a person would type, each of them."""
    outcome = _play(pattern, device)

    missing = [owner for owner in pattern.owners if not is_named(owner, outcome.paths)]
    assert missing == [], f"named: {outcome.paths}"


@pytest.mark.parametrize(("pattern", "device"), [each for each in PLAYED if each.marks])
def test_looking_changes_nothing(pattern: Pattern, device: str) -> None:
    """What a GPU's allocator has handed out is the same after the explanation, to the byte."""
    assert _play(pattern, device).explaining_took_bytes == 0


@pytest.mark.parametrize("pattern", [each for each in HERE if each.cut], ids=_name)
def test_the_way_out_that_is_told_works(pattern: Pattern) -> None:
    """What no release of names frees goes once the person has done what the answer says."""
    with play(pattern, device="cpu") as scene:
        told = [word_fix(holder.fix).text for holder in scene.ask().holders]
        before = scene.watch.count_bytes()
        scene.run(f"{pattern.cut};")
        scene.release()
        freed = before - scene.watch.count_bytes()

    assert any(pattern.cut in each for each in told)
    assert freed == pattern.keeps


@pytest.mark.parametrize("pattern", HERE, ids=_name)
def test_what_is_recommended_frees_what_it_promises(pattern: Pattern) -> None:
    """The commands of the answer, run as they stand: no byte less and no byte more."""
    with play(pattern, device="cpu") as scene:
        cure = scene.ask().cure
        before = scene.watch.count_bytes()
        if cure is not None:
            scene.follow(cure)
        freed = before - scene.watch.count_bytes()

    assert freed == (0 if cure is None else cure.frees_bytes.on(HOST))


_NAMES = [
    pytest.param(pattern, name, id=f"{pattern.id}-{name}")
    for pattern in HERE
    for name in pattern.names[: 0 if len(pattern.names) == 1 else None]
]


@pytest.mark.parametrize(("pattern", "name"), _NAMES)
def test_what_is_asked_about_has_a_command_where_its_release_has_one(
    pattern: Pattern, name: str
) -> None:
    """Also of what owns nothing by itself, and the command frees what it promises."""
    with play(pattern, device="cpu") as scene:
        joint = scene.notebook.plan(name).joint
        cure = explain(scene.notebook.shell, name).cure
        before = scene.watch.count_bytes()
        if cure is not None:
            scene.follow(cure)
        freed = before - scene.watch.count_bytes()

    assert joint is None or cure is not None
    assert freed == (0 if cure is None else cure.frees_bytes.on(HOST))


def test_the_page_has_this_table() -> None:
    """Its figures are those of a run; ``python -m tests.zoo --docs`` writes them."""
    rows = read_gpu_rows(PATTERNS)
    for pattern in HERE:
        rows[pattern.id] = measure_row(pattern, _play(pattern, "cpu"), device="cpu")

    table = format_table(PATTERNS, rows)

    assert read_table() == table


def test_what_was_not_run_is_kept_from_the_page() -> None:
    """Without accelerate its column stays as it was measured elsewhere, and so do whole rows."""
    known = HERE[0]
    row = measure_row(known, _play(known, "cpu"), device="cpu")

    table = format_table(PATTERNS, {known.id: replace(row, accelerate=None)})

    assert table == read_table()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_ACCELERATE, reason="accelerate is not installed")
def test_what_accelerate_frees_stays_reserved() -> None:
    """It empties the cache before the caller's name is bound to ``None``; ours comes after."""
    n_bytes = 64 * 1024**2
    source = f"x = torch.zeros({n_bytes}, dtype=torch.uint8, device=device)"
    pattern = replace(next(each for each in PATTERNS if each.id == "name"), source=source)

    with closing(detect_hardware()) as hardware:
        with play(pattern, device="cuda", hardware=hardware) as scene:
            reserved = torch.cuda.memory_reserved(0)
            scene.run("from accelerate.utils import release_memory\nx, = release_memory(x)")
            theirs = reserved - torch.cuda.memory_reserved(0)
            left = scene.watch.count_bytes()
        torch.cuda.empty_cache()
        with play(pattern, device="cuda", hardware=hardware) as scene:
            reserved = torch.cuda.memory_reserved(0)
            scene.release()
            ours = reserved - torch.cuda.memory_reserved(0)

    assert (theirs, left) == (0, 0)
    assert ours == n_bytes
