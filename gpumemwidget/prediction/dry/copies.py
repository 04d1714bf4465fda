"""Copy what a step reaches, with tensors of its own.

Everything is copied in one memo, so that what was one object stays one: an optimizer's parameters
are the model's. The user's functions, classes and modules are copied too, so that the copies find
copies, whatever they read and assign. Nothing of the user's is assigned, not for a moment: other
threads go on with it. What can't be copied, or is reached in a way that can't be followed, is
replaced by a proxy that refuses to be used.

What a library keeps in classes and modules of its own is shared.
"""

from __future__ import annotations

import abc
import builtins
import collections
import copyreg
import dis
import enum
import functools
import io
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn, TypeGuard

from gpumemwidget.errors import PredictionError, describe_exception, name_type
from gpumemwidget.prediction.dry.effects import RefusedError
from gpumemwidget.tracing.sources import is_library

_OUR_FOLDER = str(Path(__file__).resolve().parents[2])

_SHARED_TYPES = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented)),
        *(range, slice, CodeType),
        *(types.MethodWrapperType, types.WrapperDescriptorType),
        *(types.MethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
        *(types.GenericAlias, types.UnionType),
    }
)


def is_user_code(code: CodeType) -> bool:
    """Return whether code is the user's: of a cell or a file outside Python's and pip's folders."""
    return _is_user_file(code.co_filename)


def _is_user_file(filename: str) -> bool:
    return not (not filename or is_library(filename) or filename.startswith(_OUR_FOLDER))


class RefusingProxy:
    """A proxy of an object that a dry run must not use: its attributes can be read.

    The refusal says what the object is ("`loader` is a DataLoader"), and what to do instead.
    """

    def __init__(self, value: Any, what: str, advice: str = "") -> None:
        self._value = value
        self._what = what
        self._advice = advice or (
            "it would be used for real. Take what the step needs from it before, and pass that."
        )

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise RefusedError(f"{self._what}: {self._advice}")

    __iter__ = __next__ = __call__ = __enter__ = __getitem__ = __setitem__ = _refuse

    def __len__(self) -> int:
        n_items: int = len(self._value)
        return n_items

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._value, name)
        return self._refuse if callable(value) else value


class ReadOnlyWidget:
    """A proxy of a widget, as of a progress bar: it can be read, and nothing changes it.

    The widget, and those that it holds, are of the kind ``HasTraits`` of traitlets.
    """

    def __init__(self, value: object, kind: type) -> None:
        vars(self).update(_value=value, _kind=kind)

    def __getattr__(self, name: str) -> Any:
        return self._wrap(getattr(self._value, name))

    def _wrap(self, value: Any) -> Any:
        if isinstance(value, self._kind):
            return ReadOnlyWidget(value, self._kind)
        if isinstance(value, (list, tuple)):
            return type(value)([self._wrap(item) for item in value])
        return (lambda *_args, **_options: None) if callable(value) else value

    def __setattr__(self, name: str, value: object) -> None:
        """Leave the widget as it is."""


