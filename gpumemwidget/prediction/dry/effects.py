"""Keep a dry run from the rest of the world, for its own thread alone.

What would change files, other processes or the network is refused, waits are skipped, and settings
of the process and random numbers are the dry run's own. Other threads call what they always called.
"""

from __future__ import annotations

import builtins
import io
import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from gpumemwidget.backends.hooks import Patch

Function = Callable[..., Any]


class RefusedError(BaseException):
    """A running step does what a dry run can't.

    No ``except Exception`` of the step's own catches it, and goes on another way than the real one.
    """


class ThreadPatch:
    """Functions that are replaced for the thread that replaces them; others call the originals."""

    def __init__(self) -> None:
        self._patch = Patch()
        self._thread: int | None = threading.get_ident()

    def is_own_thread(self) -> bool:
        """Return whether the thread that calls this is the one with other functions."""
        return threading.get_ident() == self._thread

    def replace(self, owner: Any, name: str, make: Callable[[Function], Function]) -> None:
        """Replace a function of a module or a class; nothing is done where there is none.

        ``make`` takes the original and returns what this thread calls.
        """

        def wrap(original: Function) -> Function:
            ours = make(original)

            def call(*args: Any, **kwargs: Any) -> Any:
                return (ours if self.is_own_thread() else original)(*args, **kwargs)

            return call

        self._patch.replace(owner, name, wrap)

    def set(self, owner: Any, name: str, ours: Function) -> None:
        """Replace a function by another one, which does not call it."""
        self.replace(owner, name, lambda _: ours)

    def answer(self, owner: Any, values: Mapping[str, Any]) -> None:
        """Let functions return values without being called."""
        for name, value in values.items():
            self.set(owner, name, partial(_return, value))

    def refuse(self, owner: Any, name: str, what: str) -> None:
        """Let a function refuse to be called: ``what`` a step does with it."""
        self.set(owner, name, partial(_refuse, what))

    def __enter__(self) -> ThreadPatch:
        return self

    def __exit__(self, *_: object) -> None:
        # Where somebody has wrapped our function meanwhile, it stays and calls the original.
        self._thread = None
        self._patch.undo()


def _return(value: Any, *_args: object, **_options: object) -> Any:
    return value


def _refuse(what: str, *_args: object, **_options: object) -> NoReturn:
    raise RefusedError(f"The step {what}. Leave that out to predict it.")


# -- What is refused -------------------------------------------------------------------------------


