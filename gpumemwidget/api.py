"""Define the public functions: each asks the session of the running shell."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from gpumemwidget.backends.hardware import keep_hardware
from gpumemwidget.errors import BadInputError, name_type
from gpumemwidget.model.devices import Budget, DeviceState, Limit
from gpumemwidget.model.ownership import Explanation, MemoryAccount, Variable
from gpumemwidget.model.releases import (
    ReleasePlan,
    ReleaseReport,
    ReleaseRequest,
    RestorePlan,
    RestoreReport,
)
from gpumemwidget.session.session import (
    borrow_plain_hardware,
    current_session,
    find_session,
)

if TYPE_CHECKING:
    from gpumemwidget.checks.memory_growth import WatchedLoop
    from gpumemwidget.comparing import Comparison
    from gpumemwidget.recording.monitor import Monitor
    from gpumemwidget.remote.reader.recordings import Processes, Recordings, Watch
    from gpumemwidget.remote.writer.recorder import FileRecording
    from gpumemwidget.session.step_predictions import LargestBatch, Prediction
    from gpumemwidget.session.tracer import Trace
    from gpumemwidget.session.whole_devices import DeviceBreakdowns
    from gpumemwidget.widgets.dashboard import Dashboard

_T = TypeVar("_T")


def monitor() -> Monitor:
    """Return what records the cells of this session.

    ``.ledger`` has a record for each cell (``.ledger.to_dataframe()`` gives them as a table), and
    ``.history`` the samples that the dashboard draws.

    Raises:
        NotLoadedError: the extension is not loaded.

    Example:
        What the cell before this one did to the host's memory:

        >>> cell = gpumemwidget.monitor().ledger[-1]
        >>> cell.first_line, cell.status
        ('weights = torch.zeros(1024, 1024)', 'ok')
        >>> host = cell.devices[-1]
        >>> host.allocated.change_bytes > 4_000_000
        True
    """
    return current_session().monitor


def stat() -> tuple[DeviceState, ...]:
    """Return the memory of every device now, as ``%memstat`` shows it.

    It needs no notebook: without the extension, the devices are looked up for this one call.

    Returns:
        One state for each visible device, the host last. All amounts are in bytes. ``reading`` is
        ``None`` for a GPU that this process has not touched.

    Example:
        >>> host = gpumemwidget.stat()[-1]
        >>> host.info.device
        'host'
        >>> host.use.used_bytes < host.use.total_bytes
        True
    """
    session = find_session()
    if session is not None:
        return session.stat()
    with borrow_plain_hardware() as hardware:
        return hardware.read_devices()


def breakdown(device: str | None = None) -> DeviceBreakdowns:
    """Return whole devices, each in parts that add up to its total (``%memstat --device``).

    The result displays itself as the report. In code, use ``.record("cuda:0")`` for one device's
    parts, and ``.to_html()``. It needs no notebook, but without the extension it is not known what
    allocated memory is used for.

    Args:
        device: one device, such as ``"cuda:0"`` or ``"host"``; ``None`` for all of them.

    Raises:
        BadInputError: there is no such device.

    Example:
        >>> host = gpumemwidget.breakdown("host").record()
        >>> sum(part.n_bytes for part in host.parts) == host.total_bytes
        True
    """
    session = find_session()
    if session is not None:
        return session.breakdown(device)
    from gpumemwidget.session.whole_devices import take_breakdowns  # noqa: PLC0415 - when used

    with borrow_plain_hardware() as hardware:
        return take_breakdowns(hardware, device)


def variables() -> tuple[Variable, ...]:
    """Return what each variable, ``Out`` and the last exception hold, biggest first.

    These are the rows of the dashboard's variables tab. All amounts are in bytes.

    Raises:
        NotLoadedError: the extension is not loaded.

    Example:
        >>> batches = list(torch.zeros(3, 1024, 1024).split(1))
        >>> row = gpumemwidget.variables()[0]
        >>> row.name, row.kind, row.held_bytes.on("host")
        ('batches', 'container', 12582912)
    """
    return current_session().variables()


def owners() -> MemoryAccount:
    """Return who owns what is allocated on each device, as ``%memvars`` shows it.

    The lines of a device add up to what its allocator has allocated. Each has its bytes, its kind
    (parameter, gradient, optimizer state …), the path that leads to it, and the variables that hold
    it.

    Raises:
        NotLoadedError: the extension is not loaded.

    Example:
        >>> host = gpumemwidget.owners().devices[-1]
        >>> sum(line.n_bytes for line in host.owned) == host.allocated_bytes
        True
        >>> [line.n_bytes for line in host.owned if line.owner == "weights"]
        [4194304]
    """
    session = current_session()
    with _show_progress("gpumemwidget.owners()"):
        return session.owners()


def why(expression: str | None = None, *, unnamed: bool = False) -> Explanation:
    """Return what holds some memory: each path that leads to it, and how to cut that path.

    Args:
        expression: a variable, or a part of one: ``"model.layers[0].weight"``, ``"Out[7]"``. It is
            looked up and not evaluated, so none of your code runs.
        unnamed: explain the memory that no variable leads to, instead of an expression.

    Raises:
        NotLoadedError: the extension is not loaded.
        UnknownNameError: no variable has the name that the expression begins with.
        BadInputError: neither or both were asked for, or the expression can't be looked up without
            running code.

    Example:
        >>> layers = [weights]
        >>> for holder in gpumemwidget.why("weights").holders:
        ...     print(holder.path)
        layers[0]
        weights
    """
    session = current_session()
    with _show_progress("gpumemwidget.why()"):
        return session.why(expression, unnamed=unnamed)


def plan_release(
    *names: str,
    keep: bool = False,
    out: bool = False,
    exceptions: bool = False,
    cublas: bool = False,
    libraries: bool = False,
) -> ReleasePlan:
    """Return what ``release`` with the same arguments would do; nothing is changed.

    Raises:
        NotLoadedError: the extension is not loaded.
        UnknownNameError: a name is not bound.
        BadInputError: nothing was named.

    Example:
        >>> plan = gpumemwidget.plan_release("weights")
        >>> plan.frees_bytes.on("host")
        4194304
        >>> weights is None
        False
    """
    session = current_session()
    request = ReleaseRequest(
        names, keep=keep, out=out, exceptions=exceptions, cublas=cublas, libraries=libraries
    )
    return session.plan_release(request)


def release(
    *names: str,
    keep: bool = False,
    out: bool = False,
    exceptions: bool = False,
    cublas: bool = False,
    libraries: bool = False,
) -> ReleaseReport:
    """Release what variables hold: move, set to ``None``, collect, empty the cache, measure.

    Args:
        names: variables, or rows of ``variables()`` such as ``"Out[7]"``.
        keep: leave copies on the CPU under the names.
        out: also what IPython holds of displayed values.
        exceptions: also the last exception and its frames.
        cublas: also cuBLAS's workspaces; the next matrix product allocates new ones.
        libraries: also what CuPy keeps of a GPU for its next arrays.

    Returns:
        What each step did and freed, in bytes, and what still holds the rest.

    Raises:
        NotLoadedError: the extension is not loaded.
        UnknownNameError: a name is not bound; nothing was changed.
        BadInputError: nothing was named.
        BusyError: a cell is running, and this is not the cell's own thread.
        ReleaseInterrupt: a Ctrl-C stopped it; the report is displayed, and is its ``report``.

    Example:
        >>> report = gpumemwidget.release("weights")
        >>> weights is None
        True
        >>> dict(report.allocated_freed_bytes)["host"] > 4_000_000
        True
    """
    session = current_session()
    request = ReleaseRequest(
        names, keep=keep, out=out, exceptions=exceptions, cublas=cublas, libraries=libraries
    )
    with _show_progress("gpumemwidget.release()"):
        report = session.release(request)
    _show_if_interrupted(report)
    return report


def plan_restore(*names: str) -> RestorePlan:
    """Return what ``restore`` with the same names would do; nothing is changed.

    Raises:
        NotLoadedError: the extension is not loaded.
        UnknownNameError: a name is not bound.
        BadInputError: nothing was named.

    Example:
        No release has moved ``weights``, so nothing would be moved back:

        >>> gpumemwidget.plan_restore("weights").moves
        ()
    """
    return current_session().plan_restore(names)


def restore(*names: str) -> RestoreReport:
    """Move what a release put on the CPU back to its devices: all of it, or nothing.

    Args:
        names: variables, or rows of ``variables()`` such as ``"Out[7]"``.

    Returns:
        What was moved back. If it stopped, why; then everything is where it was before.

    Raises:
        NotLoadedError: the extension is not loaded.
        UnknownNameError: a name is not bound; nothing was changed.
        BadInputError: nothing was named.
        BusyError: a cell is running, and this is not the cell's own thread.
        ReleaseInterrupt: a Ctrl-C stopped it; the report is displayed, and is its ``report``.

    Example:
        It takes back what ``release("model", keep=True)`` did to tensors on a GPU. Here no release
        has moved ``weights``, which the report says:

        >>> report = gpumemwidget.restore("weights")
        >>> report.plan.moves, report.stopped is None
        ((), False)
    """
    session = current_session()
    with _show_progress("gpumemwidget.restore()"):
        report = session.restore(names)
    _show_if_interrupted(report)
    return report


def budget(amount: int | str | None = None, *, device: str | None = None) -> tuple[Budget, ...]:
    """Set what each cell may allocate, from the next one on, as ``%membudget`` does.

    A cell whose exact peak goes beyond it is marked in the ledger, and a line below the cell says
    so. PyTorch is not limited: ``limit`` does that.

    Args:
        amount: bytes, or text such as ``"10GiB"``; ``"off"`` removes the budget at once. ``None``
            changes nothing.
        device: one device; ``"host"`` for this process's resident size. ``None`` for every GPU,
            those that come into use later too, in place of the budgets of single GPUs.

    Returns:
        The budgets that are set; the first may be the one of every GPU
        (``gpumemwidget.model.devices.EVERY_GPU``).

    Raises:
        NotLoadedError: the extension is not loaded.
        BadInputError: not an amount, more than the device has, or there is no such device.

    Example:
        >>> gpumemwidget.budget("12GiB")
        (Budget(device='every GPU', budget_bytes=12884901888),)
        >>> gpumemwidget.budget("off")
        ()
    """
    return current_session().budget(amount, device=device)


def limit(
    value: str | float | int | None = None, *, device: str | None = None
) -> tuple[Limit, ...]:
    """Limit what PyTorch may reserve on a GPU, as ``%memlimit`` does.

    It is PyTorch's own limit (``torch.cuda.set_per_process_memory_fraction``) and holds for this
    process: a request beyond it is an out-of-memory error. Memory outside of PyTorch does not
    count. Import torch first. A GPU that is not in use stays unused: from PyTorch 2.11 on its limit
    is set before its first byte, and an earlier release can limit only a GPU that is in use.

    Args:
        value: a share as a float (0.8) or text (``"80%"``), an exact amount as an int of bytes or
            text (``"12GiB"``), or ``"off"`` for no limit. ``None`` changes nothing.
        device: one GPU; ``None`` for every GPU in use, or for all of them if none is.

    Returns:
        The limits of the GPUs that were limited; of every GPU if nothing was changed.

    Raises:
        NotLoadedError: the extension is not loaded.
        BadInputError: not a limit, more than the device has, or there is no such device.
        BackendError: PyTorch refuses.

    Example:
        >>> [limit] = gpumemwidget.limit("12GiB", device="cuda:0")
        >>> limit.limit_bytes == 12 * 2**30
        True
    """
    return current_session().limit(value, device=device)


def reset_peaks(*, device: str | None = None) -> tuple[str, ...]:
    """Reset PyTorch's peaks, as ``torch.cuda.reset_peak_memory_stats()`` does.

    The peaks of recorded cells stay exact.

    Args:
        device: one GPU; ``None`` for every GPU in use.

    Returns:
        The GPUs whose peaks were reset.

    Raises:
        NotLoadedError: the extension is not loaded.
        BadInputError: there is no such GPU, or it is not in use.

    Example:
        >>> gpumemwidget.reset_peaks()
        ('cuda:0',)
    """
    return current_session().reset_peaks(device)


def dashboard() -> Dashboard:
    """Return the dashboard: a widget that shows itself as the last value of a cell.

    ``dashboard().show(is_beside=True)`` is ``%memdash --side``.

    Raises:
        NotLoadedError: the extension is not loaded.

    Example:
        Show it a second time, in another cell:

        >>> view = gpumemwidget.dashboard()
        >>> view is gpumemwidget.dashboard()
        True
    """
    session = current_session()
    from gpumemwidget.widgets.dashboard import Dashboard  # noqa: PLC0415 - brings ipywidgets

    return session.attach(Dashboard)


def trace(
    *,
    device: str | None = None,
    snapshot: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> Trace:
    """Trace which lines of a ``with`` block take memory, in a notebook or in a script.

    After the block, ``.record`` has before, after and peak, ``.devices`` the lines, ``.figure()``
    the timeline as plotly's figure; ``.to_text()`` and ``.to_html()`` give the report. Peaks are
    exact where a cell's are, and PyTorch's own go on as if nothing had been measured. There is one
    trace at a time: a block within a traced cell, or within another block, is refused.

    Args:
        device: the device to trace, ``"cuda:0"`` or ``"host"``; ``None`` for all.
        snapshot: a file (``.pickle``) to write for PyTorch's own memory viewer, and for
            ``load_trace``.
        force: overwrite the file if it is there.

    Raises:
        BadInputError: there is no such device.
        FileError: the file can't be written.
        BusyError: another trace is running; raised where the block begins.

    Example:
        >>> with gpumemwidget.trace() as t:
        ...     table = torch.zeros(1024, 1024)
        >>> t.record.devices[-1].allocated.change_bytes > 4_000_000
        True
    """
    from gpumemwidget.session.tracer import Trace, make_trace_request  # noqa: PLC0415 - when used

    session = find_session()
    return Trace(
        make_trace_request(
            keep_hardware("traces") if session is None else session.hardware,
            device=device,
            snapshot=snapshot,
            force=force,
        )
    )


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Load a memory snapshot of PyTorch's as a trace.

    ``trace(snapshot=…)`` and ``%%memtrace --snapshot`` write such a file, and so does PyTorch's own
    ``torch.cuda.memory._dump_snapshot()``.

    Returns:
        What ``trace`` gives: the record, the lines, ``figure()``, ``to_html()``; displayed, the
        report.

    Raises:
        FileError: the file can't be read, or is no such file.

    Example:
        >>> with gpumemwidget.trace(snapshot="table.pickle") as t:
        ...     table = torch.zeros(1024, 1024)
        >>> gpumemwidget.load_trace("table.pickle").record.status
        'ok'
    """
    from gpumemwidget.session.tracer import load_trace as load  # noqa: PLC0415 - when it is used

    with _show_progress("gpumemwidget.load_trace()"):
        return load(path)


