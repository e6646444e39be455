"""data.capacity_factor: auto. The largest capacity that fits is chosen, and kept when the run resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
from capacity import LENGTHS, SHARES, planned_factor
from mixtures import random_corpus
from paths import ROOT

from pentad.orchestrator.api.plans import planned
from pentad.orchestrator.api.training import train
from pentad.orchestrator.config.config import RunConfig, dump, load
from pentad.orchestrator.memory.capacity import STEPS, USEFUL
from pentad.orchestrator.memory.choice import choose, with_choices
from pentad.orchestrator.monitoring.runfolder import with_kept_division
from pentad.orchestrator.planning.estimate import memory
from pentad.orchestrator.planning.fit import DeviceMemory, fit_of, fits_host, host_bytes
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.records.checkpoint_places import saved_config
from pentad.schedules.ir.errors import PentadError

CONFIG = """
run: {name: groups, seed: 1, steps: 3}
model: {family: llama, layers: 16, hidden: 256, heads: 4, kv_heads: 2, ffn: 768, vocab: 512}
mesh: {dp: 2, cp: 2}
schedule: {name: 1f1b, microbatches: 2}
batch: {global_batch_size: 4, sequence_length: 4096}
data: {path: builtin:pydoc, packing: documents, document_mask: true, balance: dynamic, capacity_factor: auto}
cluster: {device: cuda}
"""
EXPERTS = ("num_experts=4", "top_k=2", "intermediate_size=256")
CASES = {
    "nothing else": (),
    "recomputation": ("memory.recompute=attention", "memory.recompute_fraction=0.5"),
    "offloading": ("memory.offload_fraction=0.75", "memory.host_gib=100"),
    "a pipeline": ("mesh.pp=2", "schedule.name=zb-h1", "schedule.microbatches=4", "batch.global_batch_size=8"),
    "tensor ranks, ZeRO": ("mesh.tp=2", "zero.stage=3"),
    "experts": ("model.family=mixtral", *(f"model.experts.{each}" for each in EXPERTS), "mesh.ep=2", "mesh.dp=1"),
}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "config.yaml").write_text(CONFIG)
    return load(tmp_path / "config.yaml", [f"run.folder={tmp_path}"])


def needed(config: RunConfig, factor: float) -> int:
    plan = make_plan(load(config, [f"data.capacity_factor={factor}"]), "cuda")
    return max(memory(plan, rank)["total"] for rank in range(plan.mesh.size))


def room_between(config: RunConfig, share: float) -> DeviceMemory:
    """Memory between what ranks need for their even share of tokens (share 0) and for USEFUL times it (share 1)."""
    least, most = needed(config, 1.0), needed(config, USEFUL)
    return DeviceMemory(int(least + share * (most - least)), "of a test")


def chosen(config: RunConfig, room: DeviceMemory) -> float:
    factor = with_choices(config, "cuda", room).data.capacity_factor
    assert factor != "auto"
    return factor


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_the_chosen_capacity_fits_and_the_next_larger_one_does_not(config: RunConfig, case: str) -> None:
    config = load(config, CASES[case])
    for share in (0.2, 0.7):
        room = room_between(config, share)
        factor = chosen(config, room)
        assert 1 < factor < USEFUL
        assert needed(config, factor) <= room.bytes < needed(config, round(factor + 1 / STEPS, 2))


def test_no_capacity_that_fits_is_larger(config: RunConfig) -> None:
    """For memory that just fits one of many capacities up to USEFUL, or just does not."""
    factors = [number / STEPS for number in range(STEPS, int(USEFUL * STEPS) + 1, 25)]
    sizes = [needed(config, factor) for factor in factors]
    assert sizes == sorted(sizes)
    for factor, size in zip(factors, sizes, strict=True):
        assert chosen(config, DeviceMemory(size, "of a test")) >= factor
        assert chosen(config, DeviceMemory(size - 1, "of a test")) < max(factor, 1 + 1 / STEPS)
    assert chosen(config, DeviceMemory(2 * sizes[-1], "of a test")) == USEFUL
    assert chosen(config, DeviceMemory(sizes[0] // 2, "of a test")) == 1, "which does not fit either"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["attention", "none", "[mlp, core_attn]"])
def test_the_capacity_rises_with_what_is_offloaded(config: RunConfig, mode: str) -> None:
    config = load(config, [f"memory.recompute={mode}", "memory.host_gib=100", "memory.unit_layers=1"])
    room = room_between(config, 0.1)
    found = [chosen(load(config, [f"memory.offload_fraction={part / 8}"]), room) for part in range(0, 9, 2)]
    assert found == sorted(found) and found[0] < found[2] < found[-1]


def test_hosts_have_room_as_well(config: RunConfig) -> None:
    config = load(config, ["memory.offload_fraction=1.0", "memory.host_gib=100"])
    room = DeviceMemory(2 * needed(config, USEFUL), "of a test")
    kept = host_bytes(make_plan(load(config, ["data.capacity_factor=1.5"]), "cuda"), 0)
    tight = load(config, [f"memory.host_gib={4 * kept / 2**30}"])
    factor = chosen(tight, room)
    fits = [
        fits_host(tight, make_plan(load(tight, [f"data.capacity_factor={each}"]), "cuda"))
        for each in (factor, round(factor + 1 / STEPS, 2))
    ]
    assert factor == pytest.approx(1.5, abs=0.01) and fits == [True, False]
    found = planned(tight, "cuda", room.bytes / 2**30)
    assert found.capacity is not None and found.capacity.limit == "host"
    assert "they would keep more on their host than it has" in str(found)


def test_what_recomputes_is_chosen_for_the_even_share_and_the_capacity_for_what_is_left(config: RunConfig) -> None:
    given = load(config, ["data.capacity_factor=1.0", "memory.recompute=auto"])
    plain = needed(load(given, ["memory.recompute=none"]), 1.0)
    for share in (0.9, 1.1):
        room = DeviceMemory(int(share * plain), "of a test")
        alone, both = choose(given, "cuda", room), choose(load(config, ["memory.recompute=auto"]), "cuda", room)
        assert alone is not None and both is not None
        assert both.words[:-1] == alone.words and both.words[-1].startswith("data.capacity_factor=")
        assert fit_of(both.plan, room).ok and both.plan.batch.capacity >= alone.plan.batch.capacity


def test_plan_says_why_and_what_more_offloading_gives(config: RunConfig) -> None:
    config = load(config, ["memory.offload_fraction=0.5", "memory.host_gib=100"])
    room = room_between(config, 0.3)
    found = planned(config, "cuda", room.bytes / 2**30)
    assert found.capacity is not None and found.capacity.limit == "device"
    factor, more = found.capacity.factor, found.capacity.offloaded
    assert [*more] == [0.75, 1.0] and factor < more[0.75] < more[1.0]
    assert more[0.75] == chosen(load(config, ["memory.offload_fraction=0.75"]), room)
    tokens = f"a rank holds up to {found.plan.batch.capacity:,} tokens of a microbatch, {factor:.2f} times its even"
    text = " ".join(str(found).split())
    assert tokens in text and f"data.capacity_factor={factor}" in text
    assert f"by memory.offload_fraction: {more[0.75]:.2f} with 0.75, {more[1.0]:.2f} with 1" in text
    assert found.facts()["capacity"]["offloaded"] == {"0.75": more[0.75], "1": more[1.0]}
    assert "more would hardly balance documents better" in " ".join(str(planned(config, "cuda", 1000.0)).split())


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["data.balance=documents"], "data.capacity_factor is auto, but data.balance is documents, with which ranks"),
        (["data.capacity_factor=auto2"], "data.capacity_factor is 'auto2': expected 1 to 100, or auto"),
        (["data.capacity_factor=true"], "data.capacity_factor is true: expected 1 to 100, or auto"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(config: RunConfig, overrides: list[str], sentence: str) -> None:
    with pytest.raises(PentadError) as caught:
        load(config, overrides)
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)


def test_a_resumed_run_keeps_its_factor_on_other_devices(config: RunConfig, tmp_path: Path) -> None:
    assert with_kept_division(config) is config, "a new run"
    (tmp_path / "groups").mkdir()
    (tmp_path / "groups" / "config.yaml").write_text(dump(load(config, ["data.capacity_factor=1.37"])))
    assert with_kept_division(config).data.capacity_factor == 1.37
    assert with_kept_division(load(config, ["data.capacity_factor=1.5"])).data.capacity_factor == 1.5
    found = planned(config, "cuda", 1000.0)
    assert found.capacity is None and found.plan.batch.capacity == 2 * -(-1.37 * 2048 // 2)
    other = load(config, ["data.balance=none", "data.capacity_factor=1.25"])
    (tmp_path / "groups" / "config.yaml").write_text(dump(other))
    assert with_kept_division(config) is config, "its steps have had no groups"


def test_a_resumed_run_keeps_its_costs_with_other_rates(config: RunConfig, tmp_path: Path) -> None:
    config = load(config, ["data.capacity_factor=1.5"])
    chosen = with_choices(config, "cuda", DeviceMemory(2**60, "of a test"))
    first = make_plan(chosen, "cuda").batch.document_costs
    assert first is not None and chosen.data.document_costs == [first.quadratic, first.ring]
    (tmp_path / "groups").mkdir()
    (tmp_path / "groups" / "config.yaml").write_text(dump(chosen))
    other = load(config, ["cluster.gpu=NVIDIA L40S"])
    assert make_plan(other, "cuda").batch.document_costs != first
    assert make_plan(with_kept_division(other), "cuda").batch.document_costs == first


@pytest.mark.slow
def test_the_page_has_the_planned_factors() -> None:
    section = (ROOT / "docs" / "data.md").read_text().partition("#### How much room")[2]
    for length in LENGTHS:
        found = (planned_factor(length, share) for share in SHARES)
        cells = " | ".join("-" if factor is None else f"{factor:.2f}" for factor in found)
        assert f"| {length:,} | {cells} |" in section


@pytest.mark.slow
def test_a_run_takes_the_choice_and_records_it(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    small = ["model.layers=2", "model.hidden=32", "model.ffn=48", "batch.sequence_length=64", "cluster.device=cpu"]
    given = [*small, f"run.folder={tmp_path}", f"data.path={random_corpus(tmp_path / 'corpus', 1, 80, 64)}"]
    given += [f"data.cache={tmp_path}", "run.steps=2"]
    path = Path(train(load(tmp_path / "config.yaml", given), quiet=True).folder)
    assert saved_config(path).data.capacity_factor == USEFUL, "this machine has room"
    given += ["run.name=other"]
    train(load(tmp_path / "config.yaml", [*given, "data.capacity_factor=1.5"]), quiet=True)
    path = Path(train(load(tmp_path / "config.yaml", [*given, "run.steps=3"]), quiet=True).folder)
    assert saved_config(path).data.capacity_factor == 1.5
