"""Rates by size, and links fitted to timings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.simulate.rates import ExpertRates, Link, fit_link, rate_at

CURVE = ((1e9, 100.0), (1e11, 300.0))


@given(st.floats(0, 1e-2), st.floats(1e6, 1e12))
def test_a_fit_recovers_the_link_of_exact_timings(latency: float, bandwidth: float) -> None:
    link, sizes = Link(latency, bandwidth), (2.0**12, 2.0**16, 2.0**20, 2.0**28)
    found = fit_link(sizes, [link.seconds(size) for size in sizes])
    assert [found.seconds(size) for size in sizes] == pytest.approx([link.seconds(size) for size in sizes], rel=1e-6)


def test_a_fit_of_noise_has_no_negative_time() -> None:
    for timings in ([2e-3, 1e-3], [1e-6, 1e-3]):
        link = fit_link([2**12, 2**20], timings)
        assert link.latency >= 0 and link.bandwidth > 0


def test_rates_go_through_their_points_and_stay_between_them() -> None:
    assert [rate_at(CURVE, size) for size in (1.0, 1e9, 1e10, 1e11, 1e15)] == pytest.approx([100, 100, 200, 300, 300])


def test_experts_with_fewer_rows_than_measured_take_as_long_as_with_the_fewest() -> None:
    rates = ExpertRates(((64.0, 100.0), (256.0, 300.0)), ((64.0, 50.0),), ((128.0, 80.0),))
    assert rates.at(128) == pytest.approx((200, 50, 80))
    for rows in (1.0, 16.0, 64.0):
        assert [rows / each for each in rates.at(rows)] == pytest.approx([64 / 100, 64 / 50, 128 / 80])


def test_uniform_rates_are_those_of_any_rows() -> None:
    assert {ExpertRates.uniform(3.0, 2.0, 1.0).at(rows) for rows in (1.0, 7.0, 1e6)} == {(3.0, 2.0, 1.0)}
