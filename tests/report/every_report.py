"""One of each report, by name: what the golden files hold, and what every rule is tried on.

``python -m tests.report.every_report`` writes the golden files anew: look at them before you commit
them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpumemwidget.model.devices import HOST, HardwareNote, HardwareNoteKind
from gpumemwidget.model.leaks import UnexplainedGrowth
from gpumemwidget.model.ownership import DeviceBytes, JointRelease, LibraryArray, Slices
from gpumemwidget.model.releases import Stop, StopKind
from gpumemwidget.model.traces import CellTrace
from gpumemwidget.report.account import report_account
from gpumemwidget.report.cell import (
    report_cell_line,
    report_crossings,
    report_ledger,
    report_score,
    report_unfinished,
)
from gpumemwidget.report.devices import report_breakdown, report_limits, report_reset, report_stat
from gpumemwidget.report.leaks import report_leak, report_leaks, report_rebinding
from gpumemwidget.report.oom import report_oom
from gpumemwidget.report.prediction import report_prediction, report_sizes
from gpumemwidget.report.release import (
    report_explanation,
    report_plan,
    report_release,
    report_restore,
    report_restore_plan,
)
from gpumemwidget.report.render.output import Report
from gpumemwidget.report.trace import report_trace
from tests.report import account_examples as accounts
from tests.report import breakdown_examples as devices
from tests.report import examples
from tests.report import growth_examples as growths
from tests.report import oom_examples as ooms
from tests.report import prediction_examples as predictions
from tests.report import process_examples as processes
from tests.report import trace_examples as traces
from tests.report.examples import HOSTILE, MIB

GOLDEN = Path(__file__).parent / "golden"


def make_every_report() -> dict[str, Report]:
    """A report of each kind, in its usual and in its unusual forms."""
    gpu, host = examples.make_gpu_cell(), examples.make_host_cell()
    two = examples.make_two_gpu_cell()
    hostile = examples.make_gpu_cell(execution_count=None, first_line=HOSTILE)
    interrupted = examples.make_host_cell(execution_count=8, status="interrupted", duration_s=301.0)
    trace = traces.make_trace()
    over = examples.make_budget_cell()
    many = examples.make_many_gpu_cell()
    joint = examples.make_joint_plan()
    leak = examples.make_leak()
    loop = examples.make_leak(
        device="host", unit="step", each_bytes=int(1.9 * MIB), n_seen=40, since=12, line=None
    )
    return {
        "cell_gpu": report_trace(CellTrace(gpu, ()), examples.make_samples(gpu)),
        "cell_host": report_trace(CellTrace(host, ()), examples.make_samples(host)),
        "cell_two_gpus": report_trace(CellTrace(two, ()), examples.make_samples(two, 500)),
        "cell_over_budget": report_trace(CellTrace(over, ()), []),
        "cell_unfinished": report_unfinished(host, examples.make_samples(host)),
        "cell_many": report_trace(CellTrace(many, ()), []),
        "process": processes.report_one(),
        "processes": processes.report_many(),
        "line_gpu": report_cell_line(gpu),
        "line_host": report_cell_line(host),
        "line_two_gpus": report_cell_line(two),
        "line_over_budget": report_cell_line(over),
        "ledger": report_ledger([gpu, host, interrupted, two, over, hostile]),
        "ledger_empty": report_ledger([]),
        "ledger_sorted": report_ledger([gpu, host, interrupted, two, over], n_shown=3, sort="rise"),
        "ledger_long": report_ledger(
            [replace(many, execution_count=number) for number in range(1, 61)], dropped=4
        ),
        "ledger_hidden": report_ledger(
            [gpu, replace(host, first_line="%memstat", is_only_own_magics=True)]
        ),
        "ledger_predicted": report_ledger([host, predictions.make_predicted_cell()]),
        "ledger_grows": report_ledger(
            [replace(gpu, start_s=1.0), replace(over, start_s=2.0), host],
            leaks={1.0: [leak], host.start_s: [loop], 99.0: [leak]},
        ),
        "budget": _take(report_crossings(over)),
        "stat": report_stat(
            examples.make_stat(), [_say("NVML gave no permission to read processes.")]
        ),
        "stat_kinds": report_stat(examples.make_stat()[:2], account=accounts.make_account()),
        "account": report_account(accounts.make_account()),
        "account_names": report_account(
            accounts.make_account(), ["model", "losses", "Out[7]", "no variable"]
        ),
        "account_deep": report_account(
            accounts.make_account(), ["model", "optimizer"], device="cuda:0", is_whole=True
        ),
        "account_big": report_account(accounts.make_big_account()),
        "account_cut": report_account(
            accounts.make_account(
                is_complete=False,
                variables=tuple(map(examples.cut_short, accounts.make_account().variables)),
            )
        ),
        "account_odd": report_account(accounts.make_odd_account(), ["y", "thread loader"]),
        "account_libraries": report_account(
            accounts.make_account(
                library_arrays=(
                    LibraryArray(
                        "cuda:0", "batches[0]['x']", 1 << 30, "CuPy", "float32 (16384, 16384)"
                    ),
                    LibraryArray("cuda:1", HOSTILE, 3 * MIB, "JAX", "bfloat16 (1024, 1536)"),
                )
            ),
        ),
        "account_unread": report_account(accounts.make_unread_account()),
        "breakdown": report_breakdown(
            [devices.make_busy_breakdown()], devices.make_children(), {"cuda:0": devices.make_map()}
        ),
        "breakdown_children": report_breakdown(
            [devices.make_host_breakdown()], devices.make_many_children()
        ),
        "breakdown_container": report_breakdown(
            [devices.make_container_breakdown()], devices.make_many_children()[:22]
        ),
        "breakdown_devices": report_breakdown(
            [
                devices.make_host_breakdown(),
                devices.make_untouched_breakdown(),
            ]
        ),
        "breakdown_asleep": report_breakdown([devices.make_asleep_breakdown()]),
        "breakdown_nothing": report_breakdown([], notes=["The driver did not answer."]),
        "why": report_explanation(accounts.make_explanation()),
        "why_alone": report_explanation(accounts.make_lone_explanation()),
        "why_cut": report_explanation(
            accounts.make_lone_explanation(
                held_bytes=DeviceBytes((("cuda:0", 4 * MIB),), is_at_least=True),
                frees_bytes=DeviceBytes(is_at_least=True),
                holders=(),
                is_complete=False,
                cure=None,
                slices=Slices(),
            )
        ),
        "why_nothing": report_explanation(
            accounts.make_lone_explanation(
                held_bytes=DeviceBytes(), holders=(), cure=None, slices=Slices()
            )
        ),
        "why_unnamed": report_explanation(accounts.make_unnamed_explanation()),
        "leak_run": report_leak(growths.RUN_LEAK),
        "leak_step": report_leak(growths.STEP_LEAK),
        "leak_graph": report_leak(growths.GRAPH_LEAK),
        "leak_model": report_leak(growths.MODEL_LEAK),
        "leak_out": report_leak(growths.OUT_LEAK),
        "leak_shared": report_leak(growths.SHARED_LEAK),
        "leak_adapters": report_leak(growths.ADAPTER_LEAK),
        "leak_released": report_leak(growths.RUN_LEAK, released=("history",)),
        "leak_module": report_leak(growths.MODULE_LEAK),
        "leak_hostile": report_leak(growths.make_hostile_leak()),
        "leaks": report_leaks(
            [growths.OUT_LEAK, growths.RUN_LEAK, growths.MODEL_LEAK, growths.STEP_LEAK], (), []
        ),
        "leaks_ignored": report_leaks([growths.GRAPH_LEAK], (), ["history", "trainer.outputs[…]"]),
        "leaks_none": report_leaks([], (), []),
        "leaks_unexplained": report_leaks(
            [],
            [
                UnexplainedGrowth("In [9]", "cuda:0", 1 << 28, 4, is_outside=True),
                UnexplainedGrowth("In [7]", HOST, 8 << 20, 3, is_outside=False),
                UnexplainedGrowth("In [8]", "mps", 2 << 20, 3, is_outside=False),
            ],
            [],
        ),
        "limits": report_limits(examples.make_limits()),
        "limits_none": report_limits([], [_say("The driver did not answer.")]),
        "oom": report_oom(ooms.make_card()),
        "oom_h100": report_oom(ooms.read_recorded_card()),
        "oom_host": report_oom(ooms.make_host_card()),
        "oom_hostile": report_oom(ooms.make_hostile_card()),
        "plan": report_plan(examples.make_plan()),
        "plan_cut": report_plan(
            examples.make_plan(
                keep=True,
                moves=examples.make_plan().moves * 200,
                frees_bytes=DeviceBytes((("cuda:0", 1429 * MIB),), is_at_least=True),
                host_needed_bytes=DeviceBytes((("host", 479 * MIB),), is_at_least=True),
            )
        ),
        "plan_joint": report_plan(joint),
        "plan_refused": report_plan(
            examples.make_plan(
                refusal=Stop(
                    StopKind.HOST_MEMORY,
                    needs_bytes=DeviceBytes((("host", 479 * MIB),)),
                    available_bytes=100 * MIB,
                ),
                host_available_bytes=100 * MIB,
            )
        ),
        "plan_caches": report_plan(
            examples.make_plan(
                names=("odd name", "Out[7]", "last exception"),
                moves=(),
                stays=(),
                cublas=True,
                empty_names=("odd name",),
                # Which can't be typed: so no command is told.
                joint=JointRelease(("x", "odd-name"), DeviceBytes()),
            )
        ),
        "prediction": report_prediction(predictions.make_prediction()),
        "prediction_close": report_prediction(predictions.make_close_prediction()),
        "prediction_full": report_prediction(predictions.make_large_prediction()),
        "prediction_no_device": report_prediction(predictions.make_prediction_without_device()),
        "prediction_score": _take(report_score(predictions.make_predicted_cell())),
        "prediction_sizes": report_sizes(131, 0, predictions.make_sizes()),
        "prediction_sizes_none": report_sizes(0, 1, predictions.make_sizes(600)),
        "rebinding_kept": report_rebinding(growths.make_kept()),
        "rebinding_cycle": report_rebinding(growths.make_cycle()),
        "release": report_release(examples.make_release()),
        "release_stopped": report_release(examples.make_stopped_release()),
        "reset": report_reset(["cuda:1", "cuda:0", "cuda:2"], examples.make_peaks()),
        "reset_nothing": report_reset([], examples.make_peaks()),
        "restore": report_restore(examples.make_restore()),
        "restore_plan": report_restore_plan(examples.make_restore_plan()),
        "trace": report_trace(trace, examples.make_samples(trace.record)),
        "trace_few": report_trace(trace, [], n_lines=4),
        "trace_hostile": report_trace(traces.make_hostile_trace(), []),
        "trace_host": report_trace(traces.make_host_trace(), []),
        "trace_long": report_trace(traces.make_long_trace(), []),
        "trace_odd": report_trace(traces.make_odd_trace(), []),
        "trace_still": report_trace(traces.make_still_trace(), []),
        "trace_two_gpus": report_trace(traces.make_two_gpu_trace(), []),
        "trace_untraced": report_trace(traces.make_untraced(), []),
    }


def _say(sentence: str) -> HardwareNote:
    return HardwareNote(HardwareNoteKind.MESSAGE, sentence)


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
