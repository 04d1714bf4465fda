"""Tensors without memory: PyTorch's fake tensors, for a device that may not be there.

A fake CUDA tensor ends the process in autograd where CUDA is not initialised, because autograd asks
the device for its streams (https://github.com/pytorch/pytorch/issues/159566). So a step's tensors
have two devices. PyTorch's C++ code gets the CPU. Python code, the dispatch keys and the kernels
that work out shapes get the device that the tensor is for (``fake_device``).

Two things follow. C++ code that makes a tensor beside another one asks for the CPU and means the
other's device (``StepMode.correct_device``). And C++ code can't move a tensor, as it takes it to
be on the CPU already (``_move``). Both happen on machines with a GPU too, so that a prediction is
the same everywhere.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

from gpumemwidget.errors import PredictionError, name_type, read_first_line
from gpumemwidget.prediction.dry.effects import ThreadPatch

# -- The step's tensors and their mode -------------------------------------------------------------


@functools.cache
def _make_tensor_class(torch: Any, base: Any) -> Any:
    """Return the class of a step's tensors, a subclass of ``FakeTensor``."""
    ask_device = torch.ops.prim.device.default

    class StepTensor(base):  # type: ignore[misc]
        """A fake tensor that Python code can ask for all that it could ask the real one."""

        #: See ``values.py``.
        known_value: Any = None

        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is ask_device and not args[0].fake_mode.in_kernel_invocation:
                return torch.device("cpu")
            return super().__torch_dispatch__(func, types, args, kwargs or {})

        @property
        def is_cuda(self) -> bool:
            return bool(self.device.type == "cuda")

        @property
        def is_cpu(self) -> bool:
            return bool(self.device.type == "cpu")

        def get_device(self) -> int:
            return -1 if self.device.index is None else int(self.device.index)

        def cuda(self, device: Any = None, *_args: Any, **_options: Any) -> Any:
            return self.to("cuda" if device is None else device)

        def cpu(self, *_args: Any, **_options: Any) -> Any:
            return self.to("cpu")

        def type_as(self, other: Any) -> Any:
            return self.to(other)

        def pin_memory(self, *_args: Any) -> Any:
            return self.clone()

        def is_pinned(self, *_args: Any) -> bool:
            return False

        def to(self, *args: Any, **kwargs: Any) -> Any:
            return _move(torch, self, super().to, args, kwargs)

        def numpy(self, *, force: bool = False) -> Any:
            return self.fake_mode.read_array(self.detach().cpu() if force else self)

        def __array__(self, dtype: Any = None, *_args: Any, **_options: Any) -> Any:
            array = self.numpy()
            return array if dtype is None else array.astype(dtype)

        def tolist(self) -> Any:
            return self.item() if self.dim() == 0 else [item.tolist() for item in self]

        def __format__(self, spec: str) -> str:
            return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            if id(self) not in memo:
                with torch.no_grad():
                    copied = self.detach().clone().requires_grad_(self.requires_grad)
                if isinstance(self, torch.nn.Parameter):
                    copied._is_param = True  # noqa: SLF001 - has no public name
                memo[id(self)] = copied
            return memo[id(self)]

    return StepTensor


@functools.cache
def _make_mode_class(torch: Any, base: Any, fake_tensor: Any) -> Any:
    """Return the class of the mode of a step's tensors, a subclass of ``FakeTensorMode``."""
    ask_device = torch.ops.prim.device.default
    read_node = torch._C._current_autograd_node  # noqa: SLF001 - has no public name

    class StepMode(base):  # type: ignore[misc]
        """A mode of fake tensors that never asks a device for anything."""

        def __init__(self) -> None:
            self._is_entering = False
            #: A tensor of the step's is on its way to another device.
            self.is_moving = False
            #: Returns a tensor's values as a NumPy array.
            self.read_array: Callable[[Any], Any] | None = None
            super().__init__(allow_fallback_kernels=False, allow_non_fake_inputs=True)
            # All modes share a cache, which keeps storages that a call was given.
            self.cache_enabled = False

        @property
        def avoid_device_init(self) -> bool:
            return not self._is_entering

        def __enter__(self) -> Any:
            # The class beneath would ask how many devices there are.
            self._is_entering = True
            try:
                return super().__enter__()
            finally:
                self._is_entering = False

        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is ask_device and not self.in_kernel_invocation:
                return torch.device("cpu")
            return super().dispatch(func, types, args, self.correct_device(args, kwargs or {}))

        def correct_device(
            self, args: Any, kwargs: dict[str, Any], in_backward: Any = None
        ) -> dict[str, Any]:
            """Return the options of a call with the device that is meant by the CPU.

            In backward a tensor that is made beside no other one is on the device ``in_backward``.
            """
            device = kwargs.get("device")
            if device is None or device.type != "cpu" or self.is_moving:
                return kwargs
            beside = [tensor for tensor in args if isinstance(tensor, fake_tensor)]
            others = (t.fake_device for t in beside if t.fake_device.type != "cpu")
            meant = next(others, device)
            is_alone = not any(isinstance(tensor, torch.Tensor) for tensor in args)
            if in_backward is not None and is_alone and read_node() is not None:
                meant = in_backward
            return {**kwargs, "device": meant}

    return StepMode


