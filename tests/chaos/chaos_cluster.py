"""A cluster in virtual time: nodes, processes, actors and their calls, with the faults of all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from functools import partial
from types import SimpleNamespace
from typing import Any

from chaos_world import DriverEnded, Task, World
from ray.exceptions import ActorDiedError, RayTaskError

from pentad.orchestrator.cluster.worker import StaleGeneration
from pentad.schedules.ir.errors import PentadError
from pentad.workers.abort import Aborted

DRIVER_NODE = "node0"
RPC_SECONDS = 0.001
DEATH_SECONDS = (0.015, 0.04)  # until the driver learns that a process has died
NODE_SECONDS = (3.7, 8.0)  # that a node has died
REACHABLE_AGAIN_SECONDS = 62.0  # after which Ray gives up a node that does not answer
SECONDS = {"start": 0.2, "place": 0.0, "connect": 0.05, "warm": 1.0, "restore": 0.02, "serve": 0.01}  # takes a call
IDEMPOTENT = {"commit_copy", "held_copies", "status", "clock", "fence", "serve_copies"}  # calls that may arrive twice

EXPECTED = (PentadError, OSError, RuntimeError, StaleGeneration, Aborted)  # errors of ranks; others are bugs


class Node:
    def __init__(self, name: str) -> None:
        self.name, self.is_alive, self.cut_off = name, True, False
        self.pending: list[Callable[[], None]] = []  # arrives once the node can be reached again


class Process:
    """One rank's process. It stands still while it is `stopped`, or waits for a node that is cut off."""

    def __init__(self, cluster: Cluster, node: Node, pid: int, bundle: int) -> None:
        self.cluster, self.world, self.node, self.pid, self.bundle = cluster, cluster.world, node, pid, bundle
        self.is_alive, self.stopped, self.slow = True, False, 1.0
        self.deferred: list[Callable[[], None]] = []
        self.tasks: dict[Task, None] = {}  # ordered, so that a seed always plays the same history
        self.queues: dict[str, list[tuple[Ref, str, tuple[Any, ...]]]] = {}
        self.busy: set[str] = set()
        self.refs: dict[Ref, None] = {}
        self.next_arrival = 0.0
        self.killed_by_driver = False
        self.worker: Any = None
        self.rank = -1

    @property
    def is_well(self) -> bool:
        """Whether nothing but its death could keep it from answering."""
        return not self.stopped and not self.node.cut_off and self.node.is_alive

    @property
    def is_healthy(self) -> bool:
        return self.is_alive and self.is_well

    def unlink(self, missing_ok: bool = False) -> None:
        """The process also poses as its progress file, which a worker removes."""

    def resume(self) -> None:
        self.stopped, deferred, self.deferred = False, self.deferred, []
        for each in deferred:
            self.world.at(0.0, each)

    def interrupt(self, error: type[Exception]) -> None:
        for task in list(self.tasks):
            task.interrupt(error())

    def die(self, learn: tuple[float, float] = DEATH_SECONDS) -> None:
        if not self.is_alive:
            return
        self.is_alive = False
        self.cluster.on_death(self)
        for ref in list(self.refs):
            self.world.at(self.world.random.uniform(*learn), partial(ref.resolve, None, ActorDiedError()))
        self.tasks.clear()

    def receive(self, ref: Ref, name: str, arguments: tuple[Any, ...]) -> None:
        """A call arrives; those of one group run one after another."""
        if not self.is_alive:
            return
        if self.stopped:
            self.deferred.append(partial(self.receive, ref, name, arguments))
            return
        group = self.worker.group_of(name)
        self.queues.setdefault(group, []).append((ref, name, arguments))
        if group not in self.busy:
            self._next(group)

    def _next(self, group: str) -> None:
        while self.queues[group] and group not in self.busy:
            ref, name, arguments = self.queues[group].pop(0)
            if group == "control":
                try:
                    value = getattr(self.worker, name)(*arguments)
                except Exception as error:
                    self._answer(ref, None, error)
                else:
                    self._answer(ref, value, None)
            else:
                self.busy.add(group)
                task = Task(self.world, self, self._run(name, arguments), lambda value, error: None)
                task.on_end = partial(self._end, group, ref, task)
                self.tasks[task] = None
                task.resume(task.ticket)

    def _run(self, name: str, arguments: tuple[Any, ...]) -> Generator[Any, None, Any]:
        yield SECONDS.get(arguments[1] if name == "call" else name, 0.0)
        value = getattr(self.worker, name)(*arguments)
        return (yield from value) if isinstance(value, Generator) else value

    def _end(self, group: str, ref: Ref, task: Task, value: Any, error: Exception | None) -> None:
        self.tasks.pop(task, None)
        self.busy.discard(group)
        self._answer(ref, value, error)
        self._next(group)

    def _answer(self, ref: Ref, value: Any, error: Exception | None) -> None:
        if error is not None and not isinstance(error, EXPECTED):
            self.world.broken = self.world.broken or error
        if not self.is_alive:
            return
        failure = None if error is None else RayTaskError("call", "traceback", error)
        answer = partial(ref.resolve, value, failure)
        if self.node.cut_off:
            self.node.pending.append(answer)
        else:
            self.world.at(RPC_SECONDS, answer)


class Ref:
    """A pending answer."""

    __slots__ = ("done", "error", "process", "value")

    def __init__(self, process: Process) -> None:
        self.process, self.done = process, False
        self.value: Any = None
        self.error: Exception | None = None
        process.refs[self] = None

    def resolve(self, value: Any, error: Exception | None) -> None:
        if not self.done:
            self.done, self.value, self.error = True, value, error
            self.process.refs.pop(self, None)
            self.process.cluster.resolved += 1


