"""Rows that ranks exchange by reads of peers' memory: in every order that lanes and flags allow, each rank gets what
its peers shared in the same exchange, and none waits for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any, Literal, NamedTuple

import pytest
import torch
from simulated_gpus import Condition, Lanes, SimulatedFlags, SimulatedLane, SimulatedMemory, run_in_some_order
from thread_ranks import AXIS, SLOTS, ThreadFlags, flags_of, on_ranks

from pentad.workers.parallel.row_exchange import RowGroup
from pentad.workers.transport.peer_rows import MOST_VIEWS, READ, SHARED, PeerRows

ELEMENTS = 12  # in a slot
EXCHANGES = 11
STEP = 4  # exchanges, not a multiple of the number of slots
FIRST = 4  # rank of the mesh whose coordinate is 0


class Exchange(NamedTuple):
    size: int  # elements
    kind: Literal["gather", "part", "ring", "scatter"]  # ring: slots are read by the next rank alone
    in_flight: int  # at most, including itself if there are others


def lane_of(lanes: Lanes, rank: int) -> SimulatedLane:
    return SimulatedLane(lanes, (rank, "rows"))


def memory_of(ranks: range, lanes: Lanes, count: int = SLOTS) -> tuple[dict[int, torch.Tensor], SimulatedMemory]:
    slots = {rank: torch.full((count, ELEMENTS), torch.nan, dtype=torch.float64) for rank in ranks}
    return slots, SimulatedMemory({rank: {AXIS: each.view(-1)} for rank, each in slots.items()}, lanes)


def shared_in(exchange: int, rank: int, size: int) -> torch.Tensor:
    return (100 * exchange + 10 * rank + torch.arange(size)).double()


def parts_in(exchange: int, rank: int, ranks: range) -> torch.Tensor:
    """What a rank has for each rank in a scatter."""
    return shared_in(exchange, rank, ELEMENTS // len(ranks) * len(ranks)).view(len(ranks), -1)


def host(rank: int, ranks: range, lanes: Lanes, rows: PeerRows, plan: list[Exchange]) -> Iterator[Condition]:
    in_flight: list[tuple[Any, Callable[[], None]]] = []
    for number, exchange in enumerate(plan):
        if number % STEP == 0:
            rows.begin_step()
        size, start = exchange.size, number % exchange.size
        with lanes.on((rank, "compute")):
            if exchange.kind == "gather":
                own = torch.empty(size, dtype=torch.float64)
                own.copy_(shared_in(number, rank, size))
                full = own.new_empty(len(ranks), size)
                arrival = rows.gather(own, full, keep=True)
                found = [(full[peer - FIRST], shared_in(number, peer, size)) for peer in ranks]
            elif exchange.kind == "scatter":
                arrival, found = scatter(rows, number, rank, ranks)
            else:
                rows.slot((size,), torch.empty(0, dtype=torch.float64)).copy_(shared_in(number, rank, size))
                index, count = rank - FIRST, len(ranks)
                previous, following = ranks[index - 1], (index + 1) % count
                read = [previous] if exchange.kind == "ring" else [peer for peer in ranks if peer != rank]
                parts = {peer: torch.empty(size - start, dtype=torch.float64) for peer in read}
                readers = [following] if exchange.kind == "ring" else None
                arrival = rows.read([(peer - FIRST, start, each) for peer, each in parts.items()], readers)
                found = [(each, shared_in(number, peer, size)[start:]) for peer, each in parts.items()]
            in_flight.append((arrival, partial(check, found)))
            while len(in_flight) > exchange.in_flight:
                arrived, compare = in_flight.pop(0)
                arrived.wait()
                lanes.enqueue(compare)
        yield lambda: True


def scatter(
    rows: PeerRows, exchange: int, rank: int, ranks: range
) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]:
    """(its arrival, pairs of what arrives and what is expected)."""
    values, index = parts_in(exchange, rank, ranks), rank - FIRST
    slot, size = rows.slot(values.shape, values), values.shape[1]
    parts = {peer: torch.empty(size, dtype=torch.float64) for peer in ranks if peer != rank}
    arrival = rows.scatter(
        [(peer - FIRST, index * size, each) for peer, each in parts.items()],
        lambda reader: slot[reader].copy_(values[reader]),
    )
    return arrival, [(each, parts_in(exchange, peer, ranks)[index]) for peer, each in parts.items()]


def check(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for found, expected in pairs:
        assert torch.equal(found, expected)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("num_slots", [1, SLOTS])
@pytest.mark.parametrize("seed", range(20))
def test_in_every_order_ranks_get_what_their_peers_shared(count: int, num_slots: int, seed: int) -> None:
    random, ranks = Random(seed), range(FIRST, FIRST + count)
    plan = [
        Exchange(
            random.randint(1, ELEMENTS),
            random.choice(["gather", "part", "ring", "scatter"]),
            random.randint(0, 4),
        )
        for _ in range(EXCHANGES)
    ]
    lanes = Lanes()
    flags = SimulatedFlags(lanes, values=flags_of(ranks, num_slots))
    slots, memory = memory_of(ranks, lanes, num_slots)
    hosts = []
    for rank in ranks:
        rows = PeerRows(AXIS, ranks, rank, flags, memory, slots[rank].view(torch.uint8), lane_of(lanes, rank))
        hosts.append(host(rank, ranks, lanes, rows, plan))
    run_in_some_order(lanes, hosts, random)


@pytest.mark.parametrize("kind", ["part", "scatter"])
@pytest.mark.parametrize("ignored", [SHARED, READ])
def test_the_orders_tell_exchanges_that_ignore_a_flag(ignored: int, kind: Literal["part", "scatter"]) -> None:
    def run(seed: int) -> bool:
        random, ranks, lanes = Random(seed), range(FIRST, FIRST + 2), Lanes()
        flags, (slots, memory) = SimulatedFlags(lanes, ignored, flags_of(ranks)), memory_of(ranks, lanes)
        hosts = []
        for rank in ranks:
            rows = PeerRows(AXIS, ranks, rank, flags, memory, slots[rank].view(torch.uint8), lane_of(lanes, rank))
            hosts.append(host(rank, ranks, lanes, rows, [Exchange(ELEMENTS, kind, 4)] * EXCHANGES))
        try:
            run_in_some_order(lanes, hosts, random)
        except AssertionError:
            return True
        return False

    assert any(map(run, range(20)))


@pytest.mark.parametrize("count", [2, 4])
def test_exchanges_give_each_rank_what_the_others_have_for_it(count: int) -> None:
    def value(exchange: int, source: int, target: int) -> torch.Tensor:
        return (100 * exchange + 10 * source + target + torch.arange(3)).double()

    def work(group: RowGroup) -> list[Any]:
        rank, found = group.rank, []
        following, previous = (rank + 1) % count, (rank - 1) % count
        for number in range(2 * SLOTS):
            sent = torch.stack([value(number, rank, target) for target in range(count)])
            own, of_all = sent[rank], torch.stack([value(number, source, source) for source in range(count)])
            passed = group.pass_on(own, torch.empty_like(own), following, previous).wait()
            found += [
                (group.all_to_all(sent).wait(), torch.stack([value(number, source, rank) for source in range(count)])),
                (passed, value(number, previous, previous)),
                (group.sum(own).wait(), of_all.sum(0)),
                (group.maximum(own).wait(), of_all.amax(0)),
            ]
        return found

    for pairs in on_ranks(count, 3 * count, work):
        for found, expected in pairs:
            assert torch.equal(found, expected)


def test_peers_read_their_parts_in_the_order_in_which_they_are_made() -> None:
    """No two ranks read the same peer at once: each reads first from the rank before it, which makes the part for the
    rank after it first."""
    ranks, lanes = range(FIRST, FIRST + 4), Lanes()
    flags, (slots, memory) = SimulatedFlags(lanes, values=flags_of(ranks)), memory_of(ranks, lanes)
    found = []
    for rank in ranks:
        reads = LoggedReads(memory)
        rows = PeerRows(AXIS, ranks, rank, flags, reads, slots[rank].view(torch.uint8), lane_of(lanes, rank))
        own = torch.zeros(ELEMENTS, dtype=torch.float64)
        rows.gather(own, own.new_empty(len(ranks), ELEMENTS), keep=False)
        found.append(reads.peers)
    assert all(len(set(at_once)) == len(ranks) for at_once in zip(*found, strict=True))
    for place, at_once in enumerate(zip(*found, strict=True), 1):
        assert [FIRST + (rank - FIRST - place) % len(ranks) for rank in ranks] == list(at_once)


def test_a_part_is_read_while_its_rank_makes_the_next_and_its_reader_the_first() -> None:
    ranks, lanes, size = range(FIRST, FIRST + 3), Lanes(), ELEMENTS // 3
    flags, (slots, memory) = SimulatedFlags(lanes, values=flags_of(ranks)), memory_of(ranks, lanes)

    def write(slot: torch.Tensor, made: set[int], reader: int) -> None:
        if reader not in made:  # its product never ends
            lanes.enqueue(ready=lambda: False)
        slot[reader].copy_(torch.full((size,), float(reader)))

    found = [torch.full((size,), torch.nan, dtype=torch.float64) for _ in ranks]
    for index, part in enumerate(found):
        rank, previous = ranks[index], (index - 1) % len(ranks)
        rows = PeerRows(AXIS, ranks, rank, flags, memory, slots[rank].view(torch.uint8), lane_of(lanes, rank))
        with lanes.on((rank, "compute")):
            slot = rows.slot((len(ranks), size), part)
            rows.scatter([(previous, index * size, part)], partial(write, slot, {1} if index == 0 else set()))
    while able := [queue for queue in lanes.queues.values() if queue and queue[0].ready()]:
        able[0].popleft().run()
    assert [each.isfinite().all().item() for each in found] == [False, True, False]


class LoggedReads:
    """Memory that records in which order it was read."""

    def __init__(self, memory: SimulatedMemory) -> None:
        self.memory, self.peers = memory, list[int]()

    def read(self, peer: int, *where: Any) -> None:
        self.peers.append(peer)
        self.memory.read(peer, *where)

    def close(self) -> None:
        self.memory.close()


def test_slots_of_any_number_of_shapes_are_views_of_the_same_memory() -> None:
    slots = torch.zeros(SLOTS, 4096, dtype=torch.uint8)
    rows = PeerRows(AXIS, [0], 0, ThreadFlags({}), None, slots, None)  # type: ignore[arg-type]
    for length in range(1, 2 * MOST_VIEWS):
        rows.slot((length,), torch.zeros(1)).fill_(length)
        assert len(rows.views) <= MOST_VIEWS
        assert (slots[rows.number, : 4 * length].view(torch.float32) == length).all()
