"""Read tensors, storages and autograd nodes without running code of the user's.

Memory belongs to storages, not to tensors: a view, a detached copy and a tied weight share one. All
reading of tensors and autograd graphs is here, in a form that calls no hook, no
``__torch_function__`` and no ``__torch_dispatch__``: a saved tensor is read through
``_raw_saved_*`` and its ``.data``, because ``_saved_*`` runs unpack hooks, and under gradient
checkpointing that recomputes the activations
(https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html).

To look at a node makes a Python object for it, and since torch 2.10 that object stays as long as
the node. When a chain of such nodes goes, each one's end is called from within that of the one
before it: at some 45,000 in a row (torch 2.13, a stack of 8 MiB) the process crashes, which a chain
never seen from Python would survive. ``total_loss += loss`` makes such chains. So the number of
nodes that are looked at is limited.
"""

# ruff: noqa: SLF001 - what torch says of these things it says in private attributes.
from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import compress
from types import GetSetDescriptorType, ModuleType
from typing import Any, NamedTuple, Protocol

from gpumemwidget.backends.hooks import find_torch as find_imported_torch
from gpumemwidget.backends.host import list_mapped_files
from gpumemwidget.model.devices import HOST, Block
from gpumemwidget.model.ownership import MemorySource
from gpumemwidget.ownership.graph.objects import (
    collect_living,
    is_one_of,
    list_bases,
    name_class,
    read_class_attribute,
    read_type_dict,
)

#: Maximum number of autograd nodes with a Python object because of us: a fifth of what an ordinary
#: stack bears; the graph of one step of a large model has some 5,000.
MOST_NODES = 10_000


#: The ids of the autograd nodes that have a Python object because of us, in this process; some may
#: be gone: they are looked up anew when there are many.
_node_ids: set[int] = set()

#: The ids of tensors and nodes that were asked for their nodes.
_read_ids: set[int] = set()

#: The ids of the classes of all these: other objects get the ids of nodes that are gone.
_class_ids: set[int] = set()


class AutogradNodeLimit:
    """Decides which tensors and autograd nodes may be asked for their nodes, for one walk.

    Args:
        is_needed: ``False`` before torch 2.10, where a node's object goes when nobody uses it.
    """

    def __init__(self, *, is_needed: bool) -> None:
        self._is_needed = is_needed
        self._is_counted = False
        self._is_closed = False
        #: True once a tensor or node was not asked.
        self.is_spent = False

    def close(self) -> None:
        """Allow no node at all: their graphs may change while they are read."""
        self._is_closed = True

    def has_room(self) -> bool:
        """Return whether a node may be looked at for the first time.

        Once many were, the ids of those that are gone are dropped, in one pass over all objects.
        """
        if self._is_needed and len(_node_ids) >= MOST_NODES and not self._is_counted:
            self._is_counted = True
            living: set[int] = set()
            collect_living(_select_ids, living.update)
            _node_ids.intersection_update(living)
            _read_ids.intersection_update(living)
        return not self._is_needed or len(_node_ids) < MOST_NODES

    def may_ask(self, target: object) -> bool:
        """Return whether a tensor or node may be asked for its nodes."""
        # Where a graph was read before, only nodes that were added since get a new object.
        may = not self._is_closed and (
            self.has_room() or (id(target) in _read_ids and len(_node_ids) < 2 * MOST_NODES)
        )
        self.is_spent = self.is_spent or not may
        return may

    def note(self, target: object, nodes: Sequence[object]) -> None:
        """Remember what was asked, and the nodes that it named."""
        if self._is_needed:
            _read_ids.add(id(target))
            _node_ids.update(map(id, nodes))
            _class_ids.update(map(id, map(type, (target, *nodes))))


def _select_ids(living: list[object]) -> Iterator[int]:
    """Return the ids of objects whose classes were met, at the speed of C."""
    is_met = map(_class_ids.__contains__, map(id, map(type, living)))
    return compress(map(id, living), is_met)


