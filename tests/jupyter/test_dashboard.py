"""The dashboard's kernel side, in a real shell with real tensors; the test plays the page."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from IPython.core.displaypub import CapturingDisplayPublisher

from gpumemwidget.widgets.page import read_css, read_plotly
from tests.jupyter.page import Page, unpack_rows

_MIB = 1024**2


@pytest.fixture
def page(shell: Any, monkeypatch: pytest.MonkeyPatch) -> Page:
    # A busy machine may take longer for what is exact here.
    monkeypatch.setattr("gpumemwidget.ownership.account.LIST_BUDGET_S", 60.0)
    monkeypatch.setattr("gpumemwidget.widgets.panels._SUM_BUDGET_S", 60.0)
    shell.run_line_magic("load_ext", "gpumemwidget")
    shell.user_ns["torch"] = torch
    return Page(shell)


def _find(messages: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (message,) = [message for message in messages if message["kind"] == kind]
    return message


def test_state_is_made_when_it_is_asked_for(page: Page) -> None:
    """A page that is loaded anew gets what is true then, though no trait was ever set."""
    page.dashboard.get_state()
    page.run("x = 1")

    snapshot = page.dashboard.get_state()["snapshot"]

    assert snapshot["cells"][-1]["first_line"] == "x = 1"
    assert unpack_rows(snapshot["data"], 1)[-1][1][0][0] > 0


def test_page_that_asks_gets_plotly(page: Page) -> None:
    """It is no part of the state, which some front ends save with the notebook."""
    (answer,) = page.say("plotly")

    assert (answer["kind"], answer["buffers"]) == ("plotly", [read_plotly()])


def test_state_of_other_widgets_survives_our_failure(
    page: Page, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page asks for the states of all widgets in one message."""

    def fail(*_: object) -> None:
        raise RuntimeError("made to fail")

    monkeypatch.setattr(page.monitor.history, "samples", fail)

    state = page.dashboard.get_state()

    assert state["snapshot"] is None
    assert "RuntimeError: made to fail" in capsys.readouterr().err


def test_variables_are_listed_and_summed_on_demand(page: Page) -> None:
    """By storage, with what each holds and frees; two names of one free it only together."""
    page.run("big = torch.ones(64, 1024, 1024)\npart = big[:1]")

    answer = page.say("variables")
    both = page.say("sum", id="1", names=["big", "part"], keep=False)

    big, part = _find(answer, "variables")["variables"]
    assert (big["name"], big["shape"], big["dtype"]) == ("big", (64, 1024, 1024), "float32")
    assert big["held_bytes"] == {"by_device": (("host", 256 * _MIB),), "is_at_least": False}
    assert sum(n_bytes for _, n_bytes in big["frees_bytes"]["by_device"]) == 0
    assert part["kind"] == "view"
    assert part["shared_with"] == ("big",)
    assert _find(both, "sum")["frees_bytes"] == big["held_bytes"]


def test_account_adds_up_and_is_opened(page: Page) -> None:
    """A click takes it and gets its rows; the parts of a row come when it is opened."""
    page.run(
        "layer = torch.nn.Linear(2048, 2048)\nkept = [torch.ones(512, 1024) for _ in range(3)]"
    )

    # While it takes long, further messages say how far it has got.
    running, *_, done = page.say("account")

    assert (running["kind"], running["state"]) == ("account", "running")
    assert (done["kind"], done["state"]) == ("account", "done")
    (host,) = done["devices"]
    assert host["sum"] == host["allocated"]
    owns = {row["label"]: sum(n_bytes for _, n_bytes in row["owns"]) for row in done["rows"]}
    assert owns["kept"] == 6 * _MIB
    assert sum(owns.values()) == host["sum"]
    assert {each["name"] for each in done["variables"]} == {"layer", "kept"}
    (row,) = [row for row in done["rows"] if row["label"] == "layer"]
    (parts,) = page.say("parts", key=done["key"], node=row["node"], start=0)
    assert {part["label"] for part in parts["parts"]} == {".weight", ".bias"}
    (found,) = page.say("find", key=done["key"], text="WEIGHT")
    assert [each["label"] for each in found["found"]] == [".weight"]
    assert page.say("parts", key=done["key"] - 1, node=0, start=0) == []


