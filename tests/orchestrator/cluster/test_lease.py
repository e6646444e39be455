"""The lease on a run's ranks: one driver at a time, and none forever."""

from __future__ import annotations

import pytest

from pentad.orchestrator.cluster.lease import Holder, Lease, renew_seconds, silent_seconds
from pentad.orchestrator.config.config import load
from pentad.orchestrator.config.recovery_sections import SHORTEST_LEASE
from pentad.schedules.ir.errors import PentadError

pytestmark = pytest.mark.timeout(20)
FIRST, SECOND, THIRD = (Holder(token, job, "10.0.0.1", 1) for token, job in (("a", "1"), ("b", "2"), ("c", "3")))


def test_only_who_knows_that_the_holder_is_gone_gets_its_lease() -> None:
    lease = Lease(100.0, FIRST, 0.0)
    assert not lease.acquire(SECOND, None, 1.0) and not lease.acquire(SECOND, THIRD, 1.0)
    assert lease.view(1.0) == (FIRST, 0, 1.0)
    assert lease.acquire(SECOND, FIRST, 2.0)
    assert lease.view(2.0).holder == SECOND


def test_of_two_drivers_that_replace_the_same_holder_one_gets_the_lease() -> None:
    lease = Lease(100.0, FIRST, 0.0)
    assert [lease.acquire(driver, FIRST, 1.0) for driver in (SECOND, THIRD)] == [True, False]


def test_a_replaced_holder_learns_it_at_its_next_renewal() -> None:
    lease = Lease(100.0, FIRST, 0.0)
    assert lease.renew(FIRST, 1.0) and lease.acquire(SECOND, FIRST, 2.0)
    assert not lease.renew(FIRST, 3.0) and lease.renew(SECOND, 3.0)


def test_a_keeper_that_ray_has_restarted_belongs_to_the_driver_that_renews() -> None:
    lease = Lease(100.0, None, 0.0)
    assert lease.renew(SECOND, 1.0) and not lease.acquire(THIRD, None, 1.0)


def test_a_lease_expires_without_renewals_and_not_before() -> None:
    lease = Lease(100.0, FIRST, 0.0)
    assert not lease.is_expired(100.0) and lease.is_expired(100.1)
    lease.renew(FIRST, 99.0)
    assert not lease.is_expired(199.0) and lease.is_expired(199.1)


@pytest.mark.parametrize("seconds", [SHORTEST_LEASE, 10.0, 120.0, 3600.0])
def test_a_holder_is_silent_before_its_lease_expires_and_after_several_renewals_are_due(seconds: float) -> None:
    assert 4 * renew_seconds(seconds) < silent_seconds(seconds) <= seconds / 2


@pytest.mark.parametrize("seconds", [0, SHORTEST_LEASE])
def test_a_lease_of_no_or_of_enough_seconds_is_accepted(seconds: float) -> None:
    assert load(None, [f"elastic.driver_lease={seconds}"]).elastic.driver_lease == seconds


def test_a_lease_that_a_busy_driver_would_lose_is_refused() -> None:
    with pytest.raises(PentadError, match=r"elastic\.driver_lease is 1\.0: expected 0, or at least 5"):
        load(None, ["elastic.driver_lease=1"])
