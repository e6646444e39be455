"""Checks for flipped bits (elastic.check_every) between the steps of one generation."""

from __future__ import annotations

from collections.abc import Sequence

from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.config.recovery_sections import ElasticSection
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.recovery.bit_flips import Verdict, find_verdict
from pentad.schedules.ir.errors import PentadError, enumerated
from pentad.workers.integrity.result import RankCheck


class BitChecks:
    """The checks of one generation: `submitted` is the step of the newest state that the ranks were told to compare,
    `passed` that of the newest state in which they agree."""

    def __init__(self, section: ElasticSection, group: WorkerGroup, bus: EventBus, first: int) -> None:
        self.every, self.policy, self.group, self.bus = section.check_every, section.check_policy, group, bus
        self.submitted, self.passed = first - 1, -1

    def due(self, step: int, *, saves: bool) -> bool:
        """Whether to check after `step` steps: every `check_every` steps, and before each checkpoint."""
        if not self.every or step <= self.submitted:
            return False
        return saves or (step > 0 and step % self.every == 0)

    def vouches_for(self, step: int) -> bool:
        """Whether a checkpoint of `step` steps may be committed."""
        return not self.every or step <= self.passed

    def conclude(self, step: int, checks: Sequence[RankCheck], seconds: float) -> None:
        """Judges the ranks' answers. Raises WorkerError for ranks to replace, and PentadError if the run is to end."""
        verdict = find_verdict(checks)
        if verdict is None:
            self.passed = step
            return
        evicts = self.policy == "evict" and verdict.kind != "software"
        ranks = enumerated(map(self.group.label, verdict.ranks))
        text = f"after step {step}, {verdict.sentence}"
        self.bus.record(
            "flipped bits",
            generation=self.group.generation,
            step=step,
            verdict=verdict.kind,
            ranks=list(verdict.ranks),
            certain=verdict.certain,
            what=verdict.what,
            policy="evict" if evicts else "stop",
            passed=self.passed,
            seconds=round(seconds, 3),
            cause=text,
        )
        self.bus.flipped_bits = f"{verdict.kind}: {text}"
        self.bus.update(verdict=self.bus.flipped_bits)
        if evicts:
            lost = verdict.ranks if verdict.certain else ()  # if uncertain, only a checkpoint helps
            raise WorkerError(f"{text} ({ranks})", verdict.ranks[0], text, lost, "corrupt", "check")
        raise PentadError(f"{text} ({ranks}): {self._reason(verdict)}")

    def _reason(self, verdict: Verdict) -> str:
        """Why the run ends."""
        if self.policy == "evict":
            return "no rank to replace, so elastic.check_policy = evict ends the run"
        return "elastic.check_policy = stop ends the run; the same command resumes from the newest checkpoint"
