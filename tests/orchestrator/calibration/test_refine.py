"""Measurements of a run refine a table of rates, so that plans predict the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import Pentad
from page_run import ended_run

from pentad.orchestrator.calibration.refine import Refined, refine
from pentad.orchestrator.config.config import load
from pentad.orchestrator.gpus.rate_table import RateTable, place_of, read_table, write_table
from pentad.orchestrator.monitoring.runfolder import RANK_TIMES
from pentad.orchestrator.page.ended_run import EndedRun
from pentad.orchestrator.planning.estimate import costs_of, simulated_seconds
from pentad.orchestrator.planning.hardware import rates_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.diagnosis import rank_times
from pentad.schedules.diagnosis.rank_times import RankTime
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import RECEIVES
from pentad.schedules.simulate.costs import RUNS_KERNELS, Costs
from pentad.schedules.simulate.rates import Rates
from pentad.schedules.spec.plan import Plan

GPU = "NVIDIA H200"
BIG = ("model.hidden=4096", "model.ffn=14336", "model.heads=32", "batch.sequence_length=4096", f"cluster.gpu={GPU}")
TIMED = {"F", "B", "W", "BW", "RECOMPUTE"}


def table(rates: Rates, gpu: str = GPU) -> RateTable:
    return RateTable(version=4, gpu=gpu, measured="2026-11-26", ranks=(2, 1), assumed=(), rates=rates)


def plan_of(*overrides: str) -> Plan:
    return make_plan(load(None, [*BIG, "cluster.rates=builtin", *overrides]), "cuda")


def times(plan: Plan, costs: Costs, step: int) -> tuple[RankTime, ...]:
    """Rank times reported for a step whose instructions have these costs."""
    found = dict[tuple[int, str, int], float]()
    for rank in range(plan.mesh.size):
        stream = plan.program.streams[plan.mesh.coordinates(rank).pp]
        for part in (part for action in stream for part in action.parts):
            if part.op in RUNS_KERNELS or part.op in RECEIVES or part.op.value == "STEP":
                key = rank, part.op.value, part.stage
                found[key] = found.get(key, 0.0) + costs.seconds(part)
    return tuple(RankTime(step, *key, seconds) for key, seconds in found.items())


def refined(plan: Plan, true: Rates, steps: int = 6) -> Refined:
    """A table of the assumed rates, refined by a run for which the `true` ones hold."""
    costs = costs_of(plan, true)
    seconds = [simulated_seconds(plan, rates=true)] * steps
    return refine(table(rates_of("cuda", GPU)), plan, [times(plan, costs, step) for step in range(steps)], seconds, "a")


@pytest.mark.parametrize(
    "overrides",
    [
        ("mesh.pp=2",),
        ("mesh.pp=2", "schedule.name=zb-h1", "memory.recompute=full"),
        ("mesh.pp=2", "mesh.dp=2", "zero.stage=1", "schedule.name=1f1b", "schedule.microbatches=4"),
        ("mesh.pp=1", "mesh.tp=2", "schedule.name=1f1b"),
    ],
)
@pytest.mark.parametrize("factor", [0.6, 1.5])
def test_rates_that_hold_are_found(overrides: tuple[str, ...], factor: float) -> None:
    plan, assumed = plan_of(*overrides), rates_of("cuda", GPU)
    true = replace(assumed.scaled("flops", factor), elementwise=factor * assumed.elementwise)
    true = replace(true, update=0.8 * true.update)
    found = refined(plan, true)
    assert (found.compute, found.update) == pytest.approx((factor, 0.8), rel=1e-6)
    assert found.after == pytest.approx(found.measured, rel=1e-6)
    assert abs(found.before / found.measured - 1) > 0.1
    assert found.table.rates.flops == pytest.approx(true.flops, rel=1e-6)
    assert found.table.refined == ("a",)


def test_transfers_that_took_longer_slow_the_links_that_they_use() -> None:
    plan, assumed = plan_of("mesh.pp=2"), rates_of("cuda", GPU)
    slow = replace(assumed.peer.send, bandwidth=assumed.peer.send.bandwidth / 3, latency=3 * assumed.peer.send.latency)
    found = refined(plan, replace(assumed, peer=replace(assumed.peer, send=slow)))
    assert found.transfer == pytest.approx(1 / 3, rel=1e-6)
    assert found.table.rates.peer.send.bandwidth == pytest.approx(slow.bandwidth)
    assert found.table.rates.intra_host == assumed.intra_host
    assert found.table.rates.inter_host == assumed.inter_host


def test_what_no_rates_explain_is_refused() -> None:
    plan, assumed = plan_of("mesh.pp=2"), rates_of("cuda", GPU)
    with pytest.raises(PentadError, match=r"^RUN is 'a', whose F, B and W take .* s a microbatch: expected between"):
        refined(plan, replace(assumed, layer_issue=(10.0, 20.0, 10.0)))
    with pytest.raises(PentadError, match=r"^RUN is 'a', which has 3 measured steps: expected at least 4$"):
        refined(plan, assumed, 3)


def test_the_command_refines_the_table_that_plans_use(
    pentad: Pentad, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENTAD_CACHE", str(tmp_path / "cache"))
    folder, *_ = ended_run(tmp_path)
    status, _, err = pentad("calibrate", "--from", str(folder))
    assert status == 1
    assert "of CPU, which has no table of rates: expected" in err
    assumed = rates_of("cpu")
    write_table(table(assumed, "CPU"), place_of("CPU"))
    plan = EndedRun(folder).bus.folder.plan
    costs = costs_of(plan, replace(assumed.scaled("flops", 0.5), elementwise=0.5 * assumed.elementwise))
    rank_times.save([each for step in range(7) for each in times(plan, costs, step)], folder / RANK_TIMES)
    status, out, _ = pentad("calibrate", "--from", str(folder), "--json")
    facts = json.loads(out)
    assert status == 0
    assert facts["factors"] == pytest.approx({"compute": 0.5, "update": 1.0, "transfer": 1.0})
    assert facts["path"] == str(place_of("CPU"))
    assert read_table(place_of("CPU"), "CPU").refined == (str(folder),)
    status, out, _ = pentad("calibrate", "--from", str(folder), "--out", str(tmp_path / "table.json"))
    assert status == 0
    assert "a step took" in out
    assert "compute: 1 times" in out or "compute: as the table has it" in out
    status, out, _ = pentad("plan", "--device", "cpu")
    assert f"measured 2026-11-26, refined by {folder}" in out.replace("\n ", " ")
    status, _, err = pentad("calibrate", "my.yaml", "--from", str(folder))
    assert status == 1
    assert "expected no configuration" in err
