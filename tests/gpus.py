"""GPUs for the ranks of a test: one each, or one for RANKS_A_GPU of them.

NCCL takes ranks that share a GPU for ranks of several hosts, and joins those by sockets: slow, and with the same
results. So tests of four ranks run on two GPUs.
"""

from __future__ import annotations

import os

import torch

RANKS_A_GPU = int(os.environ.get("RANKS_A_GPU", "1"))


def room() -> int:
    """How many ranks there are GPUs for."""
    return torch.cuda.device_count() * RANKS_A_GPU


def gpu_of(rank: int) -> int:
    """The GPU of a rank, whose process this is."""
    host, gpu = divmod(rank, torch.cuda.device_count())
    if RANKS_A_GPU > 1:
        os.environ["NCCL_HOSTID"] = f"host-{host}"
    return gpu
