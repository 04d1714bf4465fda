"""How a traced cell looks: the colours of the bands, the timeline's and the listing's style sheets.

The bands lie beside each other, so each has to differ from its neighbours for every kind of eyes,
and be seen on a light and on a dark page; light and dark tones take turns. The names stand beside
the bands in their order, so that nobody needs the colours to read it.
"""

from __future__ import annotations

from gpumemwidget.report.theme import ALLOCATED_COLOR, PEAK_COLOR, RESERVED_COLOR, squeeze

__all__ = [
    "BAND_COLORS",
    "FOLD_CSS",
    "LISTING_CSS",
    "QUIET_BAND_COLORS",
    "TIMELINE_CSS",
    "TIMELINE_HEIGHT",
    "TIMELINE_WIDTH",
]

#: Of the lines, from the bottom up; neither that of what is reserved nor that of the peak.
BAND_COLORS = (
    ALLOCATED_COLOR,
    "#c2962e",
    "#6a3fc9",
    "#3fa88f",
    "#8f3f77",
    "#93a4dd",
    "#5d7a1f",
    "#c98ac0",
)
#: What stood before the cell, other lines, and what is no line's.
QUIET_BAND_COLORS = {"b": "#808080", "o": "#a8a8a8", "n": "#666666"}

#: The timeline's ``viewBox``, stretched to the room it has; it is 190 pixels high.
TIMELINE_WIDTH = 1000
TIMELINE_HEIGHT = 400

_KEYS = "".join(
    f".gmw-k{key} {{ --k: {color} }} "
    for key, color in (*enumerate(BAND_COLORS), *QUIET_BAND_COLORS.items())
)

TIMELINE_CSS = squeeze(
    _KEYS
    + f"""
.gmw.gmw.gmw .gmw-tl {{ display: grid; font-size: 12px; gap: 0 8px;
  grid-template-columns: 5em minmax(0, 1fr) minmax(0, 22em);
  grid-template-rows: 16px 190px auto; margin: 2px 0 10px;
  max-width: 76em }}
.gmw.gmw.gmw p:has(+ .gmw-tl):not(:first-of-type) {{ margin-top: 14px }}
.gmw-tl svg {{ background: none; display: block; max-width: none; overflow: visible; width: 100% }}
.gmw-tl text {{ fill: currentColor; font-size: 11px }}
.gmw-tp {{ grid-column: 2 }}
.gmw-tp text {{ fill: {PEAK_COLOR}; font-weight: 600 }}
.gmw-ty {{ grid-column: 1; grid-row: 2; opacity: .72 }}
.gmw-tl > svg {{ border-bottom: 1px solid #80808073; grid-column: 2; grid-row: 2; height: 190px }}
.gmw-ty svg {{ height: 190px }}
.gmw-tl path {{ vector-effect: non-scaling-stroke }}
.gmw-tl > svg g {{ opacity: .85 }}
.gmw-tl g path {{ fill: var(--k); stroke: #ffffff59; stroke-width: .5 }}
.gmw-tl g path:hover {{ filter: brightness(1.2) }}
.gmw-tl .gmw-ti {{ fill: none; stroke: #80808040 }}
.gmw-tl .gmw-v {{ fill: none; stroke: {RESERVED_COLOR}; stroke-width: 1.5 }}
.gmw-tl .gmw-p {{ fill: none; stroke: {PEAK_COLOR}; stroke-dasharray: 5 3; stroke-width: 1.5 }}
.gmw-tl .gmw-co {{ fill: #80808059 }}
.gmw-tx {{ display: flex; font-size: 11px; gap: 8px; grid-column: 2; justify-content: space-between;
  opacity: .72; white-space: nowrap }}
.gmw-tx :nth-child(2):not(:last-child) {{ overflow: hidden; text-overflow: ellipsis }}
.gmw.gmw.gmw .gmw-tl ul {{ align-content: start; display: grid; gap: 1px 0; grid-column: 3;
  grid-row: 1 / 4; list-style: none; margin: 14px 0 0; padding: 0 }}
.gmw.gmw.gmw .gmw-tl li {{ align-items: baseline; display: flex; gap: 6px; margin: 0;
  min-width: 0 }}
.gmw-tl li span {{ flex: 1 1 auto; min-width: 0; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap }}
.gmw-tl li strong {{ font-weight: 400; white-space: nowrap }}
.gmw-tl li em {{ opacity: .72 }}
.gmw-tl li code {{ opacity: .72 }}
.gmw-sw {{ background: var(--k); flex: none; height: 10px; opacity: .85; width: 10px }}
.gmw-sv {{ border-top: 2px solid {RESERVED_COLOR}; flex: none; height: 0; vertical-align: middle;
  width: 10px; align-self: center }}
@container (max-width: 760px) {{
  .gmw.gmw.gmw .gmw-tl {{ grid-template-columns: 5em minmax(0, 1fr) }}
  .gmw.gmw.gmw .gmw-tl ul {{ gap: 1px 18px; grid-column: 1 / 3;
    grid-row: auto; grid-template-columns: repeat(auto-fill, minmax(220px, 1fr)); margin-top: 6px }}
}}
"""
)

