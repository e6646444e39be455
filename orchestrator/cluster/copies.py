"""The driver's side of copies in memory: which rank holds whose part, and the two-phase commit of a copy.

First every rank stores its part in its own process and in its holder's. Once all have confirmed, the driver tells all
that the copy is committed, and only then do they drop the previous one. So whenever a rank dies, one complete copy is
left, unless both processes with a part are gone.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray

from pentad.orchestrator.cluster.group import Refs, Tick, WorkerGroup, raise_worst
from pentad.orchestrator.cluster.placement import failure_domains
from pentad.schedules.spec.plan import ParamShard
from pentad.workers.replication.parts import CopyKey, HeldPart
from pentad.workers.replication.source import CopySource, FoundPart
from pentad.workers.replication.transfer import TOKEN_BYTES

ANSWER_SECONDS = 5.0


def holders_of(nodes: Sequence[str], domains: Sequence[str]) -> tuple[int, ...]:
    """The rank that holds each rank's part, where rank r is on `nodes[r]` in the failure domain `domains[r]`.

    The holder is on another node unless one node has more than half of all ranks, and in another domain unless one
    domain has; each rank holds one part."""
    count = len(nodes)
    line = sorted(range(count), key=lambda rank: (domains[rank], nodes[rank], rank))
    shifts = {max(Counter(where).values()) for where in (nodes, domains)} - {count} or {1}
    possible = [{rank: line[(at + shift) % count] for at, rank in enumerate(line)} for shift in sorted(shifts)]
    holders = min(possible, key=lambda its: [_num_together(where, its) for where in (nodes, domains)])
    return tuple(holders[rank] for rank in range(count))


def _num_together(where: Sequence[str], holders: Mapping[int, int]) -> int:
    """Number of ranks whose parts are held in the same place as they are."""
    return sum(where[rank] == where[holder] for rank, holder in holders.items())


class GroupCopies:
    """The in-memory copies of a group's state, across generations."""

    def __init__(self, group: WorkerGroup, token: bytes | None = None, label: str | None = None) -> None:
        """`token` is given for a group that already has copies; nodes with the same value of `label` fail together."""
        self.group, self.token, self.label = group, token or secrets.token_bytes(TOKEN_BYTES), label
        self.holders: tuple[int, ...] = ()
        self.domains: list[str] = []  # failure domains by rank
        self._serving: Refs = {}  # the pending addresses of the ranks

    def begin_generation(self) -> None:
        """Has all ranks accept parts and reserve memory for their own. Raises WorkerError if one is gone."""
        group, nodes = self.group, [place.node for place in self.group.places]
        self.domains = failure_domains(nodes, self.label)
        self.holders = holders_of(nodes, self.domains)
        hosts = enumerate(zip(group.actors, group.places, strict=True))
        self._serving = {rank: actor.serve_copies.remote(place.ip, self.token) for rank, (actor, place) in hosts}
        if group.plan.device == "cpu":  # no memory is pinned
            group.collect(self._serving)

    @property
    def is_ready(self) -> bool:
        """Whether `submit` may be called. GPU ranks take many seconds to pin memory, and train meanwhile."""
        return self.group.is_ready(self._serving)

    @property
    def num_on_the_same_node(self) -> int:
        """Number of ranks whose parts are held on their own nodes, and so are lost with them."""
        return _num_together([place.node for place in self.group.places], dict(enumerate(self.holders)))

    @property
    def num_in_the_same_domain(self) -> int:
        """Number of ranks whose parts are held in their own failure domains."""
        return _num_together(self.domains, dict(enumerate(self.holders)))

    def key(self, step: int) -> CopyKey:
        return CopyKey(self.group.generation, step, len(self.group.actors))

    def submit(self, step: int) -> Refs:
        """First phase, while training continues: has every rank copy its part of the state after `step` steps, the last
        of which may be open, and send it to its holder. Answers are SentPart, or a str that says why a rank could not.
        """
        group, key, refs = self.group, self.key(step), {}
        addresses = group.collect(self._serving)
        for rank, actor in enumerate(group.actors):
            group.call_runner(rank, "copy", step)  # its errors are raised by `replicate`
            address = addresses[self.holders[rank]]
            refs[rank] = actor.replicate.remote(group.generation, key, address, self.token)
        return refs

    def commit(self, step: int) -> Refs:
        """Second phase, once all parts are in place: tells all ranks. No other copy may be made until all have
        answered: a rank that has not heard of the commit would drop the committed copy."""
        return {rank: actor.commit_copy.remote(self.key(step)) for rank, actor in enumerate(self.group.actors)}

    def hand_over(self, parts: Mapping[int, dict[int, ParamShard]], step: int, tick: Tick) -> CopySource | None:
        """After a fence: a copy of the state of `step` steps, served from the memory of the ranks that hold it.
        `parts[rank]` are the shards that a rank hands over, by part number. None if there is no memory for it."""
        group, asked = self.group, dict[int, Any]()
        key = CopyKey(group.generation, step, len({number for its in parts.values() for number in its}))
        near = Counter(group.places[rank].node for rank in parts)
        for rank, its in parts.items():
            place, actor = group.places[rank], group.actors[rank]
            asked[rank] = actor.hand_over.remote(group.generation, key, its, near[place.node], place.ip, self.token)
        if any(group.collect(asked, tick=tick)):
            self.drop(key)
            return None
        return self.found(group.actors[rank] for rank in parts)

    def drop(self, key: CopyKey) -> None:
        """Has all ranks drop a copy that is no longer needed."""
        for actor in self.group.actors:
            actor.forget_copies.remote(key)

    def forget(self) -> None:
        """Has all ranks drop all copies, because the run goes back to before their steps and takes different ones."""
        asked = {rank: actor.forget_copies.remote() for rank, actor in enumerate(self.group.actors)}
        self.group.gather(asked, ANSWER_SECONDS)  # a rank that does not answer is lost, and what it holds with it

    def begin_reading(self, source: CopySource, deadline: float) -> None:
        """Has every rank start reading its part of a copy while it connects, before `restore`. Raises WorkerError if a
        rank is lost."""
        known = ray.put(source)
        calls = {rank: self.group.call_runner(rank, "begin_reading", known) for rank in range(len(self.group.actors))}
        self.group.collect(calls, deadline=deadline)

    def restore(self, source: CopySource, tick: Tick | None = None) -> None:
        """Has every rank restore its state from a copy. Raises WorkerError if a rank is lost meanwhile, and Unreadable
        or Damaged if a rank finds the copy so; then no rank has a state, and another one can be restored."""
        group, known = self.group, ray.put(source)
        calls = {rank: group.call_runner(rank, "restore_copy", known) for rank in range(len(group.actors))}
        raise_worst(group.collect(calls, tick=tick))

    def found(self, actors: Iterable[Any]) -> CopySource | None:
        """The newest committed copy of which these processes hold all parts."""
        asked = {number: actor.held_copies.remote() for number, actor in enumerate(actors)}
        answers, _ = self.group.gather(asked, ANSWER_SECONDS)
        return newest_copy(dict(answers.values()), self.token)


def newest_copy(held: Mapping[str, Sequence[HeldPart]], token: bytes) -> CopySource | None:
    """The newest copy that is committed and complete; `held[address]` are the parts of a process. A copy is committed
    if any process knows it, because then all parts were in place."""
    everything = [FoundPart(part, address) for address, parts in held.items() for part in parts]
    committed = {each.part.key for each in everything if each.part.committed}
    for key in sorted(committed, key=lambda key: (key.step, key.generation), reverse=True):
        parts = {each.part.owner: each for each in everything if each.part.key == key}
        if len(parts) == key.parts:
            return CopySource(key, tuple(parts[owner] for owner in sorted(parts)), token)
    return None
