"""What a run does about steps that its ranks have skipped: it continues, stops, goes back, or fails after too many."""

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
    """Watches one generation. `spike` is the step because of which the run has to go back, None if there is none."""

    def __init__(self, section: SpikesSection, requests: ControlRequests) -> None:
        self.section, self.requests = section, requests
        self.spike: int | None = None
        self.in_a_row = 0

    def until_spike(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows of steps up to the first one because of which the run has to go back."""
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
    """Takes the run back to `rollback_target`, from which on the batches up to the spike's are left out.

    Restores the newest checkpoint of at most this many steps and returns its steps: a fault may have prevented that of
    the target, and the steps between give the same bits again. Later checkpoints are deleted, because their steps no
    longer count. Raises PentadError after too many rollbacks to the same step, without such a checkpoint, and if
    storage does not answer.
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
    for step in sorted(saved, reverse=True):  # whichever is the newest one if this is cut short, the spike follows it
        if step > target:
            newest.delete(step)
    checkpoint = newest.find()
    assert checkpoint is not None  # or it has raised
    # In this order: a run that is killed in between meets the same spike again.
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
    """Those of the run so far, for one that resumes: from its journal, or from the checkpoint, which may have been
    copied without it. Both only ever get longer."""
    found = [event["skipped_batches"] for event in folder.journal() if event["event"] == "rollback"]
    if start.folder is not None and start.folder.parent == folder.checkpoints:
        found.append(read_manifest(start.folder).meta.get("skipped_batches", []))
    return tuple((first, count) for first, count in max(found, key=len, default=()))
