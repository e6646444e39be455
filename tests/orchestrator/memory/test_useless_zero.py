"""A stage of ZeRO that needs more memory than the first one is reported: where all units are held in full at once."""

from __future__ import annotations

import json

import pytest
from commands import Pentad

MODEL = [
    "model.hidden=512",
    "model.heads=8",
    "model.kv_heads=8",
    "model.ffn=2048",
    "model.layers=16",
    "model.vocab=512",
]
STEP = ["schedule.microbatches=8", "batch.global_batch_size=16", "memory.unit_layers=1"]
GIVEN = ("plan", *MODEL, *STEP, "mesh.dp=2", "--device", "cuda", "--json")
CASES = [(name, zero) for name in ("dualpipe", "dualpipev", "1f1b") for zero in (1, 2, 3)]


@pytest.mark.parametrize(("name", "zero", "pp"), [*((*case, 2) for case in CASES), ("1f1b", 3, 16)])
def test_only_where_it_needs_more_than_the_first(pentad: Pentad, name: str, zero: int, pp: int) -> None:
    words = f"schedule.name={name}", f"mesh.pp={pp}"
    found, first = (json.loads(pentad(*GIVEN, *words, f"zero.stage={stage}")[1])["fits"] for stage in (zero, 1))
    is_told = found.get("note", "").startswith(f"zero.stage is {zero}, with which the run needs ")
    assert is_told == (found["needed"] > first["needed"]) == (pp == 16)
