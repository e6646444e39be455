"""ZeRO's collectives by reads of peers' memory: in every order that the flags allow, each instruction finds the weights
of its step, each shard gets the sum of its step, and no rank waits for ever."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from bf16_sums import sum_of_reductions
from plans import plan_of
from simulated_gpus import (
    Condition,
    Lanes,
    SimulatedAllReduce,
    SimulatedFlags,
    SimulatedLane,
    SimulatedMemory,
    run_in_some_order,
)

from pentad.kernels.optimizer.add_shards import add_shards_
from pentad.schedules.ir.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Key, Op, instructions_of
from pentad.schedules.passes.optimizer_pass import last_reductions
from pentad.schedules.passes.post_validation import has_post_validation
from pentad.schedules.spec.plan import ALIGNMENT, ParamShard, Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.schedules.spec.zero_layout import replicas, zero_group, zero_groups
from pentad.workers.lanes.streams import AHEAD
from pentad.workers.parallel.process_groups import channel_of
from pentad.workers.params.frozen import frozen_weights
from pentad.workers.params.param_buffers import ParamBuffers
from pentad.workers.params.parameters import create_parameters
from pentad.workers.runtime import zero as zero_module
from pentad.workers.runtime.rank_setup import make_stages
from pentad.workers.runtime.zero import ZeroShards
from pentad.workers.transport import peer_collectives
from pentad.workers.transport.peer_collectives import OUTBOX, PeerCollectives, flag_names

STEPS = 2


class Case(NamedTuple):
    name: str
    dp: int
    pp: int
    microbatches: int
    more: dict[str, Any]


CASES = [
    Case("1f1b", 2, 1, 2, {"unit_layers": 2}),
    Case("1f1b", 4, 1, 2, {}),
    Case("looped-bfs", 2, 1, 3, {"chunks": 4}),
    Case("zb-h2", 2, 2, 4, {"post_validation": True}),
    Case("dualpipe", 1, 2, 4, {}),
    Case("dualpipev", 2, 2, 4, {"unit_layers": 1}),
    Case("1f1b", 4, 1, 2, {"zero_shards": 2}),
    Case("zb-h2", 4, 2, 4, {"zero_shards": 2, "post_validation": True}),
    Case("dualpipe", 2, 2, 4, {"zero_shards": 2, "unit_layers": 1}),
]


def plan_with(case: Case, zero: int, *, bf16: bool = False) -> Plan:
    name, dp, pp, microbatches, more = case
    plan = plan_of(name, dp, pp, microbatches, "corpus", memory_options=MemoryOptions(zero=zero), **more)
    return replace(plan, bf16_reduce=bf16)


class Expected:
    """Made-up weights of every step and gradients of every microbatch."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.found: dict[tuple[Any, ...], torch.Tensor] = {}

    def weights(self, shard: ParamShard, step: int) -> torch.Tensor:
        return self._values("weights", shard, step)

    def gradient(self, shard: ParamShard, rank: int, step: int, microbatch: int) -> torch.Tensor:
        return self._values("gradient", shard, rank, step, microbatch)

    def total(self, shard: ParamShard, step: int, microbatches: dict[int, list[int]]) -> torch.Tensor:
        terms = {rank: [self.gradient(shard, rank, step, each) for each in own] for rank, own in microbatches.items()}
        if not self.plan.bf16_reduce:
            return torch.stack([each for own in terms.values() for each in own]).sum(0)
        scatters = [part for part in instructions_of(self.plan.program.streams[0]) if part.op is Op.REDUCE_SCATTER]
        if scatters[0].microbatch < 0:
            terms = {rank: [torch.stack(own).cumsum(0)[-1]] for rank, own in terms.items()}
        like, groups = torch.empty(0, dtype=torch.float64), zero_groups(self.plan, shard)
        return torch.stack([sum_of_reductions([terms[rank] for rank in group], like) for group in groups]).sum(0)

    def _values(self, kind: str, shard: ParamShard, *place: int) -> torch.Tensor:
        if (kind, shard, *place) not in self.found:
            size = self.plan.num_zero_shards(shard) * self.plan.zero_shard_size(shard)
            seed = hash((kind == "weights", *map(int, shard), *place)) % 2**31
            self.found[kind, shard, *place] = torch.rand(size, dtype=torch.float64, generator=_generator(seed))
        return self.found[kind, shard, *place]


