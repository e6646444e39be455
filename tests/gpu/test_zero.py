"""ZeRO on GPUs: the result of one process, the same bits twice, and buffers of the planned sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bf16_sums import assert_sums_of_rounded_terms
from bits import same_bits
from exactness import assert_equals_one_process
from gpus import RANKS_A_GPU, on_gpu, two_gpus
from plans import MODEL, plan_of

from pentad.orchestrator.planning.estimate import memory
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.checkpoint.manifest import Shard, pieces_by_tensor
from pentad.workers.model.stage import Stage
from pentad.workers.params.param_buffers import make_param_buffers
from pentad.workers.params.parameters import create_parameters
from pentad.workers.runtime.zero import ZeroShards

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120 * RANKS_A_GPU)]
CASES = [("1f1b", 2, 1, 3, None), ("looped-bfs", 2, 1, 3, 4), ("dualpipe", 1, 2, 4, None), ("zb-h2", 2, 2, 4, None)]
BUFFERS = ("parameters", "master", "gradients", "optimizer")


def gpu_plan(name, dp, pp, m, chunks, zero, corpus, dtype, transport="peer", **more) -> Plan:
    options = MemoryOptions(zero=zero, max_gathered=2 if chunks and zero == 3 else None)
    given = {"chunks": chunks, "memory_options": options, **more}
    return on_gpu(plan_of(name, dp, pp, m, corpus, dtype, **given), transport, None, options, chunks)


def assert_repeatable(fleet, plan: Plan) -> None:
    once, again = fleet.run(plan, [(0, 4)]), fleet.run(plan, [(0, 1), (1, 3)])
    for a, b in zip(once, again, strict=True):
        assert [(r.losses, r.grad_norm) for r in a.results] == [(r.losses, r.grad_norm) for r in b.results]
        assert same_bits(a.state, b.state)


@pytest.mark.sampled(7)
@two_gpus
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("name", "dp", "pp", "m", "chunks"), CASES)
@pytest.mark.parametrize("transport", ["peer", "nccl"])
def test_zero_equals_one_process(gpus, corpus, transport, name, dp, pp, m, chunks, zero):
    plan = gpu_plan(name, dp, pp, m, chunks, zero, corpus, "float64", transport)
    assert_equals_one_process(gpus, plan, check_bytes=True)


@pytest.mark.sampled(5)
@two_gpus
@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize(("name", "dp", "pp", "m", "chunks"), CASES)
def test_repeated_runs_are_bit_identical(gpus, corpus, name, dp, pp, m, chunks, zero, post_validation):
    plan = gpu_plan(name, dp, pp, m, chunks, zero, corpus, "bfloat16", post_validation=post_validation)
    assert_repeatable(gpus, plan)


@two_gpus
@pytest.mark.parametrize("zero", range(4))
def test_units_equal_one_process_and_are_repeatable(gpus, corpus, zero):
    plan = gpu_plan("1f1b", 2, 1, 3, None, zero, corpus, "float64", unit_layers=2)
    assert_equals_one_process(gpus, plan, check_bytes=True)
    assert_repeatable(gpus, gpu_plan("looped-bfs", 2, 1, 3, 4, zero, corpus, "bfloat16", unit_layers=1))


@pytest.mark.sampled(3)
@two_gpus
@pytest.mark.parametrize("transport", ["peer", "nccl"])
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(("name", "dp", "pp", "m", "chunks"), CASES)
def test_gradients_in_bfloat16_have_the_sums_of_rounded_terms(gpus, corpus, name, dp, pp, m, chunks, zero, transport):
    plan = replace(gpu_plan(name, dp, pp, m, chunks, zero, corpus, "bfloat16", transport), bf16_reduce=True)
    outcomes = gpus.run(plan, [(0, 2)])
    assert_sums_of_rounded_terms(plan, [outcome.reductions for outcome in outcomes])
    assert_repeatable(gpus, plan)


@two_gpus
@pytest.mark.parametrize(("zero", "transport"), [(0, "peer"), (2, "peer"), (2, "nccl")])
def test_the_last_units_are_reduced_during_the_backward(gpus, corpus, zero, transport):
    """On a stage whose kernels take longer than its host."""
    model = replace(MODEL, hidden=512, heads=4, kv_heads=4, ffn=2048)
    plan = gpu_plan("1f1b", 2, 1, 2, None, zero, corpus, "bfloat16", transport, unit_layers=1, model=model)
    plan = replace(plan, batch=replace(plan.batch, global_batch_size=8, sequence_length=16384))
    for outcome in gpus.run(plan, [(0, 3)]):
        spans = {span.name: span for span in outcome.results[-1].spans}
        kind = "REDUCE_SCATTER" if zero else "ALL_REDUCE"
        ends = [spans[f"{unit}{kind}"].end for unit in range(8)]
        assert ends == sorted(ends, reverse=True)
        assert sum(end < spans["0BW1"].end for end in ends) >= 4


@two_gpus
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_an_optimistic_step_has_the_bits_of_one_with_a_barrier(gpus, corpus, zero):
    runs = [
        gpus.run(gpu_plan("1f1b", 2, 1, 3, None, zero, corpus, "bfloat16", post_validation=value), [(0, 4), (4, 1)])
        for value in (True, False)
    ]
    for optimistic, barrier in zip(*runs, strict=True):
        assert [r.losses for r in optimistic.results] == [r.losses for r in barrier.results]
        assert same_bits(optimistic.state, barrier.state)


@two_gpus
def test_a_checkpoint_of_shards_has_every_tensor(gpus, corpus, tmp_path):
    plan = gpu_plan("1f1b", 2, 1, 3, None, 3, corpus, "bfloat16")
    outcomes = gpus.run(plan, [(0, 1)], save=str(tmp_path / "step-00000001"))
    pieces = pieces_by_tensor([Shard.from_plain(shard) for outcome in outcomes for shard in outcome.shards])
    assert pieces.keys() == {key.partition("@")[0] for outcome in outcomes for key in outcome.state}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("zero", range(4))
def test_allocated_bytes_are_the_planned_ones(corpus, zero, dtype):
    """The allocator rounds every tensor up to 512 bytes."""
    chunks, device = 4, torch.device("cuda", 0)
    options = MemoryOptions(zero=zero, max_gathered=1 if zero == 3 else None)
    plan = plan_of("looped-bfs", 2, 1, 3, corpus, dtype, chunks=chunks, memory_options=options)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    parameters = {
        share: create_parameters(plan, share, device, rank=1, blank=True) for share in plan.param_shards_of(1)
    }
    state = torch.cuda.memory_allocated(device) - before
    stages = {s: Stage(plan, s, make_param_buffers(plan, 1, s, parameters)) for s in plan.stages_of(1)}
    tables = torch.cuda.memory_allocated(device) - before - state  # of rotary embeddings, and loss sums
    shards = ZeroShards(plan, 1, stages)
    found = torch.cuda.memory_allocated(device) - before - tables
    planned = memory(plan, 1)
    tensors = 6 * len(parameters) + len(shards.weights) + len(shards.gradients)
    expected = sum(planned[kind] for kind in BUFFERS)
    assert expected <= found <= expected + 512 * tensors
