"""Clean programs: language models, and batches of different lengths."""

from __future__ import annotations

from tests.growth.programs import Program, order_cells

__all__ = ["PROGRAMS"]

PROGRAMS = (
    Program(
        name="word_language_model",
        source="https://github.com/pytorch/examples/tree/main/word_language_model",
        runs=order_cells(
            """
            import math
            import torch
            from torch import nn

            torch.manual_seed(1)
            n_tokens, bptt, clip = 300, 20, 0.25

            class RNNModel(nn.Module):
                def __init__(self, n_tokens, n_embed, n_hidden, n_layers, dropout=0.2):
                    super().__init__()
                    self.drop = nn.Dropout(dropout)
                    self.encoder = nn.Embedding(n_tokens, n_embed)
                    self.rnn = nn.LSTM(n_embed, n_hidden, n_layers, dropout=dropout)
                    self.decoder = nn.Linear(n_hidden, n_tokens)

                def forward(self, tokens, hidden):
                    output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
                    return self.decoder(self.drop(output)).flatten(0, 1), hidden

                def init_hidden(self, batch):
                    weight = next(self.parameters())
                    shape = (self.rnn.num_layers, batch, self.rnn.hidden_size)
                    return weight.new_zeros(shape), weight.new_zeros(shape)

            def repackage(hidden):
                if isinstance(hidden, torch.Tensor):
                    return hidden.detach()
                return tuple(repackage(part) for part in hidden)

            def batchify(stream, batch):
                rows = stream.size(0) // batch
                return stream[: rows * batch].view(batch, rows).t().contiguous().to(DEVICE)

            train_data = batchify(torch.randint(0, n_tokens, (20 * 205,)), 20)
            val_data = batchify(torch.randint(0, n_tokens, (10 * 45,)), 10)
            model = RNNModel(n_tokens, 128, 128, 2).to(DEVICE)
            criterion = nn.CrossEntropyLoss()
            lr, best_val_loss = 20.0, None

            # %%
            def windows(data):
                for start in range(0, data.size(0) - 1, bptt):
                    length = min(bptt, data.size(0) - 1 - start)
                    yield (
                        data[start : start + length],
                        data[start + 1 : start + 1 + length].flatten(),
                    )

            def train_epoch():
                model.train()
                hidden, total = model.init_hidden(20), 0.0
                for data, targets in windows(train_data):
                    model.zero_grad()
                    hidden = repackage(hidden)
                    output, hidden = model(data, hidden)
                    loss = criterion(output, targets)
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                    with torch.no_grad():
                        for p in model.parameters():
                            p.add_(p.grad, alpha=-lr / 20)
                    total += loss.item()
                return total

            def evaluate():
                model.eval()
                hidden, total = model.init_hidden(10), 0.0
                with torch.no_grad():
                    for data, targets in windows(val_data):
                        output, hidden = model(data, hidden)
                        hidden = repackage(hidden)
                        total += len(data) * criterion(output, targets).item()
                return total / (len(val_data) - 1)

            # %%
            try:
                train_epoch()
                val_loss = evaluate()
                print(f"valid ppl {math.exp(val_loss):8.2f}")
                if best_val_loss is None or val_loss < best_val_loss:
                    best_val_loss = val_loss
                else:
                    lr /= 4.0
            except KeyboardInterrupt:
                print("exiting from training early")
            """,
            "1 2 3 3 3 3 3",
        ),
    ),
    Program(
        name="stateful_lstm_across_runs",
        source="PyTorch's forum: how to carry the hidden state, and why to detach it",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(2)
            lstm = nn.LSTM(32, 192, num_layers=2, batch_first=True).to(DEVICE)
            readout = nn.Linear(192, 1).to(DEVICE)
            optimizer = torch.optim.Adam([*lstm.parameters(), *readout.parameters()], lr=1e-3)
            state = None
            t = 0

            # %%
            # goes on where the last run stopped: the state of the series lives on
            for _ in range(8):
                phase = torch.linspace(t, t + 1, 25, device=DEVICE)
                x = torch.sin(phase[None, :, None] * torch.arange(1, 33, device=DEVICE)).repeat(
                    64, 1, 1
                )
                out, state = lstm(x + 0.1 * torch.randn_like(x), state)
                loss = (readout(out[:, :-1]) - x[:, 1:, :1]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                state = tuple(s.detach() for s in state)
                t += 1
            f"t={t}, loss={loss.item():.4f}"
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="truncated_backpropagation",
        source="PyTorch's forum: implementing truncated backpropagation through time",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(3)
            cell, head = nn.GRUCell(16, 256).to(DEVICE), nn.Linear(256, 16).to(DEVICE)
            params = list(cell.parameters()) + list(head.parameters())
            optimizer = torch.optim.RMSprop(params, lr=1e-3)
            series = torch.randn(128, 91, 16, device=DEVICE).cumsum(1) / 10

            # %%
            def fit(series, truncate=15):
                hidden = torch.zeros(len(series), 256, device=series.device)
                chunk_loss, total = 0, 0.0
                for t in range(series.size(1) - 1):
                    hidden = cell(series[:, t], hidden)
                    # the loss keeps the graph of the whole chunk until it is used
                    chunk_loss = chunk_loss + nn.functional.mse_loss(head(hidden), series[:, t + 1])
                    if (t + 1) % truncate == 0:
                        optimizer.zero_grad()
                        chunk_loss.backward()
                        optimizer.step()
                        total += chunk_loss.item()
                        hidden, chunk_loss = hidden.detach(), 0
                return total

            print(fit(series))
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="char_rnn_names",
        source="https://docs.pytorch.org/tutorials/intermediate/char_rnn_classification_tutorial.html",
        runs=order_cells(
            """
            import random
            import string
            import torch
            from torch import nn

            torch.manual_seed(4)
            random.seed(4)
            letters = string.ascii_letters + " .,;'"
            languages = ["Czech", "Greek", "Irish", "Korean"]

            class RNN(nn.Module):
                def __init__(self, n_in, n_hidden, n_out):
                    super().__init__()
                    self.n_hidden = n_hidden
                    self.i2h = nn.Linear(n_in, n_hidden)
                    self.h2h = nn.Linear(n_hidden, n_hidden)
                    self.h2o = nn.Linear(n_hidden, n_out)

                def forward(self, letter, hidden):
                    hidden = torch.tanh(self.i2h(letter) + self.h2h(hidden))
                    return torch.log_softmax(self.h2o(hidden), dim=1), hidden

            def to_tensor(name):
                tensor = torch.zeros(len(name), 1, len(letters))
                for i, letter in enumerate(name):
                    tensor[i, 0, letters.find(letter)] = 1
                return tensor.to(DEVICE)

            def random_example():
                category = random.randrange(len(languages))
                name = "".join(random.choices(letters, k=random.randint(3, 12)))
                return torch.tensor([category], device=DEVICE), to_tensor(name)

            rnn = RNN(len(letters), 512, len(languages)).to(DEVICE)
            criterion = nn.NLLLoss()
            all_losses = []

            # %%
            current_loss = 0
            for step in range(1, 61):
                category, name = random_example()
                hidden = torch.zeros(1, rnn.n_hidden, device=DEVICE)
                rnn.zero_grad()
                for letter in name:
                    output, hidden = rnn(letter, hidden)
                loss = criterion(output, category)
                loss.backward()
                for p in rnn.parameters():
                    p.data.add_(p.grad.data, alpha=-0.005)
                current_loss += loss.item()
                if step % 20 == 0:
                    all_losses.append(current_loss / 20)
                    current_loss = 0
            """,
            "1 2 2 2 2 2",
        ),
    ),
    Program(
        name="nanogpt_like_training",
        source="https://github.com/karpathy/nanoGPT",
        runs=order_cells(
            """
            import torch
            from torch import nn
            from torch.nn import functional as F

            torch.manual_seed(5)
            block_size, batch_size, n_embd, n_head, n_layer, vocab = 32, 8, 96, 4, 2, 65
            data = torch.randint(0, vocab, (20_000,))

            class CausalSelfAttention(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.c_attn = nn.Linear(n_embd, 3 * n_embd)
                    self.c_proj = nn.Linear(n_embd, n_embd)
                    tril = torch.tril(torch.ones(block_size, block_size))
                    self.register_buffer("mask", tril.view(1, 1, block_size, block_size))

                def forward(self, x):
                    B, T, C = x.size()
                    q, k, v = (part.view(B, T, n_head, C // n_head).transpose(1, 2)
                               for part in self.c_attn(x).split(n_embd, dim=2))
                    att = (q @ k.transpose(-2, -1)) / (C // n_head) ** 0.5
                    att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
                    y = F.softmax(att, dim=-1) @ v
                    return self.c_proj(y.transpose(1, 2).reshape(B, T, C))

            class Block(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
                    self.attn = CausalSelfAttention()
                    self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(),
                                             nn.Linear(4 * n_embd, n_embd))

                def forward(self, x):
                    x = x + self.attn(self.ln_1(x))
                    return x + self.mlp(self.ln_2(x))

            class GPT(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.wte, self.wpe = (
                        nn.Embedding(vocab, n_embd),
                        nn.Embedding(block_size, n_embd),
                    )
                    self.h = nn.ModuleList(Block() for _ in range(n_layer))
                    self.ln_f = nn.LayerNorm(n_embd)
                    self.lm_head = nn.Linear(n_embd, vocab, bias=False)
                    self.wte.weight = self.lm_head.weight

                def forward(self, idx, targets=None):
                    x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
                    for block in self.h:
                        x = block(x)
                    logits = self.lm_head(self.ln_f(x))
                    if targets is None:
                        return logits, None
                    return logits, F.cross_entropy(logits.view(-1, vocab), targets.view(-1))

                @torch.no_grad()
                def generate(self, idx, max_new_tokens):
                    for _ in range(max_new_tokens):
                        logits, _ = self(idx[:, -block_size:])
                        probs = F.softmax(logits[:, -1, :], dim=-1)
                        idx = torch.cat((idx, torch.multinomial(probs, num_samples=1)), dim=1)
                    return idx

            def get_batch():
                ix = torch.randint(len(data) - block_size, (batch_size,))
                x = torch.stack([data[i : i + block_size] for i in ix])
                y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
                return x.to(DEVICE), y.to(DEVICE)

            @torch.no_grad()
            def estimate_loss(eval_iters=4):
                model.eval()
                losses = torch.zeros(eval_iters)
                for k in range(eval_iters):
                    losses[k] = model(*get_batch())[1].item()
                model.train()
                return losses.mean()

            model = GPT().to(DEVICE)
            optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95))

            # %%
            for iter_num in range(16):
                if iter_num % 8 == 0:
                    print(f"step {iter_num}: val loss {estimate_loss():.4f}")
                logits, loss = model(*get_batch())
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            print(
                model.generate(torch.zeros((1, 1), dtype=torch.long, device=DEVICE), 24)[0].tolist()
            )
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="transformer_encoder_language_model",
        source="PyTorch's tutorial on language modeling with nn.Transformer and torchtext",
        runs=order_cells(
            """
            import copy
            import math
            import torch
            from torch import nn

            torch.manual_seed(6)
            ntokens, d_model, bptt = 400, 128, 35

            class PositionalEncoding(nn.Module):
                def __init__(self, d_model, max_len=500):
                    super().__init__()
                    position = torch.arange(max_len).unsqueeze(1)
                    rates = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
                    pe = torch.zeros(max_len, 1, d_model)
                    pe[:, 0, 0::2] = torch.sin(position * rates)
                    pe[:, 0, 1::2] = torch.cos(position * rates)
                    self.register_buffer("pe", pe)

                def forward(self, x):
                    return x + self.pe[: x.size(0)]

            class TransformerModel(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.embedding = nn.Embedding(ntokens, d_model)
                    self.position = PositionalEncoding(d_model)
                    layer = nn.TransformerEncoderLayer(d_model, 2, 200, dropout=0.2)
                    self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
                    self.linear = nn.Linear(d_model, ntokens)

                def forward(self, src, mask):
                    x = self.position(self.embedding(src) * math.sqrt(d_model))
                    return self.linear(self.encoder(x, mask))

            model = TransformerModel().to(DEVICE)
            criterion = nn.CrossEntropyLoss()
            optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1.0, gamma=0.95)
            source = torch.randint(0, ntokens, (bptt * 6 + 20, 16), device=DEVICE)
            best_val_loss, best_model = float("inf"), None

            # %%
            model.train()
            for i in range(0, source.size(0) - 1, bptt):
                data, targets = source[i : i + bptt], source[i + 1 : i + 1 + bptt].reshape(-1)
                data = data[: len(targets) // 16]  # the last window is shorter
                mask = nn.Transformer.generate_square_subsequent_mask(len(data), device=DEVICE)
                loss = criterion(model(data, mask).view(-1, ntokens), targets)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            scheduler.step()
            val_loss = loss.item()
            if val_loss < best_val_loss:
                best_val_loss, best_model = val_loss, copy.deepcopy(model)
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="batches_of_random_lengths",
        source="PyTorch's forum: memory that goes up and down with padded sequences",
        runs=order_cells(
            """
            import random
            import torch
            from torch import nn
            from torch.nn.utils.rnn import pad_sequence, pack_padded_sequence

            torch.manual_seed(7)
            random.seed(7)
            sentences = [torch.randint(1, 200, (random.randint(4, 60),)) for _ in range(400)]

            def collate(batch):
                lengths = torch.tensor([len(s) for s in batch])
                return pad_sequence(batch, batch_first=True).to(DEVICE), lengths

            class Tagger(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.embedding = nn.Embedding(200, 64, padding_idx=0)
                    self.gru = nn.GRU(64, 96, batch_first=True)
                    self.classify = nn.Linear(96, 2)

                def forward(self, tokens, lengths):
                    packed = pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True,
                                                  enforce_sorted=False)
                    _, hidden = self.gru(packed)
                    return self.classify(hidden[-1])

            model = Tagger().to(DEVICE)
            optimizer = torch.optim.Adam(model.parameters())

            # %%
            random.shuffle(sentences)
            for start in range(0, len(sentences), 40):
                tokens, lengths = collate(sentences[start : start + 40])
                logits = model(tokens, lengths)
                loss = nn.functional.cross_entropy(logits, (lengths % 2).to(DEVICE))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="batches_of_ascending_lengths",
        source="Data sorted by length, shortest first: each batch takes more than the one before",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(8)
            lengths = sorted(torch.randint(8, 200, (32,)).tolist())
            layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
            encoder = nn.TransformerEncoder(layer, num_layers=1).to(DEVICE)
            embedding, head = nn.Embedding(100, 64).to(DEVICE), nn.Linear(64, 100).to(DEVICE)
            params = [p for m in (encoder, embedding, head) for p in m.parameters()]
            optimizer = torch.optim.Adam(params, lr=1e-4)

            # %%
            for step, length in enumerate(lengths):
                tokens = torch.randint(0, 100, (8, length), device=DEVICE)
                hidden = encoder(embedding(tokens))
                logits = head(hidden)
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if step % 10 == 0:
                    print(f"{step:3d} length {length:3d} loss {loss.item():.3f}")
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="bucketed_batches",
        source="Samplers that put sentences of about the same length into one batch",
        runs=order_cells(
            """
            import collections
            import random
            import torch
            from torch import nn

            torch.manual_seed(10)
            random.seed(10)
            corpus = [
                [random.randrange(1, 500) for _ in range(random.randint(5, 60))] for _ in range(640)
            ]

            def buckets(corpus, width=15, batch_size=32):
                waiting = collections.defaultdict(list)
                for sentence in random.sample(corpus, len(corpus)):
                    bucket = waiting[-(-len(sentence) // width) * width]
                    bucket.append(sentence)
                    if len(bucket) == batch_size:
                        yield bucket
                        waiting[-(-len(sentence) // width) * width] = []
                yield from (bucket for bucket in waiting.values() if bucket)

            class BagOfNgrams(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.embed = nn.Embedding(500, 96)
                    self.convs = nn.ModuleList(nn.Conv1d(96, 64, k, padding=k // 2) for k in (3, 5))
                    self.score = nn.Linear(128, 1)

                def forward(self, ids):
                    x = self.embed(ids).transpose(1, 2)
                    pooled = [torch.relu(conv(x)).amax(-1) for conv in self.convs]
                    return self.score(torch.cat(pooled, 1)).squeeze(1)

            net = BagOfNgrams().to(DEVICE)
            opt = torch.optim.Adagrad(net.parameters(), lr=0.01)

            # %%
            for epoch in range(1):
                for batch in buckets(corpus):
                    longest = max(map(len, batch))
                    ids = torch.tensor([s + [0] * (longest - len(s)) for s in batch], device=DEVICE)
                    goal = torch.tensor([float(s[0] > 250) for s in batch], device=DEVICE)
                    opt.zero_grad()
                    nn.functional.binary_cross_entropy_with_logits(net(ids), goal).backward()
                    opt.step()
            """,
            "1 2 2 2 2",
        ),
    ),
    Program(
        name="curriculum_of_longer_sequences",
        source="Sequence-length warm-up: the length grows over the epochs, then stays",
        runs=order_cells(
            """
            import torch
            from torch import nn

            torch.manual_seed(11)
            model = nn.TransformerEncoderLayer(96, 4, 192, batch_first=True, dropout=0.0).to(DEVICE)
            project = nn.Linear(4, 96).to(DEVICE)
            optimizer = torch.optim.AdamW([*model.parameters(), *project.parameters()], lr=1e-3)
            epoch = 0

            def length_of(epoch, start=16, step=32, most=112):
                return min(start + epoch * step, most)

            # %%
            length = length_of(epoch)
            for _ in range(8):
                signal = torch.randn(16, length, 4, device=DEVICE)
                encoded = model(project(signal))
                loss = (encoded.mean(-1) - signal.cumsum(1).mean(-1)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            epoch += 1
            print(f"epoch {epoch}: length {length}, loss {loss.item():.3f}")
            """,
            "1 2 2 2 2 2 2 2",
        ),
    ),
    Program(
        name="sequence_to_sequence_with_attention",
        source="https://docs.pytorch.org/tutorials/intermediate/seq2seq_translation_tutorial.html",
        runs=order_cells(
            """
            import torch
            from torch import nn
            import torch.nn.functional as F

            torch.manual_seed(15)
            SOS, MAX_LENGTH, HIDDEN, WORDS = 0, 10, 128, 250

            class Encoder(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.embedding = nn.Embedding(WORDS, HIDDEN)
                    self.gru = nn.GRU(HIDDEN, HIDDEN, batch_first=True)

                def forward(self, tokens):
                    return self.gru(self.embedding(tokens))

            class AttentionDecoder(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.embedding = nn.Embedding(WORDS, HIDDEN)
                    self.Wa, self.Ua = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
                    self.Va = nn.Linear(HIDDEN, 1)
                    self.gru = nn.GRU(2 * HIDDEN, HIDDEN, batch_first=True)
                    self.out = nn.Linear(HIDDEN, WORDS)

                def forward(self, memory, hidden, target=None):
                    token = torch.full((len(memory), 1), SOS, device=memory.device)
                    outputs, attentions = [], []
                    for i in range(MAX_LENGTH):
                        query = hidden.transpose(0, 1)
                        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(memory))).transpose(
                            1, 2
                        )
                        weights = F.softmax(scores, dim=-1)
                        step = torch.cat([self.embedding(token), weights @ memory], dim=2)
                        output, hidden = self.gru(step, hidden)
                        outputs.append(self.out(output))
                        attentions.append(weights)
                        if target is not None:
                            token = target[:, i : i + 1]
                        else:
                            token = outputs[-1].argmax(-1).detach()
                    logits = torch.cat(outputs, dim=1)
                    return F.log_softmax(logits, dim=-1), torch.cat(attentions, dim=1)

            encoder, decoder = Encoder().to(DEVICE), AttentionDecoder().to(DEVICE)
            optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (encoder, decoder)]
            plot_losses = []

            # %%
            total = 0
            for _ in range(6):
                pair = torch.randint(1, WORDS, (2, 16, MAX_LENGTH), device=DEVICE)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                memory, hidden = encoder(pair[0])
                log_probs, _ = decoder(memory, hidden, pair[1])
                loss = F.nll_loss(log_probs.view(-1, WORDS), pair[1].view(-1))
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                total += loss.item()
            plot_losses.append(total / 6)
            with torch.no_grad():
                _, attention = decoder(*encoder(pair[0][:1]))
            print(attention[0].argmax(-1).tolist())
            """,
            "1 2 2 2 2",
        ),
    ),
)
