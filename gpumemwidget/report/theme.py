"""How the reports look: colours, class names, the chart's size, and the style sheets.

A report stands in places that we don't choose: JupyterLab in light and in dark, Notebook, VS Code,
a page from nbconvert. So it paints no background and sets no colour of text: it inherits both, and
its few own colours are middle tones that keep a contrast of 3:1 or more on white and on near-black
alike. Whatever imitates the static chart (the live one that it replaces) takes its size, classes
and ``SPARKLINE_CSS`` from here.
"""

from __future__ import annotations

import re
from string import Template

__all__ = [
    "ALLOCATED_COLOR",
    "BAD_COLOR",
    "BASE_CSS",
    "CARD_CLASS",
    "CARD_CSS",
    "LINE_CSS",
    "LOOKS",
    "LOOK_COLORS",
    "NEUTRAL_COLOR",
    "PEAK_COLOR",
    "RESERVED_COLOR",
    "ROOT_CLASS",
    "SHARE_CSS",
    "SPARKLINE_CSS",
    "SPARKLINE_HEIGHT",
    "SPARKLINE_WIDTH",
    "STEPS_CSS",
    "TABLE_CSS",
    "WARN_COLOR",
    "squeeze",
]

ALLOCATED_COLOR = "#3b82d6"
RESERVED_COLOR = "#d9730d"
PEAK_COLOR = "#d6456b"
BAD_COLOR = "#d6453d"
WARN_COLOR = "#a66c00"
#: Text and lines of figures, which can't inherit the page's colour.
NEUTRAL_COLOR = "#808080"

#: The colours of the parts of a device's memory; ``free`` is the page's own.
LOOK_COLORS = {
    "parameter": ALLOCATED_COLOR,
    "gradient": "#8a6fd6",
    "optimizer state": "#159a8c",
    "saved for backward": "#5b9a2f",
    "tensor": "#c75a9a",
    "buffer": "#6f8fb3",
    "allocated": ALLOCATED_COLOR,
    "other": "#a0785a",
    "unknown": NEUTRAL_COLOR,
    "cached": RESERVED_COLOR,
    "outside": "#6c7a89",
    "others": "#8b93a0",
}

#: The classes that they have end in these.
LOOKS = {look: str(number) for number, look in enumerate((*LOOK_COLORS, "free", "rest"))}

#: The root of a report with a frame has this one too.
CARD_CLASS = "gmw-card"

#: All classes begin with ``gmw-``; all rules begin with this one, which every report's root has.
ROOT_CLASS = "gmw"

#: The chart's ``viewBox`` is ``0 0 600 100``: y is the percentage of the scale, from above. It is
#: stretched to the room it has, 56 pixels high (``preserveAspectRatio`` is ``none``, and the
#: strokes do not scale).
SPARKLINE_WIDTH = 600
SPARKLINE_HEIGHT = 100

_PARTS = {
    # JupyterLab's own rules for tables, lists and code carry two or three classes; so that ours
    # win wherever they stand, they carry as many and one more.
    "root": f".{ROOT_CLASS}" * 3,
    "allocated": ALLOCATED_COLOR,
    "reserved": RESERVED_COLOR,
    "peak": PEAK_COLOR,
    "bad": BAD_COLOR,
    "warn": WARN_COLOR,
    "neutral": NEUTRAL_COLOR,
}


def squeeze(css: str) -> str:
    """A style sheet with the parts put in, without the spaces that only a reader here needs."""
    css = Template(css).substitute(_PARTS)
    css = re.sub(r"\s+", " ", css).strip()
    return re.sub(r" ?([{};,]) ?|(?<=:) ", lambda match: match[1] or "", css)


BASE_CSS = squeeze("""
.gmw { font: 13px/1.45 var(--jp-ui-font-family, system-ui, sans-serif); container-type: inline-size;
  font-variant-numeric: tabular-nums; margin: 4px 0; text-align: left }
$root p { margin: 0 0 6px }
$root code { background: none; color: inherit; font-size: 12px; padding: 0;
  white-space: inherit }
.gmw-m { opacity: .72 }
$root p.gmw-n { font-size: 12px; margin: 2px 0 }
.gmw-bad { color: $bad }
.gmw-warn { color: $warn }
""")

