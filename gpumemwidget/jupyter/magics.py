"""Define the magics: each parses its line, calls the session and displays what comes back."""
# IPython's decorators for arguments have no types.
# mypy: disable-error-code="untyped-decorator, no-untyped-call"

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.utils.process import arg_split  # type: ignore[attr-defined]

from gpumemwidget.errors import BadInputError, GpuMemError, ReleaseInterrupt
from gpumemwidget.model.cells import LedgerSort
from gpumemwidget.model.encoding import encode_records
from gpumemwidget.model.leaks import FoundLeaks
from gpumemwidget.model.releases import ReleaseReport, ReleaseRequest, RestoreReport
from gpumemwidget.model.traces import TraceRequest
from gpumemwidget.recording.files import find_target, refuse_target, write_whole
from gpumemwidget.report.devices import describe_budgets, report_limits, report_reset, report_stat
from gpumemwidget.report.release import (
    report_plan,
    report_release,
    report_restore,
    report_restore_plan,
)
from gpumemwidget.report.render.blocks import MOST_ROWS, Cell, Column, Note, Table
from gpumemwidget.report.render.output import Report
from gpumemwidget.session.interrupts import InterruptHold
from gpumemwidget.session.leak_watch import LeakWatch
from gpumemwidget.session.session import Session, check_rows
from gpumemwidget.session.tracer import make_trace_request
from gpumemwidget.widgets.progress_line import display, show_progress

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from gpumemwidget.remote.reader.recordings import Processes


# -- Reading a line --------------------------------------------------------------------------------


@contextmanager
def _parsing(magic: Any, line: str, *, has_cell: bool) -> Iterator[argparse.Namespace]:
    """Yield the arguments of a magic; show how far it has got, and refusals as one line.

    A refusal is IPython's own ``UsageError``; its subclasses would come with a traceback.
    """
    try:
        with show_progress(_name_magic(magic, has_cell=has_cell)):
            yield _parse_line(magic, line, has_cell=has_cell)
    except GpuMemError as exc:
        raise UsageError(str(exc)) from None


def _parse_line(magic: Any, line: str, *, has_cell: bool) -> argparse.Namespace:
    """Return the arguments of a magic, its method, from what was typed behind its name."""
    try:
        args: argparse.Namespace = magic.parser.parse_args(arg_split(line))
    except (UsageError, ValueError) as exc:
        # ValueError: a quote that is not closed.
        name = _name_magic(magic, has_cell=has_cell)
        raise BadInputError(f"{name}: {exc}; {name}? shows what it takes") from None
    for key, value in vars(args).items():
        if isinstance(value, str):
            setattr(args, key, _unquote(value))
    return args


def _name_magic(magic: Any, *, has_cell: bool) -> str:
    """Return the name of a magic as it is typed: ``%memstat``, ``%%memfit``."""
    return f"{'%%' if has_cell else '%'}{magic.__name__}"


def _unquote(text: str) -> str:
    """Return the text without quotes around it, which IPython's splitting leaves."""
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    return text


def _read_names(words: Sequence[str]) -> tuple[str, ...]:
    """Return the names in a line, also if they are typed as in Python: ``x, y``."""
    names = (_unquote(word.rstrip(",")) for word in words)
    return tuple(name for name in names if name)


# -- Types of arguments ----------------------------------------------------------------------------


