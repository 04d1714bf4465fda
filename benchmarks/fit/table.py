"""Make the table of predicted and real peaks from the facts of a run: ``FILE``.

``python -m benchmarks fit --json FILE`` writes the facts on the machine with the GPU; on any other,
``python -m benchmarks.fit.table FILE > docs/prediction_figures.md`` makes the documents' table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.rows import Row, format_seconds, format_table, judge

#: Maximum number of judged steps that may fail; of the others none may.
_MOST_FAILED = 2
_LONGEST_PREDICTION_S = 10.0
_FIGURES = ("allocated_bytes", "reserved_bytes")
_FITS = {True: "yes", False: "no", None: "too close to say"}


def main() -> None:
    """Print the table of a file, with the machine that it is of."""
    saved = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(format_figures(saved))


def format_figures(saved: dict[str, Any]) -> str:
    """Return what ``--json`` has saved as Markdown: the machine and the tables."""
    machine, facts = saved["machine"], [row["facts"] for row in saved["rows"] if row["facts"]]
    return f"GPU: {machine['GPU']}; torch {machine['torch']}.\n\n{format_table(tabulate(facts))}"


def tabulate(facts: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the rows: what the steps of each kind say together, and each step.

    Args:
        facts: what a process printed of each step, with its ``case`` and ``kind``.
    """
    cases = [_compare(each) for each in facts]
    summary = [
        row
        for kind in dict.fromkeys(each["kind"] for each in cases)
        for row in _sum_up(kind, [each for each in cases if each["kind"] == kind])
    ]
    return [*summary, *map(_describe_case, cases)]


# -- Steps -----------------------------------------------------------------------------------------


def _compare(facts: dict[str, Any]) -> dict[str, Any]:
    """Return a step's facts and what the predicted and the real figures say of each other."""
    real, predicted = facts.get("real"), facts.get("predicted")
    facts = dict(facts)
    if real and predicted:
        facts["errors"] = [predicted[each] / real[each] - 1 for each in _FIGURES]
        facts["beside_band"] = (
            "above"
            if real["reserved_bytes"] > predicted["reserved_at_most_bytes"]
            else "below"
            if real["reserved_bytes"] < predicted["reserved_at_least_bytes"]
            else ""
        )
    return facts


def _describe_case(facts: dict[str, Any]) -> Row:
    real, predicted = facts.get("real"), facts.get("predicted")
    columns = {
        "kind": facts["kind"],
        "real: allocated, reserved": _format_pair(real) if real else "",
        "predicted": _format_pair(predicted) if predicted else f"fails: {_find_error(facts)}",
        "error": "",
        "reserved at least, at most": "",
        "fits": "",
        "takes": "",
    }
    if predicted:
        columns["reserved at least, at most"] = _format_mebibytes(
            predicted["reserved_at_least_bytes"], predicted["reserved_at_most_bytes"]
        )
        columns["fits"] = _FITS[predicted["fits"]]
        columns["takes"] = format_seconds(predicted["seconds"])
    if "errors" in facts:
        columns["error"] = ", ".join(f"{error:+.2%}" for error in facts["errors"])
        if facts["beside_band"]:
            columns["reserved at least, at most"] += f" (real one {facts['beside_band']})"
    return Row(facts["case"], "", columns=columns, facts=facts)


def _format_pair(figures: dict[str, Any]) -> str:
    return _format_mebibytes(*(figures[each] for each in _FIGURES))


def _format_mebibytes(*amounts: int) -> str:
    return ", ".join(f"{n_bytes / (1 << 20):.1f}" for n_bytes in amounts) + " MiB"


def _find_error(facts: dict[str, Any]) -> str:
    said = facts.get("prediction_error") or facts.get("process_error") or "nothing was said"
    return _format_cell(said)


def _format_cell(said: str) -> str:
    """Return the beginning of an error's message as a table's cell can hold it."""
    return " ".join(said.split())[:120].replace("|", "\\|")


# -- All steps of a kind ---------------------------------------------------------------------------


def _sum_up(kind: str, cases: Sequence[dict[str, Any]]) -> Iterator[Row]:
    known = [facts for facts in cases if "errors" in facts]
    failed = [facts["case"] for facts in cases if "errors" not in facts]
    most_failed = _MOST_FAILED if kind == "judged" else 0
    yield Row(
        f"{kind} steps that are predicted and run",
        f"{len(known)} of {len(cases)}" + (f", not {', '.join(failed)}" if failed else ""),
        len(failed),
        most_failed,
        f"≥ {len(cases) - most_failed} of {len(cases)}",
    )
    if not known:
        return
    for place, figure in enumerate(("allocated", "reserved")):
        errors = [abs(facts["errors"][place]) for facts in known]
        yield Row(
            f"predicted {figure} peaks beside real ones, {kind} steps",
            _format_errors(errors),
            median(errors),
        )
    above, below = (
        [facts["case"] for facts in known if facts["beside_band"] == side]
        for side in ("above", "below")
    )
    names = f": {', '.join((*above, *below))}" if above or below else ""
    yield Row(
        f"{kind} steps whose real reserved peak is beside the predicted band",
        f"{len(above)} above, {len(below)} below, of {len(known)}{names}",
        len(above) + len(below),
    )
    denied = [facts["case"] for facts in known if facts["predicted"]["fits"] is not True]
    yield Row(
        f"{kind} steps that were said to fit, of those that ran",
        f"{len(known) - len(denied)} of {len(known)}"
        + (f", not {', '.join(denied)}" if denied else ""),
        len(denied),
    )
    seconds = [facts["predicted"]["seconds"] for facts in known]
    what = f"the longest prediction of a {kind} step, other steps running beside it"
    yield judge(what, max(seconds), _LONGEST_PREDICTION_S, format_seconds)


def _format_errors(errors: Sequence[float]) -> str:
    return f"median {median(errors):.2%}, worst {max(errors):.2%}"


if __name__ == "__main__":
    main()
