"""Writes the reference of the magics into a page, from the parsers that the magics themselves use.

A page that has the line ``<!-- magics -->`` gets, in its place, a section for each magic that
``%load_ext gpumemwidget`` registers: its description, its usage, and a table of its arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from sphinx.application import Sphinx
from traitlets.config import Config

import gpumemwidget

MARK = "<!-- magics -->\n"
#: What is set as code in a sentence: magics, options, calls, environment variables and devices.
_CODE = re.compile(
    r"%{1,2}[a-z_]+\b"
    r"|(?<![\w-])--[a-z]+(?:-[a-z]+)*(?: [A-Z]+\b)?"
    r"|[A-Za-z_][\w.]*\([^)]*\)"
    r"|[A-Za-z_]\w*(?:\.\w+|\[\d+\])+(?:/\w+)*"
    r"|\bcuda:\d"
    r"|(?<!\w)\.(?:csv|json|parquet|pickle)\b"
)
#: How the paragraph of a magic's description begins that is a command.
_EXAMPLE = "Example: "
_MARKDOWN = re.compile(r"([\\`*_<>|\[\]])")


def setup(app: Sphinx) -> dict[str, Any]:
    """Hook into Sphinx, where it reads a page's source."""
    app.connect("source-read", _insert_magics)
    return {"parallel_read_safe": True}


def _insert_magics(_app: Sphinx, _page: str, source: list[str]) -> None:
    if MARK in source[0]:
        source[0] = source[0].replace(MARK, describe_magics())


def describe_magics() -> str:
    """Return a section of Markdown for each magic that the extension registers, by name."""
    parsers = find_parsers()
    return "\n".join(_describe_magic(parsers[name]) for name in sorted(parsers))


def find_parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each magic that ``%load_ext gpumemwidget`` registers, by name."""
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell(config=config)
    before = _list_magics(shell)
    with contextlib.redirect_stdout(io.StringIO()):
        gpumemwidget.load_ipython_extension(shell)
        added = {name: each for name, each in _list_magics(shell).items() if name not in before}
        gpumemwidget.unload_ipython_extension(shell)
    return {name: magic.parser for name, magic in added.items()}


def _list_magics(shell: InteractiveShell) -> dict[str, Any]:
    tables = shell.magics_manager.magics
    return {**tables["cell"], **tables["line"]}


def _describe_magic(parser: argparse.ArgumentParser) -> str:
    usage = parser.format_usage().replace("::", "").split()
    paragraphs = re.split(r"\n\s*\n", (parser.description or "").strip())
    rows = [_describe_argument(action) for action in parser._actions]
    table = ["| argument | meaning |", "|---|---|", *rows, ""] if rows else []
    return "\n".join(
        [
            f"## `{usage[0]}`",
            "",
            *(f"{_mark_code(paragraph)}\n" for paragraph in paragraphs),
            "```text",
            *_wrap_usage(usage),
            "```",
            "",
            *table,
        ]
    )


def _wrap_usage(words: list[str]) -> list[str]:
    """Lines of at most 76 characters that break before an option, and never within one."""
    indent = " " * (len(words[0]) + 1)
    lines = [words[0]]
    for part in re.findall(r"\[.*?\]+|\S+", " ".join(words[1:])):
        if len(lines[-1]) + len(part) >= 76:
            lines.append(f"{indent}{part}")
        else:
            lines[-1] += f" {part}"
    return lines


def _describe_argument(action: argparse.Action) -> str:
    value = action.metavar or ""
    if action.option_strings:
        value = f"[{value}]" if action.nargs == "?" else value
        shown = " ".join(filter(None, (", ".join(action.option_strings), str(value))))
    else:
        shown = f"{value} …" if action.nargs in ("*", "+") else str(value)
    # As argparse itself fills in a help text.
    meaning = (action.help or "") % vars(action)
    return f"| `{shown.replace('|', chr(92) + '|')}` | {_mark_code(meaning)} |"


def _mark_code(text: str) -> str:
    """One line of Markdown that shows a plain text, with commands and names as code."""
    text = " ".join(text.split()).replace("``", "")
    if text.startswith(_EXAMPLE):
        return f"{_EXAMPLE}`{text.removeprefix(_EXAMPLE)}`"
    shown = []
    end = 0
    for match in _CODE.finditer(text):
        shown += [_MARKDOWN.sub(r"\\\1", text[end : match.start()]), f"`{match[0]}`"]
        end = match.end()
    shown.append(_MARKDOWN.sub(r"\\\1", text[end:]))
    return "".join(shown)
