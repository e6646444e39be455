"""The committed scores of the planner follow from what it predicts."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from paths import ROOT
from validation import FAMILIES, digest, errors, family, memory_errors, points, rates_for, score, spearman, table

from pentad.orchestrator.planning.estimate import flops_per_token

SAMPLE = {
    "vtrain-multi-node": (26, 100),
    "vtrain-single-node": (7,),
    "megatron-h100": (1,),
    "nanotron": (5,),
    "moe": (1, 4),
}


@cache
def committed() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "tests" / "bench" / "results" / "validation.json").read_text())
    return found


def test_scores_are_of_the_committed_constants() -> None:
    assert committed()["constants"] == digest()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", SAMPLE)
def test_committed_predictions_are_the_planners(name: str) -> None:
    rows, predicted = family(name).rows, committed()["families"][name]["predicted"]
    for number in SAMPLE[name]:
        assert rows[number].predicted(rates_for(rows[number])) == pytest.approx(predicted[number], rel=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_errors_follow_from_the_predictions(name: str) -> None:
    """Rows that constants were fitted on do not count."""
    found = committed()["families"][name]
    pairs = [(predicted, measured) for _, measured, predicted in points({name: found})]
    assert errors(pairs).items() <= found.items()
    assert found["scored"] == sum(not row.is_training and row.seconds is not None for row in family(name).rows) - len(
        found["not_expressed"]
    )


def test_the_page_has_the_committed_figures() -> None:
    assert table(committed()["families"]) in (ROOT / "docs" / "validation.md").read_text("utf-8")


def test_the_page_has_the_committed_errors_on_h100s() -> None:
    page = " ".join((ROOT / "docs" / "validation.md").read_text("utf-8").split())
    dense = ("megatron-h100", "torchtitan-bf16", "torchtitan-fp8", "megatron-bridge", "llama-3")
    pairs = [
        (row.facts["length"], (predicted, row.seconds or 0.0))
        for name in dense
        for row, predicted in zip(family(name).rows, committed()["families"][name]["predicted"], strict=True)
        if not row.is_training
    ]
    every = errors([pair for _, pair in pairs])
    short = errors([pair for length, pair in pairs if length <= 8192])
    assert f"p90 is {every['p90']:.1%}; the target".replace("%", " %") in page
    assert f"tokens it is {short['p90']:.1%}, median {short['median']:.1%}.".replace("%", " %") in page


def test_seconds_follow_from_the_mfu_of_the_source() -> None:
    """Converted with the source's count of FLOPs."""
    row = family("nanotron").rows[2]
    plan, _ = row.plans[0]
    work = plan.batch.tokens * flops_per_token(plan.model, plan.batch.sequence_length, causal=False)
    assert row.seconds is not None
    assert work / row.seconds / plan.mesh.size / 989e12 == pytest.approx(0.4522)


def test_spearman_of_orders() -> None:
    assert spearman([(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]) == 1
    assert spearman([(3.0, 10.0), (2.0, 20.0), (1.0, 30.0)]) == -1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAMILIES)
def test_committed_scores_are_what_the_script_computes(name: str) -> None:
    assert score(name) == committed()["families"][name]


@pytest.mark.slow
def test_memory_of_rows_that_have_it() -> None:
    assert memory_errors(family("bloom").rows) == committed()["families"]["bloom"]["memory"]
