"""Record when calls of modules and of backward begin and end, without a wrapper around them.

``sys.monitoring`` (Python 3.12 and later) watches two functions of torch's and nothing else, so
that all other code runs as fast as ever and no traceback shows a frame of ours. An error that
leaves a function is no event: such a call ends at the next call whose stack lacks its frame.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType, ModuleType
from typing import Any, Literal

from gpumemwidget.backends.hooks import TorchImportHook, find_monitoring, take_tool_number
from gpumemwidget.errors import Notes, describe_exception, is_from_signal_handler
from gpumemwidget.model.devices import Frame
from gpumemwidget.model.traces import CallMark, NoteKind, TraceNote

#: Maximum number of frames of a stack that are looked through.
_MAX_FRAMES = 1_000

_read_class_name: Callable[[type], str] = vars(type)["__name__"].__get__


class CallRecorder:
    """A recorder of the first ``n_marks`` calls in all threads, from ``start`` to ``stop``.

    Before Python 3.12 nothing is recorded.
    """

    def __init__(
        self, *, n_marks: int = 200_000, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._n_marks = n_marks
        self._clock_ns = clock_ns
        self._monitoring = find_monitoring()
        self._tool: int | None = None
        self._import_hook = TorchImportHook(self._attach)
        #: The code of the watched functions, and whether that is backward, by the code's identity:
        #: to hash code reads all of it.
        self._codes: dict[int, tuple[CodeType, bool]] = {}
        self._calls: list[_Call] = []
        #: Calls that run, the outermost first, by their threads.
        self._running: dict[int, list[_Call]] = {}
        self._notes: Notes[TraceNote] = Notes()

    def start(self) -> None:
        """Begin now, or when the user imports torch."""
        if self._monitoring is not None and self._tool is None:
            self._import_hook.expect()

    def stop(self) -> tuple[CallMark, ...]:
        """End the recording, and return the calls in the order in which they began."""
        self._import_hook.cancel()
        self._detach()
        calls, self._calls = self._calls, []
        self._running = {}
        return tuple(call.to_mark() for call in calls)

    def take_notes(self) -> tuple[TraceNote, ...]:
        """Return notes on what could not be recorded, each once."""
        return self._notes.take()

    # -- On and off --------------------------------------------------------------------------------

    def _attach(self, torch: ModuleType) -> None:
        codes = _find_codes(torch)
        tool = take_tool_number("gpumemwidget") if codes else None
        if tool is None:
            self._notes.add(TraceNote(NoteKind.CALLS_UNSEEN))
            return
        self._codes = codes
        self._tool = tool
        monitoring, events = self._monitoring, self._monitoring.events
        monitoring.register_callback(self._tool, events.PY_START, self._guard(self._begin))
        monitoring.register_callback(self._tool, events.PY_RETURN, self._guard(self._end))
        for code, _ in codes.values():
            monitoring.set_local_events(self._tool, code, events.PY_START | events.PY_RETURN)

    def _detach(self) -> None:
        tool, self._tool = self._tool, None
        codes, self._codes = tuple(self._codes.values()), {}
        if tool is None or self._monitoring.get_tool(tool) != "gpumemwidget":
            return  # Somebody else has freed it, and may have it now.
        monitoring, events = self._monitoring, self._monitoring.events
        for code, _ in codes:
            monitoring.set_local_events(tool, code, 0)
        monitoring.register_callback(tool, events.PY_START, None)
        monitoring.register_callback(tool, events.PY_RETURN, None)
        monitoring.free_tool_id(tool)

    # -- Within the user's calls -------------------------------------------------------------------

    def _guard(self, handle: Callable[[FrameType], Any]) -> Callable[..., Any]:
        """Return the callback of an event, which lets no error of ours into the user's call."""

        def call(_code: CodeType, *_details: object) -> Any:
            try:
                return handle(sys._getframe(1))  # noqa: SLF001 - inspect's public way takes far longer
            except RecursionError:
                return None  # The user's own code is about to fail; there is no room for a note.
            except Exception as exc:
                if is_from_signal_handler(exc):
                    raise
                self._notes.add(TraceNote(NoteKind.FAILED, describe_exception(exc)))
                return self._monitoring.DISABLE

        return call

    def _begin(self, frame: FrameType) -> Any:
        if len(self._calls) >= self._n_marks:
            return self._monitoring.DISABLE
        now_us = self._clock_ns() // 1000
        thread = threading.get_ident()
        running = self._running.setdefault(thread, [])
        is_backward = self._codes[id(frame.f_code)][1]
        # Calls that an error has left end here.
        enclosing = _find_enclosing_call(frame, self._codes) if running else 0
        while running and running[-1].frame_id != enclosing:
            running.pop().end(now_us)
        call = _Call(id(frame), thread, now_us, is_backward)
        if is_backward:
            call.frames = _take_stack(frame.f_back)
        else:
            outer = running[-1] if running else None
            module = frame.f_locals["self"]
            call.names = _name_modules(module) if outer is None or not outer.names else outer.names
            call.name = call.names.get(id(module)) or _read_class_name(type(module))
        running.append(call)
        self._calls.append(call)
        return None

    def _end(self, frame: FrameType) -> None:
        frame_id = id(frame)
        now_us = self._clock_ns() // 1000
        running = self._running.get(threading.get_ident(), [])
        if not any(call.frame_id == frame_id for call in reversed(running)):
            return  # The call began before the recording, or was one too many.
        while True:
            call = running.pop()
            call.end(now_us)
            if call.frame_id == frame_id:
                return


