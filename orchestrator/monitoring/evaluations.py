"""Rows of eval.jsonl: what evaluations found, and which checkpoint is the best."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from pentad.workers.runtime.results import EvalResult

EVAL_KEYS = ("step", "time", "data", "loss", "perplexity", "tokens", "sequences", "seconds", "generation")


class Best(NamedTuple):
    """The checkpoint with the lowest loss: it is of `step` steps."""

    step: int
    loss: float


def evaluation_rows(step: int, results: Sequence[EvalResult], seconds: float, generation: int) -> list[dict[str, Any]]:
    """A row for each data set, of the weights after `step` steps. Losses are per token; null stands for a number that
    is not finite."""
    rows = []
    for each in results:
        loss = each.loss_sum / each.tokens if each.tokens else math.nan
        perplexity = math.exp(loss) if loss < 700 else math.inf
        found = [loss if math.isfinite(loss) else None, perplexity if math.isfinite(perplexity) else None]
        values = step, time.time(), each.name, *found, each.tokens, each.sequences, round(seconds, 3), generation
        rows.append(dict(zip(EVAL_KEYS, values, strict=True)))
    return rows


def best_of(rows: Sequence[dict[str, Any]], by: str | bool, saved: Collection[int]) -> Best | None:
    """The best of the checkpoints after `saved` steps that were evaluated, the first of equal ones: by the loss of the
    data set `by`, or by the mean loss of all data sets. None without any, or if `by` is false."""
    losses: dict[int, list[float]] = {}
    for row in rows if by else ():
        if row["step"] in saved and by in (True, row["data"]):
            losses.setdefault(row["step"], []).append(math.inf if row["loss"] is None else row["loss"])
    means = {step: sum(its) / len(its) for step, its in losses.items()}
    found = min(sorted(means), key=means.__getitem__, default=None)
    return None if found is None or means[found] == math.inf else Best(found, means[found])
