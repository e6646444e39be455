"""Steps on thousands of GPUs, simulated with one replica."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from paths import ROOT
from scale import MODELS, measure, settings_of, table

ROOM = 77.0  # GiB of an H100 for tensors


@cache
def committed() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "tests" / "bench" / "results" / "scale.json").read_text())["models"]
    return found


@pytest.mark.timeout(60)
def test_committed_figures_are_what_the_script_computes() -> None:
    assert measure(MODELS["8B"], *settings_of(MODELS["8B"])["strong"][-1]) == committed()["8B"]["strong"][-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_all_committed_figures_are(name: str) -> None:
    model = MODELS[name]
    found = {kind: [measure(model, *each) for each in its] for kind, its in settings_of(model).items()}
    assert found == committed()[name]


@pytest.mark.parametrize("name", MODELS)
def test_more_replicas_lose_more_and_every_plan_fits(name: str) -> None:
    for rows in committed()[name].values():
        assert all(row["mfu"] > later["mfu"] for row, later in pairwise(rows))
        assert all(row["seconds"] == sorted(row["seconds"]) for row in rows)
        assert all(sum(row["limits"].values()) == pytest.approx(1, abs=1e-3) for row in rows)
        assert all(row["gib"] <= ROOM for row in rows)


def test_the_page_has_the_committed_figures() -> None:
    page = (ROOT / "docs" / "scale.md").read_text("utf-8")
    assert all(table(committed(), kind) in page for kind in ("weak", "strong"))
