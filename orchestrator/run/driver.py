"""The driver of a run: plans and checks it, starts or joins a Ray cluster, trains, and sums up.

Imports neither Ray nor torch: Ray's processes start while the driver still imports.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rich.console import Console

from pentad.orchestrator.cluster.devices import local_device
from pentad.orchestrator.cluster.local_head import launch
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring import runfolder
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.monitoring.runfolder import METRICS, path_of, read_lines
from pentad.orchestrator.planning.fit import first_plan
from pentad.orchestrator.run import preflight
from pentad.orchestrator.run.interrupts import Interrupts
from pentad.orchestrator.run.measure import typical_pace
from pentad.orchestrator.run.startup import Startup
from pentad.schedules.spec.plan import Plan

RUNNER = "pentad.workers.runtime.runner:Runner"
FILES = {
    "config": runfolder.CONFIG,
    "program": runfolder.PROGRAM,
    "metrics": runfolder.METRICS,
    "journal": runfolder.JOURNAL,
    "timeline": runfolder.TIMELINE,
    "trace": runfolder.TRACE,
    "page": runfolder.PAGE,
}


def train(
    config: RunConfig,
    *,
    console: Console,
    as_json: bool = False,
    fingerprint: str = "",
    runner: str = RUNNER,
    plan: Plan | None = None,
    began: float | None = None,
) -> dict[str, Any]:
    """Runs the steps that the run still lacks, and returns its summary.

    The first Ctrl-C or SIGTERM ends the run after the steps in flight, with a checkpoint, as 'stopped'; the second
    raises KeyboardInterrupt. Raises PentadError for a user's mistake and WorkerError when a rank fails. However it
    ends, all files are complete and no process is left. `as_json` prints nothing to the console; `fingerprint` is the
    corpus's; `plan` is that of `first_plan` (None: made here); `began` is the monotonic second of the command.
    """
    quiet = Console(quiet=True) if as_json else console
    with ExitStack() as stack:
        display = stack.enter_context(Display(quiet, config.run.name, config.run.steps))
        if preflight.check(config, fingerprint):
            display.note(f"the run has all of its run.steps = {config.run.steps} already")
            return summary(config, config.run.steps, "finished")
        startup = stack.enter_context(Startup(quiet, began))
        interrupts = stack.enter_context(Interrupts())
        device = local_device(config.cluster, config.mesh.size)[0]
        plan = first_plan(config, device) if plan is None else plan
        startup.phase("starting Ray" if config.cluster.address == "local" else f"joining {config.cluster.address}")
        head = stack.enter_context(launch(config.cluster, config.mesh.size))
        from pentad.orchestrator.run.training import train_on_cluster  # imports ray

        plan = replace(plan, fingerprint=fingerprint)
        steps = train_on_cluster(config, plan, head, runner, display, startup, interrupts)
        state = "finished" if steps == config.run.steps else "stopped"
        if state == "stopped":
            display.note(f"stopped after step {steps}")
        return summary(config, steps, state)


def summary(config: RunConfig, steps: int, state: str) -> dict[str, Any]:
    """The result of a run over all its generations; tokens per second are those of the last generation."""
    folder = path_of(config)
    rows = read_lines(folder / METRICS)
    last = rows[-1] if rows else {}
    return {
        "run": config.run.name,
        "folder": str(folder),
        "steps": steps,
        "loss": last.get("loss"),
        "first_loss": rows[0]["loss"] if rows else None,
        "tokens_per_second": typical_pace([row for row in rows if row["generation"] == last["generation"]])
        if rows
        else None,
        "bubble_planned": last.get("bubble_planned"),
        "bubble_measured": last.get("bubble_measured"),
        "state": state,
        "files": {name: str(folder / file) for name, file in FILES.items() if (folder / file).exists()},
    }
