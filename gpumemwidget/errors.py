"""Every error of ours, so that a caller can catch one kind or all.

GpuMemError
├── NotLoadedError          the extension is not loaded
├── BadInputError           a value that we can't take
│   ├── UnknownNameError    no such variable
│   └── FileError           a file that we will not or can't write or read
├── BackendError            a source of counters answered with a failure
│   └── RecordingError      a recording that is not ours, cut short or of another version
└── ReleaseError            a release that may not or could not run
    └── BusyError           a cell is running

Each message names the cause, the value and the next step, in one line: the magics show it as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = [
    "BackendError",
    "BadInputError",
    "BusyError",
    "FileError",
    "GpuMemError",
    "NotLoadedError",
    "RecordingError",
    "ReleaseError",
    "UnknownNameError",
    "forgets_frames",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")


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


class ReleaseError(GpuMemError):
    """A release was refused or stopped."""


class BusyError(ReleaseError):
    """Something may not be done while a cell is running."""


def forgets_frames(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let our errors leave a function without the frames that they came through.

    IPython keeps the last exception, its traceback keeps the frames, and a frame of ours may hold
    every object that was walked: a refusal would hold on to the very memory it was about.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except GpuMemError as exc:
            error = exc.with_traceback(None)
        raise error

    return call
