"""The driver's loop: places the ranks on a cluster and has them run steps, one generation after another, until all
steps are done; or evaluate a checkpoint once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from pentad.orchestrator.cluster.copies import GroupCopies
from pentad.orchestrator.cluster.faults import Refusal, Superseded, WorkerError
from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.cluster.local_head import LocalHead
from pentad.orchestrator.cluster.rank_status import Status
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.monitoring.evaluations import evaluation_rows
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.headwatch import watched_head
from pentad.orchestrator.monitoring.plan_view import print_plan
from pentad.orchestrator.monitoring.run_state import ControlRequests, Watcher
from pentad.orchestrator.monitoring.runfolder import METRIC_KEYS, METRICS, RunFolder, has_checkpoint
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.recovery.adoption import Parked
from pentad.orchestrator.recovery.fence import RecoveryState, is_complete
from pentad.orchestrator.recovery.hang_detection import HangDetector
from pentad.orchestrator.recovery.newest_checkpoint import NewestIntact
from pentad.orchestrator.recovery.recovery import Recovery
from pentad.orchestrator.recovery.retention import (
    open_current,
    record_committed,
    require_listed,
    rollback_target,
    saved_steps,
)
from pentad.orchestrator.recovery.spikes import roll_back, skipped_batches
from pentad.orchestrator.run.init_from import Origin, adapter_request, origin_of
from pentad.orchestrator.run.interrupts import Interrupts
from pentad.orchestrator.run.measure import History
from pentad.orchestrator.run.placing import Room, check_failure_domain, reserved, reserved_or_left, start_ranks
from pentad.orchestrator.run.resumed_optimizer import dropped_state
from pentad.orchestrator.run.start_monitoring import monitored
from pentad.orchestrator.run.step_loop import StepLoop
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan
from pentad.workers.checkpoint.checkpoint import Start, recover
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
    """Trains on the cluster of `head` (None: the existing one) and returns the number of steps done. A run without an
    intact checkpoint starts from `origin` (None: found here). `watchers` are notified after those of `monitored`."""
    with ExitStack() as stack:
        room = stack.enter_context(reserved_or_left(config, plan, head, display, runner))
        check_failure_domain(config.elastic.failure_domain, room, display)
        cluster, plan, parked = room.cluster, room.plan, room.parked
        folder = stack.enter_context(RunFolder(config, plan))
        for note in cluster.notes:
            display.note(note)
        began = _resume(config, folder, display, origin) if parked is None else _adopt(config, folder, parked, origin)
        bus, requests = EventBus(config, folder, display, began.step, cluster.dashboard), ControlRequests()
        with watched_head(cluster, bus), monitored(config, bus, requests), _failures_recorded(bus):
            bus.watchers += watchers
            with folder.files.beginning():
                folder.begin(config)
                facts = began.facts | {"lease": room.lease and room.lease.ranks, "adopts": parked is not None}
                bus.record("start", step=began.step, program=plan.program.hash, **facts)
                if room.check is not None:
                    bus.record("check", **room.check.facts)
            if parked is None:
                group = stack.enter_context(_started(config, room, bus, began, runner))
            else:
                group = stack.enter_context(parked.group)
            start = began.start if parked else _restore(config, group, bus, began, origin)
            group.skipped_batches = skipped_batches(folder, start)
            interrupts.stop = display.output.on_closed = requests.stop
            done = _run_generations(config, group, bus, requests, start, parked)
            state = "finished" if done == config.run.steps else "stopped"
            bus.record("end" if state == "finished" else "stop", generation=group.generation, step=done)
            bus.settle()
            bus.set_state(state)
    return done


def evaluate_on(
    config: RunConfig, plan: Plan, start: Start, head: LocalHead | None, runner: str, display: Display
) -> list[dict[str, Any]]:
    """Evaluates the weights of a checkpoint on the cluster of `head` (None: the existing one)."""
    timeout = config.cluster.start_timeout_seconds
    with ExitStack() as stack:
        room = stack.enter_context(reserved(config, plan, head, display))
        group = stack.enter_context(start_ranks(config, room, runner, display.phase))
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


def _started(config: RunConfig, room: Room, bus: EventBus, began: Beginning, runner: str) -> WorkerGroup:
    """Starts new ranks, which have no state yet."""
    generation = began.facts["generation"]
    group = start_ranks(config, room, runner, bus.display.phase, generation)
    try:
        bus.on_first_step = room.cluster.start_dashboard  # not earlier: ranks need the CPU while they start
        bus.record("place", generation=generation, ranks=_ranks(group))
        key = "run.folder" if config.checkpoint.path is None else "checkpoint.path"
        group.check_folder(bus.folder.checkpoints, key)
    except BaseException:
        group.stop(kill=True)
        raise
    return group


def _restore(config: RunConfig, group: WorkerGroup, bus: EventBus, began: Beginning, origin: Origin | None) -> Start:
    """Gives the ranks the state that the run begins with, and returns that. If they find a checkpoint damaged, it is
    the next older one."""
    restart, seconds = config.checkpoint.restart_if_damaged, config.cluster.start_timeout_seconds
    newest, start = NewestIntact(bus, seconds, restart=restart), began.start
    while not newest.restore(group, start):
        found = newest.find()
        if found:
            start = Start(found.folder, found.step)
            bus.display.note(f"resuming from step {start.step}")
        else:
            start = _start_of(config, origin or origin_of(config), bus.folder)
            bus.display.note(_starting(start))
    if start != began.start:  # only now: a run that ends above, without an intact checkpoint, keeps its metrics
        bus.rewind(start.step)
    return start


def _starting(start: Start) -> str:
    """A sentence on how a run without a checkpoint of its own begins."""
    return f"starting from {start.folder or 'the initial weights'} at step {start.step}"


def _run_generations(
    config: RunConfig,
    group: WorkerGroup,
    bus: EventBus,
    requests: ControlRequests,
    start: Start,
    parked: Parked | None = None,
) -> int:
    """Runs steps from `start` on, or from where a former driver left the `parked` ranks, one generation after another,
    until all are done or the run is stopped. Returns how many are done."""
    drawn = list[Future[None]]()
    with ThreadPoolExecutor(1, "timelines") as thread:
        draw = lambda history: drawn.append(thread.submit(_write_timelines, bus, history))  # noqa: E731
        done = _run_in_turn(config, group, bus, requests, start, parked, draw)
    for each in drawn:
        each.result()
    return done


def _run_in_turn(
    config: RunConfig,
    group: WorkerGroup,
    bus: EventBus,
    requests: ControlRequests,
    start: Start,
    parked: Parked | None,
    draw: Callable[[History], None],
) -> int:
    """The loop of `_run_generations`. `draw` draws a generation's timelines while the next one runs: with many ranks it
    takes seconds."""
    copies = GroupCopies(group, parked.token if parked else None, config.elastic.failure_domain)
    recovery = Recovery(config, group, bus, requests, start, copies, full=parked and parked.full)
    first = saved = bus.view.step if parked else start.step
    if parked is not None:
        saved = max((step for step in saved_steps(bus) if step <= first), default=-1)
    elif rollback_target(config, first) == 0 and first not in saved_steps(bus):
        saved = -1  # a rollback needs a checkpoint of the initial weights too
    saved_at, shown, hanging = time.monotonic(), None, None
    while True:
        record_committed(bus, saved)
        given = config, group, bus, requests, first, saved, saved_at, copies, recovery.should_regroup
        steps = StepLoop(*given, shrunk=not recovery.ranks.is_full, hanging=hanging)
        recovery.ranks.record = partial(_record_surviving, steps)
        state = None
        if parked is not None:
            state, parked = recovery.adopt(parked.lost, first), None
        try:
            if state is None:
                bus.ranks_placed(group)
                if group.plan is not shown:
                    shown = group.plan
                    print_plan(bus.display.console, shown, steps.history.costs, bus.view.ranks)
                    bus.display.phase("first step")
                state = _run(steps, recovery, bus)
            if state is None:
                return steps.done
            _record_surviving(steps, state)
        finally:
            draw(steps.history)
        hanging = steps.saving.current if steps.saving.hangs else None
        if (spike := steps.spikes.spike) is not None and spike < state.version:
            copies.forget()
            state.version = roll_back(config, group, bus, spike)
        if state.version < steps.done:
            bus.rewind(state.version)
        first, saved_at = state.version, steps.saving.saved_at
        saved = max((s for s in (steps.saving.durable, *saved_steps(bus)) if s <= state.version), default=-1)


def _run(steps: StepLoop, recovery: Recovery, bus: EventBus) -> RecoveryState | None:
    """Runs the steps of a generation; returns the state that the next one begins with, None if there is none."""
    fault: WorkerError | None = None
    try:
        bus.set_state("running")
        steps.run()
    except WorkerError as error:
        fault = error
    except Refusal:
        _save_surviving(steps, recovery, bus)
        raise
    requests = steps.requests
    if fault is not None:
        return recovery.recover(fault, steps.done)
    if steps.spikes.spike is not None:
        return RecoveryState(version=steps.done)
    if not steps.regrouping or requests.stopping or requests.aborted or steps.done == steps.config.run.steps:
        return None
    return recovery.regroup(steps.done)


def _record_surviving(steps: StepLoop, state: RecoveryState) -> None:
    """Records steps and evaluations that the ranks completed without the driver having heard of them."""
    replayed = sorted(step for step in state.results if steps.done <= step < state.version)
    evaluations = {step: each for step, each in state.evaluations.items() if step <= state.version}
    steps.add([list(state.results[step].values()) for step in replayed], evaluations)


def _save_surviving(steps: StepLoop, recovery: Recovery, bus: EventBus) -> None:
    """Saves the newest state before a rank's refusal ends the run; a note says so if that fails."""
    try:
        state = recovery.end_generation()
        _record_surviving(steps, state)
        is_newest = steps.spikes.spike is None and steps.saving.durable < steps.done == state.version
        if is_newest and is_complete(recovery.group.plan, state):
            recovery.ranks.save(state)
    except Superseded:
        raise
    except PentadError as error:
        bus.display.note(f"the state after step {steps.done} was not saved: {error}")


