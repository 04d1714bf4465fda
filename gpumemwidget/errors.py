"""Every error of ours, so that a caller can catch one kind or all, and how failures are reported.

::

    GpuMemError
    ├── NotLoadedError          the extension is not loaded
    ├── BadInputError           a value that we can't take
    │   ├── UnknownNameError    no such variable
    │   └── FileError           a file that we will not or can't write or read
    ├── BackendError            a source of counters answered with a failure
    │   └── RecordingError      a recording that is not ours, cut short or of another version
    ├── BusyError               a cell is running
    └── PredictionError         a step can't be carried out without computing

ReleaseInterrupt is a KeyboardInterrupt: it ends the cell whose release a Ctrl-C stopped.

Each message names the cause, the value and the next step, in one line: the magics show it as it is.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, Generic, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
#: The folder of the package ``gpumemwidget``.
_PACKAGE = f"{Path(__file__).parent}{os.sep}"


class GpuMemError(Exception):
    """Base of all errors that gpumemwidget raises."""


class NotLoadedError(GpuMemError):
    """The extension is not loaded, so there is nothing to read."""


class BadInputError(GpuMemError, ValueError):
    """An argument has a value that we can't take."""


class UnknownNameError(BadInputError):
    """A name is not bound in the notebook's namespace."""


class FileError(BadInputError):
    """A file can't be written or read, or would be overwritten."""


class BackendError(GpuMemError):
    """A source of counters answered with a failure."""


class RecordingError(BackendError):
    """A recording is not ours, cut short, or of another version."""


class BusyError(GpuMemError):
    """Something may not be done while a cell is running."""


class PredictionError(GpuMemError):
    """A step can't be carried out without computing: it does, or holds, what can't be imitated."""


class ReleaseInterrupt(KeyboardInterrupt):
    """A Ctrl-C stopped a release, or bringing back what a release moved.

    Its report is displayed before this is raised.

    Attributes:
        report: the ``ReleaseReport`` or ``RestoreReport``: what was done until then.
    """

    def __init__(self, report: Any) -> None:
        super().__init__("the report above says what was done until then")
        self.report = report


def name_type(value: object) -> str:
    """Return the name of a value's class, without asking anything of the value itself."""
    name: str = vars(type)["__name__"].__get__(type(value))
    return name


def is_from_signal_handler(error: BaseException) -> bool:
    """Return whether a signal handler raised an error, as the user's timeout by SIGALRM does.

    Handlers run between any two instructions of the main thread: of ours, too. ``is_our_error`` is
    for code that calls nobody else's.
    """
    handlers = map(signal.getsignal, signal.valid_signals())
    functions = [
        handler.__func__ if type(handler) is MethodType else handler for handler in handlers
    ]
    codes = {handler.__code__ for handler in functions if type(handler) is FunctionType}
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code in codes for frame, _ in frames)


def forgets_frames(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let errors leave a function without the frames that they came through, or what these hold.

    IPython keeps the last exception, its traceback keeps the frames, and a frame of ours may hold
    every object that was walked: a refusal would hold on to the very memory it was about, and so
    would Ctrl-C in a walk that takes long. Errors of ours come without a traceback; others keep
    theirs, whose frames are emptied.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        handled = sys.exc_info()[1]
        try:
            return function(*args, **kwargs)
        except GpuMemError as exc:
            error = exc.with_traceback(None)
        except BaseException as exc:
            _empty_frames(exc, handled)
            raise
        finally:
            del handled
        raise error

    return call


def _empty_frames(error: BaseException, handled: BaseException | None) -> None:
    """Empty the frames of an error, and of those that it was raised in, but for the caller's."""
    shown: BaseException | None = error
    while shown is not None and shown is not handled:
        traceback.clear_frames(shown.__traceback__)
        shown = shown.__context__


def keep_from_cell(
    callback: Callable[..., Any],
    survive: Callable[[BaseException], bool],
    *,
    instead: object = None,
) -> Callable[..., Any]:
    """Return a callback for the interpreter that lets no error of ours into the user's cell.

    After an error that the cell is to ``survive``, the callback returns ``instead``.
    """
    # When Python ends, the names of modules are ``None``, and the interpreter still calls back.
    is_finalizing = sys.is_finalizing

    def call(*arguments: Any) -> Any:
        try:
            return callback(*arguments)
        except RecursionError:
            # The cell is about to meet it itself, and there is no room for further calls.
            return None
        except BaseException as exc:
            if not is_finalizing() and not survive(exc):
                raise
        return instead

    return call


def is_our_error(error: BaseException) -> bool:
    """Return whether code of this package raised an error itself.

    A handler of the user's for a signal may run, and raise, within any call of ours.
    """
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is None or last.tb_frame.f_code.co_filename.startswith(_PACKAGE)


# -- Reporting failures ----------------------------------------------------------------------------


def read_first_line(exc: BaseException) -> str:
    """Return the first line of an exception's message; PyTorch's go on with a stack of C++.

    An exception whose ``__str__`` raises has no message.
    """
    try:
        return str(exc).strip().partition("\n")[0]
    except Exception:  # noqa: BLE001 - whatever the user's class raises
        return ""


def describe_exception(exc: BaseException) -> str:
    """Return an exception as ``"ValueError: first line"``; its type alone where it has no text."""
    line = read_first_line(exc)
    return f"{type(exc).__name__}: {line}" if line else type(exc).__name__


class Notes(Generic[_T]):
    """Sentences or records that are reported once each, however often their subject happens.

    Any thread may add and take them.

    Args:
        max_sentences: further ones are dropped; the words of a failure may differ each time,
            as with an address in them.
    """

    def __init__(self, *, max_sentences: int = 100) -> None:
        self._max_sentences = max_sentences
        self._is_taken: dict[_T, bool] = {}

    def add(self, sentence: _T) -> bool:
        """Keep a sentence or record, and return whether it is new."""
        if sentence in self._is_taken or len(self._is_taken) >= self._max_sentences:
            return False
        self._is_taken[sentence] = False
        return True

    def take(self) -> tuple[_T, ...]:
        """Return the sentences that were added since the last call."""
        new = tuple(
            sentence for sentence, is_taken in self._is_taken.copy().items() if not is_taken
        )
        self._is_taken.update(dict.fromkeys(new, True))
        return new
