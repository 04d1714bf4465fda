"""Leaks over repeated runs: lists, registries, caches and callbacks that outlive a run."""

from __future__ import annotations

from tests.growth.programs import Leak, order_cells

__all__ = ["LEAKS"]

LEAKS = (
    Leak(
        name="history_of_losses_with_models_made_anew",
        source="PyTorch's FAQ: don't accumulate history across your training loop",
        found_by="runs",
        line=("layers += [nn.Linear(n_in, n_out), nn.ReLU()]", "model = make_model().to(DEVICE)"),
        holder="history",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(0)
            history = []

            def make_model(sizes=(20, 1000, 1000, 1)):
                layers = []
                for n_in, n_out in zip(sizes, sizes[1:]):
                    layers += [nn.Linear(n_in, n_out), nn.ReLU()]
                return nn.Sequential(*layers[:-1])

            # %%
            model = make_model().to(DEVICE)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for step in range(5):
                x = torch.randn(64, 20, device=DEVICE)
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                # a loss keeps its graph, and the graph the weights of the model of this run
                history.append(loss)
            print(len(history), history[-1].item())
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="history_of_dicts_with_outputs",
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/1510",
        found_by="runs",
        line="outputs = model(images)",
        holder="history",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(1)
            model = nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1),
                nn.ReLU(),
                nn.AvgPool2d(4),
                nn.Flatten(),
                nn.Linear(16 * 64, 10),
            ).to(DEVICE)
            criterion = nn.CrossEntropyLoss()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            images = torch.rand(64, 3, 32, 32, device=DEVICE)
            labels = torch.randint(0, 10, (64,), device=DEVICE)
            history = []
            epoch = 0

            # %%
            model.train()
            for _ in range(3):
                optimizer.zero_grad()
                criterion(model(images), labels).backward()
                optimizer.step()
            model.eval()
            outputs = model(images)
            loss = criterion(outputs, labels)
            epoch += 1
            history.append({"epoch": epoch, "val_loss": loss, "outputs": outputs})
            print(f"epoch {epoch}: {loss:.4f}")
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="experiments_in_a_dict",
        source="Notebooks that keep every trained model with its optimizer for a comparison later",
        found_by="runs",
        line=(
            "self.up, self.down = nn.Linear(256, hidden), nn.Linear(hidden, 256)",
            "optimizer.step()",
            "model = Net(hidden=512).to(DEVICE)",
        ),
        holder="experiments",
        runs=order_cells(
            """
            import torch
            from torch import nn

            class Net(nn.Module):
                def __init__(self, hidden):
                    super().__init__()
                    self.up, self.down = nn.Linear(256, hidden), nn.Linear(hidden, 256)

                def forward(self, x):
                    return x + self.down(torch.relu(self.up(x)))

            torch.manual_seed(2)
            experiments = {}

            # %%
            run_id = f"run-{len(experiments):03d}"
            model = Net(hidden=512).to(DEVICE)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            curve = []
            for _ in range(8):
                x = torch.randn(32, 256, device=DEVICE)
                loss = nn.functional.l1_loss(model(x), x.sort(dim=1).values)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                curve.append(loss.item())
            optimizer.zero_grad()
            experiments[run_id] = dict(model=model, optimizer=optimizer, curve=curve)
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="trainers_in_a_class_registry",
        source="https://github.com/talmolab/sleap-nn/issues/574 (a class that lists its instances)",
        found_by="runs",
        line=(
            "self.model = nn.LSTM(n_features, 300, batch_first=True).to(DEVICE)",
            "forecaster = Forecaster(n_features=500)",
        ),
        holder="instances",
        runs=order_cells(
            """
            import torch
            from torch import nn

            class Forecaster:
                instances = []

                def __init__(self, n_features, horizon=1):
                    self.model = nn.LSTM(n_features, 300, batch_first=True).to(DEVICE)
                    self.readout = nn.Linear(300, horizon).to(DEVICE)
                    Forecaster.instances.append(self)

                def parameters(self):
                    yield from self.model.parameters()
                    yield from self.readout.parameters()

                def predict(self, series):
                    hidden, _ = self.model(series)
                    return self.readout(hidden[:, -1])

                def fit(self, series, target, epochs):
                    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
                    for _ in range(epochs):
                        optimizer.zero_grad()
                        loss = nn.functional.mse_loss(self.predict(series), target)
                        loss.backward()
                        optimizer.step()
                    optimizer.zero_grad()
                    return loss.item()

            torch.manual_seed(3)
            series = torch.randn(32, 24, 500, device=DEVICE)
            target = series[:, -1, :1]

            # %%
            forecaster = Forecaster(n_features=500)
            forecaster.fit(series, target, epochs=2)
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="callbacks_of_old_trainers",
        source="Ignite's and Keras's forums: handlers are added again in each run of the cell",
        found_by="runs",
        line=(
            "return nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.Linear(256, 10))",
            "self.net = make_net().to(DEVICE)",
            "trainer = Trainer(events)",
        ),
        holder="events",
        runs=order_cells(
            """
            import collections
            import torch
            from torch import nn

            class EventBus:
                def __init__(self):
                    self.handlers = collections.defaultdict(list)

                def on(self, event, handler):
                    self.handlers[event].append(handler)

                def fire(self, event, **details):
                    for handler in self.handlers[event]:
                        handler(**details)

            def make_net():
                return nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.Linear(256, 10))

            class Trainer:
                def __init__(self, bus):
                    self.net = make_net().to(DEVICE)
                    self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
                    self.bus, self.seen = bus, 0
                    bus.on("batch_end", self.count)

                def count(self, size):
                    self.seen += size

                def run(self, batches):
                    for x, y in batches:
                        loss = nn.functional.cross_entropy(self.net(x), y)
                        self.optimizer.zero_grad()
                        loss.backward()
                        self.optimizer.step()
                        self.bus.fire("batch_end", size=len(x))
                    self.optimizer.zero_grad()

            events = EventBus()
            torch.manual_seed(4)
            batches = [
                (
                    torch.rand(16, 3, 32, 32, device=DEVICE),
                    torch.randint(0, 10, (16,), device=DEVICE),
                )
                for _ in range(4)
            ]

            # %%
            trainer = Trainer(events)
            trainer.run(batches)
            print(trainer.seen, "images")
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="exceptions_kept_with_tracebacks",
        source="https://github.com/NVIDIA/cudf/issues/9232",
        found_by="runs",
        line=(
            "batch = torch.randn(size, 1024, device=DEVICE)",
            "hidden = torch.relu(batch @ weight)",
            "good.append(process(512, broken=i == 5))",
        ),
        holder="failures",
        runs=order_cells(
            """
            import torch

            torch.manual_seed(5)
            weight = torch.randn(1024, 1024, device=DEVICE)
            failures = []

            def process(size, broken):
                batch = torch.randn(size, 1024, device=DEVICE)
                hidden = torch.relu(batch @ weight)
                if broken:
                    raise ValueError(f"no label for a sample of {size}")
                return hidden.mean().item()

            # %%
            # one sample in eight is broken: note it, and go on
            good = []
            for i in range(8):
                try:
                    good.append(process(512, broken=i == 5))
                except ValueError as error:
                    failures.append(error)
            print(len(good), "good,", len(failures), "failures so far")
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="lru_cache_keyed_by_tensors",
        source="https://github.com/facebookresearch/ParlAI/pull/2487 (functools.lru_cache)",
        found_by="runs",
        line=("return torch.cdist(centered, centered)", "score = silhouette(points, labels)"),
        holder="pairwise",
        runs=order_cells(
            """
            import functools
            import torch

            torch.manual_seed(6)

            @functools.lru_cache(maxsize=None)
            def pairwise(points):
                centered = points - points.mean(0)
                return torch.cdist(centered, centered)

            def silhouette(points, labels):
                distances = pairwise(points)
                same = labels[:, None] == labels[None, :]
                inner = (distances * same).sum(1) / same.sum(1)
                outer = (distances * ~same).sum(1) / (~same).sum(1).clamp_min(1)
                return ((outer - inner) / torch.maximum(inner, outer)).mean()

            # %%
            # a tensor's hash is its identity: the cache never meets the same one again
            points = torch.randn(900, 16, device=DEVICE)
            for k in (2, 4, 8):
                labels = torch.randint(0, k, (900,), device=DEVICE)
                score = silhouette(points, labels)
                print(k, f"{score.item():.4f}")
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="prompt_cache_that_never_hits",
        source="Servers that cache the keys and values of each prompt with the time in it",
        found_by="runs",
        line=(
            "past = [project(hidden).view(len(ids), 2, -1) for project in projections]",
            'past = prefill(f"{system} It is {next(clock)} o\'clock. {question}")',
        ),
        holder="prefix_cache",
        runs=order_cells(
            """
            import itertools
            import torch
            from torch import nn

            torch.manual_seed(7)
            embed = nn.Embedding(256, 256).to(DEVICE)
            projections = nn.ModuleList(nn.Linear(256, 512) for _ in range(6)).to(DEVICE)
            prefix_cache = {}
            clock = itertools.count()

            @torch.inference_mode()
            def prefill(prompt):
                if prompt in prefix_cache:
                    return prefix_cache[prompt]
                ids = torch.tensor(list(prompt.encode()), device=DEVICE)
                hidden = embed(ids)
                past = [project(hidden).view(len(ids), 2, -1) for project in projections]
                prefix_cache[prompt] = past
                return past

            # %%
            system = "You are a helpful assistant. " * 5
            for question in ("What is a leak?", "Who holds it?"):
                past = prefill(f"{system} It is {next(clock)} o'clock. {question}")
                print(question, past[0].shape)
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="suspended_generators_in_a_list",
        source="https://github.com/google-research/flood-forecasting/pull/240",
        found_by="runs",
        line=("shard = torch.randn(1000, 1024, device=DEVICE)", "index, batch = next(stream)"),
        holder="streams",
        runs=order_cells(
            """
            import torch

            torch.manual_seed(8)

            def read_shards(n_shards, batch_size):
                for index in range(n_shards):
                    shard = torch.randn(1000, 1024, device=DEVICE)
                    for rows in shard.split(batch_size):
                        yield index, rows * 0.5

            streams = []

            # %%
            # look at the first batch only
            stream = read_shards(n_shards=3, batch_size=50)
            streams.append(stream)
            index, batch = next(stream)
            print(index, batch.mean().item(), batch.std().item())
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="queue_of_a_writer_that_has_stopped",
        source="https://github.com/huggingface/pytorch-image-models/issues/886",
        found_by="runs",
        line="features = body(images)",
        holder="writer",
        runs=order_cells(
            """
            import queue
            import threading
            import torch
            from torch import nn

            class AsyncWriter:
                '''Sums up feature maps in a thread, so that the training need not wait.'''

                def __init__(self):
                    self.queue = queue.Queue()
                    self.means = []
                    self.thread = threading.Thread(target=self._work, daemon=True)
                    self.thread.start()

                def _work(self):
                    while (item := self.queue.get()) is not None:
                        self.means.append(item.mean().item())
                        del item

                def add(self, features):
                    self.queue.put(features)

                def close(self):
                    self.queue.put(None)
                    self.thread.join()

            torch.manual_seed(9)
            body, head = nn.Conv2d(3, 16, 3, padding=1).to(DEVICE), nn.Linear(16, 4).to(DEVICE)
            optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.01)
            writer = AsyncWriter()
            writer.add(torch.zeros(16, 32, 32, device=DEVICE))  # does it work?
            writer.close()

            # %%
            for step in range(6):
                images = torch.rand(12, 3, 32, 32, device=DEVICE)
                features = body(images)
                loss = head(features.mean((2, 3))).logsumexp(1).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                writer.add(features.detach())
            print("written", len(writer.means))
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="finalizers_that_hold_their_object",
        source="https://docs.python.org/3/library/weakref.html#weakref.finalize (the note on args)",
        found_by="runs",
        line=(
            "self.workspace = torch.empty(1024, 1024, device=DEVICE).normal_()",
            'session = Session("spectrum")',
        ),
        holder="finalize",
        runs=order_cells(
            """
            import weakref
            import torch

            class Session:
                def __init__(self, name):
                    self.name, self.steps = name, 0
                    self.workspace = torch.empty(1024, 1024, device=DEVICE).normal_()
                    # a bound method holds the session, so it never dies before the interpreter does
                    weakref.finalize(self, self.close)

                def close(self):
                    self.workspace = None

                def power_iteration(self, n):
                    v = torch.ones(1024, device=DEVICE)
                    for _ in range(n):
                        v = self.workspace @ v
                        v /= v.norm()
                        self.steps += 1
                    return (v @ (self.workspace @ v)).item()

            torch.manual_seed(10)

            # %%
            session = Session("spectrum")
            print(f"{session.power_iteration(20):.3f}")
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="undo_stack_of_closures",
        source="Labelling and pruning tools whose undo is a list of closures without a limit",
        found_by="runs",
        line=(
            "before = {name: value.clone() for name, value in module.state_dict().items()}",
            "prune(model, 0.1 + 0.05 * len(undo))",
        ),
        holder="undo",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(11)
            model = nn.Sequential(nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 768)).to(DEVICE)
            undo = []

            def prune(module, amount):
                before = {name: value.clone() for name, value in module.state_dict().items()}

                def restore():
                    module.load_state_dict(before)

                undo.append(restore)
                with torch.no_grad():
                    for p in module.parameters():
                        if p.dim() > 1:
                            threshold = p.abs().flatten().kthvalue(int(amount * p.numel())).values
                            p.mul_(p.abs() > threshold)

            def sparsity(module):
                zeros = sum((p == 0).sum().item() for p in module.parameters())
                return zeros / sum(p.numel() for p in module.parameters())

            # %%
            prune(model, 0.1 + 0.05 * len(undo))
            x = torch.randn(64, 768, device=DEVICE)
            print(f"sparsity {sparsity(model):.2%}, norm {model(x).norm().item():.2f}")
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="mutable_default_that_collects",
        source="https://github.com/ulissigroup/amptorch/issues/107",
        found_by="runs",
        line=("embeddings.append(encoder(batch))", "vectors = embed_dataset(dataset)"),
        holder="embed_dataset",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(12)
            encoder = (
                nn.Sequential(nn.Linear(40, 256), nn.Tanh(), nn.Linear(256, 256)).to(DEVICE).eval()
            )
            dataset = torch.randn(3000, 40)

            @torch.no_grad()
            def embed_dataset(data, batch_size=500, embeddings=[]):
                for batch in data.to(DEVICE).split(batch_size):
                    embeddings.append(encoder(batch))
                return torch.cat(embeddings)[-len(data):].cpu().clone()

            # %%
            vectors = embed_dataset(dataset)
            u, s, v = torch.pca_lowrank(vectors, q=2)
            print("explained", (s**2 / (len(vectors) - 1)).tolist())
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Leak(
        name="class_attribute_as_a_store",
        source="A list as a class attribute that was meant for one instance (StackOverflow)",
        found_by="runs",
        line=("anchors = self.backbone(patches)", "bank.fit(good)"),
        holder="FeatureBank",
        runs=order_cells(
            """
            import torch
            from torch import nn

            class FeatureBank:
                features = []

                def __init__(self, backbone):
                    self.backbone = backbone

                def fit(self, images):
                    '''PatchCore: remember the features of good images.'''
                    with torch.no_grad():
                        for patches in images.split(8):
                            anchors = self.backbone(patches)
                            self.features.append(anchors.flatten(2).transpose(1, 2))

                def score(self, image):
                    with torch.no_grad():
                        queries = self.backbone(image).flatten(2).transpose(1, 2).flatten(0, 1)
                        return (
                            torch.cdist(queries, self.features[-1].flatten(0, 1))
                            .amin(1)
                            .max()
                            .item()
                        )

            torch.manual_seed(13)
            backbone = nn.Sequential(nn.Conv2d(3, 32, 5, stride=2), nn.ReLU()).to(DEVICE)
            good = torch.rand(32, 3, 64, 64, device=DEVICE)

            # %%
            bank = FeatureBank(backbone)
            bank.fit(good)
            print("anomaly score", bank.score(torch.rand(1, 3, 64, 64, device=DEVICE)))
            """,
            "1 2 2 2 2 2",
        ),
    ),
)
