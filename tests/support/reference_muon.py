"""Muon in a single process, in the dtype of its tensors; torch.optim.Muon casts to bfloat16, too coarse for any law.

Otherwise the update is torch.optim.Muon's, matrix by matrix: fused projections and stacks of experts are split first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.optimizer import OptimizerSpec

ENDS = ("embedding", "head", "router")


def is_muons(name: str, tensor: torch.Tensor) -> bool:
    """Whether Muon updates a tensor: a matrix inside a layer, but not a router."""
    return tensor.dim() - (".experts." in name) > 1 and not name.endswith(ENDS)


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Five steps of the quintic iteration on one matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / max(float(matrix.norm()), 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def matrices(model: ModelSpec, name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of the matrices in a tensor."""
    if tensor.dim() == 3:
        for expert in tensor:
            yield from matrices(model, name, expert)
    elif name.endswith(("qkv", "qkv_proj.lora_B")):
        queries, keys = model.heads * model.qk_head_dim, model.kv_heads * model.qk_head_dim
        yield from tensor.split([queries, keys, keys])
    elif name.endswith(("gate_up", "gate_up_proj.lora_B")):
        yield from tensor.chunk(2)
    else:
        yield tensor


class ReferenceMuon:
    """The momentum of some tensors, and their updates."""

    def __init__(self, spec: OptimizerSpec, model: ModelSpec, tensors: dict[str, torch.Tensor]) -> None:
        self.spec, self.model, self.tensors = spec, model, tensors
        self.momentum = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

    @torch.no_grad()
    def step(self, name: str, learning_rate: float, weight_decay: float) -> None:
        tensor, momentum, spec = self.tensors[name], self.momentum[name], self.spec
        gradient = tensor.grad
        assert gradient is not None
        momentum.lerp_(gradient, 1 - spec.momentum)
        direction = gradient.lerp(momentum, spec.momentum) if spec.nesterov else momentum.clone()
        tensor *= 1 - learning_rate * weight_decay
        parts = (matrices(self.model, name, each) for each in (tensor, direction))
        for matrix, update in zip(*parts, strict=True):
            rows, columns = matrix.shape
            if spec.adjust_lr_fn == "original":
                adjusted = learning_rate * math.sqrt(max(1, rows / columns))
            else:
                adjusted = learning_rate * 0.2 * math.sqrt(max(rows, columns))
            matrix -= adjusted * newton_schulz(update)
