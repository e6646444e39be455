"""A step's batch never depends on what was prefetched, and no more is prefetched than there is room for."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.workers.abort import Aborted
from pentad.workers.data.batch_loader import MOST_AHEAD, Prefetcher, mtp_targets
from pentad.workers.data.samples import Sample


def nothing() -> None:
    pass


def settled(prefetcher: Prefetcher[int]) -> list[int]:
    """The steps that are ready once the thread is idle."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with prefetcher.changed:
            if prefetcher.loading < 0 and not prefetcher._has_room():
                return sorted(prefetcher.ready)
        time.sleep(0.001)
    raise AssertionError("the thread does not settle")


@pytest.fixture
def made() -> Iterator[list[Prefetcher[int]]]:
    found: list[Prefetcher[int]] = []
    yield found
    for each in found:
        each.close()


def test_mtp_targets_are_the_tokens_that_follow_in_the_same_document() -> None:
    documents = [1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11]  # the last token of each is only a target
    inputs, following = (np.concatenate([each[part] for each in documents]) for part in (slice(-1), slice(1, None)))
    masked = following != 10
    sample = Sample(inputs, following, masked, (0, 4, 5))
    expected = [[3, 4, 5, -100, -100, -100, 11, -100], [4, 5, -100, -100, -100, 11, -100, -100]]
    found = mtp_targets(sample, 2, separate=True)
    assert [each.tolist() for each in found] == expected
    across = mtp_targets(sample, 2, separate=False)
    assert across[0].tolist() == [3, 4, 5, 7, 9, -100, 11, -100]


@given(steps=st.lists(st.integers(0, 30), max_size=20), limit=st.sampled_from([1, 3, 100]))
def test_any_order_of_steps_gets_the_data_of_each(steps: list[int], limit: int) -> None:
    prefetcher = Prefetcher(lambda step: 10 * step, lambda _: 1, limit)
    assert [prefetcher.get(step, nothing) for step in steps] == [10 * step for step in steps]
    prefetcher.close()


@pytest.mark.parametrize(("limit", "ahead"), [(1, 1), (5, 5), (100, MOST_AHEAD)])
def test_it_stays_within_its_bytes(made: list, limit: int, ahead: int) -> None:
    made.append(Prefetcher(lambda step: step, lambda _: 1, limit))
    assert [made[0].get(step, nothing) for step in range(7, 27)] == list(range(7, 27))
    assert settled(made[0]) == list(range(27, 27 + ahead))


def test_a_run_of_few_steps_loads_few_more(made: list) -> None:
    made.append(Prefetcher(lambda step: step, lambda _: 1, 100))
    for first in (7, 3, 50):  # after each jump anew
        for number in range(4):
            assert made[0].get(first + number, nothing) == first + number
            assert settled(made[0]) == [first + number + 1 + ahead for ahead in range(number + 1)]


def test_a_step_that_cannot_be_loaded_raises_when_it_is_due_and_can_be_tried_again(made: list) -> None:
    broken = {2}

    def load(step: int) -> int:
        if step in broken:
            raise OSError(f"step {step}")
        return step

    made.append(Prefetcher(load, lambda _: 1, 100))
    assert [made[0].get(step, nothing) for step in (0, 1)] == [0, 1]
    with pytest.raises(OSError, match="step 2"):
        made[0].get(2, nothing)
    broken.clear()
    assert [made[0].get(step, nothing) for step in (2, 3)] == [2, 3]


def test_what_was_got_is_freed_by_whoever_got_it(made: list) -> None:
    class Loaded:
        pass

    made.append(Prefetcher(lambda step: Loaded(), lambda _: 1, 100))
    for step in range(20):
        found = made[0].get(step, nothing)
        is_alive = weakref.ref(found)
        del found
        assert is_alive() is None


def test_whoever_waits_can_be_aborted(made: list) -> None:
    release = threading.Event()
    made.append(Prefetcher(lambda step: release.wait(20) and step, lambda _: 1, 1))

    def check() -> None:
        raise Aborted

    with pytest.raises(Aborted):
        made[0].get(0, check)
    release.set()
    assert made[0].get(1, nothing) == 1


def test_what_loads_is_let_go_when_its_background_work_ends() -> None:
    """A loader has files open, and a rank creates one in each of its generations."""

    class Loader:
        def __init__(self) -> None:
            self.prefetcher = Prefetcher(self.load, lambda _: 1, 1)

        def load(self, step: int) -> int:
            return step

    loader = Loader()
    assert loader.prefetcher.get(3, nothing) == 3 and loader.prefetcher.thread is not None
    found, thread = weakref.ref(loader), loader.prefetcher.thread
    gc.disable()
    try:
        loader.prefetcher.close()
        thread.join(10)
        del loader
        assert found() is None
    finally:
        gc.enable()