def _write_timelines(bus: EventBus, history: History) -> None:
    """Writes the timelines and the expert load. The run is complete without them, so a full disk costs only a note."""
    try:
        bus.folder.timelines(history.timeline, history.costs, history.program, history.plan)
        bus.folder.eval_timeline(history.eval_timeline)
        if bus.expert_load.layers:
            bus.folder.save_expert_load(*bus.expert_load)
    except PentadError as error:
        bus.display.note(f"no timeline: {error}")


class Beginning(NamedTuple):
    """Where a run begins: `step` steps are recorded, and `start` is what it falls back to if all else is lost. `facts`
    are for the journal: the generation, the checkpoint, and the keys that have changed."""

    step: int
    start: Start
    facts: dict[str, Any]


def _resume(config: RunConfig, folder: RunFolder, display: Display, origin: Origin | None) -> Beginning:
    """Begins from the newest checkpoint, whose contents the ranks will read, or as a new run.

    Damaged newer checkpoints are renamed and their steps run again. Raises PentadError if all are damaged or gone,
    unless checkpoint.restart_if_damaged is set, and if one cannot be read.
    """
    restart = config.checkpoint.restart_if_damaged
    found = recover(folder.checkpoints, restart, partial(open_current, folder))
    if found.checkpoint is None and not found.refused and not restart:
        require_listed(folder.checkpoints, folder.journal())
    known = _generations(folder)
    if found.checkpoint:  # the run's folder, with its journal, may be gone
        known.append(found.checkpoint.meta.get("generation", 0))
    for aside, reason in found.refused:
        display.note(f"checkpoint refused and renamed to {aside.name}: {reason}")
    if found.checkpoint:
        start, changes = Start(found.checkpoint.folder, found.checkpoint.step), folder.changes
        display.note(f"resuming from step {start.step}")
        if note := dropped_state(folder.plan, found.checkpoint.tensors):
            display.note(note)
    else:
        origin = origin or origin_of(config)
        first, changes, base, adapter, _ = origin
        if first.folder or found.refused:
            display.note(_starting(first))
        if base is not None:
            display.note(f"the adapters of lora are trained beside the weights of {base.folder}")
        if adapter is not None:
            display.note(f"they continue those in {adapter}")
        start = _start_of(config, origin, folder)
    folder.rewind(start.step)
    checkpoint = str(start.folder) if start.folder else None
    facts = {"generation": 1 + max(known, default=0), "checkpoint": checkpoint, "changes": changes}
    return Beginning(start.step, start, facts)