def _split_batch(text: str) -> tuple[list[str], int | None]:
    """Return the names of a batch and the size that is asked for, as of ``x,target=64``."""
    names, given, size = map(str.strip, text.partition("="))
    if given and not (size.isdecimal() and int(size) > 0):
        raise BadInputError(f"a batch can't have the size {size!r}: give 1 or more")
    if given and not names:
        raise BadInputError(f"name the batch of {size}: --batch x={size}")
    return names.replace(",", " ").split(), int(size) if given else None


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _dimension(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a dimension: 0, 1, …")
    return int(text)


def _make_magic(kind: Any, method: Callable[..., None]) -> Any:
    """Return a magic: it parses its line, and calls a method with the arguments and the cell."""

    @functools.wraps(method)
    def call(self: Any, line: str, *cell: str) -> None:
        with _parsing(getattr(self, method.__name__), line, has_cell=bool(cell)) as args:
            method(self, args, *cell)

    return kind(magic_arguments()(call))


_line_magic = functools.partial(_make_magic, line_magic)
_cell_magic = functools.partial(_make_magic, cell_magic)


def _show(
    args: argparse.Namespace, kind: str, records: object, report: Callable[[], object]
) -> None:
    """Display a report; with ``--json`` print its records instead."""
    if args.json:
        print(encode_records(kind, records))
    else:
        display(report())


def _refuse_beside(option: str, given: Mapping[str, object]) -> None:
    """Refuse what would have no effect beside an option."""
    for name, value in given.items():
        if value:
            raise BadInputError(f"{name} has no effect beside {option}: leave one of them out")


def _refuse_without(option: str, given: Mapping[str, object]) -> None:
    """Refuse what would have no effect without an option, which is missing."""
    for name, value in given.items():
        if value:
            raise BadInputError(f"{name} has no effect without {option}: give both, or neither")


_json = argument(
    "--json", action="store_true", help="print the records as one line of JSON: bytes and seconds"
)


# -- The magics ------------------------------------------------------------------------------------


@magics_class
class MemMagics(Magics):
    """The magics of one shell."""

    def __init__(self, shell: InteractiveShell, session: Session) -> None:
        super().__init__(shell)
        self._shell = shell
        self._session = session

    @_line_magic
    @argument(
        "--device",
        nargs="?",
        const="",
        metavar="D",
        help="show whole devices instead, each in parts that add up to all of it: cuda:0, host "
        "(without D: every one); of one alone also where its blocks lie",
    )
    @argument(
        "--all",
        action="store_true",
        help="also the processes that are watched: ranks, engines, workers, actors",
    )
    @_json
    def memstat(self, args: argparse.Namespace) -> None:
        """Show the memory of every device now, and what it is used for.

        For each GPU and the host: what is allocated, reserved and was the peak in this process;
        what of it is parameters, gradients, optimizer state, saved for backward and so on; and what
        is used and free on the whole device, other processes included.

        With --device, a device's whole memory, from what tensors hold to what is free: what PyTorch
        keeps in reserve, what this process has beside that, which other processes there are, and
        what can be done about it.

        Example: %memstat --device cuda:0
        """
        if args.device is not None:
            _refuse_beside("--device", {"--all": args.all})
            device = args.device or None
            whole = self._session.breakdown(device, with_maps=device is not None)
            _show(args, "breakdowns", whole.records, lambda: whole)
            return
        devices = self._session.stat()
        if args.json:
            _refuse_beside("--json", {"--all": args.all})
            print(encode_records("devices", devices))
            return
        account = self._session.owners()
        display(report_stat(devices, self._session.hardware.take_notes(), account))
        if args.all:
            display(self._processes.report())

    @_line_magic
    @argument(
        "names",
        nargs="*",
        metavar="NAME",
        help='a row to open: a variable, Out[7], "last exception", "no variable" (default: all, '
        "none opened)",
    )
    @argument("--device", metavar="D", help="one device only: cuda:0, host (default: all)")
    @argument(
        "--all",
        action="store_true",
        help="all levels, and up to 500 lines of each list; --json has all anyway",
    )
    @_json
    def memvars(self, args: argparse.Namespace) -> None:
        """Show which variables own the allocated memory, down to the last byte.

        For each device the rows (variables, Out, the last exception, modules, threads, what has no
        name), with bytes, share, what each frees if released alone, kinds, and who shares it.

        Example: %memvars model --all
        """
        from gpumemwidget.report.account import report_account  # noqa: PLC0415 - when used

        names = _read_names(args.names)
        if args.json:
            _refuse_beside("--json", {"a name": names, "--device": args.device})
        account = self._session.owners()
        check_rows(account, names, self._session.shell.list_user_names())
        report = functools.partial(report_account, device=args.device, is_whole=args.all)
        _show(args, "account", account, lambda: report(account, names))

    @_line_magic
    @argument(
        "expression",
        nargs="*",
        metavar="NAME|EXPRESSION",
        help="a variable, or a part of one such as model.layers[0].weight or Out[7]; it is looked "
        "up, not evaluated",
    )
    @argument("--unnamed", action="store_true", help="what no variable leads to")
    @_json
    def memwhy(self, args: argparse.Namespace) -> None:
        """Show what holds some memory, path by path, and how to release it.

        Example: %memwhy model.layers[0].weight
        """
        from gpumemwidget.report.release import report_explanation  # noqa: PLC0415 - when used

        expression = _unquote(" ".join(args.expression))
        found = self._session.why(expression, unnamed=args.unnamed)
        _show(args, "explanation", found, lambda: report_explanation(found))

    @_line_magic
    @argument(
        "--export",
        metavar="FILE",
        help="write the cells to FILE instead: .csv, .json or .parquet, by its suffix; all of "
        "them, a row for each cell and device, in bytes and seconds",
    )
    @argument("--force", action="store_true", help="let --export take the place of a file")
    @argument(
        "--all",
        action="store_true",
        help="the last 500 cells, also those with nothing but %%mem… magics (default: the last 50 "
        "others), and what the processes that are watched did; --export and --json have all cells "
        "anyway",
    )
    @argument(
        "--sort",
        choices=get_args(LedgerSort),
        help="the cells with the largest of these first (default: as they ran)",
    )
    @_json
    def memledger(self, args: argparse.Namespace) -> None:
        """Show the recorded cells: duration, status, change and peak on each device.

        Example: %memledger --sort change
        """
        ledger = self._session.monitor.ledger
        if args.export is None:
            _refuse_without("--export", {"--force": args.force})
        else:
            _refuse_beside("--export", {"--json": args.json, "--sort": args.sort})
            path = ledger.export(args.export, force=args.force)
            print(f"{len(ledger)} cell{'' if len(ledger) == 1 else 's'} written to {path}")
            if args.all and self._processes.sources:
                print("The spans of the processes that are watched are not in it.")
            return
        if args.json:
            _refuse_beside("--json", {"--sort": args.sort})
            print(encode_records("cells", ledger.records))
            return
        from gpumemwidget.report.cell import report_ledger  # noqa: PLC0415 - when it is used

        n_shown = None if args.all else MOST_ROWS
        leaks = self._session.attach(LeakWatch).list_leaks_by_cell()
        display(
            report_ledger(
                ledger.records,
                dropped=ledger.dropped,
                n_shown=n_shown,
                leaks=leaks,
                sort=args.sort,
            )
        )
        if args.all and self._processes.sources:
            display(self._processes.report_spans())

    @_line_magic
    @argument(
        "names",
        nargs="*",
        metavar="NAME",
        help='a variable, or a row such as Out[7] or "last exception"',
    )
    @argument("--dry-run", action="store_true", help="show the plan and change nothing")
    @argument("--keep", action="store_true", help="leave copies on the CPU under the names")
    @argument("--out", action="store_true", help="also what IPython holds of displayed values")
    @argument("--exceptions", action="store_true", help="also the last exception and its frames")
    @argument(
        "--cublas",
        action="store_true",
        help="also cuBLAS's workspaces; the next matrix product makes its own anew",
    )
    @argument(
        "--libraries",
        action="store_true",
        help="also what CuPy keeps of a GPU for its next arrays",
    )
    def memrelease(self, args: argparse.Namespace) -> None:
        """Release what variables hold: move, set to None, collect, empty the cache, measure.

        What others hold as well is moved to the CPU in place; nothing else is copied, and
        %memrestore brings it back. The report says what each step freed, and what still holds
        the rest.

        Example: %memrelease x y --dry-run
        """
        request = ReleaseRequest(
            _read_names(args.names),
            keep=args.keep,
            out=args.out,
            exceptions=args.exceptions,
            cublas=args.cublas,
            libraries=args.libraries,
        )
        if args.dry_run:
            display(report_plan(self._session.plan_release(request)))
        else:
            show_outcome(self._session.release(request))

    @property
    def _processes(self) -> Processes:
        from gpumemwidget.remote.reader.recordings import Processes  # noqa: PLC0415 - when used

        return self._session.attach(Processes)

    @_line_magic
    @argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="what a release left on the CPU: a variable, or a row such as Out[7]",
    )
    @argument("--dry-run", action="store_true", help="show the plan and change nothing")
    def memrestore(self, args: argparse.Namespace) -> None:
        """Bring back to its devices what %memrelease moved to the CPU, all of it or nothing.

        The tensors stay the same objects, tied and viewed as they are. What was made on the CPU
        since (a gradient, an optimizer's state) stays there, and the report says so.

        Example: %memrestore model
        """
        names = _read_names(args.names)
        if args.dry_run:
            display(report_restore_plan(self._session.plan_restore(names)))
        else:
            show_outcome(self._session.restore(names))

    @_line_magic
    @argument(
        "limit",
        nargs="*",
        metavar="LIMIT",
        help="a share such as 0.8 or 80%%, an amount such as 12GiB, exact to the byte, or off "
        "(default: show the limits)",
    )
    @argument(
        "--device",
        metavar="D",
        help="one GPU: cuda:0 (default: every one in use; for off, or where none is, every one "
        "there is)",
    )
    def memlimit(self, args: argparse.Namespace) -> None:
        """Limit what PyTorch may reserve on a GPU: beyond it a request is an out-of-memory error.

        It is PyTorch's own limit (torch.cuda.set_per_process_memory_fraction), of this process:
        import torch first. A GPU that is not in use stays so. %unload_ext leaves the limits that
        are set.

        Example: %memlimit 0.8 --device cuda:0
        """
        text = " ".join(map(_unquote, args.limit))
        limits = self._session.limit(text or None, device=args.device)
        display(report_limits(limits, self._session.hardware.take_notes()))

    @_line_magic
    @argument("--device", metavar="D", help="one GPU: cuda:0 (default: every one in use)")
    def memreset(self, args: argparse.Namespace) -> None:
        """Reset PyTorch's peaks, as torch.cuda.reset_peak_memory_stats() does.

        The peaks of the recorded cells stay exact: they are not PyTorch's own.

        Example: %memreset
        """
        before = self._session.hardware.read_as_user()
        display(report_reset(self._session.reset_peaks(args.device), before))

    @_line_magic
    @argument(
        "amount",
        nargs="*",
        metavar="AMOUNT",
        help="what a cell may have allocated, such as 10GiB, or off (default: show the budgets)",
    )
    @argument(
        "--device",
        metavar="D",
        help="one device: cuda:0, or host for this process's resident size (default: every GPU, "
        "those that come into use later too)",
    )
    def membudget(self, args: argparse.Namespace) -> None:
        """Mark cells that allocate more than a budget on any GPU.

        It counts from the next cell on, by the exact peak; off counts at once. A cell that begins
        beyond it counts once it rises above the bytes at its start. PyTorch is not limited:
        %memlimit does that.

        Example: %membudget 10GiB
        """
        text = " ".join(map(_unquote, args.amount)) or None
        shown = self._session.budget(text, device=args.device)
        has_new = text is not None and text.lower() != "off"
        print(describe_budgets(shown, has_new=has_new))

    @_line_magic
    @argument(
        "action",
        nargs="?",
        choices=("ignore", "unignore"),
        help="report a holder no more, or again",
    )
    @argument("name", nargs="*", help="variables, or a holder as the table names it")
    @_json
    def memleak(self, args: argparse.Namespace) -> None:
        """Show what grows from run to run of a cell, or with the steps of a loop.

        Each with the bytes that are added, the line that adds them, and what holds them. What grows
        by design can be ignored.

        Example: %memleak ignore history
        """
        from gpumemwidget.report.leaks import report_leaks  # noqa: PLC0415 - when it is used

        watch = self._session.attach(LeakWatch)
        # A holder's name may have spaces in it.
        are_variables = all(name.isidentifier() for name in args.name)
        names = args.name if are_variables else [_unquote(" ".join(args.name))]
        if bool(args.action) != bool(names) or "" in names:
            raise BadInputError("%memleak takes ignore NAME, unignore NAME, or nothing")
        for name in names:
            if args.action == "ignore":
                watch.ignore(name)
            elif not watch.unignore(name):
                raise BadInputError(f"{name!r} is not ignored: %memleak lists what is")
        found = watch.list_leaks(), watch.list_unexplained(), watch.list_ignored()
        _show(args, "leaks", FoundLeaks(*found), lambda: report_leaks(*found))

    @_line_magic
    @argument(
        "cells",
        nargs="*",
        type=_positive_int,
        metavar="N",
        help="the numbers of two cells: 4 9 (default: the last two runs of one cell)",
    )
    def memdiff(self, args: argparse.Namespace) -> None:
        """Compare two recorded cells: at their peaks and at their ends, the largest change first.

        Cells that ran under %%memtrace are compared by what was allocated at the peak and by line.

        Example: %memdiff 4 9
        """
        from gpumemwidget.comparing import compare, find_cells  # noqa: PLC0415 - when used

        if len(args.cells) not in (0, 2):
            raise BadInputError("%memdiff takes the numbers of two cells, or nothing")
        history = self._shell.history_manager
        sources = {} if history is None else dict(enumerate(history.input_hist_raw))
        cells = find_cells(self._session.monitor.ledger, tuple(args.cells) or None, sources)
        traces = [self._session.find_trace(cell) for cell in cells]
        display(compare(*(traces if all(traces) else cells)))

    @_line_magic
    @argument("file", metavar="FILE", help="the page to write: story.html")
    @argument("--redact", action="store_true", help="hide names, paths and lines of code")
    @argument("--force", action="store_true", help="take the place of a file")
    def memsave(self, args: argparse.Namespace) -> None:
        """Write the session as one page: the plot, cells, cards, traces, growth, owners, devices.

        It needs nothing else and fetches nothing, so that it can be attached to a report of a bug.

        Example: %memsave story.html --redact
        """
        from gpumemwidget.session.story import write_story  # noqa: PLC0415 - when it is used

        target = find_target(args.file, example="story.html")
        refuse_target(target, force=args.force)
        page = write_story(self._session, is_redacted=args.redact)
        write_whole(target, page.encode("utf-8", "replace"))
        print(f"written to {target}")

    @_line_magic
    def memhelp(self, _args: argparse.Namespace) -> None:
        """Show all magics in a table, each with an example.

        Example: %memhelp
        """
        display(_tabulate_magics(self))

    @_line_magic
    @argument(
        "--side",
        action="store_true",
        help="beside the notebook, where JupyterLab or Notebook 7 has gpumemwidget's panel; "
        "elsewhere below the cell",
    )
    def memdash(self, args: argparse.Namespace) -> None:
        """Show the dashboard: the live plot, the cells, the variables, whole devices.

        Example: %memdash --side
        """
        from gpumemwidget.widgets.dashboard import Dashboard  # noqa: PLC0415 - brings ipywidgets

        self._session.attach(Dashboard).show(is_beside=args.side)

    @magic_arguments()
    @argument(
        "state",
        nargs="*",
        metavar="on|off",
        help="%%memtrace on its own line: a line under every cell from the next one on, or no more",
    )
    @argument("--device", metavar="D", help="report one device only: cuda:0, host (default: all)")
    @argument(
        "--lines",
        type=_positive_int,
        metavar="N",
        help="the N lines of each source that did most (default: all of the cell's)",
    )
    @argument(
        "--snapshot",
        metavar="FILE",
        help="also write FILE, a .pickle, for pytorch.org/memory_viz and for --load; of GPUs",
    )
    @argument("--force", action="store_true", help="let --snapshot take the place of a file")
    @argument(
        "--load",
        metavar="FILE",
        help="%%memtrace on its own line: the report of a snapshot of PyTorch's",
    )
    @line_cell_magic
    def memtrace(self, line: str, cell: str | None = None) -> None:
        """Report which lines of a cell took memory: write it above the cell.

        Before, after, change and peak (bytes in binary units), a timeline, and line by line what
        was allocated, is still held, and was held at the peak.
        As %memtrace on, a line under every cell; %memtrace alone says whether that is on.

        Example: %%memtrace --lines 10
        """
        with _parsing(self.memtrace, line, has_cell=cell is not None) as args:
            if cell is None:
                self._set_line(args)
                return
            self._make_request(args)
        # The line is valid, so IPython did not read this cell as typed (then the transformer would
        # have taken the line out): code has called the magic. Do what is done to a typed cell.
        self._shell.run_cell(f"%%memtrace {line}\n{cell}").raise_error()

    @_cell_magic
    @argument("--device", metavar="D", help="the device: cuda:1 (default: the first one)")
    @argument(
        "--on",
        metavar="SIZE",
        help="a device that need not be here: the memory that PyTorch would find there (15GiB), or "
        "a GPU's name (T4)",
    )
    @argument(
        "--batch",
        nargs="+",
        default=[],
        metavar="NAME",
        help="find the largest size of this batch that fits; with its labels: --batch x,target; "
        "and whether 64 fits: --batch x,target=64",
    )
    @argument(
        "--dim",
        type=_dimension,
        default=0,
        metavar="N",
        help="the dimension that --batch is about: 0 for examples, 1 for the length (default: 0)",
    )
    @argument(
        "--steps",
        type=_positive_int,
        metavar="N",
        help="how often the cell runs (default: 3 times, and on until the optimizer has its state)",
    )
    @argument("--remedies", action="store_true", help="try what would need less, though it fits")
    def memfit(self, args: argparse.Namespace, cell: str) -> None:
        """Predict what a cell takes of a GPU, and whether it fits, without running it.

        The cell is carried out on copies whose tensors have no memory: nothing is computed, and
        nothing of yours is changed. A loop over a loader can't be predicted: take a batch before.

        Example: %%memfit --on T4
        """
        from gpumemwidget.session.step_predictions import predict_cell  # noqa: PLC0415 - when used

        batch, size = _split_batch(" ".join(args.batch))
        if batch:
            _refuse_beside("--batch", {"--remedies": args.remedies})
        else:
            _refuse_without("--batch", {"--dim": args.dim})
        display(
            predict_cell(
                cell,
                self._shell.transform_cell,
                self._shell.user_ns,
                batch=batch,
                size=size,
                dim=args.dim,
                device=args.device,
                on=args.on,
                steps=args.steps,
                remedies=args.remedies or None,
            )
        )

    def read_request(self, text: str) -> TraceRequest | None:
        """Return the request behind ``%%memtrace``; ``None`` if it is not valid."""
        try:
            return self._make_request(_parse_line(self.memtrace, text, has_cell=True))
        except GpuMemError:
            return None
        except Exception as exc:  # noqa: BLE001 - this runs before the cell, which must not fail by it
            self._session.report_failure("reading the options of %%memtrace", exc)
            return TraceRequest()

    def _make_request(self, args: argparse.Namespace) -> TraceRequest:
        if args.state:
            raise BadInputError(
                f"{' '.join(args.state)!r} has no place above a cell: give options only, or write "
                "%memtrace on in a cell of its own"
            )
        if args.load is not None:
            raise BadInputError("--load goes into a cell of its own: %memtrace --load FILE")
        if args.snapshot is None:
            _refuse_without("--snapshot", {"--force": args.force})
        return make_trace_request(
            self._session.hardware,
            device=args.device,
            n_lines=args.lines,
            snapshot=args.snapshot,
            force=args.force,
        )

    def _set_line(self, args: argparse.Namespace) -> None:
        session = self._session
        state = " ".join(args.state)
        given = {key for key, value in vars(args).items() if value not in (None, False, [])}
        if args.load is not None and given <= {"load", "lines"}:
            from gpumemwidget.report.trace import report_trace  # noqa: PLC0415 - when it is used
            from gpumemwidget.session.tracer import load_trace  # noqa: PLC0415

            trace = load_trace(args.load).trace
            display(report_trace(trace, (), n_lines=args.lines))
        elif given <= {"state"} and state in ("", "on", "off"):
            session.shows_line = session.shows_line if state == "" else state == "on"
            more = ": one summary line after every cell, starting with the next." * (state == "on")
            print(f"memtrace is {'on' if session.shows_line else 'off'}{more}")
        else:
            raise BadInputError(
                "%memtrace takes on, off, or --load FILE with --lines; other options go above a "
                "cell, with %%memtrace"
            )


