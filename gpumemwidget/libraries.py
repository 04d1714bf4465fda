"""What is a library's code, and what is the user's own."""

from __future__ import annotations

import re
import sysconfig
from functools import lru_cache

__all__ = ["is_library"]

#: Where the standard library and installed packages lie, here and on the machine of a recording;
#: and what torch.compile wrote.
_LIBRARIES = re.compile(
    r"[/\\](site|dist)-packages[/\\]|^<frozen |[/\\]lib[/\\]python3\.\d+[/\\]"
    r"|[/\\]torchinductor_|^<eval_with_key>|^"
    + "|^".join(re.escape(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
)


@lru_cache(maxsize=4096)
def is_library(filename: str) -> bool:
    """Whether a file of Python belongs to an installed package or to Python itself.

    Args:
        filename: as a code object has it.
    """
    return _LIBRARIES.search(filename) is not None
