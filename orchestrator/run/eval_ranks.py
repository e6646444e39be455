"""The ranks of `pentad eval`: placed, restored and asked once."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from pentad.orchestrator.cluster import cluster as clusters
from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.cluster.local_head import LocalHead
from pentad.orchestrator.cluster.placement import hosts, release, reserve
from pentad.orchestrator.cluster.worker import Status
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.monitoring.evaluations import evaluation_rows
from pentad.orchestrator.planning.planning import plan_on
from pentad.orchestrator.run.hang_detection import HangDetector
from pentad.schedules.spec.plan import Plan
from pentad.workers.checkpoint.checkpoint import Start


def evaluate_on(
    config: RunConfig, plan: Plan, start: Start, head: LocalHead | None, runner: str, display: Display
) -> list[dict[str, Any]]:
    """Evaluates the weights of a checkpoint on the cluster of `head`, None: the existing one."""
    timeout = config.cluster.start_timeout_seconds
    with ExitStack() as stack:
        cluster = stack.enter_context(clusters.join(config.cluster, config.mesh.size, head))
        display.phase(f"placing {config.mesh.size} rank{'s' * (config.mesh.size > 1)}")
        placement = reserve(config.mesh.mesh, cluster.device, timeout, fixed=cluster.local)
        stack.callback(release, placement)
        plan = plan_on(config, cluster.device, hosts=hosts(placement), expected=plan)
        group = stack.enter_context(WorkerGroup.start(plan, placement, timeout, runner=runner, progress=display.phase))
        group.restore(start)
        display.phase("evaluating")
        detector = HangDetector(group, config.elastic.hang_seconds, timeout)

        def check(statuses: dict[int, Status]) -> None:
            stall = detector.check(statuses, None, stepping=True)
            if stall is not None and stall.late:
                raise detector.fault(stall)

        began = time.monotonic()
        results = group.collect(group.submit_evaluate(start.step), tick=check)[0]
        return evaluation_rows(start.step, results, time.monotonic() - began, group.generation)
