"""How a run reacts to steps that its ranks skipped: it continues, stops, rolls back, or fails after too many."""

from __future__ import annotations

from typing import Any

from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.config.training_sections import SpikesSection
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.run_state import ControlRequests
from pentad.orchestrator.monitoring.runfolder import RunFolder
from pentad.orchestrator.recovery.newest_checkpoint import NewestIntact
from pentad.orchestrator.recovery.retention import rollback_target
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import Start, read_manifest

Skipped = tuple[tuple[int, int], ...]  # batches left out, as for `batch_of`


class SpikeWatch:
    """Watches one generation. `spike` is the step that requires a rollback, None if there is none."""

    def __init__(self, section: SpikesSection, requests: ControlRequests) -> None:
        self.section, self.requests = section, requests
        self.spike: int | None = None
        self.in_a_row = 0

    def until_spike(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows up to and including the first step that requires a rollback; all if there is none."""
        if self.section.policy == "rollback":
            for number, row in enumerate(rows, 1):
                if row["skipped"]:
                    self.spike = row["step"]
                    return rows[:number]
        return rows

    def react(self, rows: list[dict[str, Any]]) -> None:
        """Stops the run because of skipped steps, if it should. Raises PentadError for too many in a row."""
        for row in rows:
            self.in_a_row = self.in_a_row + 1 if row["skipped"] else 0
            if self.section.policy == "stop" and row["skipped"]:
                self.requests.stop()
            if self.section.policy == "skip" and self.in_a_row == self.section.max_consecutive:
                found = f"steps {row['step'] - self.in_a_row + 1} to {row['step']} were all skipped"
                raise PentadError(f"{found}: expected fewer than spikes.max_consecutive = {self.in_a_row}")


def roll_back(config: RunConfig, group: WorkerGroup, bus: EventBus, spike: int) -> int:
    """Rolls the run back to `rollback_target` and skips the batches from there up to and including the spike's.

    Restores the newest checkpoint that is not later than the target and returns its step. It may be earlier, if a fault
    prevented the target's own; the steps in between give the same bits again. Later checkpoints are deleted, because
    their steps no longer count. Raises PentadError after too many rollbacks to the same step, if there is no such
    checkpoint, and if storage does not answer.
    """
    newest = NewestIntact(bus, config.cluster.start_timeout_seconds, restart=False)
    target, saved = rollback_target(config, spike), newest.saved()
    assert target is not None
    skipped = (*group.skipped_batches, (target, spike + 1 - target))
    if (times := sum(first == target for first, _ in skipped)) > config.spikes.max_consecutive:
        found = f"step {spike} is a spike after {times - 1} rollbacks to step {target}"
        raise PentadError(f"{found}: expected at most spikes.max_consecutive = {config.spikes.max_consecutive}")
    if min(saved, default=spike) > target:
        found = f"step {spike} is a spike, and there is no checkpoint of at most {target} steps to go back to"
        raise PentadError(f"{found}: expected one, as spikes.policy = rollback keeps from the start of a run")
    for step in sorted(saved, reverse=True):  # newest first: if this is cut short, the run meets the spike again
        if step > target:
            newest.delete(step)
    checkpoint = newest.find()
    assert checkpoint is not None  # or it has raised
    # Deletion comes first: a run that is killed in between meets the same spike again.
    plain = [list(each) for each in skipped]
    bus.record("rollback", generation=group.generation, step=spike, to=target, skipped_batches=plain)
    left_out = f"from step {target} on, {spike + 1 - target} batches are left out"
    bus.display.note(f"going back to step {checkpoint.step}; {left_out}")
    group.skipped_batches = skipped
    while not newest.restore(group, Start(checkpoint.folder, checkpoint.step)):
        checkpoint = newest.find()
        assert checkpoint is not None
    return checkpoint.step


def skipped_batches(folder: RunFolder, start: Start) -> Skipped:
    """The batches that a resuming run has left out so far: the longer list of its journal's and its checkpoint's, which
    may have been copied without the journal. Both only ever grow."""
    found = [event["skipped_batches"] for event in folder.journal() if event["event"] == "rollback"]
    if start.folder is not None and start.folder.parent == folder.checkpoints:
        found.append(read_manifest(start.folder).meta.get("skipped_batches", []))
    return tuple((first, count) for first, count in max(found, key=len, default=()))
