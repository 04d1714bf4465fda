"""What autograd keeps: graphs that a name holds, gradients, hooks, contexts."""

from __future__ import annotations

from tests.zoo.pattern import KIB, Pattern

__all__ = ["PATTERNS"]

#: A matrix of 256 × 256 floats, and a batch of 64 × 256.
_MATRIX = 256 * KIB
_BATCH = 64 * KIB
_SCALAR = 4

PATTERNS = (
    Pattern(
        id="total-loss",
        needs_saved=True,
        title="`total_loss += loss`",
        link="https://github.com/pytorch/pytorch/issues/17568",
        source="""
            model = nn.Linear(256, 256, bias=False, device=device)
            def epoch():
                total_loss = 0
                for _ in range(4):
                    x = torch.randn(64, 256, device=device)
                    loss = model(x).pow(2).mean()
                    total_loss += loss
                return total_loss
            total_loss = epoch()
        """,
        names=("total_loss",),
        frees=4 * (_BATCH + _BATCH) + _SCALAR,
        owners=(
            "total_loss's graph: saved by MmBackward0",
            "total_loss's graph: saved by PowBackward0",
        ),
    ),
    Pattern(
        id="losses",
        needs_saved=True,
        title="a list of losses",
        link="https://github.com/TRI-ML/packnet-sfm/pull/51",
        source="""
            model = nn.Linear(256, 256, bias=False, device=device)
            losses = []
            def step():
                x = torch.randn(64, 256, device=device)
                losses.append(model(x).pow(2).mean())
            for _ in range(3):
                step()
        """,
        names=("losses",),
        frees=3 * (_BATCH + _BATCH + _SCALAR),
        owners=("losses[0]'s graph: saved by MmBackward0",),
    ),
    Pattern(
        id="no-grad",
        needs_saved=True,
        title="predictions kept without `no_grad`",
        link="https://github.com/pytorch/pytorch/issues/4932",
        source="""
            model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
            def predict():
                return [model(torch.randn(64, 256, device=device)) for _ in range(3)]
            predictions = predict()
        """,
        names=("predictions",),
        # Of each: the batch, the ReLU's output, and the prediction.
        frees=3 * (_BATCH + _BATCH + 64 * _SCALAR),
        owners=("predictions[0]'s graph: saved by AddmmBackward0",),
    ),
    Pattern(
        id="hidden-state",
        needs_saved=True,
        title="a hidden state that is never detached",
        link="https://github.com/pytorch/pytorch/issues/2198",
        source="""
            weight = torch.randn(256, 256, device=device, requires_grad=True)
            def unroll(hidden):
                for _ in range(5):
                    hidden = torch.tanh(hidden @ weight)
                return hidden
            hidden = unroll(torch.zeros(64, 256, device=device))
        """,
        names=("hidden",),
        # The state at the start and after each step.
        frees=6 * _BATCH,
        owners=("hidden", "hidden's graph: saved by MmBackward0"),
    ),
    Pattern(
        id="retain-graph",
        needs_saved=True,
        title="`backward(retain_graph=True)`",
        link="https://github.com/pytorch/pytorch/issues/40005",
        source="""
            weight = torch.randn(256, 256, device=device, requires_grad=True)
            def train():
                loss = (torch.randn(64, 256, device=device) @ weight).exp().sum()
                loss.backward(retain_graph=True)
                return loss
            loss = train()
        """,
        names=("loss",),
        frees=_BATCH + _BATCH + _SCALAR,
        owners=("loss's graph: saved by MmBackward0", "loss's graph: saved by ExpBackward0"),
    ),
    Pattern(
        id="create-graph",
        needs_saved=True,
        title="`backward(create_graph=True)`: a cycle of parameter and gradient",
        link="https://github.com/pytorch/pytorch/issues/71068",
        source="""
            weight = torch.randn(256, 256, device=device, requires_grad=True)
            (weight ** 3).sum().backward(create_graph=True)
            # %%
            import weakref
            ref = weakref.ref(weight)
        """,
        names=("weight",),
        # The weight, its gradient, and the one that backward began with.
        frees=2 * _MATRIX + _SCALAR,
        owners=("weight.grad",),
        end="if ref() is not None: ref().grad = None",
    ),
    Pattern(
        id="gradients",
        title="`.grad` after the last step",
        link="https://github.com/karpathy/nanoGPT/pull/71",
        source="""
            model = nn.Linear(256, 256, bias=False, device=device)
            model(torch.randn(64, 256, device=device)).sum().backward()
        """,
        names=("model",),
        frees=2 * _MATRIX,
        owners=("model.weight", "model.weight.grad"),
    ),
    Pattern(
        id="accumulation",
        title="gradients kept by a list of parameters",
        link="https://github.com/pytorch/pytorch/issues/41696",
        source="""
            model = nn.Linear(256, 256, bias=False, device=device)
            trainable = [p for p in model.parameters() if p.requires_grad]
            for _ in range(2):
                model(torch.randn(64, 256, device=device)).sum().backward()
            # %%
            del model
        """,
        names=("trainable",),
        frees=2 * _MATRIX,
        owners=("trainable[0]", "trainable[0].grad"),
    ),
    Pattern(
        id="retain-grad",
        title="`retain_grad()` on an activation",
        link="https://github.com/growingnet/gromo/issues/135",
        source="""
            weight = torch.randn(256, 256, device=device, requires_grad=True)
            def probe():
                hidden = torch.randn(64, 256, device=device) @ weight
                hidden.retain_grad()
                hidden.sum().backward()
                return hidden
            hidden = probe()
        """,
        names=("hidden",),
        frees=2 * _BATCH,
        owners=("hidden", "hidden.grad"),
    ),
    Pattern(
        id="tensor-hook",
        title="gradients collected by a tensor's hook",
        link="https://github.com/pytorch/pytorch/issues/74831",
        source="""
            weight = torch.randn(256, 256, device=device, requires_grad=True)
            collected = []
            weight.register_hook(lambda grad: collected.append(grad))
            # %%
            (weight * 2).sum().backward()
            # %%
            weight.grad = None
        """,
        names=("collected",),
        frees=_MATRIX,
        owners=("collected[0]",),
    ),
    Pattern(
        id="hook-closure",
        title="a tensor's hook that holds another tensor",
        link="https://github.com/cornellius-gp/gpytorch/pull/2734",
        source="""
            def masked(weight):
                mask = torch.ones(256, 256, device=device)
                weight.register_hook(lambda grad: grad * mask)
                return weight
            weight = masked(torch.randn(256, 256, device=device, requires_grad=True))
        """,
        names=("weight",),
        frees=2 * _MATRIX,
        owners=("weight", "weight*'s closure: mask"),
    ),
    Pattern(
        id="context",
        title="`ctx.x = x` in a custom `Function`",
        link="https://github.com/dmlc/dgl/pull/1060",
        source="""
            class Scale(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x, factor):
                    ctx.mask = x > 0
                    ctx.x = x.clone()
                    return x * factor
                @staticmethod
                def backward(ctx, grad):
                    return grad, (grad * ctx.x).sum()
            factor = torch.ones((), device=device, requires_grad=True)
            out = Scale.apply(torch.randn(64, 256, device=device), factor)
        """,
        names=("out",),
        frees=_BATCH + _BATCH + 16 * KIB,
        owners=("out", "out's graph: ctx.x", "out's graph: ctx.mask"),
    ),
    Pattern(
        id="context-output",
        title="`ctx.y = y` of its own output: a cycle through C++",
        link="https://github.com/pytorch/pytorch/issues/25340",
        source="""
            class Double(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    ctx.y = x * 2
                    return ctx.y
                @staticmethod
                def backward(ctx, grad):
                    return grad * 2
            x = torch.randn(64, 256, device=device, requires_grad=True)
            y = Double.apply(x)
        """,
        names=("x", "y"),
        frees=_BATCH + _BATCH,
        owners=("x", "y"),
    ),
    Pattern(
        id="checkpoint",
        needs_saved=True,
        title="a checkpointed loss that is kept",
        link="https://github.com/pytorch/pytorch/issues/115255",
        source="""
            from torch.utils.checkpoint import checkpoint
            model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)).to(device)
            def forward():
                x = torch.randn(64, 256, device=device, requires_grad=True)
                return checkpoint(model, x, use_reentrant=False, preserve_rng_state=False).sum()
            kept = forward()
        """,
        names=("kept",),
        # The input alone: nothing may be recomputed by looking.
        frees=_BATCH + _SCALAR,
        owners=("kept's graph: saved by AccumulateGrad",),
    ),
    Pattern(
        id="autocast",
        needs_saved=True,
        title="`autocast` entered and never left",
        link="https://github.com/ecmwf/anemoi-core/issues/134",
        source="""
            model = nn.Linear(256, 256, bias=False, device=device)
            amp = torch.autocast(device, dtype=torch.bfloat16)
            amp.__enter__()
            # %%
            with torch.no_grad():
                model(torch.randn(64, 256, device=device)).sum().item()
            # %%
            model(torch.randn(64, 256, device=device)).sum().item()
        """,
        names=("model",),
        # The cache, in C++, holds the cast weight and by its graph the weight itself.
        keeps=_MATRIX + _MATRIX // 2,
        frees=0,
        cut="torch.clear_autocast_cache()",
        owners=("model.weight", "*Python can't see*"),
        end="amp.__exit__(None, None, None)",
    ),
)
