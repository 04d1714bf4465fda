"""Values in a dry run: known ones are worked out, and what depends on others is assumed.

A step's tensors have no values. But what a user passes has, and what is computed from small numbers
alone (counters, lengths, masks, labels) is computed here, on the CPU. So a loop that ends by a
counter ends, and a size that follows from lengths or labels is the true one.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable
from typing import Any

from gpumemwidget.prediction.dry.fakes import find_storage, list_tensors
from gpumemwidget.prediction.dry.tracker import find_user_line, format_line
from gpumemwidget.prediction.recurrent import list_recurrent_answers

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
                made = operator(*arguments, **options)
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
            return found.tensor
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
        """Return whether a tensor's values are worked out: they are few enough."""
        is_float = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        return bool(tensor.numel() <= (4096 if is_float else 65_536))


def _choose_seeded(operator: Any) -> Any:
    """Return the overload of an operator that takes a generator; ``None`` without one."""
    schema = operator._schema  # noqa: SLF001 - has no public name
    if any(argument.name == "generator" for argument in schema.arguments):
        return operator
    name = "generator" if not schema.overload_name else f"{schema.overload_name}_generator"
    return getattr(operator.overloadpacket, name, None)


def _describe(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape)


# -- Answers ---------------------------------------------------------------------------------------

#: Operators whose result says that something went wrong if an argument does.
_KEEPS_MARK = (
    *("aten::any", "aten::_is_any_true", "aten::sum", "aten::max", "aten::logical_or"),
    *("aten::bitwise_or", "aten::_to_copy", "aten::add", "aten::stack", "aten::cat"),
    "aten::clone",
)