def _adopt(config: RunConfig, folder: RunFolder, parked: Parked, origin: Origin | None) -> Beginning:
    """Begins with the ranks that a former driver left; reads no checkpoint."""
    group = parked.group
    if group.plan is not folder.plan:
        folder.replan(group.plan)
    rows = read_lines(folder.path / METRICS, METRIC_KEYS)
    step = rows[-1]["step"] + 1 if rows else (origin.start.step if origin else 0)
    folder.rewind(step)
    group.generation = max(group.generation, *_generations(folder))
    start = _start_of(config, origin or origin_of(config), folder) if not has_checkpoint(config) else Start()
    facts = {"generation": group.generation + 1, "checkpoint": None, "changes": folder.changes}
    return Beginning(step, start, facts)


def _start_of(config: RunConfig, origin: Origin, folder: RunFolder) -> Start:
    """What a new run starts from. Copies the origin's files into the run's folder, and imports a LoRA adapter there."""
    origin_folder = origin.start.folder if origin.base is None else location(origin.base.folder)
    if origin_folder is not None:
        folder.keep_files(origin_folder)
    if origin.adapter is not None and folder.plan.lora is not None:
        from pentad.workers.hf.peft import import_adapter

        request = adapter_request(config, folder.path)
        return Start(import_adapter(origin.adapter, folder.checkpoints, request, folder.plan.lora))
    return origin.start