#: Without ``:has`` all calls stand open.
LISTING_CSS = squeeze(
    _KEYS
    + f"""
.gmw.gmw.gmw .gmw-li {{ font-size: 12px }}
.gmw.gmw.gmw .gmw-li td, .gmw.gmw.gmw .gmw-li th {{ padding: 1px 12px 1px 0 }}
.gmw.gmw.gmw .gmw-li tbody + tbody > tr:first-child > * {{ border-top: 0 }}
.gmw.gmw.gmw .gmw-li td.gmw-ix {{ border-left: 3px solid transparent; opacity: .72;
  padding: 1px 3px 1px 5px; text-align: right }}
.gmw.gmw.gmw .gmw-li .gmw-ix[class*=gmw-k] {{ border-left-color: var(--k); opacity: 1 }}
.gmw.gmw.gmw .gmw-li .gmw-src {{ max-width: 40em; max-width: max(11em, calc(100cqw - 42em));
  overflow: hidden; text-overflow: ellipsis; white-space: pre }}
.gmw.gmw.gmw .gmw-li details {{ display: block; margin: 0; padding: 0 }}
.gmw.gmw.gmw .gmw-li .gmw-src {{ padding-left: 13px }}
.gmw.gmw.gmw .gmw-li summary {{ cursor: pointer; display: block; list-style: none;
  margin: 0 0 0 -13px; overflow: hidden; padding: 0 0 0 13px; text-overflow: ellipsis }}
.gmw-li summary::-webkit-details-marker {{ display: none }}
.gmw-li summary::before {{ content: "▸"; display: inline-block; margin-left: -13px; opacity: .72;
  width: 13px }}
.gmw-li [open] > summary::before {{ content: "▾" }}
.gmw.gmw.gmw .gmw-li tr:has([open]) .gmw-src {{ overflow-wrap: anywhere; white-space: pre-wrap }}
.gmw.gmw.gmw .gmw-li .gmw-wd {{ overflow-wrap: anywhere; white-space: normal }}
.gmw-li tr:hover > * {{ background: #80808020 }}
.gmw.gmw.gmw .gmw-li .gmw-call > * {{ opacity: .85 }}
.gmw.gmw.gmw .gmw-li .gmw-y {{ float: left; margin: 5px 6px 0 0; width: 40px }}
.gmw.gmw.gmw .gmw-li .gmw-sum > * {{ border-top: 1px solid #80808073; font-weight: 600 }}
.gmw-y rect {{ fill: {ALLOCATED_COLOR} }}
@supports selector(:has(a)) {{ .gmw-li tbody:not(:has([open])) .gmw-call {{ display: none }} }}
@container (max-width: 760px) {{ .gmw.gmw.gmw .gmw-t .gmw-y {{ display: none }}
  .gmw.gmw.gmw .gmw-li .gmw-src {{ max-width: max(9em, calc(100cqw - 31em)) }}
  .gmw.gmw.gmw .gmw-li td, .gmw.gmw.gmw .gmw-li th {{ padding-right: 8px }} }}
"""
)

#: For what is folded away until it is asked for.
FOLD_CSS = squeeze("""
.gmw.gmw.gmw .gmw-fo { margin: 4px 0 }
.gmw.gmw.gmw .gmw-fo > summary { cursor: pointer; margin: 2px 0 }
""")
