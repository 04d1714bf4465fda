"""The zoo of leaks on a real GPU: the allocator gives back what each pattern must free."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from gpumemwidget.backends.hardware import Hardware, detect_hardware
from tests.zoo.harness import play
from tests.zoo.measure import HAS_ACCELERATE, Outcome, is_named, measure_ours
from tests.zoo.pattern import Pattern
from tests.zoo.patterns import PATTERNS

pytestmark = pytest.mark.gpu

HERE = [pattern for pattern in PATTERNS if pattern.runs_here("cuda")]


@pytest.fixture(scope="module")
def hardware() -> Iterator[Hardware]:
    """This machine's GPUs and its host memory."""
    hardware = detect_hardware()
    yield hardware
    hardware.close()
    _play.cache_clear()
    gc.collect()
    torch.cuda.empty_cache()


@functools.cache
def _play(pattern: Pattern, hardware: Hardware) -> Outcome:
    return measure_ours(pattern, device="cuda", hardware=hardware)


def _name(pattern: Pattern) -> str:
    return pattern.id


@pytest.mark.parametrize("pattern", HERE, ids=_name)
def test_what_must_go_goes(pattern: Pattern, hardware: Hardware) -> None:
    """To the byte, by torch's storages and by the allocator's own figure."""
    outcome = _play(pattern, hardware)

    assert pattern.stops in (outcome.stopped or "")
    assert bool(outcome.stopped) == bool(pattern.stops)
    if pattern.is_counted_by_allocator:
        assert (outcome.allocator_freed_bytes > 0, outcome.left_bytes) == (True, 0)
        return
    assert outcome.freed_bytes == pattern.frees_on("cuda")
    if not pattern.is_on_host:
        assert outcome.allocator_freed_bytes == outcome.rounded_bytes


@pytest.mark.parametrize("pattern", [each for each in HERE if not each.stops], ids=_name)
def test_what_goes_was_planned(pattern: Pattern, hardware: Hardware) -> None:
    """The figure before the click is the allocator's after it."""
    outcome = _play(pattern, hardware)

    if pattern.plans_less_on_gpu_because:
        assert outcome.planned_bytes < outcome.rounded_bytes, "the plan is right now"
    else:
        assert outcome.planned_bytes == outcome.rounded_bytes


@pytest.mark.parametrize("pattern", HERE, ids=_name)
def test_who_holds_it_is_named(pattern: Pattern, hardware: Hardware) -> None:
    """By the paths that a person would type, each of them."""
    outcome = _play(pattern, hardware)

    missing = [owner for owner in pattern.owners if not is_named(owner, outcome.paths)]
    assert missing == [], f"named: {outcome.paths}"


@pytest.mark.parametrize("pattern", HERE, ids=_name)
def test_looking_changes_nothing(pattern: Pattern, hardware: Hardware) -> None:
    """What is allocated before and after the explanation is equal to the byte."""
    assert _play(pattern, hardware).explaining_took_bytes == 0


@pytest.mark.skipif(not HAS_ACCELERATE, reason="accelerate is not installed")
def test_what_accelerate_frees_stays_reserved(hardware: Hardware) -> None:
    """It empties the cache before the caller's name is bound to ``None``; ours comes after."""
    n_bytes = 64 * 1024**2
    source = f"x = torch.zeros({n_bytes}, dtype=torch.uint8, device=device)"
    pattern = replace(next(each for each in HERE if each.id == "name"), source=source)

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
