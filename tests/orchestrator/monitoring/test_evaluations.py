"""Rows of eval.jsonl, and the choice of the best checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.evaluations import EVAL_KEYS, Best, best_of, evaluation_rows
from pentad.orchestrator.monitoring.runfolder import RunFolder
from pentad.orchestrator.planning.planning import make_plan
from pentad.workers.runtime.results import EvalResult


def rows_of(losses: dict[int, tuple[float, float]]) -> list[dict]:
    """Evaluations of the data sets a and b, by step."""
    return [
        row
        for step, (a, b) in losses.items()
        for row in evaluation_rows(step, [EvalResult("a", 8 * a, 8, 1), EvalResult("b", 4 * b, 4, 2)], 0.25, 1)
    ]


def test_a_row_has_the_loss_per_token_and_its_perplexity() -> None:
    first, second = rows_of({20: (2.0, 3.0)})
    assert tuple(first) == EVAL_KEYS
    assert (first["step"], first["data"], first["loss"], first["tokens"], first["sequences"]) == (20, "a", 2.0, 8, 1)
    assert first["perplexity"] == pytest.approx(math.e**2) and second["loss"] == 3.0


@pytest.mark.parametrize(("loss", "found"), [(math.nan, (None, None)), (1e4, (1e4, None))])
def test_what_is_not_finite_is_null(loss: float, found: tuple) -> None:
    (row,) = evaluation_rows(0, [EvalResult("a", 8 * loss, 8, 1)], 0.1, 1)
    assert (row["loss"], row["perplexity"]) == found
    json.dumps(row, allow_nan=False)


def test_the_best_checkpoint_is_saved_and_evaluated_and_the_first_of_equal_ones() -> None:
    rows = rows_of({4: (2.0, 9.0), 8: (3.0, 3.0), 12: (2.0, 4.0), 16: (1.0, 1.0)})
    saved = {4, 8, 10, 12}
    assert best_of(rows, "a", saved) == Best(4, 2.0)
    assert best_of(rows, "b", saved) == Best(8, 3.0)
    assert best_of(rows, True, saved) == Best(8, 3.0)  # (3 + 3) / 2 as well as (2 + 4) / 2
    assert best_of(rows, True, {10}) is best_of(rows, False, saved) is None
    assert best_of(rows_of({4: (math.nan, 1.0)}), "a", {4}) is None


def test_a_run_that_rewinds_forgets_later_evaluations(tmp_path: Path) -> None:
    config = load(None, [f"run.folder={tmp_path}", "checkpoint.keep_best=holdout", *EVALUATED])
    with RunFolder(config, make_plan(config, "cpu")) as folder:
        for row in rows_of({4: (2.0, 2.0), 8: (1.0, 1.0)}):
            folder.evaluated([row | {"data": "holdout"}])
        assert folder.best(8) == Best(8, 1.0) and folder.best(4) == Best(4, 2.0)
        folder.rewind(8)
        assert len(folder.evaluations()) == 4
        folder.rewind(7)
        assert {row["step"] for row in folder.evaluations()} == {4}


EVALUATED = ["data.holdout=0.1", "eval.every=4", "checkpoint.every=4"]
