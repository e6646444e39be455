"""The memory of a rank over a simulated step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import Pentad

from pentad.orchestrator.config.config import load
from pentad.orchestrator.memory import curve
from pentad.orchestrator.memory.curve import ON_COMPUTE_LANE, memory_curves, planned_memory
from pentad.orchestrator.planning.estimate import costs_of, memories
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.instruction import instructions_of
from pentad.schedules.simulate.simulate import simulate

SIZES = ["model.layers=8", "cluster.device=cuda", "mesh.pp=2", "schedule.microbatches=8", "batch.global_batch_size=32"]
UNITS = ["memory.unit_layers=1", "mesh.dp=2"]


PLANS = [
    ["schedule.name=1f1b"],
    ["schedule.name=zb-h2", *UNITS, "zero.stage=1"],
    ["schedule.name=1f1b", *UNITS, "zero.stage=2"],
    ["schedule.name=zb-v", *UNITS, "zero.stage=3", "memory.recompute=attention"],
    ["schedule.name=dualpipe", *UNITS, "zero.stage=3"],
    ["schedule.name=dualpipev", "mesh.tp=2"],
    ["schedule.name=dualpipev"],
    ["schedule.name=1f1b", *UNITS, "zero.stage=3", "memory.max_resident_microbatches=1.5"],
    ["schedule.name=seq-1f1b", "optimizer.name=muon"],
]
plans = pytest.mark.parametrize("words", PLANS)


@plans
def test_the_highest_point_is_the_planned_peak(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(load(None, [*SIZES, *words]), "cuda")
    for samples in (480, 40):
        monkeypatch.setattr(curve, "MOST_SAMPLES", samples)
        for rank, found in enumerate(memory_curves(plan)):
            assert found.peak == memories(plan)[plan.mesh.move(0, pp=rank)]["total"]
            assert len(found.samples) <= max(samples, 40) + 1


@plans
def test_the_changes_of_instructions_add_up_to_the_planned_peak_and_to_nothing(words: list[str]) -> None:
    """In program order; and only instructions on the compute lane change memory."""
    plan = make_plan(load(None, [*SIZES, *words]), "cuda")
    found, row = planned_memory(plan), 0
    assert found.in_bytes and len(found.starts) == len(found.ends) == plan.program.columns.rows
    for pp, stream in enumerate(plan.program.streams):
        held = peak = found.held[pp]
        for part in instructions_of(stream):
            assert part.op in ON_COMPUTE_LANE or (found.starts[row], found.ends[row]) == (0, 0)
            peak = max(peak, held + found.starts[row])
            held += found.starts[row] + found.ends[row]
            assert held >= found.held[pp]
            row += 1
        assert (peak, held) == (memories(plan)[plan.mesh.move(0, pp=pp)]["total"], found.held[pp])


@pytest.mark.parametrize("zero", [2, 3])
def test_what_units_hold_fits_in_their_pools_and_ends_empty(zero: int) -> None:
    plan = make_plan(load(None, [*SIZES, *UNITS, "schedule.name=1f1b", f"zero.stage={zero}"]), "cuda")
    for found in memory_curves(plan):
        assert max(sample.gathered + sample.summed for sample in found.samples) <= found.pools
        assert any(sample.summed for sample in found.samples) and any(sample.gathered for sample in found.samples) == (
            zero == 3
        )
        last = found.samples[-1]
        assert (last.gathered, last.summed, sum(last.saved), last.workspace) == (0, 0, 0, 0)


def test_activations_are_saved_from_the_forward_of_a_unit_to_its_backward() -> None:
    plan = make_plan(load(None, [*SIZES, "memory.unit_layers=2", "schedule.name=gpipe"]), "cuda")
    found, spans = memory_curves(plan)[0], simulate(plan.program, costs_of(plan)).spans
    for index, unit in enumerate(found.units):
        forward, backward = (
            [span for span in spans if span.stage == unit.number and span.op == op] for op in ("F", "BW")
        )
        held = [sample.second for sample in found.samples if sample.saved[index] > 0]
        assert held and min(held) >= min(span.start for span in forward)
        assert max(held) <= max(span.end for span in backward)


def test_plan_writes_the_page(pentad: Pentad, tmp_path: Path) -> None:
    status, _, _ = pentad("plan", "mesh.dp=2", "--device", "cuda", "--html", "memory.html")
    page = (tmp_path / "memory.html").read_text()
    assert status == 0 and page.count("<script") == 2 and "quickstart: memory over a step" in page
    fullest = re.search(r"<dd>(\d+) \(dp0 pp(\d)\), ", page)
    assert fullest and int(fullest[1]) == 2 * int(fullest[2]) and f'"pp":{fullest[2]},' in page
    status, _, err = pentad("plan", "--device", "cuda", "--html", "nowhere/memory.html")
    assert (status, err.count("\n")) == (1, 1) and "--html is 'nowhere/memory.html'" in err
