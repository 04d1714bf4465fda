"""Let PyTorch decide as it does on the device, without asking the device for anything.

For PyTorch's C++ code a step's tensors are on the CPU, see ``fakes.py``. So what it
decides by the device is decided here, by the class of the operator: the casts of autocast, the
kernels of attention, dropout and recurrent networks.
The rules are those of PyTorch's own source, named beside each.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

from gpumemwidget.prediction.dry.effects import ThreadPatch
from gpumemwidget.prediction.recurrent import list_recurrent_overrides

Override = Callable[..., Any]


@contextlib.contextmanager
def emulate_device(
    torch: Any,
    patch: ThreadPatch,
    capability: tuple[int, int],
    assumptions: list[str],
    *,
    moves_all: bool = False,
) -> Iterator[dict[Any, Override]]:
    """Decide as on the device for a while, in this thread.

    Yields what is called instead of operators, by the operator. The assumptions get a sentence
    where the step compiles. With ``moves_all``, what it does for the CPU is taken to be for the
    device.
    """
    _answer_libraries(torch, patch)
    _compile_nothing(torch, patch, assumptions)
    casts = _Casts(torch)
    _answer_for_cuda(torch, patch, casts, capability)
    if moves_all:
        patch.replace(torch.autocast, "__enter__", _move_autocast)
    overrides = _list_overrides(torch, capability)
    key = torch._C.DispatchKey  # noqa: SLF001 - has no public name
    kernels = [
        *_find_own_kernels(torch),
        *((operator, key.AutogradCUDA, function) for operator, function in overrides.items()),
        *((operator, key.AutocastCUDA, function) for operator, function in casts.list_operators()),
    ]
    python = importlib.import_module("torch._dispatch.python")
    with _kernels_replaced(torch, patch, kernels), python.enable_python_dispatcher():
        yield overrides


@cache
def _find_own_kernels(torch: Any) -> tuple[tuple[Any, Any, Any], ...]:
    """Return what makes the Python dispatcher call the kernels that C++ would on the device.

    It would take operators apart in Python. And PyTorch without CUDA has composite kernels in the
    place of CUDA's, where the CPU has one of its own.
    """
    key = torch._C.DispatchKey  # noqa: SLF001 - has no public name
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001
    importlib.import_module("torch._decomp.decompositions")
    kernels = []
    for packet in [value for value in vars(torch.ops.aten).values() if hasattr(value, "overloads")]:
        for operator in [getattr(packet, overload) for overload in packet.overloads()]:
            name = operator.name()
            if not torch._C._dispatch_has_kernel(name):  # noqa: SLF001 - TorchScript's alone
                continue
            python = operator.py_kernels
            is_composite = has_kernel(name, "CompositeImplicitAutograd")
            is_decomposed = key.Autograd in python or key.CompositeImplicitAutograd in python
            if is_decomposed or (is_composite and has_kernel(name, "CPU")):
                if is_composite and not has_kernel(name, "CPU"):
                    own = key.CompositeImplicitAutograd
                elif has_kernel(name, "Autograd"):
                    own = key.Autograd
                else:
                    continue
                kernels += [(operator, one, own) for one in (key.AutogradCUDA, key.AutogradCPU)]
    return tuple(kernels)


@contextlib.contextmanager
def _kernels_replaced(
    torch: Any, patch: ThreadPatch, kernels: list[tuple[Any, Any, Any]]
) -> Iterator[None]:
    """Call functions, or other kernels, instead of kernels, where the Python dispatcher is enabled.

    Other threads, which may compile meanwhile, call the kernels that they always called.
    """
    kept = {(operator, key): operator.py_kernels.get(key) for operator, key, _ in kernels}
    dispatch_key = torch._C.DispatchKey  # noqa: SLF001 - has no public name

    def choose(operator: Any, key: Any, ours: Any) -> Override:
        known = operator._dispatch_cache  # noqa: SLF001 - has no public name
        theirs = known[key] if key in known else operator._get_dispatch(key)  # noqa: SLF001
        own, other = [
            partial(operator._op_dk, kernel) if isinstance(kernel, dispatch_key) else kernel  # noqa: SLF001
            for kernel in (ours, theirs)
        ]

        def call(*args: Any, **kwargs: Any) -> Any:
            return (own if patch.is_own_thread() else other)(*args, **kwargs)

        return call

    try:
        for operator, key, function in kernels:
            operator.py_kernels[key] = choose(operator, key, function)
            operator._dispatch_cache.clear()  # noqa: SLF001 - it would keep the old one
        yield
    finally:
        for (operator, key), old in kept.items():
            if old is None:
                operator.py_kernels.pop(key, None)
            else:
                operator.py_kernels[key] = old
            operator._dispatch_cache.clear()  # noqa: SLF001


# -- Questions to CUDA -----------------------------------------------------------------------------


class _Stream:
    """The device's stream, or an event on it: there is nothing to wait for."""

    def _wait(self, *_: Any, **__: Any) -> None: ...

    record = wait = synchronize = wait_event = wait_stream = _wait

    def record_event(self, event: Any = None) -> Any:
        return self if event is None else event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def elapsed_time(self, _end: Any) -> float:
        return 0.0


