"""What one rank contributes to a search for flipped bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

import torch

from pentad.schedules.spec.plan import Plan
from pentad.workers.integrity.digest import digest, read
from pentad.workers.integrity.replay import replay
from pentad.workers.integrity.result import RankCheck
from pentad.workers.integrity.state_digests import gathered_digests, state_digests
from pentad.workers.model.base_stage import BaseStage
from pentad.workers.params.weight_shard import WeightShard

Gathered = Callable[[int], AbstractContextManager[None]]  # gathers the weights of a stage within


def check_rank(
    plan: Plan, rank: int, step: int, held: Iterable[WeightShard], stages: Mapping[int, BaseStage], gathered: Gathered
) -> RankCheck:
    """Digests of the state after `step` steps, none of which is open, in the shards `held`, and of what the rank
    computes from one microbatch, twice. Changes neither weights nor optimizer state; overwrites gradients.

    All ranks of the mesh must call it.
    """
    state, first, second = state_digests(held), dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for index, stage in sorted(stages.items()):  # DualPipe's mirror ranks hold them in a different order
        if stage.casts is not None and stage.casts.history is not None:
            state |= {name: digest(values) for name, values in stage.casts.history.by_name.items()}
        with gathered(index):
            for buffer in (*stage.param_buffers, *stage.frozen):
                if buffer.shard.layout.num_shards > 1 and buffer.weights is not None:
                    state |= gathered_digests(buffer.shard, buffer.weights.tensors)
            for results in (first, second):
                results |= replay(plan, rank, stage, index, step)
    return RankCheck(read(state), read(first), read(second))
