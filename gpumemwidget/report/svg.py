"""The chart of one device as HTML: an inline SVG with its legend and labels around it."""

from __future__ import annotations

from gpumemwidget.report.escape import escape_html
from gpumemwidget.report.sparkline import Sparkline
from gpumemwidget.report.theme import SPARKLINE_HEIGHT, SPARKLINE_WIDTH
from gpumemwidget.units import format_bytes, format_duration

__all__ = ["render_sparkline"]


def render_sparkline(chart: Sparkline) -> str:
    """One ``<figure>``: what is drawn and the peak above, the scale beside, the time span below."""
    paths = []
    keys = []
    if chart.allocated_path:
        paths.append(f'<path class="gmw-a" d="{chart.allocated_path}"/>')
        keys.append(("gmw-a", chart.allocated_name))
    if chart.reserved_path:
        paths.append(f'<path class="gmw-v" d="{chart.reserved_path}"/>')
        keys.append(("gmw-v", chart.reserved_name))
    if chart.peak_y is not None:
        paths.append(f'<path class="gmw-p" d="M0 {chart.peak_y}H{SPARKLINE_WIDTH}"/>')
        keys.append(("gmw-p", chart.peak_label))
    legend = "".join(
        f' <span><i class="{key}"></i>{escape_html(name)}</span>' for key, name in keys
    )
    span = format_duration(chart.duration_s)
    low, high = format_bytes(chart.low_bytes), format_bytes(chart.high_bytes)
    names = ", ".join(name for _, name in keys)
    described = escape_html(f"{chart.device} over {span}, from {low} to {high}: {names}")
    middle = " <span>too short to sample: its ends only</span>" if not chart.n_samples else ""
    return (
        f'<figure class="gmw-g"><figcaption><strong>{escape_html(chart.device)}</strong>{legend}'
        f'</figcaption><div class="gmw-b"><svg role="img" aria-label="{described}" '
        f'viewBox="0 0 {SPARKLINE_WIDTH} {SPARKLINE_HEIGHT}" preserveAspectRatio="none">'
        f"{''.join(paths)}</svg><span>{high}</span> <span>{low}</span> "
        f'<div class="gmw-x"><span>0 s</span>{middle} <span>{span}</span></div></div></figure>'
    )
