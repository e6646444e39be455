"""Keeps copies of the state in the ranks' memory (elastic.replicate_every) while the steps of a generation run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pentad.orchestrator.cluster.copies import GroupCopies
from pentad.orchestrator.cluster.group import Refs, Tick
from pentad.orchestrator.monitoring.event_bus import EventBus

if TYPE_CHECKING:
    from pentad.workers.replication.replicator import SentPart

COMMIT_SECONDS = 5.0  # for the answers to a commit


class Transfer(NamedTuple):
    """A copy of the state after `step` steps that all ranks are making."""

    refs: Refs
    step: int
    began: float


class Replication:
    """Makes one copy at a time: if the last one is still under way when the next is due, the next is made later. The
    first one is due at once, because new ranks lack the parts of an earlier generation."""

    def __init__(self, every: int, copies: GroupCopies, bus: EventBus) -> None:
        self.every, self.copies, self.bus = every, copies, bus
        self.attempted = -1  # step of the newest copy submitted
        self.copied = -1  # step of the newest copy committed
        self.made = 0  # copies committed
        self.most_meanwhile = 0  # most steps that have run while a copy was made
        self.making: Transfer | None = None
        self.committing: Refs = {}  # the answers to the newest commit

    def begin_generation(self) -> None:
        if self.every:
            self.copies.begin_generation()

    @property
    def protects(self) -> bool:
        """Whether every part is, or soon will be, in the memory of two nodes; not if the newest copy failed."""
        failed = self.making is None and self.copied < self.attempted
        return self.every > 0 and not failed and not self.copies.num_on_the_same_node

    def hands_over(self, step: int, leaving: Sequence[int]) -> bool:
        """Whether a copy of `step` steps, rather than a checkpoint, carries the state to the next generation: not if it
        could not be made, or if the `leaving` ranks hold both copies of a part."""
        if not self.every or any(self.copies.holders[rank] in leaving for rank in leaving):
            return False
        return self.making is not None or self.copied == step or self.attempted < step

    def submit(self, step: int, *, required: bool = False) -> None:
        """Has a copy made after `step` steps, if one is due, or `required`."""
        if not self.every or self.making is not None or step <= self.attempted:
            return
        if required or self.attempted < 0 or step // self.every > self.attempted // self.every:
            group = self.copies.group
            if required:
                group.gather(self.committing, COMMIT_SECONDS)
            if not required and not self.copies.is_ready:
                return  # later: training does not wait for memory
            if self.committing and not group.is_ready(self.committing):
                return
            self.attempted = step
            self.making = Transfer(self.copies.submit(step), step, time.monotonic())

    def continue_(self, done: int, *, wait: Tick | None = None) -> None:
        """Commits the copy under way once all its parts are in place; waits for them if given the tick `wait`. Never
        commits before its steps are recorded: another driver could not continue from it.

        Raises WorkerError if a rank has failed.
        """
        making, group = self.making, self.copies.group
        if making is None or done < making.step:
            return
        if wait is None and (self.bus.folder.files.waiting or not group.is_ready(making.refs)):
            return
        answers, self.making = group.collect(making.refs, tick=wait), None
        facts = {"generation": group.generation, "step": making.step}
        for problem in (answer for answer in answers if isinstance(answer, str)):
            self.bus.record("copies failed", **facts, error=problem)
            self.bus.display.note(f"no copy of step {making.step} in memory, training continues: {problem}")
            return
        self.committing = self.copies.commit(making.step)
        self.copied, self.made = making.step, self.made + 1
        self._note(facts, answers, round(time.monotonic() - making.began, 3), done - making.step)

    def _note(self, facts: dict[str, Any], parts: Sequence[SentPart], seconds: float, meanwhile: int) -> None:
        """Reports the cost of the newest copy; the journal gets the first, second, fourth, eighth and so on."""
        if meanwhile > max(self.every, self.most_meanwhile):
            text = f"the copy of step {self.copied} in memory took {seconds:.1f} s, and {meanwhile} steps ran meanwhile"
            now = f"elastic.replicate_every is {self.every}: with as few steps copies are made one after the other"
            self.bus.display.note(f"{text}, which a lost rank would cost; {now}")
        self.most_meanwhile = max(self.most_meanwhile, meanwhile)
        holders, near = list(self.copies.holders), self.copies.num_on_the_same_node
        if self.made & (self.made - 1) == 0:
            snapshot, transfer = (round(max(each), 3) for each in zip(*(part[1:] for part in parts), strict=True))
            facts |= {"seconds": seconds, "snapshot_seconds": snapshot, "transfer_seconds": transfer}
            facts |= {"steps_meanwhile": meanwhile, "bytes": sum(part.bytes for part in parts)}
            self.bus.record("copies", **facts, holders=holders, on_the_same_node=near)
        if self.made > 1:
            return
        if near:
            text = f"the state of {near} of {len(holders)} ranks is copied to ranks of the same node"
            self.bus.display.note(f"{text}: that protects from the loss of ranks, not of the node")
        elif together := self.copies.num_in_the_same_domain:
            text = f"the state of {together} of {len(holders)} ranks is copied to ranks of the same {self.copies.label}"
            self.bus.display.note(f"{text} (elastic.failure_domain), and would be lost with all its nodes")
