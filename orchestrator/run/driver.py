"""The driver's loop: places the ranks on a cluster and has them run steps, one generation after another, until all
steps are done; or evaluate a checkpoint once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from ray.util.placement_group import PlacementGroup

from pentad.orchestrator.cluster import cluster as clusters
from pentad.orchestrator.cluster.cluster import Cluster
from pentad.orchestrator.cluster.copies import GroupCopies
from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.cluster.local_head import LocalHead
from pentad.orchestrator.cluster.placement import hosts, release, reserve
from pentad.orchestrator.cluster.worker import Status
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.monitoring.evaluations import evaluation_rows
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.headwatch import watched_head
from pentad.orchestrator.monitoring.plan_view import print_plan
from pentad.orchestrator.monitoring.run_state import ControlRequests, Watcher
from pentad.orchestrator.monitoring.runfolder import JOURNAL, Changes, RunFolder
from pentad.orchestrator.planning.planning import plan_on
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.recovery.fence import RecoveryState
from pentad.orchestrator.recovery.hang_detection import HangDetector
from pentad.orchestrator.recovery.recovery import Recovery
from pentad.orchestrator.recovery.retention import rollback_target
from pentad.orchestrator.recovery.spikes import roll_back, skipped_batches
from pentad.orchestrator.run.init_from import Origin, adapter_request, origin_of
from pentad.orchestrator.run.interrupts import Interrupts
from pentad.orchestrator.run.measure import History
from pentad.orchestrator.run.resumed_optimizer import dropped_state
from pentad.orchestrator.run.start_monitoring import monitored
from pentad.orchestrator.run.step_loop import StepLoop
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan
from pentad.workers.checkpoint.checkpoint import Start, Unreadable, recover
from pentad.workers.checkpoint.location import location

FAILURE = "failure.txt"


def drive(
    config: RunConfig,
    plan: Plan,
    head: LocalHead | None,
    runner: str,
    display: Display,
    interrupts: Interrupts,
    origin: Origin | None,
    watchers: Sequence[Watcher] = (),
) -> int:
    """Trains on the cluster of `head`, None: the existing one, and returns the number of steps done. A run without an
    intact checkpoint starts from `origin` (None: found here). `watchers` are notified after those of `monitored`."""
    timeout = config.cluster.start_timeout_seconds
    with ExitStack() as stack:
        cluster, placement, plan = stack.enter_context(_placed(config, plan, head, display))
        folder = stack.enter_context(RunFolder(config, plan))
        _show_cluster(display, cluster)
        start, changes, generation = _resume(config, folder, display, origin)
        bus, requests = EventBus(config, folder, display, start.step, cluster.dashboard), ControlRequests()
        with watched_head(cluster, bus), monitored(config, bus, requests), _failures_recorded(bus):
            bus.watchers += watchers
            folder.begin(config)
            facts = {"checkpoint": str(start.folder) if start.folder else None, "changes": changes}
            bus.record("start", generation=generation, step=start.step, program=plan.program.hash, **facts)
            group = stack.enter_context(
                WorkerGroup.start(
                    plan, placement, timeout, generation=generation, runner=runner, progress=display.phase
                )
            )
            bus.on_first_step = cluster.start_dashboard  # later, because ranks need the CPU while they start
            bus.record("place", generation=generation, ranks=_ranks(group))
            key = "run.folder" if config.checkpoint.path is None else "checkpoint.path"
            group.check_folder(folder.checkpoints, key)
            group.restore(start)
            group.skipped_batches = skipped_batches(folder, start)
            interrupts.stop = requests.stop
            done = _run_generations(config, group, bus, requests, start)
            state = "finished" if done == config.run.steps else "stopped"
            bus.record("end" if state == "finished" else "stop", generation=group.generation, step=done)
            bus.set_state(state)
    return done


def evaluate_on(
    config: RunConfig, plan: Plan, start: Start, head: LocalHead | None, runner: str, display: Display
) -> list[dict[str, Any]]:
    """Evaluates the weights of a checkpoint on the cluster of `head`, None: the existing one."""
    timeout = config.cluster.start_timeout_seconds
    with ExitStack() as stack:
        _, placement, plan = stack.enter_context(_placed(config, plan, head, display))
        group = stack.enter_context(WorkerGroup.start(plan, placement, timeout, runner=runner, progress=display.phase))
        group.restore(start)
        display.phase("evaluating")
        detector = HangDetector(group, config.elastic.hang_seconds, timeout)

        def check(statuses: dict[int, Status]) -> None:
            stall = detector.check(statuses, None, stepping=True)
            if stall is not None and stall.late:
                raise detector.fault(stall)

        began = time.monotonic()
        results = group.collect(group.submit_evaluate(start.step), tick=check)[0].data_sets
        return evaluation_rows(start.step, results, time.monotonic() - began, group.generation)


@contextmanager
def _placed(
    config: RunConfig, plan: Plan, head: LocalHead | None, display: Display
) -> Iterator[tuple[Cluster, PlacementGroup, Plan]]:
    """The cluster of `head`, None: the existing one, the resources of the ranks in it, and the plan for them."""
    size, timeout = config.mesh.size, config.cluster.start_timeout_seconds
    with ExitStack() as stack:
        cluster = stack.enter_context(clusters.join(config.cluster, size, head))
        display.phase(f"placing {size} rank{'s' * (size > 1)}")
        placement = reserve(config.mesh.mesh, cluster.device, timeout, fixed=cluster.local)
        stack.callback(release, placement)
        yield cluster, placement, plan_on(config, cluster.device, hosts=hosts(placement), expected=plan)


def _run_generations(
    config: RunConfig, group: WorkerGroup, bus: EventBus, requests: ControlRequests, start: Start
) -> int:
    """Runs steps from `start` on, one generation after another, until all are done or the run is stopped; returns how
    many are done."""
    copies = GroupCopies(group)
    recovery, shown = Recovery(config, group, bus, requests, start, copies), None
    first = saved = start.step
    if rollback_target(config, first) == 0 and first not in bus.folder.saved():
        saved = -1  # the initial weights are something to go back to as well
    saved_at = time.monotonic()
    while True:
        steps = StepLoop(config, group, bus, requests, first, saved, saved_at, copies, recovery.should_regroup)
        bus.ranks_placed(group)
        if group.plan is not shown:
            shown = group.plan
            print_plan(bus.display.console, shown, steps.history.costs, bus.view.ranks)
            bus.display.phase("first step")
        fault: WorkerError | None = None
        try:
            bus.set_state("running")
            steps.run()
        except WorkerError as error:
            fault = error
        finally:
            _write_timelines(bus, steps.history)  # of this plan: the next may be another
        if fault is not None:
            state = recovery.recover(fault, steps.done)
        elif steps.spikes.spike is not None:
            state = RecoveryState(version=steps.done)
        elif not steps.regrouping or requests.stopping or requests.aborted or steps.done == config.run.steps:
            return steps.done
        else:
            state = recovery.regroup(steps.done)
        replayed = sorted(step for step in state.results if steps.done <= step < state.version)
        steps.add([list(state.results[step].values()) for step in replayed])
        if (spike := steps.spikes.spike) is not None and spike < state.version:
            copies.forget()
            state.version = roll_back(config, group, bus, spike)
        if state.version < steps.done:
            bus.rewind(state.version)
        first, saved_at = state.version, steps.saved_at
        saved = max((s for s in (steps.durable, *_saved(bus)) if s <= state.version), default=-1)


def _saved(bus: EventBus) -> list[int]:
    """Steps of checkpoints; none while they cannot be read, which is no reason to end a run that does without."""
    with suppress(Unreadable):
        return bus.folder.saved()
    return []


def _write_timelines(bus: EventBus, history: History) -> None:
    """Without them the run is still complete, so a full disk costs a note."""
    try:
        bus.folder.timelines(history.timeline, history.costs, history.program)
        bus.folder.eval_timeline(history.eval_timeline)
    except PentadError as error:
        bus.display.note(f"no timeline: {error}")


def _show_cluster(display: Display, cluster: Cluster) -> None:
    if cluster.note:
        display.note(cluster.note)
    if cluster.dashboard:
        token = f" (token in {cluster.token_file})" if cluster.token_file else ""
        when = " (starts after the first step)" if cluster.local else ""
        display.note(f"Ray dashboard{when}: {cluster.dashboard}{token}")


def _resume(
    config: RunConfig, folder: RunFolder, display: Display, origin: Origin | None
) -> tuple[Start, Changes, int]:
    """What to start from, the keys that differ from the steps before, and the number of this generation.

    Newer checkpoints that are damaged are renamed, and their steps run again. Raises PentadError if all are damaged,
    unless checkpoint.restart_if_damaged, and if one cannot be read.
    """
    found = recover(folder.checkpoints, restart=config.checkpoint.restart_if_damaged)
    known = [row.get("generation", 0) for row in read_lines(folder.path / JOURNAL, ["event"])]
    if found.checkpoint:  # perhaps of a run whose folder is gone
        known.append(found.checkpoint.meta.get("generation", 0))
    generation = 1 + max(known, default=0)
    for aside, reason in found.refused:
        display.note(f"checkpoint refused and renamed to {aside.name}: {reason}")
    if found.checkpoint:
        start, changes = Start(found.checkpoint.folder, found.checkpoint.step), folder.changes
        display.note(f"resuming from step {start.step}")
        if note := dropped_state(folder.plan, found.checkpoint.tensors):
            display.note(note)
    else:
        start, changes, base, adapter = origin or origin_of(config)
        if start.folder or found.refused:
            display.note(f"starting from {start.folder or 'the initial weights'} at step {start.step}")
        if base is not None:
            display.note(f"the adapters of lora are trained beside the weights of {base.folder}")
        origin_folder = start.folder if base is None else location(base.folder)
        if origin_folder is not None:
            folder.keep_files(origin_folder)
        if adapter is not None and folder.plan.lora is not None:
            from pentad.workers.hf.peft import import_adapter

            request = adapter_request(config, folder.path)
            start = Start(import_adapter(adapter, folder.checkpoints, request, folder.plan.lora))
            display.note(f"they continue those in {adapter}")
    folder.rewind(start.step)
    return start, changes, generation


@contextmanager
def _failures_recorded(bus: EventBus) -> Iterator[None]:
    """Writes a failure to the journal, and the details of a rank's failure to a file that the error names."""
    try:
        yield
    except WorkerError as error:
        _record_failure(bus, rank=error.rank, error=str(error))
        path = bus.folder.path / FAILURE
        try:
            path.write_text(f"{error}\n\n{error.detail}\n", encoding="utf-8")
        except OSError:
            raise error from None
        raise WorkerError(f"{error} (more in {path})", error.rank, error.detail) from None
    except BaseException as error:
        _record_failure(bus, error=str(error) or type(error).__name__)
        raise


def _record_failure(bus: EventBus, **facts: Any) -> None:
    with suppress(PentadError):  # a full disk, perhaps the failure itself
        bus.record("failure", **facts)
    bus.set_state("failed")


def _ranks(group: WorkerGroup) -> list[dict[str, Any]]:
    mesh = group.plan.mesh
    return [
        {"rank": rank, "coordinates": mesh.coordinates(rank)._asdict(), "node": at.ip, "gpu": at.gpu, "pid": at.pid}
        for rank, at in enumerate(group.places)
    ]
