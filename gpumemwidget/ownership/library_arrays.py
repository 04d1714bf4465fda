"""List the arrays of other libraries on a GPU by the names that hold them.

They are no part of the account: PyTorch's allocator does not count them. Variables are looked at,
and lists, tuples and dictionaries in them. Only CuPy's and JAX's own attributes are read: that
allocates nothing and waits for nothing.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from types import ModuleType
from typing import Any, cast

from gpumemwidget.model.ownership import LibraryArray
from gpumemwidget.ownership.graph.objects import is_a, read_namespace
from gpumemwidget.ownership.labels import describe_key
from gpumemwidget.ownership.shell import Shell

_read_name: Any = type.__dict__["__name__"].__get__

#: An array's memory on a GPU, with what it is compared by.
_Found = Iterator[tuple[object, LibraryArray]]


def list_library_arrays(
    shell: Shell, deadline_s: float
) -> tuple[tuple[LibraryArray, ...], tuple[str, ...], bool]:
    """Return CuPy's and JAX's arrays on GPUs, the largest first, each memory once.

    Also the names of libraries with arrays that could not be read, and whether everything was
    looked at: not so where there was too much, or ``deadline_s`` on ``time.perf_counter`` passed.
    """
    found: dict[object, LibraryArray] = {}
    unread: dict[str, None] = {}
    known = list(_list_classes())
    if not known:
        return (), (), True
    arrays, is_whole = _find_arrays(shell, [cls for cls, _, _ in known], deadline_s)
    for path, value in arrays:
        if time.perf_counter() > deadline_s:
            is_whole = False
            break
        for cls, library, describe in known:
            if type(value) is cls:
                try:
                    for key, array in describe(path, value):
                        found.setdefault(key, array)
                except Exception:  # noqa: BLE001 - the library's own code: it costs only this row
                    unread[library] = None
    listed = tuple(sorted(found.values(), key=lambda array: -array.n_bytes))
    return listed, tuple(unread), is_whole


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


def _find_arrays(
    shell: Shell, classes: list[object], deadline_s: float
) -> tuple[list[tuple[str, object]], bool]:
    """Return objects of these classes by path, the outermost first, and whether that is all."""
    # Items that are looked at in one container and in all take about 0.1 s. Numbers and texts are
    # quickly passed over; containers and arrays among them cost more, and have a limit too.
    max_items, max_items_of_all, max_found = 500_000, 2_000_000, 100_000
    # By identity: to look a class up asks its metaclass for a hash.
    containers = {id(list), id(tuple), id(dict)}
    wanted = containers | {id(cls) for cls in classes}
    queue = [(name, shell.user_ns.get(name), 0) for name in shell.list_user_names()]
    found: list[tuple[str, object]] = []
    seen: set[int] = set()
    room, is_whole = max_items_of_all, True
    for path, value, depth in queue:
        kind = id(type(value))
        if kind not in wanted or id(value) in seen:
            continue
        seen.add(id(value))
        if kind not in containers:
            found.append((path, value))
            continue
        n_items = len(cast("Sized", value))
        most = min(room, max_items) if depth < 8 else 0
        if time.perf_counter() > deadline_s:
            most = 0
        room -= min(n_items, most)
        is_whole &= n_items <= most
        for key, item in _list_items(value, most):
            if id(type(item)) in wanted:
                if len(queue) >= max_found:
                    is_whole = False
                    break
                queue.append((f"{path}[{describe_key(key)}]", item, depth + 1))
    return found, is_whole


def _list_items(value: Any, most: int) -> Iterable[tuple[object, object]]:
    """Return the first items of a list, a tuple or a dictionary with their indices or keys."""
    if type(value) is not dict:
        return enumerate(value[:most])
    try:
        return list(islice(value.items(), most))
    except RuntimeError:  # Another thread has changed it meanwhile.
        return []


def _describe_cupy(path: str, array: Any) -> _Found:
    memory = array.data.mem
    # Memory that CuPy does not own is another library's: PyTorch's account has its own.
    if _read_name(type(memory)) != "UnownedMemory" and memory.size:
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
