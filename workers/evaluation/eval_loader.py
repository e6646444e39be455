"""Loads the tokens that one rank needs for an evaluation."""

from __future__ import annotations

from typing import NamedTuple

from pentad.schedules.spec.plan import Plan
from pentad.workers.data.batch_loader import BatchLoader, Tokens
from pentad.workers.data.holdout import CorpusPart
from pentad.workers.data.samples import Sample, TokenSpan, sample_of


class Round(NamedTuple):
    """One run of the forward-only program: a global batch of data set `data_set`, from sequence `first` on."""

    data_set: int
    first: int


class EvalLoader:
    """The first sequences of every data set, in its own order: they depend on neither the run's seed nor the mesh.

    Rows after the last sequence have no targets, so that all ranks run the same number of rounds.
    """

    def __init__(self, plan: Plan, parts: list[CorpusPart], loader: BatchLoader) -> None:
        assert plan.eval is not None
        self.parts, self.loader, self.length = parts, loader, plan.batch.sequence_length
        limit, size = plan.eval.sequences, plan.batch.global_batch_size
        windows = [part.windows(self.length) for part in parts]
        self.counts = windows if limit is None else [min(limit, count) for count in windows]
        self.rounds = [
            Round(number, first) for number, count in enumerate(self.counts) for first in range(0, count, size)
        ]

    def __call__(self, at: Round) -> dict[int, Tokens]:
        """The tokens of a round, in the form of `BatchLoader`'s tokens of a step."""

        return self.loader.load(lambda row: self._sample(at.data_set, at.first + row))

    def _sample(self, data_set: int, index: int) -> Sample:
        corpus, first, _ = self.parts[data_set]
        spans = [TokenSpan(first + index * self.length, self.length)] if index < self.counts[data_set] else []
        return sample_of(corpus, spans, self.length, self.loader.plan.data.eod_mask_loss)