def _answer_for_cuda(
    torch: Any, patch: ThreadPatch, casts: _Casts, capability: tuple[int, int]
) -> None:

    def clear_too(original: Override) -> Override:
        def clear() -> None:
            original()
            casts.clear()

        return clear

    stream = _Stream()
    zeros = (
        *("current_device", "memory_allocated", "memory_reserved", "max_memory_allocated"),
        "max_memory_reserved",
    )
    done = (
        *("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"),
        *("reset_max_memory_allocated", "reset_accumulated_memory_stats", "_lazy_init"),
        *("_lazy_call", "get_rng_state", "set_rng_state", "set_rng_state_all", "manual_seed"),
        "manual_seed_all",
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "is_bf16_supported": True,
        "get_device_name": "",
        "get_device_capability": capability,
        "memory_summary": "",
        "is_current_stream_capturing": False,
        "get_rng_state_all": (),
        "memory_stats": Counter(),
        "current_stream": stream,
        "default_stream": stream,
        **dict.fromkeys(zeros, 0),
        **dict.fromkeys(done),
    }
    patch.answer(torch.cuda, answers)
    # PyTorch 2.6 brought it, and its optimizers ask it.
    if (accelerator := getattr(torch, "accelerator", None)) is not None:
        answers = {
            "is_available": True,
            "device_count": 1,
            "current_stream": stream,
            "current_accelerator": torch.device("cuda"),
            **dict.fromkeys(("current_device_index", "current_device_idx"), 0),
            **dict.fromkeys(("set_device_index", "set_device_idx", "synchronize", "empty_cache")),
        }
        patch.answer(accelerator, answers)
    patch.answer(torch.cuda.Event, {"__new__": stream})
    for kind, what in ((torch.cuda.Stream, "stream"), (torch.cuda.CUDAGraph, "graph")):
        patch.refuse(kind, "__new__", f"makes a CUDA {what}, whose memory is in a pool of its own")
    for name in ("mem_get_info", "get_device_properties"):
        patch.refuse(torch.cuda, name, f"asks the device (torch.cuda.{name})")
    patch.replace(torch, "clear_autocast_cache", clear_too)


def _compile_nothing(torch: Any, patch: ThreadPatch, assumptions: list[str]) -> None:
    """Carry out what the step compiles, or libraries have compiled, as it is written."""

    def compile_none(model: Any = None, **_options: Any) -> Any:
        sentence = (
            "what the step compiles was predicted uncompiled: compiled it needs the same or less"
        )
        if sentence not in assumptions:
            assumptions.append(sentence)
        return (lambda function: function) if model is None else model

    patch.set(torch, "compile", compile_none)
    # What a compiled function asks at each call for what compiles it: nothing, then, does.
    patch.answer(sys.modules.get("torch._dynamo.eval_frame"), {"_callback_from_stance": None})


def _move_autocast(original: Override) -> Override:
    """Let autocast for the CPU be for the device."""

    def enter(self: Any) -> Any:
        # Checkpointing enters an autocast for the CPU that is off: the device's stays on.
        if self.device == "cpu" and self._enabled:
            self.device = "cuda"
        return original(self)

    return enter


