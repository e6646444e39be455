"""Plans with data-aware groups: what ranks hold, what is refused, and the balance of the first steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from mixtures import random_corpus

from pentad.orchestrator.api.plans import planned
from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.balance import data_balance
from pentad.orchestrator.planning.estimate import costs_of, memory
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan
from pentad.workers.data.sources import open_dataset

CONFIG = """
run: {name: groups, seed: 1, steps: 3}
model: {family: llama, layers: 4, hidden: 64, heads: 4, kv_heads: 2, ffn: 96, vocab: 512}
mesh: {dp: 2, cp: 2}
schedule: {name: 1f1b, microbatches: 2}
batch: {global_batch_size: 8, sequence_length: 64}
data: {packing: documents, document_mask: true, balance: dynamic}
"""

EXPERTS = ["model.family=mixtral", *(f"model.experts.{each}" for each in ("num_experts=4", "top_k=2"))]
EXPERTS += [f"model.experts.{each}" for each in ("intermediate_size=32", "aux_loss_coef=0.1", "bias_update_rate=0.1")]
OVERLAPPED = ["mesh.pp=2", "schedule.name=dualpipev", "schedule.microbatches=4"]
EIGHT_BITS = [
    "precision.matmul=fp8-row",
    "model.hidden=128",
    "model.kv_heads=4",
    "model.ffn=256",
    "batch.sequence_length=256",
]


def plan_of(folder: Path, *overrides: str) -> Plan:
    path, corpus = folder / "config.yaml", folder / "corpus"
    if not path.exists():
        path.write_text(CONFIG)
        random_corpus(corpus, 1, 80, 64)
    return make_plan(load(path, [f"data.path={corpus}", f"data.cache={folder}", *overrides]), "cpu")


def test_ranks_have_room_for_more_than_their_even_share(tmp_path: Path) -> None:
    even, grouped, roomy = (
        plan_of(tmp_path, *each)
        for each in (["data.balance=none"], ["data.capacity_factor=1"], ["data.capacity_factor=1.6"])
    )
    assert (even.slice_tokens, grouped.slice_tokens, roomy.slice_tokens) == (64, 64, 104)
    assert grouped.batch.document_costs is not None and grouped.batch.document_costs.ring > 0
    held = [memory(plan, 0)["activations"] for plan in (grouped, roomy)]
    assert held[1] > 1.5 * held[0]
    assert costs_of(roomy) == costs_of(grouped), "a microbatch takes as long on average"


def test_steps_with_more_microbatches_have_programs_of_their_own(tmp_path: Path) -> None:
    given = ["mesh.pp=2", "schedule.microbatches=4"]
    plan = plan_of(tmp_path, *given, "data.capacity_factor=1", "data.microbatch_factor=1.6")
    assert plan.batch.longer == (6,), "whole rounds of the pipeline"
    longer = plan_of(tmp_path, *given, "data.microbatch_factor=4")
    assert longer.batch.longer == (8, 10, 14, 16)
    assert [each.microbatches for each in longer.programs] == [4, *longer.batch.longer]
    assert [longer.program_of(0, count) for count in (1, 4, 5, 8, 9, 16)] == [0, 0, 1, 1, 2, 4]
    assert longer.with_program(2).program == longer.programs[2]
    assert longer.with_program(2).batch.tokens == longer.batch.tokens
    ramped = plan_of(
        tmp_path,
        *given,
        "data.microbatch_factor=4",
        "batch.rampup=[{global_batch_size: 4, steps: 1}]",
        "schedule.microbatches=2",
    )
    assert [each.microbatches for each in ramped.programs] == [2, 1, 4, 6, 8]
    assert [ramped.program_of(*each) for each in ((0, 3), (1, 2), (1, 3))] == [1, 0, 2]


def test_the_balance_counts_the_microbatches_of_each_pipeline(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "data.capacity_factor=1", "data.microbatch_factor=2")
    dataset = open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed)
    found, least = data_balance(plan, dataset, 3), data_balance(plan_of(tmp_path, "data.capacity_factor=1"), dataset, 3)
    assert found.microbatches[0] <= 2 < found.microbatches[1] <= 4 and found.dynamic < least.dynamic
    config = load(tmp_path / "config.yaml", [f"data.path={tmp_path}/corpus", f"data.cache={tmp_path}"])
    text = str(planned(config, "cpu", 1.0))
    assert "pipelines of 2 to 2 microbatches" in text


def test_offloading_gives_ranks_room_for_longer_documents(tmp_path: Path) -> None:
    given = "model.layers=16", "memory.recompute=attention", "memory.recompute_fraction=0.5", "memory.unit_layers=1"

    def activations(share: float, factor: float) -> int:
        offload = f"memory.offload_fraction={share}", f"data.capacity_factor={factor}"
        return memory(plan_of(tmp_path, *given, *offload), 0)["activations"]

    held = [activations(share, 1.5) for share in (0.0, 0.5, 1.0)]
    assert held == sorted(held, reverse=True) and held[0] > activations(0.0, 1.0) >= held[2]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["mesh.pp=2", "schedule.name=zb-h1", "schedule.microbatches=4"],
        [*EXPERTS, "mesh.ep=2", "mesh.cp=1"],
    ],
)
def test_the_balance_is_that_of_the_groups_of_the_run(tmp_path: Path, overrides: list[str]) -> None:
    plan = plan_of(tmp_path, *overrides)
    dataset = open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed)
    found = data_balance(plan, dataset, 3)
    assert found.trained == "dynamic" and found.steps == 3 and 0 <= found.groups <= 1
    assert 1 - 1e-9 <= found.dynamic < 1.2
    other = data_balance(plan_of(tmp_path, "data.balance=none", *overrides), dataset, 3)
    assert other.trained == "fixed" and other[2:] == found[2:], "simulated as it would be trained"


def test_plan_says_how_even_the_data_is_once_it_is_packed(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    config = load(tmp_path / "config.yaml", [f"data.path={tmp_path}/corpus", f"data.cache={tmp_path}"])
    assert "is shown once a run has built or packed the corpus" in str(planned(config, "cpu", 1.0))
    open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed)
    found = planned(config, "cpu", 1.0, pools=[32])
    assert found.balance is not None and [each.ranks for each in found.balance.pools] == [32]
    text = str(found)
    assert f"the last rank ends at {found.balance.dynamic:.2f} times the mean" in text
    assert "of the least possible" in text and "simulated on 32 ranks: " in text
    assert found.facts()["balance"]["pools"][0]["ranks"] == 32


def test_no_way_to_deal_documents_ends_sooner_where_ranks_exchange_tokens_of_experts(tmp_path: Path) -> None:
    given = [*EXPERTS, "mesh.cp=1", "data.microbatch_factor=2", "data.capacity_factor=1"]
    alone, shared = (plan_of(tmp_path, *given, f"mesh.dp={4 // ep}", f"mesh.ep={ep}") for ep in (1, 4))
    dataset = open_dataset(alone.data, alone.batch, alone.model.vocab, alone.seed)
    first, second = (data_balance(plan, dataset, 3) for plan in (alone, shared))
    assert first.fixed < second.fixed and first.dynamic < second.dynamic <= second.packed
    assert second.microbatches[0] >= first.microbatches[0]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["mesh.cp_method=all_gather"], "mesh.cp_method is all_gather: expected ring"),
        (OVERLAPPED, "schedule.name is dualpipev, which overlaps microbatches"),
        (["memory.max_resident_microbatches=1"], "memory.max_resident_microbatches is 1: expected null"),
        (EIGHT_BITS, "precision.matmul is fp8-row: expected compute"),
        (
            [*EXPERTS, "mesh.ep=2", "mesh.dp=1", *OVERLAPPED],
            "schedule.name is dualpipev, which overlaps microbatches",
        ),
        (["data.packing=windows", "data.document_mask=false"], "data.document_mask is false: expected true"),
        (["elastic.check_every=2"], "elastic.check_every is 2: expected 0 for data.balance dynamic"),
        (["data.microbatch_factor=0.9"], "data.microbatch_factor is 0.9: expected at least 1"),
        (["data.capacity_factor=0.9"], "data.capacity_factor is 0.9: expected 1 to 100, or auto"),
    ],
)
def test_what_groups_do_not_support_is_one_sentence(tmp_path: Path, overrides: list[str], sentence: str) -> None:
    with pytest.raises(PentadError) as caught:
        plan_of(tmp_path, *overrides)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
