"""The Ray actor around a Runner: one process, one rank.

Every call that changes a rank carries its generation number; calls from an earlier generation are refused. Calls of the
runner share one thread, because a CUDA device is chosen per thread. A second group of threads answers while that one is
stuck in a collective, a third writes checkpoints while training continues, and a fourth sends copies to other ranks.
"""

from __future__ import annotations

import gc
import os
import pkgutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from pentad.orchestrator.cluster.notice import Notice
from pentad.orchestrator.cluster.rank_status import Status, Streams, read_status, status_of, streams_of
from pentad.orchestrator.config.version import release
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.gc_pause import gc_paused
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.checksums import activity
from pentad.workers.checkpoint.location import location
from pentad.workers.checkpoint.retention import delete_older, discard
from pentad.workers.checkpoint.storage import access_problem
from pentad.workers.lanes.progress_file import read_progress
from pentad.workers.replication.parts import CopyKey, HeldPart, HostCopies
from pentad.workers.replication.transfer import CopyServer
from pentad.workers.runtime.results import Committed, RankSnapshot, WrittenShards
from pentad.workers.runtime.telemetry import GpuState, read_gpu
from pentad.workers.torch_import import defer_meta_kernels

if TYPE_CHECKING:  # imports torch, which the driver does not need
    from pentad.workers.replication.replicator import SentPart

GPU_SECONDS = 5.0  # between two readings of a GPU
POLL_SECONDS = 0.02


class WorkerPlace(NamedTuple):
    """Where a worker's process runs: Ray's node ID, its IP address, the GPU (-1 without one), and the path of its
    progress file there."""

    node: str
    ip: str
    gpu: int
    pid: int
    progress_file: str


class RankPlacement(NamedTuple):
    """The rank that a worker was started as (-1: none yet), and the placement group's bundles and the `hosts` (see
    Plan) of all ranks at that time. `fits` is whether it runs the plan and version of pentad asked about. `token` is
    the token of its copies in memory."""

    place: WorkerPlace
    generation: int
    rank: int
    bundles: tuple[int, ...]
    fits: bool
    token: bytes | None
    hosts: tuple[int, ...] = ()


class StaleGeneration(Exception):
    """The call belongs to an earlier generation."""


