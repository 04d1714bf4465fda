"""Records without what is the user's: no secret is left, and every figure and word of ours is."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from html import unescape
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumemwidget.model.leaks import UnexplainedGrowth
from gpumemwidget.model.ownership import MemoryKind, Owned
from gpumemwidget.model.processes import RunningSpan
from gpumemwidget.ownership.labels import LENDER, UNNAMED, UNSEEN
from gpumemwidget.ownership.shell import LAST_EXCEPTION
from gpumemwidget.report.account import report_account
from gpumemwidget.report.cell import report_ledger
from gpumemwidget.report.devices import report_breakdown, report_stat
from gpumemwidget.report.leaks import report_leaks
from gpumemwidget.report.oom import report_oom
from gpumemwidget.report.page import Redaction
from gpumemwidget.report.processes import report_processes
from gpumemwidget.report.render.markup import clean
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.trace import report_trace
from tests.report import account_examples as accounts
from tests.report import breakdown_examples as devices
from tests.report import examples
from tests.report import growth_examples as growths
from tests.report import oom_examples as ooms
from tests.report import prediction_examples as predictions
from tests.report import process_examples as processes
from tests.report import trace_examples as traces
from tests.report.pages import list_amounts

_LEAKS = (
    *(growths.RUN_LEAK, growths.STEP_LEAK, growths.GRAPH_LEAK, growths.OUT_LEAK),
    *(growths.ADAPTER_LEAK, growths.MODULE_LEAK),
)
_STATE = replace(
    processes.make_state(1, peak_gib=20),
    status="lost",
    running=RunningSpan("step", 371.0, 12),
    error="ValueError: 4111 of acme",
    ooms=(ooms.make_card(),),
)
#: What a page is made of, with the report of it.
_RECORDS: dict[str, tuple[object, Callable[[Any], Report]]] = {
    "ledger": ([examples.make_gpu_cell(), examples.make_host_cell()], report_ledger),
    "stat": (examples.make_stat(), report_stat),
    "trace": (traces.make_trace(), lambda trace: report_trace(trace, [])),
    "trace_host": (traces.make_host_trace(), lambda trace: report_trace(trace, [])),
    "untraced": (traces.make_untraced(), lambda trace: report_trace(trace, [])),
    "card": (ooms.make_card(predicted=predictions.REMEDIES), report_oom),
    "card_host": (ooms.make_host_card(), report_oom),
    "leaks": (_LEAKS, lambda leaks: report_leaks(leaks, (), ())),
    "growth": (
        (UnexplainedGrowth("In [3]", "cuda:0", 1 << 20, 4, is_outside=True),),
        lambda growth: report_leaks((), growth, ()),
    ),
    "account": (accounts.make_account(), report_account),
    "account_big": (
        accounts.make_big_account(),
        lambda account: report_account(account, is_whole=True),
    ),
    "account_odd": (accounts.make_odd_account(), report_account),
    "parts": ((devices.make_busy_breakdown(), devices.make_host_breakdown()), report_breakdown),
    "process": (_STATE, lambda state: report_processes([state])),
    "processes": (
        (_STATE, processes.make_state(0, peak_gib=26)),
        report_processes,
    ),
}
#: Fields that have no text of the user's.
_LISTED = """
    device kind key merged status peak_is unit root dtype role gives_is relation library tensor
    by_device own_bytes silent_libraries DeviceInfo.name Breakdown.name OomCard.notes
