"""ZeRO, recomputation and offloading on the command line: in programs, drawings and plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import SIZES, Pentad

from pentad.orchestrator.planning.estimate import ON_HOST
from pentad.schedules.compiler import compile_program
from pentad.schedules.draw.palette import op_style
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.schedule_spec import MemoryOptions, ScheduleOptions


def test_memory_options_are_in_the_program_and_its_drawings(pentad: Pentad, tmp_path: Path) -> None:
    more = ("--recompute", "0,2", "--max-resident", "2", "--zero", "3", "--max-gathered", "1", "--prefetch", "2")
    arguments = ("schedule", "interleaved", *SIZES, "--chunks", "2", *more, "--post-validation")
    status, out, _ = pentad(*arguments, "--json")
    facts = json.loads(out)
    memory_options = MemoryOptions(3, 2, 1, frozenset({0, 2}), 2.0)
    costs, options = Costs.uniform(8, chunks=2), ScheduleOptions(2)
    more_options: dict[str, Any] = {"memory_options": memory_options, "post_validation": True, "replicas": 2}
    program = compile_program("interleaved", 4, 8, costs=costs, options=options, **more_options)
    assert (status, facts["hash"]) == (0, program.hash)
    assert max(facts["peak_activations"]) <= 2
    status, out, _ = pentad(*arguments, "--svg", "a.svg", "--html", "a.html", "--grid")
    assert (status, out.count("R0")) == (0, 2)
    assert op_style("RECOMPUTE").light in (tmp_path / "a.svg").read_text()
    page = (tmp_path / "a.html").read_text()
    assert all(f'"{op}"' in page for op in ("RECOMPUTE", "OFFLOAD", "RELOAD", "ALL_GATHER", "FREE", "VALIDATE"))


def test_plan_shows_recomputed_stages_and_offloaded_bytes(pentad: Pentad) -> None:
    recompute = ("plan", "memory.recompute=full", "memory.recompute_stages=[0, 2]", "memory.unit_layers=100")
    status, out, _ = pentad(*recompute, "--json")
    facts = json.loads(out)
    assert (status, facts["costs"]["recompute"][::2]) == (0, facts["costs"]["forward"][::2])
    plain = json.loads(pentad("plan", "--json")[1])
    activations = [[rank["memory"]["activations"] for rank in plan["ranks"]] for plan in (facts, plain)]
    assert [less < more for less, more in zip(*activations, strict=True)] == [True, False, True, False]
    assert "recompute  full of stages 0, 2" in pentad(*recompute)[1]
    status, out, _ = pentad("plan", "memory.max_resident_microbatches=4", "--json")
    parts = json.loads(out)["ranks"][0]["memory"]
    assert parts["host"] > 0
    assert parts["total"] == sum(size for name, size in parts.items() if name not in ("total", *ON_HOST))
    assert "of a rank's activations are offloaded" in " ".join(
        pentad("plan", "memory.max_resident_microbatches=4")[1].split()
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--recompute", "4"), "--recompute is '4': expected all or stages of 0 to 3"),
        (("--recompute", "x"), "--recompute is 'x': expected all or stages of 0 to 3"),
        (("--max-resident", "0"), "--max-resident is 0: expected a number of microbatches greater than 0"),
        (
            ("--max-resident", "0.5"),
            "memory.max_resident_microbatches is 0.5: expected at least 2, which rank 0 saves at once",
        ),
        (("--zero", "4"), "--zero is 4: expected a stage of ZeRO, 0 to 3"),
        (("--max-gathered", "1"), "--max-gathered is 1 with --zero 0: expected at least 1 with"),
        (("--prefetch", "1"), "--prefetch is 1 with --zero 0: expected at least 0 with"),
    ],
)
def test_a_bad_value_is_reported_in_one_sentence_with_status_1(
    pentad: Pentad, arguments: tuple[str, ...], sentence: str
) -> None:
    status, out, err = pentad("schedule", "1f1b", *SIZES, *arguments)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert sentence in err
