"""ZeRO-3 gathers matrices in 8 bits: a run has the bits of one that gathers them in the compute dtype and casts them
afterwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from bits import same_bits
from evaluations import with_eval
from exactness import state_like
from fleet import Outcome, assemble
from fp8_plans import BLOCK, DELAYED, EXPERTS, LATENT, MIXTURE, SHARED, TENSOR, WIDE, WIDE_EXPERTS, fp8_plan
from resume import assert_repeatable, save_and_resume
from worker_processes import call_all, start_run

from pentad.orchestrator.planning.estimate import fp8_weights, memory
from pentad.schedules.passes.zero_buffers import WEIGHT_KINDS, sharded_stages, weight_pool
from pentad.schedules.spec.model import Fp8Spec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.schedules.spec.tensors import tensors
from pentad.workers.checkpoint import checkpoint

POWERS = replace(BLOCK, power_of_two=True, gradients="e5m2")
CASES: list[tuple[Fp8Spec, str, dict[str, Any]]] = [
    (BLOCK, "1f1b", {"dp": 2, "layers": 1}),
    (TENSOR, "1f1b", {"dp": 2, "layers": 1}),
    (POWERS, "1f1b", {"dp": 4, "layers": 2, "microbatches": 2}),
    (BLOCK, "1f1b", {"dp": 3, "layers": 2, "microbatches": 2}),
    *((spec, "1f1b", {"dp": 2, "layers": 3, "unit_layers": 1, "max_gathered": 2}) for spec in (BLOCK, TENSOR)),
    (BLOCK, "1f1b", {"dp": 4, "layers": 2, "unit_layers": 1, "microbatches": 2}),
    (TENSOR, "1f1b", {"dp": 2, "tp": 2, "layers": 2, "unit_layers": 1}),
    (BLOCK, "1f1b", {"cp": 2, "tp": 2, "layers": 2}),
    (EXPERTS, "1f1b", {"dp": 2, "layers": 2, "model": WIDE_EXPERTS}),
    (EXPERTS, "1f1b", {"dp": 2, "ep": 2, "layers": 2, "unit_layers": 1, "model": WIDE_EXPERTS, "max_gathered": 3}),
    (BLOCK, "1f1b", {"ep": 2, "layers": 3, "model": MIXTURE, "max_gathered": 1}),
    (TENSOR, "1f1b", {"ep": 2, "layers": 3, "model": MIXTURE, "unit_layers": 1}),
    (replace(TENSOR, shared_experts=True), "1f1b", {"ep": 2, "layers": 2, "model": SHARED}),
    (replace(BLOCK, skip_first=1, skip_last=1), "interleaved", {"pp": 2, "dp": 2, "max_gathered": 1}),
    (BLOCK, "zb-v", {"pp": 2, "dp": 2, "recompute": "full", "max_gathered": 1}),
    (TENSOR, "dualpipe", {"pp": 2, "microbatches": 4}),
    (BLOCK, "dualpipev", {"pp": 2, "dp": 2, "model": LATENT}),
    (DELAYED, "1f1b", {"pp": 2, "dp": 2}),
    (replace(BLOCK, head=True), "1f1b", {"dp": 2, "layers": 2, "model": WIDE, "unit_layers": 1}),
]


def plan_with(
    spec: Fp8Spec, name: str, sizes: dict[str, Any], corpus: str, *, gathers: bool = True, dtype: str = "float32"
) -> Plan:
    """No gradient is clipped, as partial sums of the norm depend on the layout of shards, and terms of gradients are
    added in the order of ranks, whatever the layout."""
    sizes = {**sizes, "clip": 1e9, "dtype": dtype}
    options = MemoryOptions(zero=3, max_gathered=sizes.pop("max_gathered", None))
    plan = fp8_plan(replace(spec, gathers=gathers), name, {**sizes, "memory_options": options}, corpus)
    return replace(plan, bf16_reduce=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("spec", "name", "sizes"), [pytest.param(*case, marks=[pytest.mark.slow] * (i > 1)) for i, case in enumerate(CASES)]
)
def test_bits_are_those_of_weights_that_are_cast_after_the_gather(fleet, corpus, spec, name, sizes):
    plan = plan_with(spec, name, sizes, corpus, gathers=True)
    assert any(plan.size_in_8_bits(shard) for shard in plan.param_shards)
    want = fleet.run(plan_with(spec, name, sizes, corpus, gathers=False), [(0, 3)])
    assert_same_bits(fleet.run(plan, [(0, 3)]), want, plan=plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "sizes"),
    [(BLOCK, {"dp": 2, "layers": 2, "unit_layers": 1}), (replace(TENSOR, power_of_two=True), {"dp": 2, "tp": 2})],
)
def test_bits_in_bfloat16_are_those_of_weights_that_are_cast_after_the_gather(fleet, corpus, spec, sizes):
    """Master weights are rounded to bfloat16 and then cast."""
    plans = (plan_with(spec, "1f1b", sizes, corpus, gathers=gathers, dtype="bfloat16") for gathers in (True, False))
    assert_same_bits(*(fleet.run(plan, [(0, 3)]) for plan in plans), plan=plan_with(spec, "1f1b", sizes, corpus))


@pytest.mark.slow
def test_matrices_that_muon_updates_have_the_same_bits(fleet, corpus):
    found = []
    for gathers in (True, False):
        plan = plan_with(BLOCK, "1f1b", {"dp": 2, "tp": 2, "layers": 2}, corpus, gathers=gathers)
        plan = replace(plan, optimizer=replace(plan.optimizer, name="muon"))
        found.append(fleet.run(plan, [(0, 3)]))
    assert_same_bits(*found, plan=plan)


@pytest.mark.parametrize("spec", [BLOCK, pytest.param(TENSOR, marks=pytest.mark.slow)])
def test_copies_of_peers_have_the_bits_of_process_groups(fleet, corpus, spec):
    """Replicas of a stage are on one host."""
    plan = plan_with(spec, "1f1b", {"dp": 2, "pp": 2, "layers": 2, "microbatches": 2, "max_gathered": 1}, corpus)
    copied = replace(plan, transport="peer", hosts=(0, 0, 1, 1))
    assert copied.transport_along("dp") == "peer"
    for a, b in zip(fleet.run(plan, [(0, 2), (2, 1)]), fleet.run(copied, [(0, 2), (2, 1)]), strict=True):
        assert [each.losses for each in a.results] == [each.losses for each in b.results]
        assert same_bits(a.state, b.state)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "sizes"), [(BLOCK, {"dp": 2, "pp": 2}), (TENSOR, {"dp": 2, "layers": 2})])
def test_repeated_and_resumed_runs_are_bit_identical(fleet, corpus, tmp_path, spec, sizes):
    assert_repeatable(fleet, plan_with(spec, "1f1b", sizes, corpus), tmp_path)


@pytest.mark.slow
def test_a_run_resumes_with_weights_gathered_in_another_dtype(fleet, corpus, tmp_path):
    """Checkpoints hold master weights whatever is gathered, and are read into another layout of shards, too."""
    narrow, wide = (plan_with(BLOCK, "1f1b", {"dp": 2, "layers": 2}, corpus, gathers=each) for each in (True, False))
    want = fleet.run(wide, [(0, 3)])
    for before, after in ((narrow, wide), (wide, narrow)):
        folder = checkpoint.folder_of(tmp_path / str(before.program.hash[:8]), 2)
        found = save_and_resume(fleet, after, folder, 2, [(2, 1)], before=before)
        assert_same_bits(found, want, plan=wide, steps=slice(2, 3))


@pytest.mark.slow
def test_evaluations_have_the_bits_of_weights_that_are_cast_after_the_gather(fleet, corpus):
    """Also before the first step, when nothing else has cast weights, and after the last."""
    sizes = {"dp": 2, "layers": 2, "unit_layers": 1}
    plans = [with_eval(plan_with(BLOCK, "1f1b", sizes, corpus, gathers=each), 4) for each in (True, False)]
    (narrow, *_), (wide, *_) = (fleet.run(plan, [(0,), (0, 2), (2,)]) for plan in plans)
    assert [each.data_sets for each in narrow.evaluations] == [each.data_sets for each in wide.evaluations]


@pytest.mark.parametrize(
    "sizes", [{"dp": 2, "layers": 2, "unit_layers": 1}, pytest.param({"dp": 4, "layers": 2}, marks=pytest.mark.slow)]
)
def test_allocated_bytes_are_planned(fleet, corpus, sizes):
    """Matrices have no shard in the compute dtype, and take 1 byte an element where they are gathered."""
    found = {}
    for gathers in (True, False):
        plan = plan_with(BLOCK, "1f1b", {**sizes, "microbatches": 2}, corpus, gathers=gathers, dtype="bfloat16")
        for rank, outcome in enumerate(fleet.run(plan, [(0, 1)])):
            planned = memory(plan, rank) | {"parameters": memory(plan, rank)["parameters"] - forms(plan, rank)}
            assert outcome.bytes == {kind: planned[kind] for kind in outcome.bytes}
        found[gathers] = planned["parameters"]
    assert found[True] < 0.6 * found[False]


def forms(plan: Plan, rank: int) -> int:
    """The planned bytes of casts and transposes of gathered weights."""
    sizes, pool = plan.program.sizes, weight_pool(plan.program, 0, sharded_stages(plan.program, 0))
    return fp8_weights(plan, rank, min(1.0, sum(pool.elements) / sum(sum(each[:WEIGHT_KINDS]) for each in sizes)))


def assert_same_bits(found: list[Outcome], want: list[Outcome], *, plan: Plan, steps: slice = slice(None)) -> None:
    for a, b in zip(found, want, strict=True):
        assert [each.losses for each in a.results] == [each.losses for each in b.results[steps]]
    like = state_like({tensor.name: torch.empty(tensor.shape) for tensor in tensors(plan.model)})
    assert same_bits(*(assemble([each.state for each in outcomes], like) for outcomes in (found, want)))


@pytest.mark.slow
def test_ranks_agree_on_what_they_have_gathered(workers, corpus):
    """Before the first step and later; a matrix has a digest of its bytes, the results of a microbatch have two."""
    plan, ranks = plan_with(BLOCK, "1f1b", {"dp": 2, "layers": 2, "unit_layers": 1}, corpus), workers[:2]
    start_run(ranks, plan)
    digests = list[int]()
    for step in (0, 2):
        if step:
            call_all(ranks, "run", 0, step)
        one, other = call_all(ranks, "check", step)
        names = {name for name in one.state if name.startswith("weights.")}
        assert {f"weights.{tensor.name}" for tensor in tensors(plan.model)} == names
        assert all(one.state[name] == other.state[name] for name in names)
        assert one.first == one.second == other.first
        digests.append(one.state["weights.layers.1.mlp.down"])
    assert 0 not in digests and digests[0] != digests[1]
    call_all(ranks, "close")
