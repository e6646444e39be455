"""ZeRO on GPUs: the result of one process, the same bits twice, and the bytes that are planned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpus import num_places
from plans import MODEL, plan_of
from zero_cases import assert_equals_one_process

from pentad.orchestrator.planning.estimate import memory
from pentad.schedules.compiler import compile_program
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions, ScheduleOptions
from pentad.workers.model.stage import Stage
from pentad.workers.params.param_buffers import make_param_buffers
from pentad.workers.params.parameters import create_parameters
from pentad.workers.runtime.zero import ZeroShards

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
CASES = [("1f1b", 2, 1, 3, None), ("looped-bfs", 2, 1, 3, 4), ("dualpipe", 1, 2, 4, None), ("zb-h2", 2, 2, 4, None)]
BUFFERS = ("parameters", "master", "gradients", "optimizer")


def on_gpu(name, dp, pp, m, chunks, zero, corpus, dtype, *, post_validation=False, buckets=(), model=MODEL) -> Plan:
    if dp * pp > num_places():
        pytest.skip(f"{dp * pp} GPUs are needed")
    memory_options = MemoryOptions(zero=zero, max_gathered=2 if chunks and zero == 3 else None, buckets=buckets)
    plan = plan_of(name, dp, pp, m, corpus, dtype, chunks=chunks, post_validation=post_validation, memory_options=memory_options, model=model)
    program = compile_program(
        name, pp, m, gated=True, replicas=dp, post_validation=post_validation, options=ScheduleOptions(chunks), memory_options=memory_options
    )
    return replace(plan, device="cuda", transport="nccl", program=program)


@two
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("name", "dp", "pp", "m", "chunks"), CASES)
def test_shards_on_gpus_equal_one_process(gpus, corpus, name, dp, pp, m, chunks, zero):
    assert_equals_one_process(gpus, on_gpu(name, dp, pp, m, chunks, zero, corpus, "float64"))


@two
@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize(("name", "dp", "pp", "m", "chunks"), CASES)
def test_two_runs_on_gpus_are_bit_identical(gpus, corpus, name, dp, pp, m, chunks, zero, post_validation):
    plan = on_gpu(name, dp, pp, m, chunks, zero, corpus, "bfloat16", post_validation=post_validation)
    once, again = gpus.run(plan, [(0, 4)]), gpus.run(plan, [(0, 1), (1, 3)])
    for a, b in zip(once, again, strict=True):
        assert [(r.losses, r.grad_norm) for r in a.results] == [(r.losses, r.grad_norm) for r in b.results]
        assert all(torch.equal(a.state[k], b.state[k]) for k in a.state)


@two
@pytest.mark.parametrize("zero", range(4))
def test_buckets_on_gpus_equal_one_process_and_have_the_same_bits_twice(gpus, corpus, zero):
    assert_equals_one_process(gpus, on_gpu("1f1b", 2, 1, 3, None, zero, corpus, "float64", buckets=(5,)))
    plan = on_gpu("looped-bfs", 2, 1, 3, 4, zero, corpus, "bfloat16", buckets=(3, 1, 2, 4))
    once, again = gpus.run(plan, [(0, 4)]), gpus.run(plan, [(0, 1), (1, 3)])
    for a, b in zip(once, again, strict=True):
        assert [(r.losses, r.grad_norm) for r in a.results] == [(r.losses, r.grad_norm) for r in b.results]
        assert all(torch.equal(a.state[k], b.state[k]) for k in a.state)


@two
@pytest.mark.parametrize("zero", [0, 2])
def test_the_last_buckets_are_reduced_while_the_backward_pass_goes_on(gpus, corpus, zero):
    """Of a stage whose kernels take longer than its host."""
    model = replace(MODEL, hidden=512, heads=4, kv_heads=4, ffn=2048)
    plan = on_gpu("1f1b", 2, 1, 2, None, zero, corpus, "bfloat16", buckets=(8,), model=model)
    plan = replace(plan, batch=replace(plan.batch, global_batch_size=8, sequence_length=16384))
    for outcome in gpus.run(plan, [(0, 3)]):
        spans = {span.name: span for span in outcome.results[-1].spans}
        kind = "REDUCE_SCATTER" if zero else "ALL_REDUCE"
        ends = [spans[f"0{kind}{number}"].end for number in range(8)]
        assert ends == sorted(ends, reverse=True)
        assert sum(end < spans["0BW1"].end for end in ends) >= 4


@two
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_step_ahead_of_its_norm_gives_the_bits_of_one_that_waits(gpus, corpus, zero):
    ends = [
        gpus.run(on_gpu("1f1b", 2, 1, 3, None, zero, corpus, "bfloat16", post_validation=post_validation), [(0, 4), (4, 1)])
        for post_validation in (True, False)
    ]
    for ahead, barrier in zip(*ends, strict=True):
        assert [r.losses for r in ahead.results] == [r.losses for r in barrier.results]
        assert all(torch.equal(ahead.state[name], barrier.state[name]) for name in barrier.state)


@two
def test_a_checkpoint_of_shards_is_whole(gpus, corpus, tmp_path):
    plan = on_gpu("1f1b", 2, 1, 3, None, 3, corpus, "bfloat16")
    outcomes = gpus.run(plan, [(0, 1)], save=str(tmp_path / "step-00000001"))
    names = {name for outcome in outcomes for shard in outcome.shards for name in shard["tensors"]}
    assert names == {key.partition("@")[0] for outcome in outcomes for key in outcome.state}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("zero", range(4))
def test_what_a_gpu_allocates_is_what_is_planned(corpus, zero, dtype):
    """The allocator rounds every tensor up to 512 bytes."""
    chunks, device = 4, torch.device("cuda", 0)
    memory_options = MemoryOptions(zero=zero, max_gathered=1 if zero == 3 else None)
    plan = plan_of("looped-bfs", 2, 1, 3, corpus, dtype, chunks=chunks, memory_options=memory_options)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    held = {at: create_parameters(plan, at, device, rank=1, blank=True) for at in plan.param_shards_of(1)}
    state = torch.cuda.memory_allocated(device) - before
    stages = {s: Stage(plan, s, make_param_buffers(plan, 1, s, held)) for s in plan.stages_of(1)}
    tables = torch.cuda.memory_allocated(device) - before - state  # rotations and loss sums
    shards = ZeroShards(plan, 1, stages)
    found = torch.cuda.memory_allocated(device) - before - tables
    planned = memory(plan, 1)
    tensors = 6 * len(held) + len(shards.weights) + len(shards.gradients)
    expected = sum(planned[kind] for kind in BUFFERS)
    assert expected <= found <= expected + 512 * tensors
