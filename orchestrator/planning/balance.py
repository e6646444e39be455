"""How evenly the documents of the first steps divide over the ranks: as the run will do it, and as planners would."""

from __future__ import annotations

from statistics import fmean
from typing import NamedTuple

from pentad.orchestrator.planning.estimate import document_costs
from pentad.orchestrator.planning.layout import grouped
from pentad.schedules.search.batch_planner import Balance, balanced
from pentad.schedules.search.hybrid_planner import hybrid
from pentad.schedules.spec.plan import Plan
from pentad.schedules.verify.check_groups import check_rings, check_shares
from pentad.workers.data.samples import Dataset

STEPS = 4  # that are looked at


class DataBalance(NamedTuple):
    """Time of the busiest rank over that with all work divided equally, the mean of `steps` steps: of sequences as they
    are drawn, of the same sequences dealt to replicas and microbatches by cost, and of documents on as many ranks as
    each needs. The run does what `trained` says, 'fixed', 'packed' or 'dynamic'; the others are simulated. `groups` is
    the share of tokens that are in groups of several ranks with 'dynamic'."""

    steps: int
    trained: str
    fixed: float
    packed: float
    dynamic: float
    groups: float


def data_balance(plan: Plan, dataset: Dataset, steps: int) -> DataBalance:
    """Of the first STEPS of `steps` steps, at least 1. Context ranks share a sequence evenly; only groups count what
    their rings cost. Proves that those of the run meet; raises PentadError if they do not."""
    batch, costs = plan.batch, document_costs(plan.model, plan.batch.sequence_length)
    pool, found = batch.replicas * plan.mesh.cp, list[tuple[float, float, float, float]]()
    for step in range(min(STEPS, steps)):
        rows = dataset.document_lengths(step)
        seconds = costs.rows(rows, batch.sequence_length)
        work = seconds.reshape(batch.replicas, -1).sum(1)
        dealt = balanced(seconds, batch.micro_batch_size, batch.replicas).balance
        drawn = Balance(work, float(work.max()), dealt.bound)
        groups, its = hybrid(rows, batch if batch.capacity else grouped(plan), plan.mesh.cp)
        if batch.capacity:
            check_shares(groups, batch.capacity)
            for stream in plan.program.streams:
                check_rings(groups, stream)
        lengths = groups.lengths(range(len(groups.documents)))
        even = float(costs.alone(lengths).sum()) / pool
        shared = {number for shares in groups.shares for share in shares for number in share.shared}
        share = sum(groups.lengths([*shared])) / max(1, sum(lengths))
        found.append((drawn.max_over_mean, dealt.max_over_mean, its.end / even if even else 1.0, share))
    trained = "dynamic" if batch.capacity else "fixed" if batch.document_costs is None else "packed"
    return DataBalance(len(found), trained, *(fmean(each) for each in zip(*found, strict=True)))
