"""Tensors without memory: PyTorch's fake tensors, for a device that may not be there.

Where CUDA is not initialised, autograd ends the process with a fake CUDA tensor, because it asks
the missing device for its streams (https://github.com/pytorch/pytorch/issues/159566). So a step's
tensor reports the CPU to PyTorch's C++ code, and the device to everybody else:
Python code, the dispatch keys, and the kernels that work out shapes. It is so where there is a
device too: then a prediction is the same on every machine.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from gpumemwidget.errors import PredictionError, name_type, read_first_line
from gpumemwidget.prediction.dry.effects import ThreadPatch
from gpumemwidget.prediction.dry.shape_cache import ShapeCache

#: Operators whose fake kernels take any device, in some releases of PyTorch.
_UNCHECKED = ("aten::convolution", "aten::convolution_backward", "aten::index_add")
#: Words of PyTorch's that refuse tensors of several devices.
_MIXED_DEVICES = "(?s)two.* devices|expected device|same device"


class Fakes:
    """Makes fake tensors for a step on a device, and calls operators on them.

    With ``moves_all``, tensors on the CPU are taken to be on the device.
    """

    def __init__(self, torch: Any, device: Any, *, moves_all: bool) -> None:
        self._torch = torch
        self._device = device
        self.moves_all = moves_all
        #: The step runs: what is converted from now on is used once.
        self.is_running = False
        #: A tensor that the step makes on the CPU met one that was taken to be on the device.
        self.has_moved_late = False
        self._cpu = torch.device("cpu")
        self._fake_tensor: Any = importlib.import_module("torch._subclasses.fake_tensor")
        self._no_dispatch: Any = importlib.import_module("torch.utils._mode_utils").no_dispatch
        base = self._fake_tensor.FakeTensor
        self._kind = _make_tensor_kind(torch, base)
        with self._without_device():
            self.mode: Any = _make_mode_kind(torch, self._fake_tensor.FakeTensorMode, base)()
        self._cache = ShapeCache(torch, self._kind, self.mode)

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
            optimizers._foreach_supported_types.append(self._kind)  # noqa: SLF001 - not public
            try:
                with self.mode:
                    yield
            finally:
                optimizers._foreach_supported_types.remove(self._kind)  # noqa: SLF001
                self._torch._C._set_only_lift_cpu_tensors(lifts_all)  # noqa: SLF001

    @contextlib.contextmanager
    def _without_device(self) -> Iterator[None]:
        """Keep fake tensors from touching the device when they are made."""
        with ThreadPatch() as patch:
            patch.answer(self._fake_tensor, {"init_gpu_context": None, "init_cuda_context": None})
            # PyTorch's log would print the traceback of each failure; we report one line.
            patch.answer(self._fake_tensor.log, {"handle": None})
            yield

    # -- Tensors -----------------------------------------------------------------------------------

    def convert(self, tensor: Any, is_counter: bool) -> Any:
        """Return the fake of a tensor of the user's; views share its storage.

        A counter stays on the CPU.

        Raises:
            PredictionError: the tensor is of a kind without a fake.
        """
        if isinstance(tensor, self._fake_tensor.FakeTensor):
            raise PredictionError("The step is given fake tensors already. Pass real ones.")
        moves = self.moves_all and not is_counter
        if moves and tensor.device.type == "cpu" and tensor._is_view() and tensor.is_leaf:  # noqa: SLF001
            # Moved to the device, a view is a tensor of its own, however long its base is.
            return self.make_like(tensor, tensor.shape, tensor.stride())

        def make(make_meta: Callable[[], Any], device: Any = None) -> Any:
            place = self._device if moves else device or tensor.device
            with self._no_dispatch():
                fake = self._fake_tensor.FakeTensor(self.mode, make_meta(), place)
            return self.adopt(fake)

        converter = self.mode.fake_tensor_converter
        try:
            # The storage of the first view would grow with every other one.
            whole = None if tensor.device.type == "cpu" else self._view_storage(tensor)
            kept = None if whole is None else converter.meta_converter(whole, callback=make)
            fake = converter.meta_converter(tensor, callback=make)
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
        device = self._device if self.moves_all else tensor.device
        options = {"dtype": tensor.dtype, "device": device}
        with self._torch.no_grad():
            if stride is None:
                fake = self._torch.empty(shape, **options)
            else:
                fake = self._torch.empty_strided(shape, stride, **options)
        return self.adopt(fake).requires_grad_(tensor.requires_grad)

    def adopt(self, result: Any) -> Any:
        """Return an operator's result as tensors of the step's."""
        kind = self._fake_tensor.FakeTensor
        if type(result) is kind:
            if result.layout is not self._torch.strided:
                raise PredictionError(
                    f"The step makes a tensor of layout {result.layout}, which can't be "
                    "predicted. Use dense tensors."
                )
            result.__class__ = self._kind
            if self.is_running:
                # A module that moves wants no weak references to its parameters.
                self.mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        elif isinstance(result, (tuple, list)):
            for item in result:
                self.adopt(item)
        return result

    # -- Operators ---------------------------------------------------------------------------------

    def report_device(self, tensor: Any) -> Any:
        """Return the device that PyTorch's C++ code gets."""
        if tensor.fake_mode.in_kernel_invocation:
            return self._torch.device("meta")
        return self._cpu

    def call(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator on fakes."""
        with self._torch._C._DisablePythonDispatcher():  # noqa: SLF001 - has no public name
            try:
                if operator.name() in _UNCHECKED:
                    self._check_devices(args)
                return self._cache.call(
                    operator, args, kwargs, lambda: self._call(operator, args, kwargs)
                )
            except RuntimeError as exc:
                # The error's class and words differ from release to release.
                if not self.moves_all or not re.search(_MIXED_DEVICES, str(exc)):
                    raise
            self.has_moved_late = True
            return self._call(operator, self._move_all(args), kwargs)

    def _check_devices(self, args: tuple[Any, ...]) -> None:
        """Refuse tensors of several devices as PyTorch does, where a fake kernel does not."""
        found = [tensor for tensor in args if isinstance(tensor, self._fake_tensor.FakeTensor)]
        if len({tensor.fake_device.type for tensor in found}) > 1:
            raise RuntimeError("Expected all tensors on the same device, but found two devices")

    def _move_all(self, args: Any) -> Any:
        """Return arguments with those on the CPU on the device, where the others are."""
        if isinstance(args, (list, tuple)):
            return type(args)([self._move_all(item) for item in args])
        if not isinstance(args, self._torch.Tensor) or args.dim() == 0:
            return args
        if getattr(args, "fake_device", args.device).type != "cpu":
            return args
        return self._torch.empty_strided(
            args.shape, args.stride(), dtype=args.dtype, device=self._device
        )

    def _call(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        if device is not None and device.type == "cpu":
            kwargs = {**kwargs, "device": self.mode.correct_device(args, device, self._device)}
            device = kwargs["device"]
        if device is None or device.type == "cpu":
            return self.adopt(operator(*args, **kwargs))
        # Constants would be computed with, on the device.
        constants = [
            (tensor, tensor.constant)
            for tensor in args
            if isinstance(tensor, self._fake_tensor.FakeTensor)
        ]
        for tensor, _ in constants:
            tensor.constant = None
        try:
            return self.adopt(operator(*args, **kwargs))
        finally:
            for tensor, constant in constants:
                tensor.constant = constant


@functools.cache
def _make_tensor_kind(torch: Any, base: Any) -> Any:
    """Return the class of a step's tensors, a subclass of ``FakeTensor``."""
    ask_device = torch.ops.prim.device.default
    cpu = torch.device("cpu")

    class StepTensor(base):  # type: ignore[misc]
        """A fake tensor that Python code can ask for all that it could ask the real one."""

        #: See ``known_values.py``.
        known_value: Any = None

        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            mode = args[0].fake_mode if func is ask_device else None
            if mode is not None and not mode.in_kernel_invocation:
                return cpu
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
            tensor = self.detach().to("cpu") if force else self
            return self.fake_mode.read_array(tensor)

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
def _make_mode_kind(torch: Any, base: Any, tensor_kind: Any) -> Any:
    """Return the class of the mode of a step's tensors, a subclass of ``FakeTensorMode``."""
    ask_device = torch.ops.prim.device.default
    read_node = torch._C._current_autograd_node  # noqa: SLF001 - has no public name
    cpu = torch.device("cpu")

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

        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is ask_device and not self.in_kernel_invocation:
                return cpu
            device = (kwargs or {}).get("device")
            if device is not None and device.type == "cpu":
                kwargs = {**kwargs, "device": self.correct_device(args, device)}
            return super().dispatch(func, types, args, kwargs or {})

        def correct_device(self, args: Any, device: Any, in_backward: Any = None) -> Any:
            """Return where PyTorch's C++ code means by the CPU: it takes our tensors to be there.

            It asks a tensor for its device and makes others there. Python code knows better, and
            moves tensors to the CPU by ``StepTensor.to``.
            """
            if self.is_moving:
                return device
            for tensor in args:
                if isinstance(tensor, tensor_kind) and tensor.fake_device.type != "cpu":
                    return tensor.fake_device
            is_alone = not any(isinstance(tensor, torch.Tensor) for tensor in args)
            is_backward = read_node() is not None
            return in_backward if in_backward and is_alone and is_backward else device

        def __enter__(self) -> Any:
            # The class beneath would ask how many devices there are.
            self._is_entering = True
            try:
                return super().__enter__()
            finally:
                self._is_entering = False

    return StepMode


def _move(torch: Any, tensor: Any, move: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return ``tensor.to(*args, **kwargs)``, where C++ may think that it is on the CPU."""
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
    options = {name: each for name, each in options.items() if each is not None}
    tensor.fake_mode.is_moving = True
    try:
        return torch.ops.aten._to_copy.default(  # noqa: SLF001 - has no public name
            tensor, device=device, **options
        )
    finally:
        tensor.fake_mode.is_moving = False
