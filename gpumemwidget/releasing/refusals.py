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
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import (
    BuiltinFunctionType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

from gpumemwidget.errors import BadInputError, UnknownNameError
from gpumemwidget.ownership.graph.kinds import Kind
from gpumemwidget.ownership.graph.objects import (
    is_one_of,
    read_class_attribute,
    read_locals,
    read_type_dict,
)
from gpumemwidget.ownership.graph.torch_reader import find_torch
from gpumemwidget.ownership.holdings import Account
from gpumemwidget.ownership.shell import Shell

#: A variable, and the begin of a way to a part of it.
_PART = re.compile(r"([^\W\d]\w*)[.\[]")

_CODE_TYPES = (FunctionType, BuiltinFunctionType, MethodType, type)


def check_bound(shell: Shell, names: Sequence[str], *, rows: Mapping[str, str]) -> None:
    """Refuse what is no variable of the user's.

    Raises:
        UnknownNameError: there is no such name; close ones are told.
        BadInputError: it is IPython's, Python's or a module.
    """
    known = shell.list_user_names()
    for name in names:
        if name in known:
            continue
        if name not in shell.user_ns:
            if hasattr(builtins, name):
                raise BadInputError(f"{name!r} is a builtin: name variables; nothing was changed")
            part = _PART.match(name)
            if part is not None and part[1] in known:
                raise BadInputError(
                    f"{name!r} is a part of {part[1]}, and only whole variables can be released: "
                    f"%memrelease {part[1]}; nothing was changed"
                )
            close = difflib.get_close_matches(name, [*known, *rows], n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "%who lists what there is"
            raise UnknownNameError(f"{name!r} is no variable: {hint}; nothing was changed")
        if is_one_of(type(shell.user_ns[name]), ModuleType):
            raise BadInputError(
                f"{name!r} is a module and stays imported: name variables; nothing was changed"
            )
        raise BadInputError(
            f"{name!r} is IPython's own: name a variable, a row such as Out[3], or give --out; "
            "nothing was changed"
        )


def check_functions(shell: Shell, names: Sequence[str], account: Account | None) -> None:
    """Refuse functions and classes, unless they hold memory (in a closure, a cache).

    Raises:
        BadInputError: it is a function or class that holds none.
    """
    for name in names:
        cls = type(shell.user_ns[name])
        row = None if account is None else account.rows.get(name)
        holds = account is not None and row is not None and account.list_storages(row.mark)
        if not holds and is_one_of(cls, *_CODE_TYPES):
            raise BadInputError(
                f"{name!r} is a function or a class and holds no tensor memory: name variables; "
                "nothing was changed"
            )


#: Nodes of a running backward that are looked at.
_MOST_NODES = 10_000

_UNCHANGED = "nothing was changed"

#: Python's side of a running backward.
_BACKWARD = "_engine_run_backward"


def find_capture() -> str | None:
    """Why nothing may be done while a CUDA graph is captured; ``None`` where none is.

    Torch tells of the current stream of this thread. Of captures on others it tells by the streams
    that ``torch.cuda.graph`` takes for them. XPU has such graphs in later releases.
    """
    torch: Any = find_torch()
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is None or not module.is_initialized():
            continue
        is_capturing = getattr(module, "is_current_stream_capturing", None)
        if is_capturing is None:
            continue
        graph = f"{'a CUDA' if kind == 'cuda' else 'an XPU'} graph"
        # To ask for a device that is not in use, as the current one may be, would start it.
        if _has_context(torch, kind) and is_capturing():
            return (
                f"{graph} is being captured on this thread's stream, and to free or copy memory "
                f"would break it: release after the capture; {_UNCHANGED}"
            )
        for stream in _list_capture_streams(module):
            # The device first: else what was current before would be set anew, and so started.
            with module.device(stream.device), module.stream(stream):
                is_busy = is_capturing()
            if is_busy:
                return (
                    f"{graph} is being captured on another stream, and to free or copy memory "
                    f"would break it: release after the capture; {_UNCHANGED}"
                )
    return None


def _has_context(torch: Any, kind: str) -> bool:
    """Return whether the current device is in use; XPU has all of its devices in use together."""
    has_context = getattr(torch._C, f"_{kind}_hasPrimaryContext", None)  # noqa: SLF001 - no public call asks without creating one
    return has_context is None or bool(has_context(getattr(torch, kind).current_device()))


def _list_capture_streams(module: Any) -> list[Any]:
    graph_class = getattr(module, "graph", None)
    if graph_class is None or threading.active_count() == 1:
        return []
    captures = [each for each in gc.get_objects() if type(each) is graph_class]
    streams = [vars(each).get("capture_stream") for each in captures]
    streams.append(vars(graph_class).get("default_capture_stream"))
    return list({id(each): each for each in streams if each is not None}.values())


def find_user(shell: Shell, account: Account, names: Sequence[str]) -> str | None:
    """Return which other thread uses what these rows hold, in one line; ``None`` if none does.

    A thread uses it whose functions, those that are running now, have one of the tensors, modules
    or optimizers in a variable, mention one of the names, or are in a backward that leads to one.

    Args:
        shell: whose namespace a function may mention names of.
        account: who holds what.
        names: the rows.
    """
    rows = [account.rows[name] for name in names if name in account.rows]
    chosen = _list_chosen(account, [row.mark for row in rows])
    words = {row.name for row in rows if row.root == "name"}
    namespace = shell.user_ns
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    frame: FrameType | None = None
    tops = [top for top in sys._current_frames().items() if top[0] != own]  # noqa: SLF001 - the one way to see them
    try:
        while tops:
            ident, frame = tops.pop()
            while frame is not None:
                used = _find_use(
                    account, frame, chosen, words if frame.f_globals is namespace else ()
                )
                if used is not None:
                    return (
                        f"thread {threads.get(ident, ident)!r} is in {frame.f_code.co_name}() line "
                        f"{frame.f_lineno}, which {used}: wait for its end; {_UNCHANGED}"
                    )
                frame = frame.f_back
        return None
    finally:
        # A frame that is kept keeps all that its callers have.
        del frame, tops


def _list_chosen(account: Account, marks: Sequence[int]) -> dict[int, str]:
    """Return what a thread may have of these rows, by id, with a name for each."""
    graph = account.graph
    mark = 0
    for each in marks:
        mark |= each
    chosen: dict[int, str] = {}
    for place, kind in enumerate(graph.kinds):
        if not account.marks[place] & mark:
            continue
        cls = type(graph.objects[place])
        if kind is Kind.TENSOR:
            word = "tensor"
        elif is_one_of(cls, graph.reader.module_type):
            word = "module"
        elif is_one_of(cls, graph.reader.optimizer_type):
            word = "optimizer"
        else:
            continue
        chosen[id(graph.objects[place])] = f"{_name_rows(account, place, mark)} ({word})"
    return chosen


def _name_rows(account: Account, place: int, mark: int) -> str:
    return next(iter(account.name_holders(account.marks[place] & mark)))


def _find_use(
    account: Account, frame: FrameType, chosen: dict[int, str], words: Collection[str]
) -> str | None:
    """Return how a running function uses the chosen objects, to complete "which …"."""
    code = frame.f_code
    for name in code.co_names:
        if name in words:
            return f"mentions {name}"
    variables = read_locals(frame)
    for variable, value in variables.items():
        if id(value) in chosen:
            return f"has {chosen[id(value)]} in {variable}"
    if code.co_name == _BACKWARD:
        for each in _list_leaves(account, variables.get("t_outputs")):
            if id(each) in chosen:
                return f"runs a backward to {chosen[id(each)]}"
    return None


def _list_leaves(account: Account, outputs: Any) -> Iterator[object]:
    """The tensors that a backward leads to, by what of a graph does not change while it runs."""
    reader = account.graph.reader
    if not is_one_of(type(outputs), tuple, list):
        return
    met: dict[int, Any] = {}
    with reader.quiet():
        tensors = [each for each in outputs if is_one_of(type(each), reader.tensor_type)]
        pending: list[Any] = [reader.read_tensor(each).grad_fn for each in tensors]
        while pending and len(met) < _MOST_NODES:
            node = pending.pop()
            if node is None or id(node) in met:
                continue
            met[id(node)] = node
            following, leaf = _read_way(reader.torch, node)
            pending.extend(following)
            if leaf is not None:
                yield leaf


def _read_way(torch: Any, node: Any) -> tuple[list[Any], object | None]:
    """The nodes that follow, and the tensor whose gradient is accumulated."""
    function_class: Any = torch._C._FunctionBase  # noqa: SLF001 - has no public name
    cls = type(node)
    is_python = is_one_of(cls, function_class)
    read: Any = (
        function_class.next_functions if is_python else read_type_dict(cls)["next_functions"]
    )
    is_leaf = type(read_class_attribute(cls, "variable")) is GetSetDescriptorType
    return [each[0] for each in read.__get__(node)], node.variable if is_leaf else None
