"""How a device's memory looks: the colours of its parts, the bridge's and the map's style sheets.

What PyTorch has is in colours, those of the kinds being the same as on an OOM's card; what is
outside of it in greys. The names stand beside the colours everywhere.
"""

from __future__ import annotations

from gpumemwidget.report.theme import LOOK_COLORS, NEUTRAL_COLOR, RESERVED_COLOR, squeeze

__all__ = ["BRIDGE_CSS", "PART_COLORS", "SEGMENTS_CSS", "SEGMENT_LOOKS", "name_class"]

_KINDS = ("parameter", "gradient", "optimizer state", "saved for backward", "tensor", "buffer")

#: The colour of each part, by ``find_look``; ``free`` and ``rest`` are nearly the page's own.
PART_COLORS = {
    **{kind: LOOK_COLORS[kind] for kind in _KINDS},
    "cuBLAS workspace": "#b8a13a",
    "CUDA-graph pool": "#9c7a3c",
    "compile cache": "#7f8f3a",
    "other": LOOK_COLORS["other"],
    "unknown": NEUTRAL_COLOR,
    "allocated": LOOK_COLORS["allocated"],
    "unnamed": "#4f5d73",
    "rounding": "#9fb6d1",
    "pending": "#e8b27a",
    "releasable": "#efa35c",
    "fragmented": "#c2410c",
    "pools": "#e3c267",
    "cached": RESERVED_COLOR,
    "outside": "#64748b",
    "children": "#7a8aa6",
    "others": "#98a0ab",
    "unlisted": "#b4b4b4",
    "driver": "#6f6a64",
}
_LOOKS = {look: number for number, look in enumerate((*PART_COLORS, "free", "rest"))}

#: The states of a block that is not allocated.
SEGMENT_LOOKS = ("pending", "releasable", "fragmented", "pools")


def name_class(look: str) -> str:
    """The class that has a part's colour."""
    return f"gmw-q{_LOOKS.get(look, _LOOKS['rest'])}"


_COLORS = "".join(
    f".{name_class(look)} {{ background: {color}; fill: {color} }}\n"
    for look, color in PART_COLORS.items()
) + (
    f".{name_class('free')} {{ background: none; fill: none }} "
    f".{name_class('rest')} {{ background: {NEUTRAL_COLOR}59; fill: {NEUTRAL_COLOR}59 }}\n"
)

BRIDGE_CSS = squeeze(
    _COLORS
    + """
$root .gmw-bg, .gmw-br { box-sizing: border-box; margin: 4px 0 0; max-width: 988px }
$root .gmw-bg svg { background: none; border: 1px solid ${neutral}8c; border-radius: 3px;
  box-sizing: border-box; display: block; height: 30px; max-width: none; width: 100% }
$root .gmw-bg svg.gmw-bz { border-color: transparent; border-width: 0 1px; height: 16px }
$root .gmw-bg svg.gmw-bo { height: 22px }
.gmw-bz path { fill: ${neutral}33 }
.gmw-bg rect:hover { filter: brightness(1.15) }
.gmw-bg path.gmw-li, .gmw-bg path.gmw-bu { stroke: currentColor; stroke-width: 2;
  vector-effect: non-scaling-stroke }
.gmw-bg path.gmw-bu { stroke-dasharray: 3 2 }
$root .gmw-br { font-size: 12px; margin: 8px 0 12px }
$root .gmw-br p { align-items: baseline; display: grid; gap: 0 10px;
  grid-template-columns: 8em 6.5em minmax(0, 1fr); margin: 0 0 3px }
$root .gmw-br p:first-child { display: block }
.gmw-br strong { font-weight: 400; text-align: right; white-space: nowrap }
$root .gmw-br svg { background: ${neutral}26; grid-column: 1 / 4; display: block; height: 3px;
  max-width: none; width: 100% }
.gmw-br rect { fill: currentColor; opacity: .62 }
.gmw-br rect.gmw-li, .gmw-br rect.gmw-bu { fill: $peak; opacity: 1 }
$root .gmw-t i[class*=gmw-q] { border: 1px solid ${neutral}8c; border-radius: 2px;
  box-sizing: border-box; display: inline-block; height: 10px; margin-right: 6px; width: 10px }
$root .gmw-st th .gmw-j { padding-left: 1.1em }
$root .gmw-st .gmw-f { overflow-wrap: anywhere }
.gmw-nb { white-space: nowrap }
$root p:has(+ .gmw-bg):not(:first-of-type) { margin-top: 16px }
$root .gmw-st { max-width: 988px }
$root .gmw-st .gmw-f { width: 100% }
@container (max-width: 620px) {
  $root .gmw-st thead { display: none }
  $root .gmw-st, $root .gmw-st tbody { display: block }
  $root .gmw-st tr { display: grid; grid-template-columns: minmax(0, 1fr) auto 4.2em }
  $root .gmw-st tbody tr + tr > :last-child { padding-bottom: 5px }
  $root .gmw-st .gmw-f { box-sizing: border-box; font-size: 12px; grid-column: 1 / 4;
    min-width: 0; opacity: .72; padding: 0 0 5px 16px; width: auto }
  $root .gmw-st .gmw-f:empty { display: none }
  $root .gmw-st th { overflow-wrap: anywhere; white-space: normal }
  $root .gmw-br p { grid-template-columns: 7.4em 6em minmax(0, 1fr); gap: 0 7px }
}
"""
)

SEGMENTS_CSS = squeeze(
    """
$root .gmw-sm { margin: 4px 0 8px; max-width: 988px }
$root .gmw-sm figure { margin: 0 }
.gmw-sm svg { background: none; display: block; max-width: none; width: 100% }
.gmw-sm path { fill-opacity: .55 }
.gmw-sm i { opacity: .62 }
"""
    + ", ".join(f".gmw-sm .{name_class(look)}" for look in SEGMENT_LOOKS)
    + """ { fill-opacity: 1; opacity: 1 }
.gmw-sm g:hover, .gmw-sm path[class]:hover { filter: brightness(1.2) }
.gmw-sm .gmw-se { fill: none; stroke: currentColor; stroke-width: 1.5;
  vector-effect: non-scaling-stroke }
$root .gmw-sm ul { display: flex; flex-wrap: wrap; font-size: 12px; gap: 2px 14px;
  list-style: none; margin: 6px 0 0; padding: 0 }
$root .gmw-sm figcaption, $root .gmw-sm p { font-size: 12px; margin: 4px 0 0; opacity: .75 }
$root .gmw-sm i { border-radius: 2px; display: inline-block; height: 10px; margin-right: 5px;
  width: 10px }
"""
)
