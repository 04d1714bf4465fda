"""Copy what a step reaches, with another tensor in the place of each tensor.

Everything is copied in one memo, so that what was one object stays one: an optimizer's parameters
are the model's. Functions of the user's get copies of the globals that they read, and nothing of
the user's namespace is assigned. What can't be copied has a stand-in that refuses to be used.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import copyreg
import dis
import enum
import functools
import io
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn, TypeGuard

from gpumemwidget.errors import PredictionError, describe_exception, name_type
from gpumemwidget.prediction.dry.effects import RefusedError

#: Arrays above this are shared with the copy, which can't write to them.
_MAX_ARRAY_BYTES = 16 << 20

_OUR_FOLDER = str(Path(__file__).resolve().parents[2])
_LIBRARY_FOLDERS = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    str(Path(threading.__file__).parent),
)
_LIBRARY_PARTS = ("site-packages", "dist-packages")

_SHARED_TYPES = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented)),
        *(range, slice, property, staticmethod, classmethod, CodeType, ModuleType),
        *(types.MethodWrapperType, types.WrapperDescriptorType),
        *(types.MethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
        *(types.GenericAlias, types.UnionType),
    }
)
_GLOBAL_INSTRUCTIONS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})


def is_user_code(code: CodeType) -> bool:
    """Return whether code is the user's: of a cell or a file outside Python's and pip's folders."""
    return _is_user_file(code.co_filename)


@functools.lru_cache(maxsize=4096)
def _is_user_file(filename: str) -> bool:
    if not filename or filename.startswith(("<frozen", _OUR_FOLDER)):
        return False
    if filename.startswith("<"):
        return True
    return not (
        filename.startswith(_LIBRARY_FOLDERS)
        or any(part in _LIBRARY_PARTS for part in Path(filename).parts)
    )


class Undry:
    """In the place of what can't be used without a trace, as a loader or an open file.

    Its attributes can be read, as a loader's ``batch_size``; whatever else is asked of it, is
    refused.

    Args:
        value: the user's own object.
        what: what it is, for the refusal: "`loader` is a DataLoader".
    """

    def __init__(self, value: object, what: str) -> None:
        self._value = value
        self._what = what

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise RefusedError(
            f"{self._what}: it would be used for real. Take what the step needs from it before, "
            "and pass that."
        )

    __iter__ = __next__ = __call__ = __enter__ = __getitem__ = _refuse

    def __len__(self) -> int:
        n_items: int = len(self._value)  # type: ignore[arg-type]
        return n_items

    def __getattr__(self, name: str) -> object:
        value = getattr(self._value, name)
        return self._refuse if callable(value) else value


class StillWidget:
    """In the place of a widget, as of a progress bar: it can be read, and nothing changes it.

    Args:
        value: the user's own object, of traitlets' ``HasTraits``.
        kind: the class ``HasTraits``.
    """

    def __init__(self, value: object, kind: type) -> None:
        vars(self).update(_value=value, _kind=kind)

    def __getattr__(self, name: str) -> Any:
        return self._still(getattr(self._value, name))

    def _still(self, value: Any) -> Any:
        if isinstance(value, self._kind):
            return StillWidget(value, self._kind)
        if isinstance(value, (list, tuple)):
            return type(value)([self._still(each) for each in value])
        return (lambda *_args, **_options: None) if callable(value) else value

    def __setattr__(self, name: str, value: object) -> None:
        """Leave the widget as it is."""


