"""Memory of a GPU that is CuPy's or JAX's: by cell, by library, and what gives it back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gpu.test_cuda import SHELL, run_python

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

GIB = 1 << 30

#: Runs cells, and reads what the driver has of this process from NVML itself.
_BEGIN = f"""{SHELL}
import json, os, sys
import pynvml
pynvml.nvmlInit()
def ask_driver():
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    listed = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    return sum(each.usedGpuMemory for each in listed if each.pid == os.getpid())
def read_outside():
    import gpumemwidget
    (device,) = [d for d in gpumemwidget.monitor().ledger[-1].devices if d.device == "cuda:0"]
    return device.outside.before_bytes, device.outside.after_bytes
def list_parts():
    import gpumemwidget
    record = gpumemwidget.breakdown("cuda:0").record()
    assert sum(part.n_bytes for part in record.parts) == record.total_bytes
    (outside,) = [part for part in record.parts if part.key == "outside"]
    assert not outside.parts or sum(part.n_bytes for part in outside.parts) == outside.n_bytes
    return {{part.key: part.n_bytes for part in outside.parts}}
cell("%load_ext gpumemwidget")
"""


def _run(source: str) -> Any:
    said = run_python(_BEGIN + source)
    if "not listed" in said:
        pytest.skip("the driver lists this process by another pid")
    return json.loads(said.splitlines()[-1])


def test_a_cell_of_cupy_has_its_gpu_and_its_release_frees_it() -> None:
    """As much as the driver has; PyTorch is not imported for it."""
    pytest.importorskip("cupy")

    found = _run(f"""
cell("import cupy; first = cupy.zeros(1)")
if not ask_driver(): print("not listed"); sys.exit()
before = ask_driver()
cell("c = cupy.ones({GIB} // 4, dtype='f4')")
after = ask_driver()
outside, parts = read_outside(), list_parts()
pool = sys.modules["cupy"].get_default_memory_pool()
own = pool.used_bytes(), pool.free_bytes()
cell("del first")
import gpumemwidget
arrays = [(a.path, a.device, a.n_bytes, a.library) for a in gpumemwidget.owners().library_arrays]
plan = gpumemwidget.plan_release("c", libraries=True).caches
cell("%memrelease c --libraries")
released = ask_driver()
has_torch = "torch" in sys.modules
print(json.dumps([before, after, outside, parts, own, arrays, plan, released, has_torch]))
""")

    before, after, outside, parts, (used, cached), arrays, plan, released, has_torch = found
    assert after - before >= GIB
    assert outside == [before, after]
    assert parts["library"] == used >= GIB
    assert parts.get("library cache", 0) == cached
    assert arrays == [["c", "cuda:0", GIB, "CuPy"]]
    assert [name for name, *_ in plan] == ["CuPy"]
    assert after - released >= GIB
    assert not has_torch


def test_what_jax_preallocates_is_its_cache() -> None:
    """Most of the GPU is kept, and little of that is in use."""
    pytest.importorskip("jax")

    found = _run("""
os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.1"
cell("import jax; x = jax.numpy.zeros(1 << 20).block_until_ready()")
if not ask_driver(): print("not listed"); sys.exit()
stats = sys.modules["jax"].local_devices()[0].memory_stats()
import gpumemwidget
arrays = [(a.path, a.device, a.n_bytes, a.library) for a in gpumemwidget.owners().library_arrays]
(outside,) = [p for p in gpumemwidget.breakdown("cuda:0").record().parts if p.key == "outside"]
limits = [part.library.limit_bytes for part in outside.parts if part.library]
print(json.dumps([read_outside(), ask_driver(), list_parts(), stats, arrays, limits]))
""")

    (before, after), driver, parts, stats, arrays, limits = found
    assert arrays == [["x", "cuda:0", 4 << 20, "JAX"]]
    assert (before, after) == (0, driver)
    assert parts["library"] == stats["bytes_in_use"]
    assert parts["library"] + parts["library cache"] == stats.get("pool_bytes")
    assert set(limits) == {stats["bytes_limit"]}


def test_pytorchs_memory_is_not_outside_of_it() -> None:
    """The context is; of a tensor made later nothing."""
    found = _run(
        """
cell("import torch; first = torch.ones(1, device='cuda')")
if not ask_driver(): print("not listed"); sys.exit()
context = read_outside()
cell("x = torch.ones(1 << 28, device='cuda')")
print(json.dumps([context, read_outside(), ask_driver(), torch.cuda.memory_reserved()]))
""".replace("torch.cuda.mem", "sys.modules['torch'].cuda.mem")
    )

    (none, context), (before, after), driver, reserved = found
    assert none == 0
    assert context >= 100 << 20
    assert (before, after) == (context, driver - reserved)
    assert after - before < 64 << 20


def test_jax_on_a_gpu_that_is_not_its_default() -> None:
    """Its GPU is asked, too, where its CPU is the default backend."""
    pytest.importorskip("jax")

    found = _run("""
os.environ.update(JAX_PLATFORMS="cpu,cuda", XLA_PYTHON_CLIENT_MEM_FRACTION="0.1")
cell("import jax; x = jax.device_put(jax.numpy.zeros(1 << 20), jax.devices('cuda')[0])")
if not ask_driver(): print("not listed"); sys.exit()
jax = sys.modules["jax"]
own = jax.local_devices(backend="cuda")[0].memory_stats()
print(json.dumps([[d.platform for d in jax.local_devices()], list_parts(), own["bytes_in_use"]]))
""")

    default, parts, used = found
    assert default == ["cpu"]
    assert parts["library"] == used >= 4 << 20


def test_rmm_has_what_its_statistics_count() -> None:
    """What its pool has beside that is unknown; a cell that allocates within it takes nothing."""
    pytest.importorskip("rmm")

    found = _run(f"""
