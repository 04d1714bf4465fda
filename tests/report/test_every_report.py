"""What holds for each report, whatever it is about."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from gpumemwidget.report.render.blocks import Cell, Column, Table
from gpumemwidget.report.render.text import render_table
from tests.report.every_report import GOLDEN, make_every_report
from tests.report.pages import Page, list_amounts, list_charts

_REPORTS = make_every_report()
_PAGES = {name: Page(report.html) for name, report in _REPORTS.items()}

#: Properties that JupyterLab's sanitizer keeps.
_KEPT_PROPERTIES = {
    *("background", "border", "border-left", "border-radius", "border-top", "box-sizing"),
    *("caption-side", "color", "display", "float", "font-weight", "height", "justify-content"),
    *("left", "list-style-type", "margin", "margin-left", "margin-right", "max-width"),
    *("min-width", "overflow", "overflow-x", "padding", "padding-left", "position"),
    *("table-layout", "text-align", "text-overflow", "vertical-align", "white-space", "width"),
}


@pytest.mark.parametrize("name", sorted(_REPORTS))
def test_report_is_as_reviewed(name: str) -> None:
    """The whole text, and the whole HTML, are those that were looked at and kept."""
    text = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    html = (GOLDEN / f"{name}.html").read_text(encoding="utf-8")

    assert _REPORTS[name].text + "\n" == text
    assert _REPORTS[name].html + "\n" == html


def test_no_golden_file_is_left_over() -> None:
    """Each golden file belongs to a report, so none lies there untested."""
    expected = {f"{name}.{suffix}" for name in _REPORTS for suffix in ("txt", "html")}

    assert {path.name for path in GOLDEN.iterdir()} == expected


def test_text_and_html_say_the_same_amounts() -> None:
    """Each amount of the text stands in the HTML, with the same mark, as often as in the text."""
    for name, report in _REPORTS.items():
        assert list_amounts(_PAGES[name].text) == list_amounts(report.text), name


def test_html_is_one_well_formed_element() -> None:
    """Each element is closed, and all lies in one, its style sheet too: nothing else is changed."""
    for name, page in _PAGES.items():
        assert page.errors == [], name
        assert page.elements[0][0] == "div", name
        assert "gmw" in str(page.elements[0][1]["class"]).split(), name
        assert page.elements[1][0] == "style", name
        assert _REPORTS[name].html.endswith("</div>"), name


def test_html_runs_and_loads_nothing() -> None:
    """No script, no handler, nothing fetched: a saved report is only what it holds."""
    for name, page in _PAGES.items():
        tags = {tag for tag, _ in page.elements}
        attributes = {name for _, attributes in page.elements for name in attributes}

        loading = {"script", "img", "link", "iframe", "object", "embed", "use", "image", "a"}
        assert not tags & loading, name
        assert not attributes & {"src", "href", "xlink:href"}, name
        assert not [attribute for attribute in attributes if attribute.startswith("on")], name
        assert not re.search(r"url\(|@import|@font-face", _REPORTS[name].html), name


def test_styles_on_elements_are_kept_by_jupyterlab() -> None:
    """Each is a property that JupyterLab's sanitizer knows, once, with a value of plain words.

    Its list: https://github.com/jupyterlab/jupyterlab/blob/main/packages/apputils/src/sanitizer.ts
    """
    styles = {
        style
        for page in _PAGES.values()
        for _, attributes in page.elements
        if (style := attributes.get("style")) is not None
    }

    assert styles
    for style in styles:
        properties = [declaration.split(":")[0] for declaration in style.split(";")]
        assert len(set(properties)) == len(properties), style
        assert set(properties) <= _KEPT_PROPERTIES, style
        assert not re.search(r"(?:var|calc|min|max|url)\(|inherit|!important", style), style


def test_styles_touch_only_the_report() -> None:
    """Each rule begins at a class of ours, so the page around keeps its look."""
    sheets = {
        sheet
        for report in _REPORTS.values()
        for sheet in re.findall(r"<style>(.*?)</style>", report.html, re.DOTALL)
    }

    assert sheets
    for sheet in sheets:
        rules = re.sub(r"@keyframes gmw-\w+\{(?:[^{}]*\{[^{}]*\})*\}", "", sheet)
        rules = re.sub(r"@(?:container|supports)[^{]*\{", "", rules)
        selectors = [
            selector for rule in re.findall(r"([^{}]+)\{", rules) for selector in rule.split(",")
        ]
        assert selectors, sheet
        assert [one for one in selectors if not one.strip().startswith(".gmw")] == []


def test_tables_are_readable_without_eyes() -> None:
    """Each table has a caption, and each header cell says what it heads."""
    for name, page in _PAGES.items():
        tags = [tag for tag, _ in page.elements]
        scopes = {attributes.get("scope") for tag, attributes in page.elements if tag == "th"}

        assert tags.count("caption") == tags.count("table"), name
        assert scopes <= {"col", "row", "rowgroup"}, name


def test_charts_are_xml_and_described() -> None:
    """Each chart is well-formed SVG, and says in words what it shows."""
    for name, report in _REPORTS.items():
        for chart in list_charts(report.html):
            root = ElementTree.fromstring(chart)

            assert root.attrib["role"] == "img", name
            assert root.attrib["aria-label"], name
            assert root.attrib["viewBox"] in {"0 0 600 100", "0 0 1000 400"}, name


def test_text_is_plain() -> None:
    """No HTML, nothing that acts on a terminal, no space at a line's end; in Windows' code page."""
    for name, report in _REPORTS.items():
        assert "gmw" not in report.text, name
        assert "&nbsp;" not in report.text, name
        assert all(character == "\n" or character.isprintable() for character in report.text), name
        assert [line for line in report.text.split("\n") if line != line.rstrip()] == [], name
        assert not report.text.endswith("\n"), name
        report.text.encode("cp1252")


def test_text_keeps_to_80_columns() -> None:
    """Usual numbers fit; marked ones, source, and the one-line report, may need more."""
    limits = {"cell_two_gpus": 84, "ledger_predicted": 82, "ledger_grows": 91}
    for name, report in _REPORTS.items():
        widest = max(map(len, report.text.split("\n")))

        if name.startswith("line_"):
            assert "\n" not in report.text, name
        elif name.startswith(("trace", "prediction")):
            assert widest <= (103 if name == "prediction_no_device" else 100), name
        else:
            assert widest <= limits.get(name, 80), name


def test_small_enough_to_be_saved_under_every_cell() -> None:
    """What each traced cell adds to the notebook's file, in bytes."""
    assert len(_REPORTS["line_gpu"].html) < 700
    assert len(_REPORTS["cell_host"].html) < 6_300
    assert len(_REPORTS["cell_gpu"].html) < 8_000
    assert len(_REPORTS["cell_two_gpus"].html) < 10_900
    assert len(_REPORTS["trace"].html) < 50_000
    assert len(_REPORTS["trace_long"].html) < 60_000


def test_shows_itself() -> None:
    """A notebook takes the HTML, a terminal the text."""
    report = _REPORTS["trace"]

    assert str(report) == repr(report) == report.text
    assert report._repr_html_() == report.html


def test_wide_letters_keep_the_columns() -> None:
    """A name in Chinese takes two columns a letter, one with a joined accent no more than one."""
    rows = tuple((Cell(name), Cell("1")) for name in ("模型", "n\u0303", "batch"))
    table = Table("names", (Column("name", "code"), Column("n")), (rows,), caption_is_seen=False)

    assert render_table(table).splitlines()[1:] == ["模型   1", "n\u0303      1", "batch  1"]
