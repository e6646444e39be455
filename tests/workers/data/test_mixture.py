"""Every source has its share of every window of samples, and any sample's source is found without earlier ones."""

from __future__ import annotations

import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.batch import BatchSizes, RampupStage
from pentad.schedules.spec.data import DataSpec, SourceSpec, WeightChange
from pentad.workers.data.mixture import (
    LONGEST_PERIOD,
    Mixture,
    balanced_sequence,
    drawn_by,
    require_lasting,
    require_resumable,
    shares_of,
)

weights = st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any)


def data_of(*sources: tuple[float, float | None, int], curriculum: tuple[WeightChange, ...] = ()) -> DataSpec:
    """Sources of (weight, epochs, sequences) called a, b, c ..., whose fingerprints are their names."""
    specs = [
        SourceSpec(name, name, weight=weight, epochs=epochs, sequences=sequences, fingerprint=name)
        for name, (weight, epochs, sequences) in zip("abcdefgh", sources, strict=False)
    ]
    return DataSpec(tuple(specs), curriculum=curriculum)


def mixture_of(given: list[int], size: int = 1) -> Mixture:
    return Mixture(data_of(*((float(weight), None, 10) for weight in given)), BatchSizes(size))


@given(given=weights, first=st.integers(0, 10**12), count=st.integers(1, 200))
def test_every_source_keeps_its_proportion(given: list[int], first: int, count: int) -> None:
    """Within one sample after any number of samples, and so within two in any window."""
    mixture = mixture_of(given)
    sources, _ = mixture.draws(first, count)
    shares = [Fraction(weight, sum(given)) for weight in given]
    bound = 1 - Fraction(1, 2 * max(2, sum(map(bool, given))) - 2)
    drawn = mixture.drawn(first).tolist()
    for at, source in enumerate([-1, *sources.tolist()]):
        if source >= 0:
            drawn[source] += 1
        assert max(abs(n - share * (first + at)) for n, share in zip(drawn, shares, strict=True)) <= bound < 1
    assert all(share or not n for n, share in zip(drawn, shares, strict=True))


@given(given=weights, first=st.integers(0, 500), count=st.integers(1, 100))
def test_a_source_is_drawn_in_order_from_wherever_one_starts(given: list[int], first: int, count: int) -> None:
    mixture = mixture_of(given)
    sources, indices = mixture.draws(0, first + count)
    for source in range(len(given)):
        assert indices[sources == source].tolist() == list(range(int((sources == source).sum())))
    found = mixture.draws(first, count)
    assert np.array_equal(found, (sources[first:], indices[first:]))


@pytest.mark.parametrize(("given", "shares"), [((0.7, 0.2, 0.1), (7, 2, 1)), ((3, 0), (1, 0)), ((1e-3, 2), (1, 2000))])
def test_weights_are_exact_decimals(given: tuple[float, ...], shares: tuple[int, ...]) -> None:
    assert shares_of(given) == shares


def test_shares_without_a_common_denominator_are_rounded() -> None:
    found = shares_of((123_456_789.0, 987_654_321.0, 55_555_555.0))
    assert sum(found) == LONGEST_PERIOD
    exact = LONGEST_PERIOD * 123_456_789 / (123_456_789 + 987_654_321 + 55_555_555)
    assert abs(found[0] - exact) < 1
    with pytest.raises(PentadError, match=r"a weight is 1e-07: expected 0 or at least 1 / 65536 of all weights"):
        shares_of((1e-7, 0.3, 0.6))


@pytest.mark.quiet
def test_the_longest_period_takes_less_than_a_second() -> None:
    began = time.process_time()
    found = balanced_sequence((1, 30_000, 30_000, LONGEST_PERIOD - 60_001))
    assert np.bincount(found).tolist() == [1, 30_000, 30_000, LONGEST_PERIOD - 60_001]
    assert time.process_time() - began < 1


def test_the_sequence_of_sources_never_changes() -> None:
    assert balanced_sequence((5, 3, 2)).tolist() == [0, 1, 0, 2, 0, 1, 0, 2, 0, 1]


