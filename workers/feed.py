"""Brings a rank the tokens of the pieces that it embeds or ends."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from pentad.schedules.plan import Plan
from pentad.workers.corpus import Corpus
from pentad.workers.samples import microbatch


class Tokens(NamedTuple):
    """int64, on the device, rows of the piece one after the other."""

    inputs: torch.Tensor  # [T]
    targets: torch.Tensor  # [T]


class Feed:
    """The tokens of every step for one rank; what they are depends on seed, step and sequence number alone."""

    def __init__(self, plan: Plan, rank: int, corpus: Corpus, device: torch.device) -> None:
        self.plan, self.corpus, self.device = plan, corpus, device
        at = plan.mesh.coordinates(rank)
        ends = {0, plan.program.stages - 1}
        self.slices = plan.program.slices
        home = plan.program.home.items()
        here = {piece // self.slices for (stage, piece), runs in home if stage in ends and runs == at.pp}
        replica = at.dp * plan.mesh.ep + at.ep
        self.microbatches = {mb: replica * plan.batch.microbatches + mb for mb in sorted(here)}

    def __call__(self, step: int) -> dict[int, Tokens]:
        """Piece of this replica -> its tokens."""
        if not self.microbatches:
            return {}
        batch, found = self.plan.batch, []
        for number in self.microbatches.values():
            rows = range(number * batch.rows, (number + 1) * batch.rows)
            found.append(microbatch(self.corpus, self.plan.seed, step, batch.sequences, rows, batch.length))
        whole = torch.from_numpy(np.array(found))  # [microbatches, 2, rows, length]
        both = whole.unflatten(3, (self.slices, -1)).permute(0, 3, 1, 2, 4).flatten(3)  # [microbatches, slices, 2, T]
        if self.device.type == "cuda":
            both = both.pin_memory().to(self.device, non_blocking=True)
        return {
            mb * self.slices + number: Tokens(*piece)
            for mb, slices in zip(self.microbatches, both, strict=True)
            for number, piece in enumerate(slices)
        }
