"""What a driver does about a fault: the run goes on from the newest state that is left, or ends and says why."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.cluster.group import Tick, WorkerGroup
from pentad.orchestrator.cluster.placement import Place, draining, living_bundles, order_places
from pentad.orchestrator.cluster.worker import Status
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.planning.planning import make_plan, smaller
from pentad.orchestrator.run import regroup
from pentad.orchestrator.run.regroup import RecoveryState
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan


class Hopeless(WorkerError):
    """There is no way on."""


ATTEMPTS = 5  # faults during one recovery
STANDSTILL = 3  # faults in a row without a step further: it will not get better
LOOK_SECONDS = 2.0  # between two looks at what the cluster offers
NOTICE_SECONDS = 15.0  # before its end a node that drains is left; until then its ranks go on


class Recovery:
    """Of one run: `fault` and `change` put the ranks of `group` together anew and say what is left: the run
    goes on from step `version`."""

    def __init__(self, config: RunConfig, group: WorkerGroup, news: EventBus, restless: Callable[[], bool]) -> None:
        self.config, self.group, self.news, self.restless = config, group, news, restless
        self.full = group.plan
        self.faults = self.standing = 0
        self.furthest, self.looked = -1, time.monotonic()
        self.leaving: tuple[int, ...] = ()
        self.notice = 0.0  # seconds until the node being left is gone: no earlier does Ray move its places

    def fault(self, fault: WorkerError, done: int) -> RecoveryState:
        """After a fault with `done` steps accounted for. Raises the fault when the run cannot or should not go on."""
        self.faults += 1
        self.standing = self.standing + 1 if done <= self.furthest else 1  # accounts come with the call behind
        self.furthest = max(self.furthest, done)
        spent = self.faults > self.config.elastic.max_failures or self.standing > STANDSTILL
        if spent or isinstance(fault, Hopeless):
            raise fault
        self.news.display.note(f"{fault}; recovering")
        lost = dict.fromkeys(fault.lost, str(fault))
        for rank in lost:
            self._tell_lost(rank, fault)
        return self._again(lost, fault, done)

    def change(self, done: int) -> RecoveryState:
        """At a step boundary whose checkpoint is committed: leaves nodes that drain, or grows back."""
        if self.leaving:
            names = ", ".join(map(self.group.label, self.leaving))
            fault = WorkerError(
                f"the node of {names} is draining", self.leaving[0], "", self.leaving, "drain", "notice"
            )
            self.leaving = ()
            self.faults -= 1  # an announced end is no failure
            return self.fault(fault, done)
        return self._again({}, None, done)

    def expected(self) -> bool:
        """Whether the ranks should be placed anew: a node drains, or a smaller mesh could be whole again."""
        now = time.monotonic()
        if now < self.looked + LOOK_SECONDS:
            return False
        self.looked = now
        left = {node: deadline / 1000 - time.time() for node, deadline in draining().items() if deadline}
        going = {node: seconds for node, seconds in left.items() if seconds < NOTICE_SECONDS}
        self.leaving = tuple(rank for rank, at in enumerate(self.group.places) if at.node in going)
        self.notice = max(0.0, *(going[self.group.places[rank].node] for rank in self.leaving), 0.0)
        short = self.group.plan.mesh.size < self.full.mesh.size
        return bool(self.leaving) or (short and len(living_bundles(self.group.placement)) >= self.full.mesh.size)

    def _again(self, lost: dict[int, str], fault: WorkerError | None, done: int) -> RecoveryState:
        began, stock = time.monotonic(), RecoveryState(seconds={"detect": fault.after if fault else 0.0})
        self.news.state("recovering")
        for _ in range(ATTEMPTS):
            try:
                regroup.fence(self.group, lost, stock, self.news.event)
                how = self._grow(stock) if fault is None and not lost else self._refit(lost, stock)
                break
            except Hopeless:
                raise
            except PentadError as error:
                fault = regroup.as_fault(self.group, error)
                for rank in fault.lost:
                    lost.setdefault(rank, str(fault))
                    self._tell_lost(rank, fault)
        else:
            assert fault is not None
            raise fault
        step = stock.version
        seconds = {phase: round(took, 3) for phase, took in stock.seconds.items()}
        self.news.event(
            "recovered",
            generation=self.group.generation,
            step=step,
            how=how,
            mesh=str(self.group.plan.mesh),
            seconds=seconds,
            steps_replayed=max(0, done - step),
        )
        took = time.monotonic() - began
        self.news.display.note(f"{_WORDS[how]} after {took:.1f} s on {self.group.plan.mesh}: going on from step {step}")
        return stock

    def _tell_lost(self, rank: int, fault: WorkerError) -> None:
        facts = {"fault": fault.fault, "detector": fault.detector, "cause": str(fault)}
        self.news.event("lost", generation=self.group.generation, rank=rank, **facts)
        self.news.lost(rank)

    def _refit(self, lost: dict[int, str], stock: RecoveryState) -> str:
        """Repairs the mesh, or makes do with a smaller one; says how."""
        group, whole = self.group, regroup.complete(self.group.plan, stock)
        began = time.monotonic()
        wait, self.notice = self.config.elastic.wait_seconds + self.notice, 0.0
        seated = not lost or regroup.refill(group, lost, wait, self._pass)
        stock.took("place", began)
        if not seated:
            return self._shrink(lost, stock, whole)
        lost.clear()
        self._begin(stock, keep=whole)
        began = time.monotonic()
        if whole:
            group.receive(regroup.sources(group.plan, stock.current), stock.version, tick=self._alive())
        else:
            self._restore(stock)
        stock.took("state", began)
        return "repair" if whole else "checkpoint"

    def _shrink(self, lost: dict[int, str], stock: RecoveryState, whole: bool) -> str:
        """The living ranks take a smaller mesh, from a checkpoint made for them of what they hold."""
        group = self.group
        living = [rank for rank in range(len(group.actors)) if rank not in lost]
        config = smaller(self.config, len(living))
        if config is None:
            least = self.config.elastic.min_ranks or self.full.mesh.size
            raise Hopeless(
                f"{next(iter(lost.values()))}; no place came free within elastic.wait_seconds = "
                f"{self.config.elastic.wait_seconds:g}, and {len(living)} ranks make no mesh of elastic.min_ranks = "
                f"{least} or more",
                min(lost),
                "",
            )
        began = time.monotonic()
        if whole:
            self._save(stock)
        plan = self._plan(config)
        regroup.kill(group, living[plan.mesh.size :])
        self._take(plan, living[: plan.mesh.size])
        stock.took("state", began)
        lost.clear()
        self._begin(stock, keep=False)
        began = time.monotonic()
        self._restore(stock)
        stock.took("state", began)
        return "shrink"

    def _grow(self, stock: RecoveryState) -> str:
        """All of the mesh again, from the checkpoint of this step boundary."""
        group, plan = self.group, self.full
        before = group.plan, group.bundles, group.actors, group.places
        here = dict(zip(group.bundles, zip(group.actors, group.places, strict=True), strict=True))
        nodes = living_bundles(group.placement)
        if len(nodes) < plan.mesh.size:  # gone again
            return self._refit({}, stock)
        places = [
            Place(bundle, node, here[bundle][1].gpu if bundle in here else -1) for bundle, node in sorted(nodes.items())
        ]
        order = order_places(places, plan.mesh, tensor_across_nodes=plan.tp_across_nodes)
        group.plan, group.bundles = plan, list(order)
        blank = next(iter(here.values()))
        group.actors = [here.get(bundle, blank)[0] for bundle in order]
        group.places = tuple(here.get(bundle, blank)[1] for bundle in order)
        missing = {rank: "" for rank, bundle in enumerate(order) if bundle not in here}
        if not regroup.refill(group, missing, self.config.elastic.wait_seconds, self._pass):
            group.plan, group.bundles, group.actors, group.places = before
            return self._refit({}, stock)
        self.news.folder.replan(group.plan)
        self._begin(stock, keep=False)
        self._restore(stock)
        return "grow"

    def _plan(self, config: RunConfig) -> Plan:
        full = self.full
        hosts = 1 if full.transport == "peer" else 2
        return make_plan(config, full.device, hosts=hosts, fingerprint=full.fingerprint, model=full.model)

    def _take(self, plan: Plan, ranks: list[int]) -> None:
        """The group is these of its ranks, in this order, under another plan."""
        group = self.group
        group.actors = [group.actors[rank] for rank in ranks]
        group.bundles = [group.bundles[rank] for rank in ranks]
        group.places = tuple(group.places[rank] for rank in ranks)
        group.plan = plan
        self.news.folder.replan(plan)

    def _begin(self, stock: RecoveryState, *, keep: bool) -> None:
        began = time.monotonic()
        self.group.begin(began + self.config.cluster.start_timeout_seconds, keep=keep)
        stock.took("connect", began)

    def _save(self, stock: RecoveryState) -> None:
        """A checkpoint of the newest steps, every stage written by a rank that has it."""
        began, group, path = time.monotonic(), self.group, self.news.folder.checkpoint(stock.version)
        if self._newest() == stock.version:
            return
        plan, current = group.plan, set(stock.current)
        owners = {share: min(current.intersection(plan.holders(share))) for share in plan.shares}
        shares = {rank: tuple(s for s, owner in owners.items() if owner == rank) for rank in set(owners.values())}
        shards = group.save_shares(path, stock.version, shares)
        refs = group.submit_commit(path, stock.version, shards, self.config.checkpoint.keep, min(shares))
        group.answer(min(shares), refs[0])
        seconds, size = round(time.monotonic() - began, 3), sum(shard["bytes"] for shard in shards)
        self.news.event("checkpoint", generation=group.generation, step=stock.version, seconds=seconds, bytes=size)

    def _restore(self, stock: RecoveryState) -> None:
        from pentad.workers.checkpoint.checkpoint import (
            newest,  # imports torch, which a run without faults does not need here
        )

        found = newest(self.news.folder.checkpoints).checkpoint
        folder: Path | None = found.folder if found else None
        stock.version = found.step if found else 0
        self.group.restore(folder, stock.version, tick=self._alive())

    def _alive(self) -> Tick:
        """Gives ranks up that fall silent while the state is handed on: nothing else ends a wait for them."""
        began = time.monotonic()

        def look(statuses: dict[int, Status]) -> None:
            long_ago = time.monotonic() - self.config.elastic.hang_seconds
            heard = self.group.heard
            silent = tuple(r for r in range(len(self.group.actors)) if max(began, heard.get(r, began)) < long_ago)
            if silent:
                text = f"{', '.join(map(self.group.label, silent))} fell silent during a recovery"
                raise WorkerError(text, silent[0], text, silent, "hang", "heartbeat")

        return look

    def _newest(self) -> int:
        """Steps of the newest checkpoint, 0 without one."""
        return max((step for step in self.news.folder.saved()), default=0)

    def _pass(self, seconds: float) -> None:
        """Lets time pass while a place is awaited; somebody who asks to stop need not wait for it."""
        if self.restless():
            raise Hopeless("the run was asked to stop while a rank's place was awaited", 0, "")
        time.sleep(seconds)


_WORDS = {
    "repair": "repaired",
    "checkpoint": "repaired from a checkpoint",
    "shrink": "made smaller",
    "grow": "grown back",
}
