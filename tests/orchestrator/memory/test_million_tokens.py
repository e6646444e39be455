"""The page's plans of 7B at a million tokens, the case that MEMO measured."""

from __future__ import annotations

from paths import ROOT

from pentad.orchestrator.api.plans import planned
from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.formatting import format_bytes, format_percent

JOB, PAGE = ROOT / "deploy" / "jobs" / "llama-7b-1m.yaml", ROOT / "docs" / "memory.md"


def test_the_page_has_the_planned_bytes_and_mfu() -> None:
    page = PAGE.read_text()
    for gpu, fits in (("NVIDIA A800-SXM4-80GB", False), ("NVIDIA H200", True)):
        found = planned(load(JOB, ["memory.recompute=auto", f"cluster.gpu={gpu}"]), "cuda")
        row = next(line for line in page.splitlines() if line.startswith(f"| 8 x {gpu.split()[1].partition('-')[0]},"))
        assert found.fit.ok == fits
        assert format_bytes(found.fit.needed) in row and format_percent(found.mfu) in row
        assert found.chosen[0].partition("=")[2] in row
