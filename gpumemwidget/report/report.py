"""The functions that make the reports: records in, a ``Report`` out.

All are pure. plotly's figures stand apart in ``charts.figures``.
"""

from __future__ import annotations

from gpumemwidget.report.account import report_account, report_variables
from gpumemwidget.report.breakdown import report_breakdown
from gpumemwidget.report.cell import report_cell, report_cell_line, report_unfinished
from gpumemwidget.report.help import report_help
from gpumemwidget.report.ledger import report_ledger
from gpumemwidget.report.limits import report_crossings, report_limits, report_reset
from gpumemwidget.report.oom import report_oom
from gpumemwidget.report.release import (
    report_plan,
    report_release,
    report_restore,
    report_restore_plan,
)
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.stat import report_stat
from gpumemwidget.report.trace import list_displays, report_trace
from gpumemwidget.report.why import report_explanation

__all__ = [
    "Report",
    "list_displays",
    "report_account",
    "report_breakdown",
    "report_cell",
    "report_cell_line",
    "report_crossings",
    "report_explanation",
    "report_help",
    "report_ledger",
    "report_limits",
    "report_oom",
    "report_plan",
    "report_release",
    "report_reset",
    "report_restore",
    "report_restore_plan",
    "report_stat",
    "report_trace",
    "report_unfinished",
    "report_variables",
]
