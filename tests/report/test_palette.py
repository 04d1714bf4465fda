"""The colours are seen on a light and on a dark page, and told apart by every kind of eyes."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest

from gpumemwidget.model.traces import MAX_LINE_LAYERS
from gpumemwidget.report.render import palette
from gpumemwidget.report.render.html import read_sheet
from gpumemwidget.report.render.palette import BAND_COLORS, PART_COLORS

#: The states of a block that is not allocated.
BLOCK_STATES = ("pending", "releasable", "fragmented", "pools")

#: JupyterLab light, JupyterLab dark, VS Code dark.
_PAGES = ("#ffffff", "#111111", "#1e1e1e")

#: How the colours look to eyes without one of the three kinds of cones: Machado, Oliveira and
#: Fernandes 2009, https://doi.org/10.1109/TVCG.2009.113, severity 1.
_EYES = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
_RED_GREEN = ("all cones", "protanopia", "deuteranopia")

_TENSORS = (
    "parameter",
    "gradient",
    "optimizer state",
    "saved for backward",
    "tensor",
    "buffer",
)
_OUTSIDE = ("outside", "children", "others", "unlisted", "driver")
#: ``allocated`` stands in place of all kinds, never beside one; ``rest`` is nearly transparent.
_KINDS = tuple(
    look
    for look in PART_COLORS
    if look not in (*BLOCK_STATES, *_OUTSIDE, "cached", "allocated", "rest")
)


def _linearize(color: str) -> list[float]:
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def _measure_contrast(one: str, other: str) -> float:
    """Return the contrast as in https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""
    weights = (0.2126, 0.7152, 0.0722)
    darker, lighter = sorted(
        sum(map(math.prod, zip(weights, _linearize(color), strict=True))) for color in (one, other)
    )
    return (lighter + 0.05) / (darker + 0.05)


def _see(color: str, eyes: str) -> tuple[float, float, float]:
    """Return the colour in CIELAB, as these eyes have it."""
    red, green, blue = (
        min(max(sum(map(math.prod, zip(row, _linearize(color), strict=True))), 0.0), 1.0)
        for row in _EYES[eyes]
    )
    xyz = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089,
    )
    x, y, z = (one ** (1 / 3) if one > 0.008856 else 7.787 * one + 16 / 116 for one in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _find_closest(looks: tuple[str, ...], eyes: str) -> tuple[float, str, str]:
    return min(
        (math.dist(_see(PART_COLORS[one], eyes), _see(PART_COLORS[other], eyes)), one, other)
        for one, other in itertools.combinations(looks, 2)
    )


@pytest.mark.parametrize("page", _PAGES)
def test_colours_can_be_seen(page: str) -> None:
    """Graphics need a contrast of 3 to 1; areas less, as their names stand beside them.

    Words need 4.5 to 1, which no colour has on white and on near-black: these are as near to both
    as can be.
    """
    lines = [palette.COLORS[name] for name in ("allocated", "reserved", "peak", "neutral")]
    areas = [color for color in (*PART_COLORS.values(), *BAND_COLORS.values()) if len(color) == 7]

    assert [one for one in lines if _measure_contrast(one, page) < 3] == []
    assert _measure_contrast(palette.COLORS["bad"], page) >= 3.75
    assert _measure_contrast(palette.COLORS["warn"], page) >= 3.75
    assert [one for one in areas if _measure_contrast(one, page) < 1.95] == []


@pytest.mark.parametrize("eyes", _RED_GREEN)
def test_parts_of_a_device_can_be_told_apart(eyes: str) -> None:
    """Any two kinds may lie side by side, in a bar and in a map of segments."""
    assert _find_closest(_TENSORS, eyes)[0] >= 20
    assert _find_closest(_KINDS, eyes)[0] >= 11
    assert _find_closest((*BLOCK_STATES, "cached"), eyes)[0] >= 13
    assert _find_closest(_OUTSIDE, eyes)[0] >= 11
    assert _find_closest((*_KINDS, *BLOCK_STATES), eyes)[0] >= 9


@pytest.mark.parametrize("eyes", _EYES)
def test_neighbours_in_a_timeline_can_be_told_apart(eyes: str) -> None:
    """Bands are stacked in the order of the palette, and the last may lie beside the first."""
    lines = [BAND_COLORS[str(number)] for number in range(MAX_LINE_LAYERS)]

    for one, other in itertools.pairwise((*lines, lines[0])):
        assert math.dist(_see(one, eyes), _see(other, eyes)) >= 20, (one, other)


def test_style_sheets_use_the_palette() -> None:
    """Each sheet is one line of plain CSS, and has a rule for each band and for each kind."""
    folder = Path(palette.__file__).parent / "styles"
    sheets = [path.stem for path in folder.glob("*.css")]

    for css in map(read_sheet, sheets):
        assert not re.search(r"\n|var\(--gmw|/\*", css)
    assert all(
        f".gmw-k{key}{{fill:{c}}}" in read_sheet("timeline") for key, c in BAND_COLORS.items()
    )
    for look in (*_KINDS, *BLOCK_STATES, "allocated"):
        rule = f".{palette.name_class(look)}{{fill:{PART_COLORS[look]}}}"
        assert rule in read_sheet("segments")
