"""Clean programs: what users do in notebooks with cells that they run again and again."""

from __future__ import annotations

from tests.growth.programs import Program, order_cells

__all__ = ["PROGRAMS"]

PROGRAMS = (
    Program(
        name="model_made_anew_in_each_run",
        source="The usual training cell, which begins with model = make_model()",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(0)

            def make_model(width=640):
                return nn.Sequential(
                    nn.Linear(100, width),
                    nn.ReLU(),
                    nn.Linear(width, width),
                    nn.ReLU(),
                    nn.Linear(width, 1),
                ).to(DEVICE)

            X = torch.randn(256, 100, device=DEVICE)
            y = X.pow(2).sum(1, keepdim=True)

            # %%
            model = make_model()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=10)
            losses = []
            for step in range(10):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(X), y)
                loss.backward()
                optimizer.step()
                scheduler.step()
                losses.append(loss.item())
            print(losses[0], "->", losses[-1])
            """,
            "1 2 2 2 2 2 2",
        ),
    ),
    Program(
        name="same_names_again_and_again",
        source="An exploratory cell that makes large tensors under the same names",
        runs=order_cells(
            """
            import torch

            # %%
            torch.manual_seed(1)
            data = torch.randn(3000, 512, device=DEVICE)
            centered = data - data.mean(0)
            covariance = centered.T @ centered / (len(data) - 1)
            values, vectors = torch.linalg.eigh(covariance)
            projected = centered @ vectors[:, -32:]
            top = values.flip(0)[:3].tolist()
            top
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="cell_that_fails_halfway_once",
        source="A run of the training cell that ends with a wrong shape in the middle",
        raises=True,
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(2)
            model = nn.Sequential(nn.Linear(400, 900), nn.ReLU(), nn.Linear(900, 12)).to(DEVICE)
            optimizer = torch.optim.Adam(model.parameters())
            n_features = 400

            def train(n_steps):
                for step in range(n_steps):
                    # the third file of the second day has a column too few
                    width = n_features - 1 if bad_day and step == 3 else n_features
                    batch = torch.randn(256, width, device=DEVICE)
                    hidden = torch.tanh(batch).repeat(2, 1)
                    loss = model(hidden).logsumexp(1).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                return loss.item()

            bad_day = False

            # %%
            train(6)

            # %%
            bad_day = True

            # %%
            bad_day = False
            """,
            "1 2 2 3 2 4 2 2 2",
        ),
    ),
    Program(
        name="cell_that_fails_in_every_run",
        source="A user who tries the same broken cell several times: IPython keeps the last error",
        raises=True,
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(3)
            embed = nn.Embedding(1000, 512).to(DEVICE)
            attend = nn.MultiheadAttention(512, 8, batch_first=True).to(DEVICE)

            # %%
            tokens = torch.randint(0, 1000, (16, 64), device=DEVICE)
            x = embed(tokens)
            y, _ = attend(x, x, x)
            pooled = y.mean(1)
            scores = pooled @ torch.randn(256, 1000, device=DEVICE)
            print(scores.argmax(-1))
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="training_that_is_interrupted",
        source="A user who stops the training with the stop button in some of the runs",
        raises=True,
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(4)
            model = nn.GRU(64, 192, batch_first=True).to(DEVICE)
            head = nn.Linear(192, 64).to(DEVICE)
            optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
            pressed = iter([None, 5, None, 3, None, None])

            # %%
            stop_at = next(pressed)
            for step in range(8):
                x = torch.randn(64, 16, 64, device=DEVICE)
                out, _ = model(x)
                loss = (head(out[:, :-1]) - x[:, 1:]).square().mean()
                if step == stop_at:
                    raise KeyboardInterrupt
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            """,
            "1 2 2 2 2 2 2",
        ),
    ),
    Program(
        name="delete_collect_and_empty_cache",
        source="The idiom del model; gc.collect(); torch.cuda.empty_cache() before a new model",
        runs=order_cells(
            """
            import gc
            import torch
            from torch import nn

            class LitModel(nn.Module):
                '''Knows its trainer, which knows it: a cycle, as in Lightning.'''

                def __init__(self):
                    super().__init__()
                    self.net = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
                    self.trainer = None

                def training_step(self, batch):
                    return (self.net(batch) - batch).square().mean()

            class Trainer:
                def __init__(self, max_steps):
                    self.max_steps = max_steps

                def fit(self, model):
                    self.model, model.trainer = model, self
                    self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                    for _ in range(self.max_steps):
                        loss = model.training_step(torch.randn(64, 256, device=DEVICE))
                        self.optimizer.zero_grad()
                        loss.backward()
                        self.optimizer.step()

            torch.manual_seed(5)
            model = trainer = None

            # %%
            del model, trainer
            gc.collect()
            torch.cuda.empty_cache()
            model = LitModel().to(DEVICE)
            trainer = Trainer(max_steps=8)
            trainer.fit(model)
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="k_fold_cross_validation",
        source="Cross validation: a new model for each fold, the scores kept as floats",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(6)
            X = torch.randn(600, 150)
            y = (X[:, :3].sum(1) > 0).float()
            all_scores = []

            def folds(n, k):
                order = torch.randperm(n)
                for part in order.chunk(k):
                    held_out = torch.zeros(n, dtype=torch.bool)
                    held_out[part] = True
                    yield (~held_out).nonzero().squeeze(1), part

            class Tabular(nn.Module):
                def __init__(self, n_in, hidden):
                    super().__init__()
                    self.net = nn.Sequential(
                        nn.BatchNorm1d(n_in),
                        nn.Linear(n_in, hidden),
                        nn.ReLU(),
                        nn.Dropout(0.3),
                        nn.Linear(hidden, hidden),
                        nn.ReLU(),
                        nn.Linear(hidden, 1),
                    )

                def forward(self, x):
                    return self.net(x).squeeze(1)

            # %%
            scores = []
            for fold, (train_index, test_index) in enumerate(folds(len(X), k=5)):
                model = Tabular(150, 512).to(DEVICE)
                optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
                X_train, y_train = X[train_index].to(DEVICE), y[train_index].to(DEVICE)
                model.train()
                for epoch in range(2):
                    for rows in torch.randperm(len(X_train), device=DEVICE).split(160):
                        loss = nn.functional.binary_cross_entropy_with_logits(
                            model(X_train[rows]), y_train[rows]
                        )
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                model.eval()
                with torch.no_grad():
                    hits = (model(X[test_index].to(DEVICE)) > 0).cpu() == (y[test_index] > 0.5)
                scores.append(hits.float().mean().item())
            all_scores.append(scores)
            print(f"{sum(scores) / len(scores):.3f}")
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="sweep_that_keeps_the_best_model",
        source="A grid search over hyperparameters; only the best model so far is kept",
        runs=order_cells(
            """
            import itertools
            import torch
            from torch import nn

            torch.manual_seed(7)
            x_train, x_val = (
                torch.randn(300, 80, device=DEVICE),
                torch.randn(100, 80, device=DEVICE),
            )
            w = torch.randn(80, 1, device=DEVICE)
            grid = {"lr": [1e-1, 1e-2, 1e-3], "width": [256, 512], "activation": [nn.ReLU, nn.SiLU]}
            results = []
            best = {"loss": float("inf"), "model": None, "config": None}

            def run_trial(lr, width, activation):
                model = nn.Sequential(nn.Linear(80, width), activation(), nn.Linear(width, width),
                                      activation(), nn.Linear(width, 1)).to(DEVICE)
                optimizer = torch.optim.SGD(model.parameters(), lr=lr / 10)
                for _ in range(4):
                    optimizer.zero_grad()
                    (model(x_train) - x_train @ w).square().mean().backward()
                    optimizer.step()
                with torch.no_grad():
                    return model, (model(x_val) - x_val @ w).square().mean().item()

            # %%
            for values in itertools.product(*grid.values()):
                config = dict(zip(grid, values))
                model, loss = run_trial(**config)
                results.append({**config, "loss": loss})
                if loss < best["loss"]:
                    best.update(loss=loss, model=model, config=config)
            best["config"], best["loss"]
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="ensemble_of_fixed_size",
        source="Deep ensembles: a list of five models that each run binds anew",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(8)
            x = torch.rand(256, 1, device=DEVICE) * 6 - 3
            y = x.sin() + 0.1 * torch.randn_like(x)

            # %%
            ensemble = [nn.Sequential(nn.Linear(1, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(),
                                      nn.Linear(400, 2)).to(DEVICE) for _ in range(5)]
            for member in ensemble:
                optimizer = torch.optim.Adam(member.parameters(), lr=1e-3)
                for _ in range(5):
                    mean, log_var = member(x).chunk(2, dim=1)
                    nll = 0.5 * (log_var + (y - mean) ** 2 / log_var.exp()).mean()
                    optimizer.zero_grad()
                    nll.backward()
                    optimizer.step()
            with torch.no_grad():
                means = torch.stack([member(x)[:, 0] for member in ensemble])
            print("spread", means.std(0).mean().item())
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="history_of_floats_with_a_text_plot",
        source="Notebooks that append to a global history in each run and draw it",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(9)
            model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 4)).to(DEVICE)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            history = {"loss": [], "accuracy": [], "confidence": []}

            def sparkline(values):
                low, high = min(values), max(values)
                return "".join("▁▂▃▄▅▆▇█"[int(7 * (v - low) / (high - low + 1e-9))] for v in values)

            # %%
            for _ in range(15):
                x = torch.randn(128, 256, device=DEVICE)
                y = x[:, :4].argmax(1)
                logits = model(x)
                loss = nn.functional.cross_entropy(logits, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probs = logits.detach().softmax(1)
                history["loss"].append(loss.item())
                history["accuracy"].append((probs.argmax(1) == y).float().mean().item())
                history["confidence"].append(probs.amax(1).cpu().numpy())
            print(sparkline(history["loss"]))
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="setup_cells_run_again_too",
        source="Restarting by hand: the cells of data, model and training are run again in turn",
        runs=order_cells(
            """
            import torch
            from torch import nn

            # %%
            torch.manual_seed(10)
            images = torch.rand(600, 1, 28, 28, device=DEVICE)
            labels = torch.randint(0, 10, (600,), device=DEVICE)

            # %%
            model = nn.Sequential(
                nn.Conv2d(1, 16, 3),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(16 * 13 * 13, 128),
                nn.ReLU(),
                nn.Linear(128, 10),
            ).to(DEVICE)
            optimizer = torch.optim.Adam(model.parameters())

            # %%
            for x, y in zip(images.split(100), labels.split(100)):
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            loss.item()
            """,
            "1 2 3 4 2 3 4 2 3 4 2 3 4 2 3 4",
        ),
    ),
    Program(
        name="fine_tuning_stages_with_other_sizes",
        source="Progressive resizing (fast.ai): one cell with larger images each time",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(11)
            net = nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(16, 16, 3, padding=1),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(16, 10),
            ).to(DEVICE)
            optimizer = torch.optim.AdamW(net.parameters())
            sizes = iter([24, 48, 64, 64, 32, 64])

            # %%
            size = next(sizes)
            for _ in range(4):
                images = torch.rand(8, 3, size, size, device=DEVICE)
                loss = net(images).logsumexp(1).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(size, loss.item())
            """,
            "1 2 2 2 2 2 2",
        ),
    ),
    Program(
        name="matrix_factorization_recommender",
        source="MovieLens notebooks with embeddings of users and items",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(12)
            users, items, factors = 2000, 1500, 48
            ratings = torch.stack(
                [torch.randint(0, users, (4000,)), torch.randint(0, items, (4000,))]
            )
            stars = torch.randint(1, 6, (4000,)).float()

            class MF(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.user, self.item = (
                        nn.Embedding(users, factors),
                        nn.Embedding(items, factors),
                    )
                    self.bias_u, self.bias_i = nn.Embedding(users, 1), nn.Embedding(items, 1)

                def forward(self, u, i):
                    dot = (self.user(u) * self.item(i)).sum(1)
                    return dot + self.bias_u(u).squeeze(1) + self.bias_i(i).squeeze(1)

                @torch.no_grad()
                def recommend(self, user, k=5):
                    scores = self.item.weight @ self.user.weight[user] + self.bias_i.weight.squeeze(
                        1
                    )
                    return scores.topk(k).indices.tolist()

            model = MF().to(DEVICE)
            optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-5)

            # %%
            for rows in torch.randperm(4000).split(500):
                u, i = ratings[:, rows].to(DEVICE)
                loss = nn.functional.mse_loss(model(u, i), stars[rows].to(DEVICE))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            model.recommend(user=7)
            """,
            "1 2 2 2 2 2",
        ),
    ),
)
