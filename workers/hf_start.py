"""The state that a run begins with, where its first checkpoint holds weights and no optimizer state."""

from __future__ import annotations

import torch

from pentad.workers.checkpoint import Checkpoint, read


def state(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor `name`, or zeros of `shape` for a moment where the checkpoint has none of any tensor.

    PentadError where it has others' moments and not this one.
    """
    if name.startswith("optimizer.") and not any(held.startswith("optimizer.") for held in checkpoint.where):
        return torch.zeros(shape)
    return read(checkpoint, [name])[name]
