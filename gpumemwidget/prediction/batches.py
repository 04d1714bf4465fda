"""Find the largest batch that fits: by predicting sizes, and answering only what was predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpumemwidget.errors import BadInputError

#: Maximum number of sizes that are predicted.
_MAX_TRIES = 14
#: Maximum factor by which a size is beyond what is known to fit.
_MAX_GROWTH = 8
#: The search ends where the next size that does not fit is this close: a share of the size.
_CLOSE = 0.01
#: Maximum depth of containers in a batch.
_MAX_DEPTH = 8


def find_shapes(torch: Any, batch: object, dim: int, size: int) -> dict[int, tuple[int, ...]]:
    """Return the shapes of a batch's tensors at another size, by their ``id``.

    Those tensors change that are as long in the dimension as the batch is; see ``measure``.
    """
    now = measure(torch, batch, dim)
    shapes = {}
    for tensor in _list_tensors(torch, batch, 0):
        if tensor.dim() > dim and tensor.shape[dim] == now:
            shape = list(tensor.shape)
            shape[dim] = size
            shapes[id(tensor)] = tuple(shape)
    return shapes


def measure(torch: Any, batch: object, dim: int) -> int:
    """Return the size of a batch in a dimension: that of its first tensor that has it.

    Raises:
        BadInputError: no tensor of the batch has the dimension.
    """
    for tensor in _list_tensors(torch, batch, 0):
        if tensor.dim() > dim and tensor.shape[dim] > 0:
            return int(tensor.shape[dim])
    raise BadInputError(
        f"the batch has no tensor with a dimension {dim} that is not empty: give a tensor, or a "
        "list, a tuple or a dictionary of tensors"
    )


def _list_tensors(torch: Any, value: object, depth: int) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            items: Any = value.values()
        elif isinstance(value, (list, tuple)):
            items = value
        else:
            items = vars(value).values() if hasattr(value, "__dict__") else ()
        for item in list(items):
            yield from _list_tensors(torch, item, depth + 1)


def search(begin: int, room: int, predict: Callable[[int], tuple[int, bool]]) -> int:
    """Return the largest size that was predicted to fit; 0 if none did.

    Memory grows nearly in proportion to the size, so the next size comes from the line through the
    last two.

    Args:
        begin: the first size.
        room: bytes that there are.
        predict: returns the bytes that a size needs, and whether it surely fits.
    """
    needs: dict[int, int] = {}
    fits: dict[int, bool] = {}
    size = begin
    for _ in range(_MAX_TRIES):
        needs[size], fits[size] = predict(size)
        low = max((size for size, is_so in fits.items() if is_so), default=0)
        high = min((size for size, is_so in fits.items() if not is_so), default=None)
        if high is not None and high - low <= max(1, int(_CLOSE * low)):
            break
        size = _choose_next(needs, fits, room)
    return max((size for size, is_so in fits.items() if is_so), default=0)


def _choose_next(needs: Mapping[int, int], fits: Mapping[int, bool], room: int) -> int:
    """Return a size between those that bracket the answer, where the room is likely to end."""
    good = sorted(size for size, is_so in fits.items() if is_so)
    bad = sorted(size for size, is_so in fits.items() if not is_so)
    low = good[-1] if good else 0
    top = bad[0] - 1 if bad else _MAX_GROWTH * max(low, 1)
    if len(needs) == 1:
        return min(2 * low, top) if good else max(1, top // 2)
    # A size that does not fit was predicted for an endless device, which gives nothing back.
    first, second = good[-2:] if len(good) > 1 else sorted(needs)[:2]
    slope = (needs[second] - needs[first]) / (second - first)
    guess = (low + top + 1) // 2
    if slope > 0:
        guess = int(second + (room - needs[second]) / slope)
    # A full allocator gives its cache back, so the line may lead to one end again and again.
    margin = max(1, (top + 1 - low) // 8) if bad else 1
    return min(max(guess, low + margin), top + 1 - margin)
