"""What `pentad doctor` examines: this machine, or the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Iterator

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.doctor.checks import CHECKS, subject_of
from pentad.orchestrator.doctor.finding import Finding, Row, UnderWay

NAMES = ("Ray", *(check.name for check in CHECKS), "clock offset")


def examine(config: RunConfig, seconds: float | None, under_way: UnderWay) -> Iterator[list[Row]]:
    """The rows of each check as soon as it is made: one of this machine, or one of every node that the run would be
    placed on. `seconds` are those of the burn, None: the default on GPUs, and none on CPUs."""
    if config.cluster.address != "local":
        from pentad.orchestrator.doctor.nodes import examine_cluster  # imports ray

        yield from examine_cluster(config, seconds, under_way)
        return
    yield [Row("Ray", Finding("not applicable", "cluster.address is local, so a run starts its own"))]
    subject = subject_of(config, seconds)
    for check in CHECKS:
        with under_way(check.name, check.seconds(subject)):
            finding = check.examine(subject)
        yield [Row(check.name, finding)]
    yield [Row("clock offset", Finding("not applicable", "one node"))]
