"""Processes that save tensors together with torch.distributed.checkpoint."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

RANKS = 4
PLACEMENTS: dict[str, tuple[torch.dtype, tuple[int, ...], list[Placement]]] = {
    "rows": (torch.float64, (7, 5), [Shard(0), Replicate()]),
    "columns": (torch.float32, (5, 7), [Replicate(), Shard(1)]),
    "both": (torch.float32, (6, 9), [Shard(0), Shard(1)]),
    "twice": (torch.bfloat16, (13, 2), [Shard(0), Shard(0)]),
    "copies": (torch.float32, (3,), [Replicate(), Replicate()]),
}


def full(name: str) -> torch.Tensor:
    dtype, shape, _ = PLACEMENTS[name]
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64).to(dtype)


def save(rank: int, folder: str, form: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (2, 2))
    state = {name: distribute_tensor(full(name), mesh, placements) for name, (_, _, placements) in PLACEMENTS.items()}
    out = os.path.join(folder, "out")
    writer = HuggingFaceStorageWriter(out, save_distributed=True) if form == "safetensors" else None
    dcp.save({"model": state}, checkpoint_id=None if writer else out, storage_writer=writer)
    dist.destroy_process_group()
