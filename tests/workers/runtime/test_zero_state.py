"""ZeRO's shards: the same bits from any mesh's checkpoint, with the planned bytes and traffic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bits import same_bits
from fleet import assemble, buffer_bytes
from plans import plan_of
from resume import run_and_save
from small_models import MOE

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.comm_volume import collective_bytes
from pentad.orchestrator.planning.estimate import memories, memory
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.recovery.fence import RecoveryState, is_complete
from pentad.orchestrator.recovery.placed_plans import shrunk_plan
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Key, Op, instructions_of
from pentad.schedules.passes.zero_buffers import gradient_pool, sharded_stages, weight_pool
from pentad.schedules.spec.plan import ALIGNMENT, ParamShard
from pentad.schedules.spec.schedule_spec import MemoryOptions, ScheduleOptions
from pentad.schedules.spec.tensors import num_parameters
from pentad.workers.checkpoint import checkpoint, shards
from pentad.workers.model.stage import Stage
from pentad.workers.params.param_buffers import make_param_buffers
from pentad.workers.params.parameters import create_parameters
from pentad.workers.runtime.rank_state import RankState
from pentad.workers.runtime.zero import ZeroShards

slow = pytest.mark.slow


def selection(cases: list, always: set[int]) -> list:
    return [pytest.param(*case, marks=[] if index in always else [slow]) for index, case in enumerate(cases)]


MESH_CHANGES = [((2, 2, 3), (1, 2, 0)), ((1, 2, 0), (2, 1, 3)), ((4, 1, 1), (2, 2, 2)), ((2, 1, 2), (4, 1, 3))]


@pytest.mark.parametrize(("before", "after"), selection(MESH_CHANGES, {0, 1}))
def test_a_checkpoint_restores_on_any_mesh_and_zero_stage(fleet, corpus, tmp_path, before, after):
    """Bit-identical, from files that all ranks have written."""
    plans = [
        plan_of("1f1b", dp, pp, 8 // dp, corpus, "float32", memory_options=MemoryOptions(zero=zero))
        for dp, pp, zero in (before, after)
    ]
    folder = checkpoint.folder_of(tmp_path, 1)
    outcomes = run_and_save(fleet, plans[0], 1, folder)
    opened = checkpoint.open_checkpoint(folder)
    stored = shards.read(opened, opened.tensors)
    files = [piece.file for pieces in opened.tensors.values() for piece in pieces]
    assert len(set(files)) == plans[0].mesh.size * plans[0].program.stages // plans[0].mesh.pp
    for expected in (outcomes, fleet.run(plans[1], [(1, 0)], restore=str(folder))):
        assert same_bits(assemble([outcome.state for outcome in expected], stored), stored)


def test_ranks_read_every_element_of_a_checkpoint_once(fleet, corpus, tmp_path, monkeypatch):
    """With ZeRO; otherwise one holder reads them and sends them to the others (`Runner.restore`)."""
    plan = plan_of("1f1b", 2, 2, 4, corpus, "float32", memory_options=MemoryOptions(zero=3))
    folder = checkpoint.folder_of(tmp_path, 1)
    run_and_save(fleet, plan, 1, folder)
    stored = checkpoint.open_checkpoint(folder).tensors
    sizes, real = dict[str, int](), shards.read_elements

    def counted(source, name, start, end, buffer):
        sizes[name] = sizes.get(name, 0) + end - start
        return real(source, name, start, end, buffer)

    monkeypatch.setattr(shards, "read_elements", counted)
    for rank in range(4):
        RankState(plan, rank, torch.device("cpu")).read(checkpoint.open_checked(folder))
    assert sizes == {name: pieces[-1].end for name, pieces in stored.items()}


def test_a_new_stage_of_training_takes_the_weights_and_leaves_the_optimizer_state(fleet, corpus, tmp_path):
    plan, folder = plan_of("1f1b", 1, 2, 4, corpus, "float32"), checkpoint.folder_of(tmp_path, 1)
    outcomes = run_and_save(fleet, plan, 1, folder)
    state = RankState(plan, 0, torch.device("cpu"))
    state.read(checkpoint.open_checked(folder))
    assert any(parameters.m.any() for parameters in state.parameters.values())
    state.read(checkpoint.open_checked(folder), optimizer=False)
    for parameters in state.parameters.values():
        assert not parameters.m.any()
        assert not parameters.v.any()
        assert parameters.full_weights is not None
        for name, value in parameters.views(parameters.full_weights).items():
            assert torch.equal(value, outcomes[0].state[f"model.{name}"])


SIZES = [("1f1b", 1, 2, 4, None), ("1f1b", 2, 2, 4, None), ("zb-v", 2, 2, 4, None), ("1f1b", 4, 1, 2, None),
         ("dualpipe", 1, 4, 8, None), ("looped-bfs", 2, 2, 3, 4), ("interleaved", 2, 1, 4, 4)]  # fmt: skip


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("name", "dp", "pp", "m", "chunks"), SIZES)
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("post_validation", [False, True])
def test_allocated_bytes_are_the_planned_ones(corpus, name, dp, pp, m, chunks, zero, dtype, post_validation):
    max_gathered = 1 if chunks and zero == 3 else None
    options = MemoryOptions(zero=zero if dp > 1 or name == "dualpipe" else 0, max_gathered=max_gathered)
    given = {"chunks": chunks, "memory_options": options, "post_validation": post_validation}
    plan = plan_of(name, dp, pp, m, corpus, dtype, **given)
    cpu = torch.device("cpu")
    for rank in range(plan.mesh.size):
        parameters = {
            share: create_parameters(plan, share, cpu, rank=rank, blank=True) for share in plan.param_shards_of(rank)
        }
        stages = {s: Stage(plan, s, make_param_buffers(plan, rank, s, parameters)) for s in plan.stages_of(rank)}
        shards = ZeroShards(plan, rank, stages)
        planned = memory(plan, rank)
        assert buffer_bytes(parameters, shards, {}) == {
            kind: planned[kind] for kind in ("parameters", "gradients", "optimizer", "master", "host_optimizer")
        }


OPTIMIZERS = [{"name": "muon"}, {"bf16_state": True}, {"name": "muon", "bf16_state": True}]


@pytest.mark.parametrize("options", OPTIMIZERS)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_every_optimizers_state_has_the_planned_bytes(corpus, zero, options):
    plan = plan_of("zb-v", 2, 2, 4, corpus, "bfloat16", model=MOE, memory_options=MemoryOptions(zero=zero))
    plan = replace(plan, optimizer=replace(plan.optimizer, **options))
    for rank in range(plan.mesh.size):
        state = [
            create_parameters(plan, share, torch.device("cpu"), rank=rank, blank=True)
            for share in plan.param_shards_of(rank)
        ]
        assert memory(plan, rank)["optimizer"] == sum(each.m.nbytes + each.v.nbytes for each in state)
    assert max(memory(plan, rank)["total"] for rank in range(4)) == max(each["total"] for each in memories(plan))


@pytest.mark.parametrize("holders", [1, 2, 4])
@pytest.mark.parametrize("zero", range(4))
def test_bytes_are_as_in_the_paper(corpus, zero, holders):
    """Section 5, with gradients in four bytes, and master weights without the half that the weights already hold: 2N +
    4N + 10N bytes without ZeRO, where the paper has 2N + 2N + 12N."""
    options = MemoryOptions(zero=zero if holders > 1 else 0)
    plan = plan_of("1f1b", holders, 1, 8 // holders, corpus, "bfloat16", memory_options=options)
    size = plan.num_zero_shards(ParamShard(0)) * plan.zero_shard_size(ParamShard(0))
    assert 0 <= size - num_parameters(plan.model) < holders * ALIGNMENT, "shards are padded"
    num_shards = [holders if zero >= stage else 1 for stage in (1, 2, 3)]
    found = memory(plan, 0)
    assert found["master"] + found["optimizer"] == 10 * size // num_shards[0]
    full = [4 * size if num_shards[1] > 1 else 0, 2 * size if num_shards[2] > 1 else 0]  # buffers of the one stage
    assert found["gradients"] - full[0] == 4 * size // num_shards[1]
    assert found["parameters"] - full[1] == 2 * size // num_shards[2]


def test_traffic_is_as_in_the_paper(corpus):
    """2N elements a step; 3N under ZeRO-3, which gathers all stages but the last one twice."""
    elements = {}
    for zero in range(4):
        memory_options = MemoryOptions(zero=zero, max_gathered=1 if zero == 3 else None)
        plan = plan_of("looped-bfs", 2, 2, 3, corpus, chunks=4, memory_options=memory_options)
        sent = collective_bytes(plan, 0)
        counts = [p.op for p in instructions_of(plan.program.streams[0]) if p.op in (Op.ALL_GATHER, Op.REDUCE_SCATTER)]
        assert counts.count(Op.ALL_GATHER) == (0, 4, 4, 7)[zero]
        assert counts.count(Op.REDUCE_SCATTER) == (0, 4, 4, 4)[zero]
        elements[zero] = sum(sent.values()) / 8
    sizes = [num_parameters(plan.model, plan.layers[stage]) for stage in plan.stages_of(0)]
    padded = [2 * plan.zero_shard_size(ParamShard(stage)) for stage in plan.stages_of(0)]
    assert all(0 <= more - size < 2 * ALIGNMENT for size, more in zip(sizes, padded, strict=True))
    assert elements[0] == sum(sizes)  # (n - 1) / n of 2N
    assert elements[1] == elements[2] == sum(padded)
    assert elements[3] == pytest.approx((3 * sum(padded) - padded[-1]) / 2)


SHARED_BUFFERS = [
    *(("looped-bfs", 2, 6, 3), ("looped-bfs", 4, 8, 2), ("interleaved", 2, 4, 4), ("interleaved-zb", 4, 8, 3)),
    *(("zb-v", 4, 8, None), ("dualpipe", 4, 8, None), ("gpipe", 1, 3, None)),
]


@pytest.mark.sampled(14)
@pytest.mark.parametrize(("name", "p", "m", "chunks"), SHARED_BUFFERS)
@pytest.mark.parametrize("max_gathered", [None, 1, 2])
@pytest.mark.parametrize("post_validation", [False, True])
def test_no_two_stages_use_a_buffer_at_once(name, p, m, chunks, max_gathered, post_validation):
    """A stage waits for the previous user of its buffer. Weights have as many buffers as are in use together, gradients
    one more, for the stage being reduced."""
    max_gathered = None if name == "dualpipe" else max_gathered
    program = compile_program(
        name,
        p,
        m,
        replicas=2,
        memory_options=MemoryOptions(zero=3, max_gathered=max_gathered),
        options=ScheduleOptions(chunks),
        post_validation=post_validation,
    )
    for rank, stream in enumerate(program.streams):
        pools = weight_pool(program, rank, sharded_stages(program, rank)), gradient_pool(program, rank)
        weights, gradients = ({place: at for place, (at,) in pool.offsets.items()} for pool in pools)
        gathered: dict[int, tuple[int, int]] = {}
        accumulating: dict[int, tuple[int, Key | None]] = {}  # stage, and its reduction once that has been issued
        peak = [0, 0]
        for part in instructions_of(stream):
            if part.op is Op.ALL_GATHER:
                slot = weights[part.stage, part.microbatch]
                assert slot not in gathered
                gathered[slot] = part.stage, part.microbatch
            elif part.op is Op.FREE:
                assert gathered.pop(weights[part.stage, part.microbatch]) == (part.stage, part.microbatch)
            elif part.op in (Op.W, Op.BW):
                slot = gradients[part.stage, 0]
                stage, reduction = accumulating.get(slot, (part.stage, None))
                assert stage == part.stage or (reduction is not None and reduction in part.waits)
                accumulating[slot] = part.stage, None
            elif part.op is Op.REDUCE_SCATTER:
                accumulating[gradients[part.stage, 0]] = part.stage, part.key
            in_use = sum(reduction is None for _, reduction in accumulating.values())
            peak = [max(peak[0], len(gathered)), max(peak[1], in_use)]
        assert len(set(weights.values())) == peak[0]
        assert len(set(gradients.values())) == min(len(gradients), peak[1] + 1)


def test_a_lost_rank_makes_a_sharded_state_incomplete(corpus):
    plan = plan_of("1f1b", 2, 2, 4, corpus)
    sharded = replace(plan, zero=1)
    assert is_complete(plan, RecoveryState(7, (0, 3)))
    assert is_complete(plan, RecoveryState(7, (0, 1, 2)))
    assert not is_complete(sharded, RecoveryState(7, (0, 1, 2)))
    assert is_complete(sharded, RecoveryState(7, (0, 1, 2, 3)))
    assert not is_complete(sharded, RecoveryState(-1, (0, 1, 2, 3)))


BAD = [
    (["zero.stage=4"], "zero.stage"),
    (["zero.stage=2", "zero.max_gathered=1"], "zero.max_gathered is 1 with zero.stage = 2: expected null"),
    (["zero.max_gathered=1"], "zero.max_gathered is 1 with zero.stage = 0: expected null"),
    (
        ["zero.stage=3", "zero.max_gathered=1", "schedule.name=dualpipe"],
        "zero.max_gathered is 1: expected at least 2, because one action on rank 0",
    ),
    (["zero.stage=3", "zero.prefetch=-1"], "zero.prefetch"),
    (["zero.stage=1", "zero.prefetch=2"], "zero.prefetch is 2 with zero.stage = 1: expected 1"),
]


@pytest.mark.parametrize(("overrides", "words"), BAD)
def test_contradicting_options_are_refused(overrides, words):
    with pytest.raises(PentadError) as caught:
        make_plan(load(None, overrides), "cpu")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_rank_without_replicas_is_not_sharded():
    config = load(None, ["zero.stage=3", "zero.max_gathered=1", "schedule.name=1f1b"])
    assert make_plan(config, "cpu") == make_plan(load(None, ["schedule.name=1f1b"]), "cpu")
    replicated = load(None, ["zero.stage=3", "mesh.dp=2", "elastic.min_ranks=4", "schedule.name=1f1b"])
    assert make_plan(replicated, "cpu").zero == 3
    fewer = shrunk_plan(replicated, make_plan(replicated, "cpu"), 4)
    assert fewer is not None
    assert fewer.zero == 0
    assert make_plan(load(None, ["zero.stage=1", "schedule.name=dualpipe"]), "cpu").zero == 1