def test_account_grows_old(page: Page) -> None:
    """The list that follows a cell or a release says so; a new account is new again."""
    page.run("big = torch.ones(64, 1024, 1024)")
    page.say("account")
    assert not _find(page.say("variables"), "variables")["account_is_old"]

    page.run("x = 1")
    assert _find(page.say("variables"), "variables")["account_is_old"]
    page.say("account")
    assert not _find(page.say("variables"), "variables")["account_is_old"]

    answer = page.say("release", id="7", names=["big"], keep=False)
    assert _find(answer, "variables")["account_is_old"]


def test_why_a_name_is_held_is_answered(page: Page) -> None:
    """With the report of ``%memwhy``; of a name that is gone, why there is none."""
    page.run("big = torch.ones(64, 1024, 1024)\nalso = [big]")

    *_, answer = page.say("why", id="3", name="big")
    *_, refused = page.say("why", id="4", name="gone")

    assert (answer["kind"], answer["id"], answer["state"]) == ("why", "3", "done")
    assert "also" in answer["html"]
    assert (refused["id"], refused["state"]) == ("4", "failed")
    assert "gone" in refused["message"]


def test_account_in_mid_cell_waits_for_its_end(page: Page) -> None:
    """It is said that it waits; two wishes are one account; parts of the last one are sent."""
    page.run("big = torch.ones(64, 1024, 1024)")
    done = page.say("account")[-1]
    answers: list[list[dict[str, Any]]] = []

    def ask() -> None:
        answers.extend(page.say("account") for _ in range(2))
        answers.append(page.say("parts", key=done["key"], node=0, start=0))
        page.sent.clear()

    page.shell.user_ns["ask"] = ask

    page.run("ask()\nmade_here = torch.ones(64, 1024, 1024)")

    assert [message["state"] for answer in answers[:2] for message in answer] == ["queued"]
    assert answers[2][0]["kind"] == "parts"
    accounts = [message for message in page.sent if message["kind"] == "account"]
    *running, done = [message["state"] for message in accounts]
    assert (set(running), done) == ({"running"}, "done")
    assert "made_here" in {row["label"] for row in accounts[-1]["rows"]}


@pytest.mark.parametrize(
    ("owner", "asked", "kind"),
    [
        ("ownership.account.take_memory_account", {"kind": "account"}, "account"),
        (
            "ownership.account.sum_frees",
            {"kind": "sum", "id": "1", "names": ["x"], "keep": False},
            "sum",
        ),
        (
            "releasing.release.execute_release",
            {"kind": "release", "id": "1", "names": ["x"], "keep": False},
            "release",
        ),
        ("ownership.account.list_variables", {"kind": "variables"}, "trouble"),
    ],
)
def test_interrupt_ends_what_is_at_work_and_is_told(
    page: Page, monkeypatch: pytest.MonkeyPatch, owner: str, asked: dict[str, Any], kind: str
) -> None:
    """No cell runs that it could be meant for, and a view waits for the answer."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"gpumemwidget.{owner}", interrupt)

    answer = page.say(**asked)[-1]

    assert answer["kind"] == kind
    said = answer.get("message", answer.get("error"))
    assert said == "interrupted; nothing was changed"


def test_hostile_names_are_told_as_they_are(page: Page) -> None:
    """They are text to the page, which never makes elements of them."""
    name = "<img src=x onerror=alert(1)>\"'"
    page.shell.user_ns[name] = torch.ones(1024, 1024)

    (row,) = _find(page.say("variables"), "variables")["variables"]
    account = page.say("account")[-1]

    assert row["name"] == name
    assert name in {each["label"] for each in account["rows"]}
    released = page.say("release", id="7", names=[name], keep=False)[-1]
    assert released["state"] == "done"
    assert "<img" not in released["html"]


@pytest.mark.parametrize(("variables", "n_lists"), [(True, 1), (False, 0)])
def test_cell_refreshes_the_list_only_where_it_is_shown(
    page: Page, variables: bool, n_lists: int
) -> None:
    """The walk through the user's objects is not free."""
    page.see(variables=variables)
    page.sent.clear()

    page.run("x = 1")

    assert [message["kind"] for message in page.sent].count("variables") == n_lists


