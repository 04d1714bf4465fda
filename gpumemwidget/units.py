"""Format bytes and durations as text, and parse amounts of memory.

Inside the package everything is plain bytes and seconds; this is the edge where they become text
(binary units, two decimals) and where a person's text becomes bytes.
"""

from __future__ import annotations

import re

from gpumemwidget.errors import BadInputError

#: The text for a number that is not known.
UNKNOWN = "—"

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
}
_QUANTITY = re.compile(r"\s*(?P<number>\d{1,20}(?:\.\d+)?)\s*(?P<unit>[a-zA-Z]*)\s*")


def format_bytes(n_bytes: int | None, *, is_at_least: bool = False) -> str:
    """Return bytes as text in binary units.

    Args:
        n_bytes: a count of bytes, negative ones too; ``None`` where it is unknown.
        is_at_least: whether it is a lower bound, as in ``DeviceBytes``.

    Returns:
        ``"1.50 GiB"``; whole numbers for plain bytes (``"512 B"``); ``"at least 1.50 GiB"`` for a
        lower bound; ``"—"`` for unknown.
    """
    if n_bytes is None:
        return UNKNOWN
    if is_at_least:
        return f"at least {format_bytes(n_bytes)}"
    sign = "-" if n_bytes < 0 else ""
    value = float(abs(n_bytes))
    unit = 0
    # 1023.995 would print as "1024.00": that is the next unit's 1.00.
    while value >= 1023.995 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    if unit == 0:
        return f"{sign}{int(value)} B"
    return f"{sign}{value:.2f} {_UNITS[unit]}"


def format_change(n_bytes: int | None) -> str:
    """Return a difference in bytes as text, with its sign: ``"+1.50 GiB"``, ``"0 B"``, ``"—"``."""
    if n_bytes is None or n_bytes <= 0:
        return format_bytes(n_bytes)
    return f"+{format_bytes(n_bytes)}"


def format_duration(duration_s: float | None) -> str:
    """Return seconds as text in the unit that reads best.

    Returns:
        ``"850 µs"``, ``"12.3 ms"``, ``"4.56 s"``, ``"3 min 20 s"``, ``"2 h 05 min"``; ``"—"`` for
        unknown.
    """
    if duration_s is None:
        return UNKNOWN
    if duration_s < 0.9995e-3:
        return f"{duration_s * 1e6:.0f} µs"
    if duration_s < 0.99995:
        return f"{duration_s * 1e3:.1f} ms"
    if duration_s < 59.995:
        return f"{duration_s:.2f} s"
    whole_s = round(duration_s)
    if whole_s < 3600:
        return f"{whole_s // 60} min {whole_s % 60:02d} s"
    whole_min = round(duration_s / 60)
    return f"{whole_min // 60} h {whole_min % 60:02d} min"


def parse_bytes(text: str) -> int:
    """Return a person's ``"12GiB"``, ``"500 MB"`` or ``"4096"`` as bytes.

    Raises:
        BadInputError: it is no number with a unit that we know.
    """
    match = _QUANTITY.fullmatch(text)
    factor = _FACTORS.get(match["unit"].lower()) if match else None
    if match is None or factor is None:
        raise BadInputError(
            f"{text!r} is not an amount of memory: give a number and a unit, as in 12GiB or 500MB"
        )
    return round(float(match["number"]) * factor)
