"""Injects the faults of a scenario when ranks reach certain points, or while the driver does something."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaos_cluster import DRIVER_NODE, IDEMPOTENT, Node, Process
from chaos_scenario import Fault

from pentad.schedules.diagnosis.slow_ranks import SlowRank
from pentad.workers.checkpoint.checkpoint import MANIFEST, complete_folders

if TYPE_CHECKING:
    from chaos_history import Simulation

NOTICE_SECONDS, DRAIN_SECONDS, STORAGE_SECONDS = 30.0, 25.0, 8.0
OF_STEPS = ("before F", "within F", "after F", "within B", "within W", "before NORM", "before STEP")
ALSO = {  # point -> names by which it is reached
    "recovering": ("recovering", "restoring"),
    "saving": ("saving", "committing"),
    "within B": ("within B", "within BW"),
    "within W": ("within W", "within BW"),
    "before STEP": ("before STEP", "before VALIDATE"),
    "end": ("before NORM",),
}


class Faults:
    """The faults of one history. They happen one after another, in the order of the scenario."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.world, self.cluster = simulation, simulation.world, simulation.cluster
        self.left = list(simulation.scenario.faults)
        self.points = self._points()  # where the next fault may happen
        self.happened: list[str] = []
        self.times = 0
        self.full_until = self.away_until = -1.0
        self.failing_saves = self.lost = self.late = 0
        self.mangled = ""
        self.cluster.mangle = self.mangle

    @property
    def next(self) -> Fault | None:
        return self.left[0] if self.left else None

    def _points(self) -> tuple[str, ...]:
        return ALSO.get(self.left[0].point, (self.left[0].point,)) if self.left else ()

    def _pop(self) -> Fault:
        fault = self.left.pop(0)
        self.points = self._points()
        return fault

    def reached(self, point: str, process: Process, step: int, within: float) -> None:
        if point not in self.points:
            return
        fault = self.left[0]
        last = self.simulation.scenario.steps - 1
        least = last if fault.point == "end" else fault.step if point in OF_STEPS else -1
        if step < least:
            return
        if fault.point == "recovering" and not self.simulation.recovers:
            return
        self.times += 1
        if self.times > fault.nth:
            self._pop()
            self.times = 0
            seconds = within * self.world.random.random()
            self.world.at(seconds, partial(self.happen, fault, process))

    def idle(self) -> bool:
        """Whether the next fault is for a paused run, so that the run is to be paused."""
        fault = self.next
        return fault is not None and fault.point == "idle"

    def happen_idle(self) -> None:
        self.happen(self._pop(), self.world.random.choice(self.living()))

    def living(self) -> list[Process]:
        found = [process for process in self.cluster.processes if process.is_alive]
        return found or self.cluster.processes[-1:]

    def happen(self, fault: Fault, process: Process) -> None:
        if not process.is_alive:
            process = self.world.random.choice(self.living())
        self.happened.append(f"{self.world.now:.2f}: {fault.kind} of rank {process.rank} at {fault.point}")
        self.simulation.on_fault(fault.kind)
        getattr(self, "_" + fault.kind.replace(" ", "_").lower())(process)

    def _kill(self, process: Process) -> None:
        process.die()

    def _stop(self, process: Process) -> None:
        process.stopped = True

    def _two_at_once(self, process: Process) -> None:
        others = [each for each in self.living() if each is not process]
        process.die()
        if others:
            self.world.random.choice(others).die()

    def _other_node(self, process: Process) -> Node:
        """The node of a rank, or another one if that is the driver's."""
        if process.node.name != DRIVER_NODE:
            return process.node
        others = [node for node in self.cluster.nodes.values() if node.name != DRIVER_NODE]
        return self.world.random.choice([node for node in others if node.is_alive] or others)

    def _node_lost(self, process: Process) -> None:
        node = self._other_node(process)
        self.cluster.lose(node)
        self._replace(node, 0.0)

    def _replace(self, node: Node, after: float) -> None:
        seconds = self.simulation.scenario.replaced_after
        if seconds is not None:
            self.world.at(after + seconds, partial(self._take_over, node))

    def _take_over(self, node: Node) -> None:
        """Another node joins, and Ray moves the bundles there."""
        name = f"node{len(self.cluster.nodes)}"
        self.cluster.nodes[name] = Node(name)
        self.cluster.bundles = [name if each == node.name else each for each in self.cluster.bundles]
        self.cluster.draining.pop(node.name, None)

    def _partition(self, process: Process) -> None:
        node = self._other_node(process)
        seconds = self.world.random.choice((0.5, 5.0, 30.0, 100.0))
        self.cluster.cut_off(node, seconds)
        if seconds > 62.0:
            self._replace(node, 62.0)

    def _slow_rank(self, process: Process) -> None:
        process.slow = self.world.random.choice((2.0, 5.0, 20.0))
        if (bus := self.simulation.bus) is not None and process.rank >= 0:
            step = bus.view.step
            bus.lasting_slow_ranks = (SlowRank("compute", (process.rank,), step, step, 1.0),)

    def _driver_killed(self, process: Process) -> None:
        self.world.driver_ends = "killed"

    def _head_killed(self, process: Process) -> None:
        self.cluster.head_gone = True
        for each in self.living():
            self.world.at(self.world.random.uniform(0.1, 1.5), partial(each.die, (1e9, 1e9)))
        self.world.at(2.0, self.simulation.on_head_gone)

    def _sigterm(self, process: Process) -> None:
        process.worker.notice.text = "received SIGTERM"
        self.world.at(NOTICE_SECONDS, process.die)

    def _node_drains(self, process: Process) -> None:
        node = self._other_node(process)
        self.cluster.draining[node.name] = int(1000 * (self.world.now + DRAIN_SECONDS))
        self.world.at(DRAIN_SECONDS, partial(self.cluster.lose, node))
        self._replace(node, DRAIN_SECONDS)

    def _disk_full(self, process: Process) -> None:
        self.full_until = self.world.now + STORAGE_SECONDS

    def _store_down(self, process: Process) -> None:
        self.away_until = self.world.now + STORAGE_SECONDS

    def _torn_checkpoint(self, process: Process) -> None:
        self._damage(lambda path: os.truncate(path, path.stat().st_size // 2))

    def _flipped_byte(self, process: Process) -> None:
        self._damage(self._flip)

    def _flip(self, path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[self.world.random.randrange(len(content))] ^= 1 << self.world.random.randrange(8)
        path.write_bytes(content)

    def _damage(self, do: Callable[[Path], None]) -> None:
        """Damages the newest checkpoint, or the next one if there is none."""
        folders = list(complete_folders(self.simulation.checkpoints).values())
        if not folders:
            self.simulation.on_saved.append(partial(self._damage, do))
            return
        files = sorted(path for path in folders[-1].iterdir() if path.suffix == ".safetensors" or path.name == MANIFEST)
        do(self.world.random.choice(files))
        self.simulation.on_damage()

    def _lost_message(self, process: Process) -> None:
        self.lost = 1

    def _late_message(self, process: Process) -> None:
        if self.world.random.random() < 0.5:
            self.late = 1
        else:
            self.mangled = "late"

    def _duplicated_message(self, process: Process) -> None:
        self.mangled = "duplicated"

    def _failed_save(self, process: Process) -> None:
        self.failing_saves = 1

    def mangle(self, process: Process, name: str) -> str:
        if self.mangled == "duplicated" and name not in IDEMPOTENT:
            return ""
        found, self.mangled = self.mangled, ""
        return found

    def transfer(self, arrive: Callable[[], None]) -> None:
        """Delivers what one rank sends another, unless a fault delays or loses it."""
        if self.lost:
            self.lost = 0
            return
        seconds, self.late = self.world.random.uniform(2.0, 6.0) if self.late else 0.0005, 0
        self.world.at(seconds, arrive)

    def check_storage(self, *, writes: bool) -> None:
        """Raises OSError while the checkpoint storage is down, or full."""
        if self.world.now < self.away_until:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if writes and self.world.now < self.full_until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def check_disk(self) -> None:
        """Raises OSError while the disk of the run's folder is full."""
        if self.world.now < self.full_until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def check_save(self) -> None:
        if self.failing_saves:
            self.failing_saves = 0
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def justified(simulation: Simulation, message: str) -> bool:
    """Whether the faults so far explain that a run ended with this error."""
    kinds = simulation.kinds
    lost = kinds & {"kill", "stop", "two at once", "node lost", "partition", "SIGTERM", "node drains", "lost message"}
    lost |= kinds & {"late message", "slow rank", "head killed"}
    rules: list[tuple[str, Any]] = [
        ("cannot be written", kinds & {"disk full", "store down", "failed save"}),
        ("cannot be read", kinds & {"store down"}),
        ("does not see", kinds & {"store down"}),
        ("was not saved", kinds & {"disk full", "store down", "failed save"}),
        ("is intact", simulation.damaged),
        (".safetensors has", simulation.damaged),  # damaged after the driver has read it
        ("manifest.json", simulation.damaged),
        ("all ranks were lost before a step", lost),
        ("no node with room", kinds & {"node lost", "partition", "node drains"}),
        ("did not start within it", lost),
        ("the newest surviving state", lost),
        ("died", lost),
        ("failed", lost),
        ("made progress", lost),
        ("stopped answering", lost),
        ("not answer", lost),
    ]
    return any(bool(kinds_found) for text, kinds_found in rules if text in message)
