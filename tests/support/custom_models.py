"""Custom models for tests: the text of a user's file, and the same training in one process with plain torch."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from plans import MODEL, STEPS, global_batches
from reference_model import Trained, optimize
from torch import Tensor

from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.workers.custom.inspect import inspect_model
from pentad.workers.custom.loader import build_layers
from pentad.workers.params.param_init import derive_seed

GPT = '''
import torch
from torch import nn
import torch.nn.functional as F


class Embeddings(nn.Module):
    def __init__(self, vocab, hidden, length):
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, hidden), nn.Embedding(length, hidden)

    def forward(self, tokens):
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class Block(nn.Module):
    def __init__(self, hidden, heads, dropout=0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x):
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(attended), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)


class Head(nn.Module):
    def __init__(self, hidden, vocab):
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)

    def forward(self, x):
        return self.proj(self.norm(x))


def gpt(vocab, hidden, heads, layers, length):
    return [Embeddings(vocab, hidden, length), *(Block(hidden, heads) for _ in range(layers)), Head(hidden, vocab)]


def gpt_dropout(vocab, hidden, heads, layers, length):
    """Functions that make layers, called only on the ranks that hold them."""
    blocks = [lambda: Block(hidden, heads, 0.2) for _ in range(layers)]
    return [lambda: Embeddings(vocab, hidden, length), *blocks, lambda: Head(hidden, vocab)]
'''

CONV = '''
import torch
from torch import nn
import torch.nn.functional as F


class Gated(nn.Module):
    """A gated causal convolution over four tokens, with a decay for every channel; no attention."""

    def __init__(self, hidden):
        super().__init__()
        self.conv = nn.Conv1d(hidden, hidden, 4, groups=2)
        self.gate = nn.Parameter(torch.randn(hidden, hidden) / hidden**0.5)
        self.decay = nn.Parameter(torch.zeros(hidden))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("table", torch.linspace(0.5, 1.5, hidden), persistent=False)

    def forward(self, x):
        mixed = self.conv(F.pad(x.transpose(1, 2), (3, 0))).transpose(1, 2)
        previous = F.pad(x[:, :-1], (0, 0, 1, 0)) * self.decay.sigmoid() * self.table
        return x + self.scale * torch.tanh(mixed + previous) * torch.sigmoid(x @ self.gate)


class Twice(nn.Module):
    """One matrix used twice, once transposed."""

    def __init__(self, hidden):
        super().__init__()
        self.inner = nn.Linear(hidden, 2 * hidden)

    def forward(self, x):
        return x + F.relu(F.linear(x, self.inner.weight, self.inner.bias)) @ self.inner.weight


def conv(vocab, hidden, layers):
    pairs = [layer for _ in range(layers) for layer in (Gated(hidden), Twice(hidden))]
    return [nn.Embedding(vocab, hidden, padding_idx=0), *pairs, nn.Linear(hidden, vocab)], loss


def loss(logits, targets):
    """Cross-entropy with a penalty on large sums (z-loss)."""
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    return plain + 1e-2 * torch.logsumexp(logits, -1) ** 2
'''


def custom_model(folder: Path, name: str, **sizes: int) -> ModelSpec:
    """The custom model 'gpt', 'gpt_dropout' or 'conv', from a file written to the folder."""
    file = folder / ("conv.py" if name == "conv" else "gpt.py")
    file.write_text(CONV if name == "conv" else GPT)
    sizes = {"vocab": MODEL.vocab, "hidden": 16, "heads": 4, "layers": 3, "length": 8} | sizes
    custom = inspect_model(f"{file}:{name}", sizes, torch.float64)
    return ModelSpec(len(custom.layers), sizes["hidden"], 1, 1, 1, sizes["vocab"], custom=custom)


def reference(plan: Plan) -> Trained:
    """STEPS steps of the plan in one process, as the user would write them: modules and autograd."""
    custom, batch = plan.model.custom, plan.batch
    assert custom is not None
    batches = global_batches(plan)
    layers, loss = build_layers(custom, plan.seed, 0, len(custom.layers))
    loss = loss or (lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none").view(y.shape))
    parameters = torch.nn.ModuleList(layers).double().named_parameters()

    def loss_of(step: int) -> tuple[Tensor, Tensor]:
        inputs, following, is_target, _ = batches[step]
        arrays = inputs, following.masked_fill(~is_target, -100)
        shape = (-1, batch.micro_batch_size, batch.sequence_length)
        total = torch.zeros((), dtype=torch.float64)
        for mb, (x, targets) in enumerate(zip(*(each.view(shape) for each in arrays), strict=True)):
            for number, layer in enumerate(layers):
                torch.manual_seed(derive_seed(plan.seed, "draw", step, mb, number))
                x = layer(x)
            total = total + loss(x, targets)[targets >= 0].sum() / is_target.sum()
        return total, total

    return optimize(plan, {f"layers.{name}": parameter for name, parameter in parameters}, STEPS, loss_of)