def _move(torch: Any, tensor: Any, move: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return ``tensor.to(*args, **kwargs)``, where ``move`` may think that it is on the CPU."""
    names: tuple[str, ...] = ("dtype", "non_blocking", "copy")
    device = kwargs.pop("device", None)
    if (args and isinstance(args[0], torch.Tensor)) or "other" in kwargs:
        other, args = (kwargs.pop("other"), args) if "other" in kwargs else (args[0], args[1:])
        device, kwargs["dtype"] = other.device, other.dtype
        names = names[1:]
    elif args and (args[0] is None or isinstance(args[0], (str, int, torch.device))):
        device, args = args[0], args[1:]
    options = {**dict(zip(names, args, strict=False)), **kwargs}
    if device is None:
        return move(**options) if options else tensor
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == tensor.device.type:
        options.pop("non_blocking", None)
        return move(**options) if any(option is not None for option in options.values()) else tensor
    options.pop("copy", None)
    options = {name: option for name, option in options.items() if option is not None}
    tensor.fake_mode.is_moving = True
    try:
        return torch.ops.aten._to_copy.default(  # noqa: SLF001 - has no public name
            tensor, device=device, **options
        )
    finally:
        tensor.fake_mode.is_moving = False


# -- Making them, and calling operators on them ----------------------------------------------------


class Fakes:
    """Makes fake tensors for a step on a device, and calls operators on them.

    With ``moves_all``, tensors on the CPU are taken to be on the device: also those that the step
    makes, from when it uses them with the others on; ``on_move`` is called then.
    """

    def __init__(
        self, torch: Any, device: Any, *, moves_all: bool, on_move: Callable[[], None]
    ) -> None:
        self._torch = torch
        self._device = device
        self.moves_all = moves_all
        self._on_move = on_move
        #: The step runs: what is converted from now on is used once.
        self.is_running = False
        self._module: Any = importlib.import_module("torch._subclasses.fake_tensor")
        self._fake: Any = self._module.FakeTensor
        self._no_dispatch: Any = importlib.import_module("torch.utils._mode_utils").no_dispatch
        self._class = _make_tensor_class(torch, self._fake)
        with self._without_device():
            self.mode: Any = _make_mode_class(torch, self._module.FakeTensorMode, self._fake)()
        self._cache = ShapeCache(torch, self._class, self.mode)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Carry out the operators of this thread on fakes for a while."""
        lifts_all = self._torch._C._only_lift_cpu_tensors()  # noqa: SLF001 - has no public name
        with self._without_device():
            # A constant is made on the CPU and then moved, never on the device. So it is in other
            # threads meanwhile, with the same result.
            self._torch._C._set_only_lift_cpu_tensors(True)  # noqa: SLF001
            # Optimizers choose their ``foreach`` implementation by the classes of tensors.
            optimizers: Any = importlib.import_module("torch.optim.optimizer")
            optimizers._foreach_supported_types.append(self._class)  # noqa: SLF001 - not public
            try:
                with self.mode:
                    yield
            finally:
                optimizers._foreach_supported_types.remove(self._class)  # noqa: SLF001
                self._torch._C._set_only_lift_cpu_tensors(lifts_all)  # noqa: SLF001

    @contextlib.contextmanager
    def _without_device(self) -> Iterator[None]:
        """Keep fake tensors from touching the device when they are made."""
        with ThreadPatch() as patch:
            patch.answer(self._module, {"init_gpu_context": None, "init_cuda_context": None})
            # PyTorch's log would print the traceback of each failure; we report one line.
            patch.answer(self._module.log, {"handle": None})
            yield

    def convert(self, tensor: Any, is_counter: bool) -> Any:
        """Return the fake of a tensor of the user's; views share its storage.

        A counter stays on the CPU.

        Raises:
            PredictionError: the tensor is of a kind without a fake.
        """
        if isinstance(tensor, self._fake):
            raise PredictionError("The step is given fake tensors already. Pass real ones.")
        moves = self.moves_all and not is_counter
        is_on_cpu = tensor.device.type == "cpu"
        if moves and is_on_cpu and tensor._is_view() and tensor.is_leaf:  # noqa: SLF001
            # Moved to the device, a view is a tensor of its own, however long its base is.
            return self.make_like(tensor, tensor.shape, tensor.stride())

        def make(make_meta: Callable[[], Any], device: Any = None) -> Any:
            place = self._device if moves else device or tensor.device
            with self._no_dispatch():
                return self.adopt(self._fake(self.mode, make_meta(), place))

        convert = self.mode.fake_tensor_converter.meta_converter
        try:
            # First the whole storage, which otherwise would grow with each view. It has to live
            # until the view is converted.
            whole = None if is_on_cpu else self._view_storage(tensor)
            kept = None if whole is None else convert(whole, callback=make)
            fake = convert(tensor, callback=make)
            del kept
        except (RuntimeError, NotImplementedError, AssertionError) as exc:
            raise PredictionError(
                f"A tensor can't be predicted ({read_first_line(exc)}). Pass a plain one."
            ) from None
        if fake is NotImplemented:
            raise PredictionError(f"A {name_type(tensor)} can't be predicted.")
        return fake

    def _view_storage(self, tensor: Any) -> Any:
        """Return a tensor of the whole storage of another one; ``None`` if that is all of it."""
        storage = tensor.untyped_storage()
        if storage.nbytes() == tensor.numel() * tensor.element_size():
            return None
        torch = self._torch
        with self._no_dispatch(), torch.no_grad():
            return torch.empty((0,), dtype=torch.uint8, device=tensor.device).set_(storage)

    def make_like(
        self, tensor: Any, shape: tuple[int, ...], stride: tuple[int, ...] | None = None
    ) -> Any:
        """Return a tensor like one of the user's, of another shape and with unknown values."""
        torch = self._torch
        device = self._device if self.moves_all else tensor.device
        options = {"dtype": tensor.dtype, "device": device}
        with torch.no_grad():
            if stride is None:
                fake = torch.empty(shape, **options)
            else:
                fake = torch.empty_strided(shape, stride, **options)
        return self.adopt(fake).requires_grad_(tensor.requires_grad)

    def adopt(self, result: Any) -> Any:
        """Return an operator's result with its fake tensors as tensors of the step's."""
        if type(result) is self._fake:
            if result.layout is not self._torch.strided:
                raise PredictionError(
                    f"The step makes a tensor of layout {result.layout}, which can't be "
                    "predicted. Use dense tensors."
                )
            result.__class__ = self._class
            if self.is_running:
                # A module that moves wants no weak references to its parameters.
                self.mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        elif isinstance(result, (tuple, list)):
            for item in result:
                self.adopt(item)
        return result

    def report_device(self, tensor: Any) -> Any:
        """Return the device that PyTorch's C++ code gets."""
        in_kernel = tensor.fake_mode.in_kernel_invocation
        return self._torch.device("meta" if in_kernel else "cpu")

    def call(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator on fakes; once more with all on the device, if it refuses others."""
        with self._torch._C._DisablePythonDispatcher():  # noqa: SLF001 - has no public name
            try:
                # In some releases of PyTorch their fake kernels take tensors of several devices.
                unchecked = ("aten::convolution", "aten::convolution_backward", "aten::index_add")
                if operator.name() in unchecked:
                    self._check_devices(args)
                return self._cache.call(
                    operator, args, kwargs, lambda: self._call(operator, args, kwargs)
                )
            except RuntimeError as exc:
                # PyTorch's words for tensors of several devices differ from release to release.
                words = "(?s)two.* devices|expected device|same device"
                if not self.moves_all or not re.search(words, str(exc)):
                    raise
            self._on_move()
            return self._call(operator, self._move_all(args), kwargs)

    def _check_devices(self, args: tuple[Any, ...]) -> None:
        """Refuse tensors of several devices as PyTorch does, where a fake kernel does not."""
        found = {tensor.fake_device.type for tensor in args if isinstance(tensor, self._fake)}
        if len(found) > 1:
            raise RuntimeError("Expected all tensors on the same device, but found two devices")

    def _move_all(self, args: Any) -> Any:
        """Return arguments whose tensors are on the device, and stay there."""
        if isinstance(args, (list, tuple)):
            return type(args)([self._move_all(item) for item in args])
        if not isinstance(args, self._torch.Tensor) or args.dim() == 0:
            return args
        if isinstance(args, self._fake):
            for tensor in (args, args._base):  # noqa: SLF001 - has no public name
                if tensor is not None and tensor.fake_device.type == "cpu":
                    tensor.fake_device = self._device
            return args
        return self._torch.empty_strided(
            args.shape, args.stride(), dtype=args.dtype, device=self._device
        )

    def _call(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = self.mode.correct_device(args, kwargs, self._device)
        device = kwargs.get("device")
        if device is None or device.type == "cpu":
            return self.adopt(operator(*args, **kwargs))
        # Constants would be computed with, on the device.
        constants = [(tensor, tensor.constant) for tensor in args if isinstance(tensor, self._fake)]
        for tensor, _ in constants:
            tensor.constant = None
        try:
            return self.adopt(operator(*args, **kwargs))
        finally:
            for tensor, constant in constants:
                tensor.constant = constant


# -- Results by their shapes -----------------------------------------------------------------------

#: Makes a result from the arguments of a call.
Maker = Callable[[tuple[Any, ...]], Any]


class _UncachedError(Exception):
    """An argument or a result is none that the cache provides for."""


class ShapeCache:
    """A cache of operators' results, for fake tensors of one class and their mode.

    A layer's operators come again in the next layer and in the next step. PyTorch has a cache for
    them too, whose keys take most of a dry run's time: they provide for symbolic shapes, sparse and
    complex tensors, which here are left to it. With ours a dry run takes a fourth.
    """

    def __init__(self, torch: Any, kind: Any, mode: Any) -> None:
        self._torch = torch
        self._kind = kind
        self._mode = mode
        #: What makes a result; ``None``: it is computed each time.
        self._makers: dict[tuple[Any, ...], Maker | None] = {}
        self._is_simple: dict[str, bool] = {}
        self._plain = {
            *(type(None), bool, int, float, str),
            *(torch.dtype, torch.layout, torch.memory_format, torch.device),
        }
        self._without_dispatch = torch._C._DisableTorchDispatch  # noqa: SLF001 - not public
        self._read_node = torch._C._current_autograd_node  # noqa: SLF001 - not public

    def call(
        self,
        operator: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compute: Callable[[], Any],
    ) -> Any:
        """Return an operator's result, computed where the like of it was not before."""
        # A name caches its hash; that of an operator is computed in Python at each look-up.
        name = operator.name()
        simple = self._is_simple.get(name)
        if simple is None:
            simple = self._is_simple[name] = self._find_simple(operator)
        if not simple:
            return compute()
        # Integers become floats of the default type.
        described: list[Any] = [name, self._torch.get_default_dtype()]
        if "device" in kwargs:
            # These decide the device that is meant.
            described += (self._mode.is_moving, self._read_node() is not None)
        if self._torch.is_inference_mode_enabled():
            # A view of a tensor from outside is no tensor of the mode.
            is_tensor = bool(args) and type(args[0]) is self._kind
            described.append(("inference", is_tensor and args[0].is_inference()))
        try:
            for value in args:
                self._describe(value, described)
            for option, value in kwargs.items():
                described.append(option)
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

        n_bytes = make_new(args).untyped_storage().nbytes()
        if own in (*storages, *given) or offset or result.untyped_storage().nbytes() != n_bytes:
            raise _UncachedError
        storages.add(own)
        return make_new


def find_storage(tensor: Any) -> int:
    """Return what tensors in one storage, and no others, have in common."""
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - its identity
    return address


def list_tensors(value: Any) -> list[Any]:
    """Return the tensors of an argument or a result."""
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in list_tensors(item)]
    return [value] if hasattr(value, "untyped_storage") else []