"""
_OURS = set(_LISTED.split())


def _change(value: Any, change: Callable[[str], str], field: str = "") -> Any:
    """Change every text of the user's."""
    if isinstance(value, str):
        return value if {field, field.rpartition(".")[2]} & _OURS else change(value)
    if isinstance(value, Mapping):
        return {k: _change(v, change, field) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([_change(item, change, field) for item in value])
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    name = type(value).__name__
    return replace(
        value,
        **{
            f.name: _change(getattr(value, f.name), change, f"{name}.{f.name}")
            for f in dataclasses.fields(value)
        },
    )


def _list_words(text: str) -> Iterator[str]:
    return (match[0] for match in re.finditer(r"[^\W\d_]+", text))


@pytest.mark.parametrize("kind", sorted(_RECORDS.keys() - {"account_big"}))
@settings(max_examples=10)
@given(
    letters=st.text("qxzßж模", min_size=4, max_size=6),
    digits=st.text("0123456789", min_size=7, max_size=8),
    symbols=st.text("€¤§#@|", min_size=3, max_size=4),
)
def test_nothing_of_the_users_is_left(kind: str, letters: str, digits: str, symbols: str) -> None:
    """Neither letters, digits nor symbols, in whatever field of a record they are."""
    record, report = _RECORDS[kind]

    marked = _change(record, lambda text: re.sub(r"\w+", f"{letters}{digits}{symbols}", text))
    shown = report(Redaction().redact(marked))

    for form in (shown.html, shown.text):
        assert letters not in form
        assert digits not in form
        assert symbols not in form


@pytest.mark.parametrize("kind", _RECORDS)
def test_figures_and_words_of_ours_stay(kind: str) -> None:
    """All amounts, and every word that is in no text of the user's."""
    record, report = _RECORDS[kind]
    users: set[str] = set()
    _change(record, lambda text: users.update(_list_words(clean(text))) or text)

    plain, redacted = report(record).html, report(Redaction().redact(record)).html

    assert list_amounts(redacted) == list_amounts(plain)
    words, left = (Counter(_list_words(_strip(html))) for html in (plain, redacted))
    assert [word for word in words if word not in users and words[word] > left[word]] == []
    assert redacted.count("<tr") == plain.count("<tr")


def _strip(html: str) -> str:
    # The width of a column and a title depend on the length of a text.
    return unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", html, flags=re.DOTALL))


def test_paths_keep_their_shape() -> None:
    """Names, keys and numbers have placeholders of their own; our words and structure stay."""
    redaction = Redaction()
    steps = {
        ("acme", ".layers", "[0]", ".weight"): ("name_a", ".name_b", "[0]", ".name_c"),
        ("acme", ".layers", "[4711]", "'s graph"): ("name_a", ".name_b", "[1]", "'s graph"),
        ('acme["key 4711.x"]',): ('name_a["name-d1name-e"]',),
        ("rubbish (gc.collect() frees it)", ": Acme"): (
            *("rubbish (gc.collect() frees it)", ": name_f"),
        ),
        ("last exception", ": train() line 12", ": batch"): (
            *("last exception", ": name_g() line 12", ": name_h"),
        ),
        ("Out[7]", "[0]"): ("Out[7]", "[0]"),
        ("Python's own objects and libraries",): ("Python's own objects and libraries",),
        ("not a name!",): ("name_i a name-j",),
    }

    found = [
        redaction.redact(Owned("cuda:0", 512, "tensor", given, "name")).steps for given in steps
    ]

    assert found == list(steps.values())


@pytest.mark.parametrize(
    "words",
    [
        *(LENDER, UNNAMED, UNSEEN, LAST_EXCEPTION, *get_args(MemoryKind)),
        *("held where Python can't see", "none of your variables", "no name"),
        *(
            "cuBLAS workspace in the private pool of",
            "allocated on cuda:1, held by no Python object",
        ),
        *(
            ": saved by",
            "'s gradient buckets",
            "'s closure: ",
            "'s default: ",
            "'s cache",
            "'s key",
        ),
        *(" (its cause)", " (its context)", ": top level", "context variable", "running"),
        "perhaps a gradient bucket of DistributedDataParallel",
    ],
)
def test_words_for_what_has_no_name_stay(words: str) -> None:
    """They say what memory is for that no variable leads to."""
    owned = Owned("cuda:1", 512, "tensor", (words,), "nowhere")

    found = Redaction().redact(owned)

    assert found == owned


def test_a_remedys_kind_stays() -> None:
    """The module's path has placeholders, and the code is left out."""
    redaction = Redaction()

    found = [
        redaction.redact(replace(predictions.REMEDIES[0], name=name, command="acme.fit()"))
        for name in ("no_grad", "checkpointing of acme.tower", "no_grad of acme", "acme")
    ]

    assert [(remedy.name, remedy.command) for remedy in found] == [
        ("no_grad", ""),
        ("checkpointing of name_a.name_b", ""),
        ("hidden 1", ""),
        ("hidden 2", ""),
    ]


def test_an_unknown_container_is_refused() -> None:
    """It could have texts that nobody replaces."""
    with pytest.raises(TypeError, match="set may have texts"):
        Redaction().redact({"acme"})
