"""Ray without Ray: ranks in this process, nodes that come and go, and a clock that only waiting advances."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fake_rank import STEP_SECONDS, Actor, Blocked, Rank, Ref
from rich.console import Console
from small_checkpoint import save_small

from pentad.orchestrator.cluster import copies, faults
from pentad.orchestrator.cluster import group as groups
from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.cluster.placement import Place, Placement
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.run_state import ControlRequests
from pentad.orchestrator.monitoring.runfolder import RunFolder
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.recovery import (
    evictions,
    fence,
    hang_detection,
    newest_checkpoint,
    recovery,
    regroup,
    spares,
)
from pentad.orchestrator.run import saving, step_loop
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import Start

DRIVER_NODE = "node0"


class FakePlacement(Placement):
    """Bundles that move to a spare node: `fake.nodes` says where they are."""

    def __init__(self, fake: FakeRay) -> None:
        super().__init__(None)
        self.fake = fake

    def reserve_elsewhere(self, bundles: Sequence[int], device: str, nodes: str) -> Any:
        selects = lambda node: (node in nodes) is not nodes.startswith("!")  # noqa: E731
        found = [node for node in self.fake.spare if selects(node)]
        self.others.append(SimpleNamespace(node=found[0] if found else "", asked=tuple(bundles), nodes=nodes))
        return self.others[-1]

    def move(self, bundles: Sequence[int], group: Any) -> None:
        super().move(bundles, group)
        self.fake.nodes = tuple(group.node if b in bundles else node for b, node in enumerate(self.fake.nodes))

    def move_back(self, bundles: Iterable[int]) -> bool:
        back = [bundle for bundle in bundles if bundle in self.moved]
        self.fake.nodes = tuple(self.fake.first[b] if b in back else node for b, node in enumerate(self.fake.nodes))
        return super().move_back(back)

    def give_up(self, group: Any) -> None:
        self.others.remove(group)


class FakeRay:
    """A cluster of `nodes[bundle]`. Its `patch` replaces everything of Ray that a WorkerGroup and a recovery use.

    `faults[step]` are the ranks that die in a step, or the node that is lost with its ranks; lost nodes return in the
    steps `returns`. `eval_faults[step]` are the ranks that die in the evaluation after this many steps. In the steps
    `commits`, one survivor has taken the step by then, and the others lack only the norm. In the steps `unreadable`,
    the first rank to get there cannot read its data. A step on a batch in `spikes` is skipped; `trained[step]` is the
    batch that a step trained on last.

    Checkpoints, by number of steps: while `writing` is (steps, rank), that rank does not finish its part. Those in
    `committing` are committed, but the call does not return. Ranks no longer wait for those in `given_up`. Those in
    `overwritten` use memory that a hanging write may still read, and those in `full` find the disk full.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *nodes: str) -> None:
        self.now, self.nodes, self.first = 100.0, nodes, nodes
        self.spare: list[str] = []  # nodes with room for ranks that move
        self.rooms: dict[str, int] | None = {}  # of nodes, for ranks; None: the cluster's head is away
        self.ranks: list[Rank] = []
        self.lost_nodes: set[str] = set()
        self.draining: dict[str, int] = {}
        self.faults: dict[int, tuple[int, ...] | str] = {}
        self.returns: set[int] = set()
        self.eval_faults: dict[int, tuple[int, ...]] = {}
        self.commits: set[int] = set()
        self.unreadable: set[int] = set()
        self.spikes: set[int] = set()
        self.trained: dict[int, int] = {}
        self.written: dict[int, list[Any]] = {}  # shards by number of steps of their checkpoint
        self.writing = (-1, -1)
        self.committing, self.given_up, self.overwritten = set[int](), set[int](), set[int]()
        self.full: set[int] = set()
        self.pinning: set[int] = set()  # generations in which memory for snapshots is not there yet
        self.full_memory = False  # no rank has memory for the state that it hands over
        self.killed: list[int] = []
        self.on_call: Callable[[Rank, str], None] = lambda rank, method: None
        self.on_sleep: Callable[[], None] = lambda: None
        self.group: groups.WorkerGroup | None = None
        self._broken = (0, 0)  # a generation in which ranks have died, and the step
        self._first: Rank | None = None  # the rank that has taken that step
        self._patch(patch)

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        context = SimpleNamespace(get_node_id=lambda: DRIVER_NODE)
        kill = SimpleNamespace(kill=lambda pid, number: self.kill(pid))
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now, sleep=self._sleep)
        fake = SimpleNamespace(
            wait=self._wait,
            get=lambda ref: ref.get(),
            put=lambda value: value,
            kill=lambda actor: self.kill(actor.rank.pid),
            get_runtime_context=lambda: context,
        )
        for module in (groups, faults, copies, fence, regroup, spares):
            patch.setattr(module, "ray", fake)
        for module in (
            groups,
            faults,
            fence,
            recovery,
            regroup,
            newest_checkpoint,
            evictions,
            hang_detection,
            step_loop,
            saving,
        ):
            patch.setattr(module, "time", clock)
        patch.setattr(fence, "os", kill)
        patch.setattr(groups, "Actor", SimpleNamespace(options=self._options))
        patch.setattr(groups, "strategy_of", lambda placement, bundle: bundle)
        patch.setattr(groups, "strategy_on", lambda node: node)
        patch.setattr(faults, "gone_nodes", lambda nodes: self.lost_nodes.intersection(nodes))
        patch.setattr(regroup, "forget_gone_nodes", lambda nodes: None)
        patch.setattr(spares, "free_rooms", lambda device: self.rooms)
        patch.setattr(groups, "bundle_places", lambda group: tuple(map(Place, range(len(self.nodes)), self.nodes)))
        patch.setattr(groups, "release", lambda group: None)
        patch.setattr(regroup, "living_bundles", lambda group: self.living_bundles())
        patch.setattr(evictions, "node_of", lambda group: group.node)
        patch.setattr(evictions, "node_names", dict)
        patch.setattr(recovery, "draining", lambda: self.draining)
        patch.setattr(recovery, "drain", self._drain)

    def members(self) -> list[Rank]:
        assert self.group is not None
        return [actor.rank for actor in self.group.actors]

    def living_bundles(self) -> dict[int, str]:
        gone = self.lost_nodes | set(self.draining)
        return {bundle: node for bundle, node in enumerate(self.nodes) if node not in gone}

    def lose_node(self, node: str) -> None:
        self.lost_nodes.add(node)
        for rank in self.ranks:
            rank.is_alive = rank.is_alive and rank.node != node

    def kill(self, pid: int) -> None:
        self.killed.append(pid)
        for rank in self.ranks:
            rank.is_alive = rank.is_alive and rank.pid != pid

    def strike(self, rank: Rank, step: int) -> None:
        """Kills the ranks that die in this step; blocks those that then wait for them."""
        if rank.number == 0:
            self.now += STEP_SECONDS
        if step in self.returns and not self.is_broken(rank.generation):
            self.lost_nodes.clear()
        if step in self.unreadable and not self.is_broken(rank.generation):
            self._broken, self._first = (rank.generation, step), None
            raise PentadError("shard tokens-00000.arrow is missing")
        if (fault := self.faults.pop(step, None)) is not None:
            self._broken = (rank.generation, step)
            members = self.members()
            if isinstance(fault, str):
                self.lose_node(fault)
            else:
                for number in fault:
                    members[number].is_alive = False
            survivors = [each for each in members if each.is_alive]
            for each in survivors:
                each.ready = step in self.commits
            self._first = survivors[0] if survivors and step in self.commits else None
        has_taken = rank is self._first and step == self._broken[1]
        if self.is_broken(rank.generation) and step >= self._broken[1] and not has_taken:
            raise Blocked

    def strike_evaluation(self, rank: Rank, step: int) -> None:
        if (fault := self.eval_faults.pop(step, None)) is not None:
            self._broken, self._first, members = (rank.generation, step), None, self.members()
            for number in fault:
                members[number].is_alive = False
        if self.is_broken(rank.generation):
            raise Blocked

    def is_broken(self, generation: int) -> bool:
        return self._broken[0] == generation

    def _drain(self, node: str, seconds: float, reason: str) -> bool:
        self.draining = {node: int(1000 * (self.now + seconds))}
        return True

    def _options(self, *, scheduling_strategy: int | str, **_: Any) -> Any:
        def remote(label: str, runner: str) -> Actor:
            self.ranks.append(Rank(self, scheduling_strategy))
            return Actor(self.ranks[-1])

        return SimpleNamespace(remote=remote)

    def _wait(self, refs: list[Ref], num_returns: int = 1, timeout: float = 0.0) -> tuple[list[Ref], list[Ref]]:
        ready = [ref for ref in refs if ref.look() or not ref.rank.is_alive]
        if len(ready) < num_returns:
            self.now += timeout
        return ready, [ref for ref in refs if ref not in ready]

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()


