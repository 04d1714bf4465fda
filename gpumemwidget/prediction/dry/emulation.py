"""Let PyTorch decide as it does on the device, without asking the device for anything.

For PyTorch's C++ code a step's tensors are on the CPU, see ``fakes.py``. So what it
decides by the device is decided here, by the class of the operator: the casts of autocast, the
kernels of attention, dropout and recurrent networks, and ``foreach`` optimizers.
The rules are those of PyTorch's own source, named beside each.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gpumemwidget.prediction.dry.effects import ThreadPatch

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

    Args:
        torch: the imported module ``torch``.
        patch: replaces functions.
        capability: the device's compute capability.
        assumptions: gets a sentence where the step compiles.
        moves_all: what the step does for the CPU is taken to be for the device.

    Yields:
        What is called instead of operators, by the operator.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_optimizers_choose_foreach(torch, patch))
        _answer_libraries(torch, patch)
        _compile_nothing(torch, patch, assumptions)
        cache = _CastCache(torch)
        _answer_for_cuda(torch, patch, cache, capability)
        if moves_all:
            patch.replace(torch.autocast, "__enter__", _move_autocast)
        overrides = _list_overrides(torch, capability)
        key = torch._C.DispatchKey  # noqa: SLF001 - has no public name
        kernels = list(_find_own_kernels(torch))
        kernels += [(each, key.AutogradCUDA, function) for each, function in overrides.items()]
        kernels += [(each, key.AutocastCUDA, do) for each, do in _list_casts(torch, cache)]
        stack.enter_context(_kernels_replaced(torch, patch, kernels))
        python = importlib.import_module("torch._dispatch.python")
        stack.enter_context(python.enable_python_dispatcher())
        yield overrides


@functools.cache
def _find_own_kernels(torch: Any) -> tuple[tuple[Any, Any, Any], ...]:
    """Return what makes the Python dispatcher call the kernels that C++ would on the device.

    It would take operators apart in Python. And PyTorch without CUDA has composite kernels in the
    place of CUDA's, where the CPU has one of its own.
    """
    key = torch._C.DispatchKey  # noqa: SLF001 - has no public name
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001
    importlib.import_module("torch._decomp.decompositions")
    kernels = []
    for packet in [each for each in vars(torch.ops.aten).values() if hasattr(each, "overloads")]:
        for operator in [getattr(packet, each) for each in packet.overloads()]:
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
    kept = {(each, key): each.py_kernels.get(key) for each, key, _ in kernels}
    dispatch_key = torch._C.DispatchKey  # noqa: SLF001 - has no public name

    def choose(operator: Any, key: Any, ours: Any) -> Override:
        known = operator._dispatch_cache  # noqa: SLF001 - has no public name
        theirs = known[key] if key in known else operator._get_dispatch(key)  # noqa: SLF001
        own, other = [
            functools.partial(operator._op_dk, each) if isinstance(each, dispatch_key) else each  # noqa: SLF001
            for each in (ours, theirs)
        ]

        def call(*args: Any, **kwargs: Any) -> Any:
            return (own if patch.is_own_thread() else other)(*args, **kwargs)

        return call

    try:
        for each, key, function in kernels:
            each.py_kernels[key] = choose(each, key, function)
            each._dispatch_cache.clear()  # noqa: SLF001 - it would keep the old one
        yield
    finally:
        for (each, key), old in kept.items():
            if old is None:
                each.py_kernels.pop(key, None)
            else:
                each.py_kernels[key] = old
            each._dispatch_cache.clear()  # noqa: SLF001


# -- Questions to CUDA -----------------------------------------------------------------------------

#: The answers of ``torch.cuda`` while a step is carried out for a device that is not asked.
_CUDA_ANSWERS: dict[str, Any] = {
    "is_available": True,
    "device_count": 1,
    "current_device": 0,
    "is_bf16_supported": True,
    "get_device_name": "",
    "is_current_stream_capturing": False,
    "memory_stats": Counter(),
    "memory_summary": "",
    "get_rng_state_all": (),
    **dict.fromkeys(("memory_allocated", "memory_reserved"), 0),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), 0),
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "ipc_collect")),
    **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated")),
    **dict.fromkeys(("reset_accumulated_memory_stats", "_lazy_init", "_lazy_call")),
    **dict.fromkeys(("get_rng_state", "set_rng_state", "set_rng_state_all")),
    **dict.fromkeys(("manual_seed", "manual_seed_all")),
}

#: The answers of ``torch.accelerator``, which PyTorch 2.6 brought and its optimizers ask.
_ACCELERATOR_ANSWERS: dict[str, Any] = {
    "is_available": True,
    "device_count": 1,
    **dict.fromkeys(("current_device_index", "current_device_idx"), 0),
    **dict.fromkeys(("set_device_index", "set_device_idx", "synchronize", "empty_cache")),
}


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
    torch: Any, patch: ThreadPatch, cache: _CastCache, capability: tuple[int, int]
) -> None:
    """Answer this thread's questions to CUDA without it."""

    def clear_too(original: Override) -> Override:
        def clear() -> None:
            original()
            cache.clear()

        return clear

    stream = _Stream()
    streams = {"current_stream": stream, "default_stream": stream}
    patch.answer(torch.cuda, {**_CUDA_ANSWERS, **streams, "get_device_capability": capability})
    if (accelerator := getattr(torch, "accelerator", None)) is not None:
        own = {"current_accelerator": torch.device("cuda"), "current_stream": stream}
        patch.answer(accelerator, {**_ACCELERATOR_ANSWERS, **own})
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

    patch.replace(torch, "compile", lambda _: compile_none)
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


