"""Reads what the live plot is sent, as the page does."""

from __future__ import annotations

import struct

Figures = tuple[float, ...]


def unpack_update(
    data: bytes, n_devices: int
) -> tuple[float, float, list[tuple[float, list[Figures]]]]:
    """An update's number, when the running cell began, and its rows."""
    number, running_s, _, _ = struct.unpack_from("<4d", data)
    return number, running_s, unpack_rows(data[32:], n_devices)


def unpack_rows(data: bytes, n_devices: int) -> list[tuple[float, list[Figures]]]:
    """Each row as its time, then of each device allocated, reserved and the peaks of both."""
    width = 1 + 4 * n_devices
    rows: list[tuple[float, list[Figures]]] = []
    for start in range(0, len(data), 8 * width):
        time_s, *figures = struct.unpack_from(f"<{width}d", data, start)
        devices = [tuple(figures[k : k + 4]) for k in range(0, len(figures), 4)]
        rows.append((time_s, devices))
    return rows