# -- Programs and other processes ------------------------------------------------------------------


def record(to: str | os.PathLike[str] | None = None, *, steps: bool = True) -> FileRecording:
    """Record this program into a file: samples, exact peaks of steps and spans, OOMs.

    It needs no notebook. As a context manager it ends with the block; a plain call records until
    the program ends, or until ``close()``. What was recorded so far is in the file at any time, and
    ``load`` opens it. ``python -m gpumemwidget run train.py`` does the same without a change to the
    program; under it, or in a worker that a notebook watches, this is a recording beside it.

    Args:
        to: a file whose name ends in ``.jsonl``, to which a rank adds its number, or a folder where
            each process has a file of its own; ``None``: a new file in the working directory. The
            ranks of torchrun or of ``accelerate launch`` share a new folder there; on several
            hosts, name one.
        steps: make a span of each stretch between two steps of PyTorch's optimizers.

    Returns:
        The recording; its ``path`` is the file.

    Raises:
        FileError: the file is there already, or can't be written.
        BusyError: this process is being recorded already, or the extension is loaded in it.

    Example:
        >>> with gpumemwidget.record("runs/first.jsonl"):
        ...     for epoch in range(3):
        ...         with gpumemwidget.span("epoch", epoch):
        ...             table = torch.zeros(1024, 1024)
    """
    from gpumemwidget.remote.writer.recorder import FileRecording  # noqa: PLC0415 - when it is used

    return FileRecording(to, counts_steps=steps)


