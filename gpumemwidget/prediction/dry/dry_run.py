"""Carry out a step on tensors without memory: nothing is computed, allocated or changed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpumemwidget.backends.cuda.torch_hooks import find_torch
from gpumemwidget.errors import PredictionError, describe_exception, forgets_frames, name_type
from gpumemwidget.prediction.changes import Copies
from gpumemwidget.prediction.dry.accumulation import find_sums_in_place
from gpumemwidget.prediction.dry.answers import Answers
from gpumemwidget.prediction.dry.copies import Copier, is_user_code
from gpumemwidget.prediction.dry.effects import (
    RefusedError,
    ThreadPatch,
    own_random_numbers,
    own_settings,
    refuse_effects,
)
from gpumemwidget.prediction.dry.emulation import emulate_device
from gpumemwidget.prediction.dry.fakes import Fakes
from gpumemwidget.prediction.dry.known_values import KnownValues
from gpumemwidget.prediction.dry.tracker import Tracker, format_line
from gpumemwidget.prediction.operations import DryRun

#: Number of times that a step runs: from the third run on, memory lies as it does later.
_DEFAULT_STEPS = 3
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
            and once more after a run that makes an optimizer's state.
        device: ``cuda`` or ``cuda:1``. Where none of the step's tensors is on it, all are taken
            to be.
        capability: its compute capability, by which PyTorch chooses kernels of attention.
        shapes: other shapes for some tensors that the step reaches, by their ``id``.
        prepare: changes the copies before the step runs.

    Raises:
        PredictionError: the step does, or holds, what can't be carried out dry.
    """
    torch: Any = find_torch()
    if torch is None:
        raise PredictionError("torch is not imported yet. Import it and build the step first.")
    device = torch.device(device)
    if device.type != "cuda":
        raise PredictionError(f"A step on {device.type} can't be predicted. Use a device of cuda.")
    kwargs = dict(kwargs or {})
    reached = [*args, *kwargs.values(), *_list_reached(step)]
    moves_all = not any(each.type == device.type for each in _list_devices(torch, reached))
    tracker = Tracker(torch, device.type)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_refusals_explained())
        stack.enter_context(_ONE_AT_A_TIME)
        fakes = Fakes(torch, device, moves_all=moves_all)
        run = _Run(torch, fakes, tracker, shapes or {}, capability)
        stack.enter_context(_modes_kept(torch))
        copied = run.copy(step, tuple(args), kwargs)
        stack.enter_context(_hooks_held(tracker.watch(run.modules)))
        stack.enter_context(run.active())
        if prepare is not None:
            copies = run.describe_copies(copied[0])
            prepare(copies)
            copied = (copies.step, *copied[1:])
            del copies
        run.repeat(*copied, steps)
        del copied
    if not tracker.operations:
        raise PredictionError("The step uses no tensors: there is nothing to predict.")
    return DryRun(
        operations=tuple(tracker.operations),
        step_ends=tuple(tracker.step_ends),
        initial=tuple(tracker.initial),
        freed_last=run.freed_last,
        assumptions=tuple(run.assumptions),
        roles=tracker.roles,
        addresses=tracker.addresses,
        sums_in_place=find_sums_in_place(tracker.operations, run.freed_last),
    )


