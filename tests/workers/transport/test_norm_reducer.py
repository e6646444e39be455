"""Sums of the gradient norm on their way along the pipeline."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from pentad.workers.transport.norm_reducer import NormPartial, NormReducer

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def cancelled() -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64)


@pytest.fixture
def ranks(cancelled: torch.Tensor) -> Iterator[list[NormReducer]]:
    """The reducers of a pipeline of two ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    clients = [dist.TCPStore("127.0.0.1", store.port) for _ in range(2)]
    found = [NormReducer(client, 0, rank, 1, 2, cancelled) for rank, client in enumerate(clients)]
    yield found
    for each in found:
        each.close()
    for thread in threading.enumerate():
        if thread.name == "norm reducer":
            thread.join(10)


def test_every_rank_gets_the_sums_of_all(ranks: list[NormReducer]) -> None:
    for step in range(3):
        for number, rank in enumerate(ranks):
            rank.submit(NormPartial(step, torch.tensor([1.0, 10.0**number], dtype=torch.float64), lambda: True))
        for rank in ranks:
            assert rank.wait(step, lambda: None).tolist() == [[2.0, 11.0]] and rank.newest_partial == step


def test_sums_that_arrive_after_an_abort_count_nowhere(ranks: list[NormReducer], cancelled: torch.Tensor) -> None:
    """A GPU whose waits an abort has ended computes with what its buffers happen to hold. Its host may learn of the
    abort later, and other ranks too."""
    late, other = ranks
    asked, aborted = threading.Event(), threading.Event()

    def arrived() -> bool:
        asked.set()
        return aborted.wait(10)

    late.submit(NormPartial(0, torch.tensor([math.pi], dtype=torch.float64), arrived))
    other.submit(NormPartial(0, torch.tensor([1.0], dtype=torch.float64), lambda: True))
    assert asked.wait(10)
    cancelled.fill_(math.nan)
    aborted.set()

    def give_up_later() -> None:
        checks.append(1)
        if len(checks) > 200:
            raise TimeoutError

    checks: list[int] = []
    with pytest.raises(TimeoutError):
        other.wait(0, give_up_later)
    assert late.newest_partial == -1