class Copier:
    """Copies objects, each once.

    Args:
        torch: the imported module ``torch``.
        convert: takes a tensor, whether it is an optimizer's count of steps, which stays on the
            CPU, and where it was found; returns the one in its place.
    """

    def __init__(self, torch: Any, convert: Callable[[Any, bool, str], Any]) -> None:
        self._torch = torch
        self._convert = convert
        self._memo: dict[int, Any] = {}
        self._globals: dict[int, dict[str, Any]] = {}
        # An object that is gone would leave its number to another.
        self._originals: list[object] = []
        self._path: list[str] = []
        #: Copies of modules, each with where it was found: ``model``, ``trainer.net``.
        self.modules: list[tuple[str, Any]] = []
        #: Copies of optimizers.
        self.optimizers: list[Any] = []
        #: Sentences on what was copied as something else.
        self.assumptions: list[str] = []
        #: Classes and modules of the user's, each with copies of attributes that have one.
        self._namespaces: dict[type | ModuleType, dict[str, Any]] = {}
        self._seen: set[type] = set()
        #: The classes of what was copied.
        self._kinds: set[type] = set()

    def copy(self, value: Any, name: str = "") -> Any:
        """Return the copy of an object.

        Args:
            value: the object.
            name: what the user calls it.

        Raises:
            PredictionError: it, or what it holds, has neither a copy nor a stand-in.
        """
        kind = type(value)
        if kind in _SHARED_TYPES:
            return value
        number = id(value)
        if number in self._memo:
            return self._memo[number]
        self._path.append(name)
        try:
            if issubclass(kind, type):
                self._copy_class(value)
                return value
            copied = self._keep(value, self._copy_new(value, kind))
            if kind not in self._kinds:
                self._kinds.add(kind)
                self._share_attributes(value, copied)
                self._copy_class(kind)
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
        copy = _COPIERS.get(kind)
        if copy is not None:
            return copy(self, value)
        if isinstance(value, self._torch.Tensor):
            return self._copy_tensor(value)
        if any(value is each for each in _list_streams()):
            return io.StringIO()
        if (what := self._name_undry(value, kind)) is not None:
            return Undry(value, f"`{self._say_path()}` {what}")
        for kinds, copy_kind in self._list_kinds():
            # The class is asked, not the object: a mock tells the class that it stands for.
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
            yield traitlets.HasTraits, lambda value: StillWidget(value, traitlets.HasTraits)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            yield numpy.ndarray, self._copy_array

    def _name_undry(self, value: object, kind: type) -> str | None:
        """Return what an object is that has effects when it is used, else ``None``."""
        data: Any = sys.modules.get("torch.utils.data")
        if data is not None and isinstance(value, (data.DataLoader, _loader_iterator(data))):
            return "is a DataLoader" if isinstance(value, data.DataLoader) else "reads a DataLoader"
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

    def _copy_tensor(self, tensor: Any, source: Any = None) -> Any:
        """Copy a tensor; with a ``source``, in the storage of the copy of that."""
        real = tensor if source is None else source
        what = self._name_unpredicted(tensor)
        if what is not None:
            raise PredictionError(
                f"`{self._say_path()}` is a {what}, which can't be predicted. Predict with plain "
                "tensors of the same sizes."
            )
        copied = self._keep(tensor, self._convert(real, False, self._say_path()))
        own = {name: each for name, each in vars(tensor).items() if name not in vars(copied)}
        if own:
            vars(copied).update(self._copy_dict(own))
        for hook in (tensor._backward_hooks or {}).values():  # noqa: SLF001 - has no public name
            copied.register_hook(self.copy(hook, "hook"))
        after = getattr(tensor, "_post_accumulate_grad_hooks", None)
        for hook in (after or {}).values():
            copied.register_post_accumulate_grad_hook(self.copy(hook, "hook"))
        return copied

    def _name_unpredicted(self, tensor: Any) -> str | None:
        """Return what a tensor is that has no fake, else ``None``."""
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
                f"`{self._say_path()}` is a scripted module, which can't be carried out dry. "
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
        if isinstance(module, torch.nn.RNNBase):
            self._flatten_weights(module)
        copied = self._copy_attributes(module)
        if vars(copied).get("_compiled_call_impl") is not None:
            vars(copied)["_compiled_call_impl"] = None
            self._assume_uncompiled()
        self.modules.append((path, copied))
        return copied

    def _flatten_weights(self, module: Any) -> None:
        """Copy the weights of a recurrent network on the CPU into one storage.

        There they are once the module is moved to the device (``flatten_parameters``), but for
        dtypes that PyTorch does not take for cuDNN's, as bfloat16.
        """
        torch = self._torch
        weights = module._flat_weights  # noqa: SLF001 - has no public name
        is_new = all(
            type(each) is torch.nn.Parameter
            and each.device.type == "cpu"
            and id(each) not in self._memo
            for each in weights
        )
        numbers, dtypes = {id(each) for each in weights}, {each.dtype for each in weights}
        is_cudnns = dtypes <= torch.backends.cudnn.CUDNN_TENSOR_DTYPES
        if not is_new or not is_cudnns or len(numbers) < len(weights) or len(dtypes) != 1:
            return
        sources = []
        with torch.utils._mode_utils.no_dispatch():  # noqa: SLF001 - has no public name
            # Memory that nobody writes to is not taken.
            flat = torch.empty(sum(each.numel() for each in weights), dtype=weights[0].dtype)
            for part, each in zip(flat.split([w.numel() for w in weights]), weights, strict=True):
                source = torch.nn.Parameter(part.view(each.shape), each.requires_grad)
                source.grad = each.grad
                sources.append(source)
        # The whole comes first: its storage would grow with every part.
        whole = self._convert(flat, False, "")
        for each, source in zip(weights, sources, strict=True):
            self._copy_tensor(each, source)
        del whole

    def _assume_uncompiled(self) -> None:
        sentence = (
            f"`{self._say_path()}` is compiled: it was carried out as it is written, operator by "
            "operator, which takes as much or more"
        )
        if sentence not in self.assumptions:
            self.assumptions.append(sentence)

    def _copy_attributes(self, value: Any) -> Any:
        """Copy an object attribute by attribute, whatever its pickling would say."""
        kind: Any = type(value)
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
        if array.nbytes <= _MAX_ARRAY_BYTES:
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
        namespace = self._open_globals(function) if is_users else function.__globals__
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
            self._fill_globals(function, namespace)
        return copied

    def _open_globals(self, function: FunctionType) -> dict[str, Any]:
        """Return the namespace for the copies of a module's functions."""
        theirs = function.__globals__
        ours = self._globals.get(id(theirs))
        if ours is None:
            ours = self._globals[id(theirs)] = {**theirs, "__builtins__": _dry_builtins()}
        return ours

    def _fill_globals(self, function: FunctionType, namespace: dict[str, Any]) -> None:
        for name in _list_globals(function.__code__):
            if name in _REPLACED and name in namespace and not _is_users(namespace[name]):
                # IPython has an ``open`` of its own among the user's names.
                del namespace[name]
            elif _is_users_module(module := function.__globals__.get(name)):
                self._copy_attributes_of(module, _list_names(function.__code__))
            elif name in function.__globals__:
                namespace[name] = self._copy_named(function.__globals__[name], name)

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
        if owner is None or isinstance(owner, (type, ModuleType)):
            return function
        if getattr(owner, function.__name__, None) != function:
            return function
        copied = self.copy(owner, function.__name__)
        return function if copied is owner else getattr(copied, function.__name__)

    # -- Classes and modules of the user's ---------------------------------------------------------

    def _copy_class(self, kind: type) -> None:
        """Copy what a class of the user's, and those above it, would share with the copies."""
        for each in kind.__mro__:
            if each not in self._seen and _is_users_class(each):
                self._seen.add(each)
                self._copy_attributes_of(each, list(vars(each)))

    def _share_attributes(self, value: Any, copied: Any) -> None:
        """Let new instances share the copy of a class's attribute that all have as their dict."""
        own = getattr(value, "__dict__", None)
        for kind in type(value).__mro__ if type(own) is dict else ():
            for name, each in vars(kind).items():
                if each is own:
                    self._namespaces.setdefault(kind, {})[name] = vars(copied)

    def _copy_attributes_of(self, namespace: type | ModuleType, names: Iterable[str]) -> None:
        """Copy attributes of a class or a module of the user's that the copies must not share."""
        copies = self._namespaces.setdefault(namespace, {})
        for name in names:
            value = vars(namespace).get(name)
            if name in copies:
                continue
            copied = self._copy_shared(name, value)
            if copied is value and isinstance(namespace, ModuleType):
                copied = self._copy_named(value, name)
            if copied is not value:
                copies[name] = copied

    def _copy_shared(self, name: str, value: Any) -> Any:
        """Return the copy of an attribute; the attribute itself where nothing is to be copied."""
        is_pythons = name.startswith("__") and name.endswith("__")
        kind = type(value)
        if kind is FunctionType:
            if name in _MAKERS or not self._reaches_objects(value):
                return value
            return _call_in_thread(value, self.copy(value, name))
        if kind in (staticmethod, classmethod) and type(value.__func__) is FunctionType:
            function = self._copy_shared(name, value.__func__)
            return value if function is value.__func__ else kind(function)
        if kind is property:
            own = (value.fget, value.fset, value.fdel)
            ours = [self._copy_shared("", each) for each in own]
            is_same = all(mine is theirs for mine, theirs in zip(ours, own, strict=True))
            return value if is_same else property(ours[0], ours[1], ours[2], value.__doc__)
        held = (*_CONTAINERS, self._torch.Tensor, self._torch.nn.Module)
        return value if is_pythons or not isinstance(value, held) else self.copy(value, name)

    @contextlib.contextmanager
    def namespaces_changed(self) -> Iterator[None]:
        """Give the user's classes and modules their copied attributes; put all back afterwards."""
        kept = {namespace: dict(vars(namespace)) for namespace in self._namespaces}
        try:
            for namespace, copies in self._namespaces.items():
                for name, copied in copies.items():
                    _set_attribute(namespace, name, copied)
            yield
        finally:
            for namespace, own in kept.items():
                for name, value in list(vars(namespace).items()):
                    if name not in own:
                        delattr(namespace, name)
                    elif value is not own[name]:
                        _set_attribute(namespace, name, own[name])

    def _reaches_objects(self, function: FunctionType) -> bool:
        """Return whether a method reads globals that the copies must not share."""
        if not is_user_code(function.__code__) and not function.__closure__:
            return False
        if set(function.__code__.co_freevars) - {"__class__"}:
            return True
        for name in _list_globals(function.__code__):
            value = function.__globals__.get(name)
            if type(value) in _SHARED_TYPES or isinstance(value, type):
                continue
            if type(value) is FunctionType and not is_user_code(value.__code__):
                continue
            return True
        return False

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
        copied = self._keep(value, make(*(self.copy(each) for each in arguments)))
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
                # Several instances may have one dict for their attributes.
                object.__setattr__(copied, "__dict__", state)
        for name, each in (slots or {}).items():
            object.__setattr__(copied, name, each)

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
    types.BuiltinFunctionType: Copier._copy_builtin,  # noqa: SLF001
    functools._lru_cache_wrapper: Copier._copy_cached,  # noqa: SLF001
    weakref.ref: Copier._copy_weakref,  # noqa: SLF001
    collections.OrderedDict: lambda self, value: self._copy_dict(value, collections.OrderedDict()),
    type(threading.Lock()): lambda _self, _value: threading.Lock(),
    type(threading.RLock()): lambda _self, _value: threading.RLock(),
}


