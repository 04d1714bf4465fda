"""What a session does by itself, whoever calls it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from gpumemwidget.errors import BadInputError, BusyError
from gpumemwidget.model.releases import ReleaseRequest
from gpumemwidget.session.session import Session
from tests.ownership.hostile import Hostile
from tests.ownership.notebook import Notebook


@pytest.fixture
def session(notebook: Notebook) -> Iterator[Session]:
    """A session in a shell with a tensor under ``x``."""
    failures: list[str] = []
    session = Session(notebook.shell, notebook.hardware, on_failure=failures.append)
    notebook.run("import torch\nx = torch.ones(1000)")

    yield session

    session.close()
    assert failures == []


def test_nothing_is_released_beside_a_running_cell(session: Session) -> None:
    """A cell's own thread may; another thread is refused, and nothing is changed."""
    raised: list[Exception] = []

    def release() -> None:
        try:
            session.release(ReleaseRequest(("x",)))
        except BusyError as exc:
            raised.append(exc)

    session.monitor.start_cell(execution_count=1, cell_id=None, source="step()")
    thread = threading.Thread(target=release)
    thread.start()
    thread.join()
    session.monitor.discard_cell()

    assert [type(exc) for exc in raised] == [BusyError]
    assert session.shell.user_ns["x"] is not None


def test_a_failure_is_told_once_for_each_type_and_logged_if_it_cannot_be(
    notebook: Notebook, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages may differ each time. Nothing is lost without a trace, and nothing is raised."""
    told: list[str] = []

    def tell(message: str) -> None:
        told.append(message)
        raise OSError("no output any more")

    session = Session(notebook.shell, notebook.hardware, on_failure=tell)
    session.report_failure("reading", OSError("lost at 0x7f01"))
    session.report_failure("reading", OSError("lost at 0x7f02"))
    session.report_failure("reading", ValueError())
    session.close()

    assert [message.partition(";")[0] for message in told] == [
        "reading failed (OSError: lost at 0x7f01)",
        "reading failed (ValueError)",
    ]
    assert "lost at 0x7f01" in caplog.text
    assert "no output any more" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing to release: name the variables"),
        ({"names": (object(),)}, "a name can't be of type object: give it as text"),
    ],
)
def test_a_release_that_can_not_be_is_refused_when_it_is_asked_for(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        ReleaseRequest(**options)  # type: ignore[arg-type]


@pytest.mark.usefixtures("nothing_is_called")
@pytest.mark.parametrize("make", [object, Hostile])
def test_only_text_is_looked_up(session: Session, make: type) -> None:
    """An object in place of its name is refused by its type, and asked nothing."""
    value = make()

    with pytest.raises(BadInputError, match=r"an expression can't be of type \w+: give it as text"):
        session.why(value)


def test_threads_that_ask_for_one_part_at_once_get_the_same(session: Session) -> None:
    """A page's question may come while a cell opens the dashboard: it is made once."""
    has_begun, may_end = threading.Event(), threading.Event()

    class Part:
        def __init__(self, _session: Session) -> None:
            has_begun.set()
            assert may_end.wait(60)

        def close(self) -> None:
            pass

    found: list[Part] = []
    first, second = (
        threading.Thread(target=lambda: found.append(session.attach(Part))) for _ in range(2)
    )
    first.start()
    assert has_begun.wait(60)
    has_begun.clear()
    second.start()

    is_made_twice = has_begun.wait(0.2)
    may_end.set()
    first.join()
    second.join()

    assert not is_made_twice
    assert found[0] is found[1]
