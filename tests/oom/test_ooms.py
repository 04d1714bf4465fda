"""Errors that say that memory ran out are known, and never asked."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpumemwidget.model.devices import Frame
from gpumemwidget.oom.detection import find_oom

CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.18 GiB of "
    "which 8.25 MiB is free."
)


def catch(error: BaseException) -> BaseException:
    """The error with a traceback."""
    try:
        raise error
    except BaseException as exc:  # noqa: BLE001 - whichever it is
        return exc


@pytest.mark.parametrize(
    ("error", "device", "requested_bytes"),
    [
        (torch.OutOfMemoryError(CUDA_TEXT), "cuda:0", 20 << 20),
        (torch.OutOfMemoryError(CUDA_TEXT.replace("GPU 0", "GPU 11")), "cuda:11", 20 << 20),
        (torch.OutOfMemoryError(CUDA_TEXT.replace("CUDA", "HIP")), "cuda:0", 20 << 20),
        (
            torch.OutOfMemoryError(
                "XPU out of memory. Tried to allocate 192.00 MiB. GPU 3 has a total capacity of "
                "31.89 GiB of which 13.22 GiB is free."
            ),
            "xpu:3",
            192 << 20,
        ),
        (
            RuntimeError(
                "MPS backend out of memory (MPS allocated: 7.64 GiB, other allocations: 68.91 GiB, "
                "max allowed: 88.13 GiB). Tried to allocate 33.50 GiB on private pool."
            ),
            "mps:0",
            67 << 29,
        ),
        (torch.OutOfMemoryError("Allocation on device"), "", None),
    ],
)
def test_the_device_that_an_error_names(
    error: BaseException, device: str, requested_bytes: int | None
) -> None:
    """Of CUDA, ROCm and XPU its number; MPS has one, and an error without a class of its own."""
    sign = find_oom(catch(error))

    assert sign is not None
    assert (sign.where, sign.is_allocators) == ("device", True)
    assert (sign.device, sign.requested_bytes) == (device, requested_bytes)
    assert sign.frames == (Frame(__file__, catch.__code__.co_firstlineno + 3, "catch"),)


def test_a_class_of_the_users() -> None:
    """By its bases alone; what the class would answer is not asked."""
    asked: list[str] = []

    class Hostile(torch.OutOfMemoryError):
        def __getattribute__(self, name: str) -> object:
            asked.append(name)
            raise RuntimeError("asked")

        def __str__(self) -> str:
            asked.append("str")
            raise RuntimeError("asked")

        def __eq__(self, other: object) -> bool:
            asked.append("==")
            raise RuntimeError("asked")

        __hash__ = None  # type: ignore[assignment]

    error = catch(Hostile(CUDA_TEXT))
    asked.clear()

    sign = find_oom(error)

    assert sign is not None
    assert sign.requested_bytes == 20 << 20
    assert asked == []


def test_a_text_that_is_no_plain_one() -> None:
    """A text of a class of the user's is not searched: it may be anything."""

    class Text(str):
        __slots__ = ()

    sign = find_oom(torch.OutOfMemoryError(Text(CUDA_TEXT)))

    assert sign is not None
    assert sign.requested_bytes is None
    assert find_oom(RuntimeError(Text("CUDA out of memory"))) is None


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "HIP out of memory. Tried to allocate",
        "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling",
    ],
)
def test_what_libraries_say(text: str) -> None:
    """The CUDA libraries' own allocations fail as plain RuntimeErrors."""
    sign = find_oom(RuntimeError(text))

    assert sign is not None
    assert (sign.where, sign.requested_bytes) == ("device", None)


@pytest.mark.parametrize(
    ("package", "text"),
    [
        ("builtins", "std::bad_alloc: out_of_memory: CUDA error: cudaErrorMemoryAllocation"),
        ("rmm.pylibrmm", "std::bad_alloc: out_of_memory"),
        ("cupy.cuda.memory", "Out of memory allocating 1,024 bytes (allocated so far: 0 bytes)."),
    ],
)
def test_a_memory_error_of_a_device(package: str, text: str) -> None:
    """Libraries raise Python's own class for a device's memory, or one made from it."""
    cls = type("OutOfMemoryError", (MemoryError,), {"__module__": package})

    sign, plain = find_oom(cls(text)), find_oom(MemoryError("Out of memory"))

    assert sign is not None
    assert sign.where == "device"
    assert plain is not None
    assert plain.where == "host"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling"),
        RuntimeError("the documentation of CUDA speaks of memory"),
        ValueError(CUDA_TEXT),
        KeyboardInterrupt(),
        None,
    ],
)
def test_what_says_no_such_thing(error: BaseException | None) -> None:
    """Other errors, and other classes with that text, have no card."""
    assert find_oom(error) is None


def test_the_hosts() -> None:
    """Real ones: Python's, PyTorch's and NumPy's, with the bytes where the error has them."""
    with pytest.raises(MemoryError) as pythons:
        bytearray(2**60)
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(2**44, dtype=torch.uint8)
    with pytest.raises(MemoryError) as numpys:
        np.ones((2**20, 2**22), dtype="int32")

    signs = [find_oom(each.value) for each in (pythons, torchs, numpys)]

    assert [sign and sign.where for sign in signs] == ["host"] * 3
    assert [sign and sign.requested_bytes for sign in signs] == [None, 2**44, None]


def test_what_the_traceback_shows_with_it() -> None:
    """The cause, and what was being handled unless ``from None`` hides it."""

    def fail(*, hidden: bool = False, named: bool = False) -> BaseException:
        try:
            try:
                bytearray(2**60)
            except MemoryError as exc:
                if named:
                    raise KeyError("later") from exc
                if hidden:
                    raise KeyError("later") from None
                raise KeyError("later")  # noqa: B904 - this is what people write
        except KeyError as exc:
            return exc

    assert find_oom(fail()) is not None
    assert find_oom(fail(named=True)) is not None
    assert find_oom(fail(hidden=True)) is None


def test_in_a_group() -> None:
    """As ``asyncio.TaskGroup`` raises them."""
    group = ExceptionGroup("tasks", [ValueError(), ExceptionGroup("inner", [MemoryError()])])

    sign = find_oom(group)

    assert sign is not None
    assert sign.where == "host"


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is imported to find out, and what calls itself torch is not asked."""
    monkeypatch.delitem(sys.modules, "torch.cuda")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(OutOfMemoryError=ValueError))

    assert find_oom(ValueError(CUDA_TEXT)) is None
    assert find_oom(MemoryError()) is not None
