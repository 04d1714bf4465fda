"""Clean programs: loops that collect on purpose, and data that is as large as what is collected."""

from __future__ import annotations

from tests.growth.programs import Program, order_cells

__all__ = ["PROGRAMS"]

PROGRAMS = (
    Program(
        name="numpy_outputs_beside_a_list_of_batches",
        source="Notebooks that keep their batches in a list, and each step's outputs as arrays",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(0)
            batches = [torch.randn(256, 512, device=DEVICE) for _ in range(40)]
            model = nn.Linear(512, 512).to(DEVICE)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

            # %%
            outputs = []
            for batch in batches:
                out = model(batch)
                loss = (out - batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                outputs.append(out.detach().cpu().numpy().copy())
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="epoch_outputs_for_a_metric",
        source="Training loops that join an epoch's predictions for its metric, then drop them",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1000)).to(DEVICE)
            optimizer = torch.optim.Adam(model.parameters())

            # %%
            for epoch in range(2):
                outputs, targets = [], []
                for step in range(40):
                    x = torch.randn(64, 256, device=DEVICE)
                    y = torch.randint(0, 1000, (64,), device=DEVICE)
                    out = model(x)
                    loss = nn.functional.cross_entropy(out, y)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    outputs.append(out.detach())
                    targets.append(y)
                logits = torch.cat(outputs)
                accuracy = (logits.argmax(1) == torch.cat(targets)).float().mean().item()
                del outputs, targets, logits
                print(epoch, accuracy)
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="step_outputs_in_a_module",
        source="Lightning's guide to epoch-level operations: outputs in a list of the module",
        runs=order_cells(
            """
            import torch
            from torch import nn

            class Task(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.net = nn.Linear(512, 512)
                    self.outputs = []

                def training_step(self, x):
                    out = self.net(x)
                    loss = (out - x).square().mean()
                    self.outputs.append({"loss": loss.detach(), "out": out.detach()})
                    return loss

                def on_train_epoch_end(self):
                    print(torch.cat([each["out"] for each in self.outputs]).std().item())
                    self.outputs.clear()

            task = Task().to(DEVICE)
            optimizer = torch.optim.SGD(task.parameters(), lr=0.01)

            # %%
            for epoch in range(3):
                for step in range(30):
                    loss = task.training_step(torch.randn(128, 512, device=DEVICE))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                task.on_train_epoch_end()
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="dataset_that_caches_its_items_once",
        source="Datasets that keep each item after the first epoch",
        runs=order_cells(
            """
            import torch
            from torch import nn

            class Cached(torch.utils.data.Dataset):
                def __init__(self, n):
                    self.n = n
                    self.cache = {}

                def __len__(self):
                    return self.n

                def __getitem__(self, index):
                    if index not in self.cache:
                        generator = torch.Generator().manual_seed(index)
                        self.cache[index] = torch.randn(64, 64, generator=generator).to(DEVICE)
                    return self.cache[index]

            loader = torch.utils.data.DataLoader(Cached(600), batch_size=10)
            model = nn.Linear(64, 64).to(DEVICE)
            optimizer = torch.optim.Adam(model.parameters())

            # %%
            for x in loader:
                loss = (model(x) - x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="layers_trained_one_after_the_other",
        source="Greedy layer-wise pretraining: the optimizer makes its state layer by layer",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(2)
            layers = nn.ModuleList([nn.Linear(300, 300) for _ in range(30)]).to(DEVICE)
            optimizer = torch.optim.Adam(layers.parameters())

            # %%
            x = torch.randn(16, 300, device=DEVICE)
            for layer in layers:
                loss = (layer(x) - x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="learners_of_a_boosted_ensemble",
        source="Gradient boosting with small networks: each round adds one, each run begins anew",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(3)
            x = torch.randn(256, 256, device=DEVICE)
            target = x.roll(1, 1)

            # %%
            learners, residual = [], target
            for round in range(30):
                learner = nn.Linear(256, 256).to(DEVICE)
                optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)
                loss = (learner(x) - residual).square().mean()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    residual = residual - learner(x)
                learners.append(learner)
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="weights_along_the_way",
        source="Loss landscapes: the weights after each step, for a plot of the trajectory",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(4)
            model = nn.Linear(400, 400).to(DEVICE)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            # %%
            trajectory = []
            for step in range(30):
                x = torch.randn(64, 400, device=DEVICE)
                loss = (model(x) - x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                trajectory.append(nn.utils.parameters_to_vector(model.parameters()).detach())
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="replay_list_that_is_cut_by_a_slice",
        source="Replay buffers as lists: the oldest transitions are cut off by a slice",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(5)
            model = nn.Linear(512, 512).to(DEVICE)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            memory = []

            # %%
            for step in range(60):
                state = torch.randn(256, 512, device=DEVICE)
                loss = model(state).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                memory.append(state)
                memory[:-50] = []
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="replay_class_with_a_size",
        source="Replay buffers as classes: filled up to their size, then written in a circle",
        runs=order_cells(
            """
            import torch
            from torch import nn

            class Replay:
                def __init__(self, size):
                    self.size, self.data, self.at = size, [], 0

                def push(self, x):
                    if len(self.data) < self.size:
                        self.data.append(x)
                    else:
                        self.data[self.at % self.size] = x
                    self.at += 1

            torch.manual_seed(6)
            replay = Replay(100)
            model = nn.Linear(512, 512).to(DEVICE)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

            # %%
            for step in range(30):
                state = torch.randn(256, 512, device=DEVICE)
                loss = model(state).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                replay.push(state)
            """,
            "1 2 2 2 2 2 2",
        ),
    ),
    Program(
        name="pretrained_weights_that_are_swapped_in",
        source="Loading a checkpoint shard by shard into the parameters' data",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(7)
            model = nn.ModuleList([nn.Linear(300, 300) for _ in range(30)]).to(DEVICE)

            # %%
            shards = {f"layer{i}": torch.randn(300, 300) for i in range(30)}
            for i, layer in enumerate(model):
                layer.weight.data = shards[f"layer{i}"].to(DEVICE).clone()
            """,
            "1 2 2 2 2",
        ),
    ),
)
