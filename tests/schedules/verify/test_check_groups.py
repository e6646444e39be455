"""Groups are proven: broken ones are refused, and the ring steps of valid ones meet under every schedule."""

from __future__ import annotations

import numpy as np
import pytest
from random_groups import random_groups

from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.batch import BatchSpec, DocumentCosts
from pentad.schedules.spec.cp_layout import Document, Share, StepGroups, expert_ranks
from pentad.schedules.verify.check_groups import (
    Exchange,
    ExpertExchange,
    check_exchanges,
    check_rings,
    check_shares,
)

DOCUMENTS = (Document(0, 0, 12), Document(0, 12, 4), Document(1, 0, 6))
PAIR = (0, 1)
GOOD = StepGroups(
    DOCUMENTS,
    (
        (Share(PAIR, (0,), ()), Share(PAIR, (0,), (1,)), Share((2,), (), (2,))),
        (Share((0,), (), ()), Share((1,), (), ()), Share((2,), (), ())),
    ),
)


def changed(rank: int, share: Share) -> StepGroups:
    first = list(GOOD.shares[0])
    first[rank] = share
    return GOOD._replace(shares=(tuple(first), *GOOD.shares[1:]))


def test_good_groups_are_proven() -> None:
    check_shares(GOOD, 10)


@pytest.mark.parametrize(
    ("groups", "capacity", "text"),
    [
        (GOOD, 9, "rank 1 of the pool has 10 tokens: expected at most 9"),
        (
            changed(1, Share((1,), (), (1,))),
            10,
            "rank 0 of the pool is in another group than rank 1: expected the same",
        ),
        (changed(2, Share((1, 2), (), (2,))), 10, "is in another group than rank 1: expected the same"),
        (changed(2, Share(PAIR, (), (2,))), 10, "expected a group of different ranks with it"),
        (changed(0, Share((1, 0), (0,), ())), 10, "rank 0 of the pool is in another group than rank 1: expected"),
        (changed(2, Share((2,), (), ())), 10, "document 2 of the step is trained 0 times: expected once"),
        (changed(2, Share((2,), (), (1, 2))), 10, "document 1 of the step is trained 2 times: expected once"),
        (changed(1, Share(PAIR, (), (1,))), 10, "rank 0 of the pool is in another group than rank 1"),
    ],
)
def test_broken_groups_are_refused(groups: StepGroups, capacity: int, text: str) -> None:
    with pytest.raises(PentadError, match=text):
        check_shares(groups, capacity)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved"])
@pytest.mark.parametrize("seed", range(3))
def test_ring_steps_of_any_groups_meet_under_every_schedule(name: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = [random.integers(1, 9, 4).astype(np.int64) for _ in range(24)]
    batch = BatchSpec(24, 32, 4, 3, document_costs=DocumentCosts(1.0, 1.0), capacity=200)
    groups, _ = random_groups(rows, batch, 2)
    check_shares(groups, 200)
    for stream in compile_program(name, 2, 4).streams:
        check_rings(groups, stream)
        check_rings(groups, stream, cp=2, ep=3)


def test_rings_in_other_orders_do_not_meet() -> None:
    """Two ranks with the same two exchanges in opposite orders; and three ranks that wait for one another."""
    first, second = Exchange(1, 1, 4), Exchange(1, 1, 6)
    back = [each._replace(to=0, source=0) for each in (second, first)]
    with pytest.raises(PentadError, match="exchange 0 of rank 0 of the pool"):
        check_exchanges([[first, second], back])
    events = [[Exchange(other, other, 2) for other in order] for order in ((1, 2), (2, 0), (0, 1))]
    with pytest.raises(PentadError, match="never meets"):
        check_exchanges(events)
    check_exchanges([events[0], events[1][::-1], events[2]])


def test_ranks_that_leave_out_an_exchange_of_experts_or_take_another_first_do_not_meet() -> None:
    both, other = (ExpertExchange(range(2), microbatch) for microbatch in (0, 1))
    check_exchanges([[both, other], [both, other]])
    for late in ([], [both], [other, both]):
        with pytest.raises(PentadError, match="never meets"):
            check_exchanges([[both, other], late])
    ring = [Exchange(1, 1, 4), Exchange(0, 0, 4)]
    check_exchanges([[each, both] for each in ring])
    with pytest.raises(PentadError, match="never meets"):
        check_exchanges([[ring[0], both], [both, ring[1]]])


def test_a_rank_without_documents_joins_exchanges_of_experts() -> None:
    """Only the first of the pool's four ranks (dp2 x ep2) has a document."""
    shares = (Share((0,), (), (0,)), *(Share((rank,), (), ()) for rank in (1, 2, 3)))
    groups = StepGroups((Document(0, 0, 3),), (shares,))
    assert groups.microbatches(1, 2) == [1, 1, 0, 0] and groups.microbatches(1, 1) == [1, 0, 0, 0]
    assert groups.padded_tokens(0, range(2), 2) == (4, 2) and groups.padded_tokens(0, range(2, 4), 2) == (0, 0)
    assert [[*expert_ranks(rank, 2, 2)] for rank in (0, 3, 6)] == [[0, 2], [1, 3], [4, 6]]
