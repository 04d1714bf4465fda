"""Leaks over repeated runs: models, optimizers and hooks that a cell changes again each time."""

from __future__ import annotations

from tests.growth.programs import Leak, order_cells

__all__ = ["LEAKS"]

LEAKS = (
    Leak(
        name="hook_registered_in_each_run",
        source="PyTorch's forum: forward hooks that are never removed",
        found_by="runs",
        line=(
            "model[0].register_forward_hook(lambda m, args, out: features.append(out.relu()))",
            "model(torch.rand(12, 3, 32, 32, device=DEVICE))",
        ),
        holder="features",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(0)
            model = (
                nn.Sequential(
                    nn.Conv2d(3, 32, 3, padding=1),
                    nn.ReLU(),
                    nn.AdaptiveAvgPool2d(1),
                    nn.Flatten(),
                    nn.Linear(32, 10),
                )
                .to(DEVICE)
                .eval()
            )
            features = []

            # %%
            # how do the features of the first layer look?
            model[0].register_forward_hook(lambda m, args, out: features.append(out.relu()))
            with torch.no_grad():
                model(torch.rand(12, 3, 32, 32, device=DEVICE))
            print(features[-1].mean((0, 2, 3))[:4].tolist())
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="models_in_a_list",
        source="https://github.com/learnables/learn2learn/issues/88 (a list of copies)",
        found_by="runs",
        line="models.append(copy.deepcopy(net))",
        holder="models",
        runs=order_cells(
            """
            import copy
            import torch
            from torch import nn

            torch.manual_seed(1)
            net = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).to(DEVICE)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            models = []

            # %%
            for _ in range(5):
                x = torch.randn(64, 512, device=DEVICE)
                optimizer.zero_grad()
                (net(x) - x).abs().mean().backward()
                optimizer.step()
            # keep every stage, to see later which generalized best
            optimizer.zero_grad()
            models.append(copy.deepcopy(net))
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="checkpoints_on_the_device_without_limit",
        source="Notebooks that keep model.state_dict() of each run, cloned, on the device",
        found_by="runs",
        line='"state": {k: v.detach().clone() for k, v in model.state_dict().items()},',
        holder="checkpoints",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(2)
            model = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True).to(DEVICE)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            checkpoints = []

            # %%
            for step in range(3):
                x = torch.randn(4, 32, 256, device=DEVICE)
                loss = (model(x) - x.roll(1, dims=1)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            checkpoints.append({
                "loss": loss.item(),
                "state": {k: v.detach().clone() for k, v in model.state_dict().items()},
            })
            best = min(checkpoints, key=lambda c: c["loss"])
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="param_group_added_in_each_run",
        source="PyTorch's forum: add_param_group in a cell that is run again for each new task",
        found_by="runs",
        line="head = nn.Linear(600, 1000).to(DEVICE)",
        holder="optimizer",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(3)
            backbone = nn.Sequential(nn.Linear(64, 600), nn.ReLU()).to(DEVICE)
            optimizer = torch.optim.SGD(backbone.parameters(), lr=0.01)

            # %%
            # a new head for the next task
            head = nn.Linear(600, 1000).to(DEVICE)
            optimizer.add_param_group({"params": head.parameters(), "lr": 0.1})
            for _ in range(4):
                x = torch.randn(32, 64, device=DEVICE)
                y = torch.randint(1000, (32,), device=DEVICE)
                loss = nn.functional.cross_entropy(head(backbone(x)), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            print(loss.item())
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="adapters_wrapped_again_and_again",
        source="peft: running get_peft_model(model) again wraps the wrapped model once more",
        found_by="runs",
        line=(
            "self.down = nn.Linear(dim, rank, bias=False)",
            "self.up = nn.Linear(rank, dim, bias=False)",
            "model = WithAdapter(model, 1024, 512).to(DEVICE)",
        ),
        holder="model",
        runs=order_cells(
            """
            import torch
            from torch import nn

            class WithAdapter(nn.Module):
                '''A frozen model, and a bottleneck beside it that is trained.'''

                def __init__(self, base, dim, rank):
                    super().__init__()
                    self.base = base.requires_grad_(False)
                    self.down = nn.Linear(dim, rank, bias=False)
                    self.up = nn.Linear(rank, dim, bias=False)
                    nn.init.zeros_(self.up.weight)

                def forward(self, x):
                    return self.base(x) + self.up(self.down(x))

            torch.manual_seed(4)
            model = nn.Linear(1024, 1024).to(DEVICE)

            # %%
            model = WithAdapter(model, 1024, 512).to(DEVICE)
            trainable = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.SGD(trainable, lr=0.01)
            for _ in range(4):
                x = torch.randn(32, 1024, device=DEVICE)
                optimizer.zero_grad()
                (model(x) - x.cumsum(1)).square().mean().backward()
                optimizer.step()
            optimizer.zero_grad()
            print(sum(p.numel() for p in trainable), "parameters to train")
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="layers_appended_to_a_sequential",
        source="StackOverflow: model.append(…) or add_module(…) in a cell that is run again",
        found_by="runs",
        line="model.append(nn.Linear(800, 800).to(DEVICE))",
        holder="model",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(5)
            model = nn.Sequential(nn.Linear(100, 800), nn.ReLU()).to(DEVICE)
            x, y = torch.randn(64, 100, device=DEVICE), torch.randn(64, 800, device=DEVICE)

            # %%
            # replace the head by a new one
            model.append(nn.Linear(800, 800).to(DEVICE))
            optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.05)
            for _ in range(4):
                loss = nn.functional.mse_loss(model(x), y)
                model.zero_grad()
                loss.backward()
                optimizer.step()
            model.zero_grad()
            print(len(model), "layers", loss.item())
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="parametrizations_stacked",
        source="https://docs.pytorch.org/tutorials/intermediate/parametrizations.html, run again",
        found_by="runs",
        line=(
            'self.register_buffer("mask", mask.to(torch.float32))',
            "mask = RandomMask(layer.weight.shape, amount=0.1)",
        ),
        holder="parametrizations",
        runs=order_cells(
            """
            import torch
            from torch import nn
            from torch.nn.utils import parametrize

            class RandomMask(nn.Module):
                def __init__(self, shape, amount):
                    super().__init__()
                    mask = torch.rand(shape, device=DEVICE) > amount
                    self.register_buffer("mask", mask.to(torch.float32))

                def forward(self, weight):
                    return weight * self.mask

            torch.manual_seed(6)
            layer = nn.Linear(900, 900).to(DEVICE)

            # %%
            # mask a tenth of the weights, and see how much worse it gets
            mask = RandomMask(layer.weight.shape, amount=0.1)
            parametrize.register_parametrization(layer, "weight", mask)
            with torch.no_grad():
                x = torch.randn(128, 900, device=DEVICE)
                reference = nn.functional.linear(
                    x, layer.parametrizations.weight.original, layer.bias
                )
                print(f"error {(layer(x) - reference).abs().mean().item():.4f}")
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="cache_of_the_model_never_reset",
        source="https://github.com/huggingface/transformers/issues/31717 (a kept cache)",
        found_by="runs",
        line=("q, k, v = self.qkv(x).chunk(3, dim=-1)", "summary = model(chunk).mean(1)"),
        holder="cache",
        runs=order_cells(
            """
            import torch
            from torch import nn

            class CachedAttention(nn.Module):
                '''Keeps the keys and values of what it has seen, chunk by chunk.'''

                def __init__(self, dim):
                    super().__init__()
                    self.qkv = nn.Linear(dim, 3 * dim)
                    self.cache = []

                def reset(self):
                    self.cache.clear()

                def forward(self, x):
                    q, k, v = self.qkv(x).chunk(3, dim=-1)
                    self.cache.append((k, v))
                    keys = torch.cat([k for k, _ in self.cache], dim=1)
                    values = torch.cat([v for _, v in self.cache], dim=1)
                    return nn.functional.scaled_dot_product_attention(q, keys, values)

            torch.manual_seed(7)
            model = CachedAttention(256).to(DEVICE).eval()

            # %%
            document = torch.randn(8, 240, 256, device=DEVICE)
            with torch.inference_mode():
                for chunk in document.split(60, dim=1):
                    summary = model(chunk).mean(1)
            print(summary.norm(dim=1).tolist()[:3])
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="validation_with_a_graph_in_a_list",
        source="https://github.com/pytorch/pytorch/issues/4932",
        found_by="runs",
        line=("h = torch.tanh(self.hidden(x))", "val_preds = net(val_x)"),
        holder="val_history",
        runs=order_cells(
            """
            import torch
            from torch import nn

            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.hidden, self.out = nn.Linear(64, 768), nn.Linear(768, 1)
                    self.skip = nn.Linear(64, 1)

                def forward(self, x):
                    h = torch.tanh(self.hidden(x))
                    return self.out(h) + self.skip(x)

            torch.manual_seed(8)
            net = Net().to(DEVICE)
            opt = torch.optim.Adam(net.parameters(), lr=1e-3)
            x, val_x = torch.randn(4000, 64, device=DEVICE), torch.randn(1000, 64, device=DEVICE)
            y, val_y = (t.prod(1, keepdim=True).sign() for t in (x, val_x))
            val_history = []

            # %%
            for rows in torch.randperm(4000, device=DEVICE).split(1000):
                opt.zero_grad()
                loss = nn.functional.mse_loss(net(x[rows]), y[rows])
                loss.backward()
                opt.step()
            net.eval()
            val_preds = net(val_x)
            val_mse = (val_preds - val_y).square().mean().item()
            val_history.append((len(val_history), val_preds, val_mse))
            net.train();
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="displayed_predictions_in_out",
        source="https://github.com/ipython/ipython/issues/11204",
        found_by="runs",
        line="model(grid).view(1, 1000, 1000)",
        holder="Out",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(9)
            model = (
                nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
                .to(DEVICE)
                .requires_grad_(False)
            )
            axis = torch.linspace(-1, 1, 1000, device=DEVICE)
            grid = torch.cartesian_prod(axis, axis)

            # %%
            # the decision surface
            model(grid).view(1, 1000, 1000)
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="displayed_loss_keeps_the_old_model",
        source="A cell that makes a model anew and ends with the loss: Out keeps its graph",
        found_by="runs",
        line=(
            "*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2)),",
            "model = make_classifier(width=600).to(DEVICE)",
        ),
        holder="Out",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(10)
            x = torch.randn(256, 30, device=DEVICE)
            y = torch.randint(0, 3, (256,), device=DEVICE)

            def make_classifier(width):
                return nn.Sequential(
                    nn.Linear(30, width),
                    nn.ReLU(),
                    *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2)),
                    nn.Linear(width, 3),
                )

            # %%
            model = make_classifier(width=600).to(DEVICE)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            for _ in range(4):
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            loss
            """,
            "1 2 2 2 2 2",
        ),
    ),
)
