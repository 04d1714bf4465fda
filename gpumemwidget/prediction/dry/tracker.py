"""Note each operator that a dry run calls, and the storages that appear and go with it."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from gpumemwidget.errors import PredictionError
from gpumemwidget.model.devices import Frame
from gpumemwidget.model.ownership import MemoryKind
from gpumemwidget.model.predictions import Phase
from gpumemwidget.prediction.dry.copies import is_user_code
from gpumemwidget.prediction.dry.fakes import list_tensors
from gpumemwidget.prediction.operations import (
    Argument,
    DryRun,
    Operation,
    StorageRole,
    StorageUse,
    TensorMeta,
)
from gpumemwidget.progress import Stage, report_progress

#: Maximum number of operators, in all runs: they take some 450 MB.
_MAX_OPERATORS = 700_000


@dataclass(slots=True, eq=False)
class _Storage:
    """A storage of a dry run, while it exists."""

    number: int
    n_bytes: int
    on_device: bool
    end_watcher: object
    #: The tensors in it that were described, by what tells them apart.
    tensors: dict[tuple[Any, ...], TensorMeta] = field(default_factory=dict)


class Tracker:
    """The operators of a dry run, in their order."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._tensor: type = torch.Tensor
        self._read_node: Callable[[], Any] = torch._C._current_autograd_node  # noqa: SLF001
        self._read_sequence: Callable[[], int] = torch.autograd._get_sequence_nr  # noqa: SLF001
        #: The storages that exist, by their address.
        self._living: dict[int, _Storage] = {}
        #: How often tensors that the step made on the CPU were taken to be on the device.
        self.n_moves = 0
        self._n_storages = 0
        #: Storages that were freed since the last operator, which has this list.
        self._freed: list[int] = []
        self._phases: list[Phase] = []
        self._modules: list[str] = []
        #: The module that each node of autograd's was made in, by the node's number.
        self._node_modules: dict[int, str] = {}
        #: The frame that calls the step, while it runs.
        self._outermost: FrameType | None = None
        #: By the ``id`` of code: the code, which keeps its number, and whether it is the user's.
        self._codes: dict[int, tuple[CodeType, bool]] = {}
        self._frames: dict[tuple[tuple[int, int], ...], tuple[Frame, ...]] = {}
        #: The step's parameters with their paths.
        self._parameters: list[tuple[str, Any]] = []
        self._operations: list[Operation] = []
        self._step_ends: list[int] = []
        self._initial: list[StorageUse] = []
        self._roles: dict[int, StorageRole] = {}
        self._addresses: dict[int, int] = {}

    # -- What surrounds an operator ----------------------------------------------------------------

    @contextlib.contextmanager
    def watch(self, modules: Sequence[tuple[str, Any]]) -> Iterator[None]:
        """Note the module, by its path, and the phase for a while."""
        names = {id(module): name for name, module in modules}
        thread = threading.get_ident()

        def enter(module: Any, _arguments: object) -> None:
            # A module that the step copies has the hooks of the one that it is a copy of.
            if (name := names.get(id(module))) is not None:
                self._modules.append(name)

        def leave(module: Any, _arguments: object, _result: object) -> None:
            if id(module) in names and self._modules:
                self._modules.pop()

        def begin_update(*_: object) -> None:
            if threading.get_ident() == thread:
                self._note_gradients()
                self._phases.append("optimizer")

        def end_update(optimizer: Any, *_: object) -> None:
            if threading.get_ident() != thread:
                return
            if self._phases:
                self._phases.pop()
            self.note_optimizer(optimizer)

        with contextlib.ExitStack() as stack:
            for _, module in modules:
                stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            # The step may make an optimizer, so there are hooks for all of the process's.
            optimizers: Any = sys.modules["torch.optim.optimizer"]
            stack.callback(optimizers.register_optimizer_step_pre_hook(begin_update).remove)
            stack.callback(optimizers.register_optimizer_step_post_hook(end_update).remove)
            yield

    def begin_step(self) -> None:
        """Note that the caller runs the step now: lines further out are not the step's."""
        self._outermost = sys._getframe(1)  # noqa: SLF001 - the public one is slow

    def end_step(self) -> None:
        """Note that a run of the step is over."""
        self._note_gradients()
        self._outermost = None
        self._step_ends.append(len(self._operations))
        self._phases.clear()
        self._modules.clear()

    def leaves_all_as_it_was(self) -> bool:
        """Return whether the last run of the step only went forward and has freed all it made.

        The next run would be the same.
        """
        operations = self._list_last_run()
        made = {use.storage for operation in operations for use in operation.allocated}
        freed = {number for operation in operations for number in operation.freed}
        return freed == made and all(operation.phase == "forward" for operation in operations)

    def repeat_step(self) -> None:
        """Note another run of the step that is the same as the last one.

        Its storages have the numbers of the last run's, which are all freed by then.
        """
        self._operations += self._list_last_run()
        self._step_ends.append(len(self._operations))

    def _list_last_run(self) -> list[Operation]:
        begin, end = (0, *self._step_ends)[-2:]
        return self._operations[begin:end]

    def finish(self, assumptions: Sequence[str]) -> DryRun:
        """Return all that was noted, with sentences on what was assumed.

        Raises:
            PredictionError: there was no operator.
        """
        if not self._operations:
            raise PredictionError("The step uses no tensors: there is nothing to predict.")
        return DryRun(
            operations=tuple(self._operations),
            step_ends=tuple(self._step_ends),
            initial=tuple(self._initial),
            assumptions=tuple(assumptions),
            roles=self._roles,
            addresses=self._addresses,
            sums_in_place=_find_sums_in_place(self._operations),
        )

    # -- Operators ---------------------------------------------------------------------------------

    def note_initial(self, tensor: Any, path: str = "", address: int = 0) -> None:
        """Note the storage of a tensor that exists before the first step.

        The real one's has an address on the device, or 0 if it is elsewhere.
        """
        allocated: list[StorageUse] = []
        number = self._find_storage(tensor, self._is_on_device(tensor), allocated).number
        self._initial += allocated
        if allocated:
            self._roles[number] = StorageRole("tensor", path)
            if address:
                self._addresses[number] = address

    # -- What storages are for ---------------------------------------------------------------------

    def note_modules(self, roots: Iterable[tuple[str, Any]]) -> None:
        """Note what is a parameter or a buffer of some modules, each with its path."""
        for path, module in roots:
            for name, parameter in module.named_parameters():
                full = f"{path}.{name}" if path else name
                self._parameters.append((full, parameter))
                self._note_role(parameter, "parameter", full)
            for name, buffer in module.named_buffers():
                self._note_role(buffer, "buffer", f"{path}.{name}" if path else name)
        self._note_gradients()

    def note_optimizer(self, optimizer: Any) -> None:
        """Note what an optimizer keeps for its parameters."""
        paths = {id(parameter): path for path, parameter in self._parameters}
        for parameter, state in list(optimizer.state.items()):
            if isinstance(state, dict):
                for value in state.values():
                    if isinstance(value, self._tensor):
                        self._note_role(value, "optimizer state", paths.get(id(parameter), ""))

    def _note_gradients(self) -> None:
        for path, parameter in self._parameters:
            if (gradient := parameter.grad) is not None:
                self._note_role(gradient, "gradient", path)

    def _note_role(self, tensor: Any, kind: MemoryKind, path: str) -> None:
        known = self._living.get(tensor.untyped_storage()._cdata)  # noqa: SLF001 - its identity
        if known is not None and self._is_on_device(tensor):
            self._roles[known.number] = StorageRole(kind, path)

    # -- Each operator -----------------------------------------------------------------------------

    def note(
        self,
        operator: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[[], Any],
    ) -> Any:
        """Call an operator on fake tensors and note it; return what the call returned."""
        # Marks of the profiler and questions for the device neither compute nor allocate.
        if operator.namespace in ("profiler", "prim"):
            return call()
        # Some 30 ms lie between two reports.
        if len(self._operations) % 128 == 0:
            report_progress(Stage.CALL_OPERATORS, len(self._operations))
            if len(self._operations) >= _MAX_OPERATORS:
                raise PredictionError(
                    f"The step has called {_MAX_OPERATORS:,} operators and goes on, maybe in a "
                    "loop that waits for a value, which a dry run doesn't have. Predict fewer "
                    "rounds."
                )
        ignored: list[StorageUse] = []
        arguments = tuple([self._describe(arg, ignored) for arg in args])
        options = tuple(
            [(name, self._describe(option, ignored)) for name, option in kwargs.items()]
        )
        node = self._read_node()
        sequence = None if node is not None else self._read_sequence() - 1
        n_moves = self.n_moves
        result = call()
        if self._operations:
            self._freed = []
        allocated: list[StorageUse] = []
        if self.n_moves != n_moves:
            arguments = tuple([self._describe(arg, allocated) for arg in args])
        results = tuple(
            [self._describe_tensor(tensor, allocated) for tensor in list_tensors(result)]
        )
        self._operations.append(
            Operation(
                name=operator.name(),
                arguments=arguments,
                options=options,
                results=tuple(results),
                freed=self._freed,
                allocated=tuple(allocated),
                phase=self._find_phase(node),
                module=self._find_module(node, sequence),
                frames=self._list_frames(sys._getframe(1)),  # noqa: SLF001 - the public is slow
            )
        )
        return result

    def note_move(self) -> None:
        """Note that the operator that is called has arguments that were moved to the device."""
        self.n_moves += 1

    def _list_frames(self, frame: FrameType | None) -> tuple[Frame, ...]:
        """Return the user's frames, up to where the dry run began, innermost first."""
        places: list[tuple[CodeType, int]] = []
        known, outermost = self._codes, self._outermost
        while frame is not None and frame is not outermost:
            code = frame.f_code
            # The hash of code reads all of it: its number is many times faster.
            found = known.get(id(code))
            if found is None:
                found = known[id(code)] = (code, is_user_code(code))
            if found[1]:
                places.append((code, frame.f_lineno))
            frame = frame.f_back
        key = tuple([(id(code), line) for code, line in places])
        frames = self._frames.get(key)
        if frames is None:
            frames = self._frames[key] = tuple(
                [Frame(code.co_filename, line, code.co_name) for code, line in places]
            )
        return frames

    def _find_phase(self, node: Any) -> Phase:
        if node is not None:
            return "backward"
        return self._phases[-1] if self._phases else "forward"

    def _find_module(self, node: Any, sequence: int | None) -> str:
        """Return the innermost module: in backward the one whose forward made autograd's node."""
        module = self._modules[-1] if self._modules else ""
        if sequence is not None:
            if module:
                self._node_modules[sequence] = module
            return module
        return module or self._node_modules.get(node._sequence_nr(), "")  # noqa: SLF001

    # -- Tensors -----------------------------------------------------------------------------------

    def _describe(self, value: Any, allocated: list[StorageUse]) -> Argument:
        if isinstance(value, self._tensor):
            return self._describe_tensor(value, allocated)
        if value is None or type(value) in (int, float, bool, str):
            result: Argument = value
            return result
        if isinstance(value, (list, tuple)):
            return tuple([self._describe(item, allocated) for item in value])
        return str(value)

    def _describe_tensor(self, tensor: Any, allocated: list[StorageUse]) -> TensorMeta:
        on_device = self._is_on_device(tensor)
        storage = self._find_storage(tensor, on_device, allocated)
        # A tensor is described where it is made, and again at each use.
        key = (tensor.dtype, tensor.shape, tensor.stride(), on_device)
        if (meta := storage.tensors.get(key)) is None:
            meta = storage.tensors[key] = TensorMeta(
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                stride=tensor.stride(),
                device="cuda" if on_device else "cpu",
                storage=storage.number,
                item_bytes=tensor.dtype.itemsize,
            )
        return meta

    def _is_on_device(self, tensor: Any) -> bool:
        device = getattr(tensor, "fake_device", None) or tensor.device
        return bool(device.type == "cuda")

    def _find_storage(self, tensor: Any, on_device: bool, allocated: list[StorageUse]) -> _Storage:
        """Return a tensor's storage, which is a new one once it is resized or moved."""
        storage = tensor.untyped_storage()
        key, n_bytes = storage._cdata, storage.nbytes()  # noqa: SLF001 - its identity
        known = self._living.get(key)
        if known is not None and known.n_bytes == n_bytes and known.on_device >= on_device:
            return known
        number = self._n_storages
        self._n_storages += 1
        if known is not None and known.on_device:
            self._freed.append(known.number)

        def end(_: object) -> None:
            if self._living[key].number == number:
                del self._living[key]
                if on_device:
                    self._freed.append(number)

        known = _Storage(number, n_bytes, on_device, weakref.ref(storage, end))
        self._living[key] = known
        if on_device:
            allocated.append(StorageUse(number, n_bytes))
        return known