@dataclass(slots=True)
class _Call:
    #: The frame itself would hold the user's tensors.
    frame_id: int
    thread: int
    start_us: int
    is_backward: bool
    end_us: int | None = None
    name: str = ""
    frames: tuple[Frame, ...] = ()
    #: The paths of the modules below the outermost one, by their ids, while that runs.
    names: dict[int, str] = field(default_factory=dict)

    def end(self, end_us: int) -> None:
        self.end_us = end_us
        self.names = {}

    def to_mark(self) -> CallMark:
        kind: Literal["backward", "module"] = "backward" if self.is_backward else "module"
        return CallMark(kind, self.start_us, self.end_us, self.thread, self.name, self.frames)


def _find_codes(torch: Any) -> dict[int, tuple[CodeType, bool]]:
    """Return the code of the watched functions, and whether that is backward, by its id."""
    found: dict[int, tuple[CodeType, bool]] = {}
    call = getattr(torch.nn.Module, "_call_impl", None)
    backward = getattr(torch.autograd.graph, "_engine_run_backward", None)
    for function, is_backward in ((call, False), (backward, True)):
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            found[id(code)] = (code, is_backward)
    return found


def _find_enclosing_call(frame: FrameType, codes: Mapping[int, object]) -> int:
    """Return the id of the frame of the watched call that this one is in; 0 where none is near."""
    outer = frame.f_back
    for _ in range(_MAX_FRAMES):
        if outer is None:
            break
        if id(outer.f_code) in codes:
            return id(outer)
        outer = outer.f_back
    return 0


def _take_stack(frame: FrameType | None) -> tuple[Frame, ...]:
    stack: list[Frame] = []
    while frame is not None and len(stack) < _MAX_FRAMES:
        code = frame.f_code
        stack.append(Frame(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return tuple(stack)


def _name_modules(module: object) -> dict[int, str]:
    """Return the path of each module below a module, by its id, without running their code."""
    names: dict[int, str] = {}
    left = [(module, "")]
    while left and len(names) < 100_000:
        outer, path = left.pop()
        fields = object.__getattribute__(outer, "__dict__")
        children = fields.get("_modules") if type(fields) is dict else None
        if not isinstance(children, dict):
            continue
        for key, child in dict.items(children):
            if type(key) is not str or child is None or child is module or id(child) in names:
                continue
            # The module within torch.compile's wrapper answers to the wrapper's own name.
            is_wrapped = key == "_orig_mod"
            names[id(child)] = _read_class_name(type(child)) if is_wrapped else f"{path}{key}"
            left.append((child, path if is_wrapped else f"{path}{key}."))
    return names
