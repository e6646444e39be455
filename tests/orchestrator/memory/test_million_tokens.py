"""The documented plans of 7B at a million tokens, the case that MEMO measured."""

from __future__ import annotations

from typing import Any

import pytest
from paths import ROOT

from pentad.orchestrator.api.plans import planned
from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning import planning
from pentad.orchestrator.planning.formatting import format_bytes, format_percent
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.program import Program

JOB, PAGE = ROOT / "deploy" / "jobs" / "llama-7b-1m.yaml", ROOT / "docs" / "memory.md"
ON_DEVICE = ("memory.recompute=auto", "memory.recompute_fraction=1.0", "memory.offload_fraction=0.0")
H200, slow = "cluster.gpu=NVIDIA H200", pytest.mark.slow
ROWS: list[tuple[str, ...]] = [(), ("memory.host_gib=1000",), ("memory.host_gib=500",), ON_DEVICE, (H200,)]
ROWS.append((*ON_DEVICE, H200))


@pytest.mark.parametrize("number", [pytest.param(k, marks=[slow] if k else []) for k in range(len(ROWS))])
def test_the_page_has_the_planned_shares_bytes_and_mfu(number: int) -> None:
    section = PAGE.read_text().partition("## A million tokens")[2]
    row = [line for line in section.splitlines() if line.startswith("|")][2 + number]
    found, has_host = planned(load(JOB, list(ROWS[number])), "cuda"), ON_DEVICE[0] not in ROWS[number]
    assert found.fit.ok == ("does not fit" not in row)
    shown = [format_bytes(found.fit.needed), format_percent(found.mfu)]
    if has_host:
        shares = found.plan.recompute_fraction, max(found.plan.offload)
        shown += [f"{format_percent(share)} {where}" for share, where in zip(shares, ("of the rows", "|"), strict=True)]
    else:
        shown.append(dict(each.split("=") for each in found.chosen)["memory.recompute"])
    assert [text for text in shown if text not in row] == []


def test_a_long_pipeline_is_planned_with_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that differ only in fractions share a program, and notes plan no more than they need: once it was 359."""
    compiled = list[str]()

    def counted(name: str, *given: Any, **options: Any) -> Program:
        compiled.append(name)
        return compile_program(name, *given, **options)

    monkeypatch.setattr(planning, "compile_program", counted)
    found = planned(load(JOB, ["mesh.pp=16", "model.layers=313"]), "cuda")
    assert found.fit.ok and any(found.plan.offload)
    assert len(compiled) <= 16
