"""Clean programs: evaluation loops, metrics, hooks that go again, caches that fill once."""

from __future__ import annotations

from tests.growth.programs import Program, order_cells

__all__ = ["PROGRAMS"]

PROGRAMS = (
    Program(
        name="logits_collected_on_the_cpu",
        source="Evaluation loops that move each batch's logits to the CPU and join them at the end",
        runs=order_cells(
            """
            import torch
            from torch import nn
            from torch.utils.data import DataLoader, TensorDataset

            torch.manual_seed(0)
            dataset = TensorDataset(torch.randn(2000, 64), torch.randint(0, 1000, (2000,)))
            model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1000)).to(DEVICE)

            # %%
            model.eval()
            all_logits, all_labels = [], []
            for inputs, labels in DataLoader(dataset, batch_size=50):
                with torch.no_grad():
                    logits = model(inputs.to(DEVICE))
                all_logits.append(logits.cpu())
                all_labels.append(labels)
            all_logits, all_labels = torch.cat(all_logits), torch.cat(all_labels)
            top5 = all_logits.topk(5, dim=1).indices
            accuracy = (top5 == all_labels[:, None]).any(1).float().mean()
            print(f"top-5 accuracy {accuracy:.2%}")
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="logits_collected_on_the_device",
        source="The loop of transformers' Trainer.evaluate: logits stay on the device to the end",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(1)
            model = nn.Sequential(nn.Embedding(500, 64), nn.Flatten(), nn.Linear(64 * 16, 768)).to(
                DEVICE
            )
            eval_batches = [
                {"ids": torch.randint(0, 500, (64, 16)), "labels": torch.randint(0, 768, (64,))}
                for _ in range(40)
            ]

            def evaluation_loop(batches):
                model.eval()
                preds, labels, losses = [], [], []
                for batch in batches:
                    batch = {k: v.to(DEVICE) for k, v in batch.items()}
                    with torch.no_grad():
                        logits = model(batch["ids"])
                        loss = nn.functional.cross_entropy(logits, batch["labels"])
                    losses.append(loss.repeat(len(logits)))
                    preds.append(logits)
                    labels.append(batch["labels"])
                preds, labels = torch.cat(preds), torch.cat(labels)
                metrics = {"eval_loss": torch.cat(losses).mean().item()}
                metrics["eval_accuracy"] = (preds.argmax(-1) == labels).float().mean().item()
                return metrics

            # %%
            evaluation_loop(eval_batches)
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="predictions_in_the_cell_itself",
        source="Kaggle notebooks: preds.append(model(x)) under no_grad, then a submission",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(2)
            net = nn.Sequential(
                nn.Conv2d(3, 12, 3, stride=2), nn.ReLU(), nn.Conv2d(12, 8, 3, stride=2)
            ).to(DEVICE)

            # %%
            preds = []
            with torch.no_grad():
                for start in range(0, 240, 6):
                    tiles = torch.rand(6, 3, 128, 128, device=DEVICE)
                    preds.append(net(tiles).sigmoid())
            preds = torch.cat(preds)
            submission = (preds.mean((1, 2, 3)) > 0.5).int().tolist()
            sum(submission)
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="embedding_index_for_retrieval",
        source="Semantic search notebooks: embed the corpus, then ask for neighbours",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(3)
            encoder = nn.EmbeddingBag(2000, 384, mode="mean").to(DEVICE).eval()
            corpus = torch.randint(0, 2000, (3000, 20))

            @torch.no_grad()
            def encode(texts, batch_size=75):
                parts = [
                    encoder(texts[i : i + batch_size].to(DEVICE))
                    for i in range(0, len(texts), batch_size)
                ]
                return nn.functional.normalize(torch.cat(parts), dim=1)

            # %%
            corpus_embeddings = encode(corpus)

            # %%
            queries = encode(torch.randint(0, 2000, (5, 20)))
            scores = queries @ corpus_embeddings.T
            scores.topk(3).indices.tolist()
            """,
            "1 2 3 2 3 2 3 2 3 2 3",
        ),
    ),
    Program(
        name="metric_objects_that_are_reset",
        source="torchmetrics: update() in each step, compute() and reset() at the end of an epoch",
        runs=order_cells(
            """
            import torch
            from torch import nn

            class ConfusionMatrix:
                def __init__(self, n):
                    self.n = n
                    self.reset()

                def reset(self):
                    self.matrix = torch.zeros(self.n, self.n, dtype=torch.long, device=DEVICE)

                def update(self, preds, target):
                    index = target * self.n + preds
                    self.matrix += torch.bincount(index, minlength=self.n**2).view(self.n, self.n)

                def compute(self):
                    return (self.matrix.diag().sum() / self.matrix.sum()).item()

            class AUROC:
                '''Has to keep all scores until the end of the epoch.'''

                def __init__(self):
                    self.reset()

                def reset(self):
                    self.scores, self.targets = [], []

                def update(self, scores, targets):
                    self.scores.append(scores.detach())
                    self.targets.append(targets)

                def compute(self):
                    scores, targets = torch.cat(self.scores), torch.cat(self.targets)
                    order = scores.argsort()
                    ranks = torch.empty_like(scores).scatter_(
                        0, order, torch.arange(len(scores), device=DEVICE) + 1.0
                    )
                    positive = targets == 1
                    p, n = positive.sum(), (~positive).sum()
                    return ((ranks[positive].sum() - p * (p + 1) / 2) / (p * n)).item()

            torch.manual_seed(4)
            model = nn.Sequential(
                nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1), nn.Flatten(0)
            ).to(DEVICE)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            confusion, auroc = ConfusionMatrix(2), AUROC()

            # %%
            for step in range(25):
                x = torch.randn(512, 256, device=DEVICE)
                y = (x[:, 0] + x[:, 1] > 0).long()
                scores = model(x)
                loss = nn.functional.binary_cross_entropy_with_logits(scores, y.float())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                confusion.update((scores > 0).long(), y)
                auroc.update(scores, y)
            print(f"accuracy {confusion.compute():.3f}  AUROC {auroc.compute():.3f}")
            confusion.reset(), auroc.reset();
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="feature_hooks_registered_and_removed",
        source="PyTorch's forum: how can I extract intermediate layer output (ptrblck's answer)",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(5)
            model = nn.Sequential()
            for i, (n_in, n_out) in enumerate([(3, 16), (16, 32), (32, 32)], 1):
                model.add_module(f"conv{i}", nn.Conv2d(n_in, n_out, 3, padding=1))
                model.add_module(f"relu{i}", nn.ReLU())
            model.to(DEVICE)
            activation = {}

            def get_activation(name):
                def hook(module, inputs, output):
                    activation[name] = output.detach()
                return hook

            # %%
            handles = [model.get_submodule(name).register_forward_hook(get_activation(name))
                       for name in ("relu1", "relu2", "relu3")]
            try:
                with torch.no_grad():
                    model(torch.rand(8, 3, 64, 64, device=DEVICE))
            finally:
                for handle in handles:
                    handle.remove()
            {name: tuple(features.shape) for name, features in activation.items()}
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="class_activation_maps",
        source="Grad-CAM notebooks: a context manager with a forward and a backward hook",
        runs=order_cells(
            """
            import torch
            from torch import nn

            class GradCAM:
                def __init__(self, model, layer):
                    self.model, self.layer = model, layer

                def __enter__(self):
                    self.handles = [
                        self.layer.register_forward_hook(self._keep_features),
                        self.layer.register_full_backward_hook(self._keep_gradients),
                    ]
                    return self

                def __exit__(self, *error):
                    for handle in self.handles:
                        handle.remove()

                def _keep_features(self, module, args, output):
                    self.features = output.detach()

                def _keep_gradients(self, module, grad_input, grad_output):
                    self.gradients = grad_output[0].detach()

                def __call__(self, images):
                    logits = self.model(images)
                    self.model.zero_grad()
                    logits.amax(1).sum().backward()
                    weights = self.gradients.mean((2, 3), keepdim=True)
                    return torch.relu((weights * self.features).sum(1))

            torch.manual_seed(6)
            cnn = nn.Sequential(
                nn.Conv2d(3, 16, 5, padding=2),
                nn.ReLU(),
                nn.Conv2d(16, 24, 5, padding=2),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(24, 10),
            ).to(DEVICE)

            # %%
            with GradCAM(cnn, cnn[2]) as cam:
                for _ in range(3):
                    heatmaps = cam(torch.rand(4, 3, 56, 56, device=DEVICE)).cpu()
            heatmaps.amax((1, 2))
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="small_tensors_displayed",
        source="Notebooks that end cells with a small tensor: IPython keeps each in Out",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(7)
            layer = nn.Linear(1024, 1024).to(DEVICE)
            x = torch.randn(512, 1024, device=DEVICE)

            # %%
            with torch.no_grad():
                y = layer(x).relu()
                y = y / y.norm(dim=1, keepdim=True).clamp_min(1e-6)
            y.mean(dim=0)[:8].clone()

            # %%
            y.std()
            """,
            "1 2 3 2 3 2 3 2 3 2 3",
        ),
    ),
    Program(
        name="workspaces_made_in_the_first_runs",
        source="Autotuning: the first calls with each shape make a workspace, which stays",
        runs=order_cells(
            """
            import time
            import torch

            class Autotuner:
                '''Tries each way once for every shape, and keeps the best with its workspace.'''

                def __init__(self, candidates):
                    self.candidates, self.plans = candidates, {}

                def __call__(self, a, b):
                    key = (a.shape, b.shape)
                    if key not in self.plans:
                        timings = []
                        for candidate in self.candidates:
                            workspace = torch.empty(a.size(0), b.size(1), device=a.device)
                            start = time.perf_counter()
                            candidate(a, b, workspace)
                            timings.append((time.perf_counter() - start, candidate, workspace))
                        self.plans[key] = min(timings, key=lambda timing: timing[0])[1:]
                    run, workspace = self.plans[key]
                    return run(a, b, workspace)

            def plain(a, b, out):
                return torch.mm(a, b, out=out)

            def blocked(a, b, out):
                for rows, target in zip(a.split(256), out.split(256)):
                    torch.mm(rows, b, out=target)
                return out

            torch.manual_seed(8)
            matmul = Autotuner([plain, blocked])
            b = torch.randn(64, 1024, device=DEVICE)

            # %%
            checksum = 0.0
            for step in range(40):
                rows = 256 * (1 + step % 4)
                a = torch.randn(rows, 64, device=DEVICE)
                checksum += matmul(a, b).mean().item()
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="compiled_steps_for_new_shapes",
        source="torch.compile's behaviour: new shapes in the first runs are compiled and kept",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(9)
            model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128)).to(DEVICE)

            class StaticGraphs:
                '''One set of static input and output buffers for each batch size that was met.'''

                def __init__(self, model):
                    self.model, self.graphs = model, {}

                def __call__(self, x):
                    if len(x) not in self.graphs:
                        static_in = torch.zeros_like(x)
                        self.graphs[len(x)] = static_in, self.model(static_in)
                    static_in, static_out = self.graphs[len(x)]
                    static_in.copy_(x)
                    static_out.copy_(self.model(static_in))
                    return static_out

            compiled = StaticGraphs(model)
            sizes = [2048, 1024, 512]
            run = 0

            # %%
            # the first run meets the full batches, the second and third the smaller ones
            with torch.no_grad():
                for size in sizes[: run + 1]:
                    for _ in range(3):
                        y = compiled(torch.randn(size, 128, device=DEVICE))
            run += 1
            """,
            "1 2 2 2 2 2 2 2",
        ),
    ),
    Program(
        name="knowledge_distillation",
        source="https://docs.pytorch.org/tutorials/beginner/knowledge_distillation_tutorial.html",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(10)

            def cnn(width):
                return nn.Sequential(
                    nn.Conv2d(3, width, 3, padding=1),
                    nn.ReLU(),
                    nn.MaxPool2d(2),
                    nn.Conv2d(width, width, 3, padding=1),
                    nn.ReLU(),
                    nn.MaxPool2d(2),
                    nn.Flatten(),
                    nn.Linear(width * 64, 10),
                ).to(DEVICE)

            teacher, student = cnn(32), cnn(8)
            batches = [(torch.rand(32, 3, 32, 32), torch.randint(0, 10, (32,))) for _ in range(5)]

            def train_knowledge_distillation(teacher, student, epochs, T, soft_weight):
                optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
                teacher.eval()
                student.train()
                for epoch in range(epochs):
                    running_loss = 0.0
                    for inputs, labels in batches:
                        inputs, labels = inputs.to(DEVICE), labels.to(DEVICE)
                        optimizer.zero_grad()
                        with torch.no_grad():
                            soft_targets = (teacher(inputs) / T).softmax(-1)
                        logits = student(inputs)
                        soft_prob = (logits / T).log_softmax(-1)
                        soft = (
                            torch.sum(soft_targets * (soft_targets.log() - soft_prob))
                            / len(logits)
                            * T**2
                        )
                        hard = nn.functional.cross_entropy(logits, labels)
                        loss = soft_weight * soft + (1 - soft_weight) * hard
                        loss.backward()
                        optimizer.step()
                        running_loss += loss.item()
                return running_loss / len(batches)

            # %%
            train_knowledge_distillation(teacher, student, epochs=2, T=2, soft_weight=0.25)
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="attention_maps_of_one_batch",
        source="Notebooks that look at attention: the model returns all maps of the last batch",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(11)

            class Block(nn.Module):
                def __init__(self, dim):
                    super().__init__()
                    self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
                    self.norm = nn.LayerNorm(dim)

                def forward(self, x):
                    y, weights = self.attention(x, x, x, average_attn_weights=False)
                    return self.norm(x + y), weights

            blocks = nn.ModuleList(Block(64) for _ in range(4)).to(DEVICE)

            @torch.no_grad()
            def attention_maps(x):
                maps = []
                for block in blocks:
                    x, weights = block(x)
                    maps.append(weights)
                return maps

            # %%
            maps = attention_maps(torch.randn(8, 96, 64, device=DEVICE))
            entropies = [-(m * m.clamp_min(1e-9).log()).sum(-1).mean().item() for m in maps]
            [round(e, 3) for e in entropies]
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="gradient_statistics_as_floats",
        source="Karpathy's makemore lectures: update-to-data ratios kept as floats for a plot",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(12)
            C = torch.randn(27, 64, device=DEVICE, requires_grad=True)
            W1 = (torch.randn(3 * 64, 1024, device=DEVICE) * 0.1).requires_grad_()
            W2 = (torch.randn(1024, 27, device=DEVICE) * 0.01).requires_grad_()
            parameters = [C, W1, W2]
            lossi, ud = [], []

            # %%
            for i in range(40):
                Xb = torch.randint(0, 27, (32, 3), device=DEVICE)
                Yb = torch.randint(0, 27, (32,), device=DEVICE)
                emb = C[Xb]
                h = torch.tanh(emb.view(32, -1) @ W1)
                h.retain_grad()
                logits = h @ W2
                loss = nn.functional.cross_entropy(logits, Yb)
                for p in parameters:
                    p.grad = None
                loss.backward()
                lr = 0.1
                for p in parameters:
                    p.data += -lr * p.grad
                lossi.append(loss.log10().item())
                with torch.no_grad():
                    ud.append(
                        [(lr * p.grad.std() / p.data.std()).log10().item() for p in parameters]
                    )
            len(lossi)
            """,
            "1 2 2 2 2 2",
        ),
    ),
)
