"""An independent verification of programs by reachability, sharing no code with `check` or `events`."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from itertools import pairwise
from typing import NamedTuple

from pentad.schedules.ir.instruction import COLLECTIVES, COMPUTE, RECEIVES, SENDS, Instruction, Key, Op
from pentad.schedules.ir.program import Program

Place = tuple[int, Key]  # a rank and the key of an instruction there
NORM, STEP = Key(Op.NORM, -1, -1), Key(Op.STEP, -1, -1)


def partner(place: Place, part: Instruction) -> Place:
    """The other end of a send."""
    shift = 1 if part.op is Op.SEND_F else -1
    return part.peer, Key(SENDS[part.op], part.stage + shift, part.microbatch)


class Facts(NamedTuple):
    """`before[place]` is the bit set of instructions that end before `place` starts, whatever the costs; bit k is the
    k-th of `parts`. `home` maps a compute key to its rank."""

    program: Program
    parts: dict[Place, Instruction]
    number: dict[Place, int]
    before: dict[Place, int]
    home: dict[Key, int]

    def earlier(self, first: Place, second: Place) -> bool:
        return bool(self.before[second] >> self.number[first] & 1)


def prove(program: Program, replicas: int) -> None:
    """Asserts that a program computes a correct training step."""
    pairs = [
        ((rank, part.key), part) for rank, s in enumerate(program.streams) for action in s for part in action.parts
    ]
    parts = dict(pairs)
    assert len(parts) == len(pairs)
    home = {key: rank for rank, key in parts if key.op in COMPUTE}
    assert len(home) == sum(key.op in COMPUTE for _, key in parts)
    number = {place: k for k, place in enumerate(parts)}
    facts = Facts(program, parts, number, _before(_direct(program, parts), number), home)
    for stage in range(program.stages):
        for mb in range(program.microbatches * program.slices):
            _prove_data(facts, stage, mb)
    for rank in range(program.ranks):
        _prove_end(facts, rank, replicas)
        _prove_slots(facts, rank)


def _direct(program: Program, parts: dict[Place, Instruction]) -> dict[Place, set[Place]]:
    """The direct dependencies of each instruction, by waits and lanes, and the instructions that rendezvous with it."""
    together: dict[Place, list[Place]] = defaultdict(list)  # instructions that rendezvous
    for (rank, key), part in parts.items():
        if key.op in SENDS:
            other = partner((rank, key), part)
            assert parts[other].peer == rank
            together[rank, key].append(other)
            together[other].append((rank, key))
        elif key.op in COLLECTIVES:
            together[rank, key] += [(r, key) for r in range(program.ranks) if r != rank and (r, key) in parts]
    assert all(len(together[place]) == 1 for place in parts if place[1].op in RECEIVES)
    direct: dict[Place, set[Place]] = {place: set() for place in parts}
    for rank, stream in enumerate(program.streams):
        last: dict[str, set[Place]] = {}
        for action in stream:
            for part in action.parts:  # of an overlapped pair, the forward may end before the backward
                before = {(rank, key) for key in part.waits} | last.get(part.lane, set())
                last[part.lane] = {(rank, part.key)}
                for place in ((rank, part.key), *together[rank, part.key]):
                    direct[place] |= before
    return direct


def _before(direct: dict[Place, set[Place]], number: dict[Place, int]) -> dict[Place, int]:
    after: dict[Place, list[Place]] = defaultdict(list)
    for place, earlier in direct.items():
        for one in earlier:
            after[one].append(place)
    left = {place: len(earlier) for place, earlier in direct.items()}
    ready = deque(place for place, count in left.items() if not count)
    closed: dict[Place, int] = {}
    while ready:
        place = ready.popleft()
        closed[place] = 0
        for one in direct[place]:
            closed[place] |= closed[one] | 1 << number[one]
        for one in after[place]:
            left[one] -= 1
            if not left[one]:
                ready.append(one)
    assert len(closed) == len(direct), "deadlock"
    return closed


def _prove_data(facts: Facts, stage: int, mb: int) -> None:
    """Asserts F, then BW or B and W, on one rank; their inputs were computed there earlier, or sent and received."""
    backward = {s: Op.BW if Key(Op.BW, s, mb) in facts.home else Op.B for s in range(facts.program.stages)}
    ops = (Op.F, backward[stage]) if backward[stage] is Op.BW else (Op.F, Op.B, Op.W)
    assert {op for op in COMPUTE if Key(op, stage, mb) in facts.home} == set(ops)
    places = [(facts.home[Key(op, stage, mb)], Key(op, stage, mb)) for op in ops]
    rank = places[0][0]
    assert {place[0] for place in places} == {rank}
    assert stage in facts.program.placement[rank]
    assert all(facts.earlier(one, two) for one, two in pairwise(places))
    _prove_slices(facts, stage, mb)
    for reader, near, send in ((places[0], stage - 1, Op.SEND_F), (places[1], stage + 1, Op.SEND_B)):
        if 0 <= near < facts.program.stages:
            key = Key(Op.F if send is Op.SEND_F else backward[near], near, mb)
            made = facts.home[key], key
            assert facts.earlier(made, reader)
            if made[0] != rank:
                sent, received = (made[0], Key(send, near, mb)), (rank, Key(SENDS[send], stage, mb))
                assert (facts.parts[sent].peer, facts.parts[received].peer) == (rank, made[0])
                assert facts.earlier(made, sent)
                assert facts.earlier(received, reader)


def _prove_slices(facts: Facts, stage: int, piece: int) -> None:
    """Asserts that the slices of a sequence run forward in order and backward in reverse order, on one rank."""
    slices = facts.program.slices
    if piece % slices:
        one, two = (Key(Op.F, stage, k) for k in (piece - 1, piece))
        assert facts.earlier((facts.home[one], one), (facts.home[two], two))
        ops = [Op.BW if Key(Op.BW, stage, k) in facts.home else Op.B for k in (piece, piece - 1)]
        one, two = Key(ops[0], stage, piece), Key(ops[1], stage, piece - 1)
        assert facts.earlier((facts.home[one], one), (facts.home[two], two))
        assert facts.home[one] == facts.home[two]


def _prove_end(facts: Facts, rank: int, replicas: int) -> None:
    """Asserts that gradients of a stage accumulate in microbatch order, within a microbatch from the last slice to the
    first; then shared ones are reduced; then come the norm and the step."""
    mine = [(r, key) for r, key in facts.parts if r == rank]
    assert facts.earlier((rank, NORM), (rank, STEP))
    assert all(facts.earlier(place, (rank, NORM)) for place in mine if place[1].op in COMPUTE)
    assert Counter(key.op for _, key in mine)[Op.STEP] == Counter(key.op for _, key in mine)[Op.NORM] == 1
    for stage in facts.program.placement[rank]:
        gradients = [p for p in mine if p[1].stage == stage and p[1].op in (Op.W, Op.BW)]
        gradients.sort(key=lambda place: _sum_order(place[1].microbatch, facts.program.slices))
        assert all(facts.earlier(one, two) for one, two in pairwise(gradients))
        if replicas > 1 or len(facts.program.holders(stage)) > 1:
            reduce = (rank, Key(Op.ALL_REDUCE, stage, -1))
            assert all(facts.earlier(place, reduce) for place in gradients)
            assert facts.earlier(reduce, (rank, NORM))
            assert all((holder, reduce[1]) in facts.parts for holder in facts.program.holders(stage))


def _sum_order(piece: int, slices: int) -> tuple[int, int]:
    microbatch, part = divmod(piece, slices)
    return microbatch, -part


def _prove_slots(facts: Facts, rank: int) -> None:
    """Asserts for any two tensors in one slot that one is last read before the other is received."""
    held: dict[tuple[Op, int], list[tuple[Place, Place]]] = defaultdict(list)
    for (r, key), part in facts.parts.items():
        if r == rank and key.op in RECEIVES:
            ends = (Op.B, Op.BW) if key.op is Op.RECV_F else (Op.W, Op.BW)
            reader = next((r, Key(op, *key[1:])) for op in ends if (r, Key(op, *key[1:])) in facts.parts)
            assert part.slot >= 0
            held[key.op, part.slot].append(((r, key), reader))
    for uses in held.values():
        for k, (receive, reader) in enumerate(uses):
            for other, other_reader in uses[:k]:
                assert facts.earlier(reader, other) or facts.earlier(other_reader, receive)


def stuck(program: Program, *, buffered: bool = False) -> set[tuple[int, int]]:
    """(rank, index) of actions that never end if lanes run in order and the host launches nothing after a compute
    action until it has ended. A transfer ends when both of its ends are reached; with `buffered` a send ends at once.
    """
    where = {(rank, u.key): (rank, i) for rank, s in enumerate(program.streams) for i, u in enumerate(s)}
    where |= {
        (rank, p.key): (rank, i) for rank, s in enumerate(program.streams) for i, u in enumerate(s) for p in u.parts
    }
    needs: dict[tuple[int, int], set[tuple[int, int]]] = {}  # what must end before an action is reached
    meets: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)  # what must be reached before an action ends
    for rank, stream in enumerate(program.streams):
        last: dict[str, int] = {}
        for index, action in enumerate(stream):
            needs[rank, index] = {where[rank, key] for key in action.waits}
            needs[rank, index] |= {(rank, last[lane]) for lane in (action.lane, "compute") if lane in last}
            last[action.lane] = index
            part = action.parts[0]
            if part.op in SENDS:
                other = where[partner((rank, part.key), part)]
                meets[other].add((rank, index))
                meets[rank, index] |= set() if buffered else {other}
            elif part.op in COLLECTIVES:
                meets[rank, index] |= {where[r, part.key] for r in range(program.ranks) if (r, part.key) in where}
    reached: set[tuple[int, int]] = set()
    ended: set[tuple[int, int]] = set()
    while True:
        reached |= {node for node in needs if needs[node] <= ended}
        new = {node for node in reached - ended if meets[node] <= reached}
        if not new:
            return set(needs) - ended
        ended |= new
