"""The magics: each parses, calls and displays."""
# IPython's decorators for arguments have no types.
# mypy: disable-error-code="untyped-decorator, no-untyped-call"

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import display

from gpumemwidget.errors import BadInputError, GpuMemError
from gpumemwidget.jupyter.memtrace import MemtraceOptions
from gpumemwidget.jupyter.parsing import parse_line, refusing, unquote

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from gpumemwidget.jupyter.extension import Extension

__all__ = ["MemMagics"]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no count: give a whole number above 0")
    return int(text)


def _depth(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no depth: give 0 or a whole number above it")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.01 <= seconds <= 60:
        raise argparse.ArgumentTypeError(f"{text!r} is no interval: give 0.01 to 60 seconds")
    return seconds


@magics_class
class MemMagics(Magics):
    """The magics of one shell.

    Args:
        shell: the shell.
        extension: what they act on.
    """

    def __init__(self, shell: InteractiveShell, extension: Extension) -> None:
        super().__init__(shell)
        self._shell = shell
        self._extension = extension

    @magic_arguments()
    @argument(
        "--device",
        nargs="?",
        const="",
        metavar="D",
        help="show whole devices instead, each in parts that add up to all of it: cuda:0, host "
        "(without D: every one); of one alone also where its blocks lie",
    )
    @line_magic
    def memstat(self, line: str) -> None:
        """Show the memory of every device now, and what it is for.

        For each GPU and the host: what is allocated, reserved and was the peak in this process;
        what of it is parameters, gradients, optimizer state, saved for backward and so on; and what
        is used and free on the whole device, other processes included.

        With --device, a device's whole memory, from what tensors hold to what is free: what PyTorch
        keeps in reserve, what this process has beside that, which other processes there are, and
        what can be done about each.
        """
        with refusing("memstat"):
            args = parse_line(self.memstat, line)
            if args.device is not None:
                from gpumemwidget.jupyter.bridgeapi import (  # noqa: PLC0415 - when it is used
                    take_bridges,
                )

                device = unquote(args.device) or None
                display(take_bridges(self._extension, device, with_maps=device is not None))
                return
            from gpumemwidget.owners.entries import (  # noqa: PLC0415 - when it is used
                take_memory_account,
            )
            from gpumemwidget.report.report import report_stat  # noqa: PLC0415

            shell, hardware = self._extension.shell, self._extension.monitor.hardware
            devices = hardware.read_devices()
            account = take_memory_account(shell, hardware)
            display(report_stat(devices, hardware.take_notes(), account))

    @magic_arguments()
    @argument(
        "names",
        nargs="*",
        metavar="NAME",
        help='a row to open: a variable, Out[7], "last exception", "no name" (default: all rows, '
        "none opened)",
    )
    @argument("--device", metavar="D", help="one device only: cuda:0, host (default: all)")
    @argument(
        "--depth",
        type=_count,
        metavar="N",
        help="how many levels to show, the rows being the first (default: 1, and 3 of a NAME)",
    )
    @argument(
        "--all",
        action="store_true",
        help="all lines, however many, and all levels unless --depth says how many",
    )
    @line_magic
    def memvars(self, line: str) -> None:
        """Show who owns what is allocated: the lines add up to the allocator's own figure.

        For each device the rows (variables, Out, the last exception, modules, threads, what has no
        name), with bytes, share, what each frees if released alone, kinds, and who shares it.
        """
        with refusing("memvars"):
            args = parse_line(self.memvars, line)
            names = [name for name in (unquote(each.rstrip(",")) for each in args.names) if name]
            from gpumemwidget.owners.entries import (  # noqa: PLC0415 - when it is used
                take_memory_account,
            )
            from gpumemwidget.report.report import report_account  # noqa: PLC0415
            from gpumemwidget.report.rows import check_rows  # noqa: PLC0415

            shell = self._extension.shell
            account = take_memory_account(shell, self._extension.monitor.hardware)
            check_rows(account, names, bound=shell.list_user_names())
            options: dict[str, int | None] = {"most": None, "depth": None} if args.all else {}
            if args.depth is not None:
                options["depth"] = args.depth
            device = None if args.device is None else unquote(args.device)
            display(report_account(account, names, device=device, **options))

    @magic_arguments()
    @argument(
        "expression",
        nargs="*",
        metavar="NAME|EXPRESSION",
        help="a variable, or a part of one such as model.layers[0].weight or Out[7]; it is looked "
        "up, not evaluated",
    )
    @argument("--unnamed", action="store_true", help="what no variable leads to")
    @line_magic
    def memwhy(self, line: str) -> None:
        """Show what holds some memory, path by path, and how to cut each."""
        with refusing("memwhy"):
            args = parse_line(self.memwhy, line)
            expression = unquote(" ".join(args.expression))
            from gpumemwidget.jupyter.api import explain_in  # noqa: PLC0415 - when it is used
            from gpumemwidget.report.report import report_explanation  # noqa: PLC0415

            explanation = explain_in(self._extension, expression, unnamed=args.unnamed)
            display(report_explanation(explanation))

    @magic_arguments()
    @argument("--last", type=_count, metavar="N", help="only the last N cells (default: all)")
    @argument(
        "--export",
        metavar="FILE",
        help="write the cells to FILE instead: .csv, .json or .parquet, by its suffix; all of "
        "them, a row for each cell and device, in bytes and seconds",
    )
    @argument("--force", action="store_true", help="let --export take the place of a file")
    @line_magic
    def memledger(self, line: str) -> None:
        """Show the recorded cells: duration, status, change and peak on each device."""
        with refusing("memledger"):
            args = parse_line(self.memledger, line)
            ledger = self._extension.monitor.ledger
            if args.export is not None:
                if args.last is not None:
                    raise BadInputError(
                        "--export writes all cells: leave --last out (or slice "
                        "gpumemwidget.monitor().ledger.to_dataframe())"
                    )
                name = unquote(args.export)
                if not name:
                    raise BadInputError("--export needs a file's name: --export cells.csv")
                path = ledger.export(name, force=args.force)
                print(f"{len(ledger)} cell{'' if len(ledger) == 1 else 's'} written to {path}")
                return
            if args.force:
                raise BadInputError("--force goes with --export FILE: name the file")
            from gpumemwidget.report.report import report_ledger  # noqa: PLC0415 - when it is used

            display(report_ledger(ledger.records, dropped=ledger.dropped, last=args.last))

    @magic_arguments()
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
        "--grads",
        action="store_true",
        help="also the gradients of all variables (zero_grad(set_to_none=True)); without NAME",
    )
    @argument(
        "--cublas",
        action="store_true",
        help="also cuBLAS's workspaces; the next matrix product makes its own anew",
    )
    @argument(
        "--compile",
        action="store_true",
        help="also what torch.compile made (torch._dynamo.reset()); the next call compiles anew",
    )
    @line_magic
    def memrelease(self, line: str) -> None:
        """Release what variables hold: move, set to None, collect, empty the cache, measure.

        What others hold as well is moved to the CPU in place; nothing else is copied, and
        %memrestore brings it back. The report says what each step freed, and what still holds
        the rest.
        """
        with refusing("memrelease"):
            args = parse_line(self.memrelease, line)
            # Several may be typed as one would in Python: x, y
            names = [name for name in (unquote(each.rstrip(",")) for each in args.names) if name]
            from gpumemwidget.jupyter.api import refuse_beside_cell  # noqa: PLC0415
            from gpumemwidget.owners.plan import plan_release  # noqa: PLC0415 - when it is used
            from gpumemwidget.owners.release import apply_release  # noqa: PLC0415
            from gpumemwidget.report.report import (  # noqa: PLC0415
                report_plan,
                report_release,
            )

            shell, hardware = self._extension.shell, self._extension.monitor.hardware
            refuse_beside_cell(self._extension)
            plan = plan_release(
                shell,
                hardware,
                names,
                keep=args.keep,
                out=args.out,
                exceptions=args.exceptions,
                cublas=args.cublas,
                compile_caches=args.compile,
                grads=args.grads,
            )
            if args.dry_run:
                display(report_plan(plan))
            else:
                display(report_release(apply_release(plan, shell, hardware)))

    @magic_arguments()
    @argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="what a release left on the CPU: a variable, or a row such as Out[7]",
    )
    @argument("--dry-run", action="store_true", help="show the plan and change nothing")
    @line_magic
    def memrestore(self, line: str) -> None:
        """Bring back to its devices what %memrelease moved to the CPU: all of it, or nothing.

        The tensors stay the same objects, tied and viewed as they are. What was made on the CPU
        since (a gradient, an optimizer's state) goes along with its parameter.
        """
        with refusing("memrestore"):
            args = parse_line(self.memrestore, line)
            names = [name for name in (unquote(each.rstrip(",")) for each in args.names) if name]
            from gpumemwidget.jupyter.api import refuse_beside_cell  # noqa: PLC0415
            from gpumemwidget.owners.restore import (  # noqa: PLC0415 - when it is used
                apply_restore,
                plan_restore,
            )
            from gpumemwidget.report.report import (  # noqa: PLC0415
                report_restore,
                report_restore_plan,
            )

            refuse_beside_cell(self._extension)
            shell, hardware = self._extension.shell, self._extension.monitor.hardware
            plan = plan_restore(shell, hardware, names)
            if args.dry_run:
                display(report_restore_plan(plan))
            else:
                display(report_restore(apply_restore(plan, shell, hardware)))

    @magic_arguments()
    @argument(
        "--interval",
        type=_seconds,
        metavar="S",
        help="seconds between samples, 0.01 to 60 (default: 0.1, or as last set)",
    )
    @line_magic
    def memdash(self, line: str) -> None:
        """Show the dashboard: the live plot, the cells, the variables, whole devices."""
        with refusing("memdash"):
            args = parse_line(self.memdash, line)
            display(self._extension.open_dashboard(interval_s=args.interval))

    @magic_arguments()
    @argument(
        "state",
        nargs="*",
        metavar="on|off|sites",
        help="%%memtrace on its own line: a line under every cell from the next one on, or no "
        "more; sites on|off: keep the line that allocated each block on a GPU, for %%memvars",
    )
    @argument("--device", metavar="D", help="report one device only: cuda:0, host (default: all)")
    @argument(
        "--lines",
        type=_count,
        metavar="N",
        help="the N lines of each source that did most (default: all of the cell's)",
    )
    @argument(
        "--depth",
        type=_depth,
        metavar="N",
        help="how many calls deep a line opens, 0 for none (default: all that are big enough)",
    )
    @argument(
        "--events",
        type=_count,
        metavar="N",
        help="how many events of the allocators are kept, the newest (default: 1000000)",
    )
    @argument(
        "--export", metavar="FILE", help="also write lines and timeline to FILE, a .json; in bytes"
    )
    @argument(
        "--snapshot",
        metavar="FILE",
        help="also write FILE, a .pickle, for pytorch.org/memory_viz; of GPUs",
    )
    @argument("--force", action="store_true", help="let these take the places of files")
    @argument(
        "--load",
        metavar="FILE",
        help="%%memtrace on its own line: the report of an exported .json, or of a snapshot of "
        "PyTorch's",
    )
    @argument("--no-live", action="store_true", help="no chart while the cell runs")
    @line_cell_magic
    def memtrace(self, line: str, cell: str | None = None) -> None:
        """Report which lines of a cell took memory, on each device, as %%memtrace above it.

        Before, after, change and peak (bytes in binary units), a timeline, and line by line what
        was allocated, is still held, and was held at the peak.
        As %memtrace on, a line under every cell; %memtrace alone says whether that is on.
        """
        if cell is None:
            with refusing("memtrace"):
                self._set_line(parse_line(self.memtrace, line))
            return
        with refusing("%memtrace"):
            self._read(line)
        # The line is valid, so IPython did not read this cell as typed (then the transformer would
        # have taken the line out): code has called the magic. Do what is done to a typed cell.
        self._shell.run_cell(f"%%memtrace {line}\n{cell}").raise_error()

    def read_options(self, text: str) -> MemtraceOptions | None:
        """What stands behind ``%%memtrace``; ``None`` where it is not valid."""
        try:
            return self._read(text)
        except (UsageError, GpuMemError):
            return None
        except Exception as exc:  # noqa: BLE001 - this runs before the cell, which must not fail by it
            self._extension.report_failure("reading the options of %%memtrace", exc)
            return MemtraceOptions()

    def _read(self, text: str) -> MemtraceOptions:
        args = parse_line(self.memtrace, text)
        if args.state:
            raise BadInputError(
                f"{' '.join(args.state)!r} has no place above a cell: give options only, or write "
                "%memtrace on in a cell of its own"
            )
        if args.load is not None:
            raise BadInputError("--load goes into a cell of its own: %memtrace --load FILE")
        from gpumemwidget.jupyter.traceapi import (  # noqa: PLC0415 - when it is used
            check_options,
        )

        return check_options(
            self._extension.monitor.hardware,
            device=None if args.device is None else unquote(args.device),
            n_lines=args.lines,
            depth=args.depth,
            n_events=args.events,
            snapshot=None if args.snapshot is None else unquote(args.snapshot),
            export=None if args.export is None else unquote(args.export),
            force=args.force,
            live=not args.no_live,
        )

    def _set_line(self, args: argparse.Namespace) -> None:
        misplaced = [
            option
            for option, value in (
                ("--device", args.device),
                ("--events", args.events),
                ("--export", args.export),
                ("--snapshot", args.snapshot),
                ("--force", args.force or None),
                ("--no-live", args.no_live or None),
            )
            if value is not None
        ]
        if misplaced:
            raise BadInputError(f"{misplaced[0]} goes above a cell, with %%memtrace")
        if args.load is not None:
            self._load(args)
            return
        if args.lines is not None or args.depth is not None:
            raise BadInputError("--lines and --depth go above a cell, or with --load FILE")
        outputs = self._extension.outputs
        state = " ".join(args.state)
        if state == "":
            print(f"memtrace is {'on' if outputs.line_is_on else 'off'}")
        elif state == "on":
            outputs.line_is_on = True
            print("memtrace is on: a line under every cell from the next one on")
        elif state == "off":
            outputs.line_is_on = False
            print("memtrace is off")
        elif state == "sites":
            print(f"memtrace sites: {self._extension.sites}")
        elif state in ("sites on", "sites off"):
            print(f"memtrace sites: {self._extension.keep_sites(is_on=state == 'sites on')}")
        else:
            raise BadInputError(f"{state!r} is none of: on, off, sites, sites on, sites off")

    def _load(self, args: argparse.Namespace) -> None:
        if args.state:
            raise BadInputError(f"--load takes a file alone, without {' '.join(args.state)!r}")
        name = unquote(args.load)
        if not name:
            raise BadInputError("--load needs a file's name: --load cell.json")
        from gpumemwidget.jupyter.traceapi import load_trace  # noqa: PLC0415 - when it is used
        from gpumemwidget.report.report import report_trace  # noqa: PLC0415

        display(report_trace(load_trace(name).trace, (), n_lines=args.lines, depth=args.depth))
