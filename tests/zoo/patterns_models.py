"""What models, optimizers and their helpers keep."""

from __future__ import annotations

from tests.zoo.pattern import KIB, Pattern

__all__ = ["PATTERNS"]

#: A matrix of 256 × 256 floats, and a batch of 64 × 256.
_MATRIX = 256 * KIB
_BATCH = 64 * KIB

_TRAINED = """
            model = nn.Linear(256, 256, bias=False, device=device)
            opt = torch.optim.{optimizer}
            model(torch.randn(64, 256, device=device)).sum().backward()
            opt.step()
"""

PATTERNS = (
    Pattern(
        id="adam",
        title="Adam's state",
        link="https://github.com/roboflow/rf-detr/pull/1342",
        source=_TRAINED.format(optimizer="Adam(model.parameters())"),
        names=("opt",),
        # Two averages; on the CPU a count of steps too, which stays there with a GPU.
        frees=2 * _MATRIX + 4,
        frees_on_gpu=2 * _MATRIX,
        owners=('opt.state[*]["exp_avg"]', 'opt.state[*]["exp_avg_sq"]'),
    ),
    Pattern(
        id="model-and-optimizer",
        title="a model that its optimizer holds",
        link="https://github.com/cornellius-gp/gpytorch/issues/550",
        source=_TRAINED.format(optimizer="SGD(model.parameters(), lr=0.1, momentum=0.9)"),
        names=("model", "opt"),
        frees=3 * _MATRIX,
        owners=(
            "model.weight",
            'opt.param_groups[0]["params"][0]',
            'opt.state[*]["momentum_buffer"]',
        ),
    ),
    Pattern(
        id="scheduler",
        title="an LR scheduler that holds optimizer and model",
        link="https://github.com/pytorch/pytorch/issues/25605",
        source="""
            model = nn.Linear(256, 256, bias=False, device=device)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 0.9**epoch)
            # %%
            del model, opt
        """,
        names=("sched",),
        frees=_MATRIX,
        owners=('sched.optimizer.param_groups[0]["params"][0]',),
    ),
    Pattern(
        id="scheduler-lambda",
        title="a trainer, its scheduler's lambda and back: a cycle",
        link="https://github.com/pytorch/pytorch/issues/47589",
        source="""
            class Trainer:
                def __init__(self):
                    self.lr = 1.0
                    self.model = nn.Linear(256, 256, bias=False, device=device)
                    self.opt = torch.optim.SGD(self.model.parameters(), lr=self.lr)
                    self.sched = torch.optim.lr_scheduler.LambdaLR(
                        self.opt, lambda epoch: self.lr
                    )
            trainer = Trainer()
        """,
        names=("trainer",),
        frees=_MATRIX,
        owners=("trainer.model.weight",),
    ),
    Pattern(
        id="ema",
        title="an averaged copy (EMA)",
        link="https://github.com/pytorch/pytorch/pull/94820",
        source="""
            from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
            model = nn.Linear(256, 256, bias=False, device=device)
            ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
            ema.update_parameters(model)
        """,
        names=("ema",),
        # The weights, and the number of models averaged, which stays on the CPU.
        frees=_MATRIX + 8,
        frees_on_gpu=_MATRIX,
        owners=("ema.module.weight",),
    ),
    Pattern(
        id="snapshots",
        title="`deepcopy(model)` every epoch",
        link="https://github.com/learnables/learn2learn/issues/88",
        source="""
            import copy
            model = nn.Linear(256, 256, bias=False, device=device)
            snapshots = [copy.deepcopy(model) for epoch in range(3)]
        """,
        names=("snapshots",),
        frees=3 * _MATRIX,
        owners=("snapshots[0].weight",),
    ),
    Pattern(
        id="best-state",
        title="`best_state = model.state_dict()`",
        link="https://github.com/pytorch/pytorch/issues/34765",
        source="""
            model = nn.Linear(256, 256, bias=False, device=device)
            best_state = model.state_dict()
        """,
        names=("model", "best_state"),
        frees=_MATRIX,
        owners=("model.weight", 'best_state["weight"]'),
    ),
    Pattern(
        id="best-state-copy",
        title="`deepcopy(model.state_dict())`",
        link="https://github.com/facebookresearch/pytext/pull/204",
        source="""
            import copy
            model = nn.Linear(256, 256, bias=False, device=device)
            best = {"epoch": 3, "state": copy.deepcopy(model.state_dict())}
        """,
        names=("best",),
        frees=_MATRIX,
        owners=('best["state"]["weight"]',),
    ),
    Pattern(
        id="tied",
        title="tied weights of two modules",
        link="https://github.com/dhansmair/flamingo-mini/issues/4",
        source="""
            embedding = nn.Embedding(256, 256, device=device)
            head = nn.Linear(256, 256, bias=False, device=device)
            head.weight = embedding.weight
        """,
        names=("embedding", "head"),
        frees=_MATRIX,
        owners=("embedding.weight", "head.weight"),
    ),
    Pattern(
        id="buffers",
        title="buffers and running statistics",
        link="https://github.com/pytorch/pytorch/issues/128211",
        source="""
            class Attention(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.norm = nn.BatchNorm1d(256, affine=False)
                    self.register_buffer("mask", torch.ones(256, 256).tril(), persistent=False)
            model = Attention().to(device)
        """,
        names=("model",),
        # The mask, mean and variance, and the number of batches.
        frees=_MATRIX + 2 * KIB + 8,
        owners=("model.mask", "model.norm.running_mean"),
    ),
    Pattern(
        id="parametrization",
        title="a parametrized weight",
        link="https://github.com/pytorch/pytorch/pull/103001",
        source="""
            from torch.nn.utils.parametrizations import weight_norm
            layer = weight_norm(nn.Linear(256, 256, bias=False, device=device))
        """,
        names=("layer",),
        frees=_MATRIX + KIB,
        owners=('layer.parametrizations["weight"].original1',),
    ),
    Pattern(
        id="cached-activations",
        title="activations left as attributes of a module",
        link="https://github.com/jmschrei/tangermeme/pull/84",
        source="""
            class Block(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.fc = nn.Linear(256, 256, bias=False)
                def forward(self, x):
                    self.input, self.output = x, self.fc(x)
                    return self.output.sum()
            model = nn.Sequential(Block()).to(device)
            with torch.no_grad():
                model(torch.randn(64, 256, device=device)).item()
        """,
        names=("model",),
        frees=_MATRIX + 2 * _BATCH,
        owners=("model[0].fc.weight", "model[0].input", "model[0].output"),
    ),
    Pattern(
        id="forward-hook",
        title="a forward hook that stores activations",
        link="https://github.com/meta-pytorch/opacus/issues/176",
        source="""
            model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).to(device)
            features = {}
            def keep(name):
                return lambda module, args, output: features.setdefault(name, output)
            for name, module in model.named_children():
                module.register_forward_hook(keep(name))
            del name, module
            # %%
            with torch.no_grad():
                model(torch.randn(64, 256, device=device)).sum().item()
        """,
        names=("features",),
        frees=2 * _BATCH,
        owners=('features["0"]', 'features["1"]'),
    ),
    Pattern(
        id="hook-self",
        title="a hook that refers to its own module: a cycle",
        link="https://github.com/pytorch/pytorch/issues/46386",
        source="""
            class Leaky(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.net = nn.Linear(256, 256, bias=False)
                    self.register_forward_hook(lambda module, args, output: self.net.weight)
            model = Leaky().to(device)
        """,
        names=("model",),
        frees=_MATRIX,
        owners=("model.net.weight",),
    ),
    Pattern(
        id="lambda-self",
        title="a lambda that refers to its own module: a cycle",
        link="https://github.com/pytorch/pytorch/issues/28647",
        source="""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.memory = nn.Linear(256, 256, bias=False)
                    self.recall = lambda x: self.memory(x)
            net = Net().to(device)
        """,
        names=("net",),
        frees=_MATRIX,
        owners=("net.memory.weight",),
    ),
    Pattern(
        id="profiler",
        title="a profiler that maps tensors to names",
        link="https://github.com/Stonesjtu/pytorch_memlab/issues/17",
        source="""
            class Reporter:
                def __init__(self, model):
                    self.tensor_name = {p: name for name, p in model.named_parameters()}
            model = nn.Linear(256, 256, bias=False, device=device)
            reporter = Reporter(model)
            # %%
            del model
        """,
        names=("reporter",),
        frees=_MATRIX,
        owners=("reporter.tensor_name*",),
    ),
    Pattern(
        id="kv-cache",
        title="a KV cache kept after `generate`",
        link="https://github.com/huggingface/transformers/issues/31717",
        source="""
            from dataclasses import dataclass
            @dataclass
            class Output:
                logits: torch.Tensor
                past_key_values: tuple
            def generate():
                past = tuple(
                    (torch.zeros(1, 4, 64, 256, device=device),
                     torch.zeros(1, 4, 64, 256, device=device))
                    for layer in range(2)
                )
                return Output(torch.zeros(1, 256, device=device), past)
            output = generate()
        """,
        names=("output",),
        frees=4 * _MATRIX + KIB,
        owners=("output.logits", "output.past_key_values[1][0]"),
    ),
    Pattern(
        id="compile",
        needs_saved=True,
        title="a compiled model",
        link="https://github.com/pytorch/pytorch/issues/119607",
        source="""
            model = nn.Linear(256, 256, bias=False, device=device)
            x = torch.randn(64, 256, device=device)
            # %%
            fast = torch.compile(model, backend="eager")
            fast(x).sum().item()
        """,
        names=("model", "fast", "x"),
        unwatched=(2,),
        frees=_MATRIX + _BATCH,
        owners=("model.weight", "fast._orig_mod"),
        end="torch._dynamo.reset()",
    ),
)
