"""CUDA streams by name."""

from __future__ import annotations

import functools

import torch


@functools.cache
def stream_of(device: torch.device, name: str) -> torch.cuda.Stream:
    """The stream of this name, such as that of a lane, for the life of the process: new ones for every generation would
    in time share hardware queues with compute, which a stream that waits then holds up."""
    return torch.cuda.Stream(device)
