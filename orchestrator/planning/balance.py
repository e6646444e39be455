"""How evenly the documents of the first steps divide over the ranks: as the run will do it, and as planners would."""

from __future__ import annotations

from statistics import fmean
from typing import NamedTuple

import numpy as np

from pentad.orchestrator.planning.estimate import document_costs
from pentad.schedules.search.batch_planner import Balance, balanced, dynamic
from pentad.schedules.spec.plan import Plan
from pentad.workers.data.samples import Dataset

STEPS = 4  # that are looked at


class DataBalance(NamedTuple):
    """Time of the busiest rank over that with all work divided equally, the mean of `steps` steps: of sequences as they
    are drawn, of the same sequences dealt to replicas and microbatches by cost, and of documents on as many ranks as
    each needs. The run does what `trained` says, 'fixed' or 'packed'; the others are simulated."""

    steps: int
    trained: str
    fixed: float
    packed: float
    dynamic: float


def data_balance(plan: Plan, dataset: Dataset, steps: int) -> DataBalance:
    """Of the first STEPS of `steps` steps, at least 1. Context ranks share a sequence evenly; rings cost nothing."""
    batch, costs = plan.batch, document_costs(plan.model, plan.batch.sequence_length)
    capacity, pool = batch.micro_batch_size * batch.sequence_length, batch.replicas * plan.mesh.cp
    found = list[tuple[float, float, float]]()
    for step in range(min(STEPS, steps)):
        rows = dataset.document_lengths(step)
        seconds = costs.rows(rows, batch.sequence_length)
        work = seconds.reshape(batch.replicas, -1).sum(1)
        dealt = balanced([1] * len(rows), seconds, batch.micro_batch_size, batch.replicas).balance
        groups = dynamic(np.concatenate(rows).tolist(), -(-capacity // plan.mesh.cp), pool, costs).balance
        drawn = Balance(work, float(work.max()), dealt.bound)
        found.append((drawn.max_over_mean, dealt.max_over_mean, groups.max_over_mean))
    fixed, packed, grouped = (fmean(each) for each in zip(*found, strict=True))
    return DataBalance(len(found), "fixed" if batch.document_costs is None else "packed", fixed, packed, grouped)