def span(name: str, number: int | None = None) -> AbstractContextManager[None]:
    """Measure a ``with`` block of a recorded program: its change and its exact peaks.

    Spans may lie within one another, and beside one another in several threads. Short ones of one
    name in a row are joined in the record. Where the program is not recorded, nothing is done.

    Args:
        name: what the block does: ``"epoch"``, ``"validation"``. A number at its end is taken for
            the number: ``"epoch 3"``.
        number: which one of that name it is.

    Example:
        >>> with gpumemwidget.span("epoch", 3):
        ...     table = torch.zeros(1024, 1024)
    """
    from gpumemwidget.remote.writer.recorder import MeasuredSpan  # noqa: PLC0415 - when it is used

    return MeasuredSpan(name, number)


def load(path: str | os.PathLike[str]) -> Recordings:
    """Open what ``record`` or ``python -m gpumemwidget run`` has written, or is writing.

    Displayed, it is the report. In code, ``.processes`` has the state of each process: its newest
    counters, peaks, spans and cards of OOMs; ``.update()`` reads what has come since.

    Args:
        path: a file, or a folder with the files of several processes. The report names those that
            can't be read.

    Raises:
        FileError: nothing is there, or nothing of it can be read.
        RecordingError: it is no recording.

    Example:
        >>> gpumemwidget.record("runs/second.jsonl").close()
        >>> runs = gpumemwidget.load("runs")
        >>> [state.status for state in runs.processes]
        ['ended']
    """
    from gpumemwidget.remote.reader.recordings import Recordings  # noqa: PLC0415 - when it is used

    with _show_progress("gpumemwidget.load()"):
        return Recordings(path)


