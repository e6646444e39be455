"""The real Worker, with its refusal of stale calls, around a simulated process and runner."""

from __future__ import annotations

import threading
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from chaos_cluster import Process

from pentad.orchestrator.cluster.rank_status import Status, status_of
from pentad.orchestrator.cluster.worker import Worker, WorkerPlace
from pentad.schedules.spec.plan import Plan
from pentad.workers.replication.parts import CopyKey, HostCopies
from pentad.workers.runtime.results import Committed

if TYPE_CHECKING:
    from chaos_history import Simulation


class SimWorker(Worker):
    """The real Worker, which refuses stale calls, in a simulated process."""

    def __init__(self, simulation: Simulation, process: Process) -> None:
        self.simulation, self.process = simulation, process
        self.runner_class, self.streams = "chaos_rank:SimRunner", ()
        self.generation, self.changing, self.given_up = 0, threading.Lock(), -1
        self.gpu, self.gpu_state, self.gpu_read = -1, None, 0.0
        self.runner: Any = None
        self.plan, self.rank, self.bundles = None, -1, ()
        self.notice: Any = SimpleNamespace(text="", of_node="", watch=lambda where: None)
        self.copies, self.copy_server = HostCopies(), None
        self.progress_file: Any = process
        self.started = set[int]()

    def start(self, generation: int, plan: Plan, rank: int, bundles: tuple[int, ...], keep: bool) -> str:
        assert generation not in self.started, f"generation {generation} has begun twice"
        self.started.add(generation)
        name = super().start(generation, plan, rank, bundles, keep)
        self.simulation.on_start(generation)
        return name

    def place(self) -> WorkerPlace:
        self.simulation.reached("placing", self.process)
        process = self.process
        return WorkerPlace(process.node.name, f"10.0.0.{process.node.name[4:]}", -1, process.pid, f"/no/{process.pid}")

    def status(self) -> Status:
        leaving, of_node = self.notice.text, self.notice.of_node
        if self.runner is None:
            return Status(self.generation, -1, "", 0.0, leaving=leaving, node_leaving=of_node)
        return self.read_status()._replace(leaving=leaving, node_leaving=of_node)

    def read_status(self) -> Status:
        return status_of(self.runner.position, self.streams)

    def read_progress_of(self, progress_file: str, streams: Any) -> Status:
        return self.simulation.read_status(progress_file)

    def reserved(self, generation: int) -> None:
        self._require_equal(generation)

    def commit(self, generation: int, folder: str, step: int, *rest: Any) -> Committed:
        self.simulation.reached("committing", self.process)
        self.simulation.may_write(self.process)
        found = super().commit(generation, folder, step, *rest)
        self.simulation.check_acts(generation, self.process, f"committed checkpoint {step}")
        self.simulation.saved()
        return found

    def commit_copy(self, key: CopyKey) -> None:
        self.simulation.check_copy(key)
        super().commit_copy(key)

    def _serve(self, host: str, token: bytes) -> Any:
        return None

    def serve_copies(self, host: str, token: bytes) -> str:
        return str(self.process.pid)

    def held_copies(self) -> Any:
        return str(self.process.pid), self.copies.held()

    def kill(self, pid: int) -> None:
        self.simulation.cluster.kill_pid(pid)

    def clock(self) -> float:
        return self.simulation.world.now

    @staticmethod
    @cache
    def group_of(method: str) -> str:
        return getattr(getattr(Worker, method), "__ray_concurrency_group__", "train")
