"""Leaks within a loop: structures of a model, a trainer or a cache that grow in each step."""

from __future__ import annotations

from tests.growth.programs import Leak, order_cells

__all__ = ["LEAKS"]

LEAKS = (
    Leak(
        name="activations_appended_by_hooks",
        source="https://github.com/meta-pytorch/opacus/issues/176 (hooks that store activations)",
        found_by="steps",
        line="prediction = model(volume)",
        holder="activations",
        runs=order_cells(
            """
            import collections
            import torch
            from torch import nn

            torch.manual_seed(0)
            model = nn.Sequential(nn.Conv3d(1, 6, 3, padding=1), nn.ReLU(),
                                  nn.Conv3d(6, 1, 3, padding=1)).to(DEVICE)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            activations = collections.defaultdict(list)

            def save_activation(name):
                def hook(module, inputs, output):
                    activations[name].append(output)
                return hook

            for name, module in model.named_modules():
                if isinstance(module, nn.ReLU):
                    module.register_forward_hook(save_activation(name))

            # %%
            for step in range(36):
                volume = torch.rand(2, 1, 24, 24, 24, device=DEVICE)
                prediction = model(volume)
                loss = (prediction - volume).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print({name: len(kept) for name, kept in activations.items()})
            """,
            "1 2",
        ),
    ),
    Leak(
        name="feature_maps_of_a_visualizer",
        source="Feature visualizers that keep each batch's maps until somebody draws them",
        found_by="steps",
        line=("self.maps[name].append(output.detach().clone())", "scores = network(images)"),
        holder="visualizer",
        runs=order_cells(
            """
            import torch
            from torch import nn

            class FeatureVisualizer:
                def __init__(self, network, names):
                    self.maps = {name: [] for name in names}
                    for name in names:
                        network.get_submodule(name).register_forward_hook(self.make_hook(name))

                def make_hook(self, name):
                    def keep(module, args, output):
                        self.maps[name].append(output.detach().clone())
                    return keep

                def show_last(self):
                    for name, maps in self.maps.items():
                        print(name, tuple(maps[-1].shape), f"{maps[-1].mean().item():.3f}")

            torch.manual_seed(1)
            network = nn.Sequential()
            network.add_module("stem", nn.Conv2d(3, 8, 3, stride=2, padding=1))
            network.add_module("act", nn.SiLU())
            network.add_module("stage1", nn.Conv2d(8, 16, 3, stride=2, padding=1))
            network.add_module("pool", nn.AdaptiveAvgPool2d(1))
            network.add_module("flat", nn.Flatten())
            network.add_module("head", nn.Linear(16, 10))
            network.to(DEVICE)
            visualizer = FeatureVisualizer(network, ["stem", "stage1"])
            optimizer = torch.optim.Adam(network.parameters())

            # %%
            for i in range(36):
                images = torch.rand(16, 3, 48, 48, device=DEVICE)
                scores = network(images)
                loss = nn.functional.cross_entropy(
                    scores, torch.randint(0, 10, (16,), device=DEVICE)
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            visualizer.show_last()
            """,
            "1 2",
        ),
    ),
    Leak(
        name="attention_maps_kept_by_the_model",
        source="https://github.com/jmschrei/tangermeme/pull/84 (activations as attributes)",
        found_by="steps",
        line=(
            "weights = (q @ k.transpose(-2, -1) / q.size(-1) ** 0.5).softmax(-1)",
            "loss = (model(x) - x).square().mean()",
        ),
        holder="attention_maps",
        runs=order_cells(
            """
            import torch
            from torch import nn

            class SelfAttention(nn.Module):
                def __init__(self, dim, heads):
                    super().__init__()
                    self.heads = heads
                    self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
                    self.attention_maps = []

                def forward(self, x):
                    n, t, d = x.shape
                    q, k, v = self.qkv(x).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
                    weights = (q @ k.transpose(-2, -1) / q.size(-1) ** 0.5).softmax(-1)
                    self.attention_maps.append(weights)
                    return self.proj((weights @ v).transpose(1, 2).reshape(n, t, d))

            torch.manual_seed(2)
            model = nn.Sequential(nn.Linear(16, 64), SelfAttention(64, 4), nn.Linear(64, 16)).to(
                DEVICE
            )
            optimizer = torch.optim.AdamW(model.parameters())

            # %%
            for step in range(36):
                x = torch.randn(8, 80, 16, device=DEVICE)
                loss = (model(x) - x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            """,
            "1 2",
        ),
    ),
    Leak(
        name="layers_made_in_forward",
        source="StackOverflow: layers made in forward() and appended to self.layers in each call",
        found_by="steps",
        line=(
            "projection = nn.Linear(x.size(1), self.width).to(x.device)",
            "loss = (model(x) - x.mean(1, keepdim=True)).square().mean()",
        ),
        holder="layers",
        runs=order_cells(
            """
            import torch
            from torch import nn

            class LazyEncoder(nn.Module):
                '''Makes a layer for whatever width comes in.'''

                def __init__(self, width):
                    super().__init__()
                    self.width = width
                    self.layers = nn.ModuleList()
                    self.out = nn.Linear(width, 1)

                def forward(self, x):
                    projection = nn.Linear(x.size(1), self.width).to(x.device)
                    self.layers.append(projection)
                    return self.out(torch.relu(self.layers[-1](x)))

            torch.manual_seed(3)
            model = LazyEncoder(400).to(DEVICE)
            optimizer = torch.optim.SGD(model.out.parameters(), lr=0.01)

            # %%
            for step in range(40):
                x = torch.randn(32, 300, device=DEVICE)
                loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
                model.zero_grad()
                loss.backward()
                optimizer.step()
            print(sum(p.numel() for p in model.parameters()), "parameters")
            """,
            "1 2",
        ),
    ),
    Leak(
        name="logs_of_a_trainer_by_step",
        source="https://github.com/pytorch/torchtitan/issues/763 (a dict of metrics)",
        found_by="steps",
        line="mask_logits = self.model(batch)",
        holder="logs",
        runs=order_cells(
            """
            import torch
            from torch import nn

            class Trainer:
                def __init__(self, model, lr):
                    self.model = model.to(DEVICE)
                    self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
                    self.logs = {}
                    self.step = 0

                def log(self, **values):
                    for name, value in values.items():
                        self.logs[f"step_{self.step:05d}/{name}"] = value

                def training_step(self, batch):
                    mask_logits = self.model(batch)
                    loss = nn.functional.binary_cross_entropy_with_logits(mask_logits, batch)
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    self.log(loss=loss.item(), mask_logits=mask_logits.detach())
                    self.step += 1

                def fit(self, batches):
                    for batch in batches:
                        self.training_step(batch)

            torch.manual_seed(4)
            model = nn.Sequential(
                nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 1, 5, padding=2)
            )
            trainer = Trainer(model, lr=1e-3)

            # %%
            trainer.fit(torch.rand(16, 1, 80, 80, device=DEVICE).round() for _ in range(36))
            """,
            "1 2",
        ),
    ),
    Leak(
        name="contexts_of_a_custom_function",
        source="https://github.com/dmlc/dgl/pull/1060 (ctx.x = x in a custom Function)",
        found_by="steps",
        line=("signs = torch.where(x > 0, 1.0, -1.0)", "logits = head(Binarize.apply(x))"),
        holder="contexts",
        runs=order_cells(
            """
            import torch
            from torch import nn

            contexts = []

            class Binarize(torch.autograd.Function):
                '''The sign, with the gradient of the identity between -1 and 1.'''

                @staticmethod
                def forward(ctx, x):
                    signs = torch.where(x > 0, 1.0, -1.0)
                    ctx.signs, ctx.small = signs, x.abs() <= 1
                    contexts.append(ctx)  # to look at the signs while debugging
                    return signs.clone()

                @staticmethod
                def backward(ctx, grad):
                    return grad * ctx.small

            torch.manual_seed(5)
            layer, head = nn.Linear(128, 512).to(DEVICE), nn.Linear(512, 10).to(DEVICE)
            optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=1e-3)

            # %%
            for step in range(36):
                x = layer(torch.randn(256, 128, device=DEVICE))
                logits = head(Binarize.apply(x))
                y = torch.randint(0, 10, (256,), device=DEVICE)
                loss = nn.functional.cross_entropy(logits, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"loss {loss.item():.3f}, {contexts[-1].signs.mean().item():+.3f}")
            """,
            "1 2",
        ),
    ),
    Leak(
        name="memory_bank_without_limit",
        source="Contrastive notebooks whose memory bank appends each batch and is never cut",
        found_by="steps",
        line="keys = F.normalize(encoder(second), dim=1)",
        holder="bank",
        runs=order_cells(
            """
            import torch
            from torch import nn
            import torch.nn.functional as F

            class MemoryBank:
                def __init__(self):
                    self.chunks = []

                def enqueue(self, keys):
                    self.chunks.append(keys)

                def negatives(self, n):
                    return torch.cat(self.chunks[-n:]) if self.chunks else None

            torch.manual_seed(6)
            encoder = nn.Sequential(nn.Linear(192, 384), nn.ReLU(), nn.Linear(384, 384)).to(DEVICE)
            optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05)
            bank = MemoryBank()

            # %%
            for step in range(40):
                views = torch.randn(256, 192, device=DEVICE)
                first = views + 0.1 * torch.randn_like(views)
                second = views + 0.1 * torch.randn_like(views)
                queries = F.normalize(encoder(first), dim=1)
                with torch.no_grad():
                    keys = F.normalize(encoder(second), dim=1)
                positive = (queries * keys).sum(1, keepdim=True)
                negatives = bank.negatives(2)
                logits = positive
                if negatives is not None:
                    logits = torch.cat([positive, queries @ negatives.T], dim=1)
                loss = F.cross_entropy(
                    logits / 0.2, torch.zeros(256, dtype=torch.long, device=DEVICE)
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                bank.enqueue(keys)
            """,
            "1 2",
        ),
    ),
    Leak(
        name="dataset_that_caches_augmented_samples",
        source="Datasets that cache in __getitem__, under a key that never comes again",
        found_by="steps",
        line=(
            "self.cache[index, shift] = torch.roll(sample, shift, dims=-1)",
            "for spectrogram, label in loader:",
        ),
        holder="cache",
        runs=order_cells(
            """
            import random
            import torch
            from torch import nn
            from torch.utils.data import DataLoader, Dataset

            class Spectrograms(Dataset):
                def __init__(self, n):
                    self.n, self.cache = n, {}

                def __len__(self):
                    return self.n

                def load(self, index):
                    generator = torch.Generator().manual_seed(index)
                    return torch.rand(1, 64, 128, generator=generator)

                def __getitem__(self, index):
                    shift = random.randrange(1_000_000)
                    if (index, shift) not in self.cache:
                        sample = self.load(index).to(DEVICE)
                        self.cache[index, shift] = torch.roll(sample, shift, dims=-1)
                    return self.cache[index, shift], index % 5

            torch.manual_seed(7)
            random.seed(7)
            loader = DataLoader(Spectrograms(96), batch_size=8, shuffle=True)
            model = nn.Sequential(
                nn.Conv2d(1, 8, 5, stride=3),
                nn.ReLU(),
                nn.Conv2d(8, 8, 5, stride=3),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(8, 5),
            ).to(DEVICE)
            optimizer = torch.optim.Adam(model.parameters())

            # %%
            for epoch in range(3):
                for spectrogram, label in loader:
                    loss = nn.functional.cross_entropy(model(spectrogram), label.to(DEVICE))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                print(f"epoch {epoch}: {loss.item():.3f}")
            """,
            "1 2",
        ),
    ),
    Leak(
        name="gradients_kept_by_a_monitor",
        source="https://github.com/pytorch/pytorch/issues/74831 (gradients collected by hooks)",
        found_by="steps",
        line="loss.backward()",
        holder="monitor",
        runs=order_cells(
            """
            import collections
            import torch
            from torch import nn

            class GradientMonitor:
                def __init__(self, model):
                    self.history = collections.defaultdict(list)
                    for name, parameter in model.named_parameters():
                        if parameter.dim() > 1:
                            parameter.register_hook(self.keep(name))

                def keep(self, name):
                    return lambda grad: self.history[name].append(grad)

                def norms(self):
                    return {
                        name: [g.norm().item() for g in kept] for name, kept in self.history.items()
                    }

            torch.manual_seed(8)
            model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).to(DEVICE)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            monitor = GradientMonitor(model)

            # %%
            for step in range(36):
                x = torch.randn(32, 256, device=DEVICE)
                loss = (model(x) - x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            norms = monitor.norms()
            """,
            "1 2",
        ),
    ),
    Leak(
        name="prototypes_added_for_each_batch",
        source="Continual learning: an nn.ParameterList of prototypes that no rule ever cuts",
        found_by="steps",
        line=(
            "self.prototypes.append(nn.Parameter(features.detach().clone()))",
            "loss = nn.functional.cross_entropy(net(x), torch.arange(128, device=DEVICE))",
        ),
        holder="prototypes",
        runs=order_cells(
            """
            import torch
            from torch import nn

            class PrototypeNet(nn.Module):
                def __init__(self, n_in, dim):
                    super().__init__()
                    self.embed = nn.Sequential(nn.Linear(n_in, dim), nn.LayerNorm(dim), nn.GELU())
                    self.prototypes = nn.ParameterList()

                def remember(self, features, threshold=0.1):
                    known = (
                        self.prototypes[-1] if len(self.prototypes) else torch.zeros_like(features)
                    )
                    if (features - known).abs().mean() > threshold:
                        self.prototypes.append(nn.Parameter(features.detach().clone()))

                def forward(self, x):
                    features = self.embed(x)
                    self.remember(features)
                    return features @ self.prototypes[-1].T

            torch.manual_seed(9)
            net = PrototypeNet(100, 512).to(DEVICE)
            optimizer = torch.optim.Adam(net.embed.parameters(), lr=1e-3)

            # %%
            for task in range(4):
                for _ in range(9):
                    x = torch.randn(128, 100, device=DEVICE) + task
                    loss = nn.functional.cross_entropy(net(x), torch.arange(128, device=DEVICE))
                    loss.backward()
                    optimizer.step()
                    net.zero_grad()
            print(len(net.prototypes), "prototypes")
            """,
            "1 2",
        ),
    ),
)
