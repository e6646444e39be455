"""Brings a rank the tokens of the pieces that it embeds or ends."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from pentad.kernels.backend import IGNORE_INDEX
from pentad.schedules.spec.plan import Plan
from pentad.workers.data.corpus import Corpus
from pentad.workers.data.samples import document_starts, microbatch
from pentad.workers.model.positions import held


class Tokens(NamedTuple):
    """Of one piece, rows one after the other, int64 on the device; of sequences that are cut over context ranks those
    of this rank's positions. `documents` are, by row, where documents begin in a whole sequence, the first one at 0."""

    inputs: torch.Tensor  # [T]
    targets: torch.Tensor  # [T]
    further: torch.Tensor  # [predicted, T]: the tokens behind the targets, -100 beyond a sequence's end
    documents: tuple[tuple[int, ...], ...]


class BatchLoader:
    """The tokens of every step for one rank; what they are depends on seed, step and sequence number alone."""

    def __init__(self, plan: Plan, rank: int, corpus: Corpus, device: torch.device) -> None:
        self.plan, self.corpus, self.device = plan, corpus, device
        at = plan.mesh.coordinates(rank)
        self.slices, self.positions = plan.program.slices, held(plan, rank)
        reading = range(plan.program.stages) if plan.document_mask else (0, plan.program.stages - 1)
        home = plan.program.home.items()
        here = {piece // self.slices for (stage, piece), runs in home if stage in reading and runs == at.pp}
        replica = at.dp * plan.mesh.ep + at.ep
        self.microbatches = {mb: replica * plan.batch.microbatches + mb for mb in sorted(here)}

    def __call__(self, step: int) -> dict[int, Tokens]:
        """Piece of this replica -> its tokens."""
        if not self.microbatches:
            return {}
        batch, found, documents = self.plan.batch, [], []
        for number in self.microbatches.values():
            rows = range(number * batch.rows, (number + 1) * batch.rows)
            pair = microbatch(self.corpus, self.plan.seed, step, batch.global_batch_size, rows, batch.length)
            found.append([*pair, *_further(pair[1], self.plan.model.mtp_layers)])
            documents.append(self._documents(step, rows) if self.plan.document_mask else ())
        whole = torch.from_numpy(np.array(found))[..., self.positions]  # [microbatches, kinds, rows, length]
        each = (
            whole.unflatten(3, (self.slices, -1)).permute(0, 3, 1, 2, 4).flatten(3)
        )  # [microbatches, slices, kinds, T]
        if self.device.type == "cuda":
            each = each.pin_memory().to(self.device, non_blocking=True)
        return {
            mb * self.slices + number: Tokens(piece[0], piece[1], piece[2:], of)
            for mb, slices, of in zip(self.microbatches, each, documents, strict=True)
            for number, piece in enumerate(slices)
        }

    def _documents(self, step: int, rows: range) -> tuple[tuple[int, ...], ...]:
        batch, seed = self.plan.batch, self.plan.seed
        numbers = (step * batch.global_batch_size + row for row in rows)
        return tuple(document_starts(self.corpus, seed, number, batch.length) for number in numbers)


def _further(targets: np.ndarray, count: int) -> list[np.ndarray]:
    """[rows, length] each: the tokens 1 to `count` behind the targets."""
    rows, length = targets.shape
    beyond = np.full((rows, count), IGNORE_INDEX)
    longer = np.concatenate([targets, beyond], axis=1)
    return [longer[:, number : number + length] for number in range(1, count + 1)]
