"""What stands behind a magic, read; and refusals in one line.

A refusal is IPython's own ``UsageError``, which it shows in one line; its subclasses would come
with a traceback.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics

from gpumemwidget.errors import BadInputError, GpuMemError

__all__ = ["list_magics", "parse_line", "refusing", "unquote"]


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Our errors, and the parser's, as one line.

    Args:
        name: of the magic.
    """
    try:
        yield
    except _ParseError as exc:
        raise UsageError(f"%{name}: {exc}; %{name}? shows what it takes") from None
    except GpuMemError as exc:
        raise UsageError(str(exc)) from None


class _ParseError(BadInputError):
    """A line that is not what the magic takes."""


def parse_line(magic: Any, line: str) -> argparse.Namespace:
    """The arguments of a magic.

    Args:
        magic: its method.
        line: what was typed behind its name.

    Raises:
        BadInputError: that is not what it takes.
    """
    try:
        args: argparse.Namespace = magic.parser.parse_argstring(line)
    except (UsageError, ValueError) as exc:
        # ValueError: a quote that is not closed.
        raise _ParseError(str(exc)) from None
    return args


def unquote(text: str) -> str:
    """The text without quotes around it: IPython's splitting leaves them where they were."""
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    return text


def list_magics(magics: Magics) -> list[tuple[str, str]]:
    """The kind (``line``, ``cell``) and the name of each magic of an object."""
    return [(kind, name) for kind, table in magics.magics.items() for name in table]
