"""The spike filter against Python's own statistics."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.spec.optimizer import SpikeSpec
from pentad.workers.params.spike_filter import SpikeFilter

CPU = torch.device("cpu")
VALUE = st.floats(0.5, 2.0) | st.sampled_from([1e3, math.inf, math.nan])


def taken(filter_: SpikeFilter, steps: list[tuple[float, float]]) -> list[bool]:
    values = [[torch.tensor(value, dtype=torch.float64) for value in step] for step in steps]
    return [bool(filter_.filtered(*step).isfinite()) for step in values]


def expected(spec: SpikeSpec, steps: list[tuple[float, float]]) -> list[bool]:
    known: list[tuple[float, float]] = []
    found = []
    for step in steps:
        window = known[-spec.window :]
        finite = all(map(math.isfinite, step))
        is_spike = len(window) >= spec.min_steps and any(
            value > fmean(column) + spec.threshold * stdev(column)
            for value, column in zip(step, zip(*window, strict=True), strict=True)
        )
        found.append(finite and not is_spike)
        known += [step] * finite
    return found


@given(st.lists(st.tuples(VALUE, VALUE), min_size=1, max_size=24), st.integers(2, 5), st.integers(5, 9))
def test_a_spike_is_far_above_the_mean_of_the_last_steps(
    steps: list[tuple[float, float]], min_steps: int, window: int
) -> None:
    spec = SpikeSpec(3.0, window, min_steps)
    # Where all earlier values of a kind are equal, rounding decides: such steps are not compared.
    filter_ = SpikeFilter(spec, CPU)
    reference = expected(spec, steps)
    for number, accepted in enumerate(taken(filter_, steps)):
        before = [step for step in steps[:number] if all(map(math.isfinite, step))][-window:]
        if len({step[0] for step in before}) > 1 and len({step[1] for step in before}) > 1:
            assert accepted == reference[number]


def test_a_level_that_lasts_becomes_normal_and_a_value_that_is_not_finite_leaves_no_trace() -> None:
    spec = SpikeSpec(3.0, 8, 4)
    steady = [(1.0 + 0.01 * (number % 3), 1.0) for number in range(8)]
    assert taken(SpikeFilter(spec, CPU), [*steady, *[(5.0, 1.0)] * 6])[8:] == [False, *[True] * 5]
    with_nan, without = SpikeFilter(spec, CPU), SpikeFilter(spec, CPU)
    assert taken(with_nan, [*steady[:4], (math.nan, 1.0), (1.0, math.inf), *steady[4:]])[4:6] == [False, False]
    taken(without, steady)
    assert torch.equal(with_nan.window, without.window)


@pytest.mark.parametrize("length", [4, 8, 16])
def test_a_window_of_another_length_keeps_the_newest_steps(length: int) -> None:
    old, new = SpikeFilter(SpikeSpec(3.0, length, 2), CPU), SpikeFilter(SpikeSpec(3.0, 8, 2), CPU)
    taken(old, [(float(number), 1.0) for number in range(6)])
    new.load(old.window)
    newest = [float(number) for number in range(6)][-min(length, 8) :]
    assert new.window[0][new.window[0].isfinite()].tolist() == newest
    new.load(None)
    assert new.window.isnan().all()
