"""Gradients reduced in several buckets, the last layers' first: the same result for any number of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil
from pathlib import Path

import pytest
import torch
from exactness import assert_equals_one_process
from memory_pass_cases import drop
from plans import MODEL, plan_of
from reachability_proof import prove
from resume import save_and_resume
from schedule_sizes import allows
from small_models import FAMILIES, MOE

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.comm_volume import CommKind, collective_bytes, comm_volume
from pentad.orchestrator.planning.estimate import memory
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.catalogue import CATALOGUE, generate
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import PentadError, ScheduleError
from pentad.schedules.ir.instruction import REDUCTIONS, Instruction, Key, Op, instructions_of, parse
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.plan import ALIGNMENT, Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions, ScheduleOptions
from pentad.schedules.spec.tensors import num_parameters
from pentad.schedules.verify.check import check
from pentad.workers.checkpoint import checkpoint
from pentad.workers.model.stage import Stage
from pentad.workers.parallel.async_ops import on_yield, run_to_completion
from pentad.workers.params.param_buffers import make_param_buffers
from pentad.workers.params.parameters import create_parameters

slow = pytest.mark.slow
SIZES = [(n, p, m) for n in CATALOGUE for p, m in ((1, 3), (2, 5), (4, 8)) if allows(n, p, m)]


def buckets_for(name: str, p: int, m: int, chunks: int | None = None, maximum: int = 4) -> tuple[int, ...]:
    """Numbers of buckets by stage, 1 to `maximum`."""
    stages = generate(name, p, m, ScheduleOptions(chunks)).stages
    return tuple(maximum - stage % maximum for stage in range(stages))


def plan_in_buckets(name, dp, pp, m, corpus, maximum, zero=0, dtype="float64", chunks=None, **more) -> Plan:
    buckets = buckets_for(name, pp, m, chunks, maximum)
    options = MemoryOptions(zero=zero, max_gathered=more.pop("max_gathered", None), buckets=buckets)
    return plan_of(name, dp, pp, m, corpus, dtype, chunks=chunks, memory_options=options, **more)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize(("name", "p", "m"), SIZES)
def test_every_bucket_is_reduced_once_after_the_last_w_in_reverse_order(name, p, m, zero, post_validation):
    expected = buckets_for(name, p, m)
    memory_options = MemoryOptions(zero=zero, buckets=expected)
    program = compile_program(name, p, m, replicas=2, memory_options=memory_options, post_validation=post_validation)
    assert program.buckets == expected
    for stages, stream in zip(program.placement, program.streams, strict=True):
        parts = list(instructions_of(stream))
        last = {part.stage: part.key for part in parts if part.op in (Op.W, Op.BW)}
        for stage in stages:
            found = [part for part in parts if part.op in REDUCTIONS and part.stage == stage]
            numbers = [part.microbatch for part in found]
            assert numbers == ([-1] if expected[stage] == 1 else list(reversed(range(expected[stage]))))
            assert all(part.waits == (last[stage],) for part in found)
    if not zero and not post_validation:
        prove(program, 2, expected)
    assert Program.from_bytes(program.to_bytes()) == program


@pytest.mark.parametrize("zero", [0, 2])
def test_a_program_with_a_wrong_number_of_buckets_is_refused(zero):
    expected = (3, 1)
    program = compile_program("zb-h2", 2, 5, replicas=2, memory_options=MemoryOptions(zero=zero, buckets=expected))
    check(program, replicas=2, buckets=expected)
    for other in ((), (2, 1), (3, 2), (4, 1)):
        with pytest.raises(ScheduleError, match=r"bucket|reduces the gradients of stage"):
            check(program, replicas=2, buckets=other)
    for part in [part for part in instructions_of(program.streams[0]) if part.op in REDUCTIONS]:
        with pytest.raises(ScheduleError, match=rf"never reduces .* \(bucket {part.microbatch}\)"):
            check(drop(program, 0, part.key), replicas=2, buckets=expected)


def test_every_stage_needs_a_number_of_buckets():
    for found in ((2,), (2, 2, 2), (2, 0)):
        with pytest.raises(PentadError, match=r"buckets are .*: expected one count of at least 1 for each of 2 stages"):
            compile_program("1f1b", 2, 4, replicas=2, memory_options=MemoryOptions(buckets=found))


@pytest.mark.parametrize("zero", [0, 2])
def test_all_buckets_together_take_as_long_as_one(zero):
    """With nothing else to wait for."""
    ends = []
    for counts in ((1,), (4,)):
        program = compile_program("gpipe", 1, 3, replicas=2, memory_options=MemoryOptions(zero=zero, buckets=counts))
        spans = simulate(program, Costs((1.0,), (1.0,), (1.0,), reduce=2.0)).spans
        ends.append(max(span.end for span in spans))
    assert ends[0] == ends[1] == 9 + (2.0 if zero == 0 else 1.0 + 1.0)


ALWAYS = [("1f1b", 4, 1, 3, 5, 0), ("zb-h2", 2, 2, 4, 3, 1), ("dualpipe", 1, 4, 8, 3, 0), ("1f1b", 2, 1, 2, 7, 3)]
SLOW = [("1f1b", 2, 2, 3, 4, 1), ("zb-v", 2, 2, 5, 3, 2), ("dualpipe", 2, 2, 4, 2, 3), ("1f1b", 4, 1, 3, 6, 2)]


@pytest.mark.parametrize(
    ("name", "dp", "pp", "m", "maximum", "zero"),
    [*ALWAYS, *(pytest.param(*case, marks=slow) for case in SLOW)],
)
def test_any_number_of_buckets_equals_one_process(fleet, corpus, name, dp, pp, m, maximum, zero):
    plan = plan_in_buckets(name, dp, pp, m, corpus, maximum, zero)
    assert_equals_one_process(fleet, plan, check_bytes=True)


@pytest.mark.parametrize("zero", [2, pytest.param(3, marks=slow)])
def test_stages_can_share_buffers_in_buckets(fleet, corpus, zero):
    max_gathered = 2 if zero == 3 else None
    plan = plan_in_buckets("looped-bfs", 2, 1, 3, corpus, 3, zero, chunks=4, max_gathered=max_gathered)
    assert_equals_one_process(fleet, plan, check_bytes=True)


MESHES = [
    ("1f1b", {"dp": 2, "tp": 2}, {"model": replace(MODEL, kv_heads=1)}, 1),
    ("dualpipe", {"ep": 2, "pp": 2}, {"model": MOE}, 3),
    ("1f1b", {"cp": 2, "pp": 2}, {}, 1),
    ("interleaved", {"cp": 2}, {"chunks": 4}, 1),
    pytest.param("1f1b", {"dp": 2, "pp": 2}, {"model": FAMILIES["qwen3"]}, 2, marks=slow),
    pytest.param("zb-h2", {"cp": 2, "pp": 2}, {"model": replace(FAMILIES["deepseek-v3"], mtp_layers=1)}, 1, marks=slow),
]


@pytest.mark.parametrize(("name", "sizes", "more", "zero"), MESHES)
def test_replicated_and_expert_gradients_in_buckets(fleet, corpus, name, sizes, more, zero):
    mesh = {"dp": 1, "pp": 1, **sizes}
    assert_equals_one_process(
        fleet, plan_in_buckets(name, mesh.pop("dp"), mesh.pop("pp"), 4, corpus, 3, zero, **mesh, **more)
    )


def test_a_checkpoint_resumes_with_other_buckets(fleet, corpus, tmp_path: Path):
    """Bit-identical: the sum of two ranks has one order only."""
    ends = []
    for folder, (before, after) in enumerate(((3, 5), (1, 1))):
        plans = [
            plan_in_buckets("1f1b", 2, 1, 4, corpus, maximum, 3, "float32", clip=1e9) for maximum in (before, after)
        ]
        at = checkpoint.folder_of(tmp_path / str(folder), 2)
        ends.append(save_and_resume(fleet, plans[1], at, 2, [(2, 2)], before=plans[0]))
    for some, one in zip(*ends, strict=True):
        assert [r.losses for r in some.results] == [r.losses for r in one.results]


MODELS = {"llama": MODEL, "tied": FAMILIES["qwen3"], "moe": MOE}
MODELS["mtp"] = replace(FAMILIES["deepseek-v3"], mtp_layers=1)


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("stage_index", [0, 1, 2])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_bucket_is_complete_once_the_backward_has_reached_its_layer(corpus, model, stage_index, zero):
    """It does not change after that, and most buckets are complete before the end."""
    torch.manual_seed(1)
    count = 6
    options = MemoryOptions(zero=zero, buckets=(count,) * 3)
    plan = plan_of("1f1b", 2, 3, 1, corpus, model=replace(model, layers=12), memory_options=options)
    rank, cpu = plan.mesh.move(0, pp=stage_index), torch.device("cpu")
    parameters = {share: create_parameters(plan, share, cpu, rank=rank) for share in plan.param_shards_of(rank)}
    stage = Stage(plan, stage_index, make_param_buffers(plan, rank, stage_index, parameters))
    for buffers in stage.param_buffers:
        if buffers.parameters.full_gradients is None:
            buffers.set_gradients(torch.zeros(buffers.parameters.layout.padded_size, dtype=torch.float64))
    stage.bind()
    tokens = torch.arange(plan.slice_tokens) % 300
    received, dy = torch.randn(2, plan.slice_tokens, plan.model.hidden, dtype=torch.float64)
    mtp_targets = tokens.expand(plan.model.mtp_layers, -1) if stage.last else None
    ends = tokens if stage_index == 0 else None, tokens if stage.last else None
    run_to_completion(stage.forward(0, received if stage_index else None, *ends, mtp_targets))
    complete: dict[tuple[int, int], torch.Tensor] = {}
    progress: list[int] = []  # complete buckets after each W

    def run_weight_grad() -> None:
        stage.backward_weight(0)
        for kind, buffers in enumerate(stage.param_buffers):
            for index, bucket in enumerate(buffers.buckets):
                assert buffers.gradients is not None
                if bucket.layer >= stage.wgrad_layer and (kind, index) not in complete:
                    complete[kind, index] = buffers.gradients.flat[bucket.span].clone()
        progress.append(len(complete))

    run_to_completion(on_yield(stage.backward_input(0, None if stage.last else dy), run_weight_grad))
    assert progress[-1] == count * len(stage.param_buffers)
    assert progress[-3] >= 2
    for (kind, index), found in complete.items():
        buffers = stage.param_buffers[kind]
        assert buffers.gradients is not None
        assert torch.equal(found, buffers.gradients.flat[buffers.buckets[index].span]), (kind, index)
    for buffers in stage.param_buffers:
        spans = [bucket.span for bucket in buffers.buckets]
        assert spans[0].start == 0
        assert spans[-1].stop == buffers.parameters.layout.padded_size
        assert all(one.stop == two.start for one, two in pairwise(spans))


SMALL = ["mesh.dp=2", "schedule.name=1f1b", "schedule.microbatches=2"]


@pytest.mark.parametrize("zero", range(4))
def test_the_bucket_size_gives_the_number_of_buckets(zero):
    """bytes / size, rounded up; traffic and memory grow by padding only."""
    single = make_plan(load(None, [*SMALL, f"zero.stage={zero}"]), "cpu")
    for size in (0.05, 0.2, 1.5):
        plan = make_plan(load(None, [*SMALL, f"zero.stage={zero}", f"zero.bucket_mib={size}"]), "cpu")
        stages = [4 * num_parameters(plan.model, *span) for span in plan.layers]
        counts = [ceil(held / (size * 2**20)) for held in stages]
        assert list(plan.program.buckets) == counts
        for rank in range(plan.mesh.size):
            (stage,) = plan.stages_of(rank)
            found, kind = comm_volume(plan, rank), "REDUCE_SCATTER" if zero else "ALL_REDUCE"
            assert found[CommKind("dp", kind)].operations == counts[stage]
            if zero:
                assert found[CommKind("dp", "ALL_GATHER")].operations == counts[stage]
            for op, moved in collective_bytes(plan, rank).items():
                assert moved == pytest.approx(collective_bytes(single, rank)[op], abs=8 * 2 * ALIGNMENT * counts[stage])
            total = memory(single, rank)["total"]
            assert total <= memory(plan, rank)["total"] <= total + 2 * ALIGNMENT * counts[stage] * 24


BAD = [
    ("zero.bucket_mib=0", "zero.bucket_mib is 0: expected more than 0"),
    ("zero.bucket_mib=wide", "zero.bucket_mib is 'wide'"),
]


@pytest.mark.parametrize(("override", "words"), BAD)
def test_a_bad_size_is_refused(override, words):
    with pytest.raises(PentadError) as caught:
        load(None, [override])
    assert words in str(caught.value)


def test_too_many_buckets_are_refused_with_the_smallest_size():
    with pytest.raises(
        PentadError, match=r"^zero\.bucket_mib is 1e-06: expected at least [0-9.e-]+ \(.* 16384 buckets\)$"
    ):
        make_plan(load(None, [*SMALL, "zero.bucket_mib=0.000001"]), "cpu")


def test_a_rank_without_replicas_has_no_buckets():
    plan = make_plan(load(None, ["schedule.name=1f1b", "zero.bucket_mib=0.01"]), "cpu")
    assert set(plan.program.buckets) == {1}
    assert Key(Op.ALL_REDUCE, 0, 0) not in {part.key for part in instructions_of(plan.program.streams[0])}


def test_the_text_of_a_bucket_s_instruction_converts_both_ways():
    part = Instruction(Op.REDUCE_SCATTER, 2, 3, group="stage2", waits=(Key(Op.W, 2, 5),))
    assert str(part) == "2REDUCE_SCATTER3#stage2 after 2W5"
    assert parse(str(part)) == part