class Answers:
    """Answers operators instead of their fakes; what depends on values is an assumption.

    The assumptions get a sentence for each place.
    """

    def __init__(self, torch: Any, known: KnownValues, assumptions: list[str]) -> None:
        self._torch = torch
        self._known = known
        self._numbers = torch.int64
        self._assumptions = assumptions
        #: Tensors that are taken to be false: those that say whether something went wrong, as of
        #: ``isnan``, and whether a number is the very one that it is compared with.
        self._marks: Any = torch.utils.weak.WeakIdKeyDictionary()
        # Random numbers, one for each parameter of their distribution.
        drawn = (
            *("aten::_standard_gamma", "aten::_standard_gamma_grad", "aten::_sample_dirichlet"),
            *("aten::_dirichlet_grad", "aten::binomial", "aten::poisson"),
        )
        # Losses whose kernels on the device write all elements before they are added up.
        kept_losses = ("aten::mse_loss", "aten::smooth_l1_loss", "aten::binary_cross_entropy")
        #: Called with an operator's arguments.
        self._answers: dict[str, Callable[..., Any]] = {
            "aten::_local_scalar_dense": self._read_value,
            "aten::equal": self._are_equal,
            "aten::nonzero": self._find_nonzero,
            "aten::masked_select": self._select,
            "aten::_unique2": self._list_unique,
            "aten::bincount": self._count_bins,
            **dict.fromkeys(drawn, lambda tensor, *_: tensor.new_empty(tensor.shape)),
            "aten::_pack_padded_sequence": self._pack,
            "aten::_ctc_loss": self._lose_by_ctc,
            "aten::_ctc_loss_backward": lambda _, scores, *__: scores.new_empty(scores.shape),
            "torchvision::nms": self._keep_boxes,
            **list_recurrent_answers(torch),
        }
        #: Called with what calls an operator on fakes, and with its arguments.
        self._corrections: dict[str, Callable[..., Any]] = {
            "aten::index": self._index,
            "aten::index_add": self._add_selected_gradients,
            "aten::index_put": self._add_gradients,
            "aten::index_put_": self._skip_masks,
            "aten::_index_put_impl_": self._skip_masks,
            "aten::repeat_interleave": self._repeat,
            **dict.fromkeys(kept_losses, self._keep_all_losses),
        }

    def answer(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]
    ) -> Any:
        """Call an operator on fakes, or answer for it where its fake does not know the result."""
        name = operator._schema.name  # noqa: SLF001 - has no public name
        if (answer := self._answers.get(name)) is not None:
            result = answer(*args, **kwargs)
        elif (correct := self._corrections.get(name)) is not None:
            result = correct(call, *args, **kwargs)
        else:
            result = call()
        self._mark(name, args, result)
        return result

    # -- What is false -----------------------------------------------------------------------------

    def _mark(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Remember which tensors are taken to be false, and what is made of them."""
        tensor = self._torch.Tensor
        if name in ("aten::isnan", "aten::isinf") or (name == "aten::eq" and result.dim() == 0):
            self._marks[result] = True
        elif name == "aten::_amp_foreach_non_finite_check_and_unscale_":
            self._marks[args[1]] = True
            self._assume("gradients were taken not to overflow: the scaler lets each update happen")
        elif name in _KEEPS_MARK and len(self._marks):
            given = args[0] if isinstance(args[0], (list, tuple)) else args
            if isinstance(result, tensor) and any(
                isinstance(value, tensor) and value in self._marks for value in given
            ):
                self._marks[result] = True

    # -- Values ------------------------------------------------------------------------------------

    def _read_value(self, tensor: Any) -> Any:
        if self._is_known(tensor):
            return self._known.compute(tensor, lambda values: values.item())
        failed = tensor in self._marks
        if tensor.dtype == self._torch.bool:
            value: Any = not failed
        elif tensor.dtype.is_floating_point:
            value = 0.0 if failed else 1.0
        else:
            value = 1j if tensor.dtype.is_complex else 0
        self._assume_here(f"a value that is read from a tensor was taken to be {value}")
        return value

    def read_array(self, tensor: Any) -> Any:
        """Return the values of a tensor as a NumPy array; unknown ones are zero."""
        torch = self._torch
        if tensor.requires_grad:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy()."
            )
        if tensor.device.type != "cpu":
            raise TypeError(
                f"can't convert {tensor.device} device type tensor to numpy. Use Tensor.cpu()."
            )
        if self._is_known(tensor):
            return self._known.compute(tensor, lambda values: values.clone().numpy())
        self._assume_here("values that are read as an array were taken to be 0")
        with torch.utils._mode_utils.no_dispatch():  # noqa: SLF001 - has no public name
            # Memory that nobody writes to is not taken.
            return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype).numpy()

    def _are_equal(self, one: Any, other: Any) -> bool:
        if self._is_known(one) and self._is_known(other):
            values = self._known.read(other)
            return bool(self._known.compute(one, values.equal))
        self._assume_here("two tensors that are compared were taken to be equal")
        return True

    def _assume_here(self, sentence: str) -> None:
        frame = sys._getframe(1)  # noqa: SLF001 - the public ones are slow
        walked: Any = frame
        while walked is not None:
            name = walked.f_code.co_filename.replace("\\", "/")
            # PyTorch itself reads values that decide nothing here.
            if any(part in name for part in ("/torch/optim/", "/torch/amp/")):
                return
            walked = walked.f_back
        line = find_user_line(frame)
        where = "in backward" if line is None else format_line(*line)
        self._assume(f"{where}: {sentence}")

    def _assume(self, sentence: str) -> None:
        if sentence not in self._assumptions:
            self._assumptions.append(sentence)

    # -- Sizes -------------------------------------------------------------------------------------

    def _is_known(self, tensor: Any) -> bool:
        return self._known.read(tensor) is not None

    def _count(
        self, tensor: Any, count: Callable[[Any], Any], most: int, sentence: str = ""
    ) -> int:
        """Return a number that follows from a tensor's values; if they are unknown, the most.

        The sentence says that the most was taken.
        """
        if self._is_known(tensor):
            return int(self._known.compute(tensor, lambda values: int(count(values))))
        if sentence:
            self._assume_here(sentence)
        return most

    def _find_nonzero(self, tensor: Any) -> Any:
        n = tensor.numel()
        sentence = f"all {n} entries of a tensor were taken to be nonzero, the most"
        n = self._count(tensor, lambda values: values.count_nonzero(), n, sentence)
        return self._torch.empty_strided(
            (n, tensor.dim()), (1, n), dtype=self._numbers, device=tensor.device
        )

    def _select(self, tensor: Any, mask: Any) -> Any:
        n = math.prod(self._torch.broadcast_shapes(tensor.shape, mask.shape))
        n_mask = max(mask.numel(), 1)
        sentence = f"a mask was taken to select all {n} entries, the most"
        n_selected = self._count(mask, lambda values: values.sum(), n_mask, sentence)
        return tensor.new_empty((n // n_mask * n_selected,))

    def _replace_masks(self, indices: Any) -> tuple[list[Any], bool]:
        """Return indices with each mask as the indices of all that it could select."""
        replaced: list[Any] = []
        found = False
        for index in indices:
            if index is None or index.dtype not in (self._torch.bool, self._torch.uint8):
                replaced.append(index)
                continue
            found = True
            n = self._count(index, lambda values: values.sum(), index.numel())
            replaced += [index.new_empty((n,), dtype=self._numbers) for _ in range(index.dim())]
        return replaced, found

    def _index(self, call: Callable[[], Any], tensor: Any, indices: Any) -> Any:
        replaced, found = self._replace_masks(indices)
        if not found:
            return call()
        if not all(index is None or self._is_known(index) for index in indices):
            self._assume_here("a mask was taken to select all entries, the most")
        return self._torch.ops.aten.index.Tensor(tensor, replaced)

    def _add_gradients(
        self, call: Callable[[], Any], tensor: Any, indices: Any, *others: Any
    ) -> Any:
        """Put values into a copy; autograd's own gradients of ``index`` go into the tensor itself.

        To a subclass of tensors, as fake ones are, autograd does not write
        (``index_backward`` in https://github.com/pytorch/pytorch/blob/main/torch/csrc/autograd/FunctionsManual.cpp).
        """
        if self._is_gradient_of("IndexBackward0"):
            return tensor
        return self._skip_masks(call, tensor, indices, *others)

    def _add_selected_gradients(
        self, call: Callable[[], Any], tensor: Any, *_: Any, **__: Any
    ) -> Any:
        """Add rows to a copy; autograd's own gradients of ``index_select`` go into the tensor."""
        return tensor if self._is_gradient_of("IndexSelectBackward0") else call()

    def _is_gradient_of(self, name: str) -> bool:
        node = self._torch._C._current_autograd_node()  # noqa: SLF001 - has no public name
        return node is not None and node.name() == name

    def _skip_masks(
        self, call: Callable[[], Any], tensor: Any, indices: Any, *_: Any, **__: Any
    ) -> Any:
        return tensor if self._replace_masks(indices)[1] else call()

    def _list_unique(
        self,
        tensor: Any,
        _sorted: bool = True,
        return_inverse: bool = False,
        return_counts: bool = False,
    ) -> Any:
        n = tensor.numel()
        sentence = f"all {n} entries of a tensor were taken to differ, the most"
        n = self._count(tensor, lambda values: values.unique().numel(), n, sentence)
        inverse = tensor.new_empty(tensor.shape if return_inverse else (0,), dtype=self._numbers)
        counts = tensor.new_empty((n if return_counts else 0,), dtype=self._numbers)
        return tensor.new_empty((n,)), inverse, counts

    def _repeat(self, call: Callable[[], Any], *args: Any, output_size: int | None = None) -> Any:
        if output_size is not None or not isinstance(args[-1], self._torch.Tensor):
            return call()
        repeats, sentence = args[0], "each entry was taken to be repeated once"
        n = self._count(repeats, lambda values: values.sum(), repeats.numel(), sentence)
        return repeats.new_empty((n,))

    def _count_bins(self, tensor: Any, weights: Any = None, minlength: int = 0) -> Any:
        n = max(minlength, 1)
        if tensor.numel():
            sentence = f"bincount was taken to return {n} counts"
            n = max(n, self._count(tensor, lambda values: values.max() + 1, n, sentence))
        dtype = self._numbers if weights is None else self._torch.float64
        return tensor.new_empty((n,), dtype=dtype)

    def _pack(self, data: Any, lengths: Any, batch_first: bool) -> Any:
        n_batch, n_steps = data.shape[:2] if batch_first else data.shape[1::-1]
        sizes = [n_batch] * n_steps
        if self._is_known(lengths):
            known = self._known.compute(lengths, lambda values: values.tolist())
            sizes = [sum(length > k for length in known) for k in range(max(known))]
        else:
            self._assume_here(f"all packed sequences were taken to be {n_steps} long, the most")
        # PyTorch's C++ code reads the sizes: they are no fake.
        return data.new_empty((sum(sizes), *data.shape[2:])), self._known.make(sizes)

    def _lose_by_ctc(self, scores: Any, targets: Any, _: Any, lengths: Any, *__: Any) -> Any:
        """Return the losses of CTC, and what is kept for backward."""
        if isinstance(lengths, self._torch.Tensor):
            longest = targets.shape[-1]
            sentence = f"the longest target was taken to be {longest} long, the most"
            longest = self._count(lengths, lambda values: values.max(), longest, sentence)
        else:
            longest = max(lengths, default=0)
        n_times, n_batch = scores.shape[:2]
        kept = scores.new_empty((n_batch, n_times, 2 * longest + 1))
        return scores.new_empty((n_batch,)), kept

    def _keep_boxes(self, boxes: Any, *_: Any) -> Any:
        n = boxes.shape[0]
        self._assume_here(f"all {n} boxes were taken to be kept (nms), the most")
        return boxes.new_empty((n,), dtype=self._numbers)

    # -- What the device's kernels return otherwise than their fakes -------------------------------

    def _keep_all_losses(
        self, call: Callable[[], Any], tensor: Any, target: Any, *options: Any
    ) -> Any:
        """Return a loss in a storage for all its elements, as the kernels of CUDA do."""
        result = call()
        if 0 in [option for option in options if type(option) is int]:  # no reduction
            return result
        shape = self._torch.broadcast_shapes(tensor.shape, target.shape)
        return result.new_empty(shape).as_strided((), ())
