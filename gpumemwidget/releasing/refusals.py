"""Refuse a release before anything is changed: wrong names, a capture, another thread at work.

A cell on the main thread is waited for elsewhere. Two users of memory are shown by no cell: a CUDA
graph that is being captured, which any call that synchronises or frees would break; and another
thread that computes with the chosen objects.
"""

from __future__ import annotations

import builtins
import difflib
import gc
import re
import threading
from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from gpumemwidget.errors import BadInputError, UnknownNameError
from gpumemwidget.model.releases import Stop, StopKind
from gpumemwidget.ownership.graph.kinds import Kind
from gpumemwidget.ownership.graph.objects import is_one_of, iterate_frames, read_locals
from gpumemwidget.ownership.graph.torch_reader import find_torch
from gpumemwidget.ownership.holdings import Account, join_marks
from gpumemwidget.ownership.shell import Shell

#: A variable, and the begin of a way to a part of it.
_PART = re.compile(r"([^\W\d]\w*)[.\[]")

_UNCHANGED = "nothing was changed"


def check_bound(shell: Shell, names: Sequence[str], *, rows: Mapping[str, str]) -> None:
    """Refuse what is no variable of the user's.

    Raises:
        UnknownNameError: there is no such name; close ones are named.
        BadInputError: it is IPython's, Python's or a module.
    """
    known = shell.list_user_names()
    for name in names:
        if name in known:
            continue
        if name in shell.user_ns or hasattr(builtins, name):
            raise BadInputError(
                f"{name!r} is a module, a builtin or IPython's own: name variables, or rows such "
                f"as Out[3]; {_UNCHANGED}"
            )
        if find_part(shell, [name]):
            raise BadInputError(
                f"{name!r} is a part of a variable, and only whole variables can be released: "
                f"%memwhy {name} names what frees it; {_UNCHANGED}"
            )
        close = difflib.get_close_matches(name, [*known, *rows], n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else shell.names_hint
        raise UnknownNameError(f"{name!r} is not a variable: {hint}; {_UNCHANGED}")


def find_part(shell: Shell, names: Sequence[str]) -> str | None:
    """Return the first of these names that is a path to a part of a variable, if any is one."""
    known = shell.list_user_names()
    parts = ((name, _PART.match(name)) for name in names if name not in known)
    return next((name for name, part in parts if part is not None and part[1] in known), None)


def holds_memory(account: Account | None, name: str) -> bool:
    """Return whether a variable was seen to lead to tensor memory."""
    row = None if account is None else account.rows.get(name)
    return account is not None and row is not None and bool(account.list_storages(row.mark))


def check_functions(shell: Shell, names: Sequence[str], account: Account | None) -> None:
    """Refuse functions and classes, unless they hold memory (in a closure, a cache).

    Raises:
        BadInputError: it is a function or class that holds none.
    """
    for name in names:
        code_types = (FunctionType, BuiltinFunctionType, MethodType, type)
        is_code = is_one_of(type(shell.user_ns[name]), *code_types)
        if is_code and not holds_memory(account, name):
            is_cut = account is not None and not account.graph.is_complete
            found = "was not seen to hold" if is_cut else "holds no"
            raise BadInputError(
                f"{name!r} is a function or a class and {found} tensor memory: name variables; "
                f"{_UNCHANGED}"
            )


def find_capture() -> Stop | None:
    """Return that a CUDA graph is being captured; ``None`` where none is.

    Torch knows it of the current stream of this thread. Captures on others are found by the streams
    that ``torch.cuda.graph`` takes for them.
    """
    torch: Any = find_torch()
    if torch is None or not torch.cuda.is_initialized() or not _is_capturing(torch):
        return None
    return Stop(StopKind.CAPTURE)


def _is_capturing(torch: Any) -> bool:
    cuda = torch.cuda
    # To ask for a device that is not in use, as the current one may be, would start it.
    has_context = torch._C._cuda_hasPrimaryContext(cuda.current_device())  # noqa: SLF001 - no public call asks without creating one
    if has_context and cuda.is_current_stream_capturing():
        return True
    if threading.active_count() == 1:
        return False
    captures = [capture for capture in gc.get_objects() if type(capture) is cuda.graph]
    streams = [vars(capture).get("capture_stream") for capture in captures]
    streams.append(vars(cuda.graph).get("default_capture_stream"))
    for stream in {id(stream): stream for stream in streams if stream is not None}.values():
        # The device first: else what was current before would be set anew, and so started.
        with cuda.device(stream.device), cuda.stream(stream):
            if cuda.is_current_stream_capturing():
                return True
    return False


def find_user(shell: Shell, account: Account, names: Sequence[str]) -> Stop | None:
    """Return which other thread uses what these rows hold; ``None`` if none does.

    A thread uses it if one of its running functions has one of the tensors, modules or optimizers
    in a variable, or mentions one of the names.
    """
    graph, reader = account.graph, account.graph.reader
    rows = [account.rows[name] for name in names if name in account.rows]
    marks = join_marks(row.mark for row in rows)
    chosen = {
        id(graph.objects[place])
        for place, kind in enumerate(graph.kinds)
        if account.marks[place] & marks
        and (
            kind is Kind.TENSOR
            or is_one_of(type(graph.objects[place]), reader.module_type, reader.optimizer_type)
        )
    }
    words = {row.name for row in rows if row.root == "name"}
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    for ident, frame in iterate_frames():
        code = frame.f_code
        is_named = frame.f_globals is shell.user_ns and not words.isdisjoint(code.co_names)
        if ident != own and (
            is_named or any(id(value) in chosen for value in read_locals(frame).values())
        ):
            return Stop(
                StopKind.THREAD,
                thread=threads.get(ident, str(ident)),
                function=code.co_name,
                line=frame.f_lineno,
            )
    return None
