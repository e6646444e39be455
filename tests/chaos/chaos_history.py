"""Plays a scenario of faults on the driver, with a simulated cluster, and checks that the run keeps its promises.

no sample is lost or counted twice     every committed step has the digest of its batch, in a chain that `verify`
                                       accepts, and all ranks have the state of these steps
every evaluation that is due is made   and recorded once, of the weights after these steps
no earlier generation acts             neither commits a step nor a checkpoint, and no number is used twice
committed steps never go back          beyond the newest surviving state: in replicas, copies or checkpoints
the run ends                           within an hour of virtual time, with status 0 if all steps are done and saved,
                                       else with an error that the faults explain, and the same command continues
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from chaos_cluster import Cluster, Process
from chaos_config import configured, planned
from chaos_fabric import INITIAL, Action, Fabric, compiled, digest, next_state
from chaos_faults import Faults, justified
from chaos_install import Silent, texts
from chaos_lease import SimKeeper, SimLease, leave
from chaos_rank import SimRunner
from chaos_scenario import Scenario
from chaos_worker import SimWorker
from chaos_world import DriverEnded, Signal, World

from pentad.orchestrator.cluster import group as groups
from pentad.orchestrator.cluster.copies import newest_copy
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring import event_bus, runfolder
from pentad.orchestrator.records import verify as verification
from pentad.orchestrator.records.hash_chain import AUDIT, read_chain
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.recovery import fence
from pentad.orchestrator.run import driver
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.zero_layout import replica_groups
from pentad.workers.checkpoint.checkpoint import complete_folders, open_checkpoint
from pentad.workers.replication.parts import CopyKey

real_fence, real_rewind = fence.fence, event_bus.EventBus.rewind
MOST_COMMANDS = 8  # in one history


class Broken(AssertionError):
    """A promise was not kept."""


class Simulation:
    """One history. `run` raises Broken, or any error that the driver should not have raised."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario, self.folder = scenario, folder
        self.world = World(scenario.seed)
        self.cluster = Cluster(self.world, scenario.nodes, lambda process: SimWorker(self, process))
        self.cluster.bundles = list(scenario.nodes)
        self.cluster.deaths.append(self._leave_fabrics)
        steps = scenario.steps
        self.config = configured(scenario.schedule, scenario.mesh, scenario.overrides, steps, str(folder))
        self.plan = planned(scenario.schedule, scenario.mesh)[1]
        self.plan = replace(self.plan, name="chaos", replicate_every=self.config.elastic.replicate_every)
        self.checkpoints = folder / "chaos" / "checkpoints"
        self.kinds: set[str] = set()
        self.damaged, self.on_saved = 0, list[Callable[[], None]]()
        self.handed_over = self.refused = 0  # states, to another mesh; checkpoints, after placement
        self.fabrics: dict[int, Fabric] = {}
        self.compiled: dict[tuple[int, int], tuple[Action, ...]] = {}
        self.plans: list[Plan] = []  # kept, so that ids are not reused
        self.generation = self.earlier = 0  # the newest begun; the newest of earlier commands
        self.fenced_before = 0  # generations before this one are over
        self.recovers, self.pauses, self.floor = False, False, (-1, -1, -1)
        self.never = Signal()
        self.keeper: SimKeeper | None = None  # of the ranks that outlive their driver
        self.lease: SimLease | None = None  # of the driver
        self.numbers = count()  # for names of drivers and of sets of ranks
        self.adoptions, self.adopts, self.evictions, self.spares_used = 0, False, 0, 0
        self.bus: Any = None
        self.requests: Any = None
        self.values = [INITIAL]  # of the state after this many steps
        self.total = self._samples(0)
        self.faults = Faults(self)
        self.log: list[str] = []

    # -- what ranks report

    def reached(self, point: str, process: Process, step: int = -1, within: float = 0.0) -> None:
        self.faults.reached(point, process, step, within)

    def on_fault(self, kind: str) -> None:
        self.kinds.add(kind)
        if kind == "late message":  # perhaps the answer of a rank that holds a copy
            self.floor = self.floor[0], -1, self.floor[2]

    def on_start(self, generation: int) -> None:
        if generation <= self.earlier:
            raise Broken(f"generation {generation} begins after one of number {self.earlier} by an earlier command")
        self.generation = max(self.generation, generation)

    def transfer(self, arrive: Callable[[], None], process: Process, step: int) -> None:
        self.faults.transfer(arrive)

    def on_damage(self) -> None:
        """A checkpoint is damaged: recoveries may have to do without it."""
        self.damaged += 1
        self.floor = *self.floor[:2], min(self.floor[2], self._newest_intact())

    def may_write(self, process: Process) -> None:
        try:
            self.faults.check_save()
        except OSError as error:
            raise PentadError(f"folder cannot be written ({error.strerror})") from error

    def saved(self) -> None:
        waiting, self.on_saved = self.on_saved, []
        for each in waiting:
            each()

    def check_acts(self, generation: int, process: Process, what: str) -> None:
        newest = max(self.generation, self.fenced_before)
        if generation < newest and not process.node.cut_off:
            raise Broken(f"rank {process.rank} {what} in generation {generation}, after {newest} has begun")

    def check_copy(self, key: CopyKey) -> None:
        """A copy counts only once every part is in two processes."""
        if key.generation < max(self.generation, self.fenced_before):
            return  # a late report
        held = [process.worker.copies for process in self.cluster.processes]
        for owner in range(key.parts):
            if sum(each.find(key, owner) is not None for each in held) < 2:
                raise Broken(f"the copy of {key.step} steps counts without the part of rank {owner} in its holder")

    def check_state(self, runner: SimRunner) -> None:
        """A rank's state reflects exactly its steps."""
        while len(self.values) <= runner.version:
            step = len(self.values) - 1
            self.values.append(next_state(self.values[-1], step, self._samples(step)))
        expected = (runner.version, self.values[runner.version])
        if any(tuple(state) != expected for state in runner.state.values()):
            raise Broken(f"rank {runner.rank} has a state that is not that of {runner.version} steps")

    def _samples(self, step: int) -> int:
        batch = self.plan.batch
        return sum(digest(step, microbatch) for microbatch in range(batch.replicas * batch.microbatches)) % 2**40

    def fabric(self, generation: int, rank: int, process: Process) -> Fabric:
        found = self.fabrics.setdefault(generation, Fabric(self, {}))
        found.processes[rank] = process
        return found

    def _leave_fabrics(self, process: Process) -> None:
        for fabric in self.fabrics.values():
            if fabric.processes.get(process.rank) is process:
                fabric.lose(process.rank)
        if process.worker.runner is not None:  # it may have died before it connected
            generation = process.worker.runner.generation
            fabric = self.fabrics.setdefault(generation, Fabric(self, {}))
            if process.rank not in fabric.processes:
                fabric.lose(process.rank)

    def actions(self, plan: Plan, pp: int) -> tuple[Action, ...]:
        key = (id(plan.program), pp)
        if key not in self.compiled:
            self.plans.append(plan)
            self.compiled[key] = compiled(plan, pp)
        return self.compiled[key]

    def read_status(self, progress_file: str) -> Any:
        pid = int(Path(progress_file).name)
        process = next(p for p in self.cluster.processes if p.pid == pid)
        if process.worker.runner is None:
            raise FileNotFoundError(progress_file)
        return process.worker.read_status()

    # -- what the driver does

    def fenced(self, group: groups.WorkerGroup, state: fence.RecoveryState, record: Any) -> None:
        """Runs the driver's `fence`, and records what must survive it."""
        self.recovers = True
        healthy = [a.process for r, a in enumerate(group.actors) if r not in state.lost and a.process.is_healthy]
        real_fence(group, state, record)
        is_empty = len(state.lost) == len(group.actors) and "late message" not in self.kinds
        if is_empty and any(each.killed_by_driver and each.is_well for each in healthy):
            raise Broken(f"all ranks are given up though some were left: {state.lost}")
        self.fenced_before = group.generation
        self.floor = *self._surviving(group, state), self._newest_intact()

    def _surviving(self, group: groups.WorkerGroup, state: fence.RecoveryState) -> tuple[int, int]:
        """Steps in the newest state that is complete in memory, in replicas and in copies."""
        living = {r: a.process for r, a in enumerate(group.actors) if r not in state.lost and a.process.is_alive}
        runners = {r: p.worker.runner for r, p in living.items() if p.worker.runner is not None}
        newest, copied, plan = -1, -1, group.plan
        versions = {runner.version for runner in runners.values()}
        if self.adopts and not fence.is_recordable(state, self.bus.view.step):
            versions.clear()  # nobody has the results of the steps that the former driver has not recorded
        for version in versions:
            current = {rank for rank, runner in runners.items() if runner.version == version}
            if all(current.intersection(each) for s in plan.param_shards for each in replica_groups(plan, s)):
                newest = max(newest, version)
        if "late message" not in self.kinds:  # its answer may be too late
            held = {str(p.pid): p.worker.copies.held() for p in living.values()}
            found = newest_copy(held, b"")
            copied = found.key.step if found else -1
        return newest, copied

    def _newest_intact(self) -> int:
        """Steps in the newest checkpoint that is intact; -1 if there is none, or the storage does not answer."""
        if self.world.now < self.faults.away_until:
            return -1
        for step, folder in reversed(complete_folders(self.checkpoints).items()):
            with suppress(PentadError):
                open_checkpoint(folder)
                return step
        return -1

    def rewound(self, bus: Any, step: int) -> None:
        if step < max(self.floor):
            raise Broken(f"the run goes back to step {step}, though the state of {max(self.floor)} steps has survived")
        real_rewind(bus, step)

    def on_head_gone(self) -> None:
        self.world.driver_ends = "the head is gone" if self.cluster.head_gone else self.world.driver_ends

    @contextmanager
    def monitored(self, config: RunConfig, bus: Any, requests: Any) -> Iterator[None]:
        self.bus, self.requests, self.recovers, self.pauses = bus, requests, False, False
        if bus.view.step < (newest := self._newest_intact()):
            raise Broken(f"the command starts at step {bus.view.step}, before the newest intact checkpoint")
        self.floor = -1, -1, newest
        bus.watchers.append(self)
        yield

    def on_event(self, entry: dict[str, Any]) -> None:
        self.refused += entry["event"] == "checkpoint refused"
        if entry["event"] in ("start", "recovered"):
            self.adopts = bool(entry.get("adopts"))
            self.adoptions += self.adopts
            self.spares_used += len(entry.get("spares", ()))

    def on_ranks_placed(self, view: Any) -> None:
        """Does what the watch for slow ranks does."""
        self.bus.lasting_slow_ranks = ()

    def on_steps(self, rows: Any, spans: Any) -> None:
        """Pauses the run if the next fault is for a paused run and its step has been recorded."""
        fault = self.faults.next
        if self.faults.idle() and fault is not None and rows[-1]["step"] >= fault.step:
            self.requests.pause()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_") or name == "close":  # so that this is a Watcher
            return lambda *_: None
        raise AttributeError(name)

    def pause(self, seconds: float) -> None:
        """Called while the driver waits for a request."""
        if self.faults.idle() and not self.pauses:
            self.pauses = True
            self.world.at(0.2, self.faults.happen_idle)
            self.world.at(self.world.random.choice((0.5, 6.0, 40.0)), partial(self._resume, self.requests))
        self.world.wait(seconds, lambda: not self.requests.paused)

    def _resume(self, requests: Any) -> None:
        requests.resume()
        self.pauses = self.pauses and requests is not self.requests

    # -- the history

    def run(self) -> None:
        for _ in range(MOST_COMMANDS):
            self.earlier = self.generation
            status, message = self._command()
            self.log.append(f"{self.world.now:.2f}: status {status} {message}")
            if self.cluster.head_gone or self.world.driver_ends:
                leave(self)
            else:
                self._check_nothing_is_left()
                self.cluster.end_job()
            self.recovers = False
            self._rejoin()
            self.world.wait(max(0.0, self.faults.away_until - self.world.now))
            self.check_files(may_be_torn=status != 0)
            if status == 0:
                break
            if "checkpoint.restart_if_damaged" in message:  # as the error advises
                section = self.config.checkpoint.model_copy(update={"restart_if_damaged": True})
                self.config = self.config.model_copy(update={"checkpoint": section})
            if status == 1 and not justified(self, message):
                raise Broken(f"the run ended with an error that no fault explains: {message}")
        else:
            raise Broken(f"the run has not ended after {MOST_COMMANDS} commands")
        steps, due = self.scenario.steps, self.config.eval.next_due
        if self._evaluated() != [step for step in range(steps + 1) if due(step, steps) == step]:
            raise Broken(f"evaluations are recorded after these steps: {self._evaluated()}")
        if self._newest_intact() < self.scenario.steps and not self.damaged:
            raise Broken("the run ended with status 0, without an intact checkpoint of its last step")

    def _command(self) -> tuple[int, str]:
        """Runs one command; returns its exit status and error."""
        display: Any = Silent()
        try:
            interrupts: Any = SimpleNamespace(stop=None)
            done = driver.drive(self.config, self.plan, None, "chaos_rank:SimRunner", display, interrupts, None)
        except DriverEnded as end:
            return (-9 if str(end) == "killed" else 2), str(end)
        except PentadError as error:
            return 1, str(error)
        return (0, "") if done == self.scenario.steps else (1, f"the run stopped after {done} steps")

    def _check_nothing_is_left(self) -> None:
        self.world.wait(2.0)
        for process in self.cluster.processes:
            if process.is_alive and process.node.is_alive and not process.node.cut_off:
                raise Broken(f"process {process.pid} of rank {process.rank} is left after the run")

    def _rejoin(self) -> None:
        """Brings lost nodes back: whoever starts the run again has enough of them."""
        self.cluster.draining.clear()
        for bundle, name in enumerate(self.cluster.bundles):
            node = self.cluster.nodes[name]
            if not node.is_alive:
                node.is_alive = True
            assert not node.cut_off, bundle

    def check_files(self, *, may_be_torn: bool) -> None:
        """Checks what `pentad verify` checks, but with the samples of this simulation."""
        run = self.folder / "chaos"
        path = run / AUDIT
        if not path.exists():
            return
        metrics = read_lines(run / runfolder.METRICS)
        lines = path.read_bytes().split(b"\n")[:-1]
        history = verification.replay(read_chain(lines, str(path)), str(path))
        if may_be_torn:
            _cut_torn_end(history, metrics)
        verification._compare_metrics(history, metrics, run)
        if not self.damaged:
            verification._compare_checkpoints(history, self.checkpoints)
        for number, step in history.steps.items():
            if (step.batch, step.samples) != (number, self._samples(number)):
                raise Broken(f"step {number} has batch {step.batch}, and not each of its samples once")

    def _evaluated(self) -> list[int]:
        """The step counts after which the run has evaluated its weights."""
        rows = read_lines(self.folder / "chaos" / runfolder.EVALUATIONS)
        for row in rows:
            if row["loss"] != float(self.values[row["step"]]):
                raise Broken(f"the evaluation after {row['step']} steps is of other weights")
        return [row["step"] for row in rows]


def _cut_torn_end(history: Any, metrics: Any) -> None:
    """Drops steps that metrics.jsonl lacks, from a driver that died after writing audit.jsonl: the next command rewinds
    them."""
    last = max((row["step"] for row in metrics), default=-1)
    history.steps = {number: step for number, step in history.steps.items() if number <= last}


def play(scenario: Scenario, folder: Path, current: list[Simulation]) -> Simulation:
    """Runs one history in a folder of its own, which is removed."""
    place = folder / "runs"
    shutil.rmtree(place, ignore_errors=True)
    texts.configs.clear()
    simulation = Simulation(scenario, place)
    current[:] = [simulation]
    try:
        simulation.run()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return simulation
