"""The thin Ray actor around a Runner: one process, one rank.

Every call that changes a rank carries the number of its generation, and one of a generation that is over is refused.
Calls of the runner share one thread (a CUDA device is chosen for a thread), and a second group of threads answers while
that one is stuck in a collective.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import ray

from pentad.schedules.ir.instruction import Unit
from pentad.schedules.spec.plan import Plan
from pentad.workers.runtime.progress_file import State, read_board
from pentad.workers.runtime.results import RankSnapshot
from pentad.workers.runtime.telemetry import GpuState, read_gpu

RUNNER = "pentad.workers.runtime.runner:Runner"
GPU_SECONDS = 5.0


class Where(NamedTuple):
    """Where a worker's process runs; `gpu` is -1 without one, `board` the file of its state."""

    node: str
    ip: str
    gpu: int
    pid: int
    board: str


class Status(NamedTuple):
    """What a rank does: `counter` is the index in its stream, -1 between steps, and `instruction` the text of that
    instruction, '' between steps; `age` are the seconds since it began. `gpu` is what a GPU said of itself lately."""

    generation: int
    step: int
    instruction: str
    age: float
    counter: int = -1
    gpu: GpuState | None = None


class Stale(Exception):
    """A call of a generation that is over."""


class Worker:
    """One rank. `label` says which, in Ray's dashboard and logs; `runner` names the class as 'module:Class'."""

    def __init__(self, label: str, runner: str) -> None:
        module, _, name = runner.partition(":")
        self.label, self.module, self.name = label, module, name
        session = ray._private.worker.global_worker.node.get_session_dir_path()
        self.stream: tuple[Unit, ...] = ()
        self.generation, self.changing = 0, threading.Lock()
        self.gpu, self.gpu_read = -1, 0.0
        self.gpu_state: GpuState | None = None
        self.runner: Any = None
        self.board = Path(session) / f"pentad-board-{os.getpid()}"

    def __repr__(self) -> str:
        return self.label

    @ray.method(concurrency_group="train")
    def start(self, generation: int, plan: Plan, rank: int, keep: bool) -> str:
        """Makes the runner. In a generation that is to `keep` the state of the one before, it takes over what this rank
        holds of it, and is blank where another rank's is to come.

        Returns the name of its GPU, '' on a CPU.
        """
        kind = getattr(importlib.import_module(self.module), self.name)
        gpu = _visible_index() if plan.device == "cuda" else 0
        self.gpu = next((int(gpu) for gpu in ray.get_gpu_ids() if str(gpu).isdecimal()), -1)
        runner = kind(plan, rank, self.board, generation, gpu, self.runner if keep else None, blank=keep)
        with self.changing:
            if generation < self.generation:
                raise Stale(f"generation {generation} is over")
            self.generation, self.runner = generation, runner
            self.stream = plan.program.streams[plan.mesh.coordinates(rank).pp]
        return _device_name(gpu) if plan.device == "cuda" else ""

    @ray.method(concurrency_group="train")
    def do(self, generation: int, method: str, *arguments: Any) -> Any:
        """Calls a method of the runner: serve, connect, restore, receive, advance, run, save or leave."""
        if generation != self.generation:
            raise Stale(f"generation {generation} is over, it is {self.generation} now")
        if self.runner is None:  # a rank that was lost before it began
            assert method == "leave", method
            return RankSnapshot(-1, False, 0.0, ())
        return getattr(self.runner, method)(*arguments)

    @ray.method(concurrency_group="control")
    def fence(self, generation: int) -> None:
        """Ends the generation before `generation`: what the train thread does is freed and forgotten, late calls are
        refused."""
        with self.changing:
            if generation <= self.generation:
                raise Stale(f"generation {generation} is over, it is {self.generation} now")
            self.generation = generation
        if self.runner is not None:
            self.runner.fence()

    @ray.method(concurrency_group="control")
    def abort(self, generation: int) -> None:
        """Ends the collective operations of a fenced GPU, once all are still."""
        if self.runner is not None and generation == self.generation:
            self.runner.abort()

    @ray.method(concurrency_group="control")
    def peek(self, board: str, stream: tuple[Unit, ...]) -> Status:
        """The state of another rank of this node, which does not answer."""
        return read_status(Path(board), stream)

    @ray.method(concurrency_group="control")
    def kill(self, pid: int) -> None:
        """Ends a process of this node that does not end by itself."""
        os.kill(pid, signal.SIGKILL)

    @ray.method(concurrency_group="control")
    def commit(self, folder: str, step: int, shards: list[dict[str, Any]], meta: dict[str, Any], keep: int) -> None:
        """Makes a checkpoint visible and discards older ones, beside the training."""
        from pentad.workers.checkpoint import checkpoint  # imports torch, which the driver does not need

        path = Path(folder)
        checkpoint.commit(path, step=step, shards=[checkpoint.Shard.from_plain(shard) for shard in shards], meta=meta)
        checkpoint.discard_older(path.parent, keep)

    @ray.method(concurrency_group="train")
    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()
        self.board.unlink(missing_ok=True)

    @ray.method(concurrency_group="control")
    def where(self) -> Where:
        node = ray.get_runtime_context().get_node_id()
        gpus = [int(gpu) for gpu in ray.get_gpu_ids() if str(gpu).isdecimal()]  # parts of a GPU (MIG) have names
        return Where(node, ray.util.get_node_ip_address(), gpus[0] if gpus else -1, os.getpid(), str(self.board))

    @ray.method(concurrency_group="control")
    def sees(self, folder: str) -> bool:
        return os.path.isdir(folder)

    @ray.method(concurrency_group="control")
    def status(self) -> Status:
        """Once `start` has made the runner; before that a status without a generation."""
        if self.runner is None or not self.board.exists():
            return Status(self.generation, -1, "", 0.0)
        state = self.runner.position() or read_board(self.board)
        return status_of(state, self.stream)._replace(gpu=self._telemetry())

    def _telemetry(self) -> GpuState | None:
        """At most every few seconds: a reading takes its time."""
        if self.gpu >= 0 and time.monotonic() > self.gpu_read + GPU_SECONDS:
            self.gpu_read = time.monotonic()
            self.gpu_state = read_gpu(self.gpu)
        return self.gpu_state

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
    return status_of(read_board(board), stream)


def status_of(state: State, stream: tuple[Unit, ...]) -> Status:
    text = instruction_text(stream[state.counter]) if state.counter >= 0 else ""
    return Status(state.generation, state.step, text, time.monotonic() - state.since, state.counter)


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
