"""Find the Jupyter kernels that processes belong to.

A Jupyter server passes a kernel the file that tells its ports, ``…/kernel-<id>.json``; by the same
id the server and the front ends know it:
https://jupyter-client.readthedocs.io/en/stable/kernels.html#connection-files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import psutil  # type: ignore[import-untyped]  # no types are published with it

_CONNECTION_FILE = re.compile(r"kernel-([^/\\]+)\.json$")


def find_kernel(pid: int) -> str | None:
    """Return the id of the kernel that a process is, or that it was started in.

    ``None`` for a process that belongs to no kernel, has ended, or can't be read.
    """
    try:
        process = psutil.Process(pid)
        for each in (process, *process.parents()):
            kernel_id = parse_kernel_id(each.cmdline())
            if kernel_id is not None:
                return kernel_id
    except (psutil.Error, OSError):
        return None
    return None


def parse_kernel_id(command: Sequence[str]) -> str | None:
    """Return the kernel's id in a kernel's command; ``None`` for any other command.

    Example:
        >>> parse_kernel_id(["python", "-m", "ipykernel_launcher", "-f", "/run/kernel-6f0e.json"])
        '6f0e'
    """
    found = filter(None, map(_CONNECTION_FILE.search, command))
    return next((match[1] for match in found), None)