def compare(a: object, b: object) -> Comparison:
    """Compare two results: what has more bytes in the second one, and what has fewer.

    Displayed, it is one sentence and a table for each figure that has changed. The rows of a figure
    add up to its change. Rows are matched by their words, lines by their text.

    Args:
        a: an account (``owners()``), whole devices (``breakdown()``), a cell
            (``monitor().ledger[4]``), a trace, a prediction, recorded processes (``load()``), or
            the path of a recording or of a memory snapshot.
        b: another one of the same kind, or the run of the prediction ``a``: its trace or its cell.

    Returns:
        ``rows`` and ``change_bytes`` of the figure that has changed most, in bytes, and ``totals``
        with all of them. ``list_growth(0.02)`` returns why a peak may have grown by more than 2 %.

    Raises:
        BadInputError: they can't be compared.

    Example:
        >>> before = gpumemwidget.owners()
        >>> added = torch.zeros(1024, 1024)
        >>> change = gpumemwidget.compare(before, gpumemwidget.owners())
        >>> [row.where for row in change.rows if row.change_bytes >= 4 * 1024**2]
        ['added']
    """
    from gpumemwidget.comparing import compare as compare_any  # noqa: PLC0415 - when used

    return compare_any(a, b)


def watch_loop(source: Iterable[_T]) -> WatchedLoop[_T]:
    """Mark the end of each turn of a loop as the end of a step.

    ``for batch in gpumemwidget.watch_loop(loader):`` yields what the loader does. Without it, steps
    are those of PyTorch's optimizers, which an evaluation has none of. With the extension loaded, a
    loop that keeps more with each step is reported under its cell; within ``assert_no_growth``
    these are the steps that are compared. Elsewhere nothing is done.

    Args:
        source: what the loop goes through, such as a ``DataLoader``.

    Returns:
        What yields the same items. Its ``len()`` is the source's.

    Raises:
        BadInputError: ``source`` can't be gone through.

    Example:
        >>> for batch in gpumemwidget.watch_loop([1, 2]):
        ...     print(batch)
        1
        2
    """
    # Datasets of PyTorch's have items by number alone.
    is_loop = isinstance(source, Iterable) or hasattr(type(source), "__getitem__")
    if not is_loop or isinstance(source, (str, bytes, bytearray)):
        raise BadInputError(
            f"watch_loop() can't go through what is of type {name_type(source)}: give what a loop "
            "goes through, as in watch_loop(loader); for recorded processes it is watch(FOLDER)"
        )
    from gpumemwidget.checks.memory_growth import WatchedLoop  # noqa: PLC0415 - when it is used

    return WatchedLoop(source)


