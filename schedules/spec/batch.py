"""How many sequences every batch of a run has, and how they are divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class RampupStage(NamedTuple):
    """`steps` steps with batches of `global_batch_size` sequences."""

    global_batch_size: int
    steps: int


@dataclass(frozen=True)
class BatchSizes:
    """Sequences of each batch of a run: those of the stages of `rampup`, one after another, then
    `global_batch_size`."""

    global_batch_size: int
    rampup: tuple[RampupStage, ...] = ()

    def stage(self, batch: int) -> int:
        """The number of a batch's stage: len(rampup) once the batch size has its full value."""
        ends = accumulate(stage.steps for stage in self.rampup)
        return next((number for number, end in enumerate(ends) if batch < end), len(self.rampup))

    def size(self, batch: int) -> int:
        """Sequences of a batch, counted from 0."""
        return self._stages[self.stage(batch)].global_batch_size

    def first_sample(self, batch: int) -> int:
        """Sequences of all batches before this one."""
        samples = 0
        for stage in self.rampup:
            samples += stage.global_batch_size * min(batch, stage.steps)
            batch = max(0, batch - stage.steps)
        return samples + self.global_batch_size * batch

    def batch_of_sample(self, sample: int) -> int:
        """The batch that a sample, counted from 0, is in."""
        batch = 0
        for stage in self.rampup:
            if sample < stage.global_batch_size * stage.steps:
                return batch + sample // stage.global_batch_size
            sample -= stage.global_batch_size * stage.steps
            batch += stage.steps
        return batch + sample // self.global_batch_size

    @property
    def _stages(self) -> tuple[RampupStage, ...]:
        return (*self.rampup, RampupStage(self.global_batch_size, 0))


class DocumentCosts(NamedTuple):
    """Seconds (or FLOPs: only ratios matter) of a document by its tokens. `ring` is per token that a context rank
    receives from another."""

    quadratic: float
    linear: float
    ring: float = 0.0

    def alone(self, lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        """[documents] seconds of each on one rank."""
        tokens = np.asarray(lengths, np.float64)
        return self.quadratic * tokens**2 + self.linear * tokens

    def rows(self, documents: Sequence[NDArray[np.int64]], length: int) -> NDArray[np.float64]:
        """[rows] seconds of sequences of `length` tokens, by the lengths of the documents in each. The padding at the
        end costs as much as a document: it attends to itself."""
        sums = (float(self.alone(row).sum()) for row in documents)
        return np.fromiter(sums, np.float64) + self.alone([length - int(row.sum()) for row in documents])

    def shared(self, lengths: Sequence[int] | NDArray[np.int64], ranks: NDArray[np.int64]) -> NDArray[np.float64]:
        """[documents] seconds of each on `ranks` [documents] ranks, which do equal shares of its work."""
        tokens = np.asarray(lengths, np.float64)
        return (self.alone(lengths) + self.ring * tokens * (ranks - 1)) / ranks


@dataclass(frozen=True)
class BatchSpec:
    """A step's `global_batch_size` sequences of `sequence_length` tokens, over the whole mesh.

    Each of the dp x ep `replicas` has its own samples, in `microbatches` microbatches. Steps of a stage of `rampup`
    have fewer microbatches of the same size. Sequences are dealt to replicas and microbatches by the `document_costs`
    of their documents (None: in the order in which they are drawn). With a `capacity`, documents are dealt to groups of
    the dp x ep x cp ranks instead, each of which then holds at most this many tokens of a microbatch (0: sequences are
    dealt). A pipeline may then have more microbatches in a step with a full batch: up to the last of `longer`, the
    larger numbers for which there are programs, in ascending order.
    """

    global_batch_size: int
    sequence_length: int
    microbatches: int
    replicas: int
    rampup: tuple[RampupStage, ...] = ()
    document_costs: DocumentCosts | None = None
    capacity: int = 0
    longer: tuple[int, ...] = ()

    @property
    def most_microbatches(self) -> int:
        """The most microbatches of a pipeline in a step."""
        return max((self.microbatches, *self.longer))

    @property
    def micro_batch_size(self) -> int:
        """Sequences per microbatch of one replica."""
        return self.global_batch_size // (self.microbatches * self.replicas)

    @property
    def tokens(self) -> int:
        """Tokens of a step over the whole mesh."""
        return self.global_batch_size * self.sequence_length

    @property
    def rampup_microbatches(self) -> tuple[int, ...]:
        """Microbatches of a replica in each stage of `rampup`."""
        return tuple(stage.global_batch_size // (self.replicas * self.micro_batch_size) for stage in self.rampup)

    @property
    def sizes(self) -> BatchSizes:
        return BatchSizes(self.global_batch_size, self.rampup)

    def with_microbatches(self, microbatches: int) -> BatchSpec:
        """The batches with this many microbatches of the same size for each replica."""
        size = microbatches * self.replicas * self.micro_batch_size
        return replace(self, global_batch_size=size, microbatches=microbatches, rampup=(), longer=())


def batch_of(step: int, skipped: Sequence[tuple[int, int]]) -> int:
    """The batch, from 0, that a step trains on: for each (first, count) in `skipped`, `count` batches are left out
    before step `first`. A pure function, so a resumed or repaired run trains on the same samples."""
    return step + sum(count for first, count in skipped if first <= step)
