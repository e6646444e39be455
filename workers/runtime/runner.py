"""One rank of a run: what the driver calls, and the step loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.batch import batch_of
from pentad.schedules.spec.plan import ParamShard, Plan, ShardPart
from pentad.workers.abort import AbandonableThread, Fence, SocketRegistry, abandonable
from pentad.workers.background import awaited, in_background
from pentad.workers.checkpoint.location import location
from pentad.workers.checkpoint.shards import write_shards
from pentad.workers.checkpoint.snapshot import Snapshots
from pentad.workers.host_memory import HostMemory, Reservation
from pentad.workers.integrity.rank_check import check_rank
from pentad.workers.integrity.result import RankCheck
from pentad.workers.lanes.gpu_timer import spans_of
from pentad.workers.lanes.progress_file import Progress, ProgressFile
from pentad.workers.lanes.streams import CudaStreams
from pentad.workers.parallel.expert_parallel import ExpertSlots
from pentad.workers.parallel.process_groups import abort_nccl, connect, destroy_groups, join_store, start_store
from pentad.workers.replication.parts import CopyKey, HostCopies
from pentad.workers.replication.replicator import Replicator, SentPart
from pentad.workers.replication.source import CopySource
from pentad.workers.runtime import rank_setup
from pentad.workers.runtime.executor import Executor
from pentad.workers.runtime.gpu_position import GpuPosition
from pentad.workers.runtime.rank_program import RankProgram
from pentad.workers.runtime.rank_state import RankState
from pentad.workers.runtime.results import (
    EvalResult,
    Evaluation,
    RankSnapshot,
    StepResult,
    WrittenShards,
    longest_instruction,
)
from pentad.workers.runtime.state_transfer import StateReader, hand_over, share
from pentad.workers.runtime.step_profiler import StepProfiler
from pentad.workers.runtime.step_result import step_result
from pentad.workers.runtime.zero import ZeroShards

CALLS_KEPT = 4  # recent calls whose results the driver may ask for again


class Runner:
    """A rank for one generation. Order of calls: serve (rank 0), begin_reading if a copy is restored, connect, restore
    or receive, run and snapshot, close.

    A separate thread calls `write` for every `snapshot`, and any thread may call `fence` at any time. `leave` then
    returns a snapshot of the rank, and the Runner of the next generation takes over the state of `previous`; what it
    lacks is zeros until `restore` or `receive`.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        progress: Path,
        generation: int = 1,
        gpu: int = 0,
        previous: Runner | None = None,
        *,
        copies: HostCopies | None = None,
    ) -> None:
        self.plan, self.rank, self.generation = plan, rank, generation
        self.device, self.fence_flag = rank_setup.prepare_device(plan.device, gpu, graphs=plan.cuda_graphs), Fence()
        rank_setup.use_kernels(plan)
        self.progress: ProgressFile = previous.progress if previous else ProgressFile(progress, generation)
        self.progress.begin_generation(generation)
        self.state: RankState = RankState(plan, rank, self.device, previous.state if previous else None)
        self.stages = rank_setup.make_stages(plan, rank, self.state.parameters, self.state.frozen, self.state.histories)
        if previous is not None:  # free its other buffers before allocating more
            previous.stages.clear()
            previous.shards.clear()
        self.shards: ZeroShards = ZeroShards(plan, rank, self.stages)
        self.offload_memory: HostMemory | None = previous.offload_memory if previous else None
        self.snapshots: Snapshots = Snapshots(self.device, in_place=plan.host_optimizer, check=self.fence_flag.check)
        self.copies = copies if copies is not None else HostCopies()
        self.replicator = Replicator(self.copies, rank, self.device)
        self.reader = StateReader(self.state, self.copies, self.fence_flag.check)
        self.programs = [RankProgram.of(plan, number, rank) for number in range(len(plan.programs))]
        self.load_batch = rank_setup.make_batch_loader(plan, rank, self.device)
        self.eval_loader = rank_setup.make_eval_loader(plan, self.load_batch)
        self.data_wait_seconds, self.profiler = dict[int, float](), StepProfiler(plan.profile_steps, self.device)
        self.newest_losses: tuple[int, tuple[float, ...]] = (-1, ())  # step and losses of the newest CommittedStep
        calls = (*previous.recent_calls, previous.unreported) if previous else ()
        self.recent_calls: deque[list[StepResult]] = deque(calls, maxlen=CALLS_KEPT)
        self.unreported: list[StepResult] = []  # of completed steps, to be returned by the next `run`
        self.rejected: int | None = None  # the first step to be run again, with more expert slots
        self.expert_slots: int = previous.expert_slots if previous else 0  # as in the newest generation
        self.evaluations: deque[Evaluation] = deque(previous.evaluations if previous else (), maxlen=CALLS_KEPT)
        self.gpu_position = GpuPosition()
        reserve = partial(rank_setup.reserve, plan, self.device, self.snapshots, self.replicator, self.state.files())
        self.reservation: Reservation = in_background(partial(reserve, previous.reservation if previous else None))
        self.store: dist.TCPStore | None = None
        self.thread = AbandonableThread(self.fence_flag) if self.device.type == "cpu" else None
        self.sockets: SocketRegistry | None = None
        self.executor: Executor | None = None

    def serve(self, host: str, timeout_seconds: float) -> str:
        """On rank 0, whose IP address is `host`: starts the store; returns 'HOST:PORT' for `connect`."""
        self.store = start_store(host, self.plan.mesh.size, timeout_seconds)
        return f"{host}:{self.store.port}"

    def begin_reading(self, source: CopySource) -> None:
        """Starts reading this rank's part of a copy in the memory of ranks; `restore_copy` waits for it."""
        self.reader.begin(source)

    @abandonable
    def connect(self, address: str, timeout_seconds: float) -> None:
        """Connects to the other ranks through the store at 'HOST:PORT'."""
        if self.device.type == "cpu":
            self.sockets = SocketRegistry(int(address.rpartition(":")[2]))
        plan, size, rank = self.plan, self.plan.mesh.size, self.rank
        with self.fence_flag.guard():
            store, self.store = self.store or join_store(address, size, timeout_seconds), None
            groups = connect(plan, rank, store, timeout_seconds, self.device, self.generation)
            flags = rank_setup.make_flags(plan, rank, store, self.generation)
            groups = rank_setup.with_peer_rows(plan, groups, store, self.device, flags)
            if (slots := groups.layers.ep.slots) is not None:
                slots.agree(min(self.expert_slots, plan.slice_tokens), groups.world)
                self.expert_slots = slots.tokens
            for stage in self.stages.values():
                stage.join(groups.layers)
            end = rank_setup.make_optimizer_step(
                plan, groups, self.stages, self.state.spikes, self._snapshots, flags, address, timeout_seconds
            )
            end.version.fill_(self.state.version)
            for each in self._snapshots:
                each.version = self.state.version
            if self.sockets is not None:
                self.sockets.exchange(store, rank, size)
            given = plan, groups, self.stages, self.shards, self.progress, end, self.fence_flag.check
            self.executor = rank_setup.make_executor(*given, store, self.device, flags)

    @abandonable
    def restore(self, folder: str | None, step: int = 0, optimizer: bool = True) -> PentadError | None:
        """Reads the state after `step` steps from a checkpoint (without `optimizer`, only its weights); without a
        checkpoint, starts from the initial values. All ranks must call it. Returns why this rank failed: the checkpoint
        is Damaged, or Unreadable for now. If any rank fails, none has a state."""
        self.reader.end()
        if folder is not None:
            return self._share(step, partial(self.reader.read, folder, optimizer=optimizer))
        self.state.initialize()
        self._set_version(step)
        return None

    @abandonable
    def restore_copy(self, source: CopySource) -> PentadError | None:
        """Reads the state from a copy in the memory of ranks, just as `restore` does from a checkpoint."""
        return self._share(source.key.step, partial(self.reader.read_copy, source))

    @abandonable
    def receive(self, sources: Mapping[ShardPart, int], step: int) -> None:
        """Receives the state after `step` steps: each part of a parameter shard from rank `sources[part]` of the mesh.
        All holders of these parts must call it, including those that already have the state."""
        if self.state.version != step:
            self.state.version = -1  # until all of it has arrived
        with self.fence_flag.guard():
            self.state.receive(self._connected.groups, sources)
        self._set_version(step)

    @abandonable
    def run(
        self, first_step: int, count: int, more: bool = False, skipped_batches: Sequence[tuple[int, int]] = ()
    ) -> list[StepResult]:
        """Runs `count` steps and returns the results of all steps completed since the last call.

        `more`: another call follows, possibly of no steps. The newest step is then left open: nothing waits for its end
        or its norm, and a later call returns its result. With expert slots none is left open: steps that had too few
        are run again here. `skipped_batches` are left out (see `batch_of`). Raises Aborted if the generation ends.
        """
        assert self.state.version >= 0, "restore or receive comes first"
        self.offload_memory = self._connected.activations.reserve(self.offload_memory)
        with self.fence_flag.guard():
            self._issue(range(first_step, first_step + count), skipped_batches)
            if more and self._slots is None:
                self._collect_results(num_open=1)
            else:
                self._finish_step()
            while (first := self.rejected) is not None:
                self._grow_slots()
                self._issue(range(first, first_step + count), skipped_batches)
                self._finish_step()
            results, self.unreported = self.unreported, []
            self.recent_calls.append(results)
            return results

    @abandonable
    def evaluate(self, step: int) -> Evaluation:
        """Evaluates the weights after `step` steps, none of which is open, on every data set of the plan. Changes no
        state. Raises Aborted if the generation ends."""
        executor, loader, began = self._connected, self.eval_loader, time.monotonic()
        assert loader is not None and self.plan.eval is not None
        with self.fence_flag.guard():
            assert not executor.lanes.has_unread_steps
            while True:
                executor.losses.clear()
                for number, at in enumerate(loader.rounds):
                    executor.evaluate(self.programs[-1], step, number, at.data_set, loader(at))
                executor.lanes.finish(self.fence_flag.check)
                times = executor.lanes.read_times(self.fence_flag.check)
                if self._slots is None or self._slots.sufficed(executor.groups.world, self.fence_flag.check):
                    break
                self._grow_slots()
            self.progress.write(step, -1, self.programs[-1].number)
            found = zip(self.plan.eval.data_sets, executor.losses.read(), loader.counts, strict=True)
            results = tuple(EvalResult(each.name, *sums, count) for each, sums, count in found)
            self.evaluations.append(Evaluation(step, results, seconds=time.monotonic() - began))
            return self.evaluations[-1]._replace(spans=spans_of(self.plan, self.rank, step, times[-1]))

    @abandonable
    def check(self, step: int) -> RankCheck:
        """Digests of the state after `step` steps, none of which is open, and of results that this rank computes.
        Leaves the run bit-identical. All ranks must call it; raises Aborted if the generation ends."""
        gathered = partial(self.shards.gathered, self._connected.groups)
        with self.fence_flag.guard():
            found = check_rank(self.plan, self.rank, step, self.state.held, self.stages, gathered)
            if self._slots is not None:
                self._slots.overflows.zero_()  # only a step's own tokens count
            return found

    def snapshot(self, step: int) -> None:
        """Starts copying this rank's part of the state after `step` steps, the last of which may be open, to host
        memory. Training continues meanwhile: only the next update waits for the copy. Errors are raised by `write`."""
        with self.snapshots.failing():
            awaited(self.reservation, self.fence_flag.check)
            self.snapshots.request(step, self.state.files(), self._connected.optimizer_step.version)

    def write(self, folder: str, step: int) -> WrittenShards:
        """Waits for the snapshot of `step` steps and writes it; the driver commits it. From a thread of its own. Raises
        PentadError if the disk is full or the driver has given the snapshot up, and Aborted if the generation ends; no
        file appears after that."""
        files, seconds = self.snapshots.take(step, self.fence_flag.check)
        try:
            publishing = partial(self.snapshots.publishing, step, self.fence_flag.publishing)
            return WrittenShards(write_shards(location(folder), files, self.generation, publishing), seconds)
        finally:
            self.snapshots.release()

    def copy(self, step: int) -> None:
        """Like `snapshot`, for a copy in the memory of ranks; errors are raised by `replicate`."""
        with self.replicator.snapshots.failing():
            awaited(self.reservation, self.fence_flag.check)
            self.replicator.request(step, self.state.files(), self._connected.optimizer_step.version)

    def replicate(self, key: CopyKey, address: str, token: bytes) -> SentPart:
        """Waits for the snapshot that `copy` takes and stores it in this process and in the one at `address`. From a
        thread of its own."""
        return self.replicator.send(key, address, token, self.fence_flag.check)

    def hand_over(self, key: CopyKey, parts: Mapping[int, ParamShard], num_neighbours: int) -> None:
        """Puts what this rank holds of these shards where all ranks can read it (`restore_copy`). After `leave`."""
        hand_over(self.state, self.copies, key, parts, num_neighbours)

    def save(self, folder: str, step: int, param_shards: tuple[ParamShard, ...] | None = None) -> list[dict]:
        """Synchronously writes this rank's part of the state after `step` steps, including the open one, or all that it
        holds of the given parameter shards. Also works after `leave`. Returns the entries for the manifest."""
        if self._connected.lanes.has_unread_steps:
            self._finish_open_step()
        return write_shards(location(folder), self.state.files(param_shards), self.generation)

    def fence(self) -> None:
        """Ends the generation: no further step is committed, and the train thread is freed. From any thread.
        On a GPU, only `abort` frees a train thread that waits for a collective."""
        self.fence_flag.set()
        if (executor := self.executor) is not None and isinstance(executor.lanes, CudaStreams):
            executor.optimizer_step.cancel()  # first: a step that runs after the release must not be committed
            executor.transport.release()
            executor.lanes.progress.drain(longest_instruction(tuple(self.recent_calls)))
        if self.sockets is not None:
            self.sockets.shutdown()

    def position(self) -> Progress | None:
        """Where the GPU is in its program; None on a CPU, before `connect` and after `fence`. From any thread."""
        return None if self.executor is None or self.fence_flag.is_set else self.gpu_position.read(self.executor)

    def abort(self) -> None:
        """Aborts the collectives of a fenced GPU, once all ranks are fenced."""
        if self.device.type == "cuda" and dist.is_initialized():
            abort_nccl(self._release_graphs)

    def leave(self) -> RankSnapshot:
        """After `fence`, on the train thread: releases the communicators and returns a snapshot of this rank."""
        norm, ready = 0.0, False
        self.reader.end()
        if self.executor is not None:
            self._collect_results()  # and waits for all lanes
            end = self.executor.optimizer_step
            self.state.version, norm, ready = int(end.version), float(end.norm), end.is_ready
        self.close()
        calls, version = (*self.recent_calls, self.unreported), self.state.version
        results = tuple(result for call in calls for result in call if result.step < version)
        losses = self.newest_losses[1] if self.newest_losses[0] == version - 1 else ()
        return RankSnapshot(version, ready, norm, results, losses, tuple(self.evaluations))

    def advance(self, norm: float, losses: tuple[float, ...]) -> None:
        """After `leave`: commits the step that lacked only its global norm."""
        self._connected.optimizer_step.commit(self.state.version, norm, losses)
        self.state.version = int(self._connected.optimizer_step.version)

    def close(self) -> None:
        """Disconnects from the other ranks."""
        self.load_batch.close()
        for each in self._snapshots:
            each.close()
        if self.thread is not None:
            self.thread.close()
        self._release_graphs()
        if dist.is_initialized():
            destroy_groups(beside=self.thread is not None and self.fence_flag.is_set)
        if self.executor is not None:
            self.executor.close()

    def _release_graphs(self) -> None:
        if self.executor is not None and self.executor.graphs is not None:
            self.executor.graphs.release()

    @property
    def _connected(self) -> Executor:
        assert self.executor is not None, "connect comes first"
        return self.executor

    @property
    def _snapshots(self) -> tuple[Snapshots, Snapshots]:
        """The snapshots for checkpoints, and those for copies in memory."""
        return self.snapshots, self.replicator.snapshots

    def _share(self, step: int, read: Callable[[], PentadError | None]) -> PentadError | None:
        """Once all ranks have read their parts of the state of `step` steps, shares them among replicas."""
        with self.fence_flag.guard():
            problem = read()
            if share(self.state, self._connected.groups, has_read=problem is None):
                self._set_version(step)
        return problem

    def _set_version(self, version: int) -> None:
        self.state.set_version(version)
        while self.evaluations and self.evaluations[-1].step > version:
            self.evaluations.pop()
        for each in self._snapshots:
            each.version = version
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # peers may read the weights as soon as this call returns
        if self.executor is not None:
            self.executor.optimizer_step.version.fill_(version)

    @abandonable
    def _finish_open_step(self) -> None:
        with self.fence_flag.guard():
            self._finish_step()

    @property
    def _slots(self) -> ExpertSlots | None:
        return self._connected.groups.layers.ep.slots

    def _issue(self, steps: Iterable[int], skipped_batches: Sequence[tuple[int, int]]) -> None:
        for step in steps:
            began = time.monotonic()
            batch = self.load_batch(batch_of(step, skipped_batches), self.fence_flag.check)
            self.data_wait_seconds[step] = time.monotonic() - began
            self.profiler.run(self._connected, self.programs[batch.program], step, batch)

    def _grow_slots(self) -> None:
        """Enlarges the expert slots after tokens have found none; on all ranks alike."""
        assert self._slots is not None
        self._slots.grow(self.plan.slice_tokens)
        self.expert_slots, self.rejected = self._slots.tokens, None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # frees tensors that are now too small

    def _finish_step(self) -> None:
        """Completes the open step: validates it and waits for everything in flight."""
        executor = self._connected
        executor.validate()
        executor.lanes.throttle(self.fence_flag.check, ahead=0)
        self._collect_results()

    def _collect_results(self, num_open: int = 0) -> None:
        """Waits for all steps except the newest `num_open` and adds their results to the unreported ones."""
        committed = self._connected.optimizer_step.committed
        times = self._connected.lanes.read_times(self.fence_flag.check, num_open)
        for each, its_times in zip(committed, times, strict=False):
            if self.rejected is None and not each.has_room:
                self.rejected = each.step
            seen = self.data_wait_seconds.pop(each.step, 0.0), self.profiler.take(each.step)
            result = step_result(self._connected, self.plan, self.rank, each, its_times, *seen)
            if self.rejected is None:
                self.newest_losses = each.step, tuple(each.losses.tolist())
                self.unreported.append(result)
        del committed[: len(times)]
