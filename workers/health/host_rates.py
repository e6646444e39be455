"""How long the host takes to issue F, B and W of a layer, measured with a real stage and few tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from pentad.schedules.spec.plan import Plan
from pentad.workers.health.device_rates import Clock
from pentad.workers.health.host_plan import LAYERS, host_plan
from pentad.workers.model.base_stage import BaseStage, StageInputs
from pentad.workers.parallel.async_ops import run_to_completion
from pentad.workers.parallel.context_parallel import ContextParallelGroup
from pentad.workers.parallel.expert_parallel import ExpertParallelGroup
from pentad.workers.parallel.process_groups import LayerGroups, ProcessGroups
from pentad.workers.parallel.tensor_parallel import TensorParallelGroup
from pentad.workers.runtime import rank_setup
from pentad.workers.runtime.rank_state import RankState

WARM_UP, ROUNDS = 5, 21  # the minimum over the rounds counts: other processes can only slow it down
PAIR = 2  # tensor-parallel ranks


class Pair(NamedTuple):
    """Two ranks of a host, of which this one is number `rank`, with a store of their own. They exchange rows by peer
    copies (`peer`) or by collectives."""

    group: dist.ProcessGroup
    rank: int
    store: dist.Store
    peer: bool


def measure_layer(device: torch.device, clock: Clock, pair: Pair | None = None) -> list[float]:
    """Seconds that the host takes for F, B and W of a layer, without exchanges or with those of a pair. The slowest
    rank counts."""
    few, many = (_stage_seconds(layers, device, pair) for layers in LAYERS)
    return _slowest([max(0.0, b - a) / (LAYERS[1] - LAYERS[0]) for a, b in zip(few, many, strict=True)], clock)


def measure_pairs(
    hosts: list[int], rank: int, store: dist.Store, device: torch.device, clock: Clock, *, peer: bool = False
) -> list[float]:
    """`measure_layer` for all pairs of ranks on these hosts at once. All ranks must call it."""
    local = [[other for other, at in enumerate(hosts) if at == host] for host in sorted(set(hosts))]
    pairs = [each[at : at + PAIR] for each in local for at in range(0, len(each) - 1, PAIR)]
    group, _ = dist.new_subgroups_by_enumeration(pairs, group_desc="tp")
    own = next((pair for pair in pairs if rank in pair), None)
    if own is None:
        return _slowest([0.0] * 3, clock)
    at = Pair(group, own.index(rank), dist.PrefixStore(f"pair-{own[0]}-{peer}", store), peer)
    return measure_layer(device, clock, at)


def _slowest(seconds: list[float], clock: Clock) -> list[float]:
    found = [clock.slowest(each) for each in seconds]
    clock.done()
    return found


def _stage_seconds(layers: int, device: torch.device, pair: Pair | None) -> list[float]:
    """The host's seconds for F, B and W of one microbatch, each issued to an idle device."""
    plan = host_plan(device.type, layers, PAIR if pair else 1, peer=pair is not None and pair.peer)
    tokens = torch.randint(plan.model.vocab, (plan.batch.sequence_length,), device=device)
    inputs, rounds = StageInputs(tokens=tokens, targets=tokens), list[list[float]]()
    with _stage(plan, device, pair) as stage:
        for _ in range(WARM_UP + ROUNDS):
            stage.begin(0, 1, len(tokens))
            works: tuple[Callable[[], object], ...] = (
                lambda: run_to_completion(stage.forward(0, inputs)),
                lambda: run_to_completion(stage.backward_input(0, None)),
                partial(stage.backward_weight, 0),
            )
            rounds.append([_issue_seconds(work, device) for work in works])
    return [min(each) for each in zip(*rounds[WARM_UP:], strict=True)]


def _issue_seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextmanager
def _stage(plan: Plan, device: torch.device, pair: Pair | None) -> Iterator[BaseStage]:
    """The only stage of a plan, joined to the groups through which its layers exchange rows."""
    rank = pair.rank if pair else 0
    state = RankState(plan, rank, device)
    (stage,) = rank_setup.make_stages(plan, rank, state.parameters, state.frozen, state.histories).values()
    if pair is None:
        yield stage
        return
    store = dist.PrefixStore(f"layers-{len(plan.layers[0].numbers)}", pair.store)
    layers = LayerGroups(TensorParallelGroup(pair.group, PAIR, rank), ContextParallelGroup(), ExpertParallelGroup())
    flags = rank_setup.make_flags(plan, rank, store, 0)
    alone = ProcessGroups(rank, {}, {}, {}, {}, {}, {}, None, layers, None)
    groups = rank_setup.with_peer_rows(plan, alone, store, device, flags)
    stage.join(groups.layers)
    yield stage
    if flags is not None:
        torch.cuda.synchronize(device)
        dist.barrier(pair.group)
        for rows in groups.layers.rows:
            rows.close()
        flags.close()