class _Run:
    """One dry run: the copies, and the modes that its operators go through.

    Args:
        torch: the imported module ``torch``.
        fakes: makes the tensors.
        tracker: notes the operators.
        shapes: other shapes for some tensors, by their ``id``.
        capability: the device's compute capability.
    """

    def __init__(
        self,
        torch: Any,
        fakes: Fakes,
        tracker: Tracker,
        shapes: Mapping[int, tuple[int, ...]],
        capability: tuple[int, int],
    ) -> None:
        self._shapes = shapes
        self._capability = capability
        self._torch = torch
        self._fakes = fakes
        self._tracker = tracker
        self.assumptions: list[str] = []
        self._known = KnownValues(torch)
        self._answers = Answers(torch, self._known, self.assumptions)
        fakes.mode.read_array = self._answers.read_array
        self._copier = Copier(torch, self._convert)
        self._ask_device = torch.ops.prim.device.default
        self._mode = _make_mode(self._dispatch)
        self._overrides: dict[Any, Callable[..., Any]] = {}
        self._composites: dict[Any, bool] = {}
        self._is_noting = False
        self._roots: list[tuple[str, Any]] = []
        #: The step's modules, each with its path.
        self.modules: list[tuple[str, Any]] = []
        self._settings: dict[str, Any] = {}
        self.freed_last: tuple[int, ...] = ()

    # -- The step's world --------------------------------------------------------------------------

    def copy(
        self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Return copies of a step and its arguments."""
        with self._fakes.active(), self._mode:
            copied_args = tuple(
                self._copier.copy(each, name)
                for each, name in zip(args, _name_arguments(step, len(args)), strict=True)
            )
            copied_kwargs = {name: self._copier.copy(each, name) for name, each in kwargs.items()}
            copied_step = self._copier.copy(step, "step")
        self.assumptions += self._copier.assumptions
        self._roots = roots = _list_roots(self._copier.modules)
        self.modules = _name_modules(roots)
        self._tracker.note_modules(roots)
        for optimizer in self._copier.optimizers:
            self._tracker.note_optimizer(optimizer)
        return copied_step, copied_args, copied_kwargs

    def describe_copies(self, step: Callable[..., object]) -> Copies:
        """Return the copies, to be changed before the step runs."""
        return Copies(self._torch, step, self._roots, self._copier.optimizers)

    def _convert(self, tensor: Any, is_counter: bool, path: str) -> Any:
        if (shape := self._shapes.get(id(tensor))) is not None:
            fake = self._fakes.make_like(tensor, shape)
            self._tracker.note_initial(fake, path)
            return fake
        fake = self._fakes.convert(tensor, is_counter)
        self._known.remember(fake, tensor)
        pairs = [(fake, tensor)]
        # Another thread may take the gradient away meanwhile.
        if tensor.is_leaf and (grad := tensor.grad) is not None and fake.grad is not None:
            pairs.append((fake.grad, grad))
        for each, real in pairs:
            is_there = real.device.type != "cpu"
            self._tracker.note_initial(
                each, path, real.untyped_storage().data_ptr() if is_there else 0
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

    def repeat(
        self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any], steps: int | None
    ) -> None:
        """Run the step; see ``carry_out``."""
        n_done, n_runs = 0, steps or _DEFAULT_STEPS
        while n_done < n_runs:
            n_done += 1
            self._tracker.begin_step()
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
            self._tracker.end_step()
            del result
            if self._tracker.leaves_all_as_it_was():
                for _ in range(n_runs - n_done):
                    self._tracker.repeat_step()
                break
            if steps is None and n_done == n_runs < MAX_STEPS and self._tracker.has_made_state():
                n_runs += 1
        self.freed_last = self._tracker.take_freed()
        if self._fakes.has_moved_late:
            self.assumptions.append(
                "the step was built on the CPU: what it makes there and uses with the rest was "
                "taken to be on the device"
            )

    # -- Operators ---------------------------------------------------------------------------------

    def _dispatch(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operator is self._ask_device:
            return self._fakes.report_device(args[0])
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
        if operator.name() in _FACTORIES and kwargs.get("dtype") is None:
            # The process's own default stays what it is.
            kwargs = {**kwargs, "dtype": self._settings.get("get_default_dtype")}
        _refuse_operator(operator)
        self._refuse_own_tensors(args)

        def call() -> Any:
            result = self._fakes.adopt(
                self._answers.answer(
                    operator, args, kwargs, lambda: self._fakes.call(operator, args, kwargs)
                )
            )
            self._known.follow(operator, args, kwargs, result)
            return result

        return self._tracker.note(operator, args, kwargs, call)

    def _refuse_own_tensors(self, values: Iterable[Any]) -> None:
        """Refuse the user's own tensors where a backward would give them gradients."""
        for each in values:
            if isinstance(each, self._torch.Tensor):
                if each.requires_grad and not hasattr(each, "fake_mode"):
                    raise PredictionError(
                        f"The step reaches a {name_type(each)} of {tuple(each.shape)} in a way "
                        "that can't be followed. Pass what holds it as an argument."
                    )
            elif isinstance(each, (list, tuple)):
                self._refuse_own_tensors(each)

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


def _make_mode(dispatch: Callable[..., Any]) -> Any:
    """Return a mode of PyTorch's that sends each operator to a function."""
    base: Any = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode

    class DryRunMode(base):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return dispatch(func, args, kwargs or {})

    return DryRunMode()


#: Operators that make tensors of the default type, if they are given none.
_FACTORIES = ("aten::zeros", "aten::ones", "aten::empty.memory_format", "aten::rand", "aten::randn")
_REFUSED = {
    "c10d": "communicates with other processes",
    "_c10d_functional": "communicates with other processes",
    "c10d_functional": "communicates with other processes",
}


def _refuse_operator(operator: Any) -> None:
    why = _REFUSED.get(getattr(operator, "namespace", ""))
    if why is not None:
        raise PredictionError(
            f"The step calls {operator.name()}, which {why}. Predict one process."
        )


# -- What a step reaches ---------------------------------------------------------------------------


def _list_reached(step: Any) -> list[object]:
    """Return what a function holds by name, by closure, or as the object that it is bound to."""
    found: list[object] = []
    while isinstance(step, functools.partial):
        found += [*step.args, *step.keywords.values()]
        step = step.func
    function = step
    if isinstance(step, types.MethodType):
        step, function = step.__self__, step.__func__
    found.append(step)
    if isinstance(function, types.FunctionType):
        found += [function.__globals__.get(name) for name in function.__code__.co_names]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):
                found.append(cell.cell_contents)
    return found


