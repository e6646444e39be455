"""Plans with `zero.shards`: groups of ranks that together hold all shards, and replicas of each shard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from paths import ROOT

from pentad.orchestrator.config.config import load
from pentad.orchestrator.config.errors import ConfigError
from pentad.orchestrator.monitoring.plan_view import facts_table
from pentad.orchestrator.planning.comm_volume import collective_bytes, padded_elements, transports
from pentad.orchestrator.planning.estimate import costs_of, memories, rates_of_plan, step_seconds
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.recovery.evictions import with_ranks_beside
from pentad.orchestrator.recovery.fence import RecoveryState, handed_over, is_complete, owned, sources
from pentad.orchestrator.recovery.placed_plans import shrunk_plan
from pentad.schedules.ir.instruction import Op, instructions_of
from pentad.schedules.passes.optimizer_pass import last_reductions
from pentad.schedules.simulate.costs import instruction_seconds
from pentad.schedules.simulate.rates import Links
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.plan import ParamShard, Plan

LLAMA_8B = ROOT / "deploy" / "jobs" / "llama-8b.yaml"
SMALL = ("schedule.name=1f1b", "schedule.microbatches=4", "batch.global_batch_size=64")
EXPERTS = tuple(
    f"model.{word}"
    for word in ("family=mixtral", "experts.num_experts=4", "experts.top_k=2", "experts.intermediate_size=64")
)


def plan_with(*words: str, device: str = "cuda", **more: Any) -> Plan:
    return make_plan(load(None, [*SMALL, *words]), device, **more)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_holders_in_one_group_are_what_null_says(stage: int) -> None:
    given = "mesh.dp=4", f"zero.stage={stage}"
    null, all_of_them = plan_with(*given), plan_with(*given, "zero.shards=4")
    assert null.program.hash == all_of_them.program.hash
    assert memories(null) == memories(all_of_them)
    assert collective_bytes(null, 1) == collective_bytes(all_of_them, 1)
    assert costs_of(null) == replace(costs_of(all_of_them), reduce_replicas=())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("mesh.dp=4", "zero.shards=3"),
            "zero.shards is 3: expected 2, 4 or null, since 4 ranks hold the same parameters",
        ),
        (("mesh.dp=2", "mesh.cp=4", "zero.shards=16"), "expected 2, 4, 8 or null, since 8 ranks"),
        (
            ("mesh.dp=2", "mesh.ep=2", *EXPERTS, "zero.shards=4"),
            "zero.shards is 4: expected 2 or null, since 2 ranks hold the same experts",
        ),
        (("mesh.ep=2", *EXPERTS, "zero.shards=2"), "expected null, since 1 ranks hold the same experts"),
        (("mesh.dp=4", "zero.shards=1"), "zero.shards is 1: expected at least 2"),
        (("mesh.dp=4", "zero.stage=0", "zero.shards=2"), "zero.shards is 2 with zero.stage = 0: expected null"),
    ],
)
def test_groups_that_ranks_do_not_fill_are_refused(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [*SMALL, "zero.stage=1", "mesh.pp=1", *words])
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_have_a_shard_of_so_many(stage: int) -> None:
    words = "mesh.dp=8", f"zero.stage={stage}"
    two, four, eight = (memories(plan_with(*words, f"zero.shards={shards}"))[0] for shards in (2, 4, 8))
    kinds = ["optimizer", "master", *(["gradients"] if stage > 1 else []), *(["parameters"] if stage > 2 else [])]
    for kind in kinds:
        assert two[kind] - four[kind] == pytest.approx(2 * (four[kind] - eight[kind]), rel=0.01), kind
        assert two[kind] > four[kind] > eight[kind]
    for kind in {"gradients", "parameters"} - set(kinds):
        assert two[kind] == pytest.approx(eight[kind], rel=0.01)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_gathers_and_scatters_stay_in_groups_and_sums_go_once_between_them(schedule: str, bf16: bool) -> None:
    """Volume: (n - 1) / n of N bytes on n ranks; and of a shard, twice that share over its replicas."""
    words = "mesh.dp=4", "mesh.pp=2", "zero.stage=3", "zero.shards=2", "zero.reduce=microbatch"
    plan = plan_with(*words, f"schedule.name={schedule}", f"precision.reduce={'bfloat16' if bf16 else 'float32'}")
    found, stream = collective_bytes(plan, 0), list(instructions_of(plan.program.streams[0]))
    scattered = [part.stage for part in stream if part.op is Op.REDUCE_SCATTER]
    assert len(scattered) > len(set(scattered)), "after every microbatch"
    itemsize, replicas = 2 if bf16 else 4, 4 if schedule == "dualpipe" else 2
    size = {stage: padded_elements(plan, ParamShard(stage)) for stage in plan.stages_of(0)}
    assert found["REDUCE_SCATTER"] == sum(size[stage] // 2 * itemsize for stage in scattered)
    summed = sum(size[stage] // 2 for stage in set(scattered))
    assert found["ALL_REDUCE"] == pytest.approx(2 * summed * (replicas - 1) / replicas * itemsize, rel=1e-3)
    gathered = [part.stage for part in stream if part.op is Op.ALL_GATHER]
    assert found["ALL_GATHER"] == sum(size[stage] // 2 * 2 for stage in gathered)


def test_the_last_scatter_of_each_stage_takes_the_time_of_the_sums_over_replicas() -> None:
    plan = plan_with("mesh.dp=16", "mesh.pp=2", "zero.stage=2", "zero.shards=4", "zero.reduce=microbatch")
    costs = costs_of(plan)
    assert all(each > 0 for each in costs.reduce_replicas)
    seconds, plain = (instruction_seconds(plan.program, each) for each in (costs, replace(costs, reduce_replicas=())))
    columns = plan.program.columns
    more = {columns.key(row): seconds[row] - plain[row] for row in range(columns.rows) if seconds[row] != plain[row]}
    last = {key for stream in plan.program.streams for key in last_reductions(stream)}
    assert more.keys() == last
    assert all(each == pytest.approx(costs.reduce_replicas[key.stage]) for key, each in more.items())


def test_gathers_on_a_host_take_less_time_than_between_hosts() -> None:
    words = "mesh.dp=16", "mesh.pp=1", "zero.stage=3"
    plan, inside = plan_with(*words), plan_with(*words, "zero.shards=2")
    assert (plan.transport_along("dp"), inside.transport_along("dp")) == ("nccl", "peer")
    assert transports(inside) == {"parameters": "peer", "replicas": "nccl"}
    assert all(a < b for a, b in zip(costs_of(inside).gather, costs_of(plan).gather, strict=True))


def test_groups_gain_where_the_network_is_slow() -> None:
    """The plans of docs/parallelism.md, on its network and on one with 25 Gbit/s per GPU."""
    words = ("cluster.rates=builtin", "cluster.gpu=NVIDIA H200", "mesh.tp=1", "mesh.dp=16", "zero.stage=3")
    sizes = "schedule.microbatches=2", "batch.global_batch_size=64", "cluster.device=cuda"
    seconds = dict[int, list[float]]()
    for shards in ("null", "8", "4"):
        plan = make_plan(load(LLAMA_8B, [*words, *sizes, f"zero.shards={shards}"]), "cuda", proved=False)
        for gigabits in (400, 25):
            rates = replace(rates_of_plan(plan), inter_host=Links.uniform(60e-6, gigabits / 8 * 1e9))
            seconds.setdefault(gigabits, []).append(step_seconds(simulate(plan.program, costs_of(plan, rates))))
    assert seconds[400] == pytest.approx([1.303, 1.315, 1.328], rel=1e-3)
    assert seconds[25] == pytest.approx([3.545, 2.272, 2.913], rel=1e-3)


def test_the_facts_have_shards_and_replicas() -> None:
    plan = plan_with("mesh.dp=16", "mesh.pp=1", "zero.stage=1", "zero.shards=8")
    cells = [str(cell) for column in facts_table(plan, costs_of(plan)).columns for cell in column.cells]
    assert "stage 1, 8 shards of a pipeline stage, 2 replicas of each" in cells
    assert any("peer copies for parameters, NCCL for replicas" in each for each in cells)


def test_a_state_is_complete_while_some_rank_has_each_part() -> None:
    plan = plan_with("mesh.dp=4", "mesh.pp=1", "zero.stage=3", "zero.shards=2", device="cpu")
    assert [is_complete(plan, RecoveryState(7, ranks)) for ranks in ((0, 1), (0, 3), (1, 2, 3))] == [True] * 3
    assert not any(is_complete(plan, RecoveryState(7, ranks)) for ranks in ((0, 2), (1, 3), (0,)))
    (shard,) = {each._replace(stage=0) for each in plan.param_shards}
    stages = range(plan.program.stages)
    assert sources(plan, (1, 2, 3)) == {(shard._replace(stage=stage), 0): 2 for stage in stages}
    assert sources(plan, (0, 3)) == {
        (shard._replace(stage=stage), part): 3 * part for stage in stages for part in (0, 1)
    }
    assert {rank: len(its) for rank, its in owned(plan, (0, 2, 3)).items()} == {0: len(stages), 3: len(stages)}
    parts = handed_over(plan, (0, 2, 3))
    assert parts[0] == parts[2] and not parts[0].keys() & parts[3].keys()
    assert {number for its in parts.values() for number in its} == set(range(2 * len(stages)))


@pytest.mark.parametrize(
    ("shards", "ranks", "expected"), [(2, 2, 2), (2, 1, 0), (4, 4, 4), (4, 2, 0), (2, 6, 2), (4, 6, 6)]
)
def test_a_smaller_mesh_has_no_fewer_shards_than_asked_for(shards: int, ranks: int, expected: int) -> None:
    """It then has 0, as many as its ranks, which are fewer."""
    words = "mesh.dp=8", "mesh.pp=1", "batch.global_batch_size=96", "schedule.microbatches=12", "elastic.min_ranks=1"
    config = load(None, [*SMALL, *words, "zero.stage=1", f"zero.shards={shards}"])
    plan = shrunk_plan(config, make_plan(config, "cpu"), ranks)
    assert plan is not None and plan.mesh.dp == ranks and plan.zero_shards == expected


def test_ranks_of_a_group_move_together() -> None:
    plan = plan_with("mesh.dp=4", "mesh.pp=1", "zero.stage=1", "zero.shards=2", hosts=(0, 0, 1, 1))
    assert with_ranks_beside([1], plan) == (0, 1) and with_ranks_beside([1, 2], plan) == (0, 1, 2, 3)
