"""memory.offload_fraction: auto takes the cheapest mix of device memory, host memory and recomputation that fits."""

from __future__ import annotations

import itertools
import random
from functools import cache
from pathlib import Path

import pytest

from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.planning import fit as host_fit
from pentad.orchestrator.planning.estimate import costs_of, memory, step_seconds
from pentad.orchestrator.planning.fit import device_memory
from pentad.orchestrator.planning.formatting import format_bytes
from pentad.orchestrator.planning.memory_tiers import Tier, cheapest
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.run import train
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.plan import Plan

WIDE = "hidden=4096 heads=32 kv_heads=8 ffn=14336 vocab=128256"
MODEL = [f"model.{word}" for word in (*WIDE.split(), "layers=16")]
COMMON = [*MODEL, "mesh.pp=4", "schedule.name=1f1b", "schedule.microbatches=8", "batch.global_batch_size=8"]
COMMON += ["batch.sequence_length=32768", "precision.deterministic=false", "memory.offload_fraction=auto"]


def config(*words: str) -> RunConfig:
    return load(None, [*COMMON, *words])


@cache
def planned(gib: float, *words: str) -> Plan:
    return make_plan(config(*words), "cuda", memory=device_memory("cuda", gib))


def needed(plan: Plan) -> list[float]:
    return [memory(plan, plan.mesh.move(0, pp=pp))["total"] / 2**30 for pp in range(plan.mesh.pp)]


def shares(plan: Plan) -> list[float]:
    return [max(plan.offload[unit] for unit in held) for held in plan.program.placement] if plan.offload else []


def seconds(plan: Plan) -> float:
    return step_seconds(simulate(plan.program, costs_of(plan)))


@pytest.mark.parametrize("seed", range(20))
def test_no_other_mixture_is_cheaper(seed: int) -> None:
    rng = random.Random(seed)
    tiers = [Tier(rng.uniform(0, 10), rng.choice([0.0, rng.uniform(0, 5)]), rng.uniform(0, 1)) for _ in range(3)]
    most = sum(tier.gain * tier.limit for tier in tiers)
    need = rng.uniform(0, 1.1) * most

    def cost(found: tuple[float, ...] | list[float]) -> float:
        return sum(share * tier.seconds for share, tier in zip(found, tiers, strict=True))

    found = cheapest(need, tiers)
    assert all(0 <= share <= tier.limit for share, tier in zip(found, tiers, strict=True))
    freed = sum(share * tier.gain for share, tier in zip(found, tiers, strict=True))
    assert freed == pytest.approx(min(need, most))
    for point in itertools.product(*([k / 12 * tier.limit for k in range(13)] for tier in tiers)):
        if sum(share * tier.gain for share, tier in zip(point, tiers, strict=True)) >= min(need, most) - 1e-9:
            assert cost(found) <= cost(point) + 1e-9


def test_only_ranks_that_lack_memory_offload_and_no_more_than_they_must() -> None:
    roomy, tight = planned(140, "memory.host_gib=400"), planned(71, "memory.host_gib=400")
    assert not any(roomy.offload)
    assert max(needed(roomy)) > 71 >= max(needed(tight))
    found = shares(tight)
    assert found == sorted(found, reverse=True) and found[0] > 0 == found[-1]
    for rank, share in enumerate(found):
        assert (share > 0) == (needed(roomy)[rank] > 71)
        assert share == 0 or needed(tight)[rank] > 71 - 3  # splitting a tensor may leave some unused
    assert seconds(tight) == pytest.approx(seconds(roomy), rel=0.01)


@pytest.mark.parametrize("host", [62, 67, 72])
def test_what_auto_offloads_fits_the_host_also_where_that_is_too_little(host: int) -> None:
    words = "mesh.pp=1", "memory.optimizer=host", f"memory.host_gib={host}", "memory.recompute=full"
    long = [*words, "batch.sequence_length=262144", "schedule.microbatches=1", "batch.global_batch_size=1"]
    plan = planned(60, *long)
    moved = memory(plan, 0)["host"] / 2**30
    assert max(needed(plan)) > 60
    host_fit.require_host(config(*long), plan)
    assert host_fit.host_bytes(plan, 0) / 2**30 > host - 0.5 and moved > 10


def test_layers_recompute_only_where_copies_cannot_be_hidden_or_the_host_is_full() -> None:
    words = "memory.recompute=attention", "memory.host_gib=400"
    assert "attention" not in planned(71, *words).recompute
    tighter, small = planned(34, *words), planned(71, words[0], "memory.host_gib=60")
    for plan, gib in ((tighter, 34), (small, 71)):
        assert "attention" in plan.recompute
        assert max(needed(plan)) <= gib
    assert any(mode == "none" for mode, held in zip(small.recompute, small.layers, strict=True) if held.numbers)


def test_rows_are_recomputed_in_finer_parts_than_layers() -> None:
    words = "memory.recompute=attention", "memory.host_gib=400"
    layers, rows = planned(34, *words), planned(34, *words, "memory.recompute_fraction=auto")
    assert 0 < rows.recompute_fraction < 1 == layers.recompute_fraction
    assert all(mode == "attention" for mode, held in zip(rows.recompute, rows.layers, strict=True) if held.numbers)
    assert max(needed(rows)) <= 34
    assert seconds(rows) < seconds(layers)


