"""Receives the events of a run: updates the view, writes the journal, and notifies the watchers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.cluster.rank_status import Status
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.monitoring.evaluations import evaluation_state
from pentad.orchestrator.monitoring.run_state import RankView, RunView, Watcher
from pentad.orchestrator.monitoring.runfolder import RunFolder
from pentad.orchestrator.records.fp8_health import Fp8Health
from pentad.orchestrator.records.gpu_clocks import row_of
from pentad.orchestrator.records.profiles import StepProfile, save_profile
from pentad.orchestrator.records.run_files import SETTLE_SECONDS, WAIT_SECONDS
from pentad.schedules.diagnosis.slow_ranks import SlowRank
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.timeline import Span
from pentad.workers.background import in_daemon, within
from pentad.workers.runtime.telemetry import XIDS, GpuState


class ExpertLoads(NamedTuple):
    """The tokens that each expert got, by layer, in the newest `step` whose load the ranks reported."""

    step: int = -1
    layers: Mapping[int, tuple[int, ...]] = MappingProxyType({})


class EventBus:
    """The events of one run, across all its generations. `view` is the run's present state."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, display: Display, first: int, dashboard: str | None
    ) -> None:
        self.config, self.folder, self.display = config, folder, display
        self.watchers: list[Watcher] = []
        self.fp8_health = Fp8Health()
        self.profiles = deque[tuple[int, StepProfile, Future[None]]]()  # being written, with their generations
        self.disk_problem, self.most_waiting = "", 0  # why records wait in memory, and the most that have
        self.slow_ranks = ""  # which ranks are slow, in words
        self.lasting_slow_ranks: tuple[SlowRank, ...] = ()  # the slow ranks that elastic.slow_rank acts upon
        self.flipped_bits = ""  # the verdict of the last check that found flipped bits
        self.gpus = dict[int, GpuState]()  # the ranks' GPUs, as last read
        self.expert_load, self.expert_slots = ExpertLoads(), 0
        self.statuses = dict[int, Status]()  # last known statuses of this generation's ranks
        self.paces = deque[float](maxlen=8)  # durations of the last steps, in seconds
        self.on_first_step: Callable[[], None] = lambda: None
        plan = folder.plan
        self.view = RunView(
            run=config.run.name,
            folder=str(folder.path.absolute()),
            state="starting",
            step=first,
            steps=config.run.steps,
            generation=0,
            mesh=str(plan.mesh),
            schedule=plan.program.name,
            program=plan.program.hash,
            endpoints={"dashboard": dashboard} if dashboard else {},
            **evaluation_state(config, folder.evaluations(), first),
        )

    def ranks_placed(self, group: WorkerGroup) -> None:
        """Shows a new generation of ranks, at the start and after every recovery."""
        now, plan, self.statuses = time.monotonic(), group.plan, {}
        ranks = tuple(
            RankView(rank, plan.mesh.coordinates(rank), at.ip, at.pid, at.gpu, "starting", self.view.step, "", now)
            for rank, at in enumerate(group.places)
        )
        mesh, program = str(plan.mesh), plan.program
        self.view = self.view._replace(
            ranks=ranks, generation=group.generation, mesh=mesh, schedule=program.name, program=program.hash
        )
        for watcher in self.watchers:
            watcher.on_ranks_placed(self.view)
        self.update()

    def update(self, **changes: Any) -> None:
        """Changes fields of the view and notifies the watchers."""
        self.view = self.view._replace(**changes)
        for watcher in self.watchers:
            watcher.on_view(self.view)

    def set_state(self, state: str) -> None:
        if state != self.view.state:
            self.display.set_state(state)
            self.update(state=state)

    def update_ranks(self, statuses: dict[int, Status], last_heard: dict[int, float], hung: Sequence[int] = ()) -> None:
        """Shows what the ranks are doing, in the view and on the terminal."""
        views, self.statuses = [], statuses
        for view in self.view.ranks:
            status = statuses.get(view.rank)
            if status is not None:
                state = "hung" if view.rank in hung else _state(status)
                view = view._replace(state=state, step=status.step, instruction=status.instruction)
            views.append(view._replace(heartbeat=last_heard.get(view.rank, view.heartbeat)))
        self._set_ranks(tuple(views))
        self.watch_disk()
        before, self.gpus = self.gpus, {rank: each.gpu for rank, each in statuses.items() if each.gpu is not None}
        for view in views:
            known, found = (states.get(view.rank, GpuState()).xids or () for states in (before, self.gpus))
            self._xids(view, found[len(known) :] if found[: len(known)] == known else found)
        for watcher in self.watchers:
            watcher.on_gpu_states(self.gpus)

    def _xids(self, view: RankView, xids: Sequence[int]) -> None:
        """Records the XIDs that the driver of a rank's GPU has newly reported."""
        for xid in xids:
            facts = {"rank": view.rank, "node": view.node, "gpu": view.gpu, "xid": xid}
            self.record("xid", generation=self.view.generation, **facts)
            what = f"reported XID {xid}: {XIDS.get(xid, 'see dmesg there')}"
            self.display.note(f"GPU {view.gpu} of {view.node}, rank {view.rank}, {what}")

    def rank_lost(self, rank: int) -> None:
        self._set_ranks(tuple(v._replace(state="lost") if v.rank == rank else v for v in self.view.ranks))

    def steps_done(self, rows: Sequence[dict[str, Any]], spans: Sequence[tuple[Span, ...]]) -> None:
        """Records completed steps: their rows of metrics.jsonl, and the spans of each."""
        times = [row.pop("rank_times", ()) for row in rows]
        loads = [ExpertLoads(row["step"], row.pop("expert_load", {})) for row in rows]
        self.expert_load = next((each for each in reversed(loads) if each.layers), self.expert_load)
        self._slots_grown([(row["step"], row.pop("expert_slots", 0)) for row in rows])
        profiles = [row.pop("profile", None) for row in rows]
        self.folder.rank_times.extend(times)
        clocks = row_of(self.gpus.values())
        rows = self.folder.metrics(*(row | clocks for row in rows))
        self._await_disk()
        for row in rows:
            self.display.step(row)
            if row["skipped"]:
                self.display.note(f"step {row['step']} {_skip_reason(row)}: its update was skipped")
                self.record("skip", **{key: row[key] for key in ("generation", "step", "loss", "grad_norm")})
            for warning in self.fp8_health.warnings(row):
                self.display.note(f"step {row['step']}: {warning}")
                self.record("fp8 warning", step=row["step"], warning=warning)
        for profile in filter(None, profiles):
            self._profiled(profile)
        self._record_profiles()
        self.on_first_step()
        self.on_first_step = lambda: None
        for watcher in self.watchers:
            watcher.on_steps(rows, spans)
            for each in filter(None, times):
                watcher.on_rank_times(each)
        last, pace = rows[-1], rows[-1]["tokens_per_second"]
        verdict = "; ".join(filter(None, (self.flipped_bits, self.slow_ranks)))
        self.paces.extend(row["step_seconds"] for row in rows)
        done = last["step"] + 1
        left = (self.view.steps - done) * sum(self.paces) / len(self.paces)
        self.update(step=done, loss=last["loss"], tokens_per_second=pace, verdict=verdict, seconds_left=left)

    def _slots_grown(self, steps: Sequence[tuple[int, int]]) -> None:
        """Records every increase in `steps`, pairs of (step, slots for tokens to another expert rank)."""
        for step, slots in steps:
            before = self.expert_slots or self.folder.plan.expert_slots
            if slots > before:
                self.record("expert slots", step=step, before=before, slots=slots)
                self.display.note(
                    f"{before} slots for tokens to another rank's experts were too few: {slots} at step {step}"
                )
            self.expert_slots = slots

    def _profiled(self, profile: StepProfile) -> None:
        """Writes the ranks' profiles of a step, in the background if the disk is slow."""
        saved = in_daemon(partial(save_profile, self.folder.path, profile))
        self.profiles.append((self.view.generation, profile, saved))
        wait([saved], WAIT_SECONDS)

    def _record_profiles(self) -> None:
        """Records in the journal the outcome of the profiles that have been written."""
        while self.profiles and self.profiles[0][-1].done():
            self._record_profile(*self.profiles.popleft())

    def _record_profile(self, generation: int, profile: StepProfile, saved: Future[None]) -> None:
        facts, problems = {"generation": generation, "step": profile.step}, profile.problems
        try:
            saved.result(0.0)
            if profile.bytes:
                self.record("profile", **facts, ranks=len(profile.ranks), bytes=profile.bytes)
        except (PentadError, TimeoutError) as error:
            problem = str(error) or f"{self.folder.path} has not taken it"
            problems = {problem: list(profile.ranks)}
        for problem, ranks in problems.items():
            self.record("profile failed", **facts, ranks=ranks, error=problem)
            self.display.note(f"the profile of step {profile.step} failed, training continues: {problem}")

    def evaluated(self, rows: Sequence[dict[str, Any]], spans: tuple[Span, ...]) -> None:
        """Records a completed evaluation: its rows of eval.jsonl, and the spans of its last round."""
        self.folder.evaluated(rows)
        self._await_disk()
        self.display.evaluation(rows)
        for watcher in self.watchers:
            watcher.on_evaluation(rows, spans)
        losses = {row["data"]: row["loss"] for row in rows}
        facts = {"generation": rows[0]["generation"], "step": rows[0]["step"], "seconds": rows[0]["seconds"]}
        self.record("evaluation", **facts, losses=losses)
        self.update(**evaluation_state(self.config, rows, rows[0]["step"]))

    def rewind(self, step: int) -> None:
        """Drops the records of step `step` and later ones, which will run again."""
        self.folder.rewind(step)
        self._await_disk()
        self.update(**evaluation_state(self.config, self.folder.evaluations(), step))
        for watcher in self.watchers:
            watcher.on_rewind(step)

    def record(self, event: str, **facts: Any) -> None:
        """Writes a line to the journal. It is in the file when this returns, unless the disk is slow."""
        entry = self.folder.event(event, **facts)
        for watcher in self.watchers:
            watcher.on_event(entry)
        self._await_disk()

    def _await_disk(self) -> None:
        """Waits, but not for long, until the disk has what was recorded, before the run acts upon it."""
        self.folder.files.wait()
        self.watch_disk()

    def watch_disk(self) -> None:
        """Reports when the disk stops accepting records, and when it has caught up again."""
        files, before = self.folder.files, self.disk_problem
        if files.is_given_up and not before:  # an error has reported it
            return
        self.disk_problem = files.problem() or (before if files.waiting else "")
        waited = self.most_waiting
        self.most_waiting = max(waited, len(files.waiting)) if self.disk_problem else 0
        if self.disk_problem and not before:
            text = "what is recorded is in memory meanwhile, and no checkpoint is committed"
            self.display.note(f"{self.disk_problem}; {text}")
            self.record("records wait", cause=self.disk_problem)
        elif before and not self.disk_problem:
            self.display.note(f"the run's files are complete again: {waited} changes have waited in memory")
            self.record("records written", cause=before)

    def settle(self) -> None:
        """Waits a while for the disk, at the end of a run. Raises PentadError, naming what is lost, if the disk does
        not recover."""
        self.folder.files.settle()
        self.watch_disk()
        while self.profiles:
            self._record_profile(*self.profiles.popleft())
        self.folder.files.settle()

    def keep_records(self) -> None:
        """As `settle`, and syncs the files, so that they survive a crash of this host."""
        self.settle()
        try:
            within(SETTLE_SECONDS, self.folder.files.sync)
        except TimeoutError:
            raise PentadError(f"{self.folder.path} has synced nothing for {SETTLE_SECONDS:g} s") from None

    def _set_ranks(self, views: tuple[RankView, ...]) -> None:
        self.update(ranks=views)
        self.display.set_ranks(views)


def _skip_reason(row: dict[str, Any]) -> str:
    if row["grad_norm"] is None:
        return "had a non-finite gradient norm"
    if row["loss"] is None:
        return "had a non-finite loss"
    return f"was a spike (loss {row['loss']:.4g}, gradient norm {row['grad_norm']:.4g})"


def _state(status: Status) -> str:
    if not status.instruction:
        return "idle"
    is_communication = "RECV" in status.instruction or "#" in status.instruction  # a receive or a collective
    return "waiting" if is_communication else "running"
