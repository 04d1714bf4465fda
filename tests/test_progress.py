"""How far long work has got: who is told, and when."""

from __future__ import annotations

import pytest

from gpumemwidget.progress import Progress, Stage, follow, listen, report_progress
from gpumemwidget.report.render.wording import format_progress

GIB = 1 << 30
MOVE = Stage.MOVE_BYTES
REPLAY = Stage.REPLAY_EVENTS


def test_whoever_listens_is_told_until_the_end_of_the_block() -> None:
    told: list[Progress] = []

    report_progress(MOVE, 0, 2)
    with listen(told.append):
        report_progress(MOVE, 1, 2)
    report_progress(MOVE, 2, 2)

    assert told == [Progress(MOVE, 1, 2)]


@pytest.mark.parametrize("n_items", [0, 1, 1 << 14, 40_000])
def test_a_followed_loop_has_all_items_and_says_how_far_it_is(n_items: int) -> None:
    told: list[Progress] = []

    with listen(told.append):
        items = list(follow(iter(range(n_items)), REPLAY, n_items))

    assert items == list(range(n_items))
    assert told == [Progress(REPLAY, done, n_items) for done in range(0, n_items, 1 << 14)]


def test_a_listener_can_break_the_work_off() -> None:
    def stop(progress: Progress) -> None:
        if progress.done:
            raise KeyboardInterrupt

    seen: list[int] = []
    with listen(stop):
        items = follow(range(40_000), REPLAY, 40_000)
        with pytest.raises(KeyboardInterrupt):
            seen.extend(items)

    assert seen == list(range(1 << 14))


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (Progress(Stage.WALK_OBJECTS, 340_000, None), "Looking through objects: 340,000 so far"),
        (
            Progress(REPLAY, 400_000, 1_000_000),
            "Replaying the allocator's events: 400,000 of 1,000,000",
        ),
        (Progress(MOVE, GIB, 4 * GIB), "Moving tensors to another device: 1.00 GiB of 4.00 GiB"),
    ],
)
def test_the_words(progress: Progress, words: str) -> None:
    assert format_progress(progress) == words


@pytest.mark.parametrize("stage", Stage)
def test_each_stage_has_words(stage: Stage) -> None:
    assert ": 3" in format_progress(Progress(stage, 3, None))