# -- Optimizers and fast paths ---------------------------------------------------------------------


@contextlib.contextmanager
def _optimizers_choose_foreach(torch: Any, patch: ThreadPatch) -> Iterator[None]:
    """Choose the ``foreach`` implementation where a real optimizer does by default on CUDA.

    PyTorch's own choice wants tensors of the very class ``torch.Tensor``
    (``torch.optim.optimizer._default_to_fused_or_foreach``).
    """

    def choose(optimizer: Any, *_: Any) -> None:
        if not patch.is_own_thread():
            return
        for group in optimizer.param_groups:
            by_tensor = isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable")
            if (
                group.get("foreach", True) is None
                and not group.get("fused")
                and not group.get("differentiable")
                and not by_tensor
            ):
                group["foreach"] = True

    optimizers: Any = importlib.import_module("torch.optim.optimizer")
    handle = optimizers.register_optimizer_step_pre_hook(choose)
    try:
        yield
    finally:
        handle.remove()


def _answer_libraries(torch: Any, patch: ThreadPatch) -> None:
    """Keep libraries from another way than the real one."""
    # The fast path of attention layers has kernels without a fake, in inference.
    patch.answer(torch.backends.mha, {"get_fastpath_enabled": False})
    # Hugging Face keeps masks in a traced model that it drops in a real one.
    transformers = sys.modules.get("transformers.utils.import_utils")
    patch.answer(transformers, {"is_fake_tensor": False})
    pad = functools.partial(_make_padding, torch)
    patch.replace(torch._VF, "_pad_packed_sequence", pad)  # noqa: SLF001 - has no public name


def _make_padding(torch: Any, _original: Override) -> Override:
    """Return what pads packed sequences: C++ would write lengths into memory."""

    # https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/PackedSequence.cpp
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

    return pad


# -- Autocast --------------------------------------------------------------------------------------
# https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/autocast_mode.h

_TO_LOWER = (
    "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d "
    "convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm "
    "bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell "
    "gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention "
    "scaled_dot_product_attention"
)
_TO_FLOAT = (
    "__rpow__ acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow "
    "softplus layer_norm native_layer_norm group_norm frobenius_norm nuclear_norm "
    "cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d "
    "_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa "
    "upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"
)
_SET_FLOAT = "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum"
_TO_WIDEST = (
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
)


