"""Two runs or moments beside each other: what has more bytes in the second one, and what fewer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """The bytes of one thing on both sides."""

    #: A purpose, a part of a device, a process: ``optimizer state``.
    what: str
    #: The variable or the line's text: ``model``, ``loss.backward()``.
    where: str
    #: ``None`` where that side has nothing of the kind.
    a_bytes: int | None
    b_bytes: int | None

    @property
    def change_bytes(self) -> int:
        """The bytes of the second side less those of the first."""
        return (self.b_bytes or 0) - (self.a_bytes or 0)


@dataclass(frozen=True, slots=True)
class ComparedTotal:
    """One figure on both sides, and the rows that it is made of."""

    device: str
    #: ``allocated``, ``allocated at the peak``, ``in use``.
    measure: str
    #: ``None``: that side does not have the figure.
    a_bytes: int | None
    b_bytes: int | None
    #: Rows that differ, the largest change first; together they are the change. Where one side
    #: does not have the figure there are none.
    rows: tuple[ComparedRow, ...]

    @property
    def change_bytes(self) -> int | None:
        """The second total less the first; ``None`` where either is ``None``."""
        if self.a_bytes is None or self.b_bytes is None:
            return None
        return self.b_bytes - self.a_bytes