def watch(path: str | os.PathLike[str]) -> Watch:
    """Show recorded processes in the dashboard, while they run and after.

    The tab *Processes* has them with their GPUs; what is written from now on appears there within a
    second. The files may lie on a share that other machines write to.

    Args:
        path: a file that ``record`` or ``python -m gpumemwidget run`` writes, or a folder for them,
            in which new ones are found.

    Returns:
        What ends it with ``close()``.

    Raises:
        BadInputError: ``path`` is no path.
        NotLoadedError: the extension is not loaded.
        FileError: nothing is there.
        RecordingError: it is a file, and no recording.

    Example:
        >>> runs = gpumemwidget.watch(".")
        >>> runs.close()
    """
    if not isinstance(path, (str, os.PathLike)):
        raise BadInputError(
            "watch() needs the path of recorded processes, such as 'runs', and not what is of type "
            f"{name_type(path)}; a loop is watched by watch_loop(loader)"
        )
    processes = _attach_processes()
    from gpumemwidget.remote.reader.recordings import open_source  # noqa: PLC0415 - when used

    return processes.add(open_source(path))


def watch_cluster(client: object = None) -> Watch:
    """Show the processes of an engine in the dashboard: their memory, their peaks and what runs.

    Args:
        client: an ``ipyparallel.Client``, or a ``distributed.Client`` of Dask; ``None`` for Ray,
            after ``ray.init(runtime_env=gpumemwidget.ray_env())``.

    Returns:
        What ends it with ``close()``, here and in the engine's processes.

    Raises:
        NotLoadedError: the extension is not loaded.
        BadInputError: it is none of these, or Ray does not run.

    Example:
        With ``client = ipyparallel.Cluster(n=4).start_and_connect_sync()``:

        >>> watch = gpumemwidget.watch_cluster(client)
        >>> watch.close()
    """
    processes = _attach_processes()
    library = type(client).__module__.partition(".")[0]
    known: Any = client
    # Each brings a library that the user may not have.
    if library == "ipyparallel":
        from gpumemwidget.remote.engines.ipyparallel import IpyparallelSource  # noqa: PLC0415

        return processes.add(IpyparallelSource(known))
    if library == "distributed":
        from gpumemwidget.remote.engines.dask import DaskSource  # noqa: PLC0415

        return processes.add(DaskSource(known))
    if client is None and "ray" in sys.modules:
        from gpumemwidget.remote.engines.ray import RaySource  # noqa: PLC0415

        return processes.add(RaySource())
    raise BadInputError(
        f"a client can't be of type {name_type(client)}: give an ipyparallel.Client, a "
        "distributed.Client, or, for Ray, nothing, and call ray.init() first"
    )