TABLE_CSS = squeeze("""
.gmw-w { overflow-x: auto; margin: 6px 0 8px }
$root .gmw-t { border-collapse: collapse; border: 0; font-size: 13px; margin: 0; table-layout: auto;
  width: auto }
$root .gmw-t caption { caption-side: top; color: inherit; font-weight: 600; padding: 0 0 2px;
  text-align: left; white-space: nowrap }
$root .gmw-t caption.gmw-h { clip-path: inset(50%); height: 1px; overflow: hidden;
  position: absolute; width: 1px }
$root .gmw-t tbody tr, $root .gmw-t thead tr { background: none; border: 0 }
$root .gmw-t th, $root .gmw-t td { border: 0; font-weight: 400; max-width: none;
  padding: 2px 16px 2px 0; text-align: left; vertical-align: top; white-space: nowrap }
$root .gmw-t thead th { border-bottom: 1px solid ${neutral}73; opacity: .72;
  vertical-align: bottom }
$root .gmw-t tbody + tbody > tr:first-child > * { border-top: 1px solid ${neutral}40 }
$root .gmw-t .gmw-r { text-align: right }
$root .gmw-t .gmw-d { font-weight: 600 }
$root .gmw-t .gmw-f { min-width: 12em; white-space: normal }
$root .gmw-u { max-width: 72em; width: 100% }
$root .gmw-t .gmw-c { max-width: 0; min-width: 8em; overflow: hidden; text-overflow: ellipsis;
  width: 100% }
@container (max-width: 480px) {
  $root .gmw-t { font-size: 11px }
  $root .gmw-t th, $root .gmw-t td { padding-right: 7px }
  $root .gmw-q .gmw-r { white-space: normal }
  $root .gmw-t th .gmw-m { display: none }
}
""")

#: For tables with shares of a whole: the bars, and the paths of what they are the share of.
SHARE_CSS = squeeze("""
$root .gmw-t .gmw-z { min-width: 15em; overflow-wrap: anywhere; white-space: normal }
.gmw-j { padding-left: 1.1em }
$root .gmw-y { background: ${neutral}2e; display: inline-block; height: 8px; margin-left: 6px;
  max-width: none; vertical-align: baseline; width: 48px }
.gmw-y rect { fill: $allocated }
@container (max-width: 480px) {
  $root .gmw-y { display: none }
  $root .gmw-t .gmw-o { min-width: 8em; overflow-wrap: anywhere; white-space: normal }
  $root .gmw-t .gmw-o code { font-size: 11px }
  $root .gmw-t .gmw-f { min-width: 7em }
  .gmw-j { padding-left: .7em }
}
""")

#: The chart of one device; those of several stand side by side where there is room.
SPARKLINE_CSS = squeeze("""
.gmw-s { display: flex; flex-wrap: wrap; gap: 8px 24px; margin: 0 0 6px }
$root .gmw-g { flex: 1 1 300px; font-size: 12px; margin: 0; max-width: 560px; min-width: 0 }
.gmw-g figcaption { margin: 0 0 4px; text-align: left }
.gmw-g figcaption span { display: inline-block; margin-left: 12px }
.gmw-g i { border-top: 2px solid $allocated; display: inline-block; margin-right: 4px;
  vertical-align: middle; width: 14px }
.gmw-g i.gmw-a { background: ${allocated}44; height: 6px }
.gmw-g i.gmw-v { border-color: $reserved }
.gmw-g i.gmw-p { border-top: 2px dashed $peak }
.gmw-b { display: grid; font-size: 11px; gap: 3px 8px; line-height: 1;
  grid-template-columns: 1fr minmax(66px, auto) }
.gmw-b svg { background: none; border-bottom: 1px solid ${neutral}73; display: block;
  grid-row: 1 / 3; height: 56px; max-width: none; overflow: visible; width: 100% }
.gmw-b path { fill: none; stroke-width: 1.5; vector-effect: non-scaling-stroke }
.gmw-b .gmw-a { fill: ${allocated}44; stroke: $allocated }
.gmw-b .gmw-v { stroke: $reserved }
.gmw-b .gmw-p { stroke: $peak; stroke-dasharray: 5 3 }
.gmw-b span { opacity: .72 }
.gmw-b span:nth-of-type(2) { align-self: end }
.gmw-x { display: flex; gap: 8px; justify-content: space-between; white-space: nowrap }
.gmw-x :nth-child(2):not(:last-child) { overflow: hidden; text-overflow: ellipsis }
""")

