"""Trains: joins a cluster, places the ranks, and keeps them in calls of about a second until the steps are done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from pentad.orchestrator.cluster import cluster as clusters
from pentad.orchestrator.cluster.cluster import Cluster
from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.cluster.placement import hosts, release, reserve
from pentad.orchestrator.cluster.worker import RUNNER
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring import runfolder
from pentad.orchestrator.monitoring.display import Display, RankPlacement
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.headwatch import watched_head
from pentad.orchestrator.monitoring.run_state import ControlRequests
from pentad.orchestrator.monitoring.runfolder import JOURNAL, METRICS, RunFolder, read_lines
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.run.interrupts import Interrupts
from pentad.orchestrator.run.measure import History, typical_pace
from pentad.orchestrator.run.recovery import Recovery
from pentad.orchestrator.run.step_loop import Calls
from pentad.orchestrator.run.watchers import refuse_taken_ports, watched
from pentad.workers.data.sources import check_same

FILES = {
    "config": runfolder.CONFIG,
    "program": runfolder.PROGRAM,
    "metrics": runfolder.METRICS,
    "journal": runfolder.JOURNAL,
    "timeline": runfolder.TIMELINE,
    "trace": runfolder.TRACE,
    "page": runfolder.PAGE,
}
FAILURE = "failure.txt"


def train(
    config: RunConfig, *, console: Console, as_json: bool = False, fingerprint: str = "", runner: str = RUNNER
) -> dict[str, Any]:
    """Runs the steps that the run still lacks, and returns what came out.

    The first Ctrl-C or SIGTERM ends the run after the steps under way, with a checkpoint, as 'stopped'; the second
    raises KeyboardInterrupt. Raises PentadError for a user's mistake and WorkerError when a rank fails. However it
    ends, the files are whole and no process is left. `as_json` keeps the console silent; `fingerprint` is the corpus's.
    """
    mesh = config.mesh.mesh
    patience = config.cluster.start_timeout_seconds
    runfolder.refuse_live(config)
    refuse_taken_ports(config.metrics)
    with ExitStack() as stack:
        quiet = Console(quiet=True) if as_json else console
        display = stack.enter_context(Display(quiet, config.run.name, config.run.steps))
        interrupts = stack.enter_context(Interrupts())
        cluster = stack.enter_context(clusters.start(config.cluster, mesh.size))
        _greet(display, cluster)
        placement = reserve(mesh, cluster.device, patience, fixed=cluster.local)
        stack.callback(release, placement)
        plan = make_plan(config, cluster.device, hosts=hosts(placement), fingerprint=fingerprint)
        folder = stack.enter_context(RunFolder(config, plan))
        first, checkpoint, generation = _resume(folder, display)
        if first >= config.run.steps:
            display.note(f"the run has all of its run.steps = {config.run.steps} already")
            return _summary(config, folder, first, "finished")
        news, wishes = EventBus(config, folder, display, first, cluster.dashboard), ControlRequests()
        with watched_head(cluster, news), watched(config, news, wishes), _told(news):
            folder.begin(config)
            news.event("start", generation=generation, step=first, program=plan.program.hash)
            group = stack.enter_context(
                WorkerGroup.start(plan, placement, patience, generation=generation, runner=runner)
            )
            news.event("place", generation=generation, ranks=_ranks(group))
            group.check_folder(folder.path.resolve())
            group.restore(checkpoint, first)
            done = _generations(config, group, news, interrupts, wishes, first)
            state = "finished" if done == config.run.steps else "stopped"
            news.event("end" if state == "finished" else "stop", generation=group.generation, step=done)
            news.state(state)
        if state == "stopped":
            display.note(f"stopped after step {done}")
        return _summary(config, folder, done, state)


def _generations(
    config: RunConfig, group: WorkerGroup, news: EventBus, interrupts: Interrupts, wishes: ControlRequests, first: int
) -> int:
    """Steps from `first` on, generation after generation, until the run is done or stopped; returns how many are
    done."""

    def restless() -> bool:
        return interrupts.asked or wishes.stopping or wishes.aborted

    recovery, saved, shown = Recovery(config, group, news, restless), first, None
    while True:
        keep = config.metrics.timeline_steps
        history = History(group.plan, group.generation, keep=keep, offsets=group.offsets, device_name=group.device_name)
        if group.plan is not shown:
            shown = group.plan
            news.display.plan(shown, history.costs, _seats(group))
        news.plan(group)
        calls = Calls(config, group, news, history, interrupts, wishes, first, saved, recovery.expected)
        try:
            interrupts.patient = True
            news.state("running")
            calls.run()
            if not calls.changing or restless() or calls.done == config.run.steps:
                return calls.done
            known = recovery.change(calls.done)
        except WorkerError as fault:
            known = recovery.fault(fault, calls.done)
        finally:
            news.folder.timelines(history.timeline, history.simulated())
        calls.add(
            [list(known.results[step].values()) for step in sorted(known.results) if calls.done <= step < known.version]
        )
        if known.version < calls.done:
            news.folder.rewind(known.version)
        first, saved = known.version, max(calls.durable, *(s for s in news.folder.saved() if s <= known.version), 0)


def _greet(display: Display, cluster: Cluster) -> None:
    if cluster.note:
        display.note(cluster.note)
    if cluster.dashboard:
        token = f" (token in {cluster.token_file})" if cluster.token_file else ""
        display.note(f"Ray dashboard: {cluster.dashboard}{token}")


def _resume(folder: RunFolder, display: Display) -> tuple[int, Path | None, int]:
    """The first step to do, the checkpoint to begin with, and the number of this generation.

    Checkpoints that are newer but damaged are put aside under another name: their steps come again.
    """
    generation = 1 + max((row.get("generation", 0) for row in read_lines(folder.path / JOURNAL, ["event"])), default=0)
    if not any(folder.checkpoints.iterdir()):
        folder.rewind(0)
        return 0, None, generation
    from pentad.workers.checkpoint.checkpoint import newest  # imports torch, which a fresh run's driver does not need

    found = newest(folder.checkpoints)
    for path, reason in found.refused:
        aside = path.rename(path.with_name(f"{path.name}.refused-{generation}"))
        display.note(f"checkpoint refused, and put aside as {aside.name}: {reason}")
    if found.checkpoint and found.checkpoint.meta.get("data"):
        check_same(folder.plan.data, folder.plan.fingerprint, found.checkpoint.meta["data"])
    first = found.checkpoint.step if found.checkpoint else 0
    display.note(f"resuming from step {first}" if found.checkpoint else "no whole checkpoint: starting from step 0")
    folder.rewind(first)
    return first, found.checkpoint.folder if found.checkpoint else None, generation


@contextmanager
def _told(news: EventBus) -> Iterator[None]:
    """Puts a failure into the journal, and a rank's whole account of it into a file that the error names."""
    try:
        yield
    except WorkerError as error:
        news.event("failure", rank=error.rank, error=str(error))
        news.state("failed")
        path = news.folder.path / FAILURE
        path.write_text(f"{error}\n\n{error.detail}\n", encoding="utf-8")
        raise WorkerError(f"{error} (more in {path})", error.rank, error.detail) from None
    except BaseException as error:
        news.event("failure", error=str(error) or type(error).__name__)
        news.state("failed")
        raise


