"""Copies of simulated ranks' states in the memory of other ranks."""

from __future__ import annotations

import numpy as np
from chaos_cluster import Cluster
from chaos_fabric import State

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import Unreadable
from pentad.workers.replication.parts import HostCopies
from pentad.workers.replication.source import CopySource


def read_copy(cluster: Cluster, copies: HostCopies, source: CopySource) -> tuple[set[State], PentadError | None]:
    """The states in all parts of a copy, whether in this process or in others, and the error if one cannot be read."""
    found = set[State]()
    for each in source.parts:
        data = copies.find(each.part.key, each.part.owner)
        if data is None:
            holder = next(process for process in cluster.processes if str(process.pid) == each.address)
            if not holder.is_alive:
                return found, Unreadable("the memory of ranks cannot be read: connection refused")
            data = holder.worker.copies.find(each.part.key, each.part.owner)
        assert data is not None, "a part that was held is gone"
        found.add(State(*map(int, data.view(np.int64))))
    return found, None
