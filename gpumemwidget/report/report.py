"""The door to the reports: one function each, records in, a ``Report`` out.

All are pure. The plotly figures have their own door, ``report.figures``, because plotly is slow to
import.
"""

from __future__ import annotations

from gpumemwidget.report.account import report_account
from gpumemwidget.report.bridge import report_bridge
from gpumemwidget.report.budget import report_crossings
from gpumemwidget.report.cell import report_cell, report_cell_line
from gpumemwidget.report.holdings import report_holdings
from gpumemwidget.report.ledger import report_ledger
from gpumemwidget.report.limits import report_limits, report_reset
from gpumemwidget.report.oom import report_oom
from gpumemwidget.report.output import Report
from gpumemwidget.report.release import (
    report_plan,
    report_release,
    report_restore,
    report_restore_plan,
)
from gpumemwidget.report.stat import report_stat
from gpumemwidget.report.trace import TimelineReport, list_displays, report_trace
from gpumemwidget.report.why import report_explanation

__all__ = [
    "Report",
    "TimelineReport",
    "list_displays",
    "report_account",
    "report_bridge",
    "report_cell",
    "report_cell_line",
    "report_crossings",
    "report_explanation",
    "report_holdings",
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
]