def ray_env(runtime_env: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a runtime environment of Ray's in which ``watch_cluster`` finds each worker.

    Ray calls its ``worker_process_setup_hook`` in each worker before the first task. That starts a
    thread, and imports nothing else before a notebook watches. A worker without gpumemwidget goes
    on as it would.

    Args:
        runtime_env: an environment of your own, to which this is added. A hook of its own is called
            first.

    Example:
        With this environment, ``ray.init(runtime_env=env)`` begins:

        >>> env = gpumemwidget.ray_env({"env_vars": {"OMP_NUM_THREADS": "4"}})
        >>> list(env)
        ['env_vars', 'worker_process_setup_hook']
    """
    from gpumemwidget.remote.engines import ray  # noqa: PLC0415 - an extra

    return ray.ray_env(runtime_env)


def predict(
    step: Callable[..., object],
    *args: Any,
    device: str | None = None,
    on: str | int | None = None,
    steps: int | None = None,
    remedies: bool | None = None,
    **kwargs: Any,
) -> Prediction:
    """Predict the memory that a step takes, before it runs (``%%memfit``).

    The step is carried out on copies of its arguments whose tensors have no memory: nothing is
    computed, nothing is allocated on the device, nothing of yours is changed. What it would
    allocate is played into a simulation of PyTorch's allocator as it is now. It works without a
    GPU, too.

    Args:
        step: a function, such as one step of a training.
        *args: its arguments: the model, the optimizer, the batch.
        device: the device, ``"cuda:1"``; ``None``: the first one.
        on: another device instead, which need not be here: the name of a GPU (``"T4"``), or the
            memory that PyTorch would find there (``"15GiB"``).
        steps: how often the step runs; ``None``: three times, and on until the optimizer has its
            state, as memory may lie differently from then on.
        remedies: predict the step again with each change that may need less (checkpointing,
            autocast, another optimizer …); ``None``: only if it does not fit.
        **kwargs: its arguments by keyword.

    Returns:
        A ``Prediction`` that displays itself as the report; all amounts are in bytes.

    Raises:
        PredictionError: the step does, or holds, what can't be carried out without computing.
        BadInputError: there is no such device.

    Example:
        >>> layer = torch.nn.Linear(1024, 1024)
        >>> prediction = gpumemwidget.predict(layer, torch.zeros(8, 1024), on="T4")
        >>> prediction.fits
        True
        >>> prediction.reserved_peak_bytes >= prediction.allocated_peak_bytes > 4_000_000
        True
    """
    from gpumemwidget.session.step_predictions import predict  # noqa: PLC0415 - when it is used

    with _show_progress("predict"):
        return predict(step, args, kwargs, device=device, on=on, steps=steps, remedies=remedies)


def largest_batch(
    step: Callable[..., object],
    batch: object,
    dim: int = 0,
    *,
    device: str | None = None,
    on: str | int | None = None,
    steps: int | None = None,
) -> LargestBatch:
    """Find the largest batch that fits, by predicting some sizes (``%%memfit --batch``).

    Only a size that was itself predicted, and surely fits, is answered. Nothing runs and nothing is
    allocated on the device; see ``predict``.

    Args:
        step: a function of the batch alone, such as ``lambda batch: train(model, batch)``.
        batch: a tensor, or a list, a tuple or a dictionary of tensors. Those that are as long in
            the dimension as the first one get another size.
        dim: the dimension: 0 for the number of examples, 1 for the length of sequences.
        device: the device, ``"cuda:1"``; ``None``: the first one.
        on: another device instead: ``"T4"``, ``"15GiB"``.
        steps: how often the step runs in each prediction; see ``predict``.

    Returns:
        ``.size``, and ``.predictions`` by size. It displays itself as the report.

    Raises:
        PredictionError: the step does, or holds, what can't be carried out without computing.
        BadInputError: the batch has no such dimension, or there is no device to compare with.

    Example:
        >>> layer = torch.nn.Linear(1024, 1024)
        >>> found = gpumemwidget.largest_batch(layer, torch.zeros(8, 1024), on="2GiB")
        >>> found.predictions[found.size].fits
        True
    """
    from gpumemwidget.session.step_predictions import find_largest_batch  # noqa: PLC0415 - when used

    with _show_progress("largest_batch"):
        return find_largest_batch(step, (batch,), batch, dim=dim, device=device, on=on, steps=steps)


def assert_no_growth(
    limit: int | str = "1MiB", *, warmups: int = 2, device: str | None = None
) -> AbstractContextManager[None]:
    """Fail a ``with`` block that leaves more memory in use, as a test of a training loop does.

    Compared are the ends of steps: those of PyTorch's optimizers, or of the loops in the block that
    go through ``watch``. The first ones, in which optimizers and caches get their memory, are left
    out. A block without steps is compared from its beginning to its end, after a ``gc.collect()``
    at both. What only waits for the garbage collector never counts. It works in any process, with
    the extension or without it.

    Args:
        limit: the growth that is allowed in all, in bytes, or as text such as ``"1MiB"``.
        warmups: number of steps that are left out.
        device: the device that counts, ``"cuda:0"`` or ``"host"``; ``None``: each GPU in use or,
            where none is, what malloc has handed out on the host.

    Raises:
        AssertionError: memory has grown by more; the message has the bytes, the steps, and who
            holds them.
        BadInputError: not an amount, no such device, or all steps were left out.

    Example:
        >>> losses = []
        >>> with gpumemwidget.assert_no_growth("1MiB"):
        ...     for batch in gpumemwidget.watch_loop(range(10)):
        ...         losses.append((weights * batch).sum().item())
        >>> with gpumemwidget.assert_no_growth("1MiB", device="host"):
        ...     copies = [weights.clone() for _ in range(10)]
        Traceback (most recent call last):
            ...
        AssertionError: host memory grew by 40.00 MiB, and the limit is 1.00 MiB.
        Held there now: 40.00 MiB copies[…], 4.00 MiB weights.
    """
    from gpumemwidget.checks.memory_growth import assert_no_growth as check  # noqa: PLC0415 - when it is used

    return check(limit, warmups=warmups, device=device)


def last_failure() -> str | None:
    """Return the traceback of our own last failure, for a bug report; ``None`` without one.

    Raises:
        NotLoadedError: the extension is not loaded.

    Example:
        >>> gpumemwidget.last_failure() is None
        True
    """
    return current_session().last_failure


def _attach_processes() -> Processes:
    """Return the recorded processes that the session watches."""
    session = current_session()
    from gpumemwidget.remote.reader.recordings import Processes  # noqa: PLC0415 - when it is used

    return session.attach(Processes)


def _show_progress(what: str) -> AbstractContextManager[None]:
    """Show below a notebook's cell how far a function has got; nothing in a script."""
    if "IPython" not in sys.modules:
        return nullcontext()
    from gpumemwidget.widgets.progress_line import show_progress  # noqa: PLC0415 - brings IPython

    return show_progress(what)


def _show_if_interrupted(report: ReleaseReport | RestoreReport) -> None:
    """Display what was done until a Ctrl-C came, and raise its ``ReleaseInterrupt``."""
    if report.is_interrupted:
        from gpumemwidget.jupyter.magics import show_outcome  # noqa: PLC0415 - brings IPython

        show_outcome(report)