def test_widget_output_has_no_text(page: Page) -> None:
    """A notebook that is not trusted draws its text: the static copy below says it all."""
    data, _ = page.dashboard._repr_mimebundle_() or ({}, {})

    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == page.dashboard.model_id
    assert data["text/plain"] == ""
    assert "text/html" not in data


def test_terminal_shows_the_snapshot(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is no kernel there is no widget: the devices and the last cells are printed."""
    page.run("x = 1")
    capsys.readouterr()

    page.run("%memdash")

    shown = capsys.readouterr().out
    assert "Snapshot of the dashboard" in shown
    assert "host" in shown
    assert "x = 1" in shown


@pytest.fixture
def copies(page: Page, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Show the dashboard as a kernel does; what its copies were updated to, as text."""
    shown = CapturingDisplayPublisher()
    # A kernel without a loop: what is put off is done at once.
    monkeypatch.setattr(page.shell, "kernel", SimpleNamespace(), raising=False)
    monkeypatch.setattr(page.shell, "display_pub", shown)
    page.run("%memdash")
    page.see()

    def take() -> list[str]:
        updates = [each["data"]["text/plain"] for each in shown.outputs if each["update"]]
        shown.outputs.clear()
        return updates

    take()
    return take


def test_copies_are_updated_while_a_page_has_any(
    page: Page, copies: Callable[[], list[str]]
) -> None:
    """By a cell, and by a release from the dashboard; each copy tells its time."""
    page.run("big = torch.ones(64, 1024, 1024)")
    (after_cell,) = copies()
    page.say("release", id="7", names=["big"], keep=False)
    (after_release,) = copies()
    page.say("gone", view="a")
    page.run("x = 1")

    assert copies() == []
    assert "big = torch.ones" in after_cell
    assert after_release != after_cell
    assert re.match(
        r"Snapshot of the dashboard, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\. Run", after_release
    )


def test_close_ends_everything_once(page: Page) -> None:
    """No listener, no sampler; a second close is fine, and showing it is then static."""
    page.see()
    assert page.monitor.is_sampling

    page.dashboard.close()
    page.dashboard.close()

    assert not page.monitor.is_sampling
    page.sent.clear()
    page.run("x = 1")
    assert page.sent == []
    page.dashboard.show()


def test_front_end_is_built_from_its_sources() -> None:
    """The bundle names the sources it was made of, so that nobody forgets to build it anew."""
    root = Path(__file__).parents[2]
    sources = sorted((root / "js").glob("*.js"))
    sha256 = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()

    static = root / "gpumemwidget" / "widgets" / "static"
    built = [(static / name).read_text("utf-8") for name in ("cards.js", "dashboard.js")]

    assert len(sources) > 10
    for module in built:
        assert module.splitlines()[0].endswith(f"sha256 {sha256}"), "npm ci && npm run build"


def test_style_sheet_touches_nothing_else() -> None:
    """Every rule is for the dashboard's own elements."""
    rules = re.findall(r"^([^@{}\n]+)\{", read_css(), re.MULTILINE)

    assert len(rules) > 80
    assert [rule for rule in rules if "gmd" not in rule and "50%" not in rule] == []


@pytest.mark.parametrize(
    ("session_name", "vscode_file", "notebook"),
    [
        (None, None, ""),
        ("/home/ada/train.ipynb", None, "36fa8b7c90fc/train.ipynb"),
        ("/tmp/vscode-1.ipynb", "/home/ada/train.ipynb", "36fa8b7c90fc/train.ipynb"),
        ("/home/ada/train.ipynb", 7, "36fa8b7c90fc/train.ipynb"),
    ],
)
def test_dashboard_knows_its_notebook(
    shell: Any,
    monkeypatch: pytest.MonkeyPatch,
    session_name: str | None,
    vscode_file: object,
    notebook: str,
) -> None:
    """Jupyter's server tells it, or VS Code, whose session on a server has a name of its own.

    The folders' names are in no widget's state, which may be saved with the notebook.
    """
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    if session_name is not None:
        monkeypatch.setenv("JPY_SESSION_NAME", session_name)
    if vscode_file is not None:
        shell.user_ns["__vsc_ipynb_file__"] = vscode_file
    shell.run_line_magic("load_ext", "gpumemwidget")

    page = Page(shell)

    assert page.dashboard.notebook == notebook
