"""Recomputation that saves nothing or is not needed is reported, and ZeRO that needs more memory than a lower stage."""

from __future__ import annotations

import json

import pytest
from commands import Pentad

SIZES = ["model.hidden=1024", "model.heads=8", "model.kv_heads=8", "model.ffn=4096", "model.layers=6", "mesh.pp=1"]
BATCH = ["schedule.name=1f1b", "schedule.microbatches=2", "batch.global_batch_size=8", "batch.sequence_length=2048"]
GIVEN = ("plan", *SIZES, *BATCH, "model.vocab=4096", "--device", "cuda", "--json")


@pytest.mark.parametrize(
    ("words", "gib", "sentence"),
    [
        (["memory.recompute=full"], 80, "memory.recompute is full, but the run needs "),
        (["memory.recompute=full", "batch.sequence_length=16", "model.vocab=200000"], 80, "is full, which saves "),
        (["memory.recompute=none"], 80, ""),
        (["memory.recompute=auto"], 80, ""),
    ],
)
def test_what_is_recomputed_for_nothing_is_told(pentad: Pentad, words: list[str], gib: float, sentence: str) -> None:
    fits = json.loads(pentad(*GIVEN, "--memory", str(gib), *words)[1])["fits"]
    assert sentence in fits.get("note", "") and bool(sentence) == ("note" in fits)
    if sentence:
        assert " less without it, at assumed rates" in fits["note"]


def test_recomputation_that_the_run_needs_is_not(pentad: Pentad) -> None:
    without, needed = (
        json.loads(pentad(*GIVEN, f"memory.recompute={mode}")[1])["fits"]["needed"] for mode in ("none", "full")
    )
    gib = (without + needed) / 2 / 2**30
    assert "note" not in json.loads(pentad(*GIVEN, "memory.recompute=full", "--memory", f"{gib}")[1])["fits"]


def test_recomputation_for_the_sake_of_the_host_is_not(pentad: Pentad) -> None:
    given = *GIVEN, "memory.offload_fraction=1.0", "memory.recompute=attention", "--memory", "80"
    facts = json.loads(pentad(*given, "memory.host_gib=400")[1])
    assert "note" in facts["fits"]
    kept = facts["ranks"][0]["memory"]
    gib = (kept["host"] + kept["snapshot"]) * 1.01 / 2**30
    assert "note" not in json.loads(pentad(*given, f"memory.host_gib={gib}")[1])["fits"]


ZERO_MODEL = [
    "model.hidden=512",
    "model.heads=8",
    "model.kv_heads=8",
    "model.ffn=2048",
    "model.layers=16",
    "model.vocab=512",
]
ZERO_STEP = ["schedule.microbatches=8", "batch.global_batch_size=16", "memory.unit_layers=1"]
ZERO_GIVEN = ("plan", *ZERO_MODEL, *ZERO_STEP, "mesh.dp=2", "--device", "cuda", "--json")


@pytest.mark.parametrize(("name", "pp"), [("dualpipe", 2), ("dualpipev", 2), ("1f1b", 2), ("1f1b", 16)])
def test_zero_is_told_only_where_it_needs_more_than_the_first(pentad: Pentad, name: str, pp: int) -> None:
    words, needed = (f"schedule.name={name}", f"mesh.pp={pp}"), list[int]()
    for zero in (1, 2, 3) if pp == 2 else (1, 3):
        found = json.loads(pentad(*ZERO_GIVEN, *words, f"zero.stage={zero}")[1])["fits"]
        needed.append(found["needed"])
        is_told = found.get("note", "").startswith(f"zero.stage is {zero}, with which the run needs ")
        assert is_told == (needed[-1] > needed[0]) == (pp == 16 and zero == 3)
