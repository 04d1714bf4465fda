"""What every test may rely on: GPU tests run where a GPU is, and nothing of ours stays behind.

Nothing heavy is imported here: the GPU suite also runs where neither a browser nor JupyterLab is
installed, and the pure modules' tests where torch is not.
"""

from __future__ import annotations

import asyncio
import builtins
import gc
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

import gpumemwidget
from gpumemwidget.backends.hardware import close_kept_hardware

if TYPE_CHECKING:
    from tests.browser.lab import Lab

_PACKAGE = f"{Path(gpumemwidget.__file__).parent}{os.sep}"
#: Where the user's peaks are read, and where we may lay something over them.
_OVERLAID_MODULES = (
    "resource",
    "torch._C",
    "torch.accelerator",
    "torch.accelerator.memory",
    "torch.cuda",
    "torch.cuda.memory",
    "builtins",
)
# Few random examples, always the same ones; many and new ones with --hypothesis-profile full.
for _profile, _n_examples in (("quick", 25), ("full", 100)):
    settings.register_profile(
        _profile,
        max_examples=_n_examples,
        deadline=None,
        derandomize=_profile == "quick",
        # How long examples take to make says how busy the machine is.
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
settings.load_profile("quick")

#: The numbers of tools of ``sys.monitoring``, as objects that can be told apart.
_TOOLS = tuple(object() for _ in range(6))
#: Number of objects in sight of the garbage collector from which they are put aside.
_MANY_OBJECTS = 30_000
#: How long a thread that was told to stop may take to end.
_THREAD_GRACE_S = 2.0


def pytest_configure() -> None:
    """Prepare this process, and all that it starts.

    SIGINT is handled as Python does by itself, also where the suite was started with it ignored: so
    it is behind ``nohup`` or in a script's background. Each process computes on one thread: several
    that share the tests wait for each other's threads otherwise, for minutes.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow, keep together what must be, and skip the GPU tests where there is none.

    Where several processes share the tests, those of a module stay in one, for their fixtures; all
    of the GPU's in one, for they fill it; and the stories in one, for they share a browser.
    """
    for item in items:
        groups = [name for name in ("gpu", "story") if item.get_closest_marker(name)]
        group = groups[0] if groups else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
        takes_long = item.get_closest_marker("browser") or item.get_closest_marker("notebook")
        if takes_long and not item.get_closest_marker("story"):
            item.add_marker(pytest.mark.slow)
    _skip(items, "gpu", unless=_has_gpu, reason="no NVIDIA GPU that torch can use on this machine")
    reason = "this PyTorch does not tell what autograd has saved"
    _skip(items, "saved_tensors", unless=_tells_saved_tensors, reason=reason)


@pytest.fixture(autouse=True)
def imports_put_aside() -> None:
    """Put aside the objects that imports leave: with torch, some half a million.

    Else each collection and each look at the whole process goes through them, several times in a
    test. Beside a real GPU all stays as it is for a user.
    """
    if not _has_gpu() and len(gc.get_objects()) > _MANY_OBJECTS:
        # What an earlier test held when it was put aside may be garbage by now.
        gc.unfreeze()
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def no_running_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """Put aside the event loop that a browser leaves running on this thread: others await, too."""
    if request.node.get_closest_marker("browser"):
        yield
        return
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    yield
    asyncio._set_running_loop(running)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a thread, a hook or an overlay of ours, or ``builtins._``."""
    before = _list_remains()

    yield

    # It would stay for as long as the process.
    close_kept_hardware()
    for thread in _list_threads():
        if not _holds(before, thread):
            thread.join(_THREAD_GRACE_S)
    left = [what for remain, what in _list_remains() if not _holds(before, remain)]
    if not gc.isenabled():
        gc.enable()
        left.append("the garbage collector switched off")
    assert not left, f"the test left behind: {', '.join(left)}"


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A running JupyterLab and a browser; a missing browser is a failure.

    One for the whole run: a process can't have two of Playwright's loops at once.
    """
    from tests.browser.lab import start_browser, start_lab

    with (
        start_browser() as browser,
        start_lab(tmp_path_factory.mktemp("lab"), browser, keeps_page=True) as running,
    ):
        yield running


@pytest.fixture(scope="session")
def side_lab(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab with the panel, in the same browser."""
    from tests.browser.lab import start_lab

    with start_lab(tmp_path_factory.mktemp("side"), lab.browser, has_panel=True) as running:
        yield running


def _skip(
    items: list[pytest.Item], marker: str, *, unless: Callable[[], bool], reason: str
) -> None:
    marked = [item for item in items if item.get_closest_marker(marker)]
    if marked and not unless():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _tells_saved_tensors() -> bool:
    import torch

    return hasattr(torch._C._autograd.SavedTensor, "data")


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def _holds(remains: list[tuple[object, str]], wanted: object) -> bool:
    return any(remain is wanted for remain, _ in remains)


def _list_remains() -> list[tuple[object, str]]:
    """Everything of ours that stands in the process now, and what to call it.

    The objects themselves and not their ids, which a later object may get again.
    """
    return [
        *((thread, f"thread {thread.name}") for thread in _list_threads()),
        *_list_overlays(),
        *_list_import_hooks(),
        *_list_tracers(),
        *_list_queued_calls(),
        *_list_shell_hooks(),
        *_list_underscore(),
    ]


def _list_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("gpumemwidget")]


def _list_overlays() -> Iterator[tuple[object, str]]:
    """Yield what is laid over PyTorch's or Python's functions."""
    for module_name in _OVERLAID_MODULES:
        module = sys.modules.get(module_name)
        for name, value in dict(vars(module)).items() if module is not None else ():
            if _is_ours(value):
                yield value, f"overlay on {module_name}.{name}"


def _list_import_hooks() -> Iterator[tuple[object, str]]:
    for finder in sys.meta_path:
        if _is_ours(finder):
            yield finder, f"import hook {finder!r}"


def _list_queued_calls() -> Iterator[tuple[object, str]]:
    """What CUDA is to call of ours once it is initialised."""
    cuda = sys.modules.get("torch.cuda")
    for call, _ in getattr(cuda, "_queued_calls", ()):
        if _is_ours(call):
            yield call, f"queued call {call!r}"


def _list_tracers() -> Iterator[tuple[object, str]]:
    """What tells of the lines that run, or of calls, for us; and traces that nobody has ended."""
    trace = sys.gettrace()
    if trace is not None and _is_ours(trace):
        yield trace, f"trace function {trace!r}"
    monitoring = getattr(sys, "monitoring", None)
    for tool in range(len(_TOOLS)) if monitoring is not None else ():
        name = monitoring.get_tool(tool)
        if name is not None and name.startswith("gpumemwidget"):
            yield _TOOLS[tool], f"tool {tool} of sys.monitoring"
    tracing = sys.modules.get("gpumemwidget.session.tracer")
    if tracing is not None and tracing._lock.locked():
        yield tracing._lock, "a trace"


def _list_shell_hooks() -> Iterator[tuple[object, str]]:
    """Callbacks, transformers and magics of ours in the process's own shell, if there is one."""
    interactiveshell = sys.modules.get("IPython.core.interactiveshell")
    if interactiveshell is None or not interactiveshell.InteractiveShell.initialized():
        return
    shell = interactiveshell.InteractiveShell.instance()
    for event, callbacks in shell.events.callbacks.items():
        for callback in callbacks:
            if _is_ours(callback):
                yield callback, f"{event} callback {callback!r}"
    manager = shell.input_transformer_manager
    for transformer in (*manager.cleanup_transforms, *manager.line_transforms):
        if _is_ours(transformer):
            yield transformer, f"input transformer {transformer!r}"
    for kind, magics in shell.magics_manager.magics.items():
        for name, magic in magics.items():
            if _is_ours(magic):
                yield magic, f"{kind} magic {name}"


def _list_underscore() -> Iterator[tuple[object, str]]:
    """Yield a ``_`` in the builtins, such as doctest and gettext leave: IPython then binds none."""
    if "_" in vars(builtins):
        yield builtins, "_ in the builtins"


def _is_ours(value: object) -> bool:
    """Whether code of ours would run if this were called."""
    function = getattr(value, "__func__", value)
    if isinstance(function, types.FunctionType):
        return function.__code__.co_filename.startswith(_PACKAGE)
    return type(value).__module__.partition(".")[0] == "gpumemwidget"