class Rank:
    """One rank: its host issues the instructions of all steps, whose compute checks what it reads."""

    def __init__(self, plan: Plan, rank: int, lanes: Lanes, expected: Expected) -> None:
        self.plan, self.rank, self.lanes, self.expected = plan, rank, lanes, expected
        device = torch.device("cpu")
        shards = plan.param_shards_of(rank)
        self.parameters = {each: create_parameters(plan, each, device, rank=rank, blank=True) for each in shards}
        stages = make_stages(plan, rank, self.parameters, frozen_weights(plan, rank, device, None), {})
        self.stages, self.zero = stages, ZeroShards(plan, rank, stages)
        self.stream = list(instructions_of(plan.program.streams[plan.mesh.coordinates(rank).pp]))
        self.last_reductions = last_reductions(plan.program.streams[plan.mesh.coordinates(rank).pp])
        self.ended: set[tuple[int, Key]] = set()
        self.issued = self.completed = 0  # instructions on the compute lane
        self.transfers: dict[Any, int] = {}
        self.sums: list[torch.Tensor] = []
        chunk = ALIGNMENT * plan.mesh.size * plan.bf16_reduce
        self.outbox = torch.full((chunk,), torch.nan, dtype=torch.bfloat16)

    def shared(self) -> dict[str, torch.Tensor]:
        return self.zero.shared() | {OUTBOX: self.outbox}

    def connect(self, flags: SimulatedFlags, memory: SimulatedMemory) -> None:
        dtype = torch.bfloat16 if self.plan.bf16_reduce else torch.float64
        inbox = torch.full((2 * ALIGNMENT * max(1, self.plan.mesh.size - 1),), torch.nan, dtype=dtype)
        self.flags = flags
        lane = SimulatedLane(self.lanes, (self.rank, "reductions"))
        self.collectives = PeerCollectives(self.plan, self.rank, flags, memory, lane, inbox, self.outbox)
        self.zero.sums_in_lane = True
        same = {shard: replicas(self.plan, shard, self.rank) for shard in self.parameters}
        self.zero.replicas = {shard: ranks for shard, ranks in same.items() if len(ranks) > 1}  # type: ignore[misc]
        for shard, each in self.parameters.items():
            each.compute.copy_(self._own(self.expected.weights(shard, 0)[None], shard))

    def host(self) -> Iterator[Condition]:
        for step in range(STEPS):
            before = partial(self._has_completed, self.issued)
            for stage in self.stages.values():
                stage.begin(step, self.plan.batch.microbatches, 1)
            for lane in sorted({part.lane for part in self.stream} - {"compute"}):
                with self.lanes.on((self.rank, lane)):
                    self.lanes.enqueue(ready=before)
            for part in self.stream:
                yield lambda: self.issued - self.completed <= AHEAD
                if part.op in (Op.W, Op.BW):
                    yield before
                if part.op is Op.VALIDATE:
                    yield partial(self._all_have_norm, step)
                with self.lanes.on((self.rank, part.lane)):
                    self._issue(part, step)

    def _has_completed(self, count: int) -> bool:
        return self.completed >= count

    def _has_ended(self, step: int, key: Key) -> bool:
        return (step, key) in self.ended

    def _all_have_norm(self, steps: int) -> bool:
        return all(self.flags.values["norm", rank] >= steps for rank in range(self.plan.mesh.size))

    def _issue(self, part: Instruction, step: int) -> None:
        for key in part.waits:
            self.lanes.enqueue(ready=partial(self._has_ended, step, key))
        self.issued += part.lane == "compute"
        match part.op:
            case Op.ALL_GATHER:
                self.zero.gather(part, self.collectives, 0)
            case Op.FREE:
                self.zero.free(part)
            case Op.REDUCE_SCATTER:
                self.zero.scatter(part, self.collectives, is_last=part.key in self.last_reductions)
            case Op.NORM:
                self.lanes.enqueue(lambda: self._check_sums(step))
                self.flags.write(("norm", self.rank), step + 1)
                for rank in () if has_post_validation(self.plan.program) else range(self.plan.mesh.size):
                    self.flags.wait(("norm", rank), step + 1)
            case Op.STEP:
                for shard, each in self.parameters.items():
                    each.compute.copy_(self._own(self.expected.weights(shard, step + 1)[None], shard))
                self.collectives.after_update()
            case op if op in SENDS or op in RECEIVES:
                self._transfer(part)
            case op if op in COMPUTE:
                self._compute(part, step)
        self.lanes.enqueue(lambda: self._end(part, step))

    def _compute(self, part: Instruction, step: int) -> None:
        for shard, buffer in self.zero._weights(part.stage) if part.op is not Op.W else ():
            assert buffer.weights is not None, f"{part} reads weights that are not gathered"
            flat, values = buffer.weights.flat, self.expected.weights(shard, step)
            self.lanes.enqueue(partial(_check, flat, values, f"weights of {part} of step {step}"))
        for shard, buffers in self.zero.trained[part.stage] if part.op in (Op.W, Op.BW) else ():
            assert buffers.gradients is not None
            self._add(buffers, buffers.gradients.flat, self.expected.gradient(shard, self.rank, step, part.microbatch))

    def _add(self, buffers: ParamBuffers, flat: torch.Tensor, values: torch.Tensor) -> None:
        if buffers.stale:
            flat.copy_(values)
        else:
            self.lanes.enqueue(lambda: flat.add_(values))
        buffers.stale = False

    def _transfer(self, part: Instruction) -> None:
        channel = channel_of(part, self.rank, self.plan.mesh.move(self.rank, pp=part.peer))
        self.transfers[channel] = count = self.transfers.get(channel, 0) + 1
        (self.flags.write if part.op in SENDS else self.flags.wait)(("sent", channel), count)

    def _check_sums(self, step: int) -> None:
        for shard, each in self.parameters.items():
            holders, by_rank = self.plan.holders(shard), {}
            for rank in holders:
                stream = instructions_of(self.plan.program.streams[self.plan.mesh.coordinates(rank).pp])
                here = [part for part in stream if part.stage == shard.stage and part.op in (Op.W, Op.BW)]
                by_rank[rank] = [part.microbatch for part in here]
            expected = self._own(self.expected.total(shard, step, by_rank)[None], shard)
            tolerance = 0.0 if self.plan.bf16_reduce else 1e-12
            _check(each.gradient, expected, f"sum of {shard} in step {step}", tolerance)
            self.sums.append(each.gradient.clone())

    def _own(self, full: torch.Tensor, shard: ParamShard) -> torch.Tensor:
        group = zero_group(self.plan, shard, self.rank)
        return full.view(len(group), -1)[group.index(self.rank)]

    def _end(self, part: Instruction, step: int) -> None:
        self.ended.add((step, part.key))
        self.completed += part.lane == "compute"


