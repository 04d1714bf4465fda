"""Clean programs: loops that train a classifier or a regressor."""

from __future__ import annotations

from tests.growth.programs import Program, order_cells

__all__ = ["PROGRAMS"]

PROGRAMS = (
    Program(
        name="quickstart_train_and_test",
        source="https://docs.pytorch.org/tutorials/beginner/basics/quickstart_tutorial.html",
        runs=order_cells(
            """
            import torch
            from torch import nn
            from torch.utils.data import DataLoader, TensorDataset

            torch.manual_seed(0)
            batch_size = 64

            def make_data(n):
                labels = torch.randint(0, 10, (n,))
                images = torch.randn(n, 1, 28, 28) + labels.view(-1, 1, 1, 1) / 5
                return TensorDataset(images, labels)

            train_loader = DataLoader(make_data(1024), batch_size=batch_size, shuffle=True)
            test_loader = DataLoader(make_data(256), batch_size=batch_size)

            # %%
            class Classifier(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.flatten = nn.Flatten()
                    self.layers = nn.Sequential(
                        nn.Linear(28 * 28, 512),
                        nn.ReLU(),
                        nn.Linear(512, 512),
                        nn.ReLU(),
                        nn.Linear(512, 10),
                    )

                def forward(self, images):
                    return self.layers(self.flatten(images))

            model = Classifier().to(DEVICE)
            criterion = nn.CrossEntropyLoss()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

            def run_training(loader):
                model.train()
                for step, (images, labels) in enumerate(loader):
                    images, labels = images.to(DEVICE), labels.to(DEVICE)
                    loss = criterion(model(images), labels)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if step % 5 == 0:
                        print(f"loss {loss.item():.4f} [{step * batch_size}/{len(loader.dataset)}]")

            def run_test(loader):
                model.eval()
                loss, correct = 0.0, 0
                with torch.no_grad():
                    for images, labels in loader:
                        images, labels = images.to(DEVICE), labels.to(DEVICE)
                        logits = model(images)
                        loss += criterion(logits, labels).item()
                        correct += (logits.argmax(1) == labels).sum().item()
                print(
                    f"accuracy {correct / len(loader.dataset):.1%}, loss {loss / len(loader):.4f}"
                )

            # %%
            for epoch in range(2):
                print(f"epoch {epoch + 1}")
                run_training(train_loader)
                run_test(test_loader)
            """,
            "1 2 3 3 3 3 3",
        ),
    ),
    Program(
        name="sixty_minute_blitz_classifier",
        source="https://docs.pytorch.org/tutorials/beginner/blitz/cifar10_tutorial.html",
        runs=order_cells(
            """
            import torch
            import torch.nn as nn
            import torch.nn.functional as F
            import torch.optim as optim

            torch.manual_seed(1)

            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.first = nn.Conv2d(3, 6, 5)
                    self.second = nn.Conv2d(6, 16, 5)
                    self.wide = nn.Linear(16 * 5 * 5, 120)
                    self.narrow = nn.Linear(120, 84)
                    self.classes = nn.Linear(84, 10)

                def forward(self, x):
                    x = F.max_pool2d(F.relu(self.first(x)), 2)
                    x = F.max_pool2d(F.relu(self.second(x)), 2)
                    x = torch.flatten(x, 1)
                    x = F.relu(self.wide(x))
                    x = F.relu(self.narrow(x))
                    return self.classes(x)

            net = Net().to(DEVICE)
            criterion = nn.CrossEntropyLoss()
            optimizer = optim.SGD(net.parameters(), lr=0.001, momentum=0.9)

            def batches(n_batches=20, size=32):
                for _ in range(n_batches):
                    yield torch.randn(size, 3, 32, 32), torch.randint(0, 10, (size,))

            # %%
            # Train for two more passes over the data
            for epoch in range(2):
                window_loss = 0.0
                for i, data in enumerate(batches(), 0):
                    inputs, labels = data[0].to(DEVICE), data[1].to(DEVICE)
                    optimizer.zero_grad()
                    outputs = net(inputs)
                    loss = criterion(outputs, labels)
                    loss.backward()
                    optimizer.step()
                    window_loss += loss.item()
                    if i % 10 == 9:
                        print(f"[{epoch + 1}, {i + 1:3d}] loss: {window_loss / 10:.3f}")
                        window_loss = 0.0
            print("Finished")
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="early_stopping_with_best_state",
        source="https://docs.pytorch.org/tutorials/beginner/transfer_learning_tutorial.html",
        runs=order_cells(
            """
            import copy
            import torch
            from torch import nn

            torch.manual_seed(2)
            x_train, x_val = (
                torch.randn(512, 128, device=DEVICE),
                torch.randn(128, 128, device=DEVICE),
            )
            target = torch.randn(128, 1, device=DEVICE)
            y_train, y_val = x_train @ target, x_val @ target
            model = nn.Sequential(nn.Linear(128, 1024), nn.GELU(), nn.Linear(1024, 512), nn.GELU(),
                                  nn.Linear(512, 1)).to(DEVICE)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

            class EarlyStopping:
                def __init__(self, patience):
                    self.patience = patience
                    self.best_loss = float("inf")
                    self.best_state = None
                    self.bad_epochs = 0

                def step(self, loss, model):
                    if loss < self.best_loss:
                        self.best_loss = loss
                        self.best_state = copy.deepcopy(model.state_dict())
                        self.bad_epochs = 0
                    else:
                        self.bad_epochs += 1
                    return self.bad_epochs >= self.patience

            stopper = EarlyStopping(patience=4)

            # %%
            for epoch in range(12):
                model.train()
                for x, y in zip(x_train.split(128), y_train.split(128)):
                    optimizer.zero_grad()
                    loss = nn.functional.mse_loss(model(x), y)
                    loss.backward()
                    optimizer.step()
                model.eval()
                with torch.no_grad():
                    val_loss = nn.functional.mse_loss(model(x_val), y_val).item()
                if stopper.step(val_loss, model):
                    print(f"stop at {epoch}, best {stopper.best_loss:.4f}")
                    break
            model.load_state_dict(stopper.best_state)
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="unfreezing_layers_gradually",
        source="ULMFiT's gradual unfreezing, with optimizer.add_param_group as in PyTorch's forum",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(3)
            backbone = nn.ModuleList(
                nn.Sequential(nn.Linear(384, 384), nn.ReLU()) for _ in range(4)
            )
            head = nn.Linear(384, 5)
            backbone.to(DEVICE), head.to(DEVICE)
            backbone.requires_grad_(False)
            optimizer = torch.optim.Adam(head.parameters(), lr=1e-3)
            frozen = list(backbone)

            def forward(x):
                for block in backbone:
                    x = block(x)
                return head(x)

            def train(n_steps):
                for _ in range(n_steps):
                    x = torch.randn(128, 384, device=DEVICE)
                    y = torch.randint(0, 5, (128,), device=DEVICE)
                    optimizer.zero_grad(set_to_none=True)
                    loss = nn.functional.cross_entropy(forward(x), y)
                    loss.backward()
                    optimizer.step()
                return loss.item()

            # %%
            # the head alone first, then the two topmost blocks, one each time
            train(10)
            if len(frozen) > 2:
                block = frozen.pop()
                block.requires_grad_(True)
                optimizer.add_param_group({"params": block.parameters(), "lr": 1e-4})
            print(len(optimizer.param_groups), "groups", train(10))
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="progress_bar_and_running_average",
        source="AverageMeter of PyTorch's ImageNet example, and tqdm's set_postfix",
        runs=order_cells(
            """
            import sys
            import time
            import torch
            from torch import nn

            class Progress:
                def __init__(self, iterable, desc=""):
                    self.iterable, self.desc = iterable, desc
                    self.postfix, self.n, self.started = {}, 0, time.perf_counter()

                def __iter__(self):
                    for item in self.iterable:
                        yield item
                        self.n += 1
                        self.refresh()
                    sys.stdout.write("\\n")

                def set_postfix(self, **values):
                    self.postfix.update(values)

                def refresh(self):
                    words = " ".join(f"{k}={v:.4f}" for k, v in self.postfix.items())
                    rate = self.n / (time.perf_counter() - self.started + 1e-9)
                    done = f"{self.n}/{len(self.iterable)}"
                    sys.stdout.write(f"\\r{self.desc} {done} {rate:.0f}it/s {words}")

            class AverageMeter:
                def __init__(self):
                    self.sum = self.count = self.avg = 0

                def update(self, value, n=1):
                    self.sum += value * n
                    self.count += n
                    self.avg = self.sum / self.count

            torch.manual_seed(10)
            model = nn.Sequential(
                nn.Conv1d(4, 32, 9, padding=4),
                nn.ReLU(),
                nn.Conv1d(32, 32, 9, padding=4),
                nn.ReLU(),
                nn.AdaptiveAvgPool1d(1),
                nn.Flatten(),
                nn.Linear(32, 3),
            ).to(DEVICE)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            loader = [(torch.randn(32, 4, 256), torch.randint(3, (32,))) for _ in range(12)]

            # %%
            losses, accuracy = AverageMeter(), AverageMeter()
            bar = Progress(loader, desc="train")
            for signal, label in bar:
                signal, label = (
                    signal.to(DEVICE, non_blocking=True),
                    label.to(DEVICE, non_blocking=True),
                )
                logits = model(signal)
                loss = nn.functional.cross_entropy(logits, label)
                losses.update(loss.item(), signal.size(0))
                accuracy.update((logits.argmax(1) == label).float().mean().item(), signal.size(0))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                bar.set_postfix(loss=losses.avg, acc=accuracy.avg)
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="progressive_growing_in_two_stages",
        source="Progressive growing of GANs: layers are added at two fixed points of the training",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(12)

            class Growing(nn.Module):
                def __init__(self, channels=32):
                    super().__init__()
                    self.channels = channels
                    self.stem = nn.Conv2d(3, channels, 3, padding=1)
                    self.stages = nn.ModuleList()
                    self.head = nn.Linear(channels, 10)

                def grow(self):
                    c = self.channels
                    new = nn.Sequential(
                        nn.Conv2d(c, 8 * c, 3, padding=1),
                        nn.ReLU(),
                        nn.Conv2d(8 * c, c, 3, padding=1),
                    )
                    self.stages.append(new.to(self.head.weight.device))
                    return new.parameters()

                def forward(self, x):
                    x = self.stem(x)
                    for stage in self.stages:
                        x = x + stage(x)
                    return self.head(x.mean((2, 3)))

            net = Growing().to(DEVICE)
            optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
            resolutions = {0: 4, 1: 8, 2: 16}
            stage = 0

            # %%
            size = resolutions[min(stage, 2)]
            for _ in range(6):
                x = torch.randn(8, 3, size, size, device=DEVICE)
                loss = nn.functional.cross_entropy(net(x), torch.randint(10, (8,), device=DEVICE))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if stage < 2:
                optimizer.add_param_group({"params": net.grow()})
            stage += 1
            """,
            "1 2 2 2 2 2 2",
        ),
    ),
    Program(
        name="dataloader_over_cached_dataset",
        source="Datasets that decode each sample once and keep it (a cache of fixed size)",
        runs=order_cells(
            """
            import torch
            from torch import nn
            from torch.utils.data import DataLoader, Dataset

            class Tiles(Dataset):
                '''Decodes a sample when it is first asked for, and keeps it on the device.'''

                def __init__(self, n):
                    self.samples = [None] * n

                def __len__(self):
                    return len(self.samples)

                def __getitem__(self, index):
                    if self.samples[index] is None:
                        generator = torch.Generator().manual_seed(index)
                        self.samples[index] = torch.randn(3, 64, 64, generator=generator).to(DEVICE)
                    return self.samples[index], index % 4

            torch.manual_seed(15)
            dataset = Tiles(96)
            loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=0)
            model = nn.Sequential(
                nn.Conv2d(3, 8, 5, stride=2),
                nn.ReLU(),
                nn.Conv2d(8, 16, 5, stride=2),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(4),
                nn.Flatten(),
                nn.Linear(256, 4),
            ).to(DEVICE)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

            # %%
            for epoch in range(3):
                for images, labels in loader:
                    loss = nn.functional.cross_entropy(model(images), labels.to(DEVICE))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                print(epoch, round(loss.item(), 3))
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="new_optimizer_for_each_epoch",
        source="Notebooks that make Adam anew with another learning rate in each epoch",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(17)
            net = nn.Sequential(nn.Linear(200, 800), nn.ReLU(), nn.Linear(800, 200)).to(DEVICE)
            inputs = torch.randn(20, 64, 200, device=DEVICE)
            targets = inputs.cumsum(-1)
            history = {"lr": [], "loss": []}

            # %%
            for lr in (1e-2, 3e-3, 1e-3):
                optimizer = torch.optim.Adam(net.parameters(), lr=lr)
                epoch_loss = 0
                for x, y in zip(inputs, targets):
                    optimizer.zero_grad()
                    loss = nn.functional.smooth_l1_loss(net(x), y)
                    loss.backward()
                    optimizer.step()
                    epoch_loss += loss.detach()
                history["lr"].append(lr)
                history["loss"].append(float(epoch_loss) / len(inputs))
            print(*(f"{value:.3f}" for value in history["loss"]))
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="detached_losses_on_the_device",
        source="https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(18)
            teacher = (
                nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)).to(DEVICE).eval()
            )
            student = nn.Linear(64, 64).to(DEVICE)
            optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
            all_losses = []

            # %%
            # .item() would wait for the GPU in each step, so the losses stay there until the end
            epoch_losses = []
            for _ in range(60):
                x = torch.randn(512, 64, device=DEVICE)
                with torch.no_grad():
                    soft = teacher(x)
                loss = (student(x) - soft).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                epoch_losses.append(loss.detach())
            all_losses.extend(torch.stack(epoch_losses).tolist())
            all_losses[-1]
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="prefetch_to_the_device",
        source="The data prefetcher of NVIDIA's apex examples",
        runs=order_cells(
            """
            import torch
            from torch import nn

            class Prefetcher:
                '''Copies the next batch while the model works on this one.'''

                def __init__(self, batches):
                    self.batches = iter(batches)
                    self.preload()

                def preload(self):
                    try:
                        images, labels = next(self.batches)
                    except StopIteration:
                        self.next = None
                        return
                    images = images.to(DEVICE, non_blocking=True).float().div_(255)
                    self.next = images, labels.to(DEVICE, non_blocking=True)

                def __iter__(self):
                    while self.next is not None:
                        ready = self.next
                        self.preload()
                        yield ready

            def mixup(x, y, alpha=0.4):
                lam = torch.distributions.Beta(alpha, alpha).sample().item()
                order = torch.randperm(len(x), device=x.device)
                return lam * x + (1 - lam) * x[order], y, y[order], lam

            torch.manual_seed(19)
            raw = [
                (
                    torch.randint(0, 256, (32, 3, 48, 48), dtype=torch.uint8),
                    torch.randint(0, 6, (32,)),
                )
                for _ in range(15)
            ]
            model = nn.Sequential(
                nn.Conv2d(3, 16, 3, stride=2),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2),
                nn.ReLU(),
                nn.AdaptiveMaxPool2d(2),
                nn.Flatten(),
                nn.Linear(128, 6),
            ).to(DEVICE)
            optimizer = torch.optim.Adam(model.parameters())

            # %%
            for images, labels in Prefetcher(raw):
                images, a, b, lam = mixup(images, labels)
                logits = model(images)
                loss = lam * nn.functional.cross_entropy(logits, a) + (
                    1 - lam
                ) * nn.functional.cross_entropy(logits, b)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
            print(loss.item())
            """,
            "1 2 2 2 2",
        ),
    ),
)
