"""One rank from its plan to its results: builds the stages, joins the world, runs steps, saves, and starts over."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import units_of
from pentad.schedules.passes.validation import is_validated
from pentad.schedules.simulate.timeline import Span
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.workers.checkpoint import checkpoint
from pentad.workers.custom.loader import initial_values as own_values
from pentad.workers.custom.stage import CustomStage
from pentad.workers.data.batch_loader import BatchLoader
from pentad.workers.data.sources import open_data
from pentad.workers.model.stage import Stage
from pentad.workers.model.stage_protocol import StageProtocol
from pentad.workers.parallel.groups import abort_all, columns, connect, meet, serve
from pentad.workers.params.param_buffers import buffers_of
from pentad.workers.params.parameters import DTYPES, Parameters, create, cut_of
from pentad.workers.params.sharded_state import file_of, named, read_whole
from pentad.workers.runtime.abort import Aborted, SocketRegistry, run_out
from pentad.workers.runtime.executor import Executor
from pentad.workers.runtime.optimizer_step import Barrier, PostValidated, Taken
from pentad.workers.runtime.progress_file import ProgressFile, State
from pentad.workers.runtime.results import RankSnapshot, StepResult
from pentad.workers.runtime.streams import CudaStreams, HostStreams, Lanes, Times
from pentad.workers.runtime.zero import ZeroShards, collect
from pentad.workers.transport.norm_reducer import NormReducer
from pentad.workers.transport.p2p import Transport
from pentad.workers.transport.p2p_ipc import IpcTransport, channels
from pentad.workers.transport.stream_flags import StreamFlags

CALLS_KEPT = 4  # whose results the driver may ask for again


class Runner:
    """The worker's side of the driver's calls: __init__, serve (rank 0), connect, restore, run..., save, close.

    `fence` may come at any time from another thread. After it `leave` says where the rank stands, and a new Runner
    made with `before` takes over the parameters that its own plan has as well; those of a `blank` one are to be
    received. A rank computes on GPU number `gpu` of its host, or on one CPU thread.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        board: Path,
        generation: int = 1,
        gpu: int = 0,
        before: Runner | None = None,
        *,
        blank: bool = False,
    ) -> None:
        self.plan, self.rank, self.at = plan, rank, plan.mesh.coordinates(rank)
        self.device = torch.device(plan.device, gpu) if plan.device == "cuda" else torch.device("cpu")
        self._prepare()
        self.generation = generation
        self.board: ProgressFile = ProgressFile(board, generation) if before is None else before.board.renew(generation)
        held = before.parameters if before is not None and before.plan.layers == plan.layers else {}
        held = {at: parameters for at, parameters in held.items() if _fits(plan, rank, at, parameters)}
        self.parameters: dict[ParamShard, Parameters] = {
            at: held[at] if at in held else _create(plan, at, self.device, rank, blank=blank)
            for at in plan.shares_of(rank)
        }
        kind = Stage if plan.model.custom is None else CustomStage
        self.stages: dict[int, StageProtocol] = {
            s: kind(plan, s, buffers_of(plan, rank, s, self.parameters), rank) for s in plan.stages_of(rank)
        }
        if before is not None:  # its other buffers make room
            before.stages.clear()
            before.shards.clear()
        self.shards: ZeroShards = ZeroShards(plan, rank, self.stages)
        length, fingerprint = plan.batch.length, plan.fingerprint
        corpus = open_data(plan.data, plan.model.vocab, length, plan.cache, fingerprint=fingerprint)
        self.feed = BatchLoader(plan, rank, corpus, self.device)
        self.kept: deque[list[StepResult]] = deque(maxlen=CALLS_KEPT)
        self.accounts: list[StepResult] = []  # of steps that are complete, for the next `run` to return
        # Steps in the weights; -1: they are nobody's yet.
        self.version: int = before.version if before is not None and set(held) >= set(self.parameters) else -1
        self.fenced = False
        self.reached = (0, -1, 0.0)  # steps behind the host, counter, and since when
        self.store: dist.TCPStore | None = None
        self.wires: SocketRegistry | None = None
        self.signals: StreamFlags | None = None
        self.transport: Transport | IpcTransport | None = None
        self.executor: Executor | None = None
        self.lanes: Lanes | None = None

    def serve(self, host: str, timeout_seconds: float) -> str:
        """Where on this machine, which has the IP address `host`, all ranks are to `connect`; asked of rank 0."""
        self.store = serve(host, self.plan.mesh.size, timeout_seconds)
        return f"{host}:{self.store.port}"

    def connect(self, address: str, timeout_seconds: float) -> None:
        """Joins the other ranks at 'HOST:PORT', where rank 0 does `serve`."""
        if self.device.type == "cpu":
            self.wires = SocketRegistry(int(address.rpartition(":")[2]))
        size = self.plan.mesh.size
        with self._unless_fenced():
            store, self.store = self.store or meet(address, size, timeout_seconds), None
            self.groups = connect(self.plan, self.rank, store, timeout_seconds, self.device, self.generation)
            for stage in self.stages.values():
                stage.join(self.groups.inner)
            end = self._end(address, timeout_seconds)
            if self.wires is not None:
                self.wires.exchange(store, self.rank, size)
        stream = self.plan.program.streams[self.at.pp]
        lanes = {part.lane for part in units_of(stream)}
        self.lanes = CudaStreams(self.device, lanes) if self.device.type == "cuda" else HostStreams()
        self.transport = self._transport(store)
        self.executor = Executor(
            stream, self.stages, self.groups, self.transport, self.lanes, self.board, end, self.shards
        )
        end.version.fill_(self.version)

    def restore(self, folder: str | None, step: int = 0) -> None:
        """Fills weights and optimizer state from a checkpoint of `step` steps; without one the first values stay."""
        if folder is not None:
            found = checkpoint.open_checkpoint(Path(folder))
            for held in self.parameters.values():
                for kind, flat in held.state().items():
                    for local, span, values in held.pieces(flat):
                        # one at a time: a shard's rank need not have room for more
                        whole = read_whole(found, f"{kind}.{local.tensor.like or local.name}", local.tensor.shape)
                        values.copy_(local.of(whole).flatten()[span])
                held.refresh()
                for name, bias in held.biases.named.items():
                    bias.copy_(read_whole(found, f"model.{name}", tuple(bias.shape)))
        self._begin(step)

    def receive(self, sources: Mapping[ParamShard, int], step: int) -> None:
        """Takes the state of `step` steps from living copies: `sources[share]` is the rank of the mesh that gives it.

        All holders of a share take part, those that have it already included.
        """
        if self.version != step:
            self.version = -1  # until all of it is here
        with self._unless_fenced():
            for at, held in sorted(self.parameters.items()):  # mirrors hold the same stages in another order
                if at in sources:
                    for part in held.given():
                        dist.broadcast(part, sources[at], group=self.groups.holders[at.stage][at.experts])
                    held.refresh()
        self._begin(step)

    def run(self, first_step: int, count: int, more: bool = False) -> list[StepResult]:
        """Runs steps `first_step` to `first_step + count - 1`, and accounts for those that are complete.

        `more`: another run follows, maybe of no step. The newest step then stays open: nothing waits for its end or
        its norm, and a later run accounts for it. Raises Fenced when the generation ends meanwhile.
        """
        assert self.executor is not None
        with self._unless_fenced():
            for step in range(first_step, first_step + count):
                self.executor.run(step, self.feed(step))
            if more:
                self._settle(left_open=1)
            else:
                self._finish()
            results, self.accounts = self.accounts, []
            self.kept.append(results)
            return results

    def save(self, folder: str, step: int, shares: tuple[ParamShard, ...] | None = None) -> list[dict]:
        """Writes shares (those that this rank owns, if none are named); the driver commits the manifest.

        `step` steps are done, once that which is open is.
        """
        if self.lanes is not None and self.lanes.steps:
            with self._unless_fenced():
                self._finish()
        written, failed = [], list[PentadError]()
        for at, held in sorted(self.parameters.items()):
            owner = self.plan.owner(at)
            if shares is not None and held.cut.parts == 1:
                owner = self.rank if at in shares else -1
            with (
                self._unless_fenced() if held.cut.parts > 1 else nullcontext()
            ):  # alone it saves after a generation too
                state = collect(held, owner, self.rank, self.groups.holders[at.stage][at.experts])
            try:
                if state is not None:
                    tensors = named(held, state, at)
                    written.append(checkpoint.write_shard(Path(folder), file_of(self.plan, at), tensors).plain())
            except PentadError as error:  # raised when the other holders have all they wait for
                failed.append(error)
        if failed:
            raise failed[0]
        return written

    def fence(self) -> None:
        """Ends the generation: lets no step count that has not been taken, and frees the train thread. From any thread.

        A GPU's train thread is free after `abort`, if it waits for a collective operation.
        """
        self.fenced = True
        if self.executor is not None:
            self.executor.fenced = True
            if isinstance(self.lanes, CudaStreams):
                run_out(self.executor, self.signals, self.lanes, self._longest())
        if self.wires is not None:
            self.wires.cut()

    def position(self) -> State | None:
        """How far a GPU has come, which runs behind its host; None on a CPU, whose board says it. From any thread."""
        if not isinstance(self.lanes, CudaStreams) or self.executor is None or self.executor.fenced:
            return None
        reached = self.lanes.reached()
        if reached is None:
            return None
        behind, part = reached
        counter = next(i for i, unit in enumerate(self.executor.stream) if part in unit.parts)
        if (behind, counter) != self.reached[:2]:
            self.reached = (behind, counter, time.monotonic())
        return State(self.generation, self.executor.step - behind, counter, self.reached[2])

    def abort(self) -> None:
        """Ends the collective operations of a GPU. Only when every rank is still: then nothing moves any more."""
        if self.device.type == "cuda" and dist.is_initialized():
            abort_all()

    def leave(self) -> RankSnapshot:
        """After `fence`, from the train thread: gives the generation's communicators up and says where this rank
        stands."""
        norm, ready = 0.0, False
        if self.executor is not None:
            end = self.executor.end
            self.version, norm, ready = int(end.version), float(end.norm), end.ready
            self._settle()
        self.close()
        known = (result for call in (*self.kept, self.accounts) for result in call)
        results = tuple(result for result in known if result.step < self.version)
        return RankSnapshot(self.version, ready, norm, results)

    def advance(self, norm: float) -> None:
        """Takes the step whose gradients were whole when the generation ended, with its global norm."""
        assert self.executor is not None
        self.executor.end.advance(self.version, norm)
        self.version = int(self.executor.end.version)

    def close(self) -> None:
        """Leaves the world."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.executor is not None:
            self.executor.end.close()
        if self.transport is not None:
            self.transport.close()
            self.transport = None

    def _prepare(self) -> None:
        if self.device.type == "cpu":
            torch.set_num_threads(1)
            return
        # A lane that waits must not share a hardware queue with another one, or that waits too: a program has
        # more lanes than the 8 queues of the default.
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
        # That a member is gone is for the driver to find out; by default torch then ends the process, or keeps a
        # communicator of several hosts for a minute to write down what it did last, and who gives it up with it.
        for name in ("ASYNC_ERROR_HANDLING", "DUMP_ON_TIMEOUT", "ENABLE_MONITORING"):
            os.environ[f"TORCH_NCCL_{name}"] = "0"
        os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1"
        torch.cuda.set_device(self.device)

    def _end(self, address: str, timeout_seconds: float) -> Barrier | PostValidated:
        if not is_validated(self.plan.program):
            return Barrier(self.plan, self.groups, self.stages)
        mesh, firsts = self.plan.mesh, columns(self.plan.mesh)
        pipeline = firsts.index(mesh.move(self.rank, pp=0))
        courier = NormReducer(meet(address, mesh.size, timeout_seconds), pipeline, self.at.pp, len(firsts), mesh.pp)
        return PostValidated(self.plan, self.rank, self.stages, courier)

    def _transport(self, store: dist.TCPStore) -> Transport | IpcTransport:
        shape = (self.plan.stream_tokens, self.plan.model.hidden)
        dtype = DTYPES[self.plan.dtype]
        if self.plan.transport == "peer":
            count = 2 * len(channels(self.plan))
            self.signals = StreamFlags(store, self.rank, self.plan.mesh.size, count, self.generation)
            return IpcTransport(self.plan, self.rank, shape, dtype, self.device, store, self.signals)
        return Transport(self.groups, self.plan.mesh, shape, dtype, self.device)

    def _begin(self, step: int) -> None:
        """`step` steps are in the weights from here on."""
        self.version = step
        for held in self.parameters.values():
            held.refresh()  # they may be those of a step that was taken ahead, and never for good
        if self.executor is not None:
            self.executor.end.version.fill_(step)

    def _finish(self) -> None:
        """Completes the open step: its norm is heard, and nothing is under way any more."""
        assert self.lanes is not None and self.executor is not None
        self.executor.end.finish(self.executor.refuse_if_fenced)
        self.lanes.near(self.executor.refuse_if_fenced, ahead=0)
        self._settle()

    def _settle(self, left_open: int = 0) -> None:
        """Waits for all steps but the newest `left_open` ones and accounts for them."""
        assert self.lanes is not None and self.executor is not None
        times, taken = self.lanes.collect(left_open, self.executor.refuse_if_fenced), self.executor.end.taken
        self.accounts += [self._result(step, spans) for step, spans in zip(taken, times, strict=False)]
        del taken[: len(times)]

    def _longest(self) -> float:
        """Seconds of the longest instruction that computes, in the newest step that is known. From any thread."""
        newest = [call[-1] for call in tuple(self.kept) if call][-1:]
        spans = [span for result in newest for span in result.spans if span.lane == "compute"]
        return max((span.end - span.start for span in spans), default=0.0)

    def _result(self, taken: Taken, spans: Times) -> StepResult:
        assert self.executor is not None
        norm = float(taken.norm)
        return StepResult(
            step=taken.step,
            losses=dict(enumerate(taken.losses.tolist())),
            grad_norm=norm,
            learning_rate=self.plan.optimizer.rate(taken.step),
            skipped=not math.isfinite(norm),
            spans=self._spans(taken.step, spans),
            host_seconds=self.executor.host_seconds.pop(taken.step, 0.0),
            instructions=len(spans),
            peak_bytes=torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0,
        )

    def _spans(self, step: int, times: Times) -> tuple[Span, ...]:
        spans = []
        for part, start, end in times:
            peer = self.plan.mesh.move(self.rank, pp=part.peer) if part.peer >= 0 else -1
            where = (part.op.value, part.stage, part.microbatch, peer)
            spans.append(Span(step, self.rank, part.lane, str(part.key), *where, start, end))
        return tuple(spans)

    @contextmanager
    def _unless_fenced(self) -> Iterator[None]:
        """Whatever goes wrong in a generation that is over goes wrong because it is over, and what goes wrong ends it:
        a call queued behind would go on in the middle of a step, and add to gradients that only lack their norm."""
        self._refuse_if_fenced()
        try:
            yield
            self._refuse_if_fenced()
        except Exception as error:
            if self.fenced:
                raise Aborted(str(error)) from None
            self.fenced = True
            raise

    def _refuse_if_fenced(self) -> None:
        if self.fenced:
            raise Aborted


def _create(plan: Plan, at: ParamShard, device: torch.device, rank: int, *, blank: bool) -> Parameters:
    own = plan.model.custom
    initial = None if own is None or blank else own_values(own, plan.seed, *plan.layers[at.stage])
    return create(plan, at, device, rank=rank, blank=blank, initial=initial)


def _fits(plan: Plan, rank: int, at: ParamShard, held: Parameters) -> bool:
    """Whether a rank can go on with the parameters of an earlier plan's share."""
    return at in plan.shares_of(rank) and held.cut == cut_of(plan, at, rank)
