"""One process that balances experts over the documents of each data-aware group."""

from __future__ import annotations

from typing import Any

import torch
from plans import STEPS, global_batches
from reference_model import Trained, train

from pentad.schedules.spec.cp_layout import StepGroups
from pentad.schedules.spec.plan import Plan
from pentad.workers.data.sources import open_dataset


def groups_of(plan: Plan, planner: Any) -> list[StepGroups]:
    """The groups of all steps."""
    dataset = open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed)
    given = plan.batch, plan.mesh.cp, plan.mesh.ep
    return [planner(dataset.document_lengths(step), *given)[0] for step in range(STEPS)]


def sets_of(groups: StepGroups, rows: int, length: int) -> torch.Tensor:
    """[rows, S] int64: what a group's ranks hold of a microbatch, shared or not, is one set; padding has -1."""
    sets, numbers = torch.full((rows, length), -1), dict[tuple[int, tuple[int, ...]], int]()
    for mb, shares in enumerate(groups.shares):
        for share in shares:
            index = numbers.setdefault((mb, share.ranks), len(numbers))
            for row, first, length in (groups.documents[each] for each in (*share.shared, *share.local)):
                sets[row, first : first + length] = index
    return sets


def reference_of_groups(plan: Plan, planner: Any) -> Trained:
    """The outcome of training with the same sets."""
    batches = global_batches(plan)
    steps = zip(groups_of(plan, planner), batches, strict=True)
    return train(plan, batches, [sets_of(groups, *batch.inputs.shape) for groups, batch in steps])