STEPS_CSS = squeeze("""
$root ol { margin: 6px 0 8px; padding-left: 1.8em }
$root ol ul { list-style: none; margin: 0; padding: 0 }
$root li { margin: 1px 0 }
$root code.gmw-k { font-weight: 600; overflow-wrap: anywhere }
""")

#: For the card of an OOM: its frame, the bar and what it is made of, the ways out.
CARD_CSS = squeeze(
    """
.gmw-card { border: 1px solid ${neutral}59; border-left: 3px solid $bad; border-radius: 4px;
  box-sizing: border-box; margin: 6px 0; max-width: 76em; padding: 10px 14px 8px }
.gmw-card > p:first-of-type > strong:first-child { color: $bad }
$root p.gmw-eh { display: flex; justify-content: space-between; margin: 10px 0 3px }
$root .gmw-e { margin: 0 }
$root .gmw-e svg { background: none; border: 1px solid ${neutral}8c; border-radius: 3px;
  box-sizing: border-box; display: block; height: 22px; max-width: none; width: 100% }
.gmw-e path { stroke: currentColor; stroke-dasharray: 3 2; stroke-width: 2;
  vector-effect: non-scaling-stroke }
.gmw-el { font-size: 12px; margin: 5px 0 10px }
$root .gmw-el p { margin: 0 0 2px }
.gmw-el p > span { display: inline-block; margin-right: 14px }
.gmw-el i { border: 1px solid ${neutral}8c; border-radius: 2px; box-sizing: border-box;
  display: inline-block; height: 10px; margin-right: 5px; width: 10px }
.gmw-el i.gmw-lm { border: 0; border-left: 2px dashed currentColor; border-radius: 0; height: 12px;
  vertical-align: -2px; width: 3px }
$root .gmw-out { max-width: 72em; width: 100% }
$root .gmw-out tr > * { border-top: 1px solid ${neutral}40; padding-bottom: 5px; padding-top: 5px }
$root .gmw-out .gmw-r { font-weight: 600 }
$root .gmw-out code { overflow-wrap: anywhere }
.gmw-cd { line-height: 22px; min-height: 22px }
@container (max-width: 600px) {
  $root.gmw-card .gmw-y { display: none }
  $root.gmw-card .gmw-t td { padding-right: 10px }
}
$root .gmw-out .gmw-f { width: 100% }
"""
    + "".join(
        f".gmw-l{LOOKS[look]} {{ fill: {color} }} .gmw-el i.gmw-l{LOOKS[look]} "
        f"{{ background: {color}; border-color: {color} }}\n"
        for look, color in LOOK_COLORS.items()
    )
    + f".gmw-l{LOOKS['free']} {{ fill: none }} .gmw-l{LOOKS['rest']} {{ fill: {NEUTRAL_COLOR}40 }}"
    + f" .gmw-el i.gmw-l{LOOKS['rest']} {{ background: {NEUTRAL_COLOR}40 }}"
)

#: The one line of ``%memtrace on`` carries only this.
LINE_CSS = squeeze("""
.gmw-l { font: 12px/1.4 var(--jp-ui-font-family, system-ui, sans-serif);
  font-variant-numeric: tabular-nums; opacity: .8 }
.gmw-l span { display: inline-block; margin-right: 14px }
""")
