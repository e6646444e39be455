"""The blocks of an attention whose keys are at hand, and how they add up."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pentad.kernels.attention.attention_partial import Gradients, block, block_backward
from pentad.kernels.attention.attention_reference import Rule, softmax_scale
from pentad.workers.parallel.cp_blocks import Block, Step


class Saved(NamedTuple):
    """What B needs: the rank's own inputs and results, and what was computed of them."""

    q: torch.Tensor  # [B, N, S, D]
    k: torch.Tensor  # [B, M, S, D]
    v: torch.Tensor  # [B, M, S, Dv]
    out: torch.Tensor  # [B, N, S, Dv]
    lse: torch.Tensor  # [B, N, S] of the whole softmax, float32 or wider
    steps: tuple[Step, ...]
    scale: float
    deterministic: bool


class Given(NamedTuple):
    """What F gets."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    steps: tuple[Step, ...]
    scale: float | None
    deterministic: bool

    def saved(self, out: torch.Tensor, lse: torch.Tensor) -> Saved:
        scale = softmax_scale(self.q, self.scale)
        return Saved(self.q, self.k, self.v, out, lse, self.steps, scale, self.deterministic)


def part(given: Given, at: Block, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of one block with the keys and values at hand."""
    rule = Rule(at.causal, softmax_scale(given.q, given.scale), given.deterministic, at.lengths, at.steady)
    return block(given.q[at.rows, :, at.queries], k[at.rows, :, at.keys], v[at.rows, :, at.keys], rule)


def part_backward(saved: Saved, dout: torch.Tensor, at: Block, k: torch.Tensor, v: torch.Tensor) -> Gradients:
    """(dq, dk, dv) of one block."""
    rule = Rule(at.causal, saved.scale, saved.deterministic, at.lengths, at.steady)
    dout, q, out, lse = (x[at.rows, :, at.queries] for x in (dout, saved.q, saved.out, saved.lse))
    return block_backward(dout, q, k[at.rows, :, at.keys], v[at.rows, :, at.keys], out, lse, rule)


def packed(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Keys and values as one message."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def unpacked(flat: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a message [..., elements] in the shapes of `k` and `v`."""
    first, second = flat.split([k.numel(), v.numel()], dim=-1)
    return first.unflatten(-1, k.shape), second.unflatten(-1, v.shape)
