"""Models of a user's own for tests: what a user's file holds, and what one process makes of it in torch's own words."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from plans import MODEL, STEPS
from reference_model import Trained
from torch import Tensor

from pentad.schedules.spec.model import ModelShape
from pentad.schedules.spec.plan import Plan
from pentad.workers.custom.inspect import look
from pentad.workers.custom.loader import build, key
from pentad.workers.data.corpus import open_corpus
from pentad.workers.data.samples import microbatch

GPT = '''
import torch
from torch import nn
import torch.nn.functional as F


class Front(nn.Module):
    def __init__(self, vocab, hidden, length):
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, hidden), nn.Embedding(length, hidden)

    def forward(self, tokens):
        return self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))


class Block(nn.Module):
    def __init__(self, hidden, heads, drop=0.0):
        super().__init__()
        self.heads, self.drop = heads, drop
        self.norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x):
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(mixed), self.drop)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.drop)


class End(nn.Module):
    def __init__(self, hidden, vocab):
        super().__init__()
        self.norm, self.words = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)

    def forward(self, x):
        return self.words(self.norm(x))


def gpt(vocab, hidden, heads, layers, length):
    return [Front(vocab, hidden, length), *(Block(hidden, heads) for _ in range(layers)), End(hidden, vocab)]


def dropping(vocab, hidden, heads, layers, length):
    """Layers that are made where they are held."""
    inner = [lambda: Block(hidden, heads, 0.2) for _ in range(layers)]
    return [lambda: Front(vocab, hidden, length), *inner, lambda: End(hidden, vocab)]
'''

CONVOLUTION = '''
import torch
from torch import nn
import torch.nn.functional as F


class Gated(nn.Module):
    """A causal convolution of four tokens, gated; a decay of its own for every channel; no attention."""

    def __init__(self, hidden):
        super().__init__()
        self.mix = nn.Conv1d(hidden, hidden, 4, groups=2)
        self.gate = nn.Parameter(torch.randn(hidden, hidden) / hidden**0.5)
        self.decay = nn.Parameter(torch.zeros(hidden))
        self.size = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("table", torch.linspace(0.5, 1.5, hidden), persistent=False)

    def forward(self, x):
        mixed = self.mix(F.pad(x.transpose(1, 2), (3, 0))).transpose(1, 2)
        before = F.pad(x[:, :-1], (0, 0, 1, 0)) * self.decay.sigmoid() * self.table
        return x + self.size * torch.tanh(mixed + before) * torch.sigmoid(x @ self.gate)


class Twice(nn.Module):
    """One matrix used in two ways, once transposed."""

    def __init__(self, hidden):
        super().__init__()
        self.inner = nn.Linear(hidden, 2 * hidden)

    def forward(self, x):
        return x + F.relu(F.linear(x, self.inner.weight, self.inner.bias)) @ self.inner.weight


def made(vocab, hidden, layers):
    pairs = [layer for _ in range(layers) for layer in (Gated(hidden), Twice(hidden))]
    return [nn.Embedding(vocab, hidden, padding_idx=0), *pairs, nn.Linear(hidden, vocab)], loss


def loss(logits, targets):
    """Cross-entropy with a penalty on large sums (z-loss)."""
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    return plain + 1e-2 * torch.logsumexp(logits, -1) ** 2
'''


def made(folder: Path, name: str, **sizes: int) -> ModelShape:
    """The shape of one of these models, from a file in the folder."""
    file = folder / ("gpt.py" if name in ("gpt", "dropping") else "convolution.py")
    file.write_text(GPT if file.name == "gpt.py" else CONVOLUTION)
    given = {"vocab": MODEL.vocab, "hidden": 16, "heads": 4, "layers": 3, "length": 8} | sizes
    own = look(f"{file}:{name}", given, torch.float64)
    return ModelShape(len(own.layers), given["hidden"], 1, 1, 1, given["vocab"], custom=own)


def train(plan: Plan, batches: list[tuple[Tensor, Tensor]]) -> Trained:
    """One step a batch [microbatches, rows, S], as the user would write it: modules, autograd, AdamW."""
    own, shape = plan.model.custom, plan.optimizer
    assert own is not None
    layers, loss = build(own, plan.seed, 0, len(own.layers))
    model = torch.nn.ModuleList(layers).double()
    p = {f"layers.{name}": parameter for name, parameter in model.named_parameters()}
    groups = [
        {"params": [t for t in p.values() if t.dim() > 1], "weight_decay": shape.weight_decay},
        {"params": [t for t in p.values() if t.dim() < 2], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=1.0, betas=(shape.beta1, shape.beta2), eps=shape.eps)
    losses, gradients, norms = [], [], []
    for step, (inputs, targets) in enumerate(batches):
        for group in adam.param_groups:
            group["lr"] = shape.rate(step)
        adam.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for number, (x, expected) in enumerate(zip(inputs, targets, strict=True)):
            for at, layer in enumerate(layers):
                torch.manual_seed(key(plan.seed, "draw", step, number, at))
                x = layer(x)
            each = (
                F.cross_entropy(x.flatten(0, 1), expected.flatten(), reduction="none")
                if loss is None
                else loss(x, expected)
            )
            total = total + each.sum() / plan.batch.tokens
        total.backward()
        losses.append(total.item())
        found = {name: t.grad for name, t in p.items() if t.grad is not None}
        assert found.keys() == p.keys()
        gradients.append({name: gradient.clone() for name, gradient in found.items()})
        norms.append(torch.stack([gradient.norm() for gradient in found.values()]).norm().item())
        for gradient in found.values():
            gradient *= min(1.0, shape.clip_norm / norms[-1])
        adam.step()
    return losses, gradients, norms, {name: t.detach() for name, t in p.items()}


def reference(plan: Plan) -> Trained:
    """STEPS steps of the plan in one process."""
    corpus, batch, batches = open_corpus(plan.data, False), plan.batch, []
    for step in range(STEPS):
        both = microbatch(
            corpus, plan.seed, step, batch.global_batch_size, range(batch.global_batch_size), batch.length
        )
        inputs, targets = (torch.from_numpy(each).view(-1, batch.rows, batch.length) for each in both)
        batches.append((inputs, targets))
    return train(plan, batches)
