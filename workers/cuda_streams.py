"""CUDA streams by name."""

from __future__ import annotations

import functools

import torch


@functools.cache
def stream_of(device: torch.device, name: str) -> torch.cuda.Stream:
    """The stream of this name, such as a lane's, for the life of the process: with new ones for every generation,
    streams would in time share hardware queues with compute, and a waiting stream would hold compute up."""
    return torch.cuda.Stream(device)
