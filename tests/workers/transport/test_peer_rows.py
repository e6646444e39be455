"""Rows that tensor ranks exchange by reads of peers' memory: in every order that lanes and flags allow each rank gets
what its peers shared in the same exchange, none waits for ever, and products over them equal those of one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from simulated_gpus import Condition, Lanes, SimulatedFlags, SimulatedMemory, run_in_some_order

from pentad.schedules.spec.plan import ROW_SLOTS
from pentad.workers.parallel import tensor_parallel
from pentad.workers.parallel.tensor_parallel import TensorParallelGroup
from pentad.workers.transport.peer_rows import MOST_VIEWS, READ, SHARED, SHARED_NAME, PeerRows

ELEMENTS = 12  # of a slot
EXCHANGES = 11
STEP = 4  # exchanges, which is no multiple of the slots
FIRST = 4  # rank of the mesh that is tensor rank 0


class Exchange(NamedTuple):
    size: int  # elements
    gathers: bool
    in_flight: int  # at most, itself included if there are others


class SimulatedLane:
    """The lane 'rows' of a rank, and its events."""

    def __init__(self, lanes: Lanes, rank: int) -> None:
        self.lanes, self.handle = lanes, (rank, "rows")

    def follow(self) -> None:
        before = SimulatedEvent(self.lanes)
        with self.lanes.moved_to(self.handle):
            before.wait()

    def end(self) -> SimulatedEvent:
        with self.lanes.moved_to(self.handle):
            return SimulatedEvent(self.lanes)


class SimulatedEvent:
    def __init__(self, lanes: Lanes) -> None:
        self.lanes, self.passed = lanes, False
        lanes.enqueue(lambda: setattr(self, "passed", True))

    def wait(self) -> None:
        self.lanes.enqueue(ready=lambda: self.passed)


def flags_of(ranks: range) -> dict[Hashable, int]:
    return {("rows", slot, a, b): READ for slot in range(ROW_SLOTS) for a in ranks for b in ranks}


def memory_of(ranks: range, lanes: Lanes) -> tuple[dict[int, torch.Tensor], SimulatedMemory]:
    slots = {rank: torch.full((ROW_SLOTS, ELEMENTS), torch.nan, dtype=torch.float64) for rank in ranks}
    return slots, SimulatedMemory({rank: {SHARED_NAME: each.view(-1)} for rank, each in slots.items()}, lanes)


def shared_in(exchange: int, rank: int, size: int) -> torch.Tensor:
    return (100 * exchange + 10 * rank + torch.arange(size)).double()


def host(rank: int, ranks: range, lanes: Lanes, rows: PeerRows, plan: list[Exchange]) -> Iterator[Condition]:
    in_flight: list[tuple[Any, Callable[[], None]]] = []
    for number, exchange in enumerate(plan):
        if number % STEP == 0:
            rows.begin_step()
        size, start = exchange.size, number % exchange.size
        with lanes.on((rank, "compute")):
            if exchange.gathers:
                own = torch.empty(size, dtype=torch.float64)
                own.copy_(shared_in(number, rank, size))
                full = own.new_empty(len(ranks), size)
                arrival = rows.gather(own, full, keep=True)
                found = [(full[peer - FIRST], shared_in(number, peer, size)) for peer in ranks]
            else:
                rows.slot((size,), torch.empty(0, dtype=torch.float64)).copy_(shared_in(number, rank, size))
                parts = {peer: torch.empty(size - start, dtype=torch.float64) for peer in ranks if peer != rank}
                arrival = rows.read([(peer - FIRST, start, each) for peer, each in parts.items()])
                found = [(each, shared_in(number, peer, size)[start:]) for peer, each in parts.items()]
            in_flight.append((arrival, partial(check, found)))
            while len(in_flight) > exchange.in_flight:
                arrived, compare = in_flight.pop(0)
                arrived.wait()
                lanes.enqueue(compare)
        yield lambda: True


def check(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for found, expected in pairs:
        assert torch.equal(found, expected)


@pytest.mark.sampled(14)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("seed", range(20))
def test_in_every_order_ranks_get_what_their_peers_shared(count: int, seed: int) -> None:
    random, ranks = Random(seed), range(FIRST, FIRST + count)
    plan = [
        Exchange(random.randint(1, ELEMENTS), random.random() < 0.5, random.randint(0, 4)) for _ in range(EXCHANGES)
    ]
    lanes = Lanes()
    flags, (slots, memory) = SimulatedFlags(lanes, values=flags_of(ranks)), memory_of(ranks, lanes)
    hosts = []
    for rank in ranks:
        rows = PeerRows(ranks, rank, flags, memory, slots[rank].view(torch.uint8), SimulatedLane(lanes, rank))
        hosts.append(host(rank, ranks, lanes, rows, plan))
    run_in_some_order(lanes, hosts, random)


@pytest.mark.parametrize("ignored", [SHARED, READ])
def test_the_orders_tell_exchanges_that_ignore_a_flag(ignored: int) -> None:
    def run(seed: int) -> bool:
        random, ranks, lanes = Random(seed), range(FIRST, FIRST + 2), Lanes()
        flags, (slots, memory) = SimulatedFlags(lanes, ignored, flags_of(ranks)), memory_of(ranks, lanes)
        hosts = []
        for rank in ranks:
            rows = PeerRows(ranks, rank, flags, memory, slots[rank].view(torch.uint8), SimulatedLane(lanes, rank))
            hosts.append(host(rank, ranks, lanes, rows, [Exchange(ELEMENTS, False, 4)] * EXCHANGES))
        try:
            run_in_some_order(lanes, hosts, random)
        except AssertionError:
            return True
        return False

    assert any(map(run, range(20)))


class ThreadFlags:
    def __init__(self, values: dict[Hashable, int]) -> None:
        self.values, self.changed = values, threading.Condition()

    def write(self, flag: Hashable, value: int, stream: None = None) -> None:
        with self.changed:
            self.values[flag] = value
            self.changed.notify_all()

    def wait(self, flag: Hashable, value: int, stream: None = None) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.values[flag] >= value, 20)

    def wait_bit(self, flag: Hashable, bit: int, stream: None = None) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.values[flag] & bit, 20)


class EagerLane:
    handle = None

    def follow(self) -> None:
        pass

    def end(self) -> EagerLane:
        return self

    def wait(self) -> None:
        pass


def on_ranks(count: int, elements: int, work: Callable[[TensorParallelGroup], Any]) -> list[Any]:
    """What `work` returns on each of the ranks, which are threads."""
    slots = {rank: torch.full((ROW_SLOTS, elements), torch.nan, dtype=torch.float64) for rank in range(count)}
    memory = SimulatedMemory({rank: {SHARED_NAME: each.view(-1)} for rank, each in slots.items()})
    flags = ThreadFlags(flags_of(range(count)))
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        rows = PeerRows(range(count), rank, flags, memory, slots[rank].view(torch.uint8), EagerLane())
        group: Any = object()
        found[rank] = work(TensorParallelGroup(group, count, rank, rows))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[rank] for rank in range(count)]


@pytest.fixture(params=[1, 1000], ids=["split", "whole"])
def split_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "SPLIT_ROWS", request.param)


@pytest.mark.usefixtures("split_rows")
@pytest.mark.parametrize("count", [2, 4])
def test_products_over_ranks_equal_those_of_one(count: int) -> None:
    tokens, inner, outer = 3 * count, 5, 7
    generator = torch.Generator().manual_seed(count)
    x, w, bias = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        for shape in ((tokens, inner), (inner, outer), (outer,))
    )
    terms = torch.randn(count, tokens, inner, dtype=torch.float64, generator=generator)

    def work(tp: TensorParallelGroup) -> list[Any]:
        own = x.view(count, -1, inner)[tp.rank]
        found = []
        for _ in range(3):  # more exchanges than slots
            full, y = tp.all_gather_matmul(own, w).wait()
            found += [
                (tp.all_gather(own).wait(), x),
                (full, x),
                (y, x @ w),
                (tp.gathered_matmul(own, w, bias).wait(), x @ w + bias),
                (tp.reduce_scatter(terms[tp.rank]).wait(), terms.sum(0).view(count, -1, inner)[tp.rank]),
                (
                    tp.matmul_reduce_scatter(terms[tp.rank], w).wait(),
                    (terms.sum(0) @ w).view(count, -1, outer)[tp.rank],
                ),
            ]
        return found

    for pairs in on_ranks(count, tokens * outer, work):
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_slots_of_any_number_of_shapes_are_views_of_the_same_memory() -> None:
    slots = torch.zeros(ROW_SLOTS, 4096, dtype=torch.uint8)
    rows = PeerRows([0], 0, None, None, slots, None)  # type: ignore[arg-type]
    for length in range(1, 2 * MOST_VIEWS):
        rows.slot((length,), torch.zeros(1)).fill_(length)
        assert len(rows.views) <= MOST_VIEWS
        assert (slots[rows.number, : 4 * length].view(torch.float32) == length).all()