def round_up(n_bytes: int, device: str) -> int:
    """Round a request up as the device's allocator does, if that is known."""
    granularity_bytes = 512 if device.partition(":")[0] in ("cuda", "xpu") else 1
    return -(-n_bytes // granularity_bytes) * granularity_bytes


def find_torch() -> ModuleType | None:
    """Return torch once the user's import of it is through and all that is read here is there."""
    torch = find_imported_torch()
    if torch is None or not {"Tensor", "UntypedStorage", "nn", "optim"} <= vars(torch).keys():
        return None
    return torch


class StorageInfo(NamedTuple):
    """One storage: memory that exists once, however many tensors look at it."""

    # Ten thousand are made in a walk, and a tuple is made in half the time of a frozen dataclass.
    device: str
    n_bytes: int
    #: Two storages over the same memory (DLPack) have the same address.
    address: int
    source: MemorySource = MemorySource.OWN
    #: The allocator's block around it, where the walk has the device's blocks.
    block: Block | None = None

    def find_key(self, *, rounded: bool) -> tuple[str, int]:
        """Return what is the same for storages that share a block, or else an address."""
        block = self.block if rounded else None
        return self.device, self.address if block is None else block.address

    @property
    def is_borrowed(self) -> bool:
        """True where something that can't be seen has lent the memory."""
        return self.source is MemorySource.LENT

    @property
    def freed_bytes(self) -> int:
        """Bytes by which the device's allocated memory falls when the storage goes."""
        if self.block is not None:
            return self.block.n_bytes
        # What NumPy lends on the host is malloc's, as is torch's own.
        is_lent_on_host = self.is_borrowed and self.device == HOST
        is_counted = self.source is MemorySource.OWN or is_lent_on_host
        return round_up(self.n_bytes, self.device) if is_counted else 0


class BlockFinder(Protocol):
    """Finds the allocator's blocks by address, on the devices whose allocators list them."""

    @property
    def devices(self) -> Collection[str]:
        """The devices whose blocks are known."""

    def find(self, device: str, address: int) -> Block | None:
        """Return the block in use that contains an address; ``None`` if there is none."""


@dataclass(slots=True)
class TensorParts:
    """The parts of a tensor beside its Python attributes."""

    storage: object | None = None
    #: Tensors that its C++ part refers to: the gradient, a view's base.
    tensors: tuple[object, ...] = ()
    #: The gradient alone.
    grad: object | None = None
    #: The tensor that it is a view of, alone.
    base: object | None = None
    #: True if an autograd node has computed it: it has a ``grad_fn``.
    is_computed: bool = False
    #: Storages of inner tensors that have no Python object (sparse indices and values).
    inner_storages: tuple[object, ...] = ()
    #: True for memory that torch does not show: a library's own, or within a transform's wrapper.
    is_opaque: bool = False


@dataclass(frozen=True, slots=True)
class _NodeClass:
    """How to read autograd nodes of a class."""

    #: ``_raw_saved_self`` and the like, and ``variable`` of the node that accumulates a gradient.
    raw_names: tuple[str, ...]
    #: True for a ``torch.autograd.Function``, whose node is its context too.
    is_python: bool
    #: True if its nodes may have saved tensors that no attribute shows.
    is_opaque: bool


class TorchReader:
    """Reads tensors, storages and autograd nodes of one torch module, for one walk."""

    def __init__(self, torch: Any, blocks: BlockFinder | None = None) -> None:
        self.torch = torch
        self._blocks = blocks
        base = torch._C.TensorBase
        self.tensor_type: type = base
        self.storage_type: Any = torch.UntypedStorage
        self.module_type: type = torch.nn.Module
        self.parameter_type: type = torch.nn.Parameter
        self.optimizer_type: type = torch.optim.Optimizer
        self._base = base
        self._read_grad = base.grad.__get__
        self._read_base = base._base.__get__
        self._read_version = base._version.__get__
        self._is_leaf = base.is_leaf.__get__
        self._read_grad_fn = base.grad_fn.__get__
        self._read_retains_grad = base.retains_grad.__get__
        self._read_untyped = base.untyped_storage
        self._read_device = self.storage_type.device.__get__
        self._read_address = self.storage_type.data_ptr
        self._read_nbytes = self.storage_type.nbytes
        self._is_resizable = self.storage_type.resizable
        self._read_cdata = self.storage_type._cdata.__get__
        self._owner_offset = _find_owner_offset(torch)
        #: The first and last addresses of mapped files and shared memory, once they were needed.
        self._mapped: list[tuple[int, int]] | None = None
        #: By torch's own devices; ``None`` for those that have no memory.
        self._device_names: dict[Any, str | None] = {}
        self._disabled_dispatch = torch._C._disabled_torch_dispatch_impl
        #: The classes of which anything is known by their ids: held here, so that an id stays its
        #: own. A weak reference with a callback would run our code within the user's.
        self.held_classes: dict[int, type] = {}
        self._dispatched: dict[int, bool] = {}
        self._node_classes: dict[int, _NodeClass] = {}
        #: False for PyTorch 2.4, whose ``SavedTensor`` has no ``data``.
        self._tells_saved = hasattr(torch._C._autograd.SavedTensor, "data")
        self._count_storage_users = torch._C._storage_Use_Count
        #: Returns how many C++ references a tensor has.
        self.count_tensor_users: Callable[[Any], int] = base._use_count
        #: True if the C++ part of a tensor, a storage and an autograd node holds the Python object
        #: while others use it.
        self.cpp_holds_tensor, self.cpp_holds_storage, self.cpp_holds_node = _try_counts(torch)
        #: What every look at an autograd node counts against.
        self.node_limit = AutogradNodeLimit(is_needed=self.cpp_holds_node)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Keep ``__torch_function__``, ``__torch_dispatch__`` and modes from being called."""
        with ExitStack() as stack:
            stack.enter_context(self.torch._C.DisableTorchFunction())
            stack.enter_context(self.torch._C._DisableTorchDispatch())
            stack.enter_context(self.torch.no_grad())
            yield

    def is_dispatched(self, cls: type) -> bool:
        """Return whether a tensor class has ``__torch_dispatch__``: even its shape may be code."""
        known = self._dispatched.get(id(cls))
        if known is None:
            known = self._dispatched[self.hold_class(cls)] = self._find_dispatch(cls)
        return known

    def hold_class(self, cls: type) -> int:
        """Hold a class as long as this reader lives; return its id."""
        self.held_classes[id(cls)] = cls
        return id(cls)

    @property
    def has_met_dispatched(self) -> bool:
        """True once a tensor of a class with ``__torch_dispatch__`` was read."""
        return any(self._dispatched.values())

    def _find_dispatch(self, cls: type) -> bool:
        for base in list_bases(cls):
            if base is self.tensor_type:
                return False
            found = read_class_attribute(base, "__torch_dispatch__")
            if found is not None:
                found = getattr(found, "__func__", found) if type(found) is classmethod else found
                return found is not self._disabled_dispatch
        return False

    def is_graph_type(self, cls: type) -> bool:
        """Return whether a class is one of autograd nodes (which have no common base in Python)."""
        for base in list_bases(cls):
            found = read_class_attribute(base, "next_functions")
            if type(found) is GetSetDescriptorType:
                return True
        return False

    def read_tensor(self, tensor: Any) -> TensorParts:
        """Return the parts of a tensor; call within ``quiet()``."""
        parts = TensorParts()
        dispatched = self.is_dispatched(type(tensor))
        try:
            parts.storage = self._read_untyped(tensor)
        except RuntimeError:
            # Sparse, mkldnn and functorch tensors have none.
            if not dispatched:
                parts.inner_storages = self._read_sparse(tensor)
                parts.is_opaque = not parts.inner_storages
        try:
            parts.base = self._read_base(tensor)
            if parts.base is not None:
                parts.tensors = (*parts.tensors, parts.base)
            # A view of a dispatched class computes its grad_fn anew after a change in place, and
            # that runs its code.
            if dispatched and parts.base is not None and self._read_version(tensor) != 0:
                return parts
            parts.is_computed = not self._is_leaf(tensor)
            # To ask a tensor that has no gradient of its own for it makes torch warn.
            if not parts.is_computed or self._read_retains_grad(tensor):
                parts.grad = self._read_grad(tensor)
        except RuntimeError:
            # Views that were changed in place in a way that forbids to derive them.
            return parts
        if parts.grad is not None:
            parts.tensors = (parts.grad, *parts.tensors)
        return parts

    def read_grad_fn(self, tensor: Any) -> object | None:
        """Return the node of a tensor that is computed; ``None`` beyond the limit on nodes."""
        if not self.node_limit.may_ask(tensor):
            return None
        node: object = self._read_grad_fn(tensor)
        self.node_limit.note(tensor, (node,))
        return node

    def is_derived_by_functions(self, view: Any, base: Any) -> bool:
        """Return whether a view keeps functions that derive it from its base.

        Strides alone don't describe it (conjugated, complex as real, nested), and the functions
        hold tensors, nobody knows how often. Call within ``quiet()``.
        """
        is_nested = self._base.is_nested.__get__
        return any(self._base.is_complex(tensor) or is_nested(tensor) for tensor in (view, base))

    def read_storage(self, storage: Any) -> StorageInfo | None:
        """Return a storage's address and size; ``None`` if it has no memory of its own."""
        try:
            device = self._read_device(storage)
            name = self._device_names.get(device, "")
            if name == "":
                name = self._device_names[device] = _name_device(device)
            # To ask a fake tensor for its address makes torch warn.
            if name is None:
                return None
            address = self._read_address(storage)
            n_bytes = self._read_nbytes(storage)
            if not address or not n_bytes:
                return None
            source = self._find_source(storage, name, address)
        except RuntimeError:
            # Fake tensors and wrapper subclasses: "invalid python storage".
            return None
        block: Block | None = None
        if self._blocks is not None and name in self._blocks.devices:
            block = self._blocks.find(name, address)
            # What is in no block is another library's, or a CUDA graph's that has taken it back;
            # what is in one is torch's own, also where DLPack has brought it back to torch.
            source = MemorySource.LENT if block is None else MemorySource.OWN
        return StorageInfo(name, n_bytes, address, source, block)

    def _find_source(self, storage: Any, device: str, address: int) -> MemorySource:
        is_resizable = self._is_resizable(storage)
        if device != HOST or self._owner_offset is None:
            return MemorySource.OWN if is_resizable else MemorySource.LENT
        # ``x.numpy()`` makes memory of torch's own as little resizable as memory that is lent.
        owner = ctypes.c_size_t.from_address(self._read_cdata(storage) + self._owner_offset).value
        if owner == address:
            return MemorySource.OWN
        if self.storage_type.is_shared(storage):
            return MemorySource.MAPPED
        if is_resizable or self._is_pinned(storage):
            return MemorySource.PINNED
        if self._mapped is None:
            self._mapped = list_mapped_files()
        is_mapped = any(first <= address < end for first, end in self._mapped)
        return MemorySource.MAPPED if is_mapped else MemorySource.LENT

    def _is_pinned(self, storage: Any) -> bool:
        """Return whether CUDA has pinned a storage's memory, which the driver maps like a file."""
        # Before CUDA is in use the question could initialise it.
        if not self.torch.cuda.is_initialized():
            return False
        # The storage's own method names a device, of which torch warns.
        with self.torch._C._DisableFuncTorch():
            empty = self.torch.empty(0, dtype=self.torch.uint8, device="cpu")
            return bool(self._base.is_pinned(empty.set_(storage)))

    def read_node(self, node: Any) -> tuple[list[object], list[object], bool] | None:
        """Return what an autograd node holds; call within ``quiet()``.

        Returns:
            The next nodes; what it saved or accumulates into (tensors, or whatever a pack hook
            returned); whether the node is a Python function's context. ``None`` beyond the limit.
        """
        if not self.node_limit.may_ask(node):
            return None
        cls = type(node)
        known = self._node_classes.get(id(cls))
        if known is None:
            known = self._node_classes[self.hold_class(cls)] = self._describe_node_class(cls)
        if known.is_python:
            try:
                functions = self.torch._C._FunctionBase.next_functions.__get__(node)
            except RuntimeError:
                # The context of a function outlives the graph that it was for.
                functions = ()
        else:
            functions = node.next_functions
        saved: list[object] = []
        for name in known.raw_names:
            try:
                raw = getattr(node, name)
                if name == "variable":
                    if raw is not None:
                        saved.append(raw)
                    continue
                for saved_tensor in raw if type(raw) is tuple else (raw,):
                    data = getattr(saved_tensor, "data", None)
                    if data is not None:
                        saved.append(data)
                    # A hook that is to unpack it holds what it needs for that; it is not called.
                    hook = getattr(saved_tensor, "unpack_hook", None)
                    if hook is not None:
                        saved.append(hook)
            except RuntimeError:
                # "Trying to backward through the graph a second time": it is already freed.
                continue
        following = [other for other, _ in functions if other is not None]
        self.node_limit.note(node, (node, *following))
        return following, saved, known.is_python

    def is_opaque_node(self, node: object) -> bool:
        """Return whether an autograd node may have saved tensors that no attribute shows."""
        known = self._node_classes.get(id(type(node)))
        return known is not None and known.is_opaque

    def read_shape(self, tensor: Any) -> tuple[tuple[int, ...] | None, str | None]:
        """Shape and ``"float32"``; ``None`` for a nested tensor's shape. Within ``quiet()``."""
        dtype = str(self._base.dtype.__get__(tensor)).removeprefix("torch.")
        try:
            return tuple(int(size) for size in self._base.shape.__get__(tensor)), dtype
        except RuntimeError:
            return None, dtype

    def is_view(self, tensor: Any) -> bool:
        """Return whether a tensor shows a part or another shape of its base. Within ``quiet()``."""
        if self.is_dispatched(type(tensor)):
            return False
        try:
            n_bytes = int(self._read_nbytes(self._read_untyped(tensor)))
            return self.count_bytes(tensor) < n_bytes or self._read_base(tensor) is not None
        except RuntimeError:
            return False

    def count_bytes(self, tensor: Any) -> int:
        """Return the bytes of a tensor's elements, whatever its storage has. Within ``quiet()``."""
        return int(self._base.numel(tensor) * self._base.element_size(tensor))

    def is_plain(self, tensor: Any) -> bool:
        """Return whether offset, size and strides describe a tensor fully. Within ``quiet()``."""
        base = self._base
        # Later releases of torch have no names any more.
        names = base.names.__get__(tensor) if hasattr(base, "names") else ()
        is_odd = base.is_quantized.__get__(tensor) or base.is_nested.__get__(tensor)
        return not is_odd and all(name is None for name in names)

    def count_storage_users(self, storage: Any) -> int:
        """Return how many C++ references a storage has."""
        return int(self._count_storage_users(self.storage_type._cdata.__get__(storage)))

    def _describe_node_class(self, cls: type) -> _NodeClass:
        names = tuple(
            name
            for base in list_bases(cls)
            for name, value in read_type_dict(base).items()
            if type(value) is GetSetDescriptorType
            and (name.startswith("_raw_saved_") or name == "variable")
        )
        is_python = is_one_of(cls, self.torch._C._FunctionBase)
        # Python can't see what is saved by an operation in place on a view, and by autograd
        # functions that an extension has written in C++.
        opaque = ("CopySlices", "CppFunction")
        is_opaque = not is_python and name_class(cls).rpartition(".")[2] in opaque
        if not self._tells_saved:
            is_opaque = is_opaque or any(name != "variable" for name in names)
        return _NodeClass(names, is_python, is_opaque)

    def _read_sparse(self, tensor: Any) -> tuple[object, ...]:
        rows, columns = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
        names = {
            "torch.sparse_coo": ("_indices", "_values"),
            "torch.sparse_csr": (*rows, "values"),
            "torch.sparse_bsr": (*rows, "values"),
            "torch.sparse_csc": (*columns, "values"),
            "torch.sparse_bsc": (*columns, "values"),
        }.get(str(self._base.layout.__get__(tensor)), ())
        try:
            inner = [getattr(self._base, name)(tensor) for name in names]
            return tuple(self._base.untyped_storage(part) for part in inner)
        except RuntimeError:
            return ()


def _name_device(device: Any) -> str | None:
    if device.type == "meta":
        return None
    return HOST if device.type == "cpu" else f"{device.type}:{device.index or 0}"


@functools.cache
def _find_owner_offset(torch: Any) -> int | None:
    """Return where in the C++ part of a host storage the owner of its memory is, in bytes.

    Memory of torch's own has its own address there, and lent memory something of the lender's
    (``DataPtr::get_context`` in https://github.com/pytorch/pytorch/blob/main/c10/core/Allocator.h).
    The place is looked up in two storages whose memory is known; ``None`` if it is not found.
    """
    own = torch.UntypedStorage(16)
    lent = own[8:]
    words = [(ctypes.c_size_t * 8).from_address(storage._cdata) for storage in (own, lent)]
    pairs = enumerate(zip(*words, strict=True))
    addresses = own.data_ptr(), lent.data_ptr()
    found = [n for n, (a, b) in pairs if a == addresses[0] and b != addresses[1]]
    return found[0] * ctypes.sizeof(ctypes.c_size_t) if len(found) == 1 else None


@functools.cache
def _try_counts(torch: Any) -> tuple[bool, bool, bool]:
    """Return whether references from C++ show in the counts of tensors, storages and nodes."""
    # No mode of the user's may see this: neither theirs for functions nor for inference.
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad():
        leaf = torch.empty(1, device="cpu", requires_grad=True)
        before = sys.getrefcount(leaf)
        graph = leaf * leaf
        after = sys.getrefcount(leaf)
        held = [leaf.untyped_storage(), graph.grad_fn, object()]
        storage, node, plain = map(sys.getrefcount, held)
        del graph
    return after > before, storage > plain, node > plain
