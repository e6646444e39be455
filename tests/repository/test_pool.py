"""Pools of rank processes: every order gets its own answers."""

from __future__ import annotations

from collections.abc import Iterator

import echo_worker
import pool
import pytest
from pool import Pool

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def pair() -> Iterator[Pool]:
    made = Pool(2, echo_worker.serve)
    yield made
    made.stop()


def test_ranks_answer_and_stay_alive(pair: Pool) -> None:
    for seconds in (0.0, 0.1):
        pair.send([seconds] * 2)
        assert pair.answers(2, tuple) == [(0, seconds), (1, seconds)]
    assert all(process.is_alive() for process in pair.processes)


def test_a_late_answer_is_not_taken_for_the_next_one(pair: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.send([0.0, 0.0])
    pair.answers(2, tuple)
    monkeypatch.setattr(pool, "TIMEOUT", 0.3)
    pair.send([0.0, 1.0])
    with pytest.raises(AssertionError, match=r"ranks \[1\]: no answer in 0\.3 s"):
        pair.answers(2, tuple)
    monkeypatch.undo()
    pair.send([0.0, 0.0])
    assert pair.answers(2, tuple) == [(0, 0.0), (1, 0.0)]


def test_a_dead_rank_is_reported_and_replaced(pair: Pool) -> None:
    pair.send([0.0, -1.0])
    with pytest.raises(AssertionError, match="rank 1 died"):
        pair.answers(2, tuple)
    pair.send([0.0, 0.0])
    assert pair.answers(2, tuple) == [(0, 0.0), (1, 0.0)]


def test_after_an_interrupted_start_every_rank_is_started(pair: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def __init__(self) -> None:
            self.context, self.pipes = pool.process_context(), 0

        def __getattr__(self, name: str) -> object:
            return getattr(self.context, name)

        def Pipe(self) -> object:
            self.pipes += 1
            if self.pipes == 2:
                raise TimeoutError
            return self.context.Pipe()

    context = Interrupted()
    monkeypatch.setattr(pool, "process_context", lambda: context)
    with pytest.raises(TimeoutError):
        pair.send([0.0, 0.0])
    pair.send([0.0, 0.0])
    assert pair.answers(2, tuple) == [(0, 0.0), (1, 0.0)]
