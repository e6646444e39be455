"""Plans with data-aware groups, and groups that no planner would choose: random ones of every size, with ranks in any
order, in every microbatch."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fleet
import numpy as np
from mixtures import random_corpus
from plans import SHALLOW, data_of, plan_of, with_rampup
from pool import Pool

from pentad.schedules.search.batch_planner import Balance
from pentad.schedules.search.hybrid_planner import documents_of
from pentad.schedules.spec.batch import BatchSpec, DocumentCosts
from pentad.schedules.spec.cp_layout import Share, StepGroups
from pentad.schedules.spec.data import Packing
from pentad.schedules.spec.plan import Plan

LENGTH = 48


def grouped_plan(
    folder: Path,
    sizes: dict[str, Any],
    packing: Packing = "documents",
    seed: int = 1,
    microbatches: int = 2,
    factor: float = 1.25,
    ramp: dict[int, int] | None = None,
    longer: tuple[int, ...] = (),
    **more: Any,
) -> Plan:
    """A plan for documents of 2 to 48 tokens, most of which count. `longer` are other microbatch counts that steps may
    have."""
    path = random_corpus(folder / f"corpus-{seed}", seed, 160, LENGTH, targets=0.7)
    data = data_of(path, document_mask=True, packing=packing, cache=str(folder))

    def compiled(count: int) -> Plan:
        given = {"name": "1f1b", "dp": 1, "pp": 1, "model": SHALLOW, **sizes, **more}
        return plan_of(**given, microbatches=count, data=data)

    plan = with_rampup(compiled(microbatches), ramp or {}, compiled)
    even, unit = plan.batch.micro_batch_size * LENGTH // plan.mesh.cp, 2 * plan.mesh.tp
    batch = replace(plan.batch, sequence_length=LENGTH, document_costs=DocumentCosts(1.0, 3.0, 0.5), longer=longer)
    plan = replace(plan, longer_programs=tuple(compiled(count).program for count in longer))
    return replace(plan, batch=replace(batch, capacity=-(-int(factor * even) // unit) * unit))


def random_groups(rows: Sequence[np.ndarray], batch: BatchSpec, cp: int, ep: int = 1) -> tuple[StepGroups, Balance]:
    """Replaces `hybrid`: a function of the documents. Each document gets any of the shares with room for it. If steps
    may have more microbatches, every rank has its own number of them."""
    documents, pool = documents_of(rows), batch.replicas * cp
    random = np.random.default_rng(zlib.crc32(repr(documents).encode()))
    microbatches = len(rows) // (batch.replicas * batch.micro_batch_size)
    least, counts = microbatches, [microbatches] * pool
    if least == batch.microbatches and batch.longer:
        microbatches = int(random.integers(least, batch.most_microbatches + 1))
        counts = random.integers(1, microbatches + 1, pool).tolist()
        counts[int(random.integers(pool))] = microbatches
    ranks = [[rank for rank in range(pool) if mb < counts[rank]] for mb in range(microbatches)]
    groups = [_partition(each, random) for each in ranks]
    shared = [[list[int]() for _ in each] for each in groups]
    local = [[list[int]() for _ in range(pool)] for _ in range(microbatches)]

    def shares(mb: int) -> tuple[Share, ...]:
        found = [Share((rank,), (), tuple(own)) for rank, own in enumerate(local[mb])]
        for ranks, numbers in zip(groups[mb], shared[mb], strict=True):
            for rank in ranks if numbers else ():
                found[rank] = found[rank]._replace(ranks=ranks, shared=tuple(numbers))
        return tuple(found)

    step = StepGroups(documents, ())
    for document in random.permutation(len(documents)).tolist():
        while True:
            mb = int(random.integers(microbatches))
            number = int(random.integers(len(groups[mb])))
            is_local = len(groups[mb][number]) == 1 or random.random() < 0.4
            rank = ranks[mb][int(random.integers(len(ranks[mb])))]
            held = local[mb][rank] if is_local else shared[mb][number]
            held.append(document)
            if all(step.tokens(share) <= batch.capacity for share in shares(mb)):
                break
            held.pop()
    found = step._replace(shares=tuple(map(shares, range(microbatches)))).trimmed(least)
    return found, Balance(np.zeros(pool), 0.0, 0.0)


def _partition(pool: Sequence[int], random: np.random.Generator) -> list[tuple[int, ...]]:
    """Groups of 1 to all ranks of the pool, in any order."""
    ranks, found = random.permutation(pool).tolist(), list[tuple[int, ...]]()
    while ranks:
        size = int(random.integers(1, len(ranks) + 1))
        found.append(tuple(ranks[:size]))
        ranks = ranks[size:]
    return found


class RandomGroupsFleet(fleet.Fleet):
    """Ranks that train with `random_groups`."""

    def __init__(self, size: int) -> None:
        self.pool = Pool(size, _serve)


def _serve(end: Connection, *rest: object) -> None:
    from pentad.workers.data import shares

    shares.hybrid = random_groups
    fleet._serve(end, *rest)