class Worker:
    """One rank. `label` names it in Ray's dashboard and logs; `runner` is the class to run, as 'module:Class'."""

    def __init__(self, label: str, runner: str) -> None:
        self.label, self.runner_class = label, runner
        self.notice = Notice()
        # torch takes a second to import; meanwhile the driver collects the workers' places.
        threading.Thread(target=self._preload, daemon=True).start()
        session = ray._private.worker.global_worker.node.get_session_dir_path()
        self.streams: Streams = ()
        self.plan: Plan | None = None
        self.rank, self.bundles = -1, tuple[int, ...]()
        self.generation, self.changing = 0, threading.Lock()
        self.given_up = -1  # step of the checkpoint being committed, if it was given up
        self.gpu, self.gpu_read = -1, 0.0
        self.gpu_state: GpuState | None = None
        self.runner: Any = None
        self.copies = HostCopies()
        self.copy_server: CopyServer | None = None
        self.progress_file = Path(session) / f"pentad-progress-{os.getpid()}"

    def __repr__(self) -> str:
        return self.label

    @ray.method(concurrency_group="train")
    def start(self, generation: int, plan: Plan, rank: int, bundles: tuple[int, ...], keep: bool) -> str:
        """Creates the runner; with `keep` it inherits the state of the previous one. `bundles` are those of all ranks.
        Returns the name of its GPU, '' on a CPU."""
        kind = pkgutil.resolve_name(self.runner_class)
        self.gpu = self._gpu_number()
        gpu = _visible_index(self.gpu) if plan.device == "cuda" else 0
        with self.changing:
            self._require(generation >= self.generation, generation)
            if not keep:
                self.runner = None
        if not keep:
            gc.collect()  # there may be no room for a second state beside the old one
        runner = kind(plan, rank, self.progress_file, generation, gpu, self.runner, copies=self.copies)
        with self.changing:
            self._require(generation >= self.generation, generation)
            self.generation, self.runner = generation, runner
            self.plan, self.rank, self.bundles = plan, rank, bundles
            self.streams = streams_of(plan, rank)
        self.notice.watch(plan.notice)
        return _device_name(gpu) if plan.device == "cuda" else ""

    def _require_equal(self, generation: int) -> None:
        self._require(generation == self.generation, generation)

    def _require(self, holds: bool, generation: int) -> None:
        if not holds:
            raise StaleGeneration(f"generation {generation} is over, it is {self.generation} now")

    @ray.method(concurrency_group="train")
    def call(self, generation: int, method: str, *arguments: Any) -> Any:
        """Calls a method of the runner: serve, begin_reading, connect, restore, restore_copy, receive, advance, run,
        evaluate, snapshot, copy, hand_over or save."""
        self._require_equal(generation)
        return getattr(self.runner, method)(*arguments)

    @ray.method(concurrency_group="train")
    def leave(self, generation: int) -> RankSnapshot:
        """What this rank holds after a fence; nothing without a runner."""
        return RankSnapshot(-1, False, 0.0, ()) if self.runner is None else self.call(generation, "leave")

    @ray.method(concurrency_group="control")
    def fence(self, generation: int) -> None:
        """Begins `generation`: unblocks the train thread, and from now on refuses calls from earlier generations."""
        with self.changing:
            self._require(generation > self.generation, generation)
            self.generation = generation
        if self.runner is not None:
            self.runner.fence()

    @ray.method(concurrency_group="control")
    def abort(self, generation: int) -> None:
        """Aborts the communicators of a fenced GPU, once all ranks are fenced."""
        if self.runner is not None and generation == self.generation:
            self.runner.abort()

    @ray.method(concurrency_group="control", enable_task_events=False)
    def read_progress_of(self, progress_file: str, streams: Streams) -> Status:
        """The status of another rank on this node, which does not answer."""
        return read_status(Path(progress_file), streams)

    @ray.method(concurrency_group="control")
    def kill(self, pid: int) -> None:
        """Kills another process on this node."""
        os.kill(pid, signal.SIGKILL)

    @ray.method(concurrency_group="checkpoint")
    def reserved(self, generation: int) -> None:
        """Returns once there is memory for snapshots."""
        self._require_equal(generation)
        self.runner.reservation.result()

    @ray.method(concurrency_group="checkpoint")
    def write(self, generation: int, folder: str, step: int) -> WrittenShards | str:
        """Writes this rank's part of the snapshot of `step` steps while training continues. If storage fails, returns
        why; that does not end the run."""
        self._require_equal(generation)
        try:
            return self.runner.write(folder, step)
        except PentadError as error:
            return str(error)

    @ray.method(concurrency_group="control")
    def give_up_save(self, generation: int, step: int) -> None:
        """Gives up a `write` or `commit` of `step` steps that hangs: training no longer waits for it, and it publishes
        nothing if it returns after all."""
        with self.changing:
            self._require_equal(generation)
            self.given_up = step
        self.runner.snapshots.give_up(step)

    @ray.method(concurrency_group="checkpoint")
    def commit(
        self, generation: int, folder: str, step: int, shards: list[dict[str, Any]], meta: dict[str, Any]
    ) -> Committed:
        """Commits a checkpoint while training continues. Commits nothing after a fence."""
        self.given_up, path = -1, location(folder)
        found = [checkpoint.Shard.from_plain(shard) for shard in shards]
        publishing, saved = partial(self._publishing, generation, step), list(checkpoint.committed(path.parent))
        checkpoint.commit(path, step=step, shards=found, meta=meta, publishing=publishing)
        return Committed(checkpoint.fingerprint(path), [*saved, step])

    @ray.method(concurrency_group="checkpoint")
    def prune(self, generation: int, folder: str, keep: int, pinned: tuple[int, ...]) -> str:
        """Deletes checkpoints older than the one in `folder`, except the newest `keep` and those of `pinned` steps,
        while training continues; returns why one could not be deleted, or ''. Raises PentadError if the manifest in
        `folder` cannot be read back."""
        self._require_equal(generation)
        path, reason = location(folder), ""
        try:
            delete_older(path.parent, keep, pinned)
        except (OSError, PentadError) as error:
            reason = str(error)
        checkpoint.read_manifest(path)
        return reason

    @ray.method(concurrency_group="checkpoint")
    def discard(self, generation: int, folder: str) -> None:
        """Deletes the files of a checkpoint that will not be committed: the next one needs the space."""
        self._require_equal(generation)
        with suppress(PentadError):
            discard(location(folder))

    @ray.method(concurrency_group="copies")
    def serve_copies(self, host: str, token: bytes) -> str:
        """Starts a server that accepts and gives out copies of ranks' states, and returns its 'HOST:PORT' once memory
        for copies of its own state has been reserved, or not: `replicate` then says so."""
        server = self._serve(host, token)
        with suppress(PentadError):
            self.runner.reservation.result()
        return server.address

    def _serve(self, host: str, token: bytes) -> CopyServer:
        self.copy_server = self.copy_server or CopyServer(self.copies, host, token)
        return self.copy_server

    @ray.method(concurrency_group="train")
    def hand_over(
        self, generation: int, key: CopyKey, parts: dict[int, ParamShard], neighbours: int, host: str, token: bytes
    ) -> str | None:
        """Offers what this rank holds of the state to others, after a fence. If there is no memory for it, returns
        why."""
        self._serve(host, token)
        try:
            self.call(generation, "hand_over", key, parts, neighbours)
        except PentadError as error:
            return str(error)
        return None

    @ray.method(concurrency_group="copies")
    def replicate(self, generation: int, key: CopyKey, address: str, token: bytes) -> SentPart | str:
        """Stores the snapshot of this rank's part here and in the process at `address` while training continues. If
        that process does not accept it, returns why; that does not end the run."""
        self._require_equal(generation)
        try:
            return self.runner.replicate(key, address, token)
        except PentadError as error:
            return str(error)

    @ray.method(concurrency_group="control")
    def commit_copy(self, key: CopyKey) -> None:
        """Commits a copy: all its parts are in place."""
        self.copies.commit(key)

    @ray.method(concurrency_group="control")
    def forget_copies(self, key: CopyKey | None = None) -> None:
        """Drops one copy, or all if `key` is None."""
        self.copies.forget(key)

    @ray.method(concurrency_group="control")
    def held_copies(self) -> tuple[str, list[HeldPart]]:
        """The address at which this process gives out copies ('' if it does not), and the parts that it holds."""
        return self.copy_server.address if self.copy_server else "", self.copies.held()

    @ray.method(concurrency_group="train")
    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()
        if self.copy_server is not None:
            self.copy_server.close()
        self.progress_file.unlink(missing_ok=True)

    @ray.method(concurrency_group="control")
    def place(self) -> WorkerPlace:
        node, ip = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return WorkerPlace(node, ip, self._gpu_number(), os.getpid(), str(self.progress_file))

    @ray.method(concurrency_group="train")
    def warm(self, device: str) -> WorkerPlace:
        """The place of a spare, which is not a rank yet, once it has imported all that a rank needs and initialized the
        CUDA driver. Takes no GPU memory."""
        pkgutil.resolve_name(self.runner_class)
        if device == "cuda":
            pkgutil.resolve_name("pentad.workers.runtime.rank_setup:warm_up")()
        return self.place()

    @ray.method(concurrency_group="control")
    def take(self, pid: int, gpu: int) -> WorkerPlace:
        """Gives a spare the GPU of the process `pid` on its node, once that process is gone and its memory with it;
        `gpu` -1: it needs none."""
        while gpu >= 0 and _exists(pid):
            time.sleep(POLL_SECONDS)
        self.gpu = gpu
        return self.place()

    @ray.method(concurrency_group="train")
    def begin(self, pid: int, gpu: int, generation: int, plan: Plan, rank: int, bundles: tuple[int, ...]) -> str:
        """`take` and `start` of a spare, while the other ranks are still being fenced for this generation."""
        self.take(pid, gpu)
        return self.start(generation, plan, rank, bundles, keep=False)

    @ray.method(concurrency_group="control")
    def rank_placement(self, plan: Plan, version: str) -> RankPlacement:
        """This worker's placement, for a driver with this `plan` and `version` of pentad that may adopt it."""
        fits = self.plan == plan and version == release()
        token = self.copy_server.token if self.copy_server else None
        hosts = self.plan.hosts if self.plan is not None else ()
        return RankPlacement(self.place(), self.generation, self.rank, self.bundles, fits, token, hosts)

    @ray.method(concurrency_group="control")
    def folder_problem(self, folder: str) -> str | None:
        """Why the folder of a run's checkpoints cannot be accessed from here; None if it can."""
        return access_problem(location(folder))

    @ray.method(concurrency_group="control", enable_task_events=False)
    def status(self) -> Status:
        """The rank's status; step -1 until `start` has created the runner."""
        leaving, of_node = self.notice.text, self.notice.of_node
        if self.runner is None or not self.progress_file.exists():
            return Status(self.generation, -1, "", 0.0, leaving=leaving, node_leaving=of_node)
        state = self.runner.position() or read_progress(self.progress_file)
        found = status_of(state, self.streams)
        return found._replace(gpu=self._telemetry(), chunks=activity.chunks, leaving=leaving, node_leaving=of_node)

    @ray.method(concurrency_group="control", enable_task_events=False)
    def clock(self) -> float:
        """This node's monotonic seconds."""
        return time.monotonic()

    @ray.method(concurrency_group="control")
    def gpu_now(self) -> GpuState | None:
        return read_gpu(self._gpu_number())

    @contextmanager
    def _publishing(self, generation: int, step: int) -> Iterator[None]:
        """Keeps the generation from ending during the block. Raises StaleGeneration if it has ended, and PentadError if
        the checkpoint of `step` steps was given up."""
        with self.changing:
            self._require_equal(generation)
            if step == self.given_up:
                raise PentadError(f"the checkpoint of step {step} was given up before it was committed")
            yield

    def _gpu_number(self) -> int:
        """The number of the GPU that this worker was started on or has taken; -1 without one, or if the GPU has a name
        instead, like a MIG instance."""
        return next((int(gpu) for gpu in ray.get_gpu_ids() if str(gpu).isdecimal()), self.gpu)

    def _preload(self) -> None:
        if not any(Path("/dev").glob("nvidia[0-9]*")):  # only kernels for GPUs need the meta device
            defer_meta_kernels()
        with suppress(Exception), gc_paused():  # `start` raises the error again
            pkgutil.resolve_name(self.runner_class)

    def _telemetry(self) -> GpuState | None:
        """A reading of the GPU, renewed at most every GPU_SECONDS because it is slow."""
        if self.gpu >= 0 and time.monotonic() > self.gpu_read + GPU_SECONDS:
            self.gpu_read = time.monotonic()
            self.gpu_state = read_gpu(self.gpu)
        return self.gpu_state


# A restarted actor would have lost its state and its communicators, so Ray must not restart one.
Actor = ray.remote(
    num_cpus=1,
    max_restarts=0,
    max_task_retries=0,
    concurrency_groups={"train": 1, "control": 2, "checkpoint": 1, "copies": 1},
)(Worker)


def _exists(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def _visible_index(gpu: int) -> int:
    """The CUDA index of this worker's GPU: its position among the GPUs visible to Ray on this node."""
    name = str(gpu if gpu >= 0 else ray.get_gpu_ids()[0])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(name) if visible else int(name)


def _device_name(gpu: int) -> str:
    import torch  # the runner has imported it by now; the driver does not need it

    return torch.cuda.get_device_name(gpu)
