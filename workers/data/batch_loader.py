"""Loads the tokens that one rank needs for a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from pentad.kernels.backend import IGNORE_INDEX
from pentad.schedules.spec.plan import Plan
from pentad.workers.data.corpus import Corpus
from pentad.workers.data.samples import document_starts, microbatch
from pentad.workers.model.layer_context import local_positions


class Tokens(NamedTuple):
    """One slice of a microbatch, its rows concatenated: T = rows x positions of this (context) rank in the slice.

    All tensors are int64 on the device. `document_starts` are, by row, the positions in the full sequence at which a
    document starts, the first one 0; empty without document masks.
    """

    inputs: torch.Tensor  # [T]
    targets: torch.Tensor  # [T]
    mtp_targets: torch.Tensor  # [mtp_layers, T]: the 1st, 2nd, ... token after the target, -100 past the sequence's end
    document_starts: tuple[tuple[int, ...], ...]


class Samples(NamedTuple):
    """Rows of a batch: inputs and targets are [rows, positions] int64, -100 is no target; `document_starts` by row."""

    inputs: np.ndarray
    targets: np.ndarray
    document_starts: tuple[tuple[int, ...], ...]


class BatchLoader:
    """One rank's tokens of any step; their content depends only on seed, step and sequence index."""

    def __init__(self, plan: Plan, rank: int, corpus: Corpus, device: torch.device) -> None:
        self.plan, self.corpus, self.device = plan, corpus, device
        self.slices, self.positions = plan.program.slices, local_positions(plan, rank)
        at = plan.mesh.coordinates(rank)
        # The first stage embeds tokens and the last computes the loss; document masks are needed by every attention.
        stages = range(plan.program.stages) if plan.document_mask else (0, plan.program.stages - 1)
        local = {
            piece // self.slices
            for (stage, piece), pp in plan.program.compute_rank.items()
            if stage in stages and pp == at.pp
        }
        first = (at.dp * plan.mesh.ep + at.ep) * plan.batch.microbatches
        self.microbatches = {mb: first + mb for mb in sorted(local)}  # of this replica -> of the global batch

    def __call__(self, step: int) -> dict[int, Tokens]:
        """Tokens by slice of this replica: slice s of microbatch m has the key m * slices + s."""
        return self.load(partial(self._samples, step))

    def load(self, read: Callable[[range], Samples]) -> dict[int, Tokens]:
        """Tokens by slice of this replica, where `read` returns the samples of these rows of the global batch."""
        if not self.microbatches:
            return {}
        batch, model = self.plan.batch, self.plan.model
        loaded, starts = [], []
        for index in self.microbatches.values():
            samples = read(range(index * batch.micro_batch_size, (index + 1) * batch.micro_batch_size))
            loaded.append([samples.inputs, samples.targets, *_shifted(samples.targets, model.mtp_layers)])
            starts.append(samples.document_starts if self.plan.document_mask else ())
        # [microbatches, kinds, rows, positions] -> [microbatches, slices, kinds, T]
        local = torch.from_numpy(np.array(loaded))[..., self.positions]
        sliced = local.unflatten(3, (self.slices, -1)).permute(0, 3, 1, 2, 4).flatten(3)
        if self.device.type == "cuda":
            sliced = sliced.pin_memory().to(self.device, non_blocking=True)
        return {
            mb * self.slices + number: Tokens(tokens[0], tokens[1], tokens[2:], of_microbatch)
            for mb, slices, of_microbatch in zip(self.microbatches, sliced, starts, strict=True)
            for number, tokens in enumerate(slices)
        }

    def _samples(self, step: int, rows: range) -> Samples:
        batch, seed = self.plan.batch, self.plan.seed
        inputs, targets = microbatch(self.corpus, seed, step, batch.global_batch_size, rows, batch.sequence_length)
        indices = (step * batch.global_batch_size + row for row in rows) if self.plan.document_mask else ()
        starts = tuple(document_starts(self.corpus, seed, index, batch.sequence_length) for index in indices)
        return Samples(inputs, targets, starts)


def _shifted(targets: np.ndarray, count: int) -> list[np.ndarray]:
    """`targets` [rows, length] shifted by 1 to `count` positions to the left, filled with IGNORE_INDEX."""
    rows, length = targets.shape
    padded = np.concatenate([targets, np.full((rows, count), IGNORE_INDEX)], axis=1)
    return [padded[:, shift : shift + length] for shift in range(1, count + 1)]
