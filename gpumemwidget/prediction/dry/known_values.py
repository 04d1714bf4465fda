"""Values of small tensors, worked out beside a dry run: counters, lengths, masks, labels.

A step's tensors have no values. But what a user passes has, and what is computed from small numbers
alone is computed here, on the CPU. So a loop that ends by a counter ends, and a size that follows
from lengths or labels is the true one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

#: Maximum number of elements of a tensor whose values are worked out.
_MAX_ELEMENTS = 65_536
_MAX_FLOAT_ELEMENTS = 4096

#: Operators with one result if one argument is all true, or all false, whatever the other is.
_DECIDED_BY = {
    "aten::bitwise_or": True,
    "aten::logical_or": True,
    "aten::bitwise_and": False,
    "aten::logical_and": False,
}


class _UnknownError(Exception):
    """The values of an argument are not known."""


class _Storage:
    """A storage of the dry run's, for the values of all tensors in it."""

    is_known = True


class _Value:
    """The values of a tensor of the dry run's, which are read when they are needed."""

    def __init__(self, storage: _Storage, read: Callable[[], Any]) -> None:
        self.storage = storage
        self._read = read

    @functools.cached_property
    def tensor(self) -> Any:
        """The values as a real tensor on the CPU."""
        return self._read()


class KnownValues:
    """The values of a dry run's tensors, as far as they are known."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._without_modes: Any = importlib.import_module("torch.utils._mode_utils").no_dispatch
        self._fake: Any = importlib.import_module("torch._subclasses.fake_tensor").FakeTensor
        #: By the storage's address. One that is gone leaves its number to another: no harm.
        self._storages: dict[int, _Storage] = {}
        #: Draws what the step draws, beside the process's own random numbers.
        self._generator: Any = torch.Generator()
        self._written: dict[Any, tuple[tuple[int, str], ...]] = {}

    def remember(self, fake: Any, tensor: Any) -> None:
        """Keep the values of the user's tensor for its fake; they are read when they are needed.

        A weight's values decide nothing and are left out.
        """
        key = find_storage(fake)
        if (shared := self._storages.get(key)) is not None:
            # Two tensors in one storage: a change of one would be missed in the other.
            shared.is_known = False
            return
        storage = self._storages[key] = _Storage()
        if tensor.requires_grad or not self._is_small(tensor) or not tensor.is_contiguous():
            return
        fake.known_value = _Value(storage, self._make_reader(tensor))

    def _make_reader(self, tensor: Any) -> Callable[[], Any]:
        def read() -> Any:
            with self._without_modes():
                return tensor.detach().to("cpu", copy=True)

        return read

    def read(self, tensor: Any) -> Any:
        """Return the values of a tensor as a real one on the CPU, or ``None``."""
        value = self._find(tensor)
        return None if value is None else value.tensor

    def compute(self, tensor: Any, function: Callable[[Any], Any]) -> Any:
        """Return what is computed from the values of a tensor that are known."""
        with self._without_modes():
            return function(self.read(tensor))

    def make(self, numbers: list[int]) -> Any:
        """Return a real tensor of numbers on the CPU."""
        with self._without_modes():
            return self._torch.tensor(numbers)

    # -- Operators ---------------------------------------------------------------------------------

    def follow(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Work out the values of what an operator has returned or changed, where they are known."""
        written = self._list_written(operator)
        results = list_tensors(result)
        if not self._compute(operator, args, kwargs, results, is_writing=bool(written)):
            for place, name in written:
                self._forget(args[place] if place < len(args) else kwargs.get(name))
            if len(results) == 1 and operator._schema.name in _DECIDED_BY:  # noqa: SLF001
                self._decide(args, results[0], by=_DECIDED_BY[operator._schema.name])  # noqa: SLF001

    def _compute(
        self,
        operator: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: list[Any],
        *,
        is_writing: bool,
    ) -> bool:
        """Call an operator on values; return whether all that it takes and gives is known."""
        torch = self._torch
        given: list[_Value] = []
        try:
            arguments = self._translate(args, given)
            options = {name: self._translate(option, given) for name, option in kwargs.items()}
        except _UnknownError:
            return False
        is_small = all(self._is_small(result) for result in results)
        if operator.namespace != "aten" or not is_small or not (results or is_writing):
            return False
        if "device" in options:
            options["device"] = torch.device("cpu")
        options.pop("pin_memory", None)
        if torch.Tag.nondeterministic_seeded in operator.tags and "generator" not in options:
            operator = _choose_seeded(operator)
            if operator is None:
                return False
            options["generator"] = self._generator
        with self._without_modes(), torch._C._DisablePythonDispatcher():  # noqa: SLF001
            try:
                made = operator(*_fill(arguments), **{k: _fill(v) for k, v in options.items()})
            except Exception:  # noqa: BLE001 - the CPU need not have every kernel of the device
                return False
            values = list_tensors(made)
            if operator.name().startswith(("aten::empty", "aten::new_empty")):
                values = [value.zero_() for value in values]
        if list(map(_describe, values)) != list(map(_describe, results)):
            return False
        storages = {find_storage(value.tensor): value.storage for value in given}
        for result, value in zip(results, values, strict=True):
            self._set(result, value, storages.setdefault(find_storage(value), _Storage()))
        return True

    def _decide(self, args: tuple[Any, ...], result: Any, *, by: bool) -> None:
        """Set a result that follows from one of two arguments."""
        if by and result.dtype != self._torch.bool:
            return
        for argument in args:
            value = self._find(argument)
            if value is not None and argument.shape == result.shape:
                with self._without_modes():
                    if value.tensor.all() if by else not value.tensor.any():
                        made = self._torch.full(result.shape, int(by), dtype=result.dtype)
                        self._set(result, made, _Storage())

    def _set(self, result: Any, value: Any, storage: _Storage) -> None:
        if isinstance(result, self._fake):
            self._storages[find_storage(result)] = storage
            result.known_value = _Value(storage, lambda: value)

    def _forget(self, changed: Any) -> None:
        for tensor in list_tensors(changed):
            if (storage := self._storages.get(find_storage(tensor))) is not None:
                storage.is_known = False

    def _find(self, tensor: Any) -> _Value | None:
        """Return the values of a tensor; of a real one a copy, which nothing else changes."""
        value: _Value | None = getattr(tensor, "known_value", None)
        if value is not None:
            return value if value.storage.is_known else None
        if not isinstance(tensor, self._torch.Tensor) or isinstance(tensor, self._fake):
            return None
        if tensor.device.type != "cpu" or tensor.requires_grad or not self._is_small(tensor):
            return None
        return _Value(_Storage(), self._make_reader(tensor))

    def _translate(self, value: Any, given: list[_Value]) -> Any:
        if isinstance(value, self._torch.Tensor):
            if (found := self._find(value)) is None:
                raise _UnknownError
            given.append(found)
            return found
        if isinstance(value, (list, tuple)):
            return [self._translate(item, given) for item in value]
        return value

    def _list_written(self, operator: Any) -> tuple[tuple[int, str], ...]:
        written = self._written.get(operator)
        if written is None:
            schema = operator._schema.arguments  # noqa: SLF001 - has no public name
            written = self._written[operator] = tuple(
                (place, argument.name)
                for place, argument in enumerate(schema)
                if argument.alias_info is not None and argument.alias_info.is_write
            )
        return written

    def _is_small(self, tensor: Any) -> bool:
        is_float = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        return bool(tensor.numel() <= (_MAX_FLOAT_ELEMENTS if is_float else _MAX_ELEMENTS))


def _choose_seeded(operator: Any) -> Any:
    """Return the overload of an operator that takes a generator; ``None`` without one."""
    schema = operator._schema  # noqa: SLF001 - has no public name
    if any(argument.name == "generator" for argument in schema.arguments):
        return operator
    name = "generator" if not schema.overload_name else f"{schema.overload_name}_generator"
    return getattr(operator.overloadpacket, name, None)


def find_storage(tensor: Any) -> int:
    """Return what tensors in one storage, and no others, have in common."""
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - its identity
    return address


def _describe(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape)


def _fill(argument: Any) -> Any:
    if isinstance(argument, _Value):
        return argument.tensor
    return [_fill(item) for item in argument] if isinstance(argument, list) else argument


def list_tensors(value: Any) -> list[Any]:
    """Return the tensors of an argument or a result."""
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in list_tensors(item)]
    return [value] if hasattr(value, "untyped_storage") else []
