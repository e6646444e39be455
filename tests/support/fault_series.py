"""Many faults in turn on one run of real processes, so that run and cluster start only once.

The run is paused between faults, so that it does not end before the last one.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from full_disk import largest_file
from multinode import Cluster, Run, _raylet, kill

from pentad.orchestrator.control.control_client import connect
from pentad.workers.checkpoint.checkpoint import MANIFEST, complete_folders

NODES = (2, 2, 2)
HEAD_AWAY_SECONDS = 6.0
DISK_FULL_SECONDS = 2.0


class Series:
    """`words` are all arguments that the run was started with."""

    def __init__(self, nodes: Cluster, folder: Path, words: tuple[str, ...]) -> None:
        self.nodes, self.folder, self.words = nodes, folder, words
        self.run = Run(nodes, folder, *words)
        self.seconds: dict[str, float] = {}

    def suffer(self, fault: str) -> None:
        """Injects one fault. Resumes a paused run before, and pauses it after it has trained on."""
        steps, began = self.steps(), time.monotonic()
        if steps:
            self.ask("resume")
        self.run.wait_for_step(steps + 4)
        FAULTS[fault](self)
        after = self.steps()
        self.run.wait_for_step(after + 2)
        self.ask("pause")
        self.nodes.resize(*NODES)
        self.seconds[fault] = round(time.monotonic() - began, 1)

    def steps(self) -> int:
        return len(self.run.rows())

    def ask(self, verb: str) -> None:
        with connect(self.run.folder) as client:
            client.request(verb, 120)

    def pid(self, rank: int) -> int:
        """The PID of the process that holds the rank now."""
        with connect(self.run.folder) as client:
            return next(each["pid"] for each in client.status(30)["ranks"] if each["rank"] == rank)

    def signal(self, *ranks: int, how: int = signal.SIGKILL) -> None:
        for pid in [self.pid(rank) for rank in ranks]:
            os.kill(pid, how)

    def recoveries(self) -> int:
        return len(self.run.events("recovered"))

    @contextmanager
    def recovers(self) -> Iterator[None]:
        before = self.recoveries()
        yield
        self.run.wait_for(lambda: self.recoveries() > before)

    def start_again(self, *, adopts: bool) -> None:
        """Runs the same command again, after the driver was killed."""
        before = len(self.run.events("start"))
        self.run = Run(self.nodes, self.folder, *self.words)
        self.run.wait_for(lambda: len(self.run.events("start")) > before)
        assert self.run.events("start")[-1]["adopts"] == adopts, self.run.describe()

    def kill_everything(self) -> None:
        """Kills the driver and all ranks, so that the run can only resume from a checkpoint."""
        pids = [self.pid(rank) for rank in range(4)]
        self.run.stop()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            time.sleep(0.05)

    def newest_checkpoint(self) -> Path:
        return list(complete_folders(self.run.folder / "checkpoints").values())[-1]


def _kill(series: Series) -> None:
    with series.recovers():
        series.signal(1)


def _stop(series: Series) -> None:
    with series.recovers():
        series.signal(2, how=signal.SIGSTOP)


def _two_at_once(series: Series) -> None:
    with series.recovers():
        series.signal(0, 3)


def _during_a_recovery(series: Series) -> None:
    fences, second = len(series.run.events("fence")), series.pid(2)
    with series.recovers():
        series.signal(1)
        series.run.wait_for(lambda: len(series.run.events("fence")) > fences)
        os.kill(second, signal.SIGKILL)


def _during_a_save(series: Series) -> None:
    folders, victim = series.run.folder / "checkpoints", series.pid(3)

    def unfinished() -> list[Path]:
        return [each for each in folders.glob("step-????????") if not (each / MANIFEST).exists()]

    with series.recovers():
        series.run.wait_for(unfinished)
        os.kill(victim, signal.SIGKILL)


def _raylet_killed(series: Series) -> None:
    with series.recovers():
        kill(series.nodes.node_of(series.pid(0)))


def _partition(series: Series) -> None:
    """A node that is no longer heard from, neither its Ray processes nor its ranks."""
    raylet = psutil.Process(_raylet(series.nodes.node_of(series.pid(0))).pid)
    silent = [raylet, *raylet.children(recursive=True)]
    with series.recovers():
        for process in silent:
            process.suspend()
    for process in silent:
        if process.is_running():
            process.kill()


def _sigterm(series: Series) -> None:
    with series.recovers():
        series.signal(3, how=signal.SIGTERM)


def _disk_full(series: Series) -> None:
    """The driver's disk is full while a rank is lost."""
    with largest_file(0, series.run.process.pid):
        fences, deadline = len(series.run.events("fence")), time.monotonic() + DISK_FULL_SECONDS
        series.signal(1)
        while time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(series.run.events("fence")) == fences  # it cannot be written
    series.run.wait_for(lambda: len(series.run.events("fence")) > fences)


def _driver_killed(series: Series) -> None:
    series.run.stop()
    series.start_again(adopts=True)


def _head_killed(series: Series) -> None:
    series.nodes.stop_head()
    time.sleep(HEAD_AWAY_SECONDS)
    series.nodes.start_head()


def _damaged(series: Series, damage: Callable[[Path], None]) -> None:
    """Damages the newest checkpoint once all processes are lost: the run resumes from the one before it."""
    series.run.wait_for(lambda: len(complete_folders(series.run.folder / "checkpoints")) > 1)
    series.kill_everything()
    folder = series.newest_checkpoint()
    damage(max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size))
    series.start_again(adopts=False)
    assert list(folder.parent.glob(f"{folder.name}.refused-*")), series.run.describe()


def _torn_checkpoint(series: Series) -> None:
    _damaged(series, lambda path: os.truncate(path, path.stat().st_size // 2))


def _flipped_checkpoint(series: Series) -> None:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)

    _damaged(series, flip)


FAULTS: dict[str, Callable[[Series], None]] = {
    "SIGKILL": _kill,
    "SIGSTOP": _stop,
    "two at once": _two_at_once,
    "during a recovery": _during_a_recovery,
    "during a save": _during_a_save,
    "SIGTERM": _sigterm,
    "disk full": _disk_full,
    "raylet killed": _raylet_killed,
    "node partitioned": _partition,
    "driver killed": _driver_killed,
    "head killed": _head_killed,
    "torn checkpoint": _torn_checkpoint,
    "flipped checkpoint": _flipped_checkpoint,
}
