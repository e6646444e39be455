"""Which source every sample of a run comes from: a pure function of the sample's number, so nothing is stored.

Within a phase (from one change of weights to the next) the samples repeat a balanced sequence of one period, made by
Tijdeman's algorithm for the chairman assignment problem (Discrete Mathematics 32, 1980): after any number of samples,
each of k sources has its share to within 1 - 1 / (2k - 2) samples, and in any window to within twice that.

Imports no torch: before the driver starts anything, it checks that the data lasts for the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heappop, heappush
from math import lcm
from typing import Any

import numpy as np

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.batch import BatchSizes
from pentad.schedules.spec.data import DataSpec, SourceSpec

LONGEST_PERIOD = 2**16  # samples; shares with a larger common denominator are rounded to multiples of 1 / 2**16


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Samples of each source in a period, whose length is their sum. Weights are taken as exact decimals: 0.7, 0.2, 0.1
    give 7, 2, 1.

    Raises PentadError for a positive weight below 1 / LONGEST_PERIOD of their sum.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    parts = [each / sum(exact) for each in exact]
    period = lcm(*(part.denominator for part in parts))
    if period <= LONGEST_PERIOD:
        return tuple(int(part * period) for part in parts)
    ideal = [part * LONGEST_PERIOD for part in parts]
    for weight, each in zip(weights, ideal, strict=True):
        if 0 < each < 1:
            raise PentadError(f"a weight is {weight:g}: expected 0 or at least 1 / {LONGEST_PERIOD} of all weights")
    rounded = [int(each) for each in ideal]
    by_remainder = sorted(range(len(ideal)), key=lambda i: (rounded[i] - ideal[i], i))
    for i in by_remainder[: LONGEST_PERIOD - sum(rounded)]:
        rounded[i] += 1
    return tuple(rounded)


def balanced_sequence(shares: Sequence[int]) -> np.ndarray:
    """[sum of shares]: the source of each sample of a period, balanced as described above. All shares are positive.

    The j-th sample of a source (from 0) has a first slot and a deadline that keep the bound; of the samples whose first
    slot has come, the one with the earliest deadline is next.
    """
    period, slack = sum(shares), 2 * len(shares) - 2
    if not slack:
        return np.zeros(period, np.int64)

    def first_slot(source: int, j: int) -> int:
        return -(-period * (j * slack + 1) // (shares[source] * slack))

    waiting = [(first_slot(source, 0), source, 0) for source in range(len(shares))]
    heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    order = np.empty(period, np.int64)
    for slot in range(1, period + 1):
        while waiting and waiting[0][0] <= slot:
            _, source, j = heappop(waiting)
            heappush(ready, (period * ((j + 1) * slack - 1) // (shares[source] * slack), source, j))
        _, source, j = heappop(ready)
        order[slot - 1] = source
        if j + 1 < shares[source]:
            heappush(waiting, (first_slot(source, j + 1), source, j + 1))
    return order


class Period:
    """A balanced sequence, and for each of its samples how many earlier ones have the same source."""

    def __init__(self, shares: tuple[int, ...]) -> None:
        self.shares = np.array(shares)
        active = np.flatnonzero(self.shares)
        self.order = active[balanced_sequence([shares[i] for i in active])]
        self.samples = {int(i): np.flatnonzero(self.order == i) for i in active}
        self.earlier = np.empty(len(self.order), np.int64)
        for samples in self.samples.values():
            self.earlier[samples] = np.arange(len(samples))

    def draws(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, number of its earlier samples) of these samples."""
        period, slot = np.divmod(samples, len(self.order))
        source = self.order[slot]
        return source, period * self.shares[source] + self.earlier[slot]

    def counts(self, samples: int) -> np.ndarray:
        """Samples of each source among the first `samples`."""
        periods, rest = divmod(samples, len(self.order))
        return periods * self.shares + np.bincount(self.order[:rest], minlength=len(self.shares))

    def end(self, source: int, count: int) -> int:
        """The number of samples until a source with a share has had `count` > 0 of them."""
        periods, rest = divmod(count - 1, int(self.shares[source]))
        return periods * len(self.order) + int(self.samples[source][rest]) + 1


period_of = lru_cache(32)(Period)


@dataclass(frozen=True)
class Phase:
    """Samples from number `first` on, with these `shares` of the sources; `drawn` [sources] have been drawn before.

    `used_up` is the source whose last sample came just before, None at the start and where weights change.
    """

    first: int
    shares: tuple[int, ...]
    drawn: np.ndarray
    used_up: int | None = None