class Actor:
    """A handle of a process: `actor.METHOD.remote(...)` sends a call."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def __getattr__(self, name: str) -> Any:
        method = SimpleNamespace(remote=partial(self.process.cluster.call, self.process, name))
        method.options = lambda **_: method
        self.__dict__[name] = method  # cached
        return method


class Cluster:
    """What the driver uses of Ray. `bundles` names the node of each bundle; `make_worker` makes the worker of a new
    process. `mangle(process, name)` says what happens to a call: '', 'late' or 'duplicated'."""

    def __init__(self, world: World, nodes: tuple[str, ...], make_worker: Callable[[Process], Any]) -> None:
        self.world, self.make_worker = world, make_worker
        self.nodes = {name: Node(name) for name in nodes}
        self.bundles = list(nodes)  # the node of each
        self.processes: list[Process] = []
        self.draining: dict[str, int] = {}
        self.resolved = 0
        self.head_gone = False
        self.deaths: list[Callable[[Process], None]] = []
        self.mangle: Callable[[Process, str], str] = lambda process, name: ""

    def create(self, at: int | str) -> Actor:
        """Starts a process in a bundle (by number), or on a node without a bundle (by name)."""
        self.world.check()
        node, bundle = (self.bundles[at], at) if isinstance(at, int) else (at, -1)
        process = Process(self, self.nodes[node], 10_000_000 + len(self.processes), bundle)
        self.processes.append(process)
        process.worker = self.make_worker(process)
        process.stopped = True  # until it has started
        self.world.at(self.world.random.uniform(0.3, 0.6), process.resume)
        if not process.node.is_alive:
            process.die(NODE_SECONDS)
        return Actor(process)

    def call(self, process: Process, name: str, *arguments: Any) -> Ref:
        if not self.world.inside:
            self.world.check()
        ref = Ref(process)
        if self.head_gone:
            return ref
        if not process.is_alive:
            self.world.at(self.world.random.uniform(*DEATH_SECONDS), partial(ref.resolve, None, ActorDiedError()))
            return ref
        arrive = partial(process.receive, ref, name, arguments)
        what = self.mangle(process, name)
        if what == "duplicated":
            self.world.at(2 * RPC_SECONDS, partial(process.receive, Ref(process), name, arguments))
        if process.node.cut_off:
            process.node.pending.append(arrive)
            return ref
        seconds = self.world.random.uniform(2, 8) if what == "late" else RPC_SECONDS
        process.next_arrival = max(process.next_arrival, self.world.now + seconds)  # one after another
        self.world.at(process.next_arrival - self.world.now, arrive)
        return ref

    def wait(self, refs: list[Ref], num_returns: int = 1, timeout: float = 0.0) -> tuple[list[Ref], list[Ref]]:
        seen, found = -1, False

        def enough() -> bool:
            nonlocal seen, found
            if seen != self.resolved:
                seen, found = self.resolved, sum(ref.done for ref in refs) >= num_returns
            return found

        self.world.wait(timeout, enough)
        ready = [ref for ref in refs if ref.done]
        return ready, [ref for ref in refs if not ref.done]

    @staticmethod
    def get(ref: Ref) -> Any:
        assert ref.done, "the driver would wait for ever"
        if ref.error is not None:
            raise ref.error
        return ref.value

    def kill(self, process: Process) -> None:
        """Kills a process for the driver, once its node can be reached."""
        if not self.world.inside:
            self.world.check()
        if process.node.cut_off:
            process.node.pending.append(process.die)
        else:
            process.killed_by_driver = process.killed_by_driver or process.is_alive
            process.die()

    def kill_pid(self, pid: int) -> None:
        for process in self.processes:
            if process.pid == pid:
                self.kill(process)

    def lose(self, node: Node) -> None:
        node.is_alive = False
        for process in self.processes:
            if process.node is node:
                process.die(NODE_SECONDS)

    def cut_off(self, node: Node, seconds: float) -> None:
        """Nothing reaches or leaves the node for this long; if it is too long, Ray gives it up before."""
        node.cut_off = True
        if seconds > REACHABLE_AGAIN_SECONDS:
            self.world.at(REACHABLE_AGAIN_SECONDS, partial(self.lose, node))
        self.world.at(seconds, partial(self.reach, node))

    def reach(self, node: Node) -> None:
        node.cut_off, pending, node.pending = False, node.pending, []
        kills = [each for each in pending if getattr(each, "__func__", None) is Process.die]
        for each in [*kills, *(each for each in pending if each not in kills)]:
            self.world.at(RPC_SECONDS, each)

    def living_bundles(self) -> dict[int, str]:
        gone = {name for name, node in self.nodes.items() if not node.is_alive} | set(self.draining)
        return {bundle: node for bundle, node in enumerate(self.bundles) if node not in gone}

    def gone_nodes(self, nodes: Collection[str]) -> frozenset[str]:
        return frozenset(node for node in nodes if node not in self.nodes or not self.nodes[node].is_alive)

    def on_death(self, process: Process) -> None:
        for each in self.deaths:
            each(process)

    def end_job(self) -> None:
        """Ends the ranks of a driver that is gone."""
        for node in self.nodes.values():
            if node.cut_off:
                self.reach(node)
        for process in self.processes:
            process.die()
        self.world.driver_ends, self.head_gone = None, False
        self.world.idle_calls = 0
        self.world.wait(2.0)


__all__ = ["Actor", "Cluster", "DriverEnded", "Node", "Process", "Ref"]