class FakeRun:
    """A run with four ranks on two nodes, after seven steps."""

    def __init__(self, fake: FakeRay, config: RunConfig, folder: RunFolder, group: groups.WorkerGroup) -> None:
        self.fake, self.config, self.folder, self.group = fake, config, folder, group
        fake.group = group
        display = Display(Console(quiet=True), "run", config.run.steps)
        self.bus, self.requests = EventBus(config, folder, display, 0, None), ControlRequests()
        self.bus.ranks_placed(group)
        self.copies = copies.GroupCopies(group)
        self.recovery = recovery.Recovery(config, group, self.bus, self.requests, Start(), self.copies)
        group.restore(Start())
        group.collect(group.submit_run(0, 7))
        self.before = [actor.rank for actor in group.actors]

    def lose(self, *ranks: int) -> WorkerError:
        """Kills ranks; returns the fault as the driver sees it."""
        for rank in ranks:
            self.group.actors[rank].rank.is_alive = False
        return WorkerError(f"rank {ranks[0]} died", ranks[0], "", ranks, "killed", "ray")

    def lose_nobody(self, group: groups.WorkerGroup) -> WorkerError:
        """A fault, as the driver of a group sees it, in which no rank has died."""
        return WorkerError(f"{group.label(0)} failed", 0, "", (), "error", "peer")

    def save(self, step: int) -> None:
        """Makes a checkpoint of `step` steps."""
        save_small(self.folder.checkpoint(step), step)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in read_lines(self.folder.path / "journal.jsonl") if row["event"] == kind]

    def rows(self) -> list[dict[str, Any]]:
        return read_lines(self.folder.path / "metrics.jsonl")

    def versions(self) -> list[int]:
        assert all(rank.is_alive for rank in self.fake.members())
        return [rank.version for rank in self.fake.members()]
