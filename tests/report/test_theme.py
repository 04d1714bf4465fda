"""The few colours that are ours can be told from a light and from a dark page."""

from __future__ import annotations

import pytest

from gpumemwidget.report import theme

#: JupyterLab light, JupyterLab dark, VS Code dark.
_PAGES = ("#ffffff", "#111111", "#1e1e1e")


def _measure_luminance(color: str) -> float:
    """As the WCAG has it: https://www.w3.org/TR/WCAG22/#dfn-relative-luminance."""
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _measure_contrast(one: str, other: str) -> float:
    darker, lighter = sorted((_measure_luminance(one), _measure_luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("page", _PAGES)
@pytest.mark.parametrize(
    "color",
    [
        theme.ALLOCATED_COLOR,
        theme.RESERVED_COLOR,
        theme.PEAK_COLOR,
        theme.NEUTRAL_COLOR,
        *theme.LOOK_COLORS.values(),
    ],
)
def test_lines_can_be_seen(color: str, page: str) -> None:
    """Graphics need a contrast of 3 to 1."""
    assert _measure_contrast(color, page) >= 3


@pytest.mark.parametrize("page", _PAGES)
@pytest.mark.parametrize("color", [theme.BAD_COLOR, theme.WARN_COLOR])
def test_words_can_be_read(color: str, page: str) -> None:
    """No colour has 4.5 to 1 on white and on near-black: these are as near to both as can be."""
    assert _measure_contrast(color, page) >= 3.75


def test_rules_hold_nothing_to_substitute() -> None:
    """Each name in the style sheets has been replaced by what it stands for."""
    sheets = (
        theme.BASE_CSS,
        theme.TABLE_CSS,
        theme.SPARKLINE_CSS,
        theme.STEPS_CSS,
        theme.LINE_CSS,
        theme.CARD_CSS,
    )

    assert not [sheet for sheet in sheets if "$" in sheet or "\n" in sheet]
