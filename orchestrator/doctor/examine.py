"""What `pentad doctor` examines: this machine, or the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Iterator

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.doctor.checks import CHECKS, subject_of
from pentad.orchestrator.doctor.finding import Finding, FindingRow, UnderWay

OF_CLUSTERS = ("nodes", "network", "clock offset")
NAMES = ("Ray", OF_CLUSTERS[0], *(check.name for check in CHECKS), *OF_CLUSTERS[1:])


def examine(config: RunConfig, seconds: float | None, under_way: UnderWay) -> Iterator[list[FindingRow]]:
    """The rows of each check as soon as it is done: one for this machine, or one for every node on which the run would
    be placed. `seconds` is the length of the burn-in (None: the default on GPUs, 0 on CPUs)."""
    if config.cluster.address != "local":
        from pentad.orchestrator.doctor.nodes import examine_cluster  # imports ray

        yield from examine_cluster(config, seconds, under_way)
        return
    subject = subject_of(config, seconds)
    for check in CHECKS:
        with under_way(check.name, check.seconds(subject)):
            finding = check.run(subject)
        yield [FindingRow(check.name, finding)]
    for name in ("Ray", *OF_CLUSTERS):
        yield [FindingRow(name, Finding("not applicable", "this machine only"))]
