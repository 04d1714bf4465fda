"""The functions behind the magics, for code: ``gpumemwidget.monitor()`` and its kin."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from gpumemwidget.devices import Budget, Limit
from gpumemwidget.errors import BadInputError, BusyError, NotLoadedError
from gpumemwidget.records import (
    DeviceReport,
    Explanation,
    Holding,
    MemoryAccount,
    ReleasePlan,
    ReleaseReport,
    RestorePlan,
    RestoreReport,
)

if TYPE_CHECKING:
    from gpumemwidget.jupyter.bridgeapi import DeviceBridges
    from gpumemwidget.jupyter.dashboard import Dashboard
    from gpumemwidget.jupyter.extension import Extension
    from gpumemwidget.jupyter.traceapi import Trace
    from gpumemwidget.measure.monitor import Monitor

__all__ = [
    "account",
    "bridge",
    "budget",
    "dashboard",
    "explain_in",
    "holdings",
    "last_failure",
    "limit",
    "limit_in",
    "load_trace",
    "monitor",
    "plan_release",
    "plan_restore",
    "release",
    "reset_peaks",
    "restore",
    "stat",
    "trace",
    "why",
]


def monitor() -> Monitor:
    """What records the cells: ``.ledger`` (also ``.ledger.to_dataframe()``), ``.history``.

    Raises:
        NotLoadedError: the extension is not loaded.
    """
    return _get_extension().monitor


def stat() -> tuple[DeviceReport, ...]:
    """The memory of every device now, as ``%memstat`` shows it; bytes.

    It needs no notebook: without the extension the devices are looked up for this one call.

    Returns:
        A report for each device that can be seen, the host last. ``reading`` is ``None`` for a GPU
        that this process has not touched.
    """
    from gpumemwidget.backends.hardware import detect_hardware  # noqa: PLC0415 - when it is used

    try:
        return _get_extension().monitor.hardware.read_devices()
    except NotLoadedError:
        hardware = detect_hardware()
        try:
            return hardware.read_devices()
        finally:
            hardware.close()


def bridge(device: str | None = None) -> DeviceBridges:
    """Whole devices, each in parts that add up to all of it, as ``%memstat --device`` shows them.

    ``b = gpumemwidget.bridge()``, then ``b.records``, ``b.record("cuda:0")``, ``b.figure()``,
    ``b.segments_figure()``, ``b.to_html()``; shown, it is the report. It needs no notebook, but
    without the extension nobody knows what is allocated for what.

    Args:
        device: one alone, ``"cuda:0"`` or ``"host"``; ``None`` for all.

    Raises:
        BadInputError: there is no such device.
    """
    from gpumemwidget.backends.hardware import detect_hardware  # noqa: PLC0415 - when it is used
    from gpumemwidget.jupyter.bridgeapi import (  # noqa: PLC0415
        take_bridges,
        take_plain_bridges,
    )

    try:
        extension = _get_extension()
    except NotLoadedError:
        hardware = detect_hardware()
        try:
            return take_plain_bridges(hardware, device)
        finally:
            hardware.close()
    return take_bridges(extension, device, with_maps=True)


def holdings() -> tuple[Holding, ...]:
    """What the notebook's names, ``Out`` and the last exception hold, biggest first; bytes.

    Raises:
        NotLoadedError: the extension is not loaded.
    """
    from gpumemwidget.owners.holdings import list_holdings  # noqa: PLC0415 - when it is used

    return list_holdings(_get_extension().shell)


def account() -> MemoryAccount:
    """Who owns what is allocated, on every device: lines that add up to it; bytes.

    What ``%memvars`` shows. Of each storage: its bytes, kind and path, and which names hold it.

    Raises:
        NotLoadedError: the extension is not loaded.
    """
    from gpumemwidget.owners.entries import take_memory_account  # noqa: PLC0415 - when it is used

    extension = _get_extension()
    return take_memory_account(extension.shell, extension.monitor.hardware)


def why(expression: str | None = None, *, unnamed: bool = False) -> Explanation:
    """What holds some memory: each path that leads to it, and how to cut it; bytes.

    Args:
        expression: a variable, or a part of one: ``"model.layers[0].weight"``, ``"Out[7]"``. It is
            looked up and not evaluated, so that no code of the user's runs.
        unnamed: what no variable leads to, instead.

    Raises:
        NotLoadedError: the extension is not loaded.
        UnknownNameError: nothing has the name that the expression begins with.
        BadInputError: nothing or both was asked for, or it can't be found without running code.
    """
    return explain_in(_get_extension(), expression or "", unnamed=unnamed)


def explain_in(extension: Extension, expression: str, *, unnamed: bool) -> Explanation:
    """``why``, in the extension of one shell."""
    from gpumemwidget.owners.why import explain, explain_unnamed  # noqa: PLC0415 - when it is used

    shell, hardware = extension.shell, extension.monitor.hardware
    if unnamed and expression:
        raise BadInputError(
            f"give {expression!r} or ask for what has no name (--unnamed), not both at once"
        )
    if unnamed:
        return explain_unnamed(shell, hardware)
    if not expression:
        raise BadInputError(
            "nothing to explain: give a variable or a part of one, such as "
            "model.layers[0].weight, or --unnamed for what no variable leads to"
        )
    return explain(shell, hardware, expression)


def plan_release(
    *names: str,
    keep: bool = False,
    out: bool = False,
    exceptions: bool = False,
    cublas: bool = False,
    compile_caches: bool = False,
    grads: bool = False,
) -> ReleasePlan:
    """What ``release`` with the same arguments would do; nothing is changed.

    Args:
        names: variables, or rows of ``holdings()`` such as ``"Out[7]"``.
        keep: leave copies on the CPU under the names.
        out: also what IPython holds of displayed values.
        exceptions: also the last exception and its frames.
        cublas: also cuBLAS's workspaces; the next matrix product makes its own anew.
        compile_caches: also what ``torch.compile`` made; the next call compiles anew.
        grads: also the gradients of all that the variables lead to, as
            ``zero_grad(set_to_none=True)`` does for one model; goes without names.

    Raises:
        NotLoadedError: the extension is not loaded.
        UnknownNameError: a name is not bound.
        BadInputError: nothing was named.
    """
    from gpumemwidget.owners.plan import plan_release as plan  # noqa: PLC0415 - when it is used

    extension = _get_extension()
    return plan(
        extension.shell,
        extension.monitor.hardware,
        names,
        keep=keep,
        out=out,
        exceptions=exceptions,
        cublas=cublas,
        compile_caches=compile_caches,
        grads=grads,
    )


def release(
    *names: str,
    keep: bool = False,
    out: bool = False,
    exceptions: bool = False,
    cublas: bool = False,
    compile_caches: bool = False,
    grads: bool = False,
) -> ReleaseReport:
    """Release what variables hold: move, set to ``None``, collect, empty the cache, measure.

    Args:
        names: variables, or rows of ``holdings()`` such as ``"Out[7]"``.
        keep: leave copies on the CPU under the names.
        out: also what IPython holds of displayed values.
        exceptions: also the last exception and its frames.
        cublas: also cuBLAS's workspaces; the next matrix product makes its own anew.
        compile_caches: also what ``torch.compile`` made; the next call compiles anew.
        grads: also the gradients of all that the variables lead to, as
            ``zero_grad(set_to_none=True)`` does for one model; goes without names.

    Returns:
        What each step did and freed, in bytes, and what still holds the rest.

    Raises:
        NotLoadedError: the extension is not loaded.
        UnknownNameError: a name is not bound; nothing was changed.
        BadInputError: nothing was named.
        BusyError: a cell is running, and this is not the cell's own thread.
        ReleaseError: it may not be carried out; nothing was changed.
    """
    from gpumemwidget.owners.release import apply_release  # noqa: PLC0415 - when it is used

    extension = _get_extension()
    refuse_beside_cell(extension)
    plan = plan_release(
        *names,
        keep=keep,
        out=out,
        exceptions=exceptions,
        cublas=cublas,
        compile_caches=compile_caches,
        grads=grads,
    )
    return apply_release(plan, extension.shell, extension.monitor.hardware)


def plan_restore(*names: str) -> RestorePlan:
    """What ``restore`` with the same names would do; nothing is changed.

    Raises:
        NotLoadedError: the extension is not loaded.
        UnknownNameError: a name is not bound.
        BadInputError: nothing was named.
    """
    from gpumemwidget.owners.restore import plan_restore as plan  # noqa: PLC0415 - when it is used

    extension = _get_extension()
    return plan(extension.shell, extension.monitor.hardware, names)


def restore(*names: str) -> RestoreReport:
    """Bring back to its devices what a release moved to the CPU: all of it, or nothing.

    Args:
        names: variables, or rows of ``holdings()`` such as ``"Out[7]"``.

    Returns:
        What was brought back, and why it stopped if it did; everything is where it was then.

    Raises:
        NotLoadedError: the extension is not loaded.
        UnknownNameError: a name is not bound; nothing was changed.
        BadInputError: nothing was named.
        BusyError: a cell is running, and this is not the cell's own thread.
    """
    from gpumemwidget.owners.restore import apply_restore  # noqa: PLC0415 - when it is used

    extension = _get_extension()
    refuse_beside_cell(extension)
    plan = plan_restore(*names)
    return apply_restore(plan, extension.shell, extension.monitor.hardware)


def refuse_beside_cell(extension: Extension) -> None:
    """Refuse what changes the user's objects on another thread than the running cell's.

    Raises:
        BusyError: a cell is running elsewhere.
    """
    is_own_thread = threading.current_thread() is threading.main_thread()
    if extension.monitor.running is not None and not is_own_thread:
        raise BusyError("a cell is running: release from the cell itself, or after its end")


def budget(
    amount: int | str | None = None, *, device: str | None = None, stop: bool = False
) -> tuple[Budget, ...]:
    """What each cell may have allocated from the next one on, as ``%membudget`` sets it; bytes.

    The cell that goes beyond it, by its exact peak, is marked in the ledger, and a line below it
    tells. PyTorch is not limited: ``limit`` does that.

    Args:
        amount: bytes, or text (``"10GiB"``); ``"off"`` for no budget, at once. ``None`` changes
            nothing.
        device: one device; ``"host"`` for this process's resident size. ``None`` for every GPU,
            those that come into use later too, in place of what single ones had.
        stop: interrupt the cell that goes beyond it, as Ctrl-C does, once a sample shows it: there
            is one every 20 ms while a cell runs.

    Returns:
        The budgets that are set; the first may be that of every GPU
        (``gpumemwidget.devices.EVERY_GPU``).

    Raises:
        NotLoadedError: the extension is not loaded.
        BadInputError: it is no amount, more than the device has, or there is no such device.
    """
    from gpumemwidget.jupyter.budgets import change_budgets  # noqa: PLC0415 - when it is used

    return change_budgets(_get_extension().monitor, amount, device=device, stop=stop)


def limit(
    value: str | float | int | None = None, *, device: str | None = None
) -> tuple[Limit, ...]:
    """Limit what PyTorch may reserve on a GPU, as ``%memlimit`` does; bytes.

    It is PyTorch's own limit (``torch.cuda.set_per_process_memory_fraction``), of this process:
    beyond it a request is an out-of-memory error. Memory outside of PyTorch is not in it. A GPU
    that is not in use stays so: its limit is set once it is.

    Args:
        value: a share as a float (0.8) or text (``"80%"``), an amount as an int of bytes, which is
            exact, or text (``"12GiB"``); ``"off"`` for no limit. ``None`` changes nothing.
        device: one GPU; ``None`` for every one in use, or every one there is where none is.

    Returns:
        What stands: of the GPUs that were limited, or of all.

    Raises:
        NotLoadedError: the extension is not loaded.
        BadInputError: it is no limit, more than the device has, or there is no such device.
        BackendError: PyTorch refuses.
    """
    return limit_in(_get_extension(), value, device=device)


def limit_in(extension: Extension, value: object, *, device: str | None) -> tuple[Limit, ...]:
    """``limit``, in the extension of one shell."""
    from gpumemwidget.measure.limits import (  # noqa: PLC0415 - when it is used
        parse_limit,
        read_limits,
        set_limits,
    )

    hardware = extension.monitor.hardware
    if value is None:
        return read_limits(hardware, device)
    limits = set_limits(hardware, parse_limit(value), device)
    extension.limited.update(each.device for each in limits)
    extension.limit_watch.check()
    return limits


def reset_peaks(*, device: str | None = None) -> tuple[str, ...]:
    """Begin PyTorch's peaks anew, as ``torch.cuda.reset_peak_memory_stats()`` does.

    Those of the recorded cells stay exact.

    Args:
        device: one GPU; ``None`` for every one in use.

    Returns:
        The GPUs on which that was done.

    Raises:
        NotLoadedError: the extension is not loaded.
        BadInputError: there is no such GPU, or it is not in use.
    """
    from gpumemwidget.measure.limits import reset_peaks as reset  # noqa: PLC0415 - when it is used

    return reset(_get_extension().monitor.hardware, device)


def dashboard() -> Dashboard:
    """The dashboard, a widget: the last value of a cell, or for ``display``.

    Raises:
        NotLoadedError: the extension is not loaded.
    """
    return _get_extension().open_dashboard()


def trace(
    *,
    device: str | None = None,
    n_events: int | None = None,
    depth: int | None = None,
    snapshot: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> Trace:
    """Which lines take memory within a ``with`` block; in a notebook or without one.

    ``with gpumemwidget.trace() as t:``, then ``t.record``, ``t.devices``, ``t.figure()``,
    ``t.to_html()``, ``t.export("run.json")``. The peaks are exact where a cell's are, and PyTorch's
    own go on as if nothing had been measured. There is one trace at a time: a block within a traced
    cell, or within another block, is refused.

    Args:
        device: the one to trace, ``"cuda:0"`` or ``"host"``; ``None`` for all.
        n_events: how many events of the allocators are kept, the newest; a million unless told.
        depth: how many calls deep a line opens; ``None``: all that are big enough.
        snapshot: a file (``.pickle``) for PyTorch's own memory viewer.
        force: let it take the place of a file.

    Raises:
        BadInputError: there is no such device, or a count that can't be taken.
        FileError: the file can't be written.
        BusyError: another trace is running; raised where the block begins.
    """
    from gpumemwidget.jupyter.traceapi import make_trace  # noqa: PLC0415 - when it is used

    return make_trace(device=device, n_events=n_events, depth=depth, snapshot=snapshot, force=force)


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """A trace that was exported to a ``.json``, or a snapshot of PyTorch's (``.pickle``).

    Returns:
        The same as ``trace`` gives: records, ``figure()``, ``to_html()``, and shown as its report.

    Raises:
        FileError: it can't be read, or is not such a file.
    """
    from gpumemwidget.jupyter.traceapi import load_trace as load  # noqa: PLC0415 - when it is used

    return load(path)


def last_failure() -> str | None:
    """The whole traceback of the last failure of ours, for a bug report; ``None`` if none failed.

    Raises:
        NotLoadedError: the extension is not loaded.
    """
    return _get_extension().last_failure


def _get_extension() -> Extension:
    # Brings IPython, which `import gpumemwidget` does not.
    from gpumemwidget.jupyter.extension import current_extension  # noqa: PLC0415

    return current_extension()
