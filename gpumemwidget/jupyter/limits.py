"""The magics of what may be taken: a limit, a budget; and the peaks, begun anew."""
# IPython's decorators for arguments have no types.
# mypy: disable-error-code="untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic import Magics, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import display

from gpumemwidget.jupyter.parsing import parse_line, refusing, unquote

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from gpumemwidget.jupyter.extension import Extension

__all__ = ["LimitMagics"]


@magics_class
class LimitMagics(Magics):
    """The magics of one shell that say what may be taken.

    Args:
        shell: the shell.
        extension: what they act on.
    """

    def __init__(self, shell: InteractiveShell, extension: Extension) -> None:
        super().__init__(shell)
        self._extension = extension

    @magic_arguments()
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
    @line_magic
    def memlimit(self, line: str) -> None:
        """Limit what PyTorch may reserve on a GPU: beyond it a request is an out-of-memory error.

        It is PyTorch's own limit (torch.cuda.set_per_process_memory_fraction), of this process. A
        GPU that is not in use stays so: its limit is set once it is. %unload_ext leaves the limits
        that are set, and forgets those that wait.
        """
        with refusing("memlimit"):
            args = parse_line(self.memlimit, line)
            device = None if args.device is None else unquote(args.device)
            from gpumemwidget.jupyter.api import limit_in  # noqa: PLC0415 - when it is used
            from gpumemwidget.report.report import report_limits  # noqa: PLC0415

            text = " ".join(unquote(each) for each in args.limit)
            limits = limit_in(self._extension, text or None, device=device)
            notes = self._extension.monitor.hardware.take_notes()
            display(report_limits(limits, notes))

    @magic_arguments()
    @argument("--device", metavar="D", help="one GPU: cuda:0 (default: every one in use)")
    @line_magic
    def memreset(self, line: str) -> None:
        """Begin PyTorch's peaks anew, as torch.cuda.reset_peak_memory_stats() does.

        The peaks of the cells stay exact: they are not PyTorch's own.
        """
        with refusing("memreset"):
            args = parse_line(self.memreset, line)
            device = None if args.device is None else unquote(args.device)
            from gpumemwidget.measure.limits import reset_peaks  # noqa: PLC0415 - when it is used
            from gpumemwidget.report.report import report_reset  # noqa: PLC0415

            hardware = self._extension.monitor.hardware
            before = hardware.read_as_user()
            display(report_reset(reset_peaks(hardware, device), before))

    @magic_arguments()
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
    @argument(
        "--stop",
        action="store_true",
        help="interrupt the cell that goes beyond it, as Ctrl-C does, once a sample shows it",
    )
    @line_magic
    def membudget(self, line: str) -> None:
        """Set what a cell may have allocated on each GPU: the one that goes beyond it is marked.

        It counts from the next cell on, by the exact peak; off counts at once. A cell that begins
        beyond it counts once it rises above what stood at its start. PyTorch is not limited:
        %memlimit does that.
        """
        with refusing("membudget"):
            args = parse_line(self.membudget, line)
            device = None if args.device is None else unquote(args.device)
            from gpumemwidget.jupyter.budgets import (  # noqa: PLC0415 - when it is used
                change_budgets,
                describe_budgets,
            )

            text = " ".join(unquote(each) for each in args.amount) or None
            monitor = self._extension.monitor
            shown = change_budgets(monitor, text, device=device, stop=args.stop)
            is_new = text is not None and text.lower() != "off"
            print(describe_budgets(monitor, shown, is_new=is_new, device=device))
