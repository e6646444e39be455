"""What reductions in bfloat16 should give, and what they were given in a rank process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.schedules.spec.zero_layout import replica_groups, zero_groups


class Reduced(NamedTuple):
    """One step on one rank: the gradients [padded] that each reduction of a shard was given, in order, and the rank's
    part of their final sums [part]."""

    terms: dict[ParamShard, list[torch.Tensor]]
    sums: dict[ParamShard, torch.Tensor]


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Finite values rounded to 8 significant bits, ties to even, as float32."""
    bits = values.float().numpy().view(np.uint32)
    found = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return torch.from_numpy(found.view(np.float32))


def bf16_sum(terms: Sequence[torch.Tensor], before: torch.Tensor | None = None) -> torch.Tensor:
    """The float32 sum of rounded terms in order, added to `before` if given."""
    total = before
    for term in map(rounded, terms):
        total = term if total is None else total + term
    assert total is not None
    return total


def sum_of_reductions(terms_by_holder: Sequence[Sequence[torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
    """The sum over all reductions of a shard in a step, given each holder's terms, in the dtype of `like`."""
    total = None
    for terms in zip(*terms_by_holder, strict=True):
        total = bf16_sum(terms, total).to(like.dtype)
    assert total is not None
    return total


def assert_sums_of_rounded_terms(plan: Plan, reductions: Sequence[Sequence[Reduced]]) -> None:
    """Asserts that every shard of every step equals, bit by bit, the sum in rank order of `reductions`, by rank and
    step. With replicas, or without ZeRO, it is the sum of the rounded sums of each group, rounded again."""
    checked = 0
    for step, shard in product(range(len(reductions[0])), plan.param_shards):
        if plan.num_holders(shard) == 1:
            continue
        by_group = []
        for group in zero_groups(plan, shard):
            its = [reductions[rank][step] for rank in group]
            total = sum_of_reductions([each.terms[shard] for each in its], its[0].sums[shard])
            by_group.append(total.view(len(group), -1))
        for ranks, parts in zip(replica_groups(plan, shard), zip(*by_group, strict=True), strict=True):
            expected = parts[0] if len(parts) == 1 else rounded(bf16_sum(parts)).to(parts[0].dtype)
            for rank in ranks:
                assert torch.equal(reductions[rank][step].sums[shard], expected), f"step {step}: {shard} on rank {rank}"
            checked += int(expected.count_nonzero())
    assert checked > 0


@contextmanager
def recorded_reductions(plan: Plan) -> Iterator[list[Reduced]]:
    """The reductions of every step that the rank in this process runs, if they are in bfloat16."""
    from pentad.workers.runtime import optimizer_step, zero

    found, terms = list[Reduced](), dict[ParamShard, list[torch.Tensor]]()

    def reduce(real: Callable[..., Any], self: zero.ZeroShards, part: Any, *more: Any, **options: Any) -> Any:
        for shard, buffers in self.trained[part.stage]:
            assert buffers.gradients is not None
            terms.setdefault(shard, []).append(buffers.gradients.flat.clone())
        return real(self, part, *more, **options)

    def reduce_norm(real: Callable[..., Any], self: Any, *more: Any) -> Any:
        sums = {shard: each.gradient.clone() for shard, each in self._parameters().items()}
        found.append(Reduced(dict(terms), sums))
        terms.clear()
        return real(self, *more)

    def wrapped(real: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **options: wrapper(real, *arguments, **options)

    steps = (optimizer_step.BarrierStep, optimizer_step.PostValidatedStep)
    places: Mapping[tuple[type, str], Callable[..., Any]] = {
        **{(zero.ZeroShards, name): reduce for name in ("all_reduce", "scatter")},
        **{(each, "reduce_norm"): reduce_norm for each in steps},
    }
    with ExitStack() as patches:
        for (owner, name), wrapper in places.items() if plan.bf16_reduce else ():
            patches.enter_context(patch.object(owner, name, wrapped(getattr(owner, name), wrapper)))
        yield found
