"""One of each report, by name: what the golden files hold, and what every rule is tried on.

``python -m tests.report.every_report`` writes the golden files anew: look at them before you commit
them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpumemwidget.model.ownership import DeviceBytes
from gpumemwidget.report.account import report_account
from gpumemwidget.report.breakdown import report_breakdown
from gpumemwidget.report.cell import report_cell, report_cell_line, report_unfinished
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
from gpumemwidget.report.trace import report_trace
from gpumemwidget.report.why import report_explanation
from tests.report.account_examples import (
    make_account,
    make_big_account,
    make_explanation,
    make_lone_explanation,
    make_unnamed_explanation,
    make_unread_account,
)
from tests.report.breakdown_examples import (
    make_busy_breakdown,
    make_children,
    make_container_breakdown,
    make_host_breakdown,
    make_idle_breakdown,
    make_map,
    make_untouched_breakdown,
)
from tests.report.examples import (
    HOSTILE,
    MIB,
    cut_short,
    make_budget_cell,
    make_gpu_cell,
    make_host_cell,
    make_limits,
    make_peaks,
    make_plan,
    make_release,
    make_restore,
    make_restore_plan,
    make_samples,
    make_stat,
    make_stopped_release,
    make_tight_limits,
    make_two_gpu_cell,
)
from tests.report.oom_examples import (
    make_card,
    make_host_card,
    make_hostile_card,
    read_recorded_card,
)
from tests.report.trace_examples import (
    make_host_trace,
    make_hostile_trace,
    make_long_trace,
    make_still_trace,
    make_trace,
    make_two_gpu_trace,
    make_untraced,
)

GOLDEN = Path(__file__).parent / "golden"


def make_every_report() -> dict[str, Report]:
    """A report of each kind, in its usual and in its unusual forms."""
    gpu, host, two = make_gpu_cell(), make_host_cell(), make_two_gpu_cell()
    hostile = make_gpu_cell(execution_count=None, first_line=HOSTILE)
    interrupted = make_host_cell(execution_count=8, status="interrupted", duration_s=301.0)
    trace = make_trace()
    over = make_budget_cell()
    return {
        "cell_gpu": report_cell(gpu, make_samples(gpu)),
        "cell_host": report_cell(host, make_samples(host)),
        "cell_two_gpus": report_cell(two, make_samples(two, 500)),
        "cell_over_budget": report_cell(over, []),
        "cell_unfinished": report_unfinished(host, make_samples(host)),
        "line_gpu": report_cell_line(gpu),
        "line_host": report_cell_line(host),
        "line_two_gpus": report_cell_line(two),
        "line_over_budget": report_cell_line(over),
        "ledger": report_ledger([gpu, host, interrupted, two, over, hostile]),
        "ledger_empty": report_ledger([]),
        "ledger_hidden": report_ledger(
            [gpu, replace(host, first_line="%memstat", is_only_own_magics=True)],
            shows_own_magics=False,
        ),
        "budget": _take(report_crossings(over)),
        "stat": report_stat(make_stat(), ["NVML gave no permission to read processes."]),
        "stat_kinds": report_stat(make_stat()[:2], account=make_account()),
        "account": report_account(make_account()),
        "account_names": report_account(make_account(), ["model", "losses", "Out[7]"]),
        "account_deep": report_account(
            make_account(), ["model", "optimizer"], device="cuda:0", depth=None, most=None
        ),
        "account_big": report_account(make_big_account(), depth=2, most=12),
        "account_cut": report_account(
            make_account(
                is_complete=False, variables=tuple(map(cut_short, make_account().variables))
            )
        ),
        "account_unread": report_account(make_unread_account()),
        "breakdown": report_breakdown(
            [make_busy_breakdown()], make_children(), {"cuda:0": make_map()}
        ),
        "breakdown_container": report_breakdown([make_container_breakdown()]),
        "breakdown_devices": report_breakdown(
            [make_host_breakdown(), make_untouched_breakdown(), make_idle_breakdown()]
        ),
        "breakdown_nothing": report_breakdown([], notes=["The driver did not answer."]),
        "why": report_explanation(make_explanation()),
        "why_alone": report_explanation(make_lone_explanation()),
        "why_cut": report_explanation(
            make_lone_explanation(
                held_bytes=DeviceBytes((("cuda:0", 4 * MIB),), is_at_least=True),
                frees_bytes=DeviceBytes(is_at_least=True),
                holders=(),
                is_complete=False,
            )
        ),
        "why_nothing": report_explanation(
            make_lone_explanation(held_bytes=DeviceBytes(), holders=())
        ),
        "why_unnamed": report_explanation(make_unnamed_explanation()),
        "why_unnamed_nothing": report_explanation(
            make_unnamed_explanation(held_bytes=DeviceBytes(), holders=())
        ),
        "limits": report_limits(make_limits()),
        "limits_none": report_limits([], ["The driver did not answer."]),
        "limits_tight": report_limits(
            make_tight_limits(),
            [
                "the limit that waited for cuda:5 was not set: it has one of 8.00 GiB, which was "
                "set since"
            ],
        ),
        "oom": report_oom(make_card()),
        "oom_h100": report_oom(read_recorded_card()),
        "oom_host": report_oom(make_host_card()),
        "oom_hostile": report_oom(make_hostile_card()),
        "plan": report_plan(make_plan()),
        "plan_cut": report_plan(
            make_plan(
                frees_bytes=DeviceBytes((("cuda:0", 1429 * MIB),), is_at_least=True),
                host_needed_bytes=DeviceBytes((("host", 479 * MIB),), is_at_least=True),
            )
        ),
        "plan_refused": report_plan(
            make_plan(
                refusal="The moves need 479.00 MiB of host memory and there are 100.00 MiB: "
                "release less at once, or without --keep.",
                host_available_bytes=100 * MIB,
            )
        ),
        "plan_caches": report_plan(
            make_plan(
                names=("odd name", "Out[7]", "last exception"),
                moves=(),
                stays=(),
                cublas=True,
                compile_caches=True,
                empty_names=("odd name",),
            )
        ),
        "release": report_release(make_release()),
        "release_stopped": report_release(make_stopped_release()),
        "reset": report_reset(["cuda:1", "cuda:0", "cuda:2"], make_peaks()),
        "reset_nothing": report_reset([], make_peaks()),
        "restore": report_restore(make_restore()),
        "restore_plan": report_restore_plan(make_restore_plan()),
        "trace": report_trace(trace, make_samples(trace.record)),
        "trace_deep": report_trace(trace, [], n_lines=4, depth=4),
        "trace_hostile": report_trace(make_hostile_trace(), []),
        "trace_host": report_trace(make_host_trace(), []),
        "trace_long": report_trace(make_long_trace(), []),
        "trace_still": report_trace(make_still_trace(), []),
        "trace_two_gpus": report_trace(make_two_gpu_trace(), []),
        "trace_untraced": report_trace(make_untraced(), []),
    }


def _take(report: Report | None) -> Report:
    assert report is not None
    return report


def main() -> None:
    """Write the golden files."""
    GOLDEN.mkdir(exist_ok=True)
    for name, report in make_every_report().items():
        (GOLDEN / f"{name}.txt").write_text(report.text + "\n", encoding="utf-8")
        (GOLDEN / f"{name}.html").write_text(report.html + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
