"""Results of operators on fake tensors, by the shapes that they were called with.

A layer's operators come again in the next layer and in the next step. PyTorch has a cache for them
too (``torch._subclasses.fake_tensor``), whose keys take most of a dry run's time: they provide for
symbolic shapes, sparse and complex tensors, which here are left to it.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from gpumemwidget.prediction.dry.known_values import find_storage

#: Makes a result from the arguments of a call.
Maker = Callable[[tuple[Any, ...]], Any]


class _UncachedError(Exception):
    """An argument or a result is none that the cache provides for."""


class ShapeCache:
    """A cache of operators' results, for fake tensors of one class and their mode."""

    def __init__(self, torch: Any, kind: Any, mode: Any) -> None:
        self._torch = torch
        self._kind = kind
        self._mode = mode
        #: What makes a result; ``None``: it is computed each time.
        self._makers: dict[tuple[Any, ...], Maker | None] = {}
        self._is_simple: dict[Any, bool] = {}
        self._plain = (
            *(type(None), bool, int, float, str),
            *(torch.dtype, torch.layout, torch.memory_format),
        )
        self._without_dispatch = torch._C._DisableTorchDispatch  # noqa: SLF001 - not public

    def call(
        self,
        operator: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compute: Callable[[], Any],
    ) -> Any:
        """Return an operator's result, computed where the like of it was not before."""
        simple = self._is_simple.get(operator)
        if simple is None:
            simple = self._is_simple[operator] = self._find_simple(operator)
        if not simple or "device" in kwargs:
            return compute()
        described: list[Any] = [operator]
        if self._torch.is_inference_mode_enabled():
            # A view of a tensor from outside is no tensor of the mode.
            is_tensor = bool(args) and type(args[0]) is self._kind
            described.append(("inference", is_tensor and args[0].is_inference()))
        try:
            for value in args:
                self._describe(value, described)
            for name, value in kwargs.items():
                described.append(name)
                self._describe(value, described)
        except _UncachedError:
            return compute()
        key = tuple(described)
        if key in self._makers:
            make = self._makers[key]
            return compute() if make is None else make(args)
        result = compute()
        try:
            self._makers[key] = self._find_maker(result, args, set())
        except _UncachedError:
            self._makers[key] = None
        return result

    def _find_simple(self, operator: Any) -> bool:
        """Return whether an operator's results follow from shapes, and arguments keep theirs."""
        tags = self._torch.Tag
        varying = {tags.inplace_view, tags.dynamic_output_shape, tags.data_dependent_output}
        names = [argument.name for argument in operator._schema.arguments]  # noqa: SLF001 - not public
        return (
            getattr(operator, "namespace", "") == "aten"
            and not varying.intersection(operator.tags)
            and "out" not in names
        )

    def _describe(self, value: Any, described: list[Any]) -> None:
        kind = type(value)
        if kind is self._kind:
            dtype = value.dtype
            if value.constant is not None or dtype.is_complex:
                raise _UncachedError
            described += (
                *(dtype, value.shape, value.stride(), value.storage_offset()),
                value.fake_device,
            )
        elif kind in self._plain:
            described += (kind, value)
        elif kind in (list, tuple):
            described.append(len(value))
            for item in value:
                self._describe(item, described)
        else:
            raise _UncachedError

    # -- What makes results ------------------------------------------------------------------------

    def _find_maker(self, result: Any, args: tuple[Any, ...], storages: set[int]) -> Maker:
        """Return what makes a result like this one; ``storages`` are those of the parts before."""
        if isinstance(result, self._torch.Tensor):
            return self._find_tensor_maker(result, args, storages)
        kind = type(result)
        if kind in (list, tuple):
            makers = [self._find_maker(part, args, storages) for part in result]
            return lambda args: kind([make(args) for make in makers])
        if kind in self._plain:
            return lambda _: result
        raise _UncachedError

    def _find_tensor_maker(self, result: Any, args: tuple[Any, ...], storages: set[int]) -> Maker:
        for place, argument in enumerate(args):
            if argument is result:
                return itemgetter(place)
        dtype, shape, stride = result.dtype, tuple(result.shape), result.stride()
        offset, device = result.storage_offset(), result.fake_device
        if type(result) is not self._kind or dtype.is_complex or result.constant is not None:
            raise _UncachedError
        if result.is_inference() != self._torch.is_inference_mode_enabled():
            raise _UncachedError
        own = find_storage(result)
        given = [find_storage(tensor) for tensor in args if type(tensor) is self._kind]
        if given and type(args[0]) is self._kind and given[0] == own:

            def make_view(args: tuple[Any, ...]) -> Any:
                storage = args[0].untyped_storage()
                with self._without_dispatch():
                    made = self._torch.empty((0,), dtype=dtype, device="meta")
                    made.set_(storage, offset, shape, stride)
                    return self._kind(self._mode, made, device)

            return make_view

        def make_new(_: tuple[Any, ...]) -> Any:
            with self._without_dispatch():
                made = self._torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                return self._kind(self._mode, made, device)

        n_bytes = result.untyped_storage().nbytes()
        if own in (*storages, *given) or offset or _count_bytes(make_new(args)) != n_bytes:
            raise _UncachedError
        storages.add(own)
        return make_new


def _count_bytes(tensor: Any) -> int:
    n_bytes: int = tensor.untyped_storage().nbytes()
    return n_bytes