def run(plan: Plan, seed: int, ignored: str = "") -> list[torch.Tensor]:
    """Runs STEPS steps in an order drawn from a seed, ignoring waits for `ignored` flags; returns the shards' sums."""
    lanes, expected = Lanes(), Expected(plan)
    ranks = [Rank(plan, rank, lanes, expected) for rank in range(plan.mesh.size)]
    flags = SimulatedFlags(lanes, ignored)
    memory = SimulatedMemory({each.rank: each.shared() for each in ranks}, lanes)
    for each in ranks:
        each.connect(flags, memory)

    def enqueue_sum(*arguments: Any, accumulate: bool) -> None:
        lanes.enqueue(lambda: add_shards_(*arguments, accumulate=accumulate))

    group_sums = SimulatedAllReduce(lanes)
    with (
        patch.object(peer_collectives, "add_shards_", enqueue_sum),
        patch.object(zero_module, "begin_all_reduce", group_sums),
    ):
        run_in_some_order(lanes, [each.host() for each in ranks], Random(seed))
    used = {flag for flag in flags.values if flag[0] not in ("norm", "sent")}  # type: ignore[index]
    assert used <= set(flag_names(plan, range(plan.mesh.size)))
    return [values for each in ranks for values in each.sums]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("case", "zero"),
    [
        pytest.param(case, zero, marks=[] if zero == 1 + number % 3 else [pytest.mark.slow], id=f"{case.name}-{zero}")
        for number, case in enumerate(CASES, 2)
        for zero in (1, 2, 3)
    ],
)
def test_every_order_gives_the_weights_and_sums_of_the_step(case: Case, zero: int) -> None:
    plan = plan_with(case, zero)
    first, *others = (run(plan, seed) for seed in range(3))
    for other in others:
        assert all(map(torch.equal, first, other)), "a sum depends on the order"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_in_bfloat16_every_order_gives_the_bits_of_rounded_terms_in_the_order_of_ranks(case: Case, zero: int) -> None:
    """Sums are made in chunks of 64 elements."""
    plan = plan_with(case, zero, bf16=True)
    for seed in range(2):
        run(plan, seed)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("event", "case", "zero", "bf16"),
    [
        *((event, CASES[0], zero, False) for event, zero in (("updated", 3), ("complete", 1), ("complete", 2))),
        ("read", CASES[2], 2, False),
        *((event, CASES[0], 2, True) for event in ("complete", "read")),
    ],
)
def test_no_wait_can_be_left_out(event: str, case: Case, zero: int, bf16: bool) -> None:
    plan = plan_with(case, zero, bf16=bf16)
    with pytest.raises(AssertionError, match=r"(of|in) step"):
        list(map(partial(run, plan, ignored=event), range(20)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("wait", ["follow", "end"])
def test_reads_wait_for_sums_and_sums_for_reads(wait: str, bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If either does not wait, some order of the rest gives other sums."""
    monkeypatch.setattr(SimulatedLane, wait, lambda self: SimpleNamespace(wait=lambda: None))
    plan = plan_with(CASES[1], 2, bf16=bf16)
    with pytest.raises(AssertionError, match="in step"):
        list(map(partial(run, plan), range(20)))


def _check(found: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = 0.0) -> None:
    assert float((found - expected).abs().max()) <= tolerance, what


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
