"""Releases elsewhere: whose names an address means, and what is said of one that was half done."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from gpumemwidget.errors import BadInputError, UnknownNameError
from gpumemwidget.model.processes import Outcome, RemoteRelease
from gpumemwidget.model.releases import (
    ReleasePlan,
    ReleaseRequest,
    Stop,
    StopKind,
)
from gpumemwidget.remote.reader import release_elsewhere as releases
from gpumemwidget.remote.reader.collector import Collector
from gpumemwidget.remote.reader.recordings import FileSource
from gpumemwidget.remote.reader.release_elsewhere import release_elsewhere
from gpumemwidget.report.processes import report_release_elsewhere
from tests.ranks import Rank
from tests.report.examples import make_plan, make_release, make_stopped_release

REQUEST = ReleaseRequest(("model",))


class _Engine(FileSource):
    """Recorded processes whose engine would run code.

    Args:
        answer: returns what a process of that key says to a plan, and then to a release; ``None``:
            it is silent.
    """

    def __init__(self, folder: Path, answer: Callable[[str, bool], Outcome | None]) -> None:
        super().__init__(folder)
        self._answer = answer

    def begin_release(
        self, key: str, request: ReleaseRequest, *, dry_run: bool, not_after: float
    ) -> Future[Outcome] | str:
        assert (request, not_after > 0) == (REQUEST, True)
        outcome = self._answer(key, dry_run)
        future: Future[Outcome] = Future()
        if outcome is not None:
            future.set_result(outcome)
        return future


def _release(
    folder: Path,
    address: str,
    answer: Callable[[str, bool], Outcome | None] = lambda _, is_plan: (
        make_plan() if is_plan else make_release()
    ),
    *,
    dry_run: bool = False,
) -> RemoteRelease:
    collector = Collector(lambda _, __: None)
    collector.add(_Engine(folder, answer))
    collector.read()
    return release_elsewhere(collector, address, REQUEST, dry_run=dry_run)


@pytest.mark.parametrize(
    ("address", "numbers"),
    [("@all", [0, 1, 0]), ("engine1", [1]), ("@engine 1", [1]), ("@engine", [0, 1])],
)
def test_an_address_is_a_role_and_a_number(
    address: str, numbers: list[int], tmp_path: Path
) -> None:
    """The role alone is all of it."""
    for number in range(2):
        Rank(tmp_path, number, role="engine").sample()
    Rank(tmp_path, 0, role="worker").sample()

    done = _release(tmp_path, address)

    assert done.is_done
    assert done.refused == ()
    assert [state.info.number for state, _ in done.outcomes] == numbers


def test_an_address_of_nobody(tmp_path: Path) -> None:
    """The message has the addresses that would do."""
    program = Rank(tmp_path, None, role="program")
    program.sample()
    Rank(tmp_path, 1, role="engine").close()

    with pytest.raises(UnknownNameError, match=r"@rank0 is running; there are: @program$"):
        _release(tmp_path, "@rank0")
    program.close()
    with pytest.raises(UnknownNameError, match=r"^no watched process is running$"):
        _release(tmp_path, "@rank0")


@pytest.mark.parametrize("address", ["", "@", " @ "])
def test_an_empty_address_is_refused(address: str, tmp_path: Path) -> None:
    """It names nobody, also where processes have no label."""
    Rank(tmp_path, 0, role="engine").sample()

    with pytest.raises(BadInputError, match="name the process: @engine1"):
        _release(tmp_path, address)


STOPPED = make_stopped_release()
REFUSED = make_plan(refusal=Stop(StopKind.CAPTURE))


@pytest.mark.parametrize(
    ("said", "is_done", "words"),
    [
        ([None, None], True, None),
        ([STOPPED, None], True, "Released in engine 1, but it failed in engine 0."),
        (["silent", None], True, "Released in engine 1, but it failed in engine 0."),
        ([STOPPED, "it is gone"], True, "It failed in engine 0 and engine 1."),
        ([None, REFUSED], False, "Nothing was released anywhere: engine 1 refused."),
    ],
)
def test_what_was_half_done_is_reported(
    said: list[Outcome | None],
    is_done: bool,
    words: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The report names where it was released and where it was not, in its first line."""
    monkeypatch.setattr(releases, "BEGIN_S", 0.01)
    monkeypatch.setattr(releases, "END_S", 0.01)
    for number in range(2):
        Rank(tmp_path, number, role="engine").sample()

    def answer(key: str, is_plan: bool) -> Outcome | None:
        own = said["engine-1" in key]
        if is_plan:
            return own if own is REFUSED else make_plan()
        return None if own == "silent" else own or make_release()

    done = _release(tmp_path, "all", answer)
    text = report_release_elsewhere(done).text

    assert done.is_done is is_done
    assert len(done.refused) == sum(each is not None for each in said)
    assert text.startswith("engine 0" if words is None else words)
    assert ("no answer within" in text) == ("silent" in said)


