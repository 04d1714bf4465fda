"""Rules of sorts, scans, selections and indexed writes, which CUB carries out."""

from __future__ import annotations

import math
from typing import Final

from gpumemwidget.prediction.operations import TensorMeta
from gpumemwidget.prediction.workspaces.draft import (
    FLOATS,
    ITEM_BYTES,
    Draft,
    UnknownFormError,
    ceil_div,
    count_bytes,
    count_elements,
    round_up,
    rule,
)
from gpumemwidget.prediction.workspaces.plans import GpuFacts
from gpumemwidget.prediction.workspaces.reductions import allocate_reduction, dense_like, empty_like

# Sorting and scanning with CUB: temporary storage is laid out in parts aligned to 256 bytes


def _align(n_bytes: int) -> int:
    return round_up(n_bytes, 256)


def _radix_sort_bytes(n: int, key_bytes: int, value_bytes: int, n_bits: int | None = None) -> int:
    """Return the temporary storage of a radix sort of ``n`` pairs, in bytes."""
    widest = max(key_bytes, value_bytes)
    if n <= 256 * max(1, 19 * 4 // widest):
        return 1
    n_passes = ceil_div(n_bits if n_bits is not None else key_bytes * 8, 8)
    tile = {(4, 8): 5376, (8, 8): 4608}.get((key_bytes, value_bytes), 5376)
    parts = [n_passes * 256 * 8, ceil_div(n, tile) * 256 * 4, n_passes * 4]
    if n_passes > 1:
        parts += [n * key_bytes, n * value_bytes]
    return sum(_align(part) for part in parts) + 255


def _scan_bytes(n: int, tile: int, word_bytes: int) -> int:
    """Return the temporary storage of a scan of ``n`` elements, in bytes."""
    states = _align((ceil_div(n, tile) + 32) * word_bytes) + 255
    return _align(states) + 255


def _prefix_sum_bytes(n: int, item_bytes: int) -> int:
    return _scan_bytes(n, 896, 16) if item_bytes == 8 else _scan_bytes(n, 1920, 8)


def _select_bytes(n: int) -> int:
    return _scan_bytes(n, 4224, 8)


def _count_bytes(n: int, gpu: GpuFacts) -> int:
    """Return the temporary storage of a count of the elements that are not zero, in bytes."""
    if n <= 4096:
        return 1
    most_blocks = gpu.n_multiprocessors * (gpu.threads_per_multiprocessor // 256) * 5
    return _align(most_blocks * 4) + 255


@rule("cumsum", "cumprod")
def _plan_cumsum(draft: Draft) -> None:
    tensor = draft.needed(0)
    dim = draft.argument(1)
    if not isinstance(dim, int):
        raise UnknownFormError
    draft.outputs()
    dtype = dict(draft.operation.options).get("dtype")
    target = dtype.removeprefix("torch.") if isinstance(dtype, str) else None
    if target is None:
        target = tensor.dtype if tensor.dtype in FLOATS else "int64"
    item = ITEM_BYTES.get(target, 4)
    converted = tensor
    if tensor.dtype != target:
        converted = empty_like(tensor, target)
        draft.copy(converted)
    if tensor.shape and tensor.n_elements == tensor.shape[dim]:
        draft.temporary(_prefix_sum_bytes(tensor.n_elements, item))


@rule("sort", "sort.stable")
def _plan_sort(draft: Draft) -> None:
    tensor = draft.needed(0)
    arguments = draft.operation.arguments[1:]
    dims = [a for a in arguments if isinstance(a, int) and not isinstance(a, bool)]
    given = dict(draft.operation.options).get("dim")
    dim = dims[0] if dims else given if isinstance(given, int) else -1
    draft.outputs()
    if not tensor.shape:
        return
    dim %= len(tensor.shape)
    n, length, item = tensor.n_elements, tensor.shape[dim], tensor.item_bytes
    if length <= 4096:
        draft.temporary(length * 8)
        return
    n_segments = n // length
    if tensor.stride[dim] != 1 and n_segments > 1:
        for n_bytes in (n * item, n * item, n * 8):
            draft.temporary(n_bytes)
    if item < 4:
        draft.temporary(0, most=n * (item + 8) * 2)
    draft.temporary(n * 8)
    if n_segments == 1:
        draft.temporary(_radix_sort_bytes(n, item, 8))
    elif n_segments < 128:
        draft.temporary(n * 8)
        keys = draft.temporary(n * item)
        storage = draft.temporary(_radix_sort_bytes(n, item, 8))
        draft.free(storage, keys)
        parts = (256 * 8, ceil_div(n, 5760) * 256 * 4, 4)
        draft.temporary(sum(_align(part) for part in parts) + 255)
    else:
        draft.temporary(n * (item + 8))
        draft.temporary(0, most=n * (item + 8) * 2)


#: From how long a slice ``topk`` shares it among blocks, by the greatest number of slices.
_SHARED_TOPK: Final = ((20, 20000), (40, 10000), (80, 8000), (200, 5000), (800, 3000), (4000, 800))


@rule("topk")
def _plan_topk(draft: Draft) -> None:
    tensor = draft.needed(0)
    dim = draft.argument(2, "dim")
    draft.outputs()
    if not tensor.shape:
        return
    length = tensor.shape[dim if isinstance(dim, int) else -1]
    n_slices = tensor.n_elements // max(1, length)
    shortest = next((least for most, least in _SHARED_TOPK if n_slices <= most), 400)
    k = draft.argument(1, "k")
    if isinstance(k, int) and k > 4096:
        draft.temporary(0, most=4 * tensor.n_elements * 8)
    if length < shortest:
        return
    n_threads = draft.gpu.n_multiprocessors * 6 * 256
    n_items = min(64, max(4, ceil_div(tensor.n_elements, n_threads)))
    n_blocks = ceil_div(length, n_items * 256) * n_slices
    # The k-th value and its place in each slice, then counts of digits per block and per slice.
    for n_bytes in (
        n_slices * tensor.item_bytes,
        n_slices * 8,
        n_slices * 8,
        n_blocks * 512,
        n_slices * 1024,
        n_blocks * 4,
        n_blocks * 4,
    ):
        draft.temporary(n_bytes)
    draft.free(draft.temporary(1279))
    draft.temporary(1279)
    if n_blocks > 6304:
        draft.temporary(0, most=16 * n_blocks)


@rule("index")
def _plan_index(draft: Draft) -> None:
    tensor = draft.needed(0)
    indices = draft.argument(1)
    masks = [
        index
        for index in (indices if isinstance(indices, tuple) else ())
        if isinstance(index, TensorMeta) and index.dtype in ("bool", "uint8")
    ]
    if not masks:
        draft.outputs()
        return
    if len(masks) > 1 or not draft.operation.allocated:
        raise UnknownFormError
    (mask,) = masks
    n_found = draft.temporary(4)
    draft.free(draft.temporary(_count_bytes(mask.n_elements, draft.gpu)))
    slice_bytes = count_bytes(tensor) // max(1, mask.n_elements)
    n_rows = draft.operation.allocated[0].n_bytes // max(1, slice_bytes)
    draft.temporary(n_rows * len(mask.shape) * 8)
    selecting = draft.temporary(_select_bytes(mask.n_elements))
    draft.free(selecting, n_found)
    draft.outputs()


@rule("masked_scatter")
def _plan_masked_scatter(draft: Draft) -> None:
    draft.outputs()
    n = draft.needed(0).n_elements
    draft.temporary(n * 8)
    draft.temporary(_prefix_sum_bytes(n, 8))


@rule("randperm")
def _plan_randperm(draft: Draft) -> None:
    n = draft.argument(0)
    if not isinstance(n, int) or n < 1:
        raise UnknownFormError
    draft.outputs()
    # Random keys of just so many bits that two are hardly ever equal.
    n_bits = min(64, math.ceil(math.log2(n - (6 * n * n + 1) / (math.log(0.9) * 12))))
    key_bytes = 4 if n_bits <= 32 else 8
    draft.free(draft.temporary(8))
    draft.temporary(n * 8)
    draft.temporary(n * key_bytes)
    draft.temporary(n * key_bytes)
    draft.temporary(_radix_sort_bytes(n, key_bytes, 8, n_bits))


@rule("_unique2")
def _plan_unique(draft: Draft) -> None:
    tensor = draft.needed(0)
    if tensor.dtype != "int64" or draft.argument(2) is True or draft.argument(3) is True:
        raise UnknownFormError
    n = tensor.n_elements
    draft.output(0)
    draft.free(draft.temporary(_radix_keys_bytes(n)))
    draft.temporary(n * 8)
    draft.temporary(8)
    draft.temporary(_select_bytes(n))
    draft.temporary(0, most=n * 8)


def _radix_keys_bytes(n: int) -> int:
    """Return the temporary storage of a radix sort of ``n`` 8-byte keys, in bytes."""
    if n <= 2304:
        return 1
    parts = (8 * 256 * 8, ceil_div(n, 5760) * 256 * 4, 8 * 4, n * 8)
    return sum(_align(part) for part in parts) + 255


# Embeddings and indexed writes


@rule("embedding_dense_backward")
def _plan_embedding_backward(draft: Draft) -> None:
    gradient, indices = draft.needed(0), draft.needed(1)
    n_weights, by_frequency = draft.argument(2), draft.argument(4)
    if not isinstance(n_weights, int) or by_frequency is True:
        raise UnknownFormError
    draft.contiguous(gradient)
    draft.contiguous(indices)
    n, columns = indices.n_elements, gradient.shape[-1]
    if n <= 3072:
        draft.outputs()
        return
    item = indices.item_bytes
    for _ in range(2):
        draft.temporary(n * item)
    order = draft.temporary(n * item)
    sorting = draft.temporary(_radix_sort_bytes(n, item, item))
    draft.free(sorting, order)
    draft.outputs()
    # An index that occurs is a segment of the sorted ones, added up in parts of 10 rows.
    n_segments = min(n, n_weights)
    draft.temporary(n * item)
    draft.temporary(8)
    unused = draft.temporary(n * item)
    selecting = draft.temporary(_scan_bytes(n, 4224, 16))
    draft.free(selecting, unused)
    draft.temporary(n_segments * item)
    draft.temporary(n_segments * item)
    draft.free(draft.temporary(_prefix_sum_bytes(n_segments, item)))
    draft.temporary(8)
    n_parts = n // 10 + n_segments
    draft.temporary(n_parts * item)
    accumulator = 8 if gradient.dtype == "float64" else 4
    columns_rounded = round_up(columns, 32)
    block = min(columns_rounded, 1024)
    n_blocks = ceil_div(n_segments * columns_rounded, block)
    if n_blocks < draft.gpu.n_multiprocessors * 4 and n_parts > n_blocks * 4:
        # Few long segments: added up at once, in the precision of the accumulator.
        draft.temporary(n_parts * item)
        if gradient.item_bytes < accumulator:
            draft.temporary(n_weights * columns * accumulator)
    else:
        draft.temporary(n_parts * columns * accumulator)


@rule("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def _plan_index_put(draft: Draft) -> None:
    tensor, values = draft.needed(0), draft.needed(2)
    indices = draft.argument(1)
    given = [
        index
        for index in (indices if isinstance(indices, tuple) else ())
        if isinstance(index, TensorMeta)
    ]
    if any(index.dtype in ("bool", "uint8") for index in given) or not given:
        raise UnknownFormError
    draft.outputs()
    if draft.argument(3, "accumulate") is not True:
        return
    draft.contiguous(values)
    linear = None
    n = max(index.n_elements for index in given)
    # Autograd, which puts gradients into the tensor itself, trusts the indices.
    is_checked = bool(draft.operation.allocated) or draft.operation.name != "aten::index_put"
    for index in given:
        for _ in range(2 if is_checked else 0):
            # True if all indices are within bounds.
            extreme = draft.temporary(8)
            staging = allocate_reduction(draft, dense_like(index, "int64"), accumulator_bytes=8)
            draft.free(*reversed(staging))
            draft.free(draft.temporary(1), extreme)
        wrapped = draft.temporary(index.n_elements * 8)
        scaled = draft.temporary(index.n_elements * 8)
        draft.free(wrapped)
        if linear is not None:
            draft.free(scaled)
        linear = scaled if linear is None else linear
    if len(given) > 1 or not isinstance(draft.operation.arguments[1][0], TensorMeta):  # type: ignore[index]
        draft.temporary(0, most=n * 8 + count_bytes(tensor))
    for _ in range(3):
        draft.temporary(n * 8)
    n_indexed = count_elements(tensor.shape[: len(given)])
    draft.temporary(_radix_sort_bytes(n, 8, 8, max(1, n_indexed.bit_length())))