def _list_devices(torch: Any, values: Iterable[object]) -> Iterator[Any]:
    """Yield the devices of the tensors among objects, and of those that the objects hold.

    Classes are asked, not objects: an object's own code may raise, or name another class.
    """
    holders = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
    waiting, seen = list(values), set[int]()
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if issubclass(kind, torch.Tensor):
            yield value.device  # type: ignore[attr-defined]
        elif issubclass(kind, torch.nn.Module):
            module: Any = value
            yield from (each.device for each in (*module.parameters(), *module.buffers()))
        elif issubclass(kind, torch.optim.Optimizer):
            optimizer: Any = value
            yield from (each.device for group in optimizer.param_groups for each in group["params"])
        elif issubclass(kind, Mapping):
            waiting += value.values()  # type: ignore[attr-defined]
        elif kind in (list, tuple, set):
            waiting += value  # type: ignore[arg-type]
        elif kind.__module__ != "builtins" and not issubclass(kind, (type, types.ModuleType)):
            own = _read_attributes(value)
            waiting += [each for each in own.values() if issubclass(type(each), holders)]


def _read_attributes(value: object) -> dict[str, object]:
    try:
        own = object.__getattribute__(value, "__dict__")
    except Exception:  # noqa: BLE001 - it has none, or its class computes one and raises
        return {}
    return own if type(own) is dict else {}


def _name_arguments(step: Any, n_arguments: int) -> list[str]:
    """Return the names of a function's arguments, as its author wrote them."""
    n_bound = 0
    while isinstance(step, functools.partial):
        step, n_bound = step.func, n_bound + len(step.args)
    function = step.__func__ if isinstance(step, types.MethodType) else step
    names: list[str] = []
    if isinstance(function, types.FunctionType):
        code = function.__code__
        names = list(code.co_varnames[: code.co_argcount])[function is not step :]
    names = names[n_bound : n_bound + n_arguments]
    return [*names, *(f"argument {k + 1}" for k in range(len(names), n_arguments))]


def _list_roots(modules: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the modules that are in no other one, each with what the user calls it."""
    within = {id(each) for _, module in modules for each in _list_inner(module)}
    return [(name, module) for name, module in modules if id(module) not in within]


def _name_modules(roots: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return each module after its path within its model; with several models after the model's."""
    found: dict[int, tuple[str, Any]] = {}
    for root_name, root in roots:
        for path, module in root.named_modules():
            parts = [root_name, path] if len(roots) > 1 else [path]
            found.setdefault(id(module), (".".join(part for part in parts if part), module))
    return list(found.values())


def _list_inner(module: Any) -> list[Any]:
    return [each for each in module.modules() if each is not module]


# -- What stays as it was --------------------------------------------------------------------------


@contextlib.contextmanager
def _modes_kept(torch: Any) -> Iterator[None]:
    """Put back afterwards what a step sets for its thread."""
    settings: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (functools.partial(_read_default_device, torch), torch.set_default_device),
    ]
    kept = [read() for read, _ in settings]
    try:
        yield
    finally:
        for (read, write), value in zip(settings, kept, strict=True):
            if read() != value:
                write(value)


def _read_default_device(torch: Any) -> Any:
    """Return the device of ``torch.set_default_device``; ``None`` where it was not called."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # noqa: SLF001 - not public
    return None if context is None else context.device


@contextlib.contextmanager
def _hooks_held(handles: Iterator[Any]) -> Iterator[None]:
    """Remove hooks afterwards."""
    with contextlib.ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


@contextlib.contextmanager
def _refusals_explained() -> Iterator[None]:
    """Raise a refusal as an ordinary error, once nothing of the step's runs any more."""
    try:
        yield
    except RefusedError as exc:
        raise PredictionError(str(exc)) from None


# -- Failures --------------------------------------------------------------------------------------

_NEXT_STEPS = {
    "DataDependentOutputException": "It depends on values, which a dry run doesn't have.",
    "DynamicOutputShapeException": "Its size depends on values, which a dry run doesn't have.",
    "UnsupportedOperatorException": "It has no fake kernel (torch.library.register_fake).",
}


def _explain(exc: BaseException) -> str:
    """Return a sentence on a failure within a step: the line, the cause, the next step."""
    cause = describe_exception(exc).removesuffix(".")
    advice = _NEXT_STEPS.get(type(exc).__name__, "Take it out of the step, or see if it runs.")
    if "backward() through example input" in cause:
        cause = "it goes backward through operators that ran before the step"
        advice = "Compute the loss in the step, too."
    line = _find_line(exc)
    if isinstance(exc, NameError) and line:
        return f"{line.removesuffix(' of the cell').capitalize()} fails: {cause}."
    where = f" at {line}" if line else ""
    return f"The step can't be carried out dry{where}: {cause}. {advice}"


def _find_line(exc: BaseException) -> str:
    """Return the user's innermost line that a failure came through; nothing without one."""
    found = ""
    trace = exc.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_user_code(code):
            found = format_line(code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return found