# -- Fast paths ------------------------------------------------------------------------------------


def _answer_libraries(torch: Any, patch: ThreadPatch) -> None:
    """Keep libraries from another way than the real one."""
    # The fast path of attention layers has kernels without a fake, in inference.
    patch.answer(torch.backends.mha, {"get_fastpath_enabled": False})
    # Hugging Face keeps masks in a traced model that it drops in a real one.
    transformers = sys.modules.get("transformers.utils.import_utils")
    patch.answer(transformers, {"is_fake_tensor": False})

    # C++ would write lengths into memory
    # (https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/PackedSequence.cpp).
    def pad(data: Any, sizes: Any, batch_first: bool, value: float, n_steps: int) -> Any:
        sizes = sizes.tolist()
        shape = (max(n_steps, len(sizes)), sizes[0], *data.shape[1:])
        padded = torch.full(shape, value, dtype=data.dtype, device=data.device)
        begin = row = 0
        for end in range(1, len(sizes) + 1):
            size = sizes[begin]
            if end < len(sizes) and sizes[end] == size:
                continue
            rows = data[row : row + size * (end - begin)]
            padded[begin:end, :size].copy_(rows.view(end - begin, size, *data.shape[1:]))
            row += size * (end - begin)
            begin = end
        lengths = torch.tensor([sum(size > k for size in sizes) for k in range(sizes[0])])
        return padded.transpose(0, 1) if batch_first else padded, lengths

    patch.set(torch._VF, "_pad_packed_sequence", pad)  # noqa: SLF001 - has no public name


# -- Autocast --------------------------------------------------------------------------------------
# https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/autocast_mode.h

#: Operators by how autocast casts their arguments.
_CASTS = {
    "to lower": """
    _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
    convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm
    bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell
    gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention""",
    "to float": """
    __rpow__ acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow
    softplus layer_norm native_layer_norm group_norm frobenius_norm nuclear_norm
    cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
    upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa""",
    "set float": """
    prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum""",
    "to widest": """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add""",
}