class Copier:
    """Copies objects, each once.

    Args:
        torch: the user's torch.
        convert: takes a tensor, whether it is an optimizer's count of steps, which stays on the
            CPU, and where it was found; returns its copy.
    """

    def __init__(self, torch: Any, convert: Callable[[Any, bool, str], Any]) -> None:
        self._torch = torch
        self._convert = convert
        self._memo: dict[int, Any] = {}
        #: The copies of modules, by the ``id`` of the user's namespace.
        self._modules: dict[int, ModuleType] = {}
        #: Namespaces, by ``id``, each with the names that were copied for one function.
        self._filled: set[tuple[int, Sequence[str]]] = set()
        # An object that is gone would leave its number to another.
        self._originals: list[object] = []
        self._path: list[str] = []
        #: True while a class is made: it is no new one of the user's.
        self._is_making = False
        #: Copies of modules, each with where it was found: ``model``, ``trainer.net``.
        self.modules: list[tuple[str, Any]] = []
        #: Copies of optimizers.
        self.optimizers: list[Any] = []
        #: Sentences on what was copied as something else.
        self.assumptions: list[str] = []

    def copy(self, value: Any, name: str = "") -> Any:
        """Return the copy of an object, which the user calls by a name.

        Raises:
            PredictionError: it, or what it holds, can't be copied.
        """
        kind = type(value)
        if kind in _SHARED_TYPES:
            return value
        number = id(value)
        if number in self._memo:
            return self._memo[number]
        self._path.append(name)
        try:
            copied = self._keep(value, self._copy_new(value, kind))
            if type(copied) is kind and (own := self.copy(kind)) is not kind:
                # The object's own ``__deepcopy__`` has made it.
                copied.__class__ = own
        except PredictionError:
            raise
        except RecursionError:
            raise PredictionError(
                f"`{self._path[0] or 'the step'}` holds objects within objects, too deep to be "
                "copied. Allow more with sys.setrecursionlimit(10_000), or pass less."
            ) from None
        except Exception as exc:  # noqa: BLE001 - whatever the object's own code raises
            raise self._refuse_copy(value, exc) from None
        finally:
            self._path.pop()
        return copied

    def _keep(self, value: object, copied: Any) -> Any:
        if id(value) not in self._memo:
            self._memo[id(value)] = copied
            self._originals.append(value)
        return copied

    def _copy_new(self, value: Any, kind: type) -> Any:
        copy = Copier._copy_class if issubclass(kind, type) else _COPIERS.get(kind)
        if copy is not None:
            return copy(self, value)
        if isinstance(value, self._torch.Tensor):
            return self._copy_tensor(value)
        if any(value is s for s in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)):
            return io.StringIO()
        if (what := self._name_refused(value, kind)) is not None:
            return RefusingProxy(value, f"`{self._say_path()}` {what}")
        for kinds, copy_kind in self._list_kinds():
            # The class is asked, not the object: a mock names the class that it imitates.
            if issubclass(kind, kinds):
                return copy_kind(value)
        return self._copy_reduced(value, kind)

    def _list_kinds(self) -> Iterator[tuple[Any, Callable[[Any], Any]]]:
        """Yield classes of PyTorch's and NumPy's, each with what copies its instances.

        What the classes' own pickling says would read the device, or leave hooks out.
        """
        torch = self._torch
        yield torch.nn.Module, self._copy_module
        yield torch.optim.Optimizer, self._copy_optimizer
        yield torch.amp.GradScaler, self._copy_attributes
        yield torch.optim.lr_scheduler.LRScheduler, self._copy_attributes
        yield torch.Generator, self._copy_generator
        triton: Any = sys.modules.get("triton.runtime.jit")
        fx: Any = sys.modules.get("torch.fx.graph")
        shared = (
            *(() if triton is None else (triton.KernelInterface,)),
            *(() if fx is None else (fx.Graph,)),
            *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
            *(torch.library.Library, torch._library.custom_ops.CustomOpDef),  # noqa: SLF001
            *(torch._ops.OpOverload, torch._ops.OpOverloadPacket),  # noqa: SLF001 - not public
            enum.Enum,
        )
        yield shared, lambda value: value
        traitlets: Any = sys.modules.get("traitlets")
        if traitlets is not None:
            yield traitlets.HasTraits, lambda value: ReadOnlyWidget(value, traitlets.HasTraits)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            yield numpy.ndarray, self._copy_array

    def _name_refused(self, value: object, kind: type) -> str | None:
        """Return what an object is that has effects when it is used, else ``None``."""
        data: Any = sys.modules.get("torch.utils.data")
        if data is not None and isinstance(value, data.DataLoader):
            return "is a DataLoader"
        if data is not None and isinstance(value, data.dataloader._BaseDataLoaderIter):  # noqa: SLF001 - has no public name
            return "reads a DataLoader"
        if kind in (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType):
            return "is a generator"
        for kinds, what in (
            (io.IOBase, "is an open file"),
            (threading.Thread, "is a thread"),
            (self._torch.ScriptObject, "is a TorchScript object, as quantized modules hold"),
        ):
            if isinstance(value, kinds):
                return what
        if kind.__module__ in ("socket", "ssl", "sqlite3", "subprocess", "multiprocessing.pool"):
            return f"is a {kind.__module__}.{name_type(value)}"
        return None

    # -- Tensors and what holds them ---------------------------------------------------------------

    def _copy_tensor(self, tensor: Any) -> Any:
        what = self._name_unpredicted(tensor)
        if what is not None:
            raise PredictionError(
                f"`{self._say_path()}` is a {what}, which can't be predicted. Predict with plain "
                "tensors of the same sizes."
            )
        copied = self._keep(tensor, self._convert(tensor, False, self._say_path()))
        own = {name: value for name, value in vars(tensor).items() if name not in vars(copied)}
        if own:
            vars(copied).update(self._copy_dict(own))
        for hook in (tensor._backward_hooks or {}).values():  # noqa: SLF001 - has no public name
            copied.register_hook(self.copy(hook, "hook"))
        after = getattr(tensor, "_post_accumulate_grad_hooks", None)
        for hook in (after or {}).values():
            copied.register_post_accumulate_grad_hook(self.copy(hook, "hook"))
        return copied

    def _name_unpredicted(self, tensor: Any) -> str | None:
        torch = self._torch
        plain = (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor))
        if tensor.layout != torch.strided:
            return f"tensor of layout {tensor.layout}"
        if tensor.is_quantized:
            return f"quantized tensor ({tensor.dtype})"
        return None if type(tensor) in plain else name_type(tensor)

    def _copy_optimizer(self, optimizer: Any) -> Any:
        """Copy first what an optimizer keeps on the CPU.

        https://docs.pytorch.org/docs/stable/generated/torch.optim.Adam.html (``capturable``)
        """
        if isinstance(optimizer, self._torch.optim.LBFGS):
            raise PredictionError(
                f"`{self._say_path()}` is an LBFGS, whose rounds and history depend on values. "
                "Predict with another optimizer: LBFGS takes up to 2 x `history_size` times the "
                "parameters more."
            )
        for state in optimizer.state.values():
            count = state.get("step") if isinstance(state, dict) else None
            if isinstance(count, self._torch.Tensor) and count.device.type == "cpu":
                self._keep(count, self._convert(count, True, ""))
        copied = self._copy_attributes(optimizer)
        self.optimizers.append(copied)
        return copied

    def _copy_module(self, module: Any) -> Any:
        torch = self._torch
        if isinstance(module, torch.jit.ScriptModule):
            raise PredictionError(
                f"`{self._say_path()}` is a scripted module, which can't be predicted. "
                f"Predict with the module that it was made of."
            )
        original = vars(module).get("_modules", {}).get("_orig_mod")
        if name_type(module) == "OptimizedModule" and original is not None:
            self._assume_uncompiled()
            return self.copy(original, self._path[-1])
        wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
        if isinstance(module, wrappers):
            raise PredictionError(
                f"`{self._say_path()}` is a {name_type(module)}, whose buckets and copies are not "
                f"predicted. Predict with the module in it, `{self._say_path()}.module`."
            )
        path = self._say_path()
        copied = self._copy_attributes(module)
        if vars(copied).get("_compiled_call_impl") is not None:
            vars(copied)["_compiled_call_impl"] = None
            self._assume_uncompiled()
        self.modules.append((path, copied))
        return copied

    def _assume_uncompiled(self) -> None:
        sentence = (
            f"`{self._say_path()}` is compiled, and was predicted uncompiled: compiled it needs "
            "the same or less"
        )
        if sentence not in self.assumptions:
            self.assumptions.append(sentence)

    def _copy_attributes(self, value: Any) -> Any:
        """Copy an object attribute by attribute, whatever its pickling would say."""
        kind: Any = self.copy(type(value))
        # A traced module (torch.fx.GraphModule) would make a class of its own, without a forward.
        make = object.__new__ if issubclass(kind, self._torch.nn.Module) else kind.__new__
        copied = self._keep(value, make(kind))
        vars(copied).update(self._copy_dict(vars(value)))
        return copied

    def _copy_generator(self, generator: Any) -> Any:
        copied = self._torch.Generator()
        if generator.device.type == "cpu":
            copied.set_state(generator.get_state())
        return copied

    def _copy_array(self, array: Any) -> Any:
        """Copy a NumPy array; of a large one only a view, that can't be written."""
        if array.dtype == object:
            return self._copy_reduced(array, type(array))
        # Up to 16 MiB a copy takes a moment.
        if array.nbytes <= 16 << 20:
            return array.copy()
        view = array.view()
        view.flags.writeable = False
        return view

    # -- Containers --------------------------------------------------------------------------------

    def _copy_dict(self, value: dict[Any, Any], copied: Any = None) -> Any:
        copied = self._keep(value, {} if copied is None else copied)
        for key, item in list(value.items()):
            name = key if isinstance(key, str) else str(key)[:40]
            copied[self.copy(key, name)] = self.copy(item, name)
        return copied

    def _copy_list(self, value: list[Any]) -> list[Any]:
        copied: list[Any] = self._keep(value, [])
        copied.extend(
            item if type(item) in _SHARED_TYPES else self.copy(item, str(k))
            for k, item in enumerate(list(value))
        )
        return copied

    def _copy_tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        copied = tuple(self.copy(item, str(k)) for k, item in enumerate(value))
        if all(mine is theirs for mine, theirs in zip(copied, value, strict=True)):
            return value
        return copied

    def _copy_set(self, value: set[Any]) -> set[Any]:
        copied: set[Any] = self._keep(value, set())
        copied.update(self.copy(item) for item in list(value))
        return copied

    def _copy_frozenset(self, value: frozenset[Any]) -> frozenset[Any]:
        return frozenset(self.copy(item) for item in value)

    # -- Functions ---------------------------------------------------------------------------------

    def _copy_function(self, function: FunctionType) -> Any:
        original = getattr(function, "_torchdynamo_orig_callable", None)
        if original is not None and not is_user_code(function.__code__):
            self._assume_uncompiled()
            return self.copy(original, self._path[-1])
        is_users = is_user_code(function.__code__)
        if not is_users and not function.__closure__:
            return function
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        theirs = function.__globals__
        namespace = theirs
        if is_users:
            namespace = vars(self._open_module(theirs, function.__module__ or ""))
        copied = FunctionType(function.__code__, namespace, function.__name__, None, cells or None)
        self._keep(function, copied)
        copied.__defaults__ = self.copy(function.__defaults__)
        copied.__kwdefaults__ = self.copy(function.__kwdefaults__)
        copied.__qualname__, copied.__module__ = function.__qualname__, function.__module__
        copied.__dict__.update(self._copy_dict(function.__dict__))
        names = function.__code__.co_freevars
        for name, cell, old in zip(names, cells, function.__closure__ or (), strict=True):
            try:
                content = old.cell_contents
            except ValueError:  # not assigned yet
                continue
            cell.cell_contents = self._copy_named(content, name)
        if is_users:
            self._fill_namespace(theirs, *_list_reached(function.__code__))
        return copied

    def _open_module(self, theirs: dict[str, Any], name: str) -> ModuleType:
        """Return the copy of a module; what is not copied into it yet refuses to be used."""
        if id(theirs) in self._modules:
            return self._modules[id(theirs)]
        copied = self._modules[id(theirs)] = ModuleType(name)
        self._originals.append(theirs)
        ours = vars(copied)
        for key, value in list(theirs.items()):
            if key in _DRY_BUILTINS and not _is_users(value):
                # IPython has an ``open`` of its own among the user's names.
                continue
            if key.startswith("__") or _is_shared(value):
                ours[key] = value
            else:
                advice = "it can't be followed how the step reaches it. Pass it as an argument."
                ours[key] = RefusingProxy(value, f"The step uses `{key}`", advice)
        ours["__builtins__"] = {**vars(builtins), **_DRY_BUILTINS, "__import__": self._import}
        return copied

    def _fill_namespace(
        self, theirs: dict[str, Any], names: Sequence[str], attributes: Sequence[str]
    ) -> None:
        """Copy what a function reaches of a module by the names of globals and imported modules.

        In modules of the user's among these, it may reach what has one of its attributes' names.
        """
        ours = vars(self._open_module(theirs, str(theirs.get("__name__", ""))))
        for name in names:
            value = theirs.get(name, sys.modules.get(name))
            if _is_users_module(value):
                self.copy(value)
                if (id(value), attributes) not in self._filled:
                    self._filled.add((id(value), attributes))
                    self._fill_namespace(vars(value), attributes, attributes)
            if name in theirs and (name in ours or name not in _DRY_BUILTINS):
                ours[name] = self._copy_named(value, name)

    def _copy_module_object(self, module: ModuleType) -> ModuleType:
        if not _is_users_module(module):
            return module
        return self._open_module(vars(module), module.__name__)

    def _import(self, name: str, *args: Any, **options: Any) -> Any:
        """Import a module in the step: the copy of one of the user's."""
        module = builtins.__import__(name, *args, **options)
        if _is_users_module(module) and id(module) not in self._memo:
            raise RefusedError(
                f"The step imports `{name}` in a way that can't be followed. Import it before."
            )
        return self._memo.get(id(module), module)

    def _copy_named(self, value: Any, name: str) -> Any:
        """Return the copy of what the user has by a name, wherever it is reached from."""
        path, self._path = self._path, []
        try:
            return self.copy(value, name)
        finally:
            self._path = path

    def _copy_method(self, method: MethodType) -> MethodType:
        owner = self.copy(method.__self__, "self")
        return MethodType(self.copy(method.__func__, method.__func__.__name__), owner)

    def _copy_builtin(self, function: Any) -> Any:
        """Copy what is bound to an object, as the ``append`` of a list."""
        owner = function.__self__
        if owner is None or isinstance(owner, ModuleType):
            return function
        if getattr(owner, function.__name__, None) != function:
            return function
        copied = self.copy(owner, function.__name__)
        return function if copied is owner else getattr(copied, function.__name__)

    # -- Classes -----------------------------------------------------------------------------------

    def _copy_class(self, kind: Any) -> Any:
        if not _is_users_class(kind) or issubclass(kind, (self._torch.Tensor, enum.Enum)):
            return kind
        meta = self.copy(type(kind), type(kind).__name__)
        bases = tuple([self.copy(base, base.__name__) for base in kind.__bases__])
        if id(kind) in self._memo:  # one of these holds it
            return self._memo[id(kind)]
        # Attributes that a class gets from the call that makes it.
        made_with_class = ("__dict__", "__weakref__", "_abc_impl", "_backward_cls")
        own = {name: member for name, member in vars(kind).items() if name not in made_with_class}
        first = {name: member for name, member in own.items() if _is_pythons(name, member)}
        if issubclass(kind, self._torch.autograd.Function):
            copied = meta(kind.__name__, bases, first)
        else:
            # The metaclass has done its work: what it made of the class is copied.
            make = abc.ABCMeta.__new__ if issubclass(meta, abc.ABCMeta) else type.__new__
            self._is_making = True
            try:
                copied = make(meta, kind.__name__, bases, first)
            finally:
                self._is_making = False
        self._keep(kind, copied)
        slot_types = (types.MemberDescriptorType, types.GetSetDescriptorType)
        for name, member in own.items():
            if name not in first and type(member) not in slot_types:
                type.__setattr__(copied, name, self._copy_member(member, f"{kind.__name__}.{name}"))
        return copied

    def _copy_member(self, value: Any, name: str) -> Any:
        try:
            copied = self._copy_named(value, name)
        except PredictionError as exc:
            # Most steps don't use it.
            return RefusingProxy(value, f"The step uses `{name}`", str(exc))
        if not name.endswith(".__init_subclass__"):
            return copied

        def begin_subclass(kind: type, /, **options: Any) -> None:
            # A copy of a subclass was registered already, as what it is a copy of.
            if not self._is_making:
                copied.__get__(None, kind)(**options)

        return classmethod(begin_subclass)

    def _copy_wrapped(self, value: Any) -> Any:
        return type(value)(self.copy(value.__func__, self._path[-1]))

    def _copy_property(self, value: property) -> property:
        own = [
            self.copy(function, self._path[-1]) for function in (value.fget, value.fset, value.fdel)
        ]
        return property(own[0], own[1], own[2], value.__doc__)

    def _copy_cached(self, value: Any) -> Any:
        """Copy a function of functools.lru_cache, so that the user's cache gets nothing."""
        return functools.lru_cache(**value.cache_parameters())(self.copy(value.__wrapped__))

    def _copy_weakref(self, value: Any) -> Any:
        target = value()
        return value if target is None else weakref.ref(self.copy(target))

    # -- Anything else -----------------------------------------------------------------------------

    def _copy_reduced(self, value: Any, kind: type) -> Any:
        """Copy an object as ``copy.deepcopy`` does.

        https://docs.python.org/3/library/pickle.html#object.__reduce__
        """
        try:
            if (deepcopy := getattr(kind, "__deepcopy__", None)) is not None:
                copied = deepcopy(value, self._memo)
                # An object whose ``__deepcopy__`` returns itself would keep the dry run's changes.
                if copied is not value or not hasattr(value, "__dict__"):
                    return copied
            reducer = copyreg.dispatch_table.get(kind)
            reduced = reducer(value) if reducer else value.__reduce_ex__(4)
        except (PredictionError, RecursionError):
            raise
        except Exception:
            if vars(object)["__new__"] is kind.__new__ and hasattr(value, "__dict__"):
                # Objects that refuse pickling may be copied within the process.
                return self._copy_attributes(value)
            raise
        return value if isinstance(reduced, str) else self._rebuild(value, reduced)

    def _refuse_copy(self, value: Any, exc: Exception) -> PredictionError:
        return PredictionError(
            f"`{self._say_path()}` is a {name_type(value)}, which can't be copied "
            f"({describe_exception(exc)}). Take it out of the step."
        )

    def _rebuild(self, value: Any, reduced: tuple[Any, ...]) -> Any:
        """Return the copy of an object from what its pickling says of it."""
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        copied = self._keep(value, make(*(self.copy(argument) for argument in arguments)))
        if copied is not self._memo[id(value)]:
            return self._memo[id(value)]
        if state is not None:
            self._set_state(copied, self.copy(state))
        for item in items or ():
            copied.append(self.copy(item))
        for key, item in pairs or ():
            copied[self.copy(key)] = self.copy(item, str(key)[:40])
        return copied

    def _set_state(self, copied: Any, state: Any) -> None:
        # An object that hands on what it is asked for has no attribute to do so yet.
        if hasattr(type(copied), "__setstate__"):
            copied.__setstate__(state)
            return
        slots: Any = None
        if isinstance(state, tuple) and len(state) == 2:
            state, slots = state
        if state is not None:
            own = vars(copied)
            own.update(state)
            if len(own) == len(state):
                # Several instances may have one dict for their attributes, or be their own.
                object.__setattr__(copied, "__dict__", state)
        for name, value in (slots or {}).items():
            object.__setattr__(copied, name, value)

    def _say_path(self) -> str:
        shown = [name for name in self._path if name and not name.startswith("_")]
        return ".".join(shown) or "the step"