@given(
    sources=st.lists(
        st.tuples(st.integers(0, 9), st.none() | st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=5
    ).filter(lambda each: any(weight for weight, _, _ in each)),
    size=st.integers(1, 7),
)
def test_a_source_that_is_used_up_leaves_its_share_to_the_others(
    sources: list[tuple[int, int | None, int]], size: int
) -> None:
    mixture = Mixture(data_of(*((float(w), e and float(e), n) for w, e, n in sources)), BatchSizes(size))
    limits = [epochs and epochs * sequences for _, epochs, sequences in sources]
    count = 150 if mixture.end is None else mixture.end
    drawn, indices = mixture.draws(0, count)
    for source, limit in enumerate(limits):
        its = indices[drawn == source]
        assert its.tolist() == list(range(len(its))) and (limit is None or len(its) <= limit)
    left = [source for source, (weight, _, _) in enumerate(sources) if weight]
    for number, phase in enumerate(mixture.phases):
        if number:
            assert phase.used_up is not None and phase.drawn[phase.used_up] == limits[phase.used_up]
            left.remove(phase.used_up)
        assert [source for source, share in enumerate(phase.shares) if share] == left
        total = sum(sources[source][0] for source in left)
        end = mixture.phases[number + 1].first if number + 1 < len(mixture.phases) else count
        for at in range(phase.first, end):
            of_phase = mixture.drawn(at) - phase.drawn
            assert all(abs(of_phase[i] - sources[i][0] / total * (at - phase.first)) < 1 for i in left)
    if mixture.end is not None:
        assert mixture.end == sum(limits[i] or 0 for i, (weight, _, _) in enumerate(sources) if weight)


def test_weights_change_at_the_first_sample_of_their_step() -> None:
    changes = (WeightChange(3, (0.0, 1.0)), WeightChange(5, (1.0, 1.0)))
    mixture = Mixture(data_of((1.0, None, 5), (0.0, None, 5), curriculum=changes), BatchSizes(4))
    assert [(phase.first, phase.shares) for phase in mixture.phases] == [(0, (1, 0)), (12, (0, 1)), (20, (1, 1))]
    assert mixture.draws(0, 24)[0].tolist() == [0] * 12 + [1] * 8 + [0, 1, 0, 1]
    assert list(mixture.changes(5)) == [{"sample": 20, "shares": {"a": 0.5, "b": 0.5}, "used_up": None}]
    assert [each["sample"] for batch in range(9) for each in mixture.changes(batch)] == [12, 20]


def test_data_that_does_not_last_names_the_step() -> None:
    data = data_of((1.0, 1.5, 7), (3.0, 1.0, 6))
    (change,) = Mixture(data, BatchSizes(4)).changes(2)
    assert change == {"sample": 8, "shares": {"a": 1.0, "b": 0.0}, "used_up": "b"}
    with pytest.raises(PentadError, match=r"data.sources hold 16 samples: expected more"):
        Mixture(data, BatchSizes(4)).draws(14, 3)
    assert Mixture(data, BatchSizes(4)).end == 10 + 6
    require_lasting(data, BatchSizes(4), 4)
    with pytest.raises(PentadError, match=r"data.sources are used up in step 4: expected enough for run.steps = 5"):
        require_lasting(data, BatchSizes(4), 5)


def test_a_run_resumes_with_what_it_has_drawn() -> None:
    before = data_of((3.0, None, 9), (1.0, None, 9))
    saved = drawn_by(before, BatchSizes(4), 5)
    assert [each["sequences"] for each in saved] == [15, 5]
    require_resumable(before, BatchSizes(4), 5, saved)
    later = data_of((3.0, None, 9), (1.0, None, 9), (0.0, None, 9), curriculum=(WeightChange(5, (1.0, 0.0, 7.0)),))
    require_resumable(later, BatchSizes(4), 5, saved)
    message = r"data.sources draw 14 sequences of a in 5 batches: expected 15, as the run has: .* with data.curriculum"
    with pytest.raises(PentadError, match=message):
        require_resumable(data_of((7.0, None, 9), (3.0, None, 9)), BatchSizes(4), 5, saved)
    with pytest.raises(PentadError, match=r"data.path is a, which has fingerprint a: expected other, the corpus"):
        require_resumable(
            data_of((1.0, None, 9)), BatchSizes(4), 5, [{"name": "x", "fingerprint": "other", "sequences": 20}]
        )


def test_a_ramp_draws_the_samples_of_full_batches_in_their_order() -> None:
    data = data_of((1.0, None, 50), (2.0, None, 50), curriculum=(WeightChange(3, (3.0, 1.0)),))
    sizes = BatchSizes(6, (RampupStage(2, 3), RampupStage(4, 2)))
    mixture = Mixture(data, sizes)
    batches = [mixture.draws(sizes.first_sample(batch), sizes.size(batch)) for batch in range(8)]
    sources, indices = (np.concatenate(each) for each in zip(*batches, strict=True))
    assert [len(each) for each, _ in batches] == [2, 2, 2, 4, 4, 6, 6, 6]
    assert np.array_equal(sources, mixture.draws(0, 32)[0])
    for source in (0, 1):  # no sample is left out or repeated
        assert indices[sources == source].tolist() == list(range(int((sources == source).sum())))
    (change,) = mixture.changes(3)
    assert change["sample"] == 6 and not list(mixture.changes(4))
