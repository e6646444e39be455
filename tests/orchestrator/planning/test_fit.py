"""`pentad plan` and what `train` refuses: whether there is room, and what context ranks have to do."""

from __future__ import annotations

import json
from pathlib import Path

from commands import Pentad, pentad

__all__ = ["pentad"]


def test_a_device_may_be_said_to_have_less(pentad: Pentad) -> None:
    assert pentad("plan", "--device", "cuda", "--memory", "1")[0] == 0
    status, out, _ = pentad("plan", "--device", "cuda", "--memory", "0.05")
    assert status == 1
    assert "of a device of 0.05 GiB, which has 51.2 MiB" in out


def test_a_run_that_does_not_fit_here_is_refused_before_anything_starts(pentad: Pentad, tmp_path: Path) -> None:
    sizes = ("model.hidden=32768", "model.ffn=131072", "model.layers=80", "cluster.device=cpu")
    status, out, err = pentad("train", *sizes)
    assert (status, out) == (1, "")
    assert err.startswith("pentad: run quickstart does not fit: all ranks together need ")
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_plan_shows_what_context_ranks_have_to_do(pentad: Pentad) -> None:
    cut = ("mesh.cp=4", "schedule.name=1f1b")
    assert "context ranks stand zigzag: the busiest does 1.000 times the least" in pentad("plan", *cut)[1]
    for way in ("ring", "all_gather", "ulysses"):
        facts = json.loads(pentad("plan", *cut, f"mesh.cp_method={way}", "model.kv_heads=8", "--json")[1])
        assert 1 <= facts["balance"] <= 1.05