# -- What the magics share -------------------------------------------------------------------------


def list_magics(magics: Magics) -> list[tuple[str, str]]:
    """Return the kind (``line``, ``cell``) and the name of each magic of an object."""
    return [(kind, name) for kind, table in magics.magics.items() for name in table]


def _tabulate_magics(magics: Magics) -> Report:
    """Return a table of all magics of an object: name, example and summary, from its docstring."""
    tables = magics.magics
    rows = []
    for name in dict.fromkeys(name for _, name in list_magics(magics)):
        method = tables["line"].get(name) or tables["cell"][name]
        text = " ".join(method.parser.description.split())
        summary, example = text.partition(". ")[0], text.rpartition("Example: ")[2]
        rows.append((Cell(example.partition(" ")[0]), Cell(example), Cell(summary)))
    table = Table(
        caption="The magics of gpumemwidget",
        columns=(
            Column("magic", "code"),
            Column("example", "code"),
            Column("what it does", "words", last="wrap"),
        ),
        groups=tuple((row,) for row in rows),
        caption_is_seen=False,
        stacks=True,
    )
    more = Note("%NAME? shows all options of one. Python functions: help(gpumemwidget).")
    return Report((table, more))


def show_outcome(report: ReleaseReport | RestoreReport) -> None:
    """Display what a release or a restore did, and end the cell if a Ctrl-C came meanwhile.

    Raises:
        ReleaseInterrupt: it was interrupted.
    """
    # The report is shown in any case: a Ctrl-C from here on ends the cell after it.
    with InterruptHold() as hold:
        if isinstance(report, ReleaseReport):
            display(report_release(report))
        else:
            display(report_restore(report))
    if report.is_interrupted or hold.is_due:
        raise ReleaseInterrupt(report)
