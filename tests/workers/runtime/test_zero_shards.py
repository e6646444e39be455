"""ZeRO over groups of the ranks that hold the same parameters, with replicas of each shard (arXiv 2205.00119), gives
the result of one process."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from bf16_sums import assert_sums_of_rounded_terms
from bits import same_bits
from exactness import assert_equals_one_process
from fleet import assemble
from fp8_plans import BLOCK, DELAYED, fp8_plan
from plans import SHALLOW, plan_on_mesh
from resume import assert_repeatable, run_and_save
from small_models import HEADS, MOE
from worker_processes import check_recovery

from pentad.schedules.spec.lora import LoraSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.checkpoint import checkpoint, shards

pytestmark = pytest.mark.timeout(120)
slow = pytest.mark.slow
SHALLOW_HEADS, SHALLOW_MOE = replace(HEADS, layers=4), replace(MOE, layers=4)
UNITS = {"unit_layers": 2}
LORA = {"lora": LoraSpec(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "o_proj"))}
TIED = {"model": replace(SHALLOW, tie_word_embeddings=True)}
FOUR: dict[str, int] = {"dp": 4}
MIRRORED = {"dp": 2, "pp": 2}
MESHES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("1f1b", FOUR, {}),
    ("1f1b", FOUR, UNITS),
    ("zb-v", FOUR, {"post_validation": True}),
    ("zb-h2", FOUR, {}),
    ("1f1b", {"dp": 2, "cp": 2}, {"model": SHALLOW_HEADS}),
    ("1f1b", {"dp": 2, "ep": 2}, {"model": SHALLOW_MOE}),
    ("dualpipe", MIRRORED, {}),
    ("dualpipe", MIRRORED, {"unit_layers": 1}),
    ("1f1b", FOUR, {"host_optimizer": True, **UNITS}),
    ("dualpipe", MIRRORED, TIED),
    ("1f1b", FOUR, LORA),
    ("dualpipev", MIRRORED, {**LORA, "unit_layers": 1}),
]
TWO_EACH = (0, 0, 1, 1)  # hosts of four ranks: replicas of a stage share one
ALWAYS = [(0, 2, 3), (5, 2, 1), (7, 2, 2)]  # mesh, shards and ZeRO stage


def plan_with(corpus: str, shards: int, zero: int, name: str, sizes: dict[str, int], **more: Any) -> Plan:
    options = MemoryOptions(zero=zero, reduce=more.pop("reduce", None))
    more = {"model": SHALLOW, **more}
    return plan_on_mesh(corpus, name, sizes, memory_options=options, zero_shards=shards, **more)


def cases() -> list[Any]:
    found = [(number, shards, zero) for number in range(len(MESHES)) for shards in (2, 4) for zero in (1, 2, 3)]
    fitting = [case for case in found if case[1] == 2 or MESHES[case[0]][1] == FOUR]
    return [pytest.param(*case, marks=[] if case in ALWAYS else [slow]) for case in fitting]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("mesh", "shards", "zero"), cases())
def test_shards_with_replicas_equal_one_process(fleet, corpus, mesh, shards, zero):
    name, sizes, more = MESHES[mesh]
    plan = plan_with(corpus, shards, zero, name, sizes, **more)
    assert_equals_one_process(fleet, plan, check_bytes=not plan.host_optimizer)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "sizes", "model"),
    [
        ("1f1b", FOUR, SHALLOW_HEADS),
        ("1f1b", {"dp": 2, "ep": 2}, SHALLOW_MOE),
        ("dualpipe", MIRRORED, SHALLOW_HEADS),
        ("1f1b", {"dp": 2, "tp": 2}, SHALLOW_HEADS),
    ],
)
def test_muon_with_shards_and_replicas_equals_one_process(fleet, corpus, name, sizes, model, zero):
    plan = plan_with(corpus, 2, zero, name, sizes, model=model)
    assert_equals_one_process(fleet, replace(plan, optimizer=replace(plan.optimizer, name="muon")))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "sizes", "more"),
    [
        ("1f1b", FOUR, UNITS),
        ("1f1b", {"dp": 2, "cp": 2}, {"model": SHALLOW_HEADS}),
        ("zb-v", FOUR, {"post_validation": True}),
        ("1f1b", FOUR, LORA),
        ("dualpipe", MIRRORED, {"unit_layers": 1}),
    ],
)
def test_shards_inside_each_of_two_hosts_are_copied_between_peers(fleet, corpus, name, sizes, more, zero):
    plan = plan_with(corpus, 2, zero, name, sizes, **more)
    plan = replace(plan, transport="peer", hosts=TWO_EACH)
    assert plan.transport_along("dp") == "peer"
    assert replace(plan, zero_shards=0).transport_along("dp") == "nccl"
    assert_equals_one_process(fleet, plan)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize(
    ("name", "sizes", "more"),
    [("1f1b", FOUR, {"unit_layers": 1}), ("dualpipe", MIRRORED, {}), ("zb-v", FOUR, {})],
)
def test_gradients_in_bfloat16_are_rounded_sums_of_groups(fleet, corpus, name, sizes, more, copied, zero):
    """The terms of a group are rounded, and then the sums of groups."""
    plan = plan_with(corpus, 2, zero, name, sizes, dtype="float32", reduce="microbatch" if zero > 1 else None, **more)
    plan = replace(plan, bf16_reduce=True)
    if copied:
        plan = replace(plan, transport="peer", hosts=TWO_EACH)
        assert plan.transport_along("dp") == "peer"
    assert_sums_of_rounded_terms(plan, [outcome.reductions for outcome in fleet.run(plan, [(0, 2)])])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("name", "sizes"), [("1f1b", FOUR), ("dualpipe", MIRRORED)])
@pytest.mark.parametrize("before", [0, 2])
def test_a_checkpoint_resumes_with_shards_and_without(fleet, corpus, tmp_path, before, name, sizes, zero):
    """It holds everything once, written by all ranks."""
    plans = [plan_with(corpus, shards, zero, name, sizes, dtype="float32") for shards in (before, 2 - before)]
    folder = checkpoint.folder_of(tmp_path, 1)
    outcomes = run_and_save(fleet, plans[0], 1, folder)
    opened = checkpoint.open_checkpoint(folder)
    stored = shards.read(opened, opened.tensors)
    files = {piece.file for pieces in opened.tensors.values() for piece in pieces}
    assert len(files) == sum(map(len, map(plans[0].param_shards_of, range(plans[0].mesh.size))))
    for expected in (outcomes, fleet.run(plans[1], [(1, 0)], restore=str(folder))):
        assert same_bits(assemble([outcome.state for outcome in expected], stored), stored)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "sizes", "more"),
    [("1f1b", FOUR, UNITS), ("dualpipe", MIRRORED, {}), ("1f1b", {"dp": 2, "ep": 2}, {"model": SHALLOW_MOE})],
)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_runs_with_shards_and_replicas_repeat_and_resume_bit_identically(
    fleet, corpus, tmp_path, name, sizes, more, zero
):
    assert_repeatable(fleet, plan_with(corpus, 2, zero, name, sizes, dtype="float32", **more), tmp_path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spec", [replace(each, gathers=True) for each in (DELAYED, BLOCK)])
def test_runs_in_8_bits_repeat_and_resume_bit_identically(fleet, corpus, tmp_path, spec):
    """With scales of the previous step, and with gathers in 8 bits."""
    sizes = {"dp": 4, "layers": 2, "microbatches": 1, "memory_options": MemoryOptions(zero=3), "zero_shards": 2}
    plan = fp8_plan(spec, "1f1b", {**sizes, "unit_layers": 1, "dtype": "float32"}, corpus)
    assert any(map(plan.size_in_8_bits, plan.param_shards)) and plan.num_zero_shards(plan.param_shards[0]) == 2
    assert_repeatable(fleet, plan, tmp_path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(
    ("name", "sizes", "zero", "more"),
    [
        ("1f1b", FOUR, 3, {}),
        ("zb-v", FOUR, 2, {"post_validation": True}),
        ("dualpipe", MIRRORED, 1, {}),
        ("1f1b", {"dp": 2, "cp": 2}, 3, {"model": SHALLOW_HEADS}),
    ],
)
def test_a_lost_rank_gets_its_shards_from_replicas(workers, corpus, name, sizes, zero, more, fault):
    """The run needs no checkpoint and ends with the bits of one without the loss."""
    check_recovery(workers, plan_with(corpus, 2, zero, name, sizes, dtype="float32", **more), 12, fault)
