"""The driver's side of copies in memory: who holds whose part, and the two phases that make a copy count.

First every rank stores its part in its own process and in its holder's; once all have said so, the driver tells all
that the copy counts, and only then do they drop the one before. So whenever a rank dies, one complete copy is left,
unless both processes with a part are gone.
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
    """For each of several ranks, of which rank r is on `nodes[r]` in the failure domain `domains[r]`: the rank that
    holds its part. It is on another node, unless a node has more than half of all ranks, and in another domain unless
    a domain has; each rank holds one part."""
    count = len(nodes)
    line = sorted(range(count), key=lambda rank: (domains[rank], nodes[rank], rank))
    shifts = {max(Counter(where).values()) for where in (nodes, domains)} - {count} or {1}
    possible = [{rank: line[(at + shift) % count] for at, rank in enumerate(line)} for shift in sorted(shifts)]
    holders = min(possible, key=lambda its: [_num_together(where, its) for where in (nodes, domains)])
    return tuple(holders[rank] for rank in range(count))


def _num_together(where: Sequence[str], holders: Mapping[int, int]) -> int:
    """Ranks whose parts are held where they are themselves."""
    return sum(where[rank] == where[holder] for rank, holder in holders.items())


class GroupCopies:
    """Copies of the state of a group, in one generation after another."""

    def __init__(self, group: WorkerGroup, token: bytes | None = None, label: str | None = None) -> None:
        """`token` is that of a group that has copies already; nodes with the same value of `label` fail together."""
        self.group, self.token, self.label = group, token or secrets.token_bytes(TOKEN_BYTES), label
        self.holders: tuple[int, ...] = ()
        self.domains: list[str] = []  # of the ranks
        self._serving: Refs = {}  # the pending addresses of the ranks

    def begin_generation(self) -> None:
        """Has all ranks accept parts, and reserve memory for their own. Raises WorkerError if one is gone."""
        group, nodes = self.group, [place.node for place in self.group.places]
        self.domains = failure_domains(nodes, self.label)
        self.holders = holders_of(nodes, self.domains)
        hosts = enumerate(zip(group.actors, group.places, strict=True))
        self._serving = {rank: actor.serve_copies.remote(place.ip, self.token) for rank, (actor, place) in hosts}
        if group.plan.device == "cpu":  # no memory is pinned
            group.collect(self._serving)

    @property
    def is_ready(self) -> bool:
        """Whether `submit` may be called. GPU ranks pin memory for many seconds, in which they train."""
        return self.group.is_ready(self._serving)

    @property
    def num_on_the_same_node(self) -> int:
        """Ranks whose parts are held on their own nodes, and so are lost with them."""
        return _num_together([place.node for place in self.group.places], dict(enumerate(self.holders)))

    @property
    def num_in_the_same_domain(self) -> int:
        """Ranks whose parts are held in their own failure domains."""
        return _num_together(self.domains, dict(enumerate(self.holders)))

    def key(self, step: int) -> CopyKey:
        return CopyKey(self.group.generation, step, len(self.group.actors))

    def submit(self, step: int) -> Refs:
        """First phase, beside training: has every rank copy its part of the state after `step` steps, the last of which
        may be open, and send it to its holder. The answers are of type SentPart, or say why a rank could not."""
        group, key, refs = self.group, self.key(step), {}
        addresses = group.collect(self._serving)
        for rank, actor in enumerate(group.actors):
            group.call_runner(rank, "copy", step)  # `replicate` raises what goes wrong there
            address = addresses[self.holders[rank]]
            refs[rank] = actor.replicate.remote(group.generation, key, address, self.token)
        return refs

    def commit(self, step: int) -> Refs:
        """Second phase: all parts are in place. Until all ranks have answered, no other copy may be made: one that has
        not heard of it would drop what counts."""
        return {rank: actor.commit_copy.remote(self.key(step)) for rank, actor in enumerate(self.group.actors)}

    def hand_over(self, parts: Mapping[int, dict[int, ParamShard]], step: int, tick: Tick) -> CopySource | None:
        """After a fence, the state of `step` steps in the memory of those that have it: `parts[rank]` are the shards
        that it gives out, by the number of the part. None if there is no memory for that, and then no such copy."""
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
        """A copy is not needed any more."""
        for actor in self.group.actors:
            actor.forget_copies.remote(key)

    def forget(self) -> None:
        """No copy counts any more: the run goes back to before their steps, and does others."""
        asked = {rank: actor.forget_copies.remote() for rank, actor in enumerate(self.group.actors)}
        self.group.gather(asked, ANSWER_SECONDS)  # a rank that does not answer is lost, and what it holds with it

    def begin_reading(self, source: CopySource, deadline: float) -> None:
        """Has every rank read its part of a copy while it connects, before `restore`. Raises WorkerError when a rank is
        lost."""
        known = ray.put(source)
        calls = {rank: self.group.call_runner(rank, "begin_reading", known) for rank in range(len(self.group.actors))}
        self.group.collect(calls, deadline=deadline)

    def restore(self, source: CopySource, tick: Tick | None = None) -> None:
        """Has every rank read its state from a copy. Raises WorkerError when a rank is lost meanwhile, and Unreadable
        or Damaged, as a rank has found the copy, when no rank has a state and another one can be restored."""
        group, known = self.group, ray.put(source)
        calls = {rank: group.call_runner(rank, "restore_copy", known) for rank in range(len(group.actors))}
        raise_worst(group.collect(calls, tick=tick))

    def found(self, actors: Iterable[Any]) -> CopySource | None:
        """The newest copy that counts and that these processes hold all parts of."""
        asked = {number: actor.held_copies.remote() for number, actor in enumerate(actors)}
        answers, _ = self.group.gather(asked, ANSWER_SECONDS)
        return newest_copy(dict(answers.values()), self.token)


def newest_copy(held: Mapping[str, Sequence[HeldPart]], token: bytes) -> CopySource | None:
    """The newest copy that counts and is complete; `held[address]` are the parts of a process. If one process knows
    that a copy counts, it does: all parts were in place."""
    everything = [FoundPart(part, address) for address, parts in held.items() for part in parts]
    committed = {each.part.key for each in everything if each.part.committed}
    for key in sorted(committed, key=lambda key: (key.step, key.generation), reverse=True):
        parts = {each.part.owner: each for each in everything if each.part.key == key}
        if len(parts) == key.parts:
            return CopySource(key, tuple(parts[owner] for owner in sorted(parts)), token)
    return None
