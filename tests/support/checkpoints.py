"""Small checkpoints for tests."""

from pathlib import Path
from typing import Any

import torch

from pentad.workers.checkpoint.checkpoint import commit, folder_of
from pentad.workers.checkpoint.local_storage import L
from pentad.workers.checkpoint.shards import write_shard

META = {"seed": 7, "config": "ab12", "position": {"step": 20, "sample": 320}, "mesh": {"dp": 1, "pp": 2}, "lr": 3e-4}


def save(root: L, step: int, stages: int = 2, **more: Any) -> L:
    """A committed checkpoint of two tensors per stage whose values are step + stage; with `more` metadata."""
    folder = folder_of(root, step)
    shards = []
    for stage in range(stages):
        value = torch.full((3, 4), float(step + stage))
        tensors = {f"model.layers.{stage}.attention.qkv": value, f"optimizer.m.layers.{stage}": value.double()}
        shards.append(write_shard(folder, f"stage-{stage}.safetensors", tensors))
    commit(folder, step=step, shards=shards, meta=META | {"step": step} | more)
    return folder


def flip(path: Path, at: int, bit: int = 1) -> None:
    """Flips one bit of the byte at offset `at`."""
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)
