"""Messages inside layers take as long in simulated timelines as in the costs of their instructions."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path

import pytest
from commands import Pentad
from paths import ROOT

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.cost_model import layer_messages
from pentad.orchestrator.planning.estimate import costs_of, even_piece, rates_of_plan
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.simulation.layer_spans import LANE, planned_messages, with_layer_spans
from pentad.schedules.simulate.simulate import simulate

JOB = ROOT / "deploy" / "jobs" / "llama-8b.yaml"
MOE = ROOT / "deploy" / "jobs" / "qwen3-30b-a3b.yaml"
WORDS = ("batch.global_batch_size=32", "cluster.rates=builtin", "cluster.gpu=NVIDIA H200", "schedule.microbatches=4")
CASES = [
    (JOB, "mesh.tp=4", "mesh.pp=2"),
    (JOB, "mesh.tp=2", "mesh.cp=2", "mesh.pp=2", "memory.recompute=full"),
    (JOB, "mesh.tp=1", "mesh.cp=4", "memory.recompute=selective"),
    (MOE, "mesh.ep=8", "mesh.pp=2", "mesh.dp=1", "schedule.name=zb-h1"),
    (JOB, "mesh.tp=1", "mesh.pp=2"),
]


@pytest.mark.parametrize("case", CASES)
def test_spans_last_as_long_as_the_messages_that_costs_count(case: tuple[Path | str, ...]) -> None:
    path, *words = case
    plan = make_plan(load(Path(path), [*WORDS, *map(str, words)]), "cuda", proved=False)
    costs = costs_of(plan)
    plain = simulate(plan.program, costs)
    found = with_layer_spans(plain, plan, costs)
    assert (found.makespan, found.bubble()) == (plain.makespan, plain.bubble())
    added = found.spans[len(plain.spans) :]
    assert all(span.lane == LANE for span in added)
    for of in (span for span in plain.spans if span.op in ("F", "B", "BW")):
        its = [span for span in added if (span.rank, span.name.split()[0]) == (of.rank, of.name)]
        phase = "F" if of.op == "F" else "B"
        messages = list(layer_messages(plan.model, plan.layers[of.stage], even_piece(plan), rates_of_plan(plan), phase))
        for kind in ("hidden", "seconds"):
            lengths = [span.end - span.start for span in its if span.name.endswith("hidden") == (kind == "hidden")]
            assert sum(lengths) == pytest.approx(sum(getattr(each, kind) for each in messages), abs=1e-9)
        exposed = [span for span in its if not span.name.endswith("hidden")]
        assert all(of.start - 1e-9 <= span.start <= span.end <= of.end + 1e-9 for span in exposed)
        if exposed:
            assert exposed[-1].end == pytest.approx(of.end)


@pytest.mark.parametrize("case", CASES)
def test_what_is_planned_of_an_op_and_stage_is_what_the_spans_of_each_instruction_take(
    case: tuple[Path | str, ...],
) -> None:
    path, *words = case
    plan = make_plan(load(Path(path), [*WORDS, *map(str, words)]), "cuda", proved=False)
    costs = costs_of(plan)
    plain = simulate(plan.program, costs)
    inside = defaultdict[tuple[int, str, str], list[float]](lambda: [0.0, 0.0])  # exposed, hidden
    for span in with_layer_spans(plain, plan, costs).spans[len(plain.spans) :]:
        name, axis, *_ = span.name.split()
        inside[span.rank, name, axis][span.name.endswith("hidden")] += 1e9 * (span.end - span.start)
    planned = {each[:3]: each[3:] for each in planned_messages(plan)}
    expected = set()
    for of in plain.spans:
        for axis in ("tp", "cp", "ep"):
            if (of.rank, of.name, axis) not in inside:
                continue
            expected.add((of.op, of.stage, axis))
            takes, *parts = planned[of.op, of.stage, axis]
            assert parts == pytest.approx(inside[of.rank, of.name, axis], abs=1)
            assert takes == pytest.approx(1e9 * (of.end - of.start), abs=1)
    assert planned.keys() == expected and bool(expected) == (plan.mesh.size > plan.mesh.pp * plan.mesh.dp)


def test_the_trace_of_a_plan_has_them(pentad: Pentad, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    status, _, _ = pentad("plan", str(JOB), "--device", "cuda", "mesh.tp=4", *WORDS[1:], "--trace", str(trace))
    assert status == 0
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"compute", LANE} <= threads
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert any(name.endswith("tp all-gather, hidden") for name in names)
