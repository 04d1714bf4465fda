"""List the arrays of other libraries on a GPU by the names that hold them.

They are no part of the account: PyTorch's allocator does not count them. Variables are looked at,
and lists, tuples and dictionaries in them. Only CuPy's and JAX's own attributes are read: that
allocates nothing and waits for nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from types import ModuleType
from typing import Any

from gpumemwidget.model.ownership import LibraryArray
from gpumemwidget.ownership.graph.objects import is_a, read_namespace
from gpumemwidget.ownership.labels import describe_key
from gpumemwidget.ownership.shell import Shell

#: How deep containers are looked into, and how many items are looked at of one and of all.
_MAX_DEPTH, _MAX_ITEMS, _MAX_ITEMS_OF_ALL = 3, 10_000, 100_000
_READ_NAME: Any = type.__dict__["__name__"]

#: An array's memory on a GPU, with what it is compared by.
_Found = Iterator[tuple[object, LibraryArray]]


def list_library_arrays(shell: Shell) -> tuple[tuple[LibraryArray, ...], tuple[str, ...]]:
    """Return CuPy's and JAX's arrays on GPUs, the largest first, each memory once.

    Also the names of libraries with arrays that could not be read.
    """
    found: dict[object, LibraryArray] = {}
    unread: dict[str, None] = {}
    known = list(_list_classes())
    for path, value in _iterate_values(shell, [cls for cls, _, _ in known]) if known else ():
        for cls, library, describe in known:
            if type(value) is cls:
                try:
                    for key, array in describe(path, value):
                        found.setdefault(key, array)
                except Exception:  # noqa: BLE001 - the library's own code: it costs only this row
                    unread[library] = None
    return tuple(sorted(found.values(), key=lambda array: -array.n_bytes)), tuple(unread)


def _list_classes() -> Iterator[tuple[object, str, Callable[[str, Any], _Found]]]:
    """Yield the class of each imported library's arrays, with the function that describes one."""
    for module_name, name, library, describe in (
        ("cupy", "ndarray", "CuPy", _describe_cupy),
        ("jax._src.array", "ArrayImpl", "JAX", _describe_jax),
    ):
        module = sys.modules.get(module_name)
        cls = read_namespace(module).get(name) if is_a(module, ModuleType) else None
        if is_a(cls, type):
            yield cls, library, describe


def _iterate_values(shell: Shell, classes: list[object]) -> Iterator[tuple[str, object]]:
    """Yield the objects of these classes in variables and containers, the outermost first."""
    kinds = [list, tuple, dict, *classes]
    queue = [(name, shell.user_ns.get(name), 0) for name in shell.list_user_names()]
    room = _MAX_ITEMS_OF_ALL
    for path, value, depth in queue:
        yield path, value
        items = [] if depth == _MAX_DEPTH else _list_items(value, min(room, _MAX_ITEMS))
        room -= len(items)
        for key, item in items:
            kind = type(item)
            # By identity: to look a class up asks its metaclass for a hash.
            if any(kind is known for known in kinds):
                queue.append((f"{path}[{describe_key(key)}]", item, depth + 1))


def _list_items(value: Any, most: int) -> list[tuple[object, object]]:
    """Return the first items of a list, a tuple or a dictionary with their indices or keys."""
    if type(value) is list or type(value) is tuple:
        return list(enumerate(value[:most]))
    try:
        return list(islice(value.items(), most)) if type(value) is dict else []
    except RuntimeError:  # Another thread has changed it meanwhile.
        return []


def _describe_cupy(path: str, array: Any) -> _Found:
    memory = array.data.mem
    # What CuPy does not own is another's: PyTorch's account has its own.
    if _READ_NAME.__get__(type(memory)) != "UnownedMemory" and memory.size:
        what = f"{array.dtype.name}{list(array.shape)}"
        device = f"cuda:{int(memory.device_id)}"
        yield int(memory.ptr), LibraryArray(device, path, int(memory.size), "CuPy", what)


def _describe_jax(path: str, array: Any) -> _Found:
    if array.is_deleted():
        return
    sharding, dtype = array.sharding, array.dtype
    n_bytes = math.prod(sharding.shard_shape(array.shape)) * int(dtype.itemsize)
    what = f"{dtype.name}{list(array.shape)}"
    for device in sharding.addressable_devices:
        if device.platform == "gpu" and n_bytes:
            name = f"cuda:{int(device.local_hardware_id)}"
            yield (id(array), name), LibraryArray(name, path, n_bytes, "JAX", what)