_COPIERS: dict[type, Callable[[Copier, Any], Any]] = {
    dict: Copier._copy_dict,  # noqa: SLF001 - the class's own table
    list: Copier._copy_list,  # noqa: SLF001
    tuple: Copier._copy_tuple,  # noqa: SLF001
    set: Copier._copy_set,  # noqa: SLF001
    frozenset: Copier._copy_frozenset,  # noqa: SLF001
    FunctionType: Copier._copy_function,  # noqa: SLF001
    MethodType: Copier._copy_method,  # noqa: SLF001
    ModuleType: Copier._copy_module_object,  # noqa: SLF001
    property: Copier._copy_property,  # noqa: SLF001
    staticmethod: Copier._copy_wrapped,  # noqa: SLF001
    classmethod: Copier._copy_wrapped,  # noqa: SLF001
    types.BuiltinFunctionType: Copier._copy_builtin,  # noqa: SLF001
    functools._lru_cache_wrapper: Copier._copy_cached,  # noqa: SLF001
    weakref.ref: Copier._copy_weakref,  # noqa: SLF001
    types.MappingProxyType: lambda self, value: types.MappingProxyType(self.copy(dict(value))),
    collections.OrderedDict: lambda self, value: self._copy_dict(value, collections.OrderedDict()),
    type(threading.Lock()): lambda _self, _value: threading.Lock(),
    type(threading.RLock()): lambda _self, _value: threading.RLock(),
}


