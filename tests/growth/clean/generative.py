"""Clean programs: two networks at once, contrastive learning, gradients of gradients."""

from __future__ import annotations

from tests.growth.programs import Program, order_cells

__all__ = ["PROGRAMS"]

PROGRAMS = (
    Program(
        name="dcgan_with_two_optimizers",
        source="https://docs.pytorch.org/tutorials/beginner/dcgan_faces_tutorial.html",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(0)
            latent, width = 32, 16

            def initialize(module):
                if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
                    nn.init.normal_(module.weight, 0.0, 0.02)

            def up(n_in, n_out, stride, padding):
                conv = nn.ConvTranspose2d(n_in, n_out, 4, stride, padding, bias=False)
                return [conv, nn.BatchNorm2d(n_out), nn.ReLU(True)]

            generator = nn.Sequential(
                *up(latent, 2 * width, 1, 0), *up(2 * width, width, 2, 1),
                nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh(),
            )
            discriminator = nn.Sequential(
                nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
                nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width),
                nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(2 * width, 1, 4), nn.Sigmoid(),
            )
            generator.to(DEVICE).apply(initialize)
            discriminator.to(DEVICE).apply(initialize)
            criterion = nn.BCELoss()
            fixed_noise = torch.randn(64, latent, 1, 1, device=DEVICE)
            step_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
            step_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
            generator_losses, discriminator_losses = [], []

            # %%
            previews = []
            for iteration in range(12):
                real = torch.rand(64, 3, 16, 16, device=DEVICE) * 2 - 1
                label = torch.ones(64, device=DEVICE)
                discriminator.zero_grad()
                loss_real = criterion(discriminator(real).view(-1), label)
                loss_real.backward()
                fake = generator(torch.randn(64, latent, 1, 1, device=DEVICE))
                loss_fake = criterion(discriminator(fake.detach()).view(-1), label.fill_(0.0))
                loss_fake.backward()
                step_d.step()
                generator.zero_grad()
                loss_g = criterion(discriminator(fake).view(-1), label.fill_(1.0))
                loss_g.backward()
                step_g.step()
                generator_losses.append(loss_g.item())
                discriminator_losses.append((loss_real + loss_fake).item())
                if iteration % 6 == 0:
                    with torch.no_grad():
                        previews.append(generator(fixed_noise).detach().cpu())
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="wgan_gradient_penalty",
        source="Improved training of Wasserstein GANs: double backward for the penalty",
        runs=order_cells(
            """
            import torch
            from torch import autograd, nn

            torch.manual_seed(1)
            generator = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 512)).to(DEVICE)
            critic = nn.Sequential(nn.Linear(512, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)).to(
                DEVICE
            )
            opt_g = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.0, 0.9))
            opt_c = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))

            def gradient_penalty(real, fake, weight=10.0):
                alpha = torch.rand(len(real), 1, device=real.device)
                mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
                scores = critic(mixed)
                (gradient,) = autograd.grad(
                    scores, mixed, torch.ones_like(scores), create_graph=True, retain_graph=True
                )
                return weight * (gradient.norm(2, dim=1) - 1).square().mean()

            # %%
            for step in range(8):
                for _ in range(3):
                    real = torch.randn(128, 512, device=DEVICE).abs()
                    fake = generator(torch.randn(128, 16, device=DEVICE)).detach()
                    penalty = gradient_penalty(real, fake)
                    loss_c = critic(fake).mean() - critic(real).mean() + penalty
                    opt_c.zero_grad()
                    loss_c.backward()
                    opt_c.step()
                opt_g.zero_grad()
                loss_g = -critic(generator(torch.randn(128, 16, device=DEVICE))).mean()
                loss_g.backward()
                opt_g.step()
            print(f"critic {loss_c.item():.3f}  generator {loss_g.item():.3f}")
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="variational_autoencoder",
        source="https://github.com/pytorch/examples/tree/main/vae",
        runs=order_cells(
            """
            import torch
            from torch import nn
            from torch.nn import functional as F

            torch.manual_seed(2)

            class VAE(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.fc1 = nn.Linear(784, 400)
                    self.mean, self.logvar = nn.Linear(400, 20), nn.Linear(400, 20)
                    self.fc3, self.fc4 = nn.Linear(20, 400), nn.Linear(400, 784)

                def decode(self, z):
                    return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

                def forward(self, x):
                    h = F.relu(self.fc1(x.view(-1, 784)))
                    mu, logvar = self.mean(h), self.logvar(h)
                    z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
                    return self.decode(z), mu, logvar

            def loss_function(recon, x, mu, logvar):
                bce = F.binary_cross_entropy(recon, x.view(-1, 784), reduction="sum")
                return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())

            model = VAE().to(DEVICE)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            digits = [torch.rand(128, 1, 28, 28) for _ in range(6)]

            # %%
            train_loss = 0
            for data in digits:
                data = data.to(DEVICE)
                optimizer.zero_grad()
                recon, mu, logvar = model(data)
                loss = loss_function(recon, data, mu, logvar)
                loss.backward()
                train_loss += loss.item()
                optimizer.step()
            with torch.no_grad():
                comparison = torch.cat([data[:8].view(8, -1), recon[:8]]).cpu()
                sample = model.decode(torch.randn(64, 20, device=DEVICE)).cpu().view(64, 1, 28, 28)
            print(f"Average loss: {train_loss / 768:.2f}")
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="diffusion_sampling_with_frames",
        source="DDPM notebooks: the chain of denoised images is kept for an animation",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(3)
            steps = 30
            betas = torch.linspace(1e-4, 0.02, steps, device=DEVICE)
            alphas = 1 - betas
            alpha_bars = torch.cumprod(alphas, 0)

            class Denoiser(nn.Module):
                def __init__(self, width=24):
                    super().__init__()
                    self.time = nn.Embedding(steps, width)
                    self.inp = nn.Conv2d(1, width, 3, padding=1)
                    self.mid = nn.Conv2d(width, width, 3, padding=1)
                    self.out = nn.Conv2d(width, 1, 3, padding=1)

                def forward(self, x, t):
                    h = torch.relu(self.inp(x) + self.time(t)[:, :, None, None])
                    return self.out(h + torch.relu(self.mid(h)))

            eps_model = Denoiser().to(DEVICE)
            optimizer = torch.optim.Adam(eps_model.parameters(), lr=2e-3)

            # %%
            for _ in range(10):
                x0 = torch.rand(16, 1, 24, 24, device=DEVICE).round()
                t = torch.randint(0, steps, (len(x0),), device=DEVICE)
                noise = torch.randn_like(x0)
                a = alpha_bars[t][:, None, None, None]
                loss = (
                    (eps_model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t) - noise).square().mean()
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

            # %%
            frames = []
            with torch.no_grad():
                x = torch.randn(16, 1, 32, 32, device=DEVICE)
                for i in reversed(range(steps)):
                    t = torch.full((len(x),), i, device=DEVICE)
                    x = (x - betas[i] / (1 - alpha_bars[i]).sqrt() * eps_model(x, t)) / alphas[
                        i
                    ].sqrt()
                    if i:
                        x += betas[i].sqrt() * torch.randn_like(x)
                    frames.append(x.clamp(0, 1))
            print(len(frames), "frames")
            """,
            "1 2 3 2 3 2 3 2 3 2 3",
        ),
    ),
    Program(
        name="moco_queue_of_keys",
        source="https://github.com/facebookresearch/moco (the queue of negative keys)",
        runs=order_cells(
            """
            import copy
            import torch
            from torch import nn
            import torch.nn.functional as F

            torch.manual_seed(4)

            class MoCo(nn.Module):
                def __init__(self, encoder, dim=128, K=4096, m=0.99, T=0.07):
                    super().__init__()
                    self.K, self.m, self.T = K, m, T
                    self.query_encoder = encoder
                    self.key_encoder = copy.deepcopy(encoder).requires_grad_(False)
                    self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
                    self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

                @torch.no_grad()
                def _follow(self):
                    for q, k in zip(self.query_encoder.parameters(), self.key_encoder.parameters()):
                        k.data = k.data * self.m + q.data * (1.0 - self.m)

                @torch.no_grad()
                def _enqueue(self, keys):
                    ptr = int(self.queue_ptr)
                    self.queue[:, ptr : ptr + len(keys)] = keys.T
                    self.queue_ptr[0] = (ptr + len(keys)) % self.K

                def forward(self, first, second):
                    q = F.normalize(self.query_encoder(first), dim=1)
                    with torch.no_grad():
                        self._follow()
                        k = F.normalize(self.key_encoder(second), dim=1)
                    positive = (q * k).sum(1, keepdim=True)
                    negative = q @ self.queue.clone().detach()
                    logits = torch.cat([positive, negative], dim=1) / self.T
                    labels = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
                    self._enqueue(k)
                    return logits, labels

            encoder = nn.Sequential(
                nn.Flatten(), nn.Linear(768, 256), nn.ReLU(), nn.Linear(256, 128)
            )
            model = MoCo(encoder).to(DEVICE)
            optimizer = torch.optim.SGD(model.query_encoder.parameters(), 0.03, momentum=0.9)

            # %%
            for step in range(12):
                image = torch.rand(64, 3, 16, 16, device=DEVICE)
                first, second = (image + 0.1 * torch.randn_like(image) for _ in range(2))
                output, target = model(first=first, second=second)
                loss = F.cross_entropy(output, target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="contrastive_queue_concatenated",
        source="Memory banks that are concatenated and cut to their size",
        runs=order_cells(
            """
            import torch
            from torch import nn
            import torch.nn.functional as F

            torch.manual_seed(5)
            queue_size = 2048
            projector = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.ReLU(),
                                      nn.Linear(512, 256)).to(DEVICE)
            optimizer = torch.optim.SGD(projector.parameters(), lr=0.1, momentum=0.9)
            queue = torch.empty(0, 256, device=DEVICE)

            # %%
            # fills up for eight steps, and then stays as large as it is
            for step in range(14):
                features = torch.randn(256, 256, device=DEVICE)
                z1 = F.normalize(projector(features), dim=1)
                z2 = F.normalize(projector(features + 0.2 * torch.randn_like(features)), dim=1)
                candidates = torch.cat([z2, queue])
                loss = F.cross_entropy(z1 @ candidates.T / 0.1, torch.arange(256, device=DEVICE))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                queue = torch.cat([z2.detach(), queue])[:queue_size].clone()
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="maml_inner_loop",
        source="Model-agnostic meta-learning with a second-order inner loop",
        runs=order_cells(
            """
            import math
            import torch
            from torch import nn
            from torch.func import functional_call

            torch.manual_seed(6)
            model = nn.Sequential(nn.Linear(1, 160), nn.ReLU(), nn.Linear(160, 160), nn.ReLU(),
                                  nn.Linear(160, 1)).to(DEVICE)
            meta_optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

            def sample_task(k=256):
                amplitude, phase = torch.rand(2, device=DEVICE) * math.pi
                x = torch.rand(2, k, 1, device=DEVICE) * 10 - 5
                return x, amplitude * torch.sin(x + phase)

            def adapt(params, x, y, steps=4, lr=0.01):
                for _ in range(steps):
                    loss = nn.functional.mse_loss(functional_call(model, params, x), y)
                    grads = torch.autograd.grad(loss, tuple(params.values()), create_graph=True)
                    params = {name: p - lr * g for (name, p), g in zip(params.items(), grads)}
                return params

            # %%
            for iteration in range(5):
                meta_optimizer.zero_grad()
                meta_loss = 0.0
                for task in range(3):
                    x, y = sample_task()
                    fast = adapt(dict(model.named_parameters()), x[0], y[0])
                    query = nn.functional.mse_loss(functional_call(model, fast, x[1]), y[1])
                    (query / 3).backward()
                    meta_loss += query.item() / 3
                meta_optimizer.step()
            print(f"meta loss {meta_loss:.4f}")
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="two_losses_with_retain_graph",
        source="PyTorch's forum: two losses over a shared body, retain_graph for the first",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(7)
            body = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(),
                                 nn.Conv2d(24, 24, 3, padding=1), nn.ReLU()).to(DEVICE)
            segment, depth = nn.Conv2d(24, 5, 1).to(DEVICE), nn.Conv2d(24, 1, 1).to(DEVICE)
            parameters = [*body.parameters(), *segment.parameters(), *depth.parameters()]
            optimizer = torch.optim.SGD(parameters, lr=0.01)

            # %%
            for i in range(8):
                photo = torch.rand(4, 3, 64, 64, device=DEVICE)
                classes = torch.randint(0, 5, (4, 64, 64), device=DEVICE)
                shared = body(photo)
                loss_seg = nn.functional.cross_entropy(segment(shared), classes)
                loss_depth = (depth(shared).squeeze(1) - photo.mean(1)).abs().mean()
                optimizer.zero_grad()
                loss_seg.backward(retain_graph=True)
                gradient_norm = body[0].weight.grad.norm().item()
                loss_depth.backward()
                optimizer.step()
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="physics_informed_network",
        source="Tutorials on physics-informed networks: the residual takes second derivatives",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(8)
            net = nn.Sequential(nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(),
                                nn.Linear(128, 1)).to(DEVICE)
            optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
            history = []

            def derivative(y, x):
                return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]

            def residual(points, nu=0.01):
                points.requires_grad_(True)
                u = net(points)
                du = derivative(u, points)
                u_t, u_x = du[:, :1], du[:, 1:]
                u_xx = derivative(u_x, points)[:, 1:]
                return u_t + u * u_x - nu * u_xx

            # %%
            for epoch in range(15):
                inside = torch.rand(600, 2, device=DEVICE)
                start = torch.cat([torch.zeros(100, 1), torch.rand(100, 1)], dim=1).to(DEVICE)
                loss_pde = residual(inside).square().mean()
                loss_ic = (net(start) + torch.sin(torch.pi * start[:, 1:])).square().mean()
                loss = loss_pde + loss_ic
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                history.append((epoch, loss_pde.item(), loss_ic.item()))
            history[-1]
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="neural_style_transfer",
        source="https://docs.pytorch.org/tutorials/advanced/neural_style_tutorial.html",
        runs=order_cells(
            """
            import torch
            from torch import nn
            import torch.nn.functional as F

            torch.manual_seed(9)

            def gram_matrix(features):
                n, c, h, w = features.size()
                flat = features.view(n * c, h * w)
                return (flat @ flat.t()).div(n * c * h * w)

            class StyleLoss(nn.Module):
                def __init__(self, target):
                    super().__init__()
                    self.target = gram_matrix(target).detach()

                def forward(self, x):
                    self.loss = F.mse_loss(gram_matrix(x), self.target)
                    return x

            cnn = [
                nn.Conv2d(3, 16, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, padding=1),
                nn.ReLU(),
            ]
            for layer in cnn:
                layer.to(DEVICE).requires_grad_(False)
            style, content = torch.rand(2, 1, 3, 64, 64, device=DEVICE)

            # %%
            model, style_losses, x = nn.Sequential(), [], style
            for layer in cnn:
                model.append(layer)
                x = layer(x)
                if isinstance(layer, nn.Conv2d):
                    style_losses.append(StyleLoss(x))
                    model.append(style_losses[-1])
            image = content.clone().requires_grad_(True)
            optimizer = torch.optim.LBFGS([image])
            run = [0]
            while run[0] <= 30:
                def closure():
                    with torch.no_grad():
                        image.clamp_(0, 1)
                    optimizer.zero_grad()
                    model(image)
                    loss = 1e4 * sum(layer.loss for layer in style_losses)
                    loss.backward()
                    run[0] += 1
                    return loss
                optimizer.step(closure)
            print(run[0], "evaluations")
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="adversarial_examples",
        source="https://docs.pytorch.org/tutorials/beginner/fgsm_tutorial.html",
        runs=order_cells(
            """
            import torch
            from torch import nn
            import torch.nn.functional as F

            torch.manual_seed(10)
            model = (
                nn.Sequential(
                    nn.Conv2d(1, 16, 5),
                    nn.ReLU(),
                    nn.MaxPool2d(2),
                    nn.Conv2d(16, 32, 5),
                    nn.ReLU(),
                    nn.Flatten(),
                    nn.Linear(2048, 10),
                )
                .to(DEVICE)
                .eval()
            )
            batches = [(torch.rand(32, 1, 28, 28), torch.randint(0, 10, (32,))) for _ in range(5)]

            def perturb(image, epsilon, gradient):
                return torch.clamp(image + epsilon * gradient.sign(), 0, 1)

            # %%
            accuracies, examples = [], []
            for epsilon in (0, 0.1, 0.2):
                correct, shown = 0, []
                for data, target in batches:
                    data, target = data.to(DEVICE), target.to(DEVICE)
                    data.requires_grad = True
                    loss = F.cross_entropy(model(data), target)
                    model.zero_grad()
                    loss.backward()
                    perturbed = perturb(data, epsilon, data.grad.data)
                    final = model(perturbed).argmax(1)
                    correct += (final == target).sum().item()
                    if len(shown) < 5:
                        shown.append(perturbed[0].squeeze().detach().cpu().numpy())
                accuracies.append(correct / 160)
                examples.append(shown)
            print(accuracies)
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="graph_convolution_full_batch",
        source="Cora notebooks: a graph network trained on the whole graph, 200 epochs at a time",
        runs=order_cells(
            """
            import torch
            from torch import nn
            import torch.nn.functional as F

            torch.manual_seed(11)
            n, edges = 1500, 9000
            index = torch.randint(0, n, (2, edges))
            weights = torch.full((edges,), 1 / 6)
            adjacency = torch.sparse_coo_tensor(index, weights, (n, n), check_invariants=True)
            adjacency = adjacency.coalesce().to(DEVICE)
            x, y = torch.rand(n, 300, device=DEVICE), torch.randint(0, 7, (n,), device=DEVICE)
            train_mask = torch.rand(n, device=DEVICE) < 0.2

            class GCN(nn.Module):
                def __init__(self, hidden=64):
                    super().__init__()
                    self.conv1, self.conv2 = nn.Linear(300, hidden), nn.Linear(hidden, 7)

                def forward(self, x):
                    x = torch.sparse.mm(adjacency, self.conv1(x)).relu()
                    x = F.dropout(x, training=self.training)
                    return torch.sparse.mm(adjacency, self.conv2(x))

            model = GCN().to(DEVICE)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
            best_val_acc = final_acc = 0

            # %%
            for epoch in range(20):
                model.train()
                optimizer.zero_grad()
                out = model(x)
                loss = F.cross_entropy(out[train_mask], y[train_mask])
                loss.backward()
                optimizer.step()
                model.eval()
                with torch.no_grad():
                    pred = model(x).argmax(dim=-1)
                val_acc = (pred[~train_mask] == y[~train_mask]).float().mean().item()
                best_val_acc = max(best_val_acc, val_acc)
            """,
            "1 2 2 2 2",
        ),
    ),
)