def _loader_iterator(data: Any) -> type:
    kind: type = data.dataloader._BaseDataLoaderIter  # noqa: SLF001 - has no public name
    return kind


def _list_globals(code: CodeType) -> Iterator[str]:
    """Yield the names of the globals that code reads or assigns, and the code within it."""
    names = {
        each.argval for each in dis.get_instructions(code) if each.opname in _GLOBAL_INSTRUCTIONS
    }
    yield from sorted(names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_globals(constant)


def _list_names(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in code, and in the code within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_names(constant)


#: Methods that belong to the making of classes and objects.
_MAKERS = ("__new__", "__init_subclass__", "__class_getitem__", "__set_name__")
_CONTAINERS = (list, dict, set, collections.deque)


def _is_users_class(kind: type) -> bool:
    """Return whether a class is of a cell or a file of the user's."""
    if kind.__module__ in sys.builtin_module_names or isinstance(kind, enum.EnumMeta):
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or file is None or _is_user_file(file)


def _list_streams() -> tuple[Any, ...]:
    return sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__


def _is_users_module(value: object) -> TypeGuard[ModuleType]:
    return type(value) is ModuleType and _is_user_file(getattr(value, "__file__", None) or "")


def _call_in_thread(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``ours`` in this thread, and ``theirs`` in others."""
    thread = threading.get_ident()

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (ours if threading.get_ident() == thread else theirs)(*args, **kwargs)

    return call


def _set_attribute(namespace: type | ModuleType, name: str, value: object) -> None:
    """Set an attribute; of a class without asking its metaclass."""
    (type if isinstance(namespace, type) else ModuleType).__setattr__(namespace, name, value)


#: Python's own functions that a dry run calls in another way, or not at all.
_REPLACED = ("open", "input")


def _is_users(value: object) -> bool:
    code = getattr(value, "__code__", None)
    return isinstance(code, CodeType) and is_user_code(code)


def _dry_builtins() -> dict[str, Any]:
    """Return Python's own names for a step that neither prints, asks nor writes files."""
    names = dict(vars(builtins))
    names["input"] = _refuse_input
    names["print"] = lambda *_args, **_options: None
    # ``effects.py`` replaces ``builtins.open`` later by one that refuses to write.
    names["open"] = _open_late
    return names


def _open_late(*args: Any, **options: Any) -> Any:
    return builtins.open(*args, **options)  # noqa: PTH123 - the caller's own


def _refuse_input(*_args: object, **_options: object) -> NoReturn:
    raise RefusedError("The step calls `input()`, which a dry run can't. Do it before.")
