"""Check the names that a person asks an account for, before it is reported."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

from gpumemwidget.errors import BadInputError, UnknownNameError
from gpumemwidget.model.ownership import MemoryAccount
from gpumemwidget.report.account import list_rows
from gpumemwidget.units import format_duration


def check_rows(account: MemoryAccount, names: Sequence[str], bound: Collection[str]) -> None:
    """Refuse names that are no rows of the account; ``bound`` are all of the user's variables.

    Raises:
        BadInputError: it is a variable and holds nothing.
        UnknownNameError: there is no such name; close ones are named.
    """
    rows = [variable.name for variable in account.variables]
    rows += [row.name for part in account.devices for row, _ in list_rows(part.owned)]
    rows += [array.name for array in account.library_arrays]
    for name in names:
        if name in rows:
            continue
        if name in bound:
            if account.is_complete:
                raise BadInputError(f"{name!r} holds no tensor memory: %memvars lists what does")
            raise BadInputError(
                f"no tensor memory was found in {name!r}: there were too many objects to look at "
                f"in {format_duration(account.duration_s)}"
            )
        close = difflib.get_close_matches(name, dict.fromkeys([*rows, *bound]), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "%memvars lists what there is"
        raise UnknownNameError(f"{name!r} is neither a variable nor a row of the account: {hint}")
