"""Rows of eval.jsonl: the results of evaluations, and which checkpoint is the best."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.run_state import EvalView
from pentad.workers.runtime.results import EvalResult

EVAL_KEYS = ("step", "time", "data", "loss", "perplexity", "tokens", "sequences", "seconds", "generation")


def evaluation_state(config: RunConfig, rows: Sequence[dict[str, Any]], step: int) -> dict[str, Any]:
    """The fields of RunView about the evaluations of a run with `step` steps done; `rows` are those of eval.jsonl."""
    last = newest_evaluation(rows)
    views = tuple(EvalView(row["data"], row["step"], row["loss"]) for row in rows if row["step"] == last)
    following = config.eval.next_due(max(step, last + 1), config.run.steps) if config.data_sets else None
    return {"evaluations": views, "next_evaluation": following}


class Best(NamedTuple):
    """The checkpoint with the lowest loss, saved after `step` steps."""

    step: int
    loss: float


def evaluation_rows(step: int, results: Sequence[EvalResult], seconds: float, generation: int) -> list[dict[str, Any]]:
    """A row for each data set, for the weights after `step` steps. Losses are per token; None stands for a number that
    is not finite."""
    rows = []
    for each in results:
        loss = each.loss_sum / each.tokens if each.tokens else math.nan
        perplexity = math.exp(loss) if loss < 700 else math.inf
        found = [loss if math.isfinite(loss) else None, perplexity if math.isfinite(perplexity) else None]
        values = step, time.time(), each.name, *found, each.tokens, each.sequences, round(seconds, 3), generation
        rows.append(dict(zip(EVAL_KEYS, values, strict=True)))
    return rows


def newest_evaluation(rows: Sequence[dict[str, Any]]) -> int:
    """The step of the newest evaluation in the lines of eval.jsonl; -1 without any."""
    return max((row["step"] for row in rows), default=-1)


def best_of(rows: Sequence[dict[str, Any]], by: str | bool, saved: Collection[int]) -> Best | None:
    """The best evaluated checkpoint among those of the `saved` steps, by the loss on the data set `by`, or by the mean
    loss of all data sets if True; the earliest of equals. None if there is none with a finite loss, or `by` is False.
    """
    losses: dict[int, list[float]] = {}
    for row in rows if by else ():
        if row["step"] in saved and by in (True, row["data"]):
            losses.setdefault(row["step"], []).append(math.inf if row["loss"] is None else row["loss"])
    means = {step: sum(its) / len(its) for step, its in losses.items()}
    found = min(sorted(means), key=means.__getitem__, default=None)
    return None if found is None or means[found] == math.inf else Best(found, means[found])
