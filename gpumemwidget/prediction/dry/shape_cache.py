"""Results of operators on fake tensors, by the shapes that they were called with.

A layer's operators come again in the next layer and in the next step. PyTorch has a cache for them
too (``torch._subclasses.fake_tensor``), whose keys take most of a dry run's time: they provide for
symbolic shapes, sparse and complex tensors, which here are left to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class _New(NamedTuple):
    """A result in a storage of its own."""

    dtype: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: Any


class _View(NamedTuple):
    """A result in the storage of the first argument."""

    dtype: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: Any


class _Given(NamedTuple):
    """A result that is an argument."""

    place: int


class _Plain(NamedTuple):
    """A result that is no tensor."""

    value: Any


class _Many(NamedTuple):
    """Several results."""

    kind: type
    parts: tuple[Any, ...]


#: In the place of a plan for what is to be computed each time.
_UNCACHED = "uncached"


class _UncachedError(Exception):
    """An argument or a result is none that the cache provides for."""


class ShapeCache:
    """A cache of operators' results, for tensors of one class.

    Args:
        torch: the imported module ``torch``.
        kind: the class of the tensors, of ``FakeTensor``.
        mode: their mode.
    """

    def __init__(self, torch: Any, kind: Any, mode: Any) -> None:
        self._torch = torch
        self._kind = kind
        self._mode = mode
        self._plans: dict[tuple[Any, ...], Any] = {}
        self._is_simple: dict[Any, bool] = {}
        #: The attributes that all fake tensors on a device begin with, by the device.
        self._attributes: dict[Any, dict[str, Any]] = {}
        self._plain = (
            *(type(None), bool, int, float, str),
            *(torch.dtype, torch.layout, torch.memory_format),
        )
        self._forbid_address = torch._C._set_throw_on_mutable_data_ptr  # noqa: SLF001 - not public
        self._without_dispatch = torch._C._DisableTorchDispatch  # noqa: SLF001 - not public

    def call(
        self,
        operator: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compute: Callable[[], Any],
    ) -> Any:
        """Return an operator's result, computed where the like of it was not before.

        Args:
            operator: a ``torch._ops.OpOverload``.
            args: what it is called with.
            kwargs: what it is called with by keyword.
            compute: computes the result.
        """
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
            for each in args:
                self._describe(each, described)
            for name, each in kwargs.items():
                described.append(name)
                self._describe(each, described)
        except _UncachedError:
            return compute()
        key = tuple(described)
        plan = self._plans.get(key)
        if plan is not None:
            return compute() if plan is _UNCACHED else self._make(plan, args)
        result = compute()
        try:
            self._plans[key] = self._plan(result, args, set())
        except _UncachedError:
            self._plans[key] = _UNCACHED
        return result

    def _find_simple(self, operator: Any) -> bool:
        """Return whether an operator's results follow from shapes, and arguments keep theirs."""
        tags = self._torch.Tag
        varying = {tags.inplace_view, tags.dynamic_output_shape, tags.data_dependent_output}
        names = [each.name for each in operator._schema.arguments]  # noqa: SLF001 - not public
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
            for each in value:
                self._describe(each, described)
        else:
            raise _UncachedError

    # -- Plans -------------------------------------------------------------------------------------

    def _plan(self, result: Any, args: tuple[Any, ...], storages: set[int]) -> Any:
        """Return how a result like this one is made.

        Args:
            result: the result, or a part of it.
            args: what the operator was called with.
            storages: those of the parts before.
        """
        if isinstance(result, self._torch.Tensor):
            return self._plan_tensor(result, args, storages)
        if type(result) in (list, tuple):
            parts = tuple([self._plan(each, args, storages) for each in result])
            return _Many(type(result), parts)
        if type(result) in self._plain:
            return _Plain(result)
        raise _UncachedError

    def _plan_tensor(self, result: Any, args: tuple[Any, ...], storages: set[int]) -> Any:
        for place, each in enumerate(args):
            if each is result:
                return _Given(place)
        dtype, shape, stride = result.dtype, tuple(result.shape), result.stride()
        if type(result) is not self._kind or dtype.is_complex or result.constant is not None:
            raise _UncachedError
        if result.is_inference() != self._torch.is_inference_mode_enabled():
            raise _UncachedError
        storage = result.untyped_storage()
        first = args[0] if args else None
        if type(first) is self._kind and _find_address(first) == storage._cdata:  # noqa: SLF001
            return _View(dtype, shape, stride, result.storage_offset(), result.fake_device)
        plan = _New(dtype, shape, stride, result.fake_device)
        is_own = storage._cdata not in storages and not any(  # noqa: SLF001 - its identity
            type(each) is self._kind and _find_address(each) == storage._cdata  # noqa: SLF001
            for each in args
        )
        made = self._make(plan, args).untyped_storage()
        if not is_own or result.storage_offset() or made.nbytes() != storage.nbytes():
            raise _UncachedError
        storages.add(storage._cdata)  # noqa: SLF001
        return plan

    def _make(self, plan: Any, args: tuple[Any, ...]) -> Any:
        kind = type(plan)
        if kind is _New:
            with self._without_dispatch():
                made = self._torch.empty_strided(
                    plan.shape, plan.stride, dtype=plan.dtype, device="meta"
                )
                return self._wrap(made, plan.device)
        if kind is _View:
            storage = args[0].untyped_storage()
            with self._without_dispatch():
                made = self._torch.empty((0,), dtype=plan.dtype, device="meta")
                made.set_(storage, plan.offset, plan.shape, plan.stride)
                return self._wrap(made, plan.device)
        if kind is _Given:
            return args[plan.place]
        if kind is _Many:
            return plan.kind([self._make(each, args) for each in plan.parts])
        return plan.value

    def _wrap(self, made: Any, device: Any) -> Any:
        """Return a fake tensor; all but the first on a device take their attributes from it.

        The class's own constructor checks more than once that the device is one.
        """
        attributes = self._attributes.get(device)
        if attributes is None:
            first = self._kind(self._mode, made, device)
            self._attributes[device] = dict(vars(first))
            return first
        wrapped = self._torch.Tensor._make_subclass(  # noqa: SLF001 - has no public name
            *(self._kind, made, False), dispatch_device=True, device_for_backend_keys=device
        )
        vars(wrapped).update(attributes)
        self._forbid_address(wrapped)
        return wrapped


def _find_address(tensor: Any) -> int:
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - its identity
    return address