class _Casts:
    """The casts of arguments by autocast, which keeps those of weights until the outermost ends."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._kept: dict[int, tuple[Any, Any]] = {}

    def clear(self) -> None:
        self._kept.clear()

    def list_operators(self) -> Iterator[tuple[Any, Override]]:
        """Yield the operators that autocast casts for, each with what does so."""
        has_kernel = self._torch._C._dispatch_has_kernel  # noqa: SLF001 - has no public name
        has_kernel_for = self._torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001
        casts = {
            "to lower": self._cast_to_lower,
            "to float": self._cast_to_float,
            "set float": self._set_float,
            "to widest": self._cast_to_widest,
        }
        for how, cast in casts.items():
            for name in _CASTS[how].split():
                packet = getattr(self._torch.ops.aten, name, None)
                for overload in packet.overloads() if packet is not None else ():
                    operator = getattr(packet, overload)
                    # Some overloads are TorchScript's alone.
                    full_name = operator.name()
                    if has_kernel(full_name) and has_kernel_for(full_name, "AutocastCUDA"):
                        yield operator, self._make_call(operator, cast)

    def _make_call(self, operator: Any, cast: Callable[..., tuple[Any, Any]]) -> Override:
        keys = self._torch._C.DispatchKeySet(self._torch._C.DispatchKey.AutocastCUDA)  # noqa: SLF001
        exclude = self._torch._C._ExcludeDispatchKeyGuard  # noqa: SLF001 - has no public name

        def call(*args: Any, **kwargs: Any) -> Any:
            with exclude(keys):
                args, kwargs = cast(operator, args, kwargs)
                return operator(*args, **kwargs)

        return call

    def _cast_to_lower(self, _: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = self._torch.get_autocast_dtype("cuda")
        kwargs = self._cast(kwargs, dtype)
        return self._cast(args, dtype), kwargs

    def _cast_to_float(self, _: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        kwargs = self._cast(kwargs, self._torch.float32)
        return self._cast(args, self._torch.float32), kwargs

    def _cast_to_widest(self, _: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        values = [value for arg in args for value in (arg if isinstance(arg, list) else [arg])]
        dtypes = [value.dtype for value in values if self._is_eligible(value)]
        widest = self._torch.float32
        if widest not in dtypes:
            widest = self._torch.get_autocast_dtype("cuda")
        return self._cast(args, widest), kwargs

    def _set_float(self, operator: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        names = [argument.name for argument in operator._schema.arguments]  # noqa: SLF001
        if "dtype" not in names or not self._is_eligible(args[0]):
            return args, kwargs
        place = names.index("dtype")
        if kwargs.get("dtype") is not None or (len(args) > place and args[place] is not None):
            return args, kwargs
        return args[:place], {**kwargs, "dtype": self._torch.float32}

    def _cast(self, value: Any, dtype: Any) -> Any:
        torch = self._torch
        if isinstance(value, dict):
            return {name: self._cast(item, dtype) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            # C++ compilers work out a call's arguments from the last to the first.
            return type(value)([self._cast(item, dtype) for item in reversed(value)][::-1])
        if not self._is_eligible(value) or value.dtype == dtype:
            return value
        may_keep = (
            dtype == torch.get_autocast_dtype("cuda")
            and value.dtype == torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()  # noqa: SLF001 - has no public name
            and torch.is_autocast_cache_enabled()
        )
        if not may_keep:
            return value.to(dtype)
        if id(value) not in self._kept:
            self._kept[id(value)] = (value, value.to(dtype))
        return self._kept[id(value)][1]

    def _is_eligible(self, value: Any) -> bool:
        return (
            isinstance(value, self._torch.Tensor)
            and value.is_cuda
            and value.dtype.is_floating_point
            and value.dtype != self._torch.float64
        )


# -- Operators that PyTorch takes apart by the device ----------------------------------------------


def _list_overrides(torch: Any, capability: tuple[int, int]) -> dict[Any, Override]:
    """Return what takes an operator apart as on the device, by the operator."""
    # https://github.com/pytorch/pytorch/tree/main/aten/src/ATen/native
    aten = torch.ops.aten
    key = torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001 - has no public name

    def linear(tensor: Any, weight: Any, bias: Any = None) -> Any:
        if bias is None or tensor.dim() == 2 or tensor.is_contiguous():
            return aten.linear.default._op_dk(key, tensor, weight, bias)  # noqa: SLF001
        # To a subclass of tensors, as fake ones are, the bias would not be added in place.
        return torch.matmul(tensor, weight.t()).add_(bias)

    def one_hot(tensor: Any, num_classes: int = -1) -> Any:
        if num_classes == -1:
            num_classes = int(tensor.max().item()) + 1
        shape = (*tensor.shape, num_classes)
        zeros = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
        return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)

    def dropout(tensor: Any, p: float, train: bool) -> Any:
        if not train or p == 0 or tensor.numel() == 0:
            return tensor
        if p == 1:
            return tensor * torch.zeros((), dtype=tensor.dtype, device=tensor.device)
        return aten.native_dropout.default(tensor, p, train)[0]

    return {
        aten.linear.default: linear,
        aten.dropout.default: dropout,
        aten.scaled_dot_product_attention.default: _Attention(torch, capability).call,
        aten.one_hot.default: one_hot,
        **list_recurrent_overrides(torch),
    }


class _Attention:
    """Attention by the kernel that PyTorch chooses on the device.

    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
    """

    def __init__(self, torch: Any, capability: tuple[int, int]) -> None:
        self._torch = torch
        self._has_ampere = capability >= (8, 0)
        # Since PyTorch 2.11, with its cuDNN, that is asked first on these GPUs.
        self._prefers_cudnn = (
            capability in ((9, 0), (10, 0))
            and tuple(int(part) for part in str(torch.__version__).split(".")[:2]) >= (2, 11)
            and "TORCH_CUDNN_SDPA_DEPRIORITIZED" not in os.environ
        )
        self._longest_head = 256 if capability == (9, 0) else 128

    def call(  # noqa: PLR0917 - the operator's own signature
        self,
        query: Any,
        key: Any,
        value: Any,
        mask: Any = None,
        dropout: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        # https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers/attention.cpp
        torch, aten = self._torch, self._torch.ops.aten
        tensors = (query, key, value)
        kernel = self._choose_kernel(tensors, mask, dropout, enable_gqa=enable_gqa)
        if kernel == "flash":
            size = query.shape[-1]
            if size % 8:
                tensors = tuple([torch.nn.functional.pad(t, (0, -size % 8)) for t in tensors])
            scale = size**-0.5 if scale is None else scale
            result = aten._scaled_dot_product_flash_attention.default(  # noqa: SLF001
                *tensors, dropout, is_causal, False, scale=scale
            )[0]
            return result[..., :size] if size % 8 else result
        if mask is not None and mask.dtype == torch.bool:
            options = {"dtype": query.dtype, "device": query.device}
            yes, no = [torch.scalar_tensor(value, **options) for value in (0.0, -torch.inf)]
            mask = torch.where(mask, yes, no)
        if kernel != "math":
            if mask is not None and kernel == "efficient":
                mask = mask.expand(*query.shape[:3], key.shape[2])
            needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            call = getattr(aten, f"_scaled_dot_product_{kernel}_attention").default
            return call(*tensors, mask, needs_grad, dropout, is_causal, scale=scale)[0]
        if is_causal:
            sizes = (query.shape[-2], key.shape[-2])
            mask = torch.ones(sizes, dtype=torch.bool, device=query.device).tril()
        options = {"enable_gqa": True} if enable_gqa else {}
        return aten._scaled_dot_product_attention_math.default(  # noqa: SLF001
            *tensors, mask, dropout, False, None, scale=scale, **options
        )[0]

    def _choose_kernel(
        self, tensors: Sequence[Any], mask: Any, dropout: float, *, enable_gqa: bool
    ) -> str:
        """Return ``cudnn``, ``flash``, ``efficient`` or ``math``: the kernel that is taken."""
        # A mask that is learned, as T5's, goes to the plain operators.
        is_learned = mask is not None and mask.requires_grad
        if is_learned or not all(
            tensor.dim() == 4 and tensor.stride(-1) == 1 and tensor.shape[-2] > 0
            for tensor in tensors
        ):
            return "math"
        if self._fits_cudnn(*tensors, dropout=dropout):
            return "cudnn"
        if mask is None and self._fits_flash(*tensors, enable_gqa=enable_gqa):
            return "flash"
        return "efficient" if not enable_gqa and self._fits_efficient(*tensors) else "math"

    def _is_half(self, tensor: Any) -> bool:
        return bool(tensor.dtype in (self._torch.float16, self._torch.bfloat16))

    def _fits_cudnn(self, query: Any, key: Any, value: Any, *, dropout: float) -> bool:
        heads = (query.shape[-1], value.shape[-1])
        return (
            self._prefers_cudnn
            and self._is_half(query)
            and self._torch.backends.cuda.cudnn_sdp_enabled()
            and not self._torch.are_deterministic_algorithms_enabled()
            and all(head <= self._longest_head and head % 8 == 0 for head in heads)
            and key.shape[-2] > 1
            and (query.shape[-2] > 1 or not dropout)
        )

    def _fits_flash(self, query: Any, key: Any, value: Any, *, enable_gqa: bool) -> bool:
        return (
            self._has_ampere
            and self._is_half(query)
            and self._torch.backends.cuda.flash_sdp_enabled()
            and query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
            and (enable_gqa or query.shape[1] == key.shape[1] == value.shape[1])
        )

    def _fits_efficient(self, query: Any, key: Any, value: Any) -> bool:
        alignment = 8 if self._is_half(query) else 4
        return bool(
            query.dtype != self._torch.float64
            and (self._has_ampere or query.dtype != self._torch.bfloat16)
            and self._torch.backends.cuda.mem_efficient_sdp_enabled()
            and query.shape[1] == key.shape[1]
            and query.shape[-1] % alignment == value.shape[-1] % alignment == 0
        )
