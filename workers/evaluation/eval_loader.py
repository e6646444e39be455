"""Loads the tokens that one rank needs for an evaluation."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pentad.kernels.backend import IGNORE_INDEX
from pentad.schedules.spec.plan import Plan
from pentad.workers.data.batch_loader import BatchLoader, Samples, Tokens
from pentad.workers.data.holdout import Part


class Round(NamedTuple):
    """One run of the forward-only program: a global batch of data set number `data_set`, from sequence `first` on."""

    data_set: int
    first: int


class EvalLoader:
    """The first sequences of every data set, in its own order: they depend on neither the run's seed nor the mesh.

    Rows after the last sequence have no targets, so that all ranks run as many rounds.
    """

    def __init__(self, plan: Plan, parts: list[Part], loader: BatchLoader) -> None:
        assert plan.eval is not None
        self.parts, self.loader, self.length = parts, loader, plan.batch.sequence_length
        limit, size = plan.eval.sequences, plan.batch.global_batch_size
        windows = [part.windows(self.length) for part in parts]
        self.counts = windows if limit is None else [min(limit, count) for count in windows]
        self.rounds = [
            Round(number, first) for number, count in enumerate(self.counts) for first in range(0, count, size)
        ]

    def __call__(self, at: Round) -> dict[int, Tokens]:
        """The tokens of a round, as `BatchLoader` returns those of a step."""

        def read(rows: range) -> Samples:
            samples = [self._sample(at.data_set, at.first + row) for row in rows]
            inputs, targets, starts = zip(*samples, strict=True)
            return Samples(np.stack(inputs), np.stack(targets), starts)

        return self.loader.load(read)

    def _sample(self, data_set: int, index: int) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        if index >= self.counts[data_set]:
            return np.zeros(self.length, np.int64), np.full(self.length, IGNORE_INDEX), (0,)
        corpus, first, _ = self.parts[data_set]
        start = first + index * self.length
        tokens = corpus.read(start, self.length + 1)
        inputs, targets = tokens[:-1], tokens[1:]
        if corpus.has_loss_mask:
            targets = np.where(corpus.loss_mask(start + 1, self.length), targets, IGNORE_INDEX)
        boundaries = corpus.boundaries(start, self.length).tolist() if self.loader.plan.document_mask else []
        return inputs, targets, (0, *(boundary for boundary in boundaries if boundary))
