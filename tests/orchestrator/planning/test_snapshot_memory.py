"""The host memory that `plan` counts for checkpoints is what a rank uses for its copy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plans import plan_on_mesh

from pentad.orchestrator.planning.estimate import memory
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.replication.parts import HostCopies
from pentad.workers.replication.replicator import Replicator
from pentad.workers.runtime.rank_state import RankState

PADDING = 8 * 3 * 64  # at most, in bytes per shard and holder: of three float64 buffers


@pytest.mark.parametrize(
    ("name", "sizes", "zero"),
    [("1f1b", {"dp": 2}, 0), ("1f1b", {"dp": 4}, 3), ("zb-h2", {"dp": 2, "pp": 2}, 1), ("dualpipe", {"pp": 2}, 0)],
)
def test_what_a_rank_stores_of_a_checkpoint_is_planned(name: str, sizes: dict[str, int], zero: int) -> None:
    plan = plan_on_mesh("corpus", name, sizes, memory_options=MemoryOptions(zero=zero))
    for rank in range(plan.mesh.size):
        files = RankState(plan, rank, torch.device("cpu"), None).files()
        stored = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
        planned = memory(plan, rank)["snapshot"]
        assert abs(stored - planned) <= PADDING * plan.mesh.size * len(files)


@pytest.mark.parametrize(("name", "sizes", "zero"), [("1f1b", {"dp": 2}, 3), ("zb-h2", {"pp": 2}, 0)])
def test_two_copies_of_a_ranks_part_and_of_the_largest_are_planned(name: str, sizes: dict[str, int], zero: int) -> None:
    plan = replace(plan_on_mesh("corpus", name, sizes, memory_options=MemoryOptions(zero=zero)), replicate_every=2)
    sizes_of = []
    for rank in range(2):
        copies = HostCopies()
        Replicator(copies, rank, torch.device("cpu")).reserve(RankState(plan, rank, torch.device("cpu"), None).files())
        sizes_of.append(sum(memory.buffer.nbytes for memory in copies.own_spare))
    for rank in range(2):
        planned = memory(plan, rank)["copies"]
        assert planned == pytest.approx(sizes_of[rank] + max(sizes_of), rel=0.02)
    assert memory(replace(plan, replicate_every=0), 0)["copies"] == 0
