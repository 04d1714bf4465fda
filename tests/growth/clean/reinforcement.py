"""Clean programs: replay buffers up to their size, rollouts that are emptied."""

from __future__ import annotations

from tests.growth.programs import Program, order_cells

__all__ = ["PROGRAMS"]

PROGRAMS = (
    Program(
        name="dqn_with_a_deque",
        source="https://docs.pytorch.org/tutorials/intermediate/reinforcement_q_learning.html",
        runs=order_cells(
            """
            import math
            import random
            from collections import deque, namedtuple
            import torch
            from torch import nn

            random.seed(0)
            torch.manual_seed(0)
            Step = namedtuple("Step", ["now", "action", "then", "reward"])

            class Replay:
                def __init__(self, capacity):
                    self.steps = deque(maxlen=capacity)

                def push(self, *parts):
                    self.steps.append(Step(*parts))

                def sample(self, batch_size):
                    return random.sample(self.steps, batch_size)

                def __len__(self):
                    return len(self.steps)

            class QNetwork(nn.Module):
                def __init__(self, n_in, n_out):
                    super().__init__()
                    self.layers = nn.Sequential(nn.Linear(n_in, 64), nn.ReLU(),
                                                nn.Linear(64, n_out))

                def forward(self, x):
                    return self.layers(x)

            # the state is a stack of four small frames
            FRAMES, ACTIONS, BATCH, GAMMA, TAU = 4 * 48 * 48, 4, 16, 0.99, 0.005
            online, target = (
                QNetwork(FRAMES, ACTIONS).to(DEVICE),
                QNetwork(FRAMES, ACTIONS).to(DEVICE),
            )
            target.load_state_dict(online.state_dict())
            optimizer = torch.optim.AdamW(online.parameters(), lr=1e-4, amsgrad=True)
            memory = Replay(160)
            n_actions_taken = 0

            def choose(state):
                global n_actions_taken
                n_actions_taken += 1
                if random.random() > 0.05 + 0.85 * math.exp(-n_actions_taken / 100):
                    with torch.no_grad():
                        return online(state).max(1).indices.view(1, 1)
                return torch.tensor([[random.randrange(ACTIONS)]], device=DEVICE)

            def act(state, action):
                state = 0.9 * state + 0.1 * torch.randn_like(state)
                return state, torch.tensor([float(action)], device=DEVICE), random.random() < 0.02

            def learn():
                if len(memory) < BATCH:
                    return
                batch = Step(*zip(*memory.sample(BATCH)))
                states, actions = torch.cat(batch.now), torch.cat(batch.action)
                values = online(states).gather(1, actions).squeeze(1)
                with torch.no_grad():
                    following = target(torch.cat(batch.then)).max(1).values
                loss = nn.functional.smooth_l1_loss(
                    values, torch.cat(batch.reward) + GAMMA * following
                )
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_value_(online.parameters(), 100)
                optimizer.step()

            # %%
            # the memory is full in the fourth run
            state = torch.randn(1, FRAMES, device=DEVICE)
            for t in range(48):
                action = choose(state)
                following_state, reward, crashed = act(state, action)
                memory.push(state, action, following_state, reward)
                state = torch.randn(1, FRAMES, device=DEVICE) if crashed else following_state
                learn()
                with torch.no_grad():
                    for old, new in zip(target.parameters(), online.parameters()):
                        old.lerp_(new, TAU)
            print(f"{len(memory)} transitions")
            """,
            "1 2 2 2 2 2 2 2",
        ),
    ),
    Program(
        name="replay_list_with_capacity_and_position",
        source="The replay memory of PyTorch's DQN tutorial before it used a deque",
        runs=order_cells(
            """
            import random
            import torch
            from torch import nn

            random.seed(1)
            torch.manual_seed(1)

            class Memory:
                def __init__(self, capacity):
                    self.capacity = capacity
                    self.items = []
                    self.position = 0

                def push(self, *experience):
                    if len(self.items) < self.capacity:
                        self.items.append(None)
                    self.items[self.position] = experience
                    self.position = (self.position + 1) % self.capacity

                def sample(self, n):
                    return map(torch.stack, zip(*random.sample(self.items, n)))

            actor = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 8), nn.Tanh()).to(
                DEVICE
            )
            critic = nn.Sequential(nn.Linear(136, 256), nn.ReLU(), nn.Linear(256, 1)).to(DEVICE)
            actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-4)
            critic_opt = torch.optim.Adam(critic.parameters(), lr=1e-3)
            memory = Memory(capacity=100)
            observation = torch.zeros(64, 128, device=DEVICE)

            # %%
            # DDPG on 64 environments at once
            for step in range(30):
                with torch.no_grad():
                    action = actor(observation) + 0.1 * torch.randn(64, 8, device=DEVICE)
                following = (observation + torch.randn_like(observation)).clamp(-3, 3)
                reward = -following.norm(dim=1, keepdim=True)
                memory.push(observation, action, reward, following)
                observation = following
                if len(memory.items) >= 8:
                    s, a, r, s2 = memory.sample(2)
                    with torch.no_grad():
                        goal = r + 0.99 * critic(torch.cat([s2, actor(s2)], -1))
                    critic_opt.zero_grad()
                    nn.functional.mse_loss(critic(torch.cat([s, a], -1)), goal).backward()
                    critic_opt.step()
                    actor_opt.zero_grad()
                    (-critic(torch.cat([s, actor(s)], -1)).mean()).backward()
                    actor_opt.step()
            """,
            "1 2 2 2 2 2 2 2",
        ),
    ),
    Program(
        name="replay_list_filled_within_one_run",
        source="CleanRL-like loops: collect up to the buffer's size, then train on",
        runs=order_cells(
            """
            import random
            import torch
            from torch import nn

            class Buffer:
                def __init__(self, max_size):
                    self.max_size, self.storage, self.ptr = max_size, [], 0

                def add(self, data):
                    if len(self.storage) == self.max_size:
                        self.storage[self.ptr] = data
                        self.ptr = (self.ptr + 1) % self.max_size
                    else:
                        self.storage.append(data)

                def sample(self, n):
                    chosen = random.choices(self.storage, k=n)
                    return torch.cat([obs for obs, _ in chosen]), torch.cat(
                        [ret for _, ret in chosen]
                    )

            random.seed(2)
            torch.manual_seed(2)
            value = nn.Sequential(nn.Linear(512, 128), nn.Tanh(), nn.Linear(128, 1)).to(DEVICE)
            optimizer = torch.optim.Adam(value.parameters())
            buffer = Buffer(max_size=25)

            # %%
            for step in range(60):
                obs = torch.rand(128, 512, device=DEVICE)
                buffer.add((obs, obs.mean(1, keepdim=True)))
                x, y = buffer.sample(1)
                loss = (value(x) - y).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            len(buffer.storage), loss.item()
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="replay_preallocated_tensors",
        source="The TD3 and SAC repositories: arrays of the buffer's size, made at the beginning",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(3)

            class ReplayBuffer:
                def __init__(self, size, obs_dim, act_dim):
                    self.obs = torch.zeros(size, obs_dim, device=DEVICE)
                    self.obs2 = torch.zeros(size, obs_dim, device=DEVICE)
                    self.act = torch.zeros(size, act_dim, device=DEVICE)
                    self.rew = torch.zeros(size, device=DEVICE)
                    self.ptr, self.size, self.max_size = 0, 0, size

                def store(self, obs, act, rew, obs2):
                    at = self.ptr
                    self.obs[at], self.act[at], self.rew[at], self.obs2[at] = obs, act, rew, obs2
                    self.ptr = (at + 1) % self.max_size
                    self.size = min(self.size + 1, self.max_size)

                def sample_batch(self, batch_size=64):
                    idx = torch.randint(0, self.size, (batch_size,), device=DEVICE)
                    return self.obs[idx], self.act[idx], self.rew[idx], self.obs2[idx]

            def mlp(*sizes):
                layers = []
                for a, b in zip(sizes, sizes[1:]):
                    layers += [nn.Linear(a, b), nn.ReLU()]
                return nn.Sequential(*layers[:-1]).to(DEVICE)

            pi, q1, q2 = mlp(64, 256, 6), mlp(70, 256, 1), mlp(70, 256, 1)
            q_params = [*q1.parameters(), *q2.parameters()]
            pi_optimizer = torch.optim.Adam(pi.parameters(), lr=1e-3)
            q_optimizer = torch.optim.Adam(q_params, lr=1e-3)
            buffer = ReplayBuffer(4000, 64, 6)
            o = torch.zeros(64, device=DEVICE)

            # %%
            for t in range(100):
                with torch.no_grad():
                    a = torch.tanh(pi(o)) + 0.1 * torch.randn(6, device=DEVICE)
                o2 = torch.tanh(o + torch.randn(64, device=DEVICE))
                buffer.store(o, a, -o2.abs().sum(), o2)
                o = o2
                if t % 10 == 9:
                    s, a, r, s2 = buffer.sample_batch()
                    with torch.no_grad():
                        following = torch.cat([s2, torch.tanh(pi(s2))], 1)
                        backup = r + 0.99 * torch.min(q1(following), q2(following)).squeeze(1)
                    sa = torch.cat([s, a], 1)
                    loss_q = sum(((q(sa).squeeze(1) - backup) ** 2).mean() for q in (q1, q2))
                    q_optimizer.zero_grad()
                    loss_q.backward()
                    q_optimizer.step()
                    for p in q_params:
                        p.requires_grad = False
                    pi_optimizer.zero_grad()
                    (-q1(torch.cat([s, torch.tanh(pi(s))], 1)).mean()).backward()
                    pi_optimizer.step()
                    for p in q_params:
                        p.requires_grad = True
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="reinforce_with_log_probs",
        source="https://github.com/pytorch/examples (reinforcement_learning, reinforce.py)",
        runs=order_cells(
            """
            from collections import deque
            import torch
            from torch import nn
            from torch.distributions import Categorical

            torch.manual_seed(4)

            class Policy(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.hidden = nn.Linear(128, 256)
                    self.dropout = nn.Dropout(p=0.2)
                    self.choice = nn.Linear(256, 4)
                    self.saved_log_probs = []
                    self.rewards = []

                def forward(self, x):
                    return self.choice(torch.relu(self.dropout(self.hidden(x)))).softmax(-1)

            policy = Policy().to(DEVICE)
            optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

            def sample_action(state):
                m = Categorical(policy(state))
                action = m.sample()
                policy.saved_log_probs.append(m.log_prob(action))
                return action

            def learn_from_episode(gamma=0.99):
                R, returns = 0, deque()
                for r in policy.rewards[::-1]:
                    R = r + gamma * R
                    returns.appendleft(R)
                returns = torch.stack(list(returns))
                returns = (returns - returns.mean()) / (returns.std() + 1e-6)
                losses = [(-p * r).mean() for p, r in zip(policy.saved_log_probs, returns)]
                optimizer.zero_grad()
                torch.stack(losses).sum().backward()
                optimizer.step()
                del policy.rewards[:]
                del policy.saved_log_probs[:]

            # %%
            smoothed = 10
            for episode in range(3):
                state = torch.randn(64, 128, device=DEVICE)
                for t in range(25):
                    action = sample_action(state)
                    policy.rewards.append((action == 2).float())
                    state = torch.roll(state, 1, dims=1)
                smoothed = (
                    0.05 * torch.stack(policy.rewards).sum(0).mean().item() + 0.95 * smoothed
                )
                learn_from_episode()
            print(f"smoothed reward: {smoothed:.2f}")
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="actor_critic_decisions",
        source="https://github.com/pytorch/examples (reinforcement_learning, actor_critic.py)",
        runs=order_cells(
            """
            from collections import namedtuple
            import torch
            from torch import nn
            import torch.nn.functional as F

            Decision = namedtuple("Decision", ["log_prob", "value"])
            torch.manual_seed(5)

            class ActorCritic(nn.Module):
                def __init__(self, n_obs=96, n_actions=3):
                    super().__init__()
                    self.body = nn.Linear(n_obs, 200)
                    self.action_head, self.value_head = nn.Linear(200, n_actions), nn.Linear(200, 1)
                    self.decisions, self.rewards = [], []

                def forward(self, obs):
                    h = F.elu(self.body(obs))
                    return F.softmax(self.action_head(h), dim=-1), self.value_head(h)

            class Corridor:
                def reset(self):
                    self.left = 20
                    return torch.randn(32, 96, device=DEVICE)

                def step(self, action):
                    self.left -= 1
                    observation = torch.randn(32, 96, device=DEVICE)
                    return observation, (action == 1).float(), self.left == 0

            model = ActorCritic().to(DEVICE)
            optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
            env = Corridor()

            # %%
            for episode in range(4):
                obs, done = env.reset(), False
                while not done:
                    probs, value = model(obs)
                    m = torch.distributions.Categorical(probs)
                    action = m.sample()
                    model.decisions.append(Decision(m.log_prob(action), value.squeeze(-1)))
                    obs, reward, done = env.step(action)
                    model.rewards.append(reward)
                R, loss = 0, 0
                for (log_prob, value), r in zip(reversed(model.decisions), reversed(model.rewards)):
                    R = r + 0.99 * R
                    loss = (
                        loss - (log_prob * (R - value.detach())).mean() + F.smooth_l1_loss(value, R)
                    )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                model.decisions.clear()
                model.rewards.clear()
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="ppo_with_rollout_buffer",
        source="PPO-PyTorch: a rollout buffer of lists, emptied after each update",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(6)

            class Rollout:
                def __init__(self):
                    self.actions, self.states, self.log_probs = [], [], []
                    self.rewards, self.values, self.ends = [], [], []

                def clear(self):
                    for kept in vars(self).values():
                        del kept[:]

            def net(n_out, last):
                return nn.Sequential(nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, n_out), last)

            class PPO:
                def __init__(self, n_actions=6, clip=0.2, n_epochs=4):
                    self.buffer, self.clip, self.n_epochs = Rollout(), clip, n_epochs
                    self.actor = net(n_actions, nn.Softmax(dim=-1)).to(DEVICE)
                    self.critic = net(1, nn.Identity()).to(DEVICE)
                    params = [*self.actor.parameters(), *self.critic.parameters()]
                    self.optimizer = torch.optim.Adam(params, lr=3e-4)

                @torch.no_grad()
                def act(self, state):
                    dist = torch.distributions.Categorical(self.actor(state))
                    action = dist.sample()
                    self.buffer.states.append(state)
                    self.buffer.actions.append(action)
                    self.buffer.log_probs.append(dist.log_prob(action))
                    self.buffer.values.append(self.critic(state).squeeze(-1))
                    return action

                def update(self):
                    buffer, running = self.buffer, 0
                    returns = [None] * len(buffer.rewards)
                    for t in reversed(range(len(returns))):
                        running = buffer.rewards[t] + 0.99 * running * (not buffer.ends[t])
                        returns[t] = running
                    returns = torch.cat(returns)
                    returns = (returns - returns.mean()) / (returns.std() + 1e-7)
                    states, actions = torch.cat(buffer.states), torch.cat(buffer.actions)
                    old, values = torch.cat(buffer.log_probs), torch.cat(buffer.values)
                    advantages = returns - values
                    for _ in range(self.n_epochs):
                        dist = torch.distributions.Categorical(self.actor(states))
                        ratio = (dist.log_prob(actions) - old).exp()
                        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
                        loss = (-torch.min(ratio * advantages, clipped * advantages).mean()
                                + 0.5 * (self.critic(states).squeeze(-1) - returns).pow(2).mean()
                                - 0.01 * dist.entropy().mean())
                        self.optimizer.zero_grad()
                        loss.backward()
                        self.optimizer.step()
                    self.buffer.clear()

            agent = PPO()

            # %%
            state = torch.randn(128, 256, device=DEVICE)
            for t in range(1, 61):
                action = agent.act(state)
                state = 0.8 * state + 0.2 * torch.randn_like(state)
                agent.buffer.rewards.append((action < 3).float() * state[:, 0])
                agent.buffer.ends.append(t % 15 == 0)
                if t % 30 == 0:
                    agent.update()
            """,
            "1 2 2 2 2",
        ),
    ),
)
