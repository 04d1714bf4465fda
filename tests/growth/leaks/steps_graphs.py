"""Leaks within a loop: autograd graphs that are kept from step to step."""

from __future__ import annotations

from tests.growth.programs import Leak, order_cells

__all__ = ["LEAKS"]

LEAKS = (
    Leak(
        name="validation_losses_without_no_grad",
        source="https://github.com/pytorch/pytorch/issues/17568 (total_loss += loss)",
        found_by="steps",
        line="outputs = model(inputs)",
        holder="total_loss",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)).to(DEVICE)
            criterion = nn.MSELoss()
            optimizer = torch.optim.Adam(model.parameters())
            val_data = torch.randn(40, 256, 64)

            # %%
            for _ in range(3):
                inputs = torch.randn(256, 64, device=DEVICE)
                loss = criterion(model(inputs), inputs)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

            # %%
            model.eval()
            total_loss = 0
            for batch in val_data:
                inputs = targets = batch.to(DEVICE)
                outputs = model(inputs)
                total_loss += criterion(outputs, targets)
            print("validation loss:", total_loss.item() / len(val_data))
            """,
            "1 2 3",
        ),
    ),
    Leak(
        name="losses_appended_with_their_graphs",
        source="https://github.com/TRI-ML/packnet-sfm/pull/51 (a list of losses)",
        found_by="steps",
        line=(
            "smoothness = gradient_x(recon).abs().mean() + gradient_y(recon).abs().mean()",
            "return x[..., :, 1:] - x[..., :, :-1]",
            "return x[..., 1:, :] - x[..., :-1, :]",
        ),
        holder="losses",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(1)
            encoder = nn.Conv2d(3, 8, 4, stride=4).to(DEVICE)
            decoder = nn.ConvTranspose2d(8, 3, 4, stride=4).to(DEVICE)
            optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)

            def gradient_x(x):
                return x[..., :, 1:] - x[..., :, :-1]

            def gradient_y(x):
                return x[..., 1:, :] - x[..., :-1, :]

            # %%
            losses = {"photometric": [], "smoothness": []}
            for step in range(40):
                frames = torch.rand(4, 3, 64, 96, device=DEVICE)
                code = encoder(frames)
                recon = decoder(code)
                photometric = (recon - frames).abs()
                loss = photometric.mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                # the smoothness is for the log only, so no backward pass frees its graph
                smoothness = gradient_x(recon).abs().mean() + gradient_y(recon).abs().mean()
                losses["photometric"].append(loss.item())
                losses["smoothness"].append(smoothness)
            """,
            "1 2",
        ),
    ),
    Leak(
        name="losses_with_retained_graphs",
        source="https://github.com/pytorch/pytorch/issues/40005 (backward(retain_graph=True))",
        found_by="steps",
        line=("mu, log_var = self.encode(x).chunk(2, dim=1)", "recon, mu, log_var = vae(x)"),
        holder="curve",
        runs=order_cells(
            """
            import torch
            from torch import nn

            class VAE(nn.Module):
                def __init__(self, n_in=100, hidden=384, latent=16):
                    super().__init__()
                    self.encode = nn.Sequential(
                        nn.Linear(n_in, hidden), nn.Tanh(), nn.Linear(hidden, 2 * latent))
                    self.decode = nn.Linear(latent, n_in)

                def forward(self, x):
                    mu, log_var = self.encode(x).chunk(2, dim=1)
                    z = mu + torch.randn_like(mu) * (0.5 * log_var).exp()
                    return self.decode(z), mu, log_var

            torch.manual_seed(12)
            vae = VAE().to(DEVICE)
            optimizer = torch.optim.Adam(vae.parameters(), lr=1e-3)

            # %%
            # the second backward() said: "specify retain_graph=True"
            curve = []
            for step in range(36):
                x = torch.randn(300, 100, device=DEVICE)
                recon, mu, log_var = vae(x)
                recon_loss = (recon - x).square().sum(1).mean()
                kl = -0.5 * (1 + log_var - mu.square() - log_var.exp()).sum(1).mean()
                optimizer.zero_grad()
                recon_loss.backward(retain_graph=True)
                kl.backward(retain_graph=True)
                optimizer.step()
                curve.append((recon_loss, kl))
            print(*(f"{part.item():.2f}" for part in curve[-1]))
            """,
            "1 2",
        ),
    ),
    Leak(
        name="dice_score_summed_up_with_its_graph",
        source="Segmentation notebooks: a soft Dice score beside the loss, summed up as a tensor",
        found_by="steps",
        line=(
            "probs = logits.softmax(dim=1)",
            "one_hot = F.one_hot(masks, 4).permute(0, 3, 1, 2).float()",
            "epoch_dice += soft_dice(logits, masks)",
        ),
        holder="dice",
        runs=order_cells(
            """
            import torch
            from torch import nn
            import torch.nn.functional as F

            torch.manual_seed(2)
            unet = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
                                 nn.Conv2d(16, 4, 3, padding=1)).to(DEVICE)
            optimizer = torch.optim.SGD(unet.parameters(), lr=0.1)

            def soft_dice(logits, masks):
                probs = logits.softmax(dim=1)
                one_hot = F.one_hot(masks, 4).permute(0, 3, 1, 2).float()
                overlap = (probs * one_hot).sum(dim=(2, 3))
                size = (probs + one_hot).sum(dim=(2, 3))
                return (2 * overlap / size.clamp_min(1e-6)).mean()

            def scans(n):
                for _ in range(n):
                    masks = torch.randint(0, 4, (4, 96, 96), device=DEVICE)
                    yield masks.unsqueeze(1) / 4 + torch.rand(4, 1, 96, 96, device=DEVICE), masks

            # %%
            epoch_loss, epoch_dice = 0.0, 0.0
            for images, masks in scans(36):
                optimizer.zero_grad()
                logits = unet(images)
                loss = F.cross_entropy(logits, masks)
                loss.backward()
                optimizer.step()
                epoch_loss += loss.item()
                epoch_dice += soft_dice(logits, masks)
            print(f"loss {epoch_loss / 36:.3f}, dice {epoch_dice / 36:.3f}")
            """,
            "1 2",
        ),
    ),
    Leak(
        name="average_meter_updated_with_tensors",
        source="AverageMeter.update(loss) in place of loss.item() (PyTorch's forum)",
        found_by="steps",
        line="loss = criterion(model(x), y)",
        holder="meter",
        runs=order_cells(
            """
            import torch
            from torch import nn

            class AverageMeter:
                def __init__(self, name):
                    self.name = name
                    self.sum = 0
                    self.count = 0

                def update(self, value, n=1):
                    self.sum = self.sum + value * n
                    self.count += n

                @property
                def avg(self):
                    return self.sum / self.count

            torch.manual_seed(3)
            model = nn.Sequential(nn.Conv1d(2, 24, 7, padding=3), nn.ELU(), nn.Flatten(),
                                  nn.Linear(24 * 128, 5)).to(DEVICE)
            criterion = nn.CrossEntropyLoss()

            def validate(loader):
                meter = AverageMeter("val")
                model.eval()
                for x, y in loader:
                    loss = criterion(model(x), y)
                    meter.update(loss, n=len(x))
                return meter.avg

            # %%
            def make_loader(n):
                for _ in range(n):
                    yield (
                        torch.randn(32, 2, 128, device=DEVICE),
                        torch.randint(0, 5, (32,), device=DEVICE),
                    )

            print("val loss", validate(make_loader(36)).item())
            """,
            "1 2",
        ),
    ),
    Leak(
        name="hidden_state_of_streaming_inference",
        source="https://github.com/pytorch/pytorch/issues/2198 (a state that is never detached)",
        found_by="steps",
        line="hidden = rnn(frame, hidden)[1]",
        holder="hidden",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(4)
            rnn = nn.GRU(80, 192, batch_first=True).to(DEVICE)
            keyword = nn.Linear(192, 12).to(DEVICE)
            rnn.eval(), keyword.eval()

            def microphone(seconds):
                for _ in range(seconds):
                    yield torch.randn(32, 5, 80, device=DEVICE)

            # %%
            hidden = None
            heard = []
            for frame in microphone(seconds=36):
                hidden = rnn(frame, hidden)[1]
                heard.append(keyword(hidden[-1]).argmax(1).tolist())
            print(heard[-1])
            """,
            "1 2",
        ),
    ),
    Leak(
        name="predictions_kept_by_a_metric_object",
        source="torchmetrics' and Lightning's forums: update() with predictions that need grad",
        found_by="steps",
        line=("x = torch.relu(self.lift(x))", "return self.mix(x) + x", "preds = head(model(x))"),
        holder="r2",
        runs=order_cells(
            """
            import torch
            from torch import nn

            class R2Score:
                def __init__(self):
                    self.preds, self.targets = [], []

                def update(self, preds, targets):
                    self.preds.append(preds)
                    self.targets.append(targets)

                def compute(self):
                    preds, targets = torch.cat(self.preds), torch.cat(self.targets)
                    spread = (targets - targets.mean()).square().sum()
                    return 1 - (preds - targets).square().sum() / spread

            class Mixer(nn.Module):
                def __init__(self, n_in, width):
                    super().__init__()
                    self.lift, self.mix = nn.Linear(n_in, width), nn.Linear(width, width)

                def forward(self, x):
                    x = torch.relu(self.lift(x))
                    return self.mix(x) + x

            torch.manual_seed(5)
            model = Mixer(64, 256).to(DEVICE)
            head = nn.Linear(256, 1).to(DEVICE)
            r2 = R2Score()

            def test_step(x):
                preds = head(model(x))
                r2.update(preds, x.mean(1, keepdim=True))

            # %%
            for _ in range(36):
                test_step(torch.randn(512, 64, device=DEVICE))
            print(f"R2 {r2.compute().item():.3f}")
            """,
            "1 2",
        ),
    ),
    Leak(
        name="second_order_gradients_in_a_list",
        source="https://github.com/pytorch/pytorch/issues/71068 (create_graph=True)",
        found_by="steps",
        line="grads = torch.autograd.grad(loss, params, create_graph=True)",
        holder="sharpness",
        runs=order_cells(
            """
            import torch
            from torch import nn
            import torch.nn.functional as F

            torch.manual_seed(6)
            net = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 10)).to(DEVICE)
            params = list(net.parameters())
            optimizer = torch.optim.SGD(params, lr=0.1)

            # %%
            sharpness = []
            for step in range(36):
                x = torch.randn(64, 128, device=DEVICE)
                y = torch.randint(0, 10, (64,), device=DEVICE)
                loss = F.cross_entropy(net(x), y)
                grads = torch.autograd.grad(loss, params, create_graph=True)
                norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
                sharpness.append(norm)
                optimizer.zero_grad()
                for p, g in zip(params, grads):
                    p.grad = g.detach()
                optimizer.step()
            print(f"{sharpness[0]:.3f} -> {sharpness[-1]:.3f}")
            """,
            "1 2",
        ),
    ),
    Leak(
        name="search_tree_of_latent_states",
        source="MuZero-like notebooks: each node of the tree keeps its state, with the graph",
        found_by="steps",
        line=(
            "state = torch.tanh(self.transition(torch.cat([node.state, action], dim=-1)))",
            "leaf = world.expand(node)",
        ),
        holder="children",
        runs=order_cells(
            """
            import random
            import torch
            from torch import nn

            class Node:
                def __init__(self, state, parent=None):
                    self.state, self.parent = state, parent
                    self.children = []
                    self.visits = 0

            class World(nn.Module):
                def __init__(self, dim=512, actions=16):
                    super().__init__()
                    self.actions = actions
                    self.transition = nn.Linear(dim + actions, dim)
                    self.value = nn.Linear(dim, 1)

                def expand(self, node):
                    choice = torch.randint(0, self.actions, (len(node.state),), device=DEVICE)
                    action = nn.functional.one_hot(choice, self.actions).float()
                    state = torch.tanh(self.transition(torch.cat([node.state, action], dim=-1)))
                    node.children.append(Node(state, parent=node))
                    return node.children[-1]

            torch.manual_seed(7)
            random.seed(7)
            world = World().to(DEVICE)

            # %%
            root = Node(torch.randn(128, 512, device=DEVICE))
            for simulation in range(40):
                node = root
                while node.children and random.random() < 0.6:
                    node = random.choice(node.children)
                leaf = world.expand(node)
                value = world.value(leaf.state).mean().item()
                while leaf is not None:
                    leaf.visits += 1
                    leaf = leaf.parent
            print(root.visits, "simulations")
            """,
            "1 2",
        ),
    ),
    Leak(
        name="beam_search_keeps_all_hypotheses",
        source="Hand-written beam search that keeps pruned hypotheses, with their graphs",
        found_by="steps",
        line="h, c = cell(embed(tokens[:, -1]), (hypothesis.h, hypothesis.c))",
        holder="hypotheses",
        runs=order_cells(
            """
            from dataclasses import dataclass
            import torch
            from torch import nn

            @dataclass
            class Hypothesis:
                tokens: torch.Tensor
                score: torch.Tensor
                h: torch.Tensor
                c: torch.Tensor

            torch.manual_seed(8)
            embed, cell, head = nn.Embedding(400, 256), nn.LSTMCell(256, 256), nn.Linear(256, 400)
            for module in (embed, cell, head):
                module.to(DEVICE).eval()

            # %%
            batch = 32
            zeros = torch.zeros(batch, 256, device=DEVICE)
            start = torch.zeros(batch, 1, dtype=torch.long, device=DEVICE)
            hypotheses = [Hypothesis(start, torch.zeros(batch, device=DEVICE), zeros, zeros)]
            beams = list(hypotheses)
            for length in range(32):
                candidates = []
                for hypothesis in beams:
                    tokens = hypothesis.tokens
                    h, c = cell(embed(tokens[:, -1]), (hypothesis.h, hypothesis.c))
                    log_probs = head(h).log_softmax(-1)
                    scores, words = log_probs.topk(3, dim=-1)
                    for score, word in zip(scores.unbind(1), words.unbind(1)):
                        longer = torch.cat([tokens, word[:, None]], dim=1)
                        candidates.append(Hypothesis(longer, hypothesis.score + score, h, c))
                hypotheses.extend(candidates)
                beams = sorted(candidates, key=lambda c: c.score.mean().item(), reverse=True)[:3]
            print(len(hypotheses), "hypotheses,", beams[0].tokens[0, :8].tolist())
            """,
            "1 2",
        ),
    ),
    Leak(
        name="linked_list_of_states",
        source="PyTorch's forum: a tensor that gets the one before as an attribute (x.prev = …)",
        found_by="steps",
        line="following = field + 0.2 * laplacian(field)",
        holder="prev",
        runs=order_cells(
            """
            import torch
            import torch.nn.functional as F

            torch.manual_seed(9)
            kernel = torch.tensor(
                [[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]], device=DEVICE
            )

            def laplacian(x):
                padded = F.pad(x, (1, 1, 1, 1), mode="circular")
                return F.conv2d(padded, kernel[None, None])

            # %%
            # heat flows over a torus
            field = torch.rand(1, 1, 384, 384, device=DEVICE)
            field.prev = None
            for t in range(40):
                following = field + 0.2 * laplacian(field)
                following.prev = field  # to draw how it came about
                field = following
                if t % 10 == 0:
                    print(t, field.std().item())
            """,
            "1 2",
        ),
    ),
    Leak(
        name="deferred_logging_in_closures",
        source="https://github.com/pytorch/pytorch/issues/51883 (lambdas in a list of callbacks)",
        found_by="steps",
        line="upscaled = model(small)",
        holder="pending",
        runs=order_cells(
            """
            import torch
            from torch import nn

            class Logger:
                '''Computes what was logged when flush() is called, and not before.'''

                def __init__(self):
                    self.pending, self.lines = [], []

                def defer(self, compute):
                    self.pending.append(compute)

                def flush(self):
                    self.lines += [compute() for compute in self.pending]
                    self.pending.clear()

            torch.manual_seed(10)
            model = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.PixelShuffle(2)).to(DEVICE)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            logger = Logger()

            # %%
            for step in range(40):
                large = torch.rand(8, 3, 80, 80, device=DEVICE)
                small = nn.functional.avg_pool2d(large, 2)
                upscaled = model(small)
                loss = (upscaled - large).abs().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                logger.defer(lambda step=step, image=upscaled: (step, image.mean().item()))
            print(len(logger.pending), "lines wait for flush()")
            """,
            "1 2",
        ),
    ),
    Leak(
        name="value_estimates_of_a_policy",
        source="Actor-critic notebooks that clear the log probabilities and forget the values",
        found_by="steps",
        line=(
            "hidden = torch.tanh(self.value_in(obs))",
            "logits, value = policy(obs)",
        ),
        holder="policy",
        runs=order_cells(
            """
            import torch
            from torch import nn
            from torch.distributions import Categorical

            class Policy(nn.Module):
                def __init__(self, n_obs=64, n_actions=6):
                    super().__init__()
                    self.actor = nn.Linear(n_obs, n_actions)
                    self.value_in, self.critic = nn.Linear(n_obs, 512), nn.Linear(512, 1)
                    self.log_probs, self.values, self.rewards = [], [], []

                def forward(self, obs):
                    logits = self.actor(obs)
                    hidden = torch.tanh(self.value_in(obs))
                    return logits, self.critic(hidden)

            torch.manual_seed(11)
            policy = Policy().to(DEVICE)
            optimizer = torch.optim.Adam(policy.actor.parameters(), lr=1e-3)

            # %%
            obs = torch.randn(200, 64, device=DEVICE)
            for t in range(40):
                logits, value = policy(obs)
                dist = Categorical(logits=logits)
                action = dist.sample()
                obs = torch.randn_like(obs) + 0.01 * action[:, None]
                policy.log_probs.append(dist.log_prob(action))
                policy.values.append(value)  # for the plot of the critic
                policy.rewards.append((action == 3).float())
                if (t + 1) % 5 == 0:
                    rewards = torch.stack(policy.rewards)
                    advantage = rewards - rewards.mean()
                    loss = -(torch.stack(policy.log_probs) * advantage).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    policy.log_probs.clear(), policy.rewards.clear()
            print(len(policy.values), "values")
            """,
            "1 2",
        ),
    ),
)