def _list_reached(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the globals and imported modules of code, and all names in it.

    Those of the code within it are among them.
    """
    names, attributes = set[str](), set(code.co_names)
    of_globals = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
    for instruction in dis.get_instructions(code):
        if instruction.opname in of_globals:
            names.add(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            names.update((instruction.argval, instruction.argval.partition(".")[0]))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = _list_reached(constant)
            names.update(inner[0])
            attributes.update(inner[1])
    return tuple(sorted(names)), tuple(sorted(attributes))


def _is_users_class(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and _is_user_file(file))


def _is_users_module(value: object) -> TypeGuard[ModuleType]:
    if type(value) is not ModuleType:
        return False
    file = getattr(value, "__file__", None)
    return value.__name__ == "__main__" or (file is not None and _is_user_file(file))


def _is_users(value: object) -> bool:
    return type(value) is FunctionType and is_user_code(value.__code__)


def _is_shared(value: object) -> bool:
    """Return whether a global can be shared with the copies: a constant, or a library's."""
    kind = type(value)
    if issubclass(kind, type):
        return not _is_users_class(value)  # type: ignore[arg-type]
    if issubclass(kind, ModuleType):
        return not _is_users_module(value)
    if kind is FunctionType:
        return not _is_users(value) and not value.__closure__  # type: ignore[attr-defined]
    return kind in _SHARED_TYPES


def _is_pythons(name: str, value: object) -> bool:
    """Return whether an attribute of a class, as ``__slots__``, is set where the class is made."""
    is_dunder = name.startswith("__") and name.endswith("__")
    is_method = callable(value) or isinstance(value, (classmethod, property))
    return is_dunder and not is_method and name != "__abstractmethods__"


def _open_late(*args: Any, **options: Any) -> Any:
    # ``effects.py`` replaces ``builtins.open`` by one that refuses to write.
    return builtins.open(*args, **options)  # noqa: PTH123 - the caller's own


def _refuse_input(*_args: object, **_options: object) -> NoReturn:
    raise RefusedError("The step calls `input()`. Read the input before the step.")


#: Python's own names for a step that neither prints, asks nor writes files.
_DRY_BUILTINS: dict[str, Any] = {
    "input": _refuse_input,
    "print": lambda *_args, **_options: None,
    "open": _open_late,
}
