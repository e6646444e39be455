"""The sections on checkpoints and on what happens when ranks fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from pentad.orchestrator.config.errors import Broken
from pentad.orchestrator.config.sections import Count, CountOrZero, Section, Text
from pentad.workers.checkpoint.location import has_credentials

SHORTEST_LEASE = 5.0


class CheckpointSection(Section):
    """When checkpoints are saved, and where (docs/checkpoints.md)."""

    path: Text | None = None
    """folder, or URI of a store (s3://bucket/prefix, gs://, hdfs://, file://), that holds the checkpoints of runs under
    their names; null: run.folder. Credentials come from the environment"""
    every: CountOrZero = 0
    """steps between checkpoints; 0: none by steps"""
    every_seconds: NonNegativeFloat = 600.0
    """seconds of training after which a checkpoint is saved, whatever the step; 0: none by time"""
    hang_seconds: PositiveFloat = 300.0
    """shortest time without progress of a write after which neither training nor the end of a run waits for a
    checkpoint any longer"""
    at_end: bool = True
    """save a checkpoint as well when the run ends or is stopped; false: what came after the last one is lost"""
    keep: Count = Field(default=2, description="newest checkpoints to keep; older ones are deleted")
    keep_every: CountOrZero = 0
    """milestones: every this many steps a checkpoint is saved and kept for good; 0: none"""
    restart_if_damaged: bool = False
    """begin a run again if all its checkpoints are damaged or gone; false: it ends with an error"""
    keep_best: bool | Text = False
    """also keep the checkpoint with the lowest evaluation loss: that of the data set with this name or, with true, the
    mean of all"""

    def rules(self) -> Iterator[Broken | str]:
        if self.path is not None and has_credentials(self.path):
            yield "checkpoint.path has a user or password, which would get into files: expected it in the environment"


class ElasticSection(Section):
    """What happens when ranks fail (docs/recovery.md)."""

    max_failures: CountOrZero = 100
    """failures that a run survives; 0: the first one ends it"""
    min_ranks: Count | None = None
    """fewest ranks to continue with if lost ones cannot be replaced; null: all of the mesh"""
    wait_seconds: NonNegativeFloat = 30.0
    """wait for a replacement before the mesh shrinks or the run ends"""
    hang_seconds: PositiveFloat = 10.0
    """shortest time without progress after which a rank counts as hung"""
    slow_rank: Literal["report", "rebalance", "evict"] = "report"
    """what happens once a rank is 6 to 8 % slower than those with the same stages. report: a line in the terminal, the
    status and the journal (docs/observability.md). If one computes 8 % longer for 16 more steps, rebalance: layers move
    from its stage to others, if that helps; evict: it moves to another GPU or node, if there is room
    (docs/faulty-ranks.md)"""
    spares: CountOrZero | None = None
    """processes that wait on the ranks' nodes, with everything imported, to take the place of a lost rank. Each takes
    host memory there, and no GPU. null: for ranks on CPUs, as many as one of their nodes has ranks, on nodes without
    ranks that have room for them"""
    replicate_every: CountOrZero = 0
    """steps between copies of each rank's state in the memory of a rank of another node; 0: none"""
    failure_domain: Text | None = None
    """label of Ray's nodes, such as a rack, with the same value on nodes that fail together: copies of
    elastic.replicate_every go to ranks with another value; null: each node fails alone"""
    check_every: CountOrZero = 0
    """steps between searches for flipped bits: replicas compare their states, and what they compute of a microbatch.
    One precedes every checkpoint; 0: none"""
    check_policy: Literal["stop", "evict"] = "stop"
    """what happens if ranks differ. stop: the run ends without a checkpoint; evict: all ranks go back to the newest
    checkpoint, and those known to be at fault are replaced"""
    driver_lease: NonNegativeFloat = 120.0
    """how long ranks wait for a new driver, on a cluster that outlives the old one; 0: they end with the driver"""
    notice: Text | None = None
    """file that appears on a node, or URL that answers with 200 there, shortly before the node ends; null: none"""
    notice_seconds: PositiveFloat = 30.0
    """time from that notice to the end of the node"""

    def rules(self) -> Iterator[Broken | str]:
        if self.failure_domain is not None and not self.replicate_every:
            yield Broken("failure_domain", "null without elastic.replicate_every")
        if 0 < self.driver_lease < SHORTEST_LEASE:
            yield Broken(
                "driver_lease", f"0, or at least {SHORTEST_LEASE:g}: a busy driver is silent for a second or two"
            )
        if self.notice is not None and not self.notice.startswith(("/", "http://", "https://")):
            yield Broken("notice", "an absolute path, or a URL that begins with http:// or https://")
