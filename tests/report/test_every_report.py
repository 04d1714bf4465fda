"""What holds for each report, whatever it is about."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from gpumemwidget.report.report import Report
from tests.report.every_report import GOLDEN, make_every_report
from tests.report.pages import Page, list_amounts, list_charts

_REPORTS = make_every_report()


@pytest.fixture(params=sorted(_REPORTS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def report(name: str) -> Report:
    return _REPORTS[name]


def test_text_is_as_reviewed(name: str, report: Report) -> None:
    """The whole text is the one that was looked at and kept."""
    golden = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")

    assert report.text + "\n" == golden


def test_html_is_as_reviewed(name: str, report: Report) -> None:
    """The whole HTML is the one that was looked at and kept."""
    golden = (GOLDEN / f"{name}.html").read_text(encoding="utf-8")

    assert report.html + "\n" == golden


def test_no_golden_file_is_left_over() -> None:
    """Each golden file belongs to a report, so none lies there untested."""
    expected = {f"{name}.{suffix}" for name in _REPORTS for suffix in ("txt", "html")}

    assert {path.name for path in GOLDEN.iterdir()} == expected


def test_text_and_html_say_the_same_amounts(report: Report) -> None:
    """Each amount of the text stands in the HTML, with the same mark, as often as in the text."""
    assert list_amounts(Page(report.html).text) == list_amounts(report.text)


def test_html_is_well_formed(report: Report) -> None:
    """Each element is closed where it should be, so no report can swallow what follows it."""
    assert Page(report.html).errors == []


def test_html_is_one_element(report: Report) -> None:
    """All of a report lies in one element, its style sheet too."""
    page = Page(report.html)

    assert page.elements[0][0] == "div"
    assert "gmw" in str(page.elements[0][1]["class"]).split()
    assert page.elements[1][0] == "style"
    assert report.html.endswith("</div>")


def test_html_runs_and_loads_nothing(report: Report) -> None:
    """No script, no handler, nothing fetched: a saved report is only what it holds."""
    page = Page(report.html)
    tags = {tag for tag, _ in page.elements}
    attributes = {name for _, attributes in page.elements for name in attributes}

    assert not tags & {"script", "img", "link", "iframe", "object", "embed", "use", "image", "a"}
    assert not attributes & {"src", "href", "xlink:href", "style"}
    assert not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"url\(|@import|@font-face", report.html)


def test_styles_touch_only_the_report(report: Report) -> None:
    """Each rule begins at a class of ours, so the page around keeps its look."""
    style = re.search(r"<style>(.*?)</style>", report.html)
    assert style is not None
    rules = re.sub(r"@(?:container|supports)[^{]*\{", "", style[1])

    selectors = [
        selector for rule in re.findall(r"([^{}]+)\{", rules) for selector in rule.split(",")
    ]

    assert selectors
    assert [one for one in selectors if not one.strip().startswith(".gmw")] == []


def test_tables_are_readable_without_eyes(report: Report) -> None:
    """Each table has a caption, and each header cell says what it heads."""
    elements = Page(report.html).elements
    tags = [tag for tag, _ in elements]

    assert tags.count("caption") == tags.count("table")
    scopes = {attributes.get("scope") for tag, attributes in elements if tag == "th"}
    assert scopes <= {"col", "row", "rowgroup"}


def test_charts_are_xml_and_described(report: Report) -> None:
    """Each chart is well-formed SVG, and says in words what it shows."""
    for chart in list_charts(report.html):
        root = ElementTree.fromstring(chart)

        assert root.attrib["role"] == "img"
        assert root.attrib["aria-label"]
        assert root.attrib["viewBox"] in {"0 0 600 100", "0 0 1000 400"}


def test_text_is_plain(report: Report) -> None:
    """No HTML of ours, nothing that acts on a terminal, and no space at a line's end."""
    assert "gmw" not in report.text
    assert "&nbsp;" not in report.text
    assert all(character == "\n" or character.isprintable() for character in report.text)
    assert [line for line in report.text.split("\n") if line != line.rstrip()] == []
    assert not report.text.endswith("\n")


def test_text_can_be_printed_on_a_windows_console(report: Report) -> None:
    """All characters are in the code page that Python takes there for a pipe."""
    report.text.encode("cp1252")


def test_text_keeps_to_80_columns(name: str, report: Report) -> None:
    """Usual numbers fit; marked ones, source, and the one-line report, may need more."""
    widest = max(map(len, report.text.split("\n")))

    if name.startswith("line_"):
        assert "\n" not in report.text
    elif name.startswith("trace"):
        assert widest <= 100
    else:
        assert widest <= (84 if name == "cell_two_gpus" else 80)


def test_small_enough_to_be_saved_under_every_cell() -> None:
    """What each traced cell adds to the notebook's file, in bytes."""
    assert len(_REPORTS["line_gpu"].html) < 700
    assert len(_REPORTS["cell_host"].html) < 5_500
    assert len(_REPORTS["cell_gpu"].html) < 7_000
    assert len(_REPORTS["cell_two_gpus"].html) < 9_500
    assert len(_REPORTS["trace"].html) < 36_000
    assert len(_REPORTS["trace_long"].html) < 60_000


def test_shows_itself(report: Report) -> None:
    """A notebook takes the HTML, a terminal the text."""
    assert str(report) == repr(report) == report.text
    assert report._repr_html_() == report.html
    assert report._repr_mimebundle_() == {"text/plain": report.text, "text/html": report.html}