def _generations(folder: RunFolder) -> list[int]:
    """The folder's newest generation and all those in the journal."""
    return [folder.generation, *(row.get("generation", 0) for row in folder.journal())]


@contextmanager
def _failures_recorded(bus: EventBus) -> Iterator[None]:
    """Writes a failure to the journal, and the details of a rank's failure to a file that the error names."""
    try:
        yield
    except WorkerError as error:
        if not _record_failure(bus, f"{error}\n\n{error.detail}\n", rank=error.rank, error=str(error)):
            raise
        named = f"{error} (more in {bus.folder.path / FAILURE})"
        raise WorkerError(named, error.rank, error.detail, fault=error.fault) from None
    except Superseded:
        raise
    except (KeyboardInterrupt, SystemExit):
        _record_failure(bus, error="the run was interrupted, without a checkpoint")
        raise
    except BaseException as error:
        _record_failure(bus, error=str(error) or type(error).__name__)
        raise


def _record_failure(bus: EventBus, details: str = "", **facts: Any) -> bool:
    """Records a failure. False if the disk does not take it: a full disk may be the failure itself."""
    try:
        if details:
            bus.folder.files.replace(bus.folder.path / FAILURE, details.encode())
        bus.record("failure", **facts)
        bus.settle()
    except PentadError:
        return False
    finally:
        bus.set_state("failed")
    return True


def _ranks(group: WorkerGroup) -> list[dict[str, Any]]:
    mesh = group.plan.mesh
    return [
        {"rank": rank, "coordinates": mesh.coordinates(rank)._asdict(), "node": at.ip, "gpu": at.gpu, "pid": at.pid}
        for rank, at in enumerate(group.places)
    ]