def refuse_effects(torch: Any, patch: ThreadPatch) -> None:
    """Refuse what this thread does to the world, whoever calls it; skip its waits."""

    def refuse_writing(original: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            mode = kwargs.get("mode", args[1] if len(args) > 1 else "r")
            if isinstance(mode, str) and set(mode) & set("wax+"):
                _refuse("writes a file (open)")
            return original(*args, **kwargs)

        return call

    def refuse_opening(original: Function) -> Function:
        def call(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
                _refuse("writes a file (os.open)")
            return original(path, flags, *args, **kwargs)

        return call

    def refuse_kernel(kernel: Any, *_args: Any, **_options: Any) -> Any:
        raise RefusedError(
            f"The step starts the Triton kernel `{kernel.__name__}`, which a dry run can't "
            "follow. Make it an operator with a fake (torch.library.custom_op)."
        )

    def refuse_thread(original: Function) -> Function:
        def start(started: threading.Thread) -> Any:
            # A class of a library's has work of its own, as the watch of progress bars.
            kind = type(started)
            if "run" in vars(kind) and kind not in (threading.Thread, threading.Timer):
                return original(started)
            raise RefusedError(
                "The step starts a thread, whose operators a dry run can't follow. Call its "
                "function in the step itself."
            )

        return start

    patch.replace(threading.Thread, "start", refuse_thread)
    patch.replace(builtins, "open", refuse_writing)
    patch.replace(io, "open", refuse_writing)
    patch.replace(os, "open", refuse_opening)
    # A library that changes files or processes calls one of these.
    os_functions = (
        *("remove", "unlink", "rename", "renames", "replace", "truncate", "symlink", "link"),
        *("chmod", "mkdir", "makedirs", "rmdir", "removedirs", "system", "popen", "fork", "kill"),
        *("execv", "execve", "posix_spawn"),
    )
    for owner, name, what in [
        (torch, "save", "writes a file"),
        *((os, name, "changes files or processes") for name in os_functions),
        (os, "chdir", "changes the working folder"),
        (subprocess, "Popen", "starts a process"),
        (socket.socket, "connect", "uses the network"),
        (sys.modules.get("sqlite3"), "connect", "opens a database"),
    ]:
        patch.refuse(owner, name, f"{what} ({name})")
    if (triton := sys.modules.get("triton.runtime.jit")) is not None:
        patch.set(triton.JITFunction, "run", refuse_kernel)
    patch.answer(time, {"sleep": None})
    patch.answer(logging.Logger, {"handle": None, "setLevel": None})
    patch.answer(logging, {"disable": None, "basicConfig": None})
    patch.answer(warnings, {"warn": None, "warn_explicit": None, "_showwarnmsg": None})
    # A stream may be kept by those that replace it meanwhile: only its method is replaced.
    for stream in {id(stream): stream for stream in (sys.stdout, sys.stderr)}.values():
        if hasattr(stream, "__dict__"):
            patch.set(stream, "write", len)


# -- What is the dry run's own ---------------------------------------------------------------------

#: Settings of the process by their owner: what reads each, and what sets it.
_SETTINGS = {
    "torch._C": (
        *(
            (f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}")
            for name in ("flash", "mem_efficient", "math", "cudnn", "overrideable")
        ),
        *(
            (f"_get_{name}", f"_set_{name}")
            for name in (
                *("sdp_priority_order", "deterministic_algorithms", "float32_matmul_precision"),
                *("cublas_allow_tf32", "cublas_allow_fp16_reduced_precision_reduction"),
            )
        ),
    ),
    "torch": (
        ("get_default_dtype", "set_default_dtype"),
        ("get_num_threads", "set_num_threads"),
        ("is_anomaly_enabled", "set_anomaly_enabled"),
    ),
    "sys": (("getrecursionlimit", "setrecursionlimit"),),
}


def own_settings(torch: Any, patch: ThreadPatch) -> dict[str, Any]:
    """Give this thread settings of the process that are its own; return those that it has set."""
    values: dict[str, Any] = {}

    def make_getter(key: str, original: Function) -> Function:
        return lambda: values[key] if key in values else original()

    def set_value(key: str, value: Any = True, *_args: object, **_options: object) -> None:
        values[key] = value

    for owner, pairs in _SETTINGS.items():
        for getter, setter in pairs:
            module = sys.modules[owner]
            patch.set(module, setter, partial(set_value, getter))
            patch.replace(module, getter, partial(make_getter, getter))
    flags: dict[int, Any] = {}
    flag: Any = torch.backends.ContextProp
    patch.set(flag, "__set__", lambda own, _obj, value: flags.update({id(own): value}))
    patch.replace(
        flag,
        "__get__",
        lambda original: (
            lambda own, *args: flags[id(own)] if id(own) in flags else original(own, *args)
        ),
    )
    cudnn = torch.backends.cudnn

    def set_cudnn_flags(enabled: Any = None, *others: Any) -> tuple[Any, ...]:
        # For cudnn.flags(), which gives back what it got. Of these flags Python asks for one.
        before = cudnn.enabled
        if enabled is not None:
            cudnn.enabled = enabled
        return (before, *others)

    patch.set(cudnn.m, "set_flags", set_cudnn_flags)
    # What a step sets in the environment is left out.
    patch.answer(type(os.environ), {"__setitem__": None, "__delitem__": None})
    return values


def own_random_numbers(torch: Any, patch: ThreadPatch) -> None:
    """Give this thread generators of random numbers that are copies of the process's."""
    python = random.Random()
    python.setstate(random.getstate())
    generators: list[tuple[Any, Any]] = [(random, python)]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpys = numpy.random.RandomState()
        numpys.set_state(numpy.random.get_state())
        generators.append((numpy.random, numpys))
    for module, generator in generators:
        for name, function in list(vars(module).items()):
            ours = None if name.startswith("_") else getattr(generator, name, None)
            if callable(ours) and callable(function) and not isinstance(function, type):
                patch.set(module, name, ours)
    seeds = {"manual_seed": torch.default_generator, "seed": 0, "set_rng_state": None}
    patch.answer(torch, seeds)
    patch.answer(torch.random, seeds)
