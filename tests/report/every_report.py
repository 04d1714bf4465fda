"""One of each report, by name: what the golden files hold, and what every rule is tried on.

``python -m tests.report.every_report`` writes the golden files anew: look at them before you commit
them.
"""

from __future__ import annotations

from pathlib import Path

from gpumemwidget.report.report import (
    Report,
    report_account,
    report_bridge,
    report_cell,
    report_cell_line,
    report_crossings,
    report_explanation,
    report_holdings,
    report_ledger,
    report_limits,
    report_oom,
    report_plan,
    report_release,
    report_reset,
    report_restore,
    report_restore_plan,
    report_stat,
    report_trace,
)
from tests.report.account_examples import (
    make_account,
    make_big_account,
    make_explanation,
    make_lone_explanation,
    make_unnamed_explanation,
    make_unread_account,
)
from tests.report.bridge_examples import (
    make_busy_bridge,
    make_children,
    make_container_bridge,
    make_host_bridge,
    make_idle_bridge,
    make_map,
    make_untouched_bridge,
)
from tests.report.examples import (
    GIB,
    HOSTILE,
    MIB,
    make_budget_cell,
    make_gpu_cell,
    make_holdings,
    make_host_cell,
    make_plan,
    make_release,
    make_restore,
    make_restore_plan,
    make_samples,
    make_stat,
    make_stopped_release,
    make_two_gpu_cell,
)
from tests.report.limit_examples import make_limits, make_peaks, make_tight_limits
from tests.report.oom_examples import (
    make_card,
    make_empty_card,
    make_host_card,
    make_hostile_card,
    read_recorded_card,
)
from tests.report.trace_examples import (
    make_host_trace,
    make_hostile_trace,
    make_long_trace,
    make_still_trace,
    make_tiny_trace,
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
    short = make_host_cell(duration_s=0.0008)
    trace = make_trace()
    over = make_budget_cell(host_budget_bytes=GIB)
    stopped = make_budget_cell(
        execution_count=10, status="interrupted", stopped_at_bytes=int(3.2 * GIB)
    )
    caught = make_budget_cell(stopped_at_bytes=int(3.4 * GIB))
    return {
        "cell_gpu": report_cell(gpu, make_samples(gpu)),
        "cell_host": report_cell(host, make_samples(host)),
        "cell_two_gpus": report_cell(two, make_samples(two, 500)),
        "cell_short": report_cell(short, []),
        "cell_over_budget": report_cell(over, []),
        "cell_stopped": report_cell(stopped, []),
        "line_gpu": report_cell_line(gpu),
        "line_host": report_cell_line(host),
        "line_two_gpus": report_cell_line(two),
        "line_over_budget": report_cell_line(over),
        "line_stopped": report_cell_line(stopped),
        "ledger": report_ledger([gpu, host, interrupted, two, hostile]),
        "ledger_budget": report_ledger([gpu, over, stopped]),
        "ledger_empty": report_ledger([]),
        "budget": _take(report_crossings(over)),
        "budget_stopped": _take(report_crossings(stopped)),
        "budget_caught": _take(report_crossings(caught)),
        "stat": report_stat(make_stat(), ["NVML gave no permission to read processes."]),
        "stat_kinds": report_stat(make_stat()[:2], account=make_account()),
        "account": report_account(make_account()),
        "account_names": report_account(make_account(), ["model", "losses", "Out[7]"]),
        "account_deep": report_account(
            make_account(), ["model", "optimizer"], device="cuda:0", depth=None, most=None
        ),
        "account_big": report_account(make_big_account(), depth=2, most=12),
        "account_unread": report_account(make_unread_account()),
        "bridge": report_bridge([make_busy_bridge()], make_children(), {"cuda:0": make_map()}),
        "bridge_container": report_bridge([make_container_bridge()]),
        "bridge_devices": report_bridge(
            [make_host_bridge(), make_untouched_bridge(), make_idle_bridge()]
        ),
        "bridge_map": report_bridge(
            [make_idle_bridge()], maps={"cuda:0": make_map(n_segments=120, n_blocks=40)}
        ),
        "bridge_nothing": report_bridge([], notes=["The driver did not answer."]),
        "why": report_explanation(make_explanation()),
        "why_alone": report_explanation(make_lone_explanation()),
        "why_cut": report_explanation(
            make_lone_explanation(holders=(), frees_bytes=(), is_complete=False)
        ),
        "why_nothing": report_explanation(make_lone_explanation(held_bytes=(), holders=())),
        "why_unnamed": report_explanation(make_unnamed_explanation()),
        "why_unnamed_nothing": report_explanation(
            make_unnamed_explanation(held_bytes=(), holders=())
        ),
        "holdings": report_holdings(make_holdings()),
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
        "oom_empty": report_oom(make_empty_card()),
        "oom_h100": report_oom(read_recorded_card()),
        "oom_host": report_oom(make_host_card()),
        "oom_hostile": report_oom(make_hostile_card()),
        "plan": report_plan(make_plan()),
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
                remains=(),
                cublas=True,
                compile_caches=True,
                costs=(
                    "cuBLAS workspaces: the next matrix product on each stream makes its own anew; "
                    "how much they hold is measured",
                    "compile caches: nothing was compiled in this process",
                ),
            )
        ),
        "release": report_release(make_release()),
        "release_stopped": report_release(make_stopped_release()),
        "reset": report_reset(["cuda:1", "cuda:0", "cuda:2"], make_peaks()),
        "reset_nothing": report_reset([], make_peaks()),
        "restore": report_restore(make_restore()),
        "restore_plan": report_restore_plan(make_restore_plan()),
        "restore_refused": report_restore_plan(
            make_restore_plan(
                refusal="cuda:0 has room for 100.00 MiB and 475.00 MiB are needed: release "
                "something there first; nothing was changed",
                available_bytes=(("cuda:0", 100 * MIB),),
            )
        ),
        "restore_stopped": report_restore(
            make_restore(
                stopped="OutOfMemoryError: CUDA out of memory; everything is where it was",
                detail="",
            )
        ),
        "trace": report_trace(trace, make_samples(trace.record)),
        "trace_deep": report_trace(trace, [], n_lines=4, depth=4),
        "trace_hostile": report_trace(make_hostile_trace(), []),
        "trace_host": report_trace(make_host_trace(), []),
        "trace_long": report_trace(make_long_trace(), []),
        "trace_still": report_trace(make_still_trace(), []),
        "trace_tiny": report_trace(make_tiny_trace(), []),
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
