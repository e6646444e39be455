"""Messages between pairs of ranks of a group, in which its other ranks take no part.

An all-to-all would not do: torch (2.11) passes empty messages on to NCCL, too, which then waits for those peers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.workers.parallel.async_ops import Arrival, Works

# Held while a batch is being posted, when NCCL must not lose the communicator.
batching = threading.Lock()


def exchange(
    group: dist.ProcessGroup, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
) -> Arrival:
    """Sends and receives contiguous tensors, each with its peer, a rank of the group; all are in flight at once."""
    device = sends[0][0].device
    if device.type != "cuda":
        return Works(_post(group, sends, receives))
    with _batch(group, device) as batch:
        _post(group, sends, receives)
    return batch[0]


def _post(
    group: dist.ProcessGroup, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
) -> list[dist.Work | None]:
    return [
        *(dist.isend(tensor, group=group, group_dst=peer) for tensor, peer in sends),
        *(dist.irecv(tensor, group=group, group_src=peer) for tensor, peer in receives),
    ]


@contextmanager
def _batch(group: dist.ProcessGroup, device: torch.device) -> Iterator[list[Arrival]]:
    """Coalesces what is posted within into one operation of the GPU, which the list holds at the end.

    `batch_isend_irecv` would leave NCCL's group call open if a message could not be posted because the generation has
    been aborted: nothing that this thread launched later, in any generation, would ever start.
    """
    works: list[Arrival] = []
    with batching:
        group._start_coalescing(device)
        try:
            yield works
        finally:
            works.append(group._end_coalescing(device))
