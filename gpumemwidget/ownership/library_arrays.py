"""List the arrays of other libraries on a GPU by the names that hold them.

They are no part of the account: PyTorch's allocator does not count them. Variables are looked at,
and lists, tuples and dictionaries in them. Only CuPy's and JAX's own attributes are read: that
allocates nothing and waits for nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

from gpumemwidget.model.ownership import LibraryArray
from gpumemwidget.ownership.shell import Shell

#: How deep containers are looked into, and how many objects are looked at in all.
_MAX_DEPTH, _MAX_OBJECTS = 3, 100_000


def list_library_arrays(shell: Shell) -> tuple[LibraryArray, ...]:
    """Return CuPy's and JAX's arrays on GPUs, the largest first; each memory once."""
    if not {"cupy", "jax"} & sys.modules.keys():
        return ()
    found: dict[object, LibraryArray] = {}
    for path, value in _iterate_values(shell):
        for key, array in _describe(path, value):
            found.setdefault(key, array)
    return tuple(sorted(found.values(), key=lambda array: -array.n_bytes))


def _iterate_values(shell: Shell) -> Iterator[tuple[str, object]]:
    """Yield what the names hold and what is in their containers, the outermost first."""
    queue = [(name, shell.user_ns.get(name), 0) for name in shell.list_user_names()]
    for path, value, depth in queue:
        yield path, value
        if depth == _MAX_DEPTH:
            continue
        inner: list[tuple[str, object, int]] = []
        kind = type(value)
        if kind is list or kind is tuple:
            inner = [(f"{path}[{i}]", item, depth + 1) for i, item in enumerate(list(value))]  # type: ignore[call-overload]
        elif kind is dict:
            pairs = list(value.items())  # type: ignore[attr-defined]
            inner = [
                (f"{path}[{key!r}]", item, depth + 1)
                for key, item in pairs
                if type(key) in (str, int)
            ]
        queue += inner[: _MAX_OBJECTS - len(queue)]


def _describe(path: str, value: object) -> Iterator[tuple[object, LibraryArray]]:
    """Yield an array's memory on each GPU with what it is compared by; nothing of others."""
    array: Any = value
    kind = type(value)
    if kind is getattr(sys.modules.get("cupy"), "ndarray", None):
        memory = array.data.mem
        # What CuPy does not own is another's: PyTorch's account has its own.
        if type(memory).__name__ != "UnownedMemory" and memory.size:
            device, what = f"cuda:{memory.device_id}", f"{array.dtype} {tuple(array.shape)}"
            yield memory.ptr, LibraryArray(device, path, int(memory.size), "CuPy", what)
    elif kind.__name__ == "ArrayImpl" and kind.__module__.startswith("jaxlib"):
        if array.is_deleted():
            return
        sharding = array.sharding
        n_bytes = math.prod(sharding.shard_shape(array.shape)) * int(array.dtype.itemsize)
        what = f"{array.dtype} {tuple(array.shape)}"
        for device in sharding.addressable_devices:
            if device.platform == "gpu" and n_bytes:
                name = f"cuda:{device.local_hardware_id}"
                yield (id(array), name), LibraryArray(name, path, n_bytes, "JAX", what)