class Mixture:
    """The samples of a run whose batches have these `sizes`.

    `phases` are in order, and `end` is the number of samples after which no source with a weight has any left, None if
    that never happens.
    """

    def __init__(self, data: DataSpec, sizes: BatchSizes) -> None:
        self.data, self.sizes = data, sizes
        self.limits = [
            None if source.epochs is None else int(Fraction(repr(source.epochs)) * source.sequences)
            for source in data.sources
        ]
        self.end: int | None = None
        self.phases = tuple(self._phases())
        self.firsts = np.array([phase.first for phase in self.phases])

    def draws(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(source, index within the source) of `count` samples from number `first` on, both [count] int64.

        Raises PentadError if there are not that many.
        """
        if self.end is not None and first + count > self.end:
            raise PentadError(f"data.sources hold {self.end} samples: expected more, or more epochs of them")
        found, at = list[tuple[np.ndarray, np.ndarray]](), first
        while at < first + count:
            number = int(np.searchsorted(self.firsts, at, "right")) - 1
            phase, end = self.phases[number], first + count
            if number + 1 < len(self.phases):
                end = min(end, self.phases[number + 1].first)
            source, earlier = period_of(phase.shares).draws(np.arange(at, end) - phase.first)
            found.append((source, phase.drawn[source] + earlier))
            at = end
        sources, indices = zip(*found, strict=True)
        return np.concatenate(sources), np.concatenate(indices)

    def drawn(self, samples: int) -> np.ndarray:
        """[sources]: how many of the first `samples` come from each source."""
        phase = self.phases[int(np.searchsorted(self.firsts, samples, "right")) - 1]
        return phase.drawn + period_of(phase.shares).counts(samples - phase.first)

    def changes(self, batch: int) -> Iterator[dict[str, Any]]:
        """The phases that begin in this global batch, for the journal: the first sample, the shares of the sources from
        then on, and the source that is used up, if that is the reason."""
        names = [source.name for source in self.data.sources]
        for phase in self.phases[1:]:
            if self.sizes.batch_of_sample(phase.first) == batch:
                total = sum(phase.shares)
                yield {
                    "sample": phase.first,
                    "shares": {name: share / total for name, share in zip(names, phase.shares, strict=True)},
                    "used_up": None if phase.used_up is None else names[phase.used_up],
                }

    def _phases(self) -> Iterator[Phase]:
        weights = tuple(source.weight for source in self.data.sources)
        changes = [(self.sizes.first_sample(change.step), change.weights) for change in self.data.curriculum]
        first, drawn, used_up = 0, np.zeros(len(weights), np.int64), None
        while True:
            while changes and changes[0][0] <= first:
                weights, used_up = changes.pop(0)[1], None
            left = [None if limit is None else limit - int(n) for limit, n in zip(self.limits, drawn, strict=True)]
            active = tuple(0.0 if each == 0 else weight for weight, each in zip(weights, left, strict=True))
            if not any(active):
                self.end = first
                return
            phase = Phase(first, shares_of(active), drawn, used_up)
            yield phase
            period = period_of(phase.shares)
            ends = [(first + period.end(i, count), i) for i, count in enumerate(left) if count and active[i]]
            if not ends and not changes:
                return
            last, used_up = min(ends, default=(changes[0][0] if changes else 0, None))
            if changes and changes[0][0] < last:
                last, used_up = changes[0][0], None
            first, drawn = last, drawn + period.counts(last - first)


def require_lasting(data: DataSpec, sizes: BatchSizes, steps: int) -> None:
    """Raises PentadError if all sources are used up before `steps` steps are done."""
    end = Mixture(data, sizes).end
    if end is not None and end < sizes.first_sample(steps):
        found = f"data.sources are used up in step {sizes.batch_of_sample(end)}"
        raise PentadError(f"{found}: expected enough for run.steps = {steps} (more data, or more epochs of it)")


def drawn_by(data: DataSpec, sizes: BatchSizes, batches: int) -> list[dict[str, Any]]:
    """How many sequences this many global batches draw from each source; saved in checkpoints, for
    `require_resumable`."""
    drawn = Mixture(data, sizes).drawn(sizes.first_sample(batches))
    return [
        {"name": source.name, "fingerprint": source.fingerprint, "sequences": int(count)}
        for source, count in zip(data.sources, drawn, strict=True)
    ]


def require_resumable(data: DataSpec, sizes: BatchSizes, batches: int, saved: list[dict[str, Any]]) -> None:
    """Raises PentadError unless this many global batches draw what the run has drawn (`saved`, see `drawn_by`)."""
    found = {each["fingerprint"]: each for each in drawn_by(data, sizes, batches)}
    before = {each["fingerprint"]: each for each in saved}
    for fingerprint in before:
        if fingerprint not in found:
            if len(before) == len(found) == 1:
                raise another_corpus(data.sources[0], data.sources[0].fingerprint, fingerprint)
            drawn = f"of which the run has drawn {before[fingerprint]['sequences']} sequences"
            expected = f"expected {before[fingerprint]['name']}, {drawn}: name the folder where it is now"
            raise PentadError(f"data.sources has no corpus with fingerprint {fingerprint[:12]}: {expected}")
    for fingerprint, each in found.items():
        count = before.get(fingerprint, {"sequences": 0})["sequences"]
        if each["sequences"] != count:
            text = f"data.sources draw {each['sequences']} sequences of {each['name']} in {batches} batches"
            expected = f"expected {count}, as the run has: change weights from a step on with data.curriculum"
            raise PentadError(f"{text}: {expected}")


def another_corpus(source: SourceSpec, found: str, expected: str) -> PentadError:
    """The error for a source that is not the one that the run started with, or that its other ranks read."""
    fault = f"{source.key} is {source.path}, which has fingerprint {found[:12]}"
    advice = "name the folder where it is now, or choose another run.name"
    return PentadError(f"{fault}: expected {expected[:12]}, the corpus the run started with: {advice}")