@pytest.mark.parametrize(
    ("name", "gib", "gain"), [("1f1b", 42, 0.06), pytest.param("interleaved", 42, 0.05, marks=pytest.mark.slow)]
)
def test_a_pipeline_takes_the_prefetch_with_which_a_step_is_shortest(name: str, gib: int, gain: float) -> None:
    """Copies that would be late among consecutive forwards are in time among the backwards that follow."""
    words = ["batch.sequence_length=8192", "memory.host_gib=400", f"schedule.name={name}", "model.layers=32"]
    words += ["schedule.microbatches=16", "batch.global_batch_size=16", "memory.unit_layers=1"]
    near, chosen = planned(gib, *words, "memory.offload_prefetch=1"), planned(gib, *words)
    assert max(map(max, (needed(near), needed(chosen)))) <= gib
    assert near.offload_prefetch == 1 < chosen.offload_prefetch
    assert seconds(chosen) < (1 - gain) * seconds(near)


def test_what_does_not_fit_with_everything_is_planned_with_everything_and_found_too_large() -> None:
    plan = planned(20, "memory.recompute=attention", "memory.host_gib=400")
    assert max(needed(plan)) > 20
    assert all(mode == "attention" for mode, held in zip(plan.recompute, plan.layers, strict=True) if held.numbers)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["memory.offload_fraction=1.0", "memory.host_gib=50"],
            "memory.offload_fraction is 1.0, with which 4 ranks of a host keep ",
        ),
        (
            ["memory.offload_fraction=0.0", "memory.optimizer=host", "memory.host_gib=40.5"],
            "memory.optimizer is host, with which 4 ranks of a host keep ",
        ),
    ],
)
def test_a_host_that_is_too_small_is_refused(words: list[str], sentence: str) -> None:
    chosen = config(*words)
    with pytest.raises(PentadError) as caught:
        host_fit.require_host(chosen, make_plan(chosen, "cuda"))
    gib = f"{chosen.memory.host_gib:g}"
    assert str(caught.value).startswith(sentence)
    assert str(caught.value).endswith(f"GiB, memory.host_gib = {gib}")
    host_fit.require_host(chosen, make_plan(chosen, "cpu"))  # on CPUs, the device's memory is the host's


def test_the_refusal_names_what_most_of_the_memory_is_for() -> None:
    chosen = config("memory.offload_fraction=0.02", "memory.host_gib=30", "memory.unit_layers=1")
    with pytest.raises(
        PentadError, match=r"^checkpoint.every_?\w* is .* of activations, .* of a checkpoint's copy each"
    ):
        host_fit.require_host(chosen, make_plan(chosen, "cuda"))


@pytest.mark.parametrize(
    ("word", "is_told"),
    [("memory.offload_fraction=1.0", True), ("memory.optimizer=host", True), ("memory.offload_fraction=0.0", False)],
)
def test_a_plan_for_hosts_of_unknown_size_says_that_they_were_not_checked(
    monkeypatch: pytest.MonkeyPatch, word: str, is_told: bool
) -> None:
    monkeypatch.setattr(host_fit, "local_gpus", lambda: 0)
    chosen = config("memory.offload_fraction=0.0", word)
    plan = make_plan(chosen, "cuda")
    needed = 4 * max(host_fit.host_bytes(plan, rank) for rank in range(4))
    expected = f"it was not checked that a host has the {format_bytes(needed)} that the 4 ranks of a host keep there"
    assert host_fit.host_note(chosen, plan) == (f"memory.host_gib is null, so {expected}" if is_told else "")
    assert not host_fit.host_note(config("memory.host_gib=1000", word), plan)


def test_without_a_configured_size_this_machine_counts_if_the_run_is_local(monkeypatch) -> None:
    monkeypatch.setattr(host_fit, "local_gpus", lambda: 4)
    monkeypatch.setattr(host_fit, "PINNABLE", 1e-6)
    chosen = config("memory.offload_fraction=0.5")
    with pytest.raises(PentadError, match=r"memory.offload_fraction is 0.5, .* expected at most .* of this machine$"):
        host_fit.require_host(chosen, make_plan(chosen, "cuda"))


def test_a_run_does_not_start_where_the_memory_of_its_host_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = config("memory.offload_fraction=0.5")
    plan = make_plan(chosen, "cuda")
    needed = 4 * max(host_fit.host_bytes(plan, rank) for rank in range(4))
    monkeypatch.setattr(host_fit, "free_bytes", lambda: needed)
    host_fit.require_free_memory(chosen, plan)
    monkeypatch.setattr(host_fit, "free_bytes", lambda: needed - 1)
    with pytest.raises(PentadError, match=r"memory.offload_fraction is 0.5, .* which this machine has free$"):
        host_fit.require_free_memory(chosen, plan)
    host_fit.require_free_memory(chosen, make_plan(chosen, "cpu"))  # on CPUs it counts as device memory
    monkeypatch.setattr(train, "first_plan", lambda config: plan)
    with pytest.raises(PentadError, match=r"memory.offload_fraction is 0.5, .* which this machine has free$"):
        train.train(chosen)


def test_free_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_fit, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_fit, "CGROUP", tmp_path)
    assert host_fit.free_bytes() is None
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 8 kB\n")
    assert host_fit.free_bytes() == 8192
    for name, text in {"max": "8000", "current": "7900", "stat": "inactive_file 7000"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert host_fit.free_bytes() == 7100


def test_auto_asks_for_the_memory_of_hosts_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_fit, "local_gpus", lambda: 0)
    with pytest.raises(PentadError, match=r"^memory.offload_fraction is auto: expected memory.host_gib besides"):
        planned(60)
