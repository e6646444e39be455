"""The balance of a plan is computed from the documents that its steps read."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mixtures import mixed
from plans import plan_on_mesh

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.balance import data_balance, require_pools
from pentad.orchestrator.planning.estimate import flops_per_token
from pentad.orchestrator.planning.layout import document_costs
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.rates import AttentionRates
from pentad.schedules.spec.batch import DocumentCosts
from pentad.schedules.spec.data import Packing
from pentad.workers.data.sources import open_dataset, open_prepared

BALANCED = ["data.balance=documents", "data.packing=documents", "data.document_mask=true"]


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_balance_is_of_the_samples_that_steps_read(tmp_path: Path, packing: Packing) -> None:
    plan = plan_on_mesh(mixed(tmp_path, packing), "gpipe", {"dp": 2, "cp": 2})
    dataset = open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed)
    work = []
    for source, index in zip(*(each.tolist() for each in dataset.rows(0)), strict=True):
        read = np.diff([*dataset.sample(source, index).document_starts, 8]).tolist()
        work.append(read)
    lengths = [row.tolist() for row in dataset.document_lengths(0)]
    assert all(read[: len(each)] == each and sum(each) <= 8 for read, each in zip(work, lengths, strict=True))
    ring = costs = document_costs(plan)
    halves = [sum(two_ranks(ring, n) for row in half for n in row) for half in (work[:8], work[8:])]
    found = data_balance(plan, dataset, 1)
    even = costs.alone([n for row in lengths for n in row]).sum() / 4
    assert found.steps == 1 and found.fixed == pytest.approx(max(halves) / even)
    assert found.fixed >= found.packed - 1e-12
    assert min(found.packed, found.dynamic) >= 1 - 1e-12 and found.gap >= -1e-12


def two_ranks(costs: DocumentCosts, length: int) -> float:
    return float(costs.shared([length], np.array([2]))[0])


def test_another_pool_has_the_same_documents_for_each_replica(tmp_path: Path) -> None:
    plan = plan_on_mesh(mixed(tmp_path, "documents"), "gpipe", {"dp": 2, "cp": 2})
    dataset = open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed)
    same, twice, many = data_balance(plan, dataset, 1, (4, 8, 64)).pools
    alone = data_balance(plan, dataset, 1)
    assert same == (4, alone.fixed, alone.packed, alone.dynamic, alone.gap)
    assert twice.ranks == 8 and twice.fixed == pytest.approx(alone.fixed), "its one step, twice"
    assert many.packed <= many.fixed and many.dynamic <= many.packed * (1 + 1e-9)
    both = data_balance(plan, dataset, 2)
    assert data_balance(plan, dataset, 2, (8,)).pools[0].fixed >= both.fixed - 1e-12, "the last of all steps"


@pytest.mark.parametrize(
    ("mesh", "document_mask", "sentence"),
    [
        ({"dp": 2, "cp": 2}, True, "--pool is 3: expected a multiple of mesh.cp = 2"),
        ({"ep": 2, "cp": 2}, True, "--pool is 3: expected a multiple of mesh.cp x mesh.ep = 4"),
        ({"dp": 2}, False, "data.document_mask is false: expected true for --pool"),
    ],
)
def test_a_pool_that_cannot_be_is_one_sentence(
    tmp_path: Path, mesh: dict[str, int], document_mask: bool, sentence: str
) -> None:
    plan = plan_on_mesh(replace(mixed(tmp_path, "documents"), document_mask=document_mask), "gpipe", mesh)
    with pytest.raises(PentadError) as caught:
        require_pools(plan, (3,))
    assert str(caught.value) == sentence


def test_costs_of_a_document_are_the_planned_seconds_of_training_on_it() -> None:
    """Attention has five products in B for two in F. On a GPU where it reaches half the FLOP/s of other products, its
    share is twice as large."""
    config = load(Path("deploy/jobs/llama-8b.yaml"), ["mesh.tp=1", "batch.sequence_length=32768"])
    model = config.model_spec("bfloat16")
    plan = make_plan(config, "cuda")
    assert plan.rates is not None
    fast = replace(plan.rates, elementwise=math.inf, memory=math.inf)
    half = ((1.0, fast.flops / 2),)
    slow = replace(fast, attention=(AttentionRates(128, half, half),))
    by_flops = flops_per_token(model, 32768) / flops_per_token(model, 1) - 1
    for rates, times in ((fast, 1.0), (slow, 2.0)):
        costs = document_costs(replace(plan, rates=rates))
        share = costs.quadratic * 32768
        assert share == pytest.approx(times * (1 + 2.5) / 3 * by_flops, rel=0.01)
        assert costs.linear == 1.0 and costs.ring > 0


def test_given_costs_are_those_of_the_plan() -> None:
    config = load(Path("deploy/jobs/llama-1b.yaml"), [*BALANCED, "data.document_costs=[3.0e-5, 0.02]"])
    assert make_plan(config, "cuda").batch.document_costs == DocumentCosts(3e-5, 1.0, 0.02)


@pytest.mark.parametrize("value", ["[1.0]", "[1.0, -1.0]", "[1.0, true]", "[1.0, .inf]", "often"])
def test_costs_that_are_none_are_refused_in_one_sentence(value: str) -> None:
    with pytest.raises(PentadError) as caught:
        load(Path("deploy/jobs/llama-1b.yaml"), [*BALANCED, f"data.document_costs={value}"])
    assert str(caught.value).startswith("data.document_costs is ")
    assert str(caught.value).endswith("expected two numbers, at least 0, such as [2.0e-5, 0.01], or auto")


def test_nothing_is_packed_to_look_at_it(tmp_path: Path) -> None:
    plan = plan_on_mesh(mixed(tmp_path, "documents"), "gpipe", {"dp": 2})
    assert open_prepared(plan.data, plan.batch, plan.model.vocab, plan.seed) is None
    open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed)
    assert open_prepared(plan.data, plan.batch, plan.model.vocab, plan.seed) is not None
