"""Clean programs: recipes of training: averages of weights, checkpoints, accumulation."""

from __future__ import annotations

from tests.growth.programs import Program, order_cells

__all__ = ["PROGRAMS"]

PROGRAMS = (
    Program(
        name="gradient_accumulation",
        source="PyTorch's forum: why do we need to set the gradients manually to zero",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(4)
            accumulation_steps = 8
            model = nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
                nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
            ).to(DEVICE)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

            # %%
            optimizer.zero_grad()
            running = 0.0
            for i in range(32):
                images = torch.randn(16, 3, 32, 32, device=DEVICE)
                labels = torch.randint(0, 10, (16,), device=DEVICE)
                loss = nn.functional.cross_entropy(model(images), labels) / accumulation_steps
                loss.backward()
                running += loss.item()
                if (i + 1) % accumulation_steps == 0:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    print(f"update {(i + 1) // accumulation_steps}: {running:.3f}")
                    running = 0.0
            scheduler.step()
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="mixed_precision_bfloat16",
        source="https://docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(5)

            def make_model(in_size, out_size, num_layers):
                layers = []
                for _ in range(num_layers - 1):
                    layers += [nn.Linear(in_size, in_size), nn.ReLU()]
                return nn.Sequential(*layers, nn.Linear(in_size, out_size)).to(DEVICE)

            data = [torch.randn(128, 256, device=DEVICE) for _ in range(6)]
            targets = [torch.randn(128, 256, device=DEVICE) for _ in range(6)]
            loss_fn = nn.MSELoss()
            net = make_model(256, 256, 4)
            opt = torch.optim.Adam(net.parameters(), lr=1e-3, fused=False)

            # %%
            for epoch in range(3):
                for input, target in zip(data, targets):
                    with torch.autocast(device_type=DEVICE, dtype=torch.bfloat16):
                        output = net(input)
                        loss = loss_fn(output, target)
                    loss.backward()
                    opt.step()
                    opt.zero_grad()
                print(epoch, output.dtype, loss.item())
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="gradient_checkpointing",
        source="https://docs.pytorch.org/docs/stable/checkpoint.html",
        runs=order_cells(
            """
            import torch
            from torch import nn
            from torch.utils.checkpoint import checkpoint, checkpoint_sequential

            torch.manual_seed(6)

            class Residual(nn.Module):
                def __init__(self, width):
                    super().__init__()
                    self.norm = nn.LayerNorm(width)
                    self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(),
                                             nn.Dropout(0.1), nn.Linear(4 * width, width))

                def forward(self, x):
                    return x + self.mlp(self.norm(x))

            class Deep(nn.Module):
                def __init__(self, width=128, depth=4):
                    super().__init__()
                    self.blocks = nn.ModuleList(Residual(width) for _ in range(depth))
                    self.out = nn.Linear(width, 1)

                def forward(self, x):
                    for block in self.blocks:
                        x = checkpoint(block, x, use_reentrant=False)
                    return self.out(x)

            model = Deep().to(DEVICE)
            optimizer = torch.optim.Adam(model.parameters())

            # %%
            for step in range(10):
                x = torch.randn(256, 128, device=DEVICE)
                optimizer.zero_grad()
                loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
                loss.backward()
                optimizer.step()
            print(f"{loss.item():.4f}")
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="exponential_moving_average",
        source="The EMA classes of timm and of many GitHub notebooks",
        runs=order_cells(
            """
            import torch
            from torch import nn

            class Averaged:
                def __init__(self, model, decay):
                    self.model, self.decay = model, decay
                    self.shadow, self.own = {}, {}

                def begin(self):
                    for name, param in self.model.named_parameters():
                        if param.requires_grad:
                            self.shadow[name] = param.data.clone()

                def update(self):
                    for name, param in self.model.named_parameters():
                        if param.requires_grad:
                            old = self.shadow[name]
                            self.shadow[name] = (1 - self.decay) * param.data + self.decay * old

                def swap_in(self):
                    for name, param in self.model.named_parameters():
                        if param.requires_grad:
                            self.own[name] = param.data
                            param.data = self.shadow[name]

                def swap_out(self):
                    for name, param in self.model.named_parameters():
                        if param.requires_grad:
                            param.data = self.own[name]
                    self.own = {}

            torch.manual_seed(7)
            model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)).to(DEVICE)
            optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4)
            ema = Averaged(model, 0.99)
            ema.begin()

            # %%
            for step in range(20):
                noise = torch.randn(64, 512, device=DEVICE)
                loss = (model(noise) - noise.sign()).abs().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                ema.update()
            ema.swap_in()
            with torch.no_grad():
                print("averaged", (model(noise) - noise.sign()).abs().mean().item())
            ema.swap_out()
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="stochastic_weight_averaging",
        source="https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema",
        runs=order_cells(
            """
            import torch
            from torch import nn
            from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

            torch.manual_seed(8)
            loader = [(torch.randn(64, 256, device=DEVICE), torch.randn(64, 1, device=DEVICE))
                      for _ in range(5)]

            # %%
            model = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.ReLU(),
                                  nn.Linear(512, 1)).to(DEVICE)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            swa_model = AveragedModel(model)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
            swa_start = 4
            swa_scheduler = SWALR(optimizer, swa_lr=0.01)

            for epoch in range(8):
                for input, target in loader:
                    optimizer.zero_grad()
                    nn.functional.mse_loss(model(input), target).backward()
                    optimizer.step()
                if epoch > swa_start:
                    swa_model.update_parameters(model)
                    swa_scheduler.step()
                else:
                    scheduler.step()
            update_bn((x for x, _ in loader), swa_model)
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="learning_rate_finder",
        source="https://github.com/davidtvs/pytorch-lr-finder",
        runs=order_cells(
            """
            import copy
            import torch
            from torch import nn

            torch.manual_seed(9)
            model = nn.Sequential(nn.Linear(300, 700), nn.ReLU(), nn.Linear(700, 300), nn.ReLU(),
                                  nn.Linear(300, 2)).to(DEVICE)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-7, weight_decay=1e-2)

            class LRFinder:
                def __init__(self, model, optimizer, criterion):
                    self.model, self.optimizer, self.criterion = model, optimizer, criterion
                    self.history = {"lr": [], "loss": []}
                    self.best_loss = None
                    self.saved_model = copy.deepcopy(model.state_dict())
                    self.saved_optimizer = copy.deepcopy(optimizer.state_dict())

                def range_test(self, batches, end_lr=10, n_steps=40, smoothing=0.05, stop_factor=5):
                    start_lr = self.optimizer.param_groups[0]["lr"]
                    for iteration in range(n_steps):
                        lr = start_lr * (end_lr / start_lr) ** (iteration / (n_steps - 1))
                        for group in self.optimizer.param_groups:
                            group["lr"] = lr
                        x, y = next(batches)
                        self.optimizer.zero_grad()
                        loss = self.criterion(self.model(x), y)
                        loss.backward()
                        self.optimizer.step()
                        loss = loss.item()
                        if iteration and smoothing:
                            loss = smoothing * loss + (1 - smoothing) * self.history["loss"][-1]
                        self.history["lr"].append(lr)
                        self.history["loss"].append(loss)
                        if self.best_loss is None or loss < self.best_loss:
                            self.best_loss = loss
                        if loss > stop_factor * self.best_loss:
                            print("the loss diverges at", lr)
                            break

                def reset(self):
                    self.model.load_state_dict(self.saved_model)
                    self.optimizer.load_state_dict(self.saved_optimizer)

            def endless(batch_size=64):
                while True:
                    x = torch.randn(batch_size, 300, device=DEVICE)
                    yield x, (x[:, 0] > 0).long()

            # %%
            finder = LRFinder(model, optimizer, nn.CrossEntropyLoss())
            finder.range_test(endless())
            finder.reset()
            best = min(range(len(finder.history["loss"])), key=finder.history["loss"].__getitem__)
            print(f"minimum at lr={finder.history['lr'][best]:.2e}")
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="lbfgs_closure_and_history",
        source="https://docs.pytorch.org/docs/stable/generated/torch.optim.LBFGS.html",
        runs=order_cells(
            """
            import torch

            torch.manual_seed(11)
            # a smooth image that fits noisy measurements
            measured = torch.rand(256, 256, device=DEVICE)
            image = torch.zeros(256, 256, device=DEVICE, requires_grad=True)
            optimizer = torch.optim.LBFGS([image], lr=0.5, max_iter=5, history_size=20)
            log = []

            # %%
            # each step of the optimizer remembers up to 20 differences of images and gradients
            for step in range(4):
                def closure():
                    optimizer.zero_grad()
                    tv = (image[1:] - image[:-1]).pow(2).sum() + (image[:, 1:] - image[:, :-1]).pow(
                        2
                    ).sum()
                    loss = (image - measured).pow(2).sum() + 0.1 * tv + 0.01 * image.exp().sum()
                    loss.backward()
                    return loss
                log.append(optimizer.step(closure).item())
            log[-1]
            """,
            "1 2 2 2 2 2 2",
        ),
    ),
    Program(
        name="snapshot_ensemble_on_the_cpu",
        source="Snapshot ensembles: train 1, get M for free (cyclic learning rates)",
        runs=order_cells(
            """
            import math
            import torch
            from torch import nn

            torch.manual_seed(13)
            x = torch.linspace(-3, 3, 512, device=DEVICE).unsqueeze(1)
            y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)
            model = nn.Sequential(
                nn.Linear(1, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1)
            ).to(DEVICE)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            keep_last = 3
            snapshots = []

            # %%
            steps_per_cycle = 8
            for cycle in range(2):
                for step in range(steps_per_cycle):
                    for group in optimizer.param_groups:
                        group["lr"] = 0.05 * (math.cos(math.pi * step / steps_per_cycle) + 1)
                    loss = (model(x) - y).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                snapshots.append(
                    {
                        name: weight.detach().cpu().clone()
                        for name, weight in model.state_dict().items()
                    }
                )
                if len(snapshots) > keep_last:
                    snapshots.pop(0)

            # %%
            def predict(state):
                model.load_state_dict(state)
                with torch.no_grad():
                    return model(x)

            current = {name: weight.clone() for name, weight in model.state_dict().items()}
            mean = sum(predict(state) for state in snapshots) / len(snapshots)
            model.load_state_dict(current)
            print("ensemble error", (mean - y).square().mean().item())
            """,
            "1 2 3 2 3 2 3 2 3 2 3",
        ),
    ),
    Program(
        name="checkpoints_keep_the_last_two",
        source="Trainers with save_total_limit=2, writing to memory here",
        runs=order_cells(
            """
            import io
            import torch
            from torch import nn

            torch.manual_seed(14)

            class Trainer:
                def __init__(self, model, save_total_limit=2):
                    self.model = model.to(DEVICE)
                    self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
                    self.save_total_limit = save_total_limit
                    self.checkpoints = {}
                    self.global_step = 0

                def training_step(self, batch):
                    self.model.train()
                    recon = self.model(batch)
                    loss = nn.functional.mse_loss(recon, batch)
                    loss.backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.global_step += 1
                    return loss.detach()

                def save(self):
                    buffer = io.BytesIO()
                    torch.save(
                        {
                            "model": self.model.state_dict(),
                            "optimizer": self.optimizer.state_dict(),
                        },
                        buffer,
                    )
                    self.checkpoints[self.global_step] = buffer
                    for step in sorted(self.checkpoints)[: -self.save_total_limit]:
                        del self.checkpoints[step]

                def fit(self, n_steps, save_every):
                    total = torch.zeros((), device=DEVICE)
                    for _ in range(n_steps):
                        total += self.training_step(torch.rand(64, 400, device=DEVICE))
                        if self.global_step % save_every == 0:
                            self.save()
                    return (total / n_steps).item()

            trainer = Trainer(nn.Sequential(nn.Linear(400, 250), nn.SiLU(), nn.Linear(250, 400)))

            # %%
            trainer.fit(n_steps=12, save_every=3)
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="resume_from_the_same_checkpoint",
        source="https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html",
        runs=order_cells(
            """
            import io
            import torch
            from torch import nn

            torch.manual_seed(16)

            def build():
                model = nn.Sequential(nn.Linear(256, 768), nn.ReLU(), nn.Linear(768, 256)).to(
                    DEVICE
                )
                return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

            def train(model, optimizer, steps):
                for _ in range(steps):
                    x = torch.randn(64, 256, device=DEVICE)
                    optimizer.zero_grad()
                    loss = (model(x) - x.flip(1)).square().mean()
                    loss.backward()
                    optimizer.step()
                return loss.item()

            model, optimizer = build()
            train(model, optimizer, 5)
            file = io.BytesIO()
            torch.save(
                {"epoch": 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file
            )

            # %%
            file.seek(0)
            checkpoint = torch.load(file, map_location=DEVICE, weights_only=True)
            model, optimizer = build()
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            epoch = checkpoint["epoch"]
            print("resumed after epoch", epoch, train(model, optimizer, 10))
            """,
            "1 2 2 2 2 2",
        ),
    ),
)
