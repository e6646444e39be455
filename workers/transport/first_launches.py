"""Launches the kernels of gradient reductions once before the first step.

At a kernel's first use CUDA may block the host until its GPU has done everything launched before. Programs survive that
at compute instructions (tests/schedules/verify/test_blocking_hosts.py), but not at reductions: one may come between a
receive and what its sender waits for, on both ranks at once.
"""

from __future__ import annotations

import torch

from pentad.kernels.optimizer.add_shards import add_shards_
from pentad.schedules.spec.plan import ALIGNMENT, Plan
from pentad.schedules.spec.zero_layout import replicas, zero_group


def launch_reductions(plan: Plan, rank: int, like: torch.Tensor) -> None:
    """Launches the kernels that sum a rank's gradients, in the dtype and on the device of `like`. On a CPU there is
    nothing to load."""
    if not like.is_cuda:
        return
    shards, is_copied = plan.param_shards_of(rank), plan.transport_along("dp") == "peer"
    groups = {
        (of(plan, shard, rank), is_copied and of is zero_group) for shard in shards for of in (zero_group, replicas)
    }
    for ranks, is_read in sorted(each for each in groups if len(each[0]) > 1):
        terms = like.new_zeros(len(ranks), 2 * ALIGNMENT)[:, :ALIGNMENT]
        sent = torch.zeros(terms.shape, dtype=torch.bfloat16 if plan.bf16_reduce else like.dtype, device=like.device)
        sent.copy_(terms)
        terms[0].add_(terms[1]).copy_(sent[0])
        own = ranks.index(rank) if is_read else 0
        for out in (terms[0], sent[0]):
            for accumulate in (False, True):
                add_shards_(out, sent[own], sent[1:], own, accumulate=accumulate)