def test_a_plan_that_one_would_refuse(tmp_path: Path) -> None:
    """A dry run says what would be, as nothing was to be released; equal names have their pids."""
    for cluster in ("first", "second"):
        pid = 71 if cluster == "first" else 72
        Rank(tmp_path, 0, role="engine", pid=pid, process_id=cluster).sample()

    planned = _release(
        tmp_path, "all", lambda key, _: REFUSED if "second" in key else make_plan(), dry_run=True
    )
    text = report_release_elsewhere(planned).text

    assert not planned.is_done
    assert " ".join(text.split()).startswith(
        "engine 0 (pid 72) would refuse, so that nothing would be released anywhere. "
        "engine 0 (pid 71) · node1"
    )


def test_an_engine_that_fails_takes_nothing_from_the_others(tmp_path: Path) -> None:
    """What was released elsewhere before it failed is reported."""

    def answer(key: str, is_plan: bool) -> Outcome:
        if not is_plan and "second" in key:
            raise ConnectionError("the hub is gone")
        return make_plan() if is_plan else make_release()

    collector = Collector(lambda _, __: None)
    for name in ("first", "second"):
        Rank(tmp_path / name, None, role="worker", label=name).sample()
        collector.add(_Engine(tmp_path / name, answer))
    collector.read()

    done = release_elsewhere(collector, "@all", REQUEST)

    outcomes = {state.info.label: outcome for state, outcome in done.outcomes}
    assert done.is_done
    assert outcomes["first"] == make_release()
    assert "could not be asked (ConnectionError: the hub is gone)" in str(outcomes["second"])
    assert [state.info.label for state in done.refused] == ["second"]


def test_a_busy_process_keeps_all_from_releasing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that doesn't plan in time; the others are not waited for twice."""
    monkeypatch.setattr(releases, "BEGIN_S", 0.01)
    for number in range(2):
        Rank(tmp_path, number, role="engine").sample()

    done = _release(tmp_path, "all", lambda key, _: None if "engine-1" in key else make_plan())

    (_, plan), (_, refusal) = done.outcomes
    assert isinstance(plan, ReleasePlan)
    assert "it is busy" in str(refusal)
    assert not done.is_done


def test_what_was_released_is_reported_after_a_ctrl_c(tmp_path: Path) -> None:
    """Of each process: it has answered, or it may have released."""
    for number in range(4):
        Rank(tmp_path, number, role="engine").sample()

    def answer(key: str, is_plan: bool) -> Outcome | None:
        if is_plan:
            return make_plan()
        if "engine-2" in key:
            raise KeyboardInterrupt
        return None if "engine-1" in key else make_release()

    done = _release(tmp_path, "all", answer)

    first, *others = (outcome for _, outcome in done.outcomes)
    assert done.is_done
    assert done.is_interrupted
    text = report_release_elsewhere(done).text
    assert "but it was interrupted in engine 1, engine 2 and engine 3." in " ".join(text.split())
    assert first == make_release()
    assert others == ["interrupted before it answered: what became of it is not known"] * 3


def test_a_ctrl_c_while_planning_changes_nothing(tmp_path: Path) -> None:
    """It ends the call, as there is nothing to report."""
    Rank(tmp_path, 0, role="engine").sample()
    wants_release: list[bool] = []

    def answer(_: str, is_plan: bool) -> Outcome | None:
        wants_release.append(not is_plan)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _release(tmp_path, "all", answer)
    assert wants_release == [False]
