"""The checkpoint that a run saves soon after its mesh has shrunk: the state moved through memory only, and fewer ranks
hold it."""

from __future__ import annotations

from pentad.orchestrator.cluster.group import Refs, WorkerGroup
from pentad.orchestrator.config.recovery_sections import CheckpointSection
from pentad.orchestrator.run.replication import Replication


class ShrinkSave:
    """That checkpoint for a generation that begins after `first` steps. Not saved if checkpoints are switched off or
    copies in memory protect the state."""

    def __init__(
        self, section: CheckpointSection, group: WorkerGroup, replication: Replication, first: int, *, due: bool
    ) -> None:
        self.group, self.replication, self.first = group, replication, first
        self.pending = due and bool(section.every or section.keep_every or section.every_seconds)
        self._reserved: Refs = {}

    def begin_generation(self) -> None:
        if self.pending:
            self._reserved = self.group.submit_reserved()

    def is_due(self, step: int) -> bool:
        """Whether to save it after `step` steps; not before GPU ranks have pinned memory, for which training does not
        wait."""
        protected = not self.pending or self.replication.protects
        return step > self.first and not protected and self.group.is_ready(self._reserved)
