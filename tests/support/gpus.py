"""GPUs for the ranks of a test: a place each, of which a GPU has one, or RANKS_A_GPU.

NCCL takes ranks that share a GPU for ranks of several hosts, and joins those by sockets: slow, and with the same
results. So tests of four ranks run on two GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

RANKS_A_GPU = int(os.environ.get("RANKS_A_GPU", "1"))


def room() -> int:
    """How many places there are."""
    return torch.cuda.device_count() * RANKS_A_GPU


def gpu_of(place: int) -> int:
    """The GPU of the rank that this process is; 0 on a machine without."""
    os.environ.update(_host(place))
    return place % max(1, torch.cuda.device_count())


def node_of(places: Sequence[int]) -> dict[str, str]:
    """The environment of a node whose ranks have these places, of one host."""
    gpus = [str(place % torch.cuda.device_count()) for place in places]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), **(_host(places[0]) if places else {})}


def _host(place: int) -> dict[str, str]:
    return {"NCCL_HOSTID": f"host-{place // max(1, torch.cuda.device_count())}"} if RANKS_A_GPU > 1 else {}
