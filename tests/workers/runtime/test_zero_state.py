"""Shards of a stage's state: the same bits in every run, whatever mesh saved them, and the bytes that are planned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fleet import assemble, buffer_bytes
from plans import plan_of
from post_validation_cases import assert_same_runs
from zero_state_cases import save_and_resume

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.comm_volume import traffic
from pentad.orchestrator.planning.estimate import memory
from pentad.orchestrator.planning.planning import make_plan, shrunk_plan
from pentad.orchestrator.run.regroup import RecoveryState, complete
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Key, Op, instructions_of
from pentad.schedules.passes.zero import gradient_slots, weight_slots
from pentad.schedules.spec.plan import ALIGNMENT, ParamShard
from pentad.schedules.spec.schedule_spec import MemoryOptions, ScheduleOptions
from pentad.schedules.spec.tensors import num_parameters
from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.manifest import Shard
from pentad.workers.model.stage import Stage
from pentad.workers.params.param_buffers import make_param_buffers
from pentad.workers.params.parameters import create_parameters
from pentad.workers.runtime.zero import ZeroShards

slow = pytest.mark.slow


def some(cases: list, often: set[int]) -> list:
    return [pytest.param(*case, marks=[] if index in often else [slow]) for index, case in enumerate(cases)]


RUNS = [("zb-h2", 2, 2, 4, 1), ("interleaved", 2, 2, 4, 3), ("dualpipe", 1, 4, 8, 2), ("1f1b", 4, 1, 2, 3)]


@pytest.mark.parametrize(("name", "dp", "pp", "m", "zero"), some(RUNS, {1}))
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=slow)])
def test_two_runs_and_a_resumed_one_are_bit_identical(fleet, corpus, tmp_path, name, dp, pp, m, zero, dtype):
    memory_options = MemoryOptions(zero=zero, max_gathered=1 if (name, zero) == ("interleaved", 3) else None)
    plan = plan_of(name, dp, pp, m, corpus, dtype, memory_options=memory_options)
    once, again = fleet.run(plan, [(0, 4)]), fleet.run(plan, [(0, 1), (1, 3)])
    later = save_and_resume(fleet, plan, checkpoint.folder_of(tmp_path, 2), 2, [(2, 2)])
    for a, b, c in zip(once, again, later, strict=True):
        assert a.state.keys() == b.state.keys() == c.state.keys()
        assert all(torch.equal(a.state[name], b.state[name]) for name in a.state)
        assert all(torch.equal(a.state[name], c.state[name]) for name in a.state)
        assert [(r.losses, r.grad_norm) for r in a.results] == [(r.losses, r.grad_norm) for r in b.results]
        assert [(r.losses, r.grad_norm) for r in a.results[2:]] == [(r.losses, r.grad_norm) for r in c.results]


AHEAD = [
    ("zb-h2", 2, 2, 4, 1),
    ("zb-h2", 2, 2, 4, 3),
    ("zb-v", 2, 2, 5, 2),
    ("dualpipe", 1, 4, 8, 3),
    ("1f1b", 4, 1, 2, 1),
]


@pytest.mark.parametrize("clip", [pytest.param(1e6, marks=slow), 0.5], ids=["never clipped", "at times"])
@pytest.mark.parametrize(("name", "dp", "pp", "m", "zero"), some(AHEAD, {0, 1}))
def test_a_step_ahead_of_its_norm_gives_the_bits_of_one_that_waits(fleet, corpus, name, dp, pp, m, zero, clip):
    ends = []
    for post_validation in (True, False):
        memory_options = MemoryOptions(zero=zero)
        plan = plan_of(name, dp, pp, m, corpus, "float32", clip=clip, post_validation=post_validation, memory_options=memory_options)
        ends.append(fleet.run(plan, [(0, 4), (4, 1)]))
    assert_same_runs(*ends)


MOVES = [((2, 2, 3), (1, 2, 0)), ((1, 2, 0), (2, 1, 3)), ((4, 1, 1), (2, 2, 2)), ((2, 1, 2), (4, 1, 3))]


@pytest.mark.parametrize(("before", "after"), some(MOVES, {0, 1}))
def test_any_mesh_and_stage_restores_what_another_saved(fleet, corpus, tmp_path, before, after):
    """Bit for bit, and the file is the one that a mesh without shards would have written."""
    ends = []
    for dp, pp, zero in (before, after):
        plan = plan_of("1f1b", dp, pp, 8 // dp, corpus, "float32", memory_options=MemoryOptions(zero=zero))
        ends.append(plan)
    folder = checkpoint.folder_of(tmp_path, 1)
    outcomes = fleet.run(ends[0], [(0, 1)], save=str(folder))
    shards = [Shard.from_plain(plain) for outcome in outcomes for plain in outcome.shards]
    checkpoint.commit(folder, step=1, shards=shards, meta={})
    saved = checkpoint.open_checkpoint(folder)
    stored = checkpoint.read(saved, saved.files)
    assert {shard.file for shard in shards} == {f"stage-{s:03d}.safetensors" for s in range(ends[0].program.stages)}
    for expected in (outcomes, fleet.run(ends[1], [(1, 0)], restore=str(folder))):
        found = assemble([outcome.state for outcome in expected], stored)
        assert found.keys() == stored.keys()
        assert all(torch.equal(found[name], stored[name]) for name in stored)


SIZES = [("1f1b", 1, 2, 4, None), ("1f1b", 2, 2, 4, None), ("zb-v", 2, 2, 4, None), ("1f1b", 4, 1, 2, None),
         ("dualpipe", 1, 4, 8, None), ("looped-bfs", 2, 2, 3, 4), ("interleaved", 2, 1, 4, 4)]  # fmt: skip


@pytest.mark.parametrize(("name", "dp", "pp", "m", "chunks"), SIZES)
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("post_validation", [False, True])
def test_what_is_allocated_is_what_is_planned(corpus, name, dp, pp, m, chunks, zero, dtype, post_validation):
    gathered = 1 if chunks and zero == 3 else None
    memory_options = MemoryOptions(zero=zero if dp > 1 or name == "dualpipe" else 0, max_gathered=gathered)
    plan = plan_of(name, dp, pp, m, corpus, dtype, chunks=chunks, memory_options=memory_options, post_validation=post_validation)
    for rank in range(plan.mesh.size):
        held = {at: create_parameters(plan, at, torch.device("cpu"), rank=rank, blank=True) for at in plan.param_shards_of(rank)}
        stages = {s: Stage(plan, s, make_param_buffers(plan, rank, s, held)) for s in plan.stages_of(rank)}
        shards = ZeroShards(plan, rank, stages)
        planned = memory(plan, rank)
        assert buffer_bytes(held, shards) == {
            kind: planned[kind] for kind in ("parameters", "gradients", "optimizer", "master")
        }


@pytest.mark.parametrize("holders", [1, 2, 4])
@pytest.mark.parametrize("zero", range(4))
def test_bytes_are_those_of_the_paper(corpus, zero, holders):
    """Section 5 of the paper for mixed precision, with gradients in four bytes: 2N + 4N + 12N, and what is cut."""
    plan = plan_of(
        "1f1b", holders, 1, 8 // holders, corpus, "bfloat16", memory_options=MemoryOptions(zero=zero if holders > 1 else 0)
    )
    size = plan.num_zero_shards(ParamShard(0)) * plan.zero_shard_size(ParamShard(0))
    assert 0 <= size - num_parameters(plan.model) < holders * ALIGNMENT, "shards are filled up"
    cut = [holders if zero >= stage else 1 for stage in (1, 2, 3)]
    found = memory(plan, 0)
    assert found["master"] + found["optimizer"] == 12 * size // cut[0]
    whole = [4 * size if cut[1] > 1 else 0, 2 * size if cut[2] > 1 else 0]  # one stage a rank: there for its time
    assert found["gradients"] - whole[0] == 4 * size // cut[1]
    assert found["parameters"] - whole[1] == 2 * size // cut[2]


def test_volumes_are_those_of_the_paper(corpus):
    """2N a step, and 3N where weights go between forward and backward: all stages but the last twice."""
    elements = {}
    for zero in range(4):
        memory_options = MemoryOptions(zero=zero, max_gathered=1 if zero == 3 else None)
        plan = plan_of("looped-bfs", 2, 2, 3, corpus, chunks=4, memory_options=memory_options)
        sent = traffic(plan, 0)
        counts = [p.op for p in instructions_of(plan.program.streams[0]) if p.op in (Op.ALL_GATHER, Op.REDUCE_SCATTER)]
        assert counts.count(Op.ALL_GATHER) == (0, 4, 4, 7)[zero]
        assert counts.count(Op.REDUCE_SCATTER) == (0, 4, 4, 4)[zero]
        elements[zero] = sum(sent.values()) / 8
    sizes = [num_parameters(plan.model, *plan.layers[stage]) for stage in plan.stages_of(0)]
    filled = [2 * plan.zero_shard_size(ParamShard(stage)) for stage in plan.stages_of(0)]
    assert all(0 <= more - size < 2 * ALIGNMENT for size, more in zip(sizes, filled, strict=True))
    assert elements[0] == sum(sizes)  # (n - 1) / n of 2N
    assert elements[1] == elements[2] == sum(filled)
    assert elements[3] == pytest.approx((3 * sum(filled) - filled[-1]) / 2)


TURNS = [("looped-bfs", 2, 6, 3), ("looped-bfs", 4, 8, 2), ("interleaved", 2, 4, 4), ("interleaved-zb", 4, 8, 3),
         ("zb-v", 4, 8, None), ("dualpipe", 4, 8, None), ("gpipe", 1, 3, None)]  # fmt: skip


@pytest.mark.parametrize(("name", "p", "m", "chunks"), TURNS)
@pytest.mark.parametrize("gathered", [None, 1, 2])
@pytest.mark.parametrize("post_validation", [False, True])
def test_no_buffer_has_two_stages_at_once(name, p, m, chunks, gathered, post_validation):
    """Who takes a buffer over waits for who leaves it, and there are no more weights than are ever needed at once, nor
    gradients, and one more that is scattered meanwhile."""
    gathered = None if name == "dualpipe" else gathered
    program = compile_program(
        name,
        p,
        m,
        replicas=2,
        memory_options=MemoryOptions(zero=3, max_gathered=gathered),
        options=ScheduleOptions(chunks),
        post_validation=post_validation,
    )
    for rank, stream in enumerate(program.streams):
        weights, (gradients, _) = weight_slots(program, rank), gradient_slots(program, rank)
        whole: dict[int, tuple[int, int]] = {}
        summed: dict[int, tuple[int, Key | None]] = {}
        most = [0, 0]
        for part in instructions_of(stream):
            if part.op is Op.ALL_GATHER:
                slot = weights[part.stage, part.microbatch]
                assert slot not in whole
                whole[slot] = part.stage, part.microbatch
            elif part.op is Op.FREE:
                assert whole.pop(weights[part.stage, part.microbatch]) == (part.stage, part.microbatch)
            elif part.op in (Op.W, Op.BW):
                slot = gradients[part.stage, 0]
                stage, left = summed.get(slot, (part.stage, None))
                assert stage == part.stage or (left is not None and left in part.waits)
                summed[slot] = part.stage, None
            elif part.op is Op.REDUCE_SCATTER:
                summed[gradients[part.stage, 0]] = part.stage, part.key
            most = [max(most[0], len(whole)), max(most[1], sum(left is None for _, left in summed.values()))]
        assert len(set(weights.values())) == most[0]
        assert len(set(gradients.values())) == min(len(gradients), most[1] + 1)


def test_a_lost_rank_takes_its_shard_along(corpus):
    plan = plan_of("1f1b", 2, 2, 4, corpus)
    cut = replace(plan, zero=1)
    assert complete(plan, RecoveryState(7, (0, 3)))
    assert complete(plan, RecoveryState(7, (0, 1, 2)))
    assert not complete(cut, RecoveryState(7, (0, 1, 2)))
    assert complete(cut, RecoveryState(7, (0, 1, 2, 3)))
    assert not complete(cut, RecoveryState(-1, (0, 1, 2, 3)))


BAD = [
    (["zero.stage=4"], "zero.stage"),
    (["zero.stage=2", "zero.max_gathered=1"], "zero.max_gathered is 1 with zero.stage = 2: expected null"),
    (["zero.max_gathered=1"], "zero.max_gathered is 1 with zero.stage = 0: expected null"),
    (
        ["zero.stage=3", "zero.max_gathered=1", "schedule.name=dualpipe"],
        "zero.max_gathered is 1: expected at least 2 (rank 0 of schedule dualpipe",
    ),
    (["zero.stage=3", "zero.prefetch=-1"], "zero.prefetch"),
    (["zero.stage=1", "zero.prefetch=2"], "zero.prefetch is 2 with zero.stage = 1: expected 1"),
]


@pytest.mark.parametrize(("overrides", "words"), BAD)
def test_what_makes_no_sense_is_refused_in_one_sentence(overrides, words):
    with pytest.raises(PentadError) as caught:
        make_plan(load(None, overrides), "cpu")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_others_to_share_with_a_rank_keeps_all():
    config = load(None, ["zero.stage=3", "zero.max_gathered=1", "schedule.name=1f1b"])
    alone = make_plan(config, "cpu")
    assert alone == make_plan(load(None, ["schedule.name=1f1b"]), "cpu")
    wide = load(None, ["zero.stage=3", "mesh.dp=2", "elastic.min_ranks=4", "schedule.name=1f1b"])
    assert make_plan(wide, "cpu").zero == 3
    fewer = shrunk_plan(wide, make_plan(wide, "cpu"), 4)
    assert fewer is not None
    assert fewer.zero == 0
    assert make_plan(load(None, ["zero.stage=1", "schedule.name=dualpipe"]), "cpu").zero == 1
