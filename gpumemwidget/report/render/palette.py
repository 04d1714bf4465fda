"""Every colour of the reports, of plotly's figures and of the dashboard.

A report stands on pages that we don't choose: JupyterLab in light and in dark, Notebook, VS Code,
a page from nbconvert. So it paints no background and sets no colour of text, and its own colours
are middle tones that can be seen on white and on near-black alike. Parts that may lie side by side
differ in lightness as well as in hue, so that people who confuse red and green see the border
between them: ``tests/report/test_palette.py`` computes that.
"""

from __future__ import annotations

#: Lines and words. Those of pictures, which can't inherit the page's colour, are ``neutral``.
COLORS = {
    "allocated": "#3b82d6",
    "reserved": "#d9730d",
    "peak": "#d6456b",
    "bad": "#d6453d",
    "warn": "#a66c00",
    "neutral": "#808080",
}

#: The parts of a device's memory: kinds of tensors in colours, the cache in browns and oranges,
#: what is outside PyTorch in greys. ``free`` is not here: it has the page's own colour.
PART_COLORS = {
    "parameter": "#5a46e0",
    "gradient": "#8c2296",
    "optimizer state": "#02b286",
    "saved for backward": "#828e3b",
    "tensor": "#933a60",
    "buffer": "#7b9bae",
    "cuBLAS workspace": "#bcb366",
    "CUDA-graph pool": "#685402",
    "compile cache": "#a5bf87",
    "other": "#874333",
    "unknown": COLORS["neutral"],
    "allocated": COLORS["allocated"],
    "unnamed": "#677594",
    "rounding": "#b6b6bf",
    "pending": "#a48256",
    "releasable": "#e9a815",
    "fragmented": "#d42725",
    "pools": "#c9ab46",
    "cached": COLORS["reserved"],
    "outside": "#355f7d",
    "children": "#a2a8d6",
    "others": "#bab2a4",
    "unlisted": "#594f45",
    "driver": "#8a7768",
    "rest": f"{COLORS['neutral']}40",
}

#: The bands of a traced cell's timeline: its lines from the bottom up, in turns of light and dark
#: tones, then what stood before the cell (``b``), other lines (``o``), and no line (``n``).
BAND_COLORS = {
    "0": COLORS["allocated"],
    "1": "#c2962e",
    "2": "#6a3fc9",
    "3": "#3fa88f",
    "4": "#8f3f77",
    "5": "#93a4dd",
    "6": "#5d7a1f",
    "7": "#c98ac0",
    "b": "#7b7b7b",
    "o": "#aaaaaa",
    "n": "#505050",
}


def name_class(look: str) -> str:
    """Return the class of a part's colour: ``gmw-optimizer-state``."""
    return f"gmw-{look.replace(' ', '-').lower()}"


def list_properties() -> dict[str, str]:
    """Return CSS custom properties by name: ``--gmw-allocated``, ``--gmw-optimizer-state``."""
    return {
        **{f"--{name_class(look)}": color for look, color in PART_COLORS.items()},
        **{f"--gmw-k{key}": color for key, color in BAND_COLORS.items()},
        **{f"--gmw-{name}": color for name, color in COLORS.items()},
    }
