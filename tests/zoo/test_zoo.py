"""Each pattern of the zoo on the host: what must go goes, and who holds it is named."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from gpumemwidget.model.devices import HOST
from gpumemwidget.ownership.why import explain
from gpumemwidget.report.why import word_fix
from tests.zoo.harness import play
from tests.zoo.measure import Outcome, is_named, measure_ours
from tests.zoo.pattern import Pattern
from tests.zoo.patterns import PATTERNS
from tests.zoo.table import format_table, measure_row, read_gpu_rows, read_table

HERE = [pattern for pattern in PATTERNS if pattern.runs_here("cpu")]


@functools.cache
def _play(pattern: Pattern) -> Outcome:
    """Played once, for all tests of a run."""
    return measure_ours(pattern, device="cpu")


def _name(pattern: Pattern) -> str:
    return pattern.id


def test_the_zoo_is_big_and_each_pattern_is_somebodys() -> None:
    """At least forty patterns, each of a name of its own, with a link to a report."""
    assert len(PATTERNS) >= 40
    assert len({pattern.id for pattern in PATTERNS}) == len(PATTERNS)
    assert len({pattern.title for pattern in PATTERNS}) == len(PATTERNS)
    assert all(pattern.link.startswith("https://") for pattern in PATTERNS)
    assert all(pattern.owners for pattern in PATTERNS)


@pytest.mark.parametrize("pattern", HERE, ids=_name)
def test_what_must_go_goes(pattern: Pattern) -> None:
    """To the byte: no less, and nothing that somebody else still holds."""
    outcome = _play(pattern)

    assert pattern.stops in (outcome.stopped or "")
    assert bool(outcome.stopped) == bool(pattern.stops)
    assert outcome.freed_bytes == pattern.frees


@pytest.mark.parametrize("pattern", HERE, ids=_name)
def test_what_goes_was_planned(pattern: Pattern) -> None:
    """The figure before the click is the one after it; a reason is given where it can't be."""
    outcome = _play(pattern)

    if pattern.plans_less_because:
        assert outcome.planned_bytes < pattern.frees, "the plan is right now: drop the reason"
    else:
        assert outcome.planned_bytes == pattern.frees


@pytest.mark.parametrize("pattern", HERE, ids=_name)
def test_who_holds_it_is_named(pattern: Pattern) -> None:
    """By the paths that a person would type, each of them."""
    outcome = _play(pattern)

    missing = [owner for owner in pattern.owners if not is_named(owner, outcome.paths)]
    assert missing == [], f"named: {outcome.paths}"


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
        rows[pattern.id] = measure_row(pattern, _play(pattern), device="cpu")

    table = format_table(PATTERNS, rows)

    assert read_table() == table


def test_what_was_not_run_is_kept_from_the_page() -> None:
    """Without accelerate its column stays as it was measured elsewhere, and so do whole rows."""
    known = HERE[0]
    row = measure_row(known, _play(known), device="cpu")

    table = format_table(PATTERNS, {known.id: replace(row, accelerate=None)})

    assert table == read_table()
