"""Find the number of the cell that a compiled file belongs to, on IPython 7 too.

IPython 8 keeps a map from the files of compiled cells to their numbers, by which its own tracebacks
say ``In[7]``. IPython 7, which Colab has, keeps none.
"""

from __future__ import annotations

from typing import Any


class CellFiles:
    """The numbers of cells by the names of their compiled files.

    Args:
        compiler: IPython's compiler of cells, ``shell.compile``.
    """

    def __init__(self, compiler: Any) -> None:
        self._compiler = compiler
        self._noted: dict[str, int] = {}

    def open(self) -> None:
        """Note each file that IPython compiles from now on, if IPython does not note it."""
        if not hasattr(self._compiler, "_filename_map"):
            self._compiler.cache = self._cache

    def close(self) -> None:
        """Give IPython its own method back. May be called twice."""
        if vars(self._compiler).get("cache") == self._cache:
            del self._compiler.cache

    def read_numbers(self) -> dict[str, int]:
        """Return the number of each cell that was compiled, by the name of its file."""
        return dict(getattr(self._compiler, "_filename_map", self._noted))

    def _cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        cache = type(self._compiler).cache
        name: str = cache(self._compiler, transformed_code, number, raw_code=raw_code)
        self._noted[name] = number
        return name
