"""Carry out a step on tensors without memory: nothing is computed, allocated or changed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gpumemwidget.backends.hooks import find_torch
from gpumemwidget.errors import PredictionError, describe_exception, forgets_frames, name_type
from gpumemwidget.prediction.dry.copies import Copier, is_user_code
from gpumemwidget.prediction.dry.effects import (
    RefusedError,
    ThreadPatch,
    own_random_numbers,
    own_settings,
    refuse_effects,
)
from gpumemwidget.prediction.dry.emulation import emulate_device
from gpumemwidget.prediction.dry.fakes import Fakes, list_tensors
from gpumemwidget.prediction.dry.tracker import Tracker, format_line
from gpumemwidget.prediction.dry.values import Answers, KnownValues
from gpumemwidget.prediction.operations import Copies, DryRun

#: Maximum number of times that a step runs.
MAX_STEPS = 10
#: Held by the thread whose dry run replaces functions and kernels, which are the whole process's:
#: of two at once the first to end would put back what the other one has replaced.
_ONE_AT_A_TIME = threading.RLock()


@forgets_frames
def carry_out(
    step: Callable[..., object],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    steps: int | None = None,
    device: Any = "cuda",
    capability: tuple[int, int] = (9, 0),
    shapes: Mapping[int, tuple[int, ...]] | None = None,
    prepare: Callable[[Copies], None] | None = None,
) -> DryRun:
    """Return the operators that a step would call, and what each would allocate on the device.

    The step runs on copies of all that it reaches, whose tensors have no memory. No call of CUDA is
    made. Another thread waits until this dry run is over.

    Args:
        step: the user's function.
        args: its arguments.
        kwargs: its arguments by keyword.
        steps: how often it runs, each time on what the run before has left; ``None``: three times,
            for from the third run on memory lies as it does later.
        device: ``cuda`` or ``cuda:1``. Where none of the step's tensors is on it, all are taken
            to be.
        capability: its compute capability, by which PyTorch chooses kernels of attention.
        shapes: other shapes for some tensors that the step reaches, by their ``id``.
        prepare: changes the copies before the step runs.

    Raises:
        PredictionError: the step does, or holds, what can't be carried out dry.
    """
    torch: Any = find_torch()
    device = torch.device(device)
    kwargs = dict(kwargs or {})
    with contextlib.ExitStack() as stack:
        stack.enter_context(_refusals_explained())
        stack.enter_context(_ONE_AT_A_TIME)
        stack.enter_context(_modes_kept(torch))
        make_run = functools.partial(_Run, torch, device, shapes or {}, capability)
        for moves_all in (True, False):
            with contextlib.suppress(_OnDeviceError):
                run = make_run(moves_all=moves_all)
                copied = run.copy(step, tuple(args), kwargs)
                break
        stack.enter_context(run.tracker.watch(run.modules))
        stack.enter_context(run.active())
        if prepare is not None:
            copies = Copies(torch, copied[0], run.roots, run.optimizers)
            prepare(copies)
            copied = (copies.step, *copied[1:])
            del copies
        run.repeat(*copied, steps or 3)
        return run.tracker.finish(run.assumptions)


class _OnDeviceError(BaseException):
    """A tensor that the step reaches is on the device, so those on the CPU stay there."""


class _Run:
    """One dry run: the copies, and the modes that its operators go through.

    With ``moves_all``, tensors on the CPU are taken to be on the device.
    """

    def __init__(
        self,
        torch: Any,
        device: Any,
        shapes: Mapping[int, tuple[int, ...]],
        capability: tuple[int, int],
        *,
        moves_all: bool,
    ) -> None:
        self._torch = torch
        self._device = device
        self._shapes = shapes
        self._capability = capability
        self.tracker = Tracker(torch)
        self._fakes = Fakes(torch, device, moves_all=moves_all, on_move=self.tracker.note_move)
        self.assumptions: list[str] = []
        self._known = KnownValues(torch)
        self._answers = Answers(torch, self._known, self.assumptions)
        self._fakes.mode.read_array = self._answers.read_array
        self._copier = Copier(torch, self._convert)
        self._mode = _make_mode(torch, self._fakes, self._dispatch)
        self._overrides: dict[Any, Callable[..., Any]] = {}
        self._composites: dict[Any, bool] = {}
        self._is_noting = False
        #: The step's modules that are in no other one, each with what the user calls it.
        self.roots: list[tuple[str, Any]] = []
        #: The step's modules, each with its path.
        self.modules: list[tuple[str, Any]] = []
        self.optimizers = self._copier.optimizers
        self._settings: dict[str, Any] = {}

    # -- The step's world --------------------------------------------------------------------------

    def copy(
        self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Return copies of a step and its arguments."""
        with self._fakes.active(), self._mode:
            copied_args = tuple(
                self._copier.copy(value, name)
                for value, name in zip(args, _name_arguments(step, len(args)), strict=True)
            )
            copied_kwargs = {name: self._copier.copy(value, name) for name, value in kwargs.items()}
            copied_step = self._copier.copy(step, "step")
        self.assumptions += self._copier.assumptions
        self.roots = _list_roots(self._copier.modules)
        self.modules = _name_modules(self.roots)
        self.tracker.note_modules(self.roots)
        for optimizer in self.optimizers:
            self.tracker.note_optimizer(optimizer)
        return copied_step, copied_args, copied_kwargs

    def _convert(self, tensor: Any, is_counter: bool, path: str) -> Any:
        if self._fakes.moves_all and tensor.device.type == self._device.type:
            raise _OnDeviceError
        if (shape := self._shapes.get(id(tensor))) is not None:
            fake = self._fakes.make_like(tensor, shape)
            self.tracker.note_initial(fake, path)
            return fake
        fake = self._fakes.convert(tensor, is_counter)
        self._known.remember(fake, tensor)
        pairs = [(fake, tensor)]
        # Another thread may take the gradient away meanwhile.
        if tensor.is_leaf and (grad := tensor.grad) is not None and fake.grad is not None:
            pairs.append((fake.grad, grad))
        for made, real in pairs:
            is_there = real.device.type != "cpu"
            self.tracker.note_initial(
                made, path, real.untyped_storage().data_ptr() if is_there else 0
            )
        return fake

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Send this thread's operators through the dry run for a while."""
        with contextlib.ExitStack() as stack:
            patch = stack.enter_context(ThreadPatch())
            own_random_numbers(self._torch, patch)
            self._settings = own_settings(self._torch, patch)
            self._overrides = stack.enter_context(
                emulate_device(
                    *(self._torch, patch, self._capability, self.assumptions),
                    moves_all=self._fakes.moves_all,
                )
            )
            stack.enter_context(self._fakes.active())
            stack.enter_context(self._mode)
            refuse_effects(self._torch, patch)
            self._is_noting = self._fakes.is_running = True
            yield

    def repeat(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any], steps: int) -> None:
        """Run the step; see ``carry_out``."""
        for n_done in range(1, steps + 1):
            self.tracker.begin_step()
            try:
                result = step(*args, **kwargs)
            except (PredictionError, RefusedError) as exc:
                place = _find_line(exc)
                message = f"{str(exc).removesuffix('.')} ({place})." if place else str(exc)
                raise PredictionError(message) from None
            except (KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException as exc:  # noqa: BLE001 - whatever the user's code raises, exit() too
                raise PredictionError(_explain(exc)) from None
            self.tracker.end_step()
            del result
            if self.tracker.leaves_all_as_it_was():
                for _ in range(steps - n_done):
                    self.tracker.repeat_step()
                break
        if self.tracker.n_moves:
            self.assumptions.append(
                "the step was built on the CPU: what it makes there and uses with the rest was "
                "taken to be on the device, from then on; what results are only copied into was not"
            )

    # -- Operators ---------------------------------------------------------------------------------

    def _dispatch(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_noting:
            return self._fakes.call(operator, args, kwargs)
        if (override := self._overrides.get(operator)) is not None:
            with self._mode:
                return override(*args, **kwargs)
        if self._is_composite(operator):
            # Inference mode leaves it to us to take an operator apart.
            with self._mode:
                key = self._torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001
                return operator._op_dk(key, *args, **kwargs)  # noqa: SLF001
        factories = ("zeros", "ones", "empty.memory_format", "rand", "randn")
        if operator.name().removeprefix("aten::") in factories and kwargs.get("dtype") is None:
            # They make tensors of the default type, and the process's own stays what it is.
            kwargs = {**kwargs, "dtype": self._settings.get("get_default_dtype")}
        _refuse_call(operator, args)

        def call() -> Any:
            result = self._fakes.adopt(
                self._answers.answer(
                    operator, args, kwargs, lambda: self._fakes.call(operator, args, kwargs)
                )
            )
            self._known.follow(operator, args, kwargs, result)
            return result

        return self.tracker.note(operator, args, kwargs, call)

    def _is_composite(self, operator: Any) -> bool:
        """Return whether an operator has no kernel of its own, but calls others."""
        if operator not in self._composites:
            has_kernel = self._torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001
            name = getattr(operator, "name", str)()
            self._composites[operator] = (
                "::" in name
                and has_kernel(name, "CompositeImplicitAutograd")
                and not has_kernel(name, "CPU")
                and not has_kernel(name, "CUDA")
            )
        return self._composites[operator]


def _make_mode(torch: Any, fakes: Fakes, dispatch: Callable[..., Any]) -> Any:
    base: Any = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode
    ask_device = torch.ops.prim.device.default

    class DryRunMode(base):  # type: ignore[misc]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            # PyTorch wraps each call in `torch._disable_dynamo`. A dry run never compiles.
            return False

        def __torch_dispatch__(
            self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            # C++ asks for a tensor's device as often as it calls an operator.
            if func is ask_device:
                return fakes.report_device(args[0])
            return dispatch(func, args, kwargs or {})

    return DryRunMode()


def _refuse_call(operator: Any, args: tuple[Any, ...]) -> None:
    """Refuse communication, and the user's own tensors: a backward would give them gradients."""
    if "c10d" in operator.namespace:
        raise PredictionError(
            f"The step calls {operator.name()}, which communicates with other processes. Predict "
            "one process."
        )
    for tensor in list_tensors(args):
        if not hasattr(tensor, "fake_mode") and tensor.requires_grad:
            raise PredictionError(
                f"The step reaches a {name_type(tensor)} of {tuple(tensor.shape)} in a way that "
                "can't be followed. Pass what holds it as an argument."
            )


# -- Names of what a step reaches ------------------------------------------------------------------


def _name_arguments(step: Any, n_arguments: int) -> list[str]:
    """Return the names of a function's arguments, as its author wrote them."""
    names: list[str] = []
    with contextlib.suppress(Exception):  # an object's own code may raise anything
        for parameter in inspect.signature(step).parameters.values():
            if parameter.kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD:
                names.append(parameter.name)
    names = names[:n_arguments]
    return [*names, *(f"argument {k + 1}" for k in range(len(names), n_arguments))]


def _list_roots(modules: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the modules that are in no other one, each with what the user calls it."""
    within = {
        id(inner) for _, module in modules for inner in module.modules() if inner is not module
    }
    return [(name, module) for name, module in modules if id(module) not in within]


def _name_modules(roots: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return each module after its path within its model; with several models after the model's."""
    found: dict[int, tuple[str, Any]] = {}
    for root_name, root in roots:
        for path, module in root.named_modules():
            parts = [root_name, path] if len(roots) > 1 else [path]
            found.setdefault(id(module), (".".join(part for part in parts if part), module))
    return list(found.values())


# -- What stays as it was --------------------------------------------------------------------------


@contextlib.contextmanager
def _modes_kept(torch: Any) -> Iterator[None]:
    """Put back afterwards what a step sets for its thread."""
    has_grad, device = torch.is_grad_enabled(), _read_default_device(torch)
    try:
        yield
    finally:
        torch.set_grad_enabled(has_grad)
        if _read_default_device(torch) != device:
            torch.set_default_device(device)


def _read_default_device(torch: Any) -> Any:
    """Return the device of ``torch.set_default_device``; ``None`` where it was not called."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # noqa: SLF001 - not public
    return None if context is None else context.device


@contextlib.contextmanager
def _refusals_explained() -> Iterator[None]:
    """Raise a refusal as an ordinary error, once nothing of the step's runs any more."""
    try:
        yield
    except RefusedError as exc:
        raise PredictionError(str(exc)) from None


# -- Failures --------------------------------------------------------------------------------------


def _explain(exc: BaseException) -> str:
    """Return a sentence on a failure within a step: the line, the cause, the next step."""
    cause = describe_exception(exc).removesuffix(".")
    advice = {
        "DataDependentOutputException": "It depends on values, which a dry run doesn't have.",
        "DynamicOutputShapeException": "Its size depends on values, which a dry run doesn't have.",
        "UnsupportedOperatorException": "It has no fake kernel (torch.library.register_fake).",
    }.get(type(exc).__name__, "Take it out of the step, or see if it runs.")
    if "backward() through example input" in cause:
        cause = "it goes backward through operators that ran before the step"
        advice = "Compute the loss in the step, too."
    line = _find_line(exc)
    if isinstance(exc, NameError) and line:
        return f"{line.removesuffix(' of the cell').capitalize()} fails: {cause}."
    what = line.capitalize() if line else "The step"
    return f"{what} can't be predicted: {cause}. {advice}"


def _find_line(exc: BaseException) -> str:
    found = ""
    trace = exc.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_user_code(code):
            found = format_line(code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return found