cell("import rmm, rmm.statistics; rmm.reinitialize(pool_allocator=True, initial_pool_size={GIB})")
if not ask_driver(): print("not listed"); sys.exit()
pooled, silent = read_outside(), list_parts()
cell("rmm.statistics.enable_statistics(); b = rmm.DeviceBuffer(size={GIB} // 4)")
print(json.dumps([pooled, silent, read_outside(), list_parts(), ask_driver()]))
""")

    pooled, silent, outside, parts, driver = found
    assert pooled[1] - pooled[0] >= GIB
    assert silent == {}
    assert outside == [pooled[1], driver]
    assert driver - pooled[1] < 64 << 20
    assert parts["library"] == GIB // 4
    assert "library cache" not in parts


def test_what_a_library_took_for_a_while_is_a_sampled_peak() -> None:
    """By the driver's figure, at the moment that the dashboard asks."""
    pytest.importorskip("cupy")

    found = _run(f"""
cell("import cupy, gpumemwidget; first = cupy.zeros(1)")
if not ask_driver(): print("not listed"); sys.exit()
shell.user_ns["ask_driver"] = ask_driver
cell('''
c = cupy.ones({GIB} // 4, dtype='f4')
gpumemwidget.monitor().read_own_uses()
held = ask_driver()
del c
cupy.get_default_memory_pool().free_all_blocks()
''')
(device,) = [d for d in gpumemwidget.monitor().ledger[-1].devices if d.device == "cuda:0"]
print(json.dumps([shell.user_ns["held"], device.outside.peak_bytes, ask_driver(), read_outside()]))
""")

    held, peak, driver, (before, after) = found
    assert peak == held >= before + GIB
    assert after == driver < held


#: Makes a pool of PyTorch's whose pages the driver maps one allocation at a time, so that they can
#: be taken from below live tensors, as vLLM's sleep mode does.
_MAKE_POOL = """
import ctypes as c, torch
cuda = c.CDLL("libcuda.so.1")
def ask(name, *args):
    code = getattr(cuda, name)(*args)
    assert code == 0, f"{name}: {code}"
class Location(c.Structure):
    _fields_ = [("type", c.c_int), ("id", c.c_int)]
class Page(c.Structure):
    _fields_ = [("type", c.c_int), ("handles", c.c_int), ("location", Location),
                ("win32", c.c_void_p), ("flags", c.c_ubyte * 8)]
class Access(c.Structure):
    _fields_ = [("location", Location), ("flags", c.c_int)]
here, mapped = Location(1, 0), {}
@c.CFUNCTYPE(c.c_void_p, c.c_size_t, c.c_int, c.c_void_p)
def allocate(n_bytes, device, stream):
    n_bytes, pointer, page = -(-n_bytes // (2 << 20)) * (2 << 20), c.c_uint64(), c.c_uint64()
    size = c.c_size_t(n_bytes)
    ask("cuMemAddressReserve", c.byref(pointer), size, c.c_size_t(0), c.c_uint64(0), c.c_uint64(0))
    ask("cuMemCreate", c.byref(page), size, c.byref(Page(1, 0, here)), c.c_uint64(0))
    ask("cuMemMap", pointer, size, c.c_size_t(0), page, c.c_uint64(0))
    ask("cuMemSetAccess", pointer, size, c.byref(Access(here, 3)), c.c_size_t(1))
    mapped[pointer.value] = (size, page)
    return pointer.value
@c.CFUNCTYPE(None, c.c_void_p, c.c_size_t, c.c_int, c.c_void_p)
def free(pointer, n_bytes, device, stream):
    pass
torch.ones(1, device="cuda")
own = [c.cast(function, c.c_void_p).value for function in (allocate, free)]
pool = torch.cuda.MemPool(torch._C._cuda_customAllocator(*own))
with torch.cuda.use_mem_pool(pool):
    engine = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
def sleep():
    for pointer, (size, page) in mapped.items():
        ask("cuMemUnmap", c.c_uint64(pointer), size)
        ask("cuMemRelease", page)
"""


def test_memory_that_sleeps_is_beside_the_parts() -> None:
    """Its pages are the driver's again while PyTorch counts them: what both have adds up."""
    found = _run(f"""
{_MAKE_POOL}
if not ask_driver(): print("not listed"); sys.exit()
def read():
    record = gpumemwidget.breakdown("cuda:0").record()
    parts = {{part.key: part.n_bytes for part in record.parts}}
    assert sum(parts.values()) == record.total_bytes
    return [torch.cuda.memory_reserved(), ask_driver(), record.asleep_bytes, parts]
awake = read()
sleep()
print(json.dumps([awake, read()]), flush=True)
os._exit(0)  # The pool's memory is no longer there to free.
""")

    (reserved, own, none, _), (reserved_asleep, own_asleep, asleep, parts) = found
    assert (none, reserved_asleep) == (0, reserved)
    assert own - own_asleep == 4 << 30
    assert asleep == reserved - own_asleep > 0
    assert parts["rest"] == own_asleep