# -- Gradients that are added up in place ----------------------------------------------------------


def _find_sums_in_place(operations: Sequence[Operation]) -> frozenset[int]:
    """Return the places of additions whose result takes the memory of their first tensor.

    Autograd adds up the gradients of a tensor in the memory of the sum so far if nothing else uses
    that, but never so with a subclass of tensors, as fake ones are
    (https://github.com/pytorch/pytorch/blob/main/torch/csrc/autograd/input_buffer.cpp). An addition
    in backward counts as autograd's if its first tensor is freed right after it. A view shares its
    storage with its base, so autograd does not write to it.
    """
    #: The tensors that operators have allocated, by their storages.
    owners: dict[int, TensorMeta] = {}
    found = set()
    for place, operation in enumerate(operations):
        if _is_in_place(operation, owners):
            found.add(place)
        allocated = {use.storage for use in operation.allocated}
        returns_itself = operation.name.partition(".")[0].endswith("_")
        for tensor in operation.results:
            if tensor.storage in allocated:
                owners[tensor.storage] = tensor
            elif owners.get(tensor.storage) == tensor and not returns_itself:
                # A view looks like the tensor.
                del owners[tensor.storage]
    return frozenset(found)


def _is_in_place(operation: Operation, owners: dict[int, TensorMeta]) -> bool:
    if (
        operation.name != "aten::add.Tensor"
        or operation.phase != "backward"
        or operation.options
        or len(operation.arguments) != 2
        or len(operation.allocated) != 1
    ):
        return False
    total, result = operation.arguments[0], operation.results[0]
    return (
        isinstance(total, TensorMeta)
        and total.storage in operation.freed
        and owners.get(total.storage) == total
        and (total.dtype, total.shape) == (result.dtype, result.shape)
    )


# -- The user's lines ------------------------------------------------------------------------------


def find_user_line(frame: FrameType | None) -> tuple[str, int] | None:
    """Return the file and line of the innermost frame of the user's; ``None`` without one."""
    while frame is not None:
        if is_user_code(frame.f_code):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def format_line(filename: str, line: int) -> str:
    """Return a line in words: ``<the cell>`` is no file, and is called the cell."""
    return f"line {line} of {filename.strip('<>')}"