class _CastCache:
    """Weights that autocast has cast, until the outermost ``autocast`` ends."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._casts: dict[int, tuple[Any, Any]] = {}

    def clear(self) -> None:
        self._casts.clear()

    def cast(self, value: Any, dtype: Any) -> Any:
        """Return an argument with its tensors on the device in a dtype."""
        torch = self._torch
        if isinstance(value, (list, tuple)):
            # C++ compilers work out a call's arguments from the last to the first.
            return type(value)([self.cast(each, dtype) for each in reversed(value)][::-1])
        if not _is_eligible(torch, value) or value.dtype == dtype:
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
        if id(value) not in self._casts:
            self._casts[id(value)] = (value, value.to(dtype))
        return self._casts[id(value)][1]


def _is_eligible(torch: Any, value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_cuda
        and value.dtype.is_floating_point
        and value.dtype != torch.float64
    )


def _list_casts(torch: Any, cache: _CastCache) -> Iterator[tuple[Any, Override]]:
    """Yield the operators that autocast casts for, each with what does so."""
    for names, make in (
        (_TO_LOWER, _cast_to_lower),
        (_TO_FLOAT, _cast_to_float),
        (_SET_FLOAT, _set_float),
        (_TO_WIDEST, _cast_to_widest),
    ):
        for name in names.split():
            packet = getattr(torch.ops.aten, name, None)
            for overload in packet.overloads() if packet is not None else ():
                operator = getattr(packet, overload)
                # Some overloads are TorchScript's alone.
                full_name = operator.name()
                if torch._C._dispatch_has_kernel(  # noqa: SLF001 - has no public name
                    full_name
                ) and torch._C._dispatch_has_kernel_for_dispatch_key(  # noqa: SLF001
                    full_name, "AutocastCUDA"
                ):
                    yield operator, make(torch, cache, operator)


def _without_autocast(torch: Any) -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)  # noqa: SLF001
    return torch._C._ExcludeDispatchKeyGuard(keys)  # noqa: SLF001


def _cast_to_lower(torch: Any, cache: _CastCache, operator: Any) -> Override:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast(torch):
            dtype = torch.get_autocast_dtype("cuda")
            kwargs = {name: cache.cast(each, dtype) for name, each in kwargs.items()}
            return operator(*cache.cast(args, dtype), **kwargs)

    return call


def _cast_to_float(torch: Any, cache: _CastCache, operator: Any) -> Override:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast(torch):
            kwargs = {name: cache.cast(each, torch.float32) for name, each in kwargs.items()}
            return operator(*cache.cast(args, torch.float32), **kwargs)

    return call


def _set_float(torch: Any, _cache: _CastCache, operator: Any) -> Override:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast(torch):
            schema = operator._schema.arguments  # noqa: SLF001 - has no public name
            place = next((k for k, each in enumerate(schema) if each.name == "dtype"), None)
            is_given = kwargs.get("dtype") is not None or (
                place is not None and len(args) > place and args[place] is not None
            )
            if place is not None and not is_given and _is_eligible(torch, args[0]):
                args = args[:place]
                kwargs = {**kwargs, "dtype": torch.float32}
            return operator(*args, **kwargs)

    return call


def _cast_to_widest(torch: Any, cache: _CastCache, operator: Any) -> Override:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast(torch):
            flat = [each for arg in args for each in (arg if isinstance(arg, list) else [arg])]
            dtypes = [each.dtype for each in flat if _is_eligible(torch, each)]
            widest = torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cuda")
            return operator(*cache.cast(args, widest), **kwargs)

    return call


# -- Operators that PyTorch takes apart by the device ----------------------------------------------


def _list_overrides(torch: Any, capability: tuple[int, int]) -> dict[Any, Override]:
    """Return what takes an operator apart as on the device, by the operator."""
    aten = torch.ops.aten
    overrides: dict[Any, Override] = {
        aten.linear.default: _make_linear(torch),
        aten.dropout.default: _make_dropout(torch),
        aten.scaled_dot_product_attention.default: _make_attention(torch, capability),
        aten.one_hot.default: _make_one_hot(torch),
    }
    for name in ("lstm_cell", "gru_cell"):
        overrides[getattr(aten, name).default] = _make_cell(torch, name)
    for name, mode in (("rnn_relu", 0), ("rnn_tanh", 1), ("lstm", 2), ("gru", 3)):
        packet = getattr(aten, name)
        overrides[packet.input], overrides[packet.data] = _make_recurrent(torch, mode)
    return overrides


def _make_linear(torch: Any) -> Override:
    # https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/Linear.cpp
    linear = torch.ops.aten.linear.default
    key = torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001 - has no public name

    def call(tensor: Any, weight: Any, bias: Any = None) -> Any:
        if bias is None or tensor.dim() == 2 or tensor.is_contiguous():
            return linear._op_dk(key, tensor, weight, bias)  # noqa: SLF001 - has no public name
        # To a subclass of tensors, as fake ones are, the bias would not be added in place.
        return torch.matmul(tensor, weight.t()).add_(bias)

    return call


def _make_one_hot(torch: Any) -> Override:
    # https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/Onehot.cpp
    def one_hot(tensor: Any, num_classes: int = -1) -> Any:
        if num_classes == -1:
            num_classes = int(tensor.max().item()) + 1
        shape = (*tensor.shape, num_classes)
        zeros = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
        return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)

    return one_hot


def _make_dropout(torch: Any) -> Override:
    # https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/Dropout.cpp
    def dropout(tensor: Any, p: float, train: bool) -> Any:
        if not train or p == 0 or tensor.numel() == 0:
            return tensor
        if p == 1:
            return tensor * torch.zeros((), dtype=tensor.dtype, device=tensor.device)
        return torch.ops.aten.native_dropout.default(tensor, p, train)[0]

    return dropout


def _make_attention(torch: Any, capability: tuple[int, int]) -> Override:
    # https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers/attention.cpp
    # https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
    aten = torch.ops.aten
    cuda = torch.backends.cuda
    has_ampere = capability >= (8, 0)
    # Since PyTorch 2.11, with its cuDNN, that is asked first on these GPUs.
    prefers_cudnn = (
        capability in ((9, 0), (10, 0))
        and tuple(int(part) for part in str(torch.__version__).split(".")[:2]) >= (2, 11)
        and "TORCH_CUDNN_SDPA_DEPRIORITIZED" not in os.environ
    )
    longest_head = 256 if capability == (9, 0) else 128

    def fits_cudnn(query: Any, key: Any, value: Any, dropout: float) -> bool:
        heads = (query.shape[-1], value.shape[-1])
        return (
            prefers_cudnn
            and cuda.cudnn_sdp_enabled()
            and not torch.are_deterministic_algorithms_enabled()
            and all(head <= longest_head and head % 8 == 0 for head in heads)
            and key.shape[-2] > 1
            and (query.shape[-2] > 1 or not dropout)
        )

    def attention(  # noqa: PLR0917 - the operator's own signature
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
        size = query.shape[-1]
        is_half = query.dtype in (torch.float16, torch.bfloat16)
        fits = query.dim() == key.dim() == value.dim() == 4 and all(
            each.stride(-1) == 1 and each.shape[-2] > 0 for each in (query, key, value)
        )
        # A mask that is learned, as T5's, goes to the plain operators.
        is_learned = mask is not None and mask.requires_grad
        needs_grad = torch.is_grad_enabled() and any(
            each.requires_grad for each in (query, key, value)
        )
        is_cudnns = is_half and not is_learned and fits_cudnn(query, key, value, dropout)
        may_be_flash = is_half and mask is None and size <= 256 and not is_cudnns
        if fits and may_be_flash and has_ampere and cuda.flash_sdp_enabled():
            same = size == key.shape[-1] == value.shape[-1]
            if same and (enable_gqa or query.shape[1] == key.shape[1] == value.shape[1]):
                padded = [_pad_last(torch, each, 8) for each in (query, key, value)]
                scale = size**-0.5 if scale is None else scale
                result = aten._scaled_dot_product_flash_attention.default(  # noqa: SLF001
                    *padded, dropout, is_causal, False, scale=scale
                )[0]
                return result if result.shape[-1] == size else result[..., :size]
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(
                mask,
                torch.scalar_tensor(0.0, dtype=query.dtype, device=query.device),
                torch.scalar_tensor(-torch.inf, dtype=query.dtype, device=query.device),
            )
        if fits and is_cudnns:
            return aten._scaled_dot_product_cudnn_attention.default(  # noqa: SLF001
                query, key, value, mask, needs_grad, dropout, is_causal, scale=scale
            )[0]
        fits = fits and not enable_gqa and query.shape[1] == key.shape[1] and not is_learned
        alignment = 8 if is_half else 4
        if (
            fits
            and query.dtype != torch.float64
            and (has_ampere or query.dtype != torch.bfloat16)
            and size % alignment == 0
            and value.shape[-1] % alignment == 0
            and cuda.mem_efficient_sdp_enabled()
        ):
            if mask is not None:
                mask = mask.expand(*query.shape[:3], key.shape[2])
            return aten._scaled_dot_product_efficient_attention.default(  # noqa: SLF001
                query, key, value, mask, needs_grad, dropout, is_causal, scale=scale
            )[0]
        if is_causal:
            sizes = (query.shape[-2], key.shape[-2])
            mask = torch.ones(sizes, dtype=torch.bool, device=query.device).tril()
        options = {"enable_gqa": True} if enable_gqa else {}
        return aten._scaled_dot_product_attention_math.default(  # noqa: SLF001
            query, key, value, mask, dropout, False, None, scale=scale, **options
        )[0]

    return attention


def _pad_last(torch: Any, tensor: Any, multiple: int) -> Any:
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _make_cell(torch: Any, name: str) -> Override:
    # https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/RNN.cpp
    fused = getattr(torch.ops.aten, f"_thnn_fused_{name}").default

    def cell(tensor: Any, states: Any, of_input: Any, of_state: Any, *biases: Any) -> Any:
        is_lstm = isinstance(states, (list, tuple))
        hidden, carried = states if is_lstm else (states, states)
        gates = torch.matmul(tensor, of_input.t()), torch.matmul(hidden, of_state.t())
        biases = (*biases, None, None)[:2]
        results = fused(*gates, carried, *biases)
        return results[:2] if is_lstm else results[0]

    return cell


def _make_recurrent(torch: Any, mode: int) -> tuple[Override, Override]:
    """Return what calls cuDNN for a recurrent network, of a batch and of a packed sequence."""
    # https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cudnn/RNN.cpp

    def run(  # noqa: PLR0917 - the operator's own signature
        tensor: Any,
        states: Any,
        weights: Any,
        has_biases: bool,
        n_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        sizes: Sequence[int] = (),
    ) -> Any:
        layers = (n_layers, batch_first, dropout, train, bidirectional)
        options: dict[str, Any] = {"has_biases": has_biases, "layers": layers, "sizes": list(sizes)}
        return _call_cudnn(torch, mode, tensor, states, weights, **options)

    run_any: Override = run

    def run_packed(tensor: Any, batch_sizes: Any, *others: Any) -> Any:
        return run_any(tensor, *others, False, batch_sizes.tolist())

    return run_any, run_packed


def _call_cudnn(
    torch: Any,
    mode: int,
    tensor: Any,
    states: Any,
    weights: Any,
    *,
    has_biases: bool,
    layers: tuple[Any, ...],
    sizes: list[int],
) -> Any:
    """Call cuDNN's operator for a recurrent network.

    Args:
        torch: the imported module ``torch``.
        mode: the kind of network, as cuDNN numbers them.
        tensor: the input.
        states: the hidden state; an LSTM's cell too.
        weights: those of all layers.
        has_biases: the weights have biases among them.
        layers: their number, and what goes between them and which way.
        sizes: the batch's size at each time, of a packed sequence.
    """
    is_lstm = mode == 2
    hidden, cell = (states[0], states[1]) if is_lstm else (states, None)
    size = cell.shape[2] if cell is not None else hidden.shape[2]
    projection = hidden.shape[2] if is_lstm and hidden.shape[2] != size else 0
    # A step that was built on the CPU may have made its input there.
    tensor = tensor.to(weights[0].device)
    n_weights = (4 if has_biases else 2) + (1 if projection else 0)
    # On the device the weights lie in one buffer already (``flatten_parameters``).
    buffer = tensor.new_empty((0,))
    if torch.is_autocast_enabled("cuda") and weights[0].dtype != torch.float16:
        buffer, weights = _copy_weights(torch, weights)
        tensor, hidden = tensor.to(torch.float16), hidden.to(torch.float16)
        cell = None if cell is None else cell.to(torch.float16)
    output, hidden, cell, *_ = torch.ops.aten._cudnn_rnn.default(  # noqa: SLF001
        *(tensor, weights, n_weights, buffer, hidden, cell, mode, size, projection),
        *(*layers, sizes, None),
    )
    return (output, hidden, cell) if is_lstm else (output, hidden)


def _copy_weights(torch: Any, weights: Any) -> tuple[Any, list[Any]]:
    """Return a buffer in half precision with copies of the weights, and the copies."""
    # https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/cudnn/AutocastRNN.cpp
    n_elements = sum(each.numel() for each in weights)
    buffer = torch.zeros(n_elements, dtype=torch.float16, device=weights[0].device)
    copies, begin = [], 0
    for weight in weights:
        # No view for autograd: a write to one would copy the gradients of the whole buffer.
        copy = buffer[begin : begin + weight.numel()].view(weight.shape).data
        copies.append(copy.copy_(weight))
        begin += weight.numel()
    return buffer, copies
