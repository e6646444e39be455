"""Which positions of its sequences a rank holds, and how far rotary embeddings turn there."""

from __future__ import annotations

import torch

from pentad.kernels.attention.rope_tables import rope_tables
from pentad.schedules.spec.cp_layout import PLACEMENTS, positions
from pentad.schedules.spec.plan import Plan
from pentad.workers.model.layer_context import Rotation


def held(plan: Plan, rank: int) -> torch.Tensor:
    """[S / cp] int64, in the rank's order."""
    at, length = plan.mesh.coordinates(rank), plan.batch.length
    return torch.from_numpy(positions(length, plan.mesh.cp, at.cp, PLACEMENTS[plan.cp_method]))


def rotations(plan: Plan, rank: int, device: torch.device, dtype: torch.dtype) -> list[Rotation]:
    """Of each slice of a sequence, or of a rank's part of it."""
    model, length = plan.model, plan.batch.length
    width = model.mla.qk_rope_head_dim if model.mla is not None else model.qk_head_dim
    tables = rope_tables(length, width, model.rope_theta, device, dtype, model.rope_scaling)
    mine = held(plan, rank).to(device)
    cos, sin = (table[mine] for table in tables)
    cut = len(mine) // plan.program.slices
    starts = range(0, len(mine), cut)
    return [Rotation(start, cos[start : start + cut], sin[start : start + cut]) for start in starts]
