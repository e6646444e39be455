"""Profiles of a step: packed and read back, nested by time, and added up by op."""

from __future__ import annotations

import random

import pytest

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.step_profile import (
    ASYNC,
    INSTRUCTION,
    KERNEL,
    KINDS,
    OPERATOR,
    OUTSIDE,
    OpTime,
    ProfileEvent,
    longest,
    nested,
    op_times,
    own_times,
    pack,
    unpack,
)


def event(start: int, nanoseconds: int, kind: str = OPERATOR, name: str = "aten::mm", track: int = 1) -> ProfileEvent:
    return ProfileEvent(kind, name, "0F0", "F", track, start, nanoseconds)


def tree(rng: random.Random, start: int, end: int, depth: int) -> list[ProfileEvent]:
    """An operator that calls others, which call others in turn."""
    found, at = [event(start, end - start)], start
    while depth and at < end:
        first = rng.randint(at, end)
        last = rng.randint(first, end)
        found += tree(rng, first, last, depth - 1)
        at = last + 1
    return found


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(20))
def test_what_one_thread_did_is_one_row_and_its_own_times_add_up(seed: int) -> None:
    rng = random.Random(seed)
    events = [each for root in range(3) for each in tree(rng, 2000 * root, 2000 * root + 1500, 3)]
    rng.shuffle(events)
    assert len(nested(events)) == 1
    owns = list(own_times(events))
    assert sorted(each for each, _ in owns) == sorted(events)
    assert sum(own for _, own in owns) == 3 * 1500 and all(own >= 0 for _, own in owns)
    covering = [sum(each.start <= time < each.end for each in events) for time in range(6000)]
    assert sum(own for _, own in owns) == sum(depth > 0 for depth in covering)


@pytest.mark.parametrize("seed", range(20))
def test_events_of_a_row_contain_each_other_or_are_apart(seed: int) -> None:
    rng = random.Random(seed)
    events = [event(rng.randint(0, 50), rng.randint(0, 20)) for _ in range(40)]
    rows = nested(events)
    assert sorted(each for row in rows for each in row) == sorted(events)
    for row in rows:
        for index, one in enumerate(row):
            for other in row[index + 1 :]:
                assert one.start <= other.start
                assert other.end <= one.end or other.start >= one.end


def test_a_profile_is_read_as_it_was_written() -> None:
    events = (
        event(1, 2),
        event(5, 7, KERNEL, "gemm", 3),
        event(2**60, 1, INSTRUCTION, "1F0"),
        event(-4, 0, ASYNC, "é"),
    )
    assert unpack(pack(events)) == events
    assert unpack(pack(())) == ()


@pytest.mark.parametrize("length", [0, 100, -1])
def test_a_damaged_profile_is_refused_in_a_sentence(length: int) -> None:
    with pytest.raises(PentadError, match="not an intact Arrow file"):
        unpack(pack([event(1, 2)])[:length])
    with pytest.raises(PentadError, match=r"column kind .* has 'odd': expected instruction"):
        unpack(pack([event(1, 2, "odd")]))
    with pytest.raises(PentadError, match=r"column nanoseconds .* has -1"):
        unpack(pack([event(1, -1)]))


def test_the_longest_of_the_first_kinds_are_kept_in_their_order() -> None:
    rng = random.Random(0)
    events = [event(start, rng.randint(1, 99), rng.choice(KINDS)) for start in range(200)]
    for most in (0, 1, 70, 120, 200, 500):
        kept = longest(events, most)
        assert kept == [each for each in events if each in kept] and len(kept) == min(most, 200)
        worth = {each: (-KINDS.index(each.kind), each.nanoseconds) for each in events}
        left = [worth[each] for each in events if each not in kept]
        assert not left or not kept or max(left) <= min(worth[each] for each in kept)


def test_a_rank_counts_its_kernels_or_the_operators_of_its_host() -> None:
    host = [
        event(0, 100, INSTRUCTION, "0F0"),
        event(10, 60, name="aten::linear"),
        event(20, 40),
        event(70, 900, ASYNC, "gloo:send"),
    ]
    expected = OpTime("F", "aten::mm", 1, 40e-9), OpTime("F", OUTSIDE, 1, 40e-9), OpTime("F", "aten::linear", 1, 20e-9)
    assert op_times([host]) == expected
    kernels = [event(500, 30, KERNEL, "gemm", 7), event(540, 30, KERNEL, "gemm", 7)]
    assert op_times([[*host, *kernels]]) == (OpTime("F", "gemm", 2, 60e-9),)
    assert OpTime("F", "aten::mm", 2, 80e-9) in op_times([host, host])
