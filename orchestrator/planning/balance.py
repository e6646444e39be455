"""How evenly the documents of the first steps divide over the ranks, under the run's own policy and under the
alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, cycle, islice
from statistics import fmean
from typing import NamedTuple

import numpy as np

from pentad.orchestrator.planning.layout import grouped
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.search.batch_planner import balanced, end_of
from pentad.schedules.search.hybrid_planner import hybrid
from pentad.schedules.spec.batch import BatchSpec, DocumentCosts
from pentad.schedules.spec.cp_layout import StepGroups
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.plan import Plan
from pentad.schedules.verify.check_groups import check_rings, check_shares
from pentad.workers.data.samples import Dataset

STEPS = 4  # simulated at most


class PoolBalance(NamedTuple):
    """How long the slowest of `ranks` ranks takes, relative to the documents' work divided equally: with sequences as
    drawn (`fixed`), with the same sequences dealt to replicas and microbatches by cost (`packed`), and with each
    document on as many ranks as it needs (`dynamic`). `gap` is how far `dynamic` lies above a lower bound for any plan,
    as a fraction."""

    ranks: int
    fixed: float
    packed: float
    dynamic: float
    gap: float


class DataBalance(NamedTuple):
    """As PoolBalance, averaged over `steps` steps. `trained` is what the run does: 'fixed', 'packed' or 'dynamic'; the
    others are simulated. `groups` is the share of tokens in groups of several ranks with 'dynamic', `microbatches` the
    fewest and the most microbatches with documents in any pipeline. `pools` simulate one step of other numbers of
    ranks."""

    steps: int
    trained: str
    fixed: float
    packed: float
    dynamic: float
    gap: float
    groups: float
    microbatches: tuple[int, int]
    pools: tuple[PoolBalance, ...] = ()


def data_balance(plan: Plan, dataset: Dataset, steps: int, pools: Sequence[int] = ()) -> DataBalance:
    """The balance of the first STEPS of `steps` (at least 1) steps, and of other `pools`, each a number of dp x ep x cp
    ranks. A pool gets as many sequences a replica as the run, taken from its first steps and repeated if they are too
    few. Proves that the exchanges of ranks inside layers match; raises PentadError if they do not."""
    mesh, batch = plan.mesh, plan.batch if plan.batch.capacity else grouped(plan)
    found, shares, pipelines = list[PoolBalance](), list[float](), list[int]()
    for step in range(min(STEPS, steps)):
        its, groups = _balance(dataset.document_lengths(step), batch, mesh)
        if plan.batch.capacity:
            check_shares(groups, batch.capacity)
            for stream in plan.programs[plan.program_of(step, len(groups.shares))].streams:
                check_rings(groups, stream, mesh.cp, mesh.ep)
        shared = {number for share in chain(*groups.shares) for number in share.shared}
        pipelines += groups.microbatches(mesh.cp, mesh.ep)
        shares.append(sum(groups.lengths([*shared])) / max(1, sum(each.length for each in groups.documents)))
        found.append(its)
    trained = "dynamic" if plan.batch.capacity else "fixed" if plan.batch.document_costs is None else "packed"
    fixed, packed, dynamic, gap = (fmean(each) for each in list(zip(*found, strict=True))[1:])
    others = tuple(_pool(dataset, batch, mesh, steps, ranks) for ranks in pools)
    counts = min(pipelines), max(pipelines)
    return DataBalance(len(found), trained, fixed, packed, dynamic, gap, fmean(shares), counts, others)


def require_pools(plan: Plan, pools: Sequence[int]) -> None:
    """Raises PentadError unless these `pools`, each a number of dp x ep x cp ranks, can be simulated; that takes
    documents whose cost does not depend on their neighbours in a sequence."""
    if pools and not plan.data.document_mask:
        raise PentadError("data.document_mask is false: expected true for --pool")
    if pools and plan.batch.rampup:
        raise PentadError("batch.rampup is set: expected none for --pool")
    unit, name = plan.mesh.cp * plan.mesh.ep, "mesh.cp x mesh.ep" if plan.mesh.ep > 1 else "mesh.cp"
    for ranks in pools:
        if ranks % unit:
            raise PentadError(f"--pool is {ranks}: expected a multiple of {name} = {unit}")


def _pool(dataset: Dataset, batch: BatchSpec, mesh: Mesh, steps: int, ranks: int) -> PoolBalance:
    replicas = ranks // mesh.cp
    size = batch.global_batch_size // batch.replicas * replicas
    read = range(min(steps, -(-size // batch.global_batch_size)))
    rows = [*islice(cycle(chain(*map(dataset.document_lengths, read))), size)]
    return _balance(rows, replace(batch, global_batch_size=size, replicas=replicas), mesh)[0]


def _balance(rows: Sequence[np.ndarray], batch: BatchSpec, mesh: Mesh) -> tuple[PoolBalance, StepGroups]:
    costs, cp = batch.document_costs, mesh.cp
    assert costs is not None
    shared = DocumentCosts(costs.quadratic / cp, (costs.linear + costs.ring * (cp - 1)) / cp)
    seconds, ranks = shared.rows(rows, batch.sequence_length), batch.replicas * cp
    order = balanced(seconds, batch.micro_batch_size, batch.replicas).order
    shape = batch.replicas, -1, batch.micro_batch_size
    drawn, dealt = (end_of(each.reshape(shape).sum(2), mesh.ep) for each in (seconds, seconds[order]))
    groups, its = hybrid(rows, batch, cp, mesh.ep)
    even = float(costs.alone([each.length for each in groups.documents]).sum()) / ranks
    over = [end / even if even else 1.0 for end in (drawn, dealt, its.end)]
    return PoolBalance(ranks, over[0], over[1], over[2], its.gap), groups