def _ranks(group: WorkerGroup) -> list[dict[str, Any]]:
    mesh = group.plan.mesh
    return [
        {"rank": rank, "coordinates": mesh.coordinates(rank)._asdict(), "node": at.ip, "gpu": at.gpu, "pid": at.pid}
        for rank, at in enumerate(group.places)
    ]


def _seats(group: WorkerGroup) -> list[RankPlacement]:
    mesh = group.plan.mesh
    return [
        RankPlacement(rank, mesh.coordinates(rank), at.ip, f"GPU {at.gpu}" if at.gpu >= 0 else "CPU", at.pid)
        for rank, at in enumerate(group.places)
    ]


def _summary(config: RunConfig, folder: RunFolder, steps: int, state: str) -> dict[str, Any]:
    """What the run has come to, over all its generations; the pace is of the last one."""
    rows = read_lines(folder.path / METRICS)
    last = rows[-1] if rows else {}
    files = {name: str(folder.path / file) for name, file in FILES.items() if (folder.path / file).exists()}
    return {
        "run": config.run.name,
        "folder": str(folder.path),
        "steps": steps,
        "loss": last.get("loss"),
        "first_loss": rows[0]["loss"] if rows else None,
        "tokens_per_second": typical_pace([row for row in rows if row["generation"] == last["generation"]])
        if rows
        else None,
        "bubble_planned": last.get("bubble_planned"),
        "bubble_measured": last.get("bubble_measured"),
        "state": state,
        "files": files,
    }
