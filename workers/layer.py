"""A Llama decoder layer with its backward written out: F, B and W are three calls, no autograd between them.

B batch rows, S positions of a slice of the sequence (all of it, where it is not cut), T = B*S tokens, H hidden, N query
heads, M key-value heads, D head dim, I ffn width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pentad.kernels.attention import SavedAttention, attention, attention_backward
from pentad.kernels.rms_norm import rms_norm, rms_norm_backward
from pentad.kernels.rope import rope_
from pentad.kernels.swiglu import swiglu, swiglu_backward
from pentad.schedules.plan import ModelShape
from pentad.workers.past import Past
from pentad.workers.weights import Deferred, Product, Sum


class Weights(NamedTuple):
    """A layer's tensors: compute weights, or their main gradients. Matrices are [out, in]."""

    qkv: torch.Tensor  # [(N + 2M) D, H]
    out: torch.Tensor  # [H, N D]
    gate_up: torch.Tensor  # [2I, H]
    down: torch.Tensor  # [H, I]
    attention_norm: torch.Tensor  # [H]
    mlp_norm: torch.Tensor  # [H]


class Roots(NamedTuple):
    """What B needs of F and what is dear to make: products, attention, and the streams they stand between."""

    stream: torch.Tensor  # [T, H] residual stream at the layer's entry
    scale: torch.Tensor  # [T]
    attended: SavedAttention
    heads: torch.Tensor  # [T, N D] attention output
    middle: torch.Tensor  # [T, H] residual stream between the two halves
    middle_scale: torch.Tensor  # [T]


class Leaves(NamedTuple):
    """What else B needs, which `leaves` makes of the roots: two norms and the widest product."""

    normed: torch.Tensor  # [T, H]
    middle_normed: torch.Tensor  # [T, H]
    gate_up: torch.Tensor  # [T, 2I]


class Rotation(NamedTuple):
    """Of the S positions from `start` on."""

    start: int
    cos: torch.Tensor  # [S, D/2]
    sin: torch.Tensor


def weights_of(views: dict[str, torch.Tensor], layer: int) -> Weights:
    at = f"layers.{layer}"
    names = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down", "attention_norm", "mlp_norm")
    return Weights(*(views[f"{at}.{name}"] for name in names))


def forward(
    w: Weights,
    shape: ModelShape,
    rotation: Rotation,
    past: Past,
    branch: torch.Tensor,
    stream: torch.Tensor | None,
    *,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, Roots, Leaves]:
    """The residual stream is `branch` plus `stream` [T, H]: the sum is taken inside the norm.

    Returns the new (branch, stream) and what B needs.
    """
    tokens = branch.shape[0]
    normed, entry, scale = rms_norm(branch, w.attention_norm, shape.norm_eps, stream)
    qkv = torch.mm(normed, w.qkv.t()).view(tokens, -1, shape.head_dim)  # [T, N + 2M, D]
    rope_(qkv[:, : shape.heads + shape.kv_heads], rotation.cos, rotation.sin)
    queries, keys, values = _split(qkv, shape, rotation.cos.shape[0])
    keys, values = past.extended((keys, values), rotation.start)  # [B, M, start + S, D]
    attended_out, attended = attention(queries, keys, values, deterministic)  # [B, N, S, D]
    heads = attended_out.transpose(1, 2).reshape(tokens, -1)
    mixed = torch.mm(heads, w.out.t())
    middle_normed, middle, middle_scale = rms_norm(mixed, w.mlp_norm, shape.norm_eps, entry)
    gate_up = torch.mm(middle_normed, w.gate_up.t())
    down = torch.mm(swiglu(gate_up), w.down.t())
    roots = Roots(entry, scale, attended, heads, middle, middle_scale)
    return down, middle, roots, Leaves(normed, middle_normed, gate_up)


def leaves(w: Weights, shape: ModelShape, roots: Roots) -> Leaves:
    """RECOMPUTE of what F did not keep, by the kernels that made it."""
    normed, _, _ = rms_norm(roots.stream, w.attention_norm, shape.norm_eps)
    middle_normed, _, _ = rms_norm(roots.middle, w.mlp_norm, shape.norm_eps)
    return Leaves(normed, middle_normed, torch.mm(middle_normed, w.gate_up.t()))


def backward(
    w: Weights,
    g: Weights,
    shape: ModelShape,
    rotation: Rotation,
    past: Past,
    roots: Roots,
    leaves: Leaves,
    dy: torch.Tensor,
) -> tuple[torch.Tensor, list[Deferred]]:
    """B: the gradient of the residual stream at the entry from that at the exit, both [T, H]; and what W has to do.

    `w` are compute weights, `g` their main gradients.
    """
    dgate_up, gated = swiglu_backward(torch.mm(dy, w.down), leaves.gate_up)
    dnormed = torch.mm(dgate_up, w.gate_up)
    dmiddle, dmlp_norm = rms_norm_backward(dnormed, roots.middle, w.mlp_norm, roots.middle_scale, dy)
    dheads = torch.mm(dmiddle, w.out)
    dqkv = _attention_backward(shape, rotation, past, roots.attended, dheads)
    dentry, dattention_norm = rms_norm_backward(
        torch.mm(dqkv, w.qkv), roots.stream, w.attention_norm, roots.scale, dmiddle
    )
    work: list[Deferred] = [
        Product(g.down, dy, gated),
        Product(g.gate_up, dgate_up, leaves.middle_normed),
        Product(g.out, dmiddle, roots.heads),
        Product(g.qkv, dqkv, leaves.normed),
        Sum(g.mlp_norm, dmlp_norm),
        Sum(g.attention_norm, dattention_norm),
    ]
    return dentry, work


def _attention_backward(
    shape: ModelShape, rotation: Rotation, past: Past, saved: SavedAttention, dheads: torch.Tensor
) -> torch.Tensor:
    tokens, length = dheads.shape[0], rotation.cos.shape[0]
    dout = dheads.view(-1, length, shape.heads, shape.head_dim).transpose(1, 2)
    dqueries, *reached = attention_backward(dout, saved)
    grads = (dqueries, *past.own((reached[0], reached[1]), rotation.start))
    dqkv = torch.cat([grad.transpose(1, 2) for grad in grads], dim=2).view(tokens, -1, shape.head_dim)
    rope_(dqkv[:, : shape.heads + shape.kv_heads], rotation.cos, rotation.sin, inverse=True)
    return dqkv.view(tokens, -1)


def _split(qkv: torch.Tensor, shape: ModelShape, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, N + 2M, D] as queries, keys and values [B, heads, S, D] without a copy."""
    rows = qkv.view(-1, length, *qkv.shape[1:]).transpose(1, 2)
    queries, keys, values = rows.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
    return queries, keys, values
