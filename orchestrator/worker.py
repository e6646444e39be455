"""The thin Ray actor around a Runner: one process, one rank.

Calls of the runner share one thread (a CUDA device is chosen for a thread), and a second group of threads answers
while that one is stuck in a collective.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

import ray

from pentad.schedules.instruction import Unit
from pentad.schedules.plan import Plan
from pentad.workers.board import read_board
from pentad.workers.results import StepResult

RUNNER = "pentad.workers.runner:Runner"


class Where(NamedTuple):
    """Where a worker's process runs; `gpu` is -1 without one, `board` the file of its state (see workers/board.py)."""

    node: str
    ip: str
    gpu: int
    pid: int
    board: str


class Status(NamedTuple):
    """What a rank does: `instruction` is empty between steps, `age` the seconds since it began."""

    epoch: int
    step: int
    instruction: str
    age: float


class Worker:
    """One rank. `label` says which, in Ray's dashboard and logs; `runner` names the class as 'module:Class'."""

    def __init__(self, label: str, runner: str) -> None:
        module, _, name = runner.partition(":")
        self.label, self.module, self.name = label, module, name
        session = ray._private.worker.global_worker.node.get_session_dir_path()
        self.stream: tuple[Unit, ...] = ()
        self.board = Path(session) / f"pentad-board-{os.getpid()}"

    def __repr__(self) -> str:
        return self.label

    @ray.method(concurrency_group="train")
    def start(self, plan: Plan, rank: int, epoch: int) -> str:
        """Makes the runner; returns the name of its GPU, '' on a CPU."""
        self.stream = plan.program.streams[plan.mesh.coordinates(rank).pp]
        kind = getattr(importlib.import_module(self.module), self.name)
        gpu = _visible_index() if plan.device == "cuda" else 0
        self.runner = kind(plan, rank, self.board, epoch, gpu)
        return _device_name(gpu) if plan.device == "cuda" else ""

    @ray.method(concurrency_group="train")
    def connect(self, address: str, timeout_seconds: float) -> None:
        self.runner.connect(address, timeout_seconds)

    @ray.method(concurrency_group="train")
    def restore(self, folder: str | None) -> None:
        self.runner.restore(folder)

    @ray.method(concurrency_group="train")
    def run(self, first_step: int, count: int) -> list[StepResult]:
        return self.runner.run(first_step, count)

    @ray.method(concurrency_group="train")
    def save(self, folder: str, step: int) -> list[dict[str, Any]]:
        return self.runner.save(folder, step)

    @ray.method(concurrency_group="control")
    def commit(self, folder: str, step: int, shards: list[dict[str, Any]], meta: dict[str, Any], keep: int) -> None:
        """Makes a checkpoint visible and discards older ones, beside the training."""
        from pentad.workers import checkpoint  # imports torch, which the driver does not need

        path = Path(folder)
        checkpoint.commit(path, step=step, shards=[checkpoint.Shard.from_plain(shard) for shard in shards], meta=meta)
        checkpoint.discard_older(path.parent, keep)

    @ray.method(concurrency_group="train")
    def close(self) -> None:
        self.runner.close()

    @ray.method(concurrency_group="control")
    def where(self) -> Where:
        node = ray.get_runtime_context().get_node_id()
        gpus = [int(gpu) for gpu in ray.get_gpu_ids() if str(gpu).isdecimal()]  # parts of a GPU (MIG) have names
        return Where(node, ray.util.get_node_ip_address(), gpus[0] if gpus else -1, os.getpid(), str(self.board))

    @ray.method(concurrency_group="control")
    def sees(self, folder: str) -> bool:
        return os.path.isdir(folder)

    @ray.method(concurrency_group="control")
    def free_port(self) -> int:
        """A TCP port that nobody on this node listens on, for the store of rank 0."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    @ray.method(concurrency_group="control")
    def status(self) -> Status:
        """Once `start` has made the runner; before that a status without an epoch."""
        return read_status(self.board, self.stream) if self.board.exists() else Status(0, -1, "", 0.0)

    @ray.method(concurrency_group="control")
    def clock(self) -> float:
        """Monotonic seconds of this node."""
        return time.monotonic()


# A rank that came back by itself would have lost its state and its communicators, so none does.
Actor = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0, concurrency_groups={"train": 1, "control": 2})(
    Worker
)


def read_status(board: Path, stream: tuple[Unit, ...]) -> Status:
    """The state in a board file of this host, even of a process that is gone."""
    state = read_board(board)
    text = instruction_text(stream[state.counter]) if state.counter >= 0 else ""
    return Status(state.epoch, state.step, text, time.monotonic() - state.since)


def instruction_text(unit: Unit) -> str:
    """'2SEND_F0>3', '(1F4+2BW0)': what an instruction does, without what it waits for."""
    texts = [str(part).partition(" after ")[0] for part in unit.parts]
    return texts[0] if len(texts) == 1 else f"({'+'.join(texts)})"


def _visible_index() -> int:
    """The CUDA number of this worker's GPU: its place among those that the node lets Ray use."""
    (gpu,) = map(str, ray.get_gpu_ids())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(gpu) if visible else int(gpu)


def _device_name(gpu: int) -> str:
    import torch  # the runner has it by now; the driver does not need it

    return torch.cuda.get_device_name(gpu)
