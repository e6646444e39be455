"""The training state of one rank, and its transfer: from and to checkpoints and other ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from queue import SimpleQueue

import torch
import torch.distributed as dist

from pentad.schedules.passes.post_validation import has_post_validation
from pentad.schedules.spec.optimizer import PIECE_ELEMENTS
from pentad.schedules.spec.plan import ParamShard, Plan, ShardPart
from pentad.schedules.spec.zero_layout import replicas, zero_layout
from pentad.workers.checkpoint.checkpoint import Checkpoint
from pentad.workers.checkpoint.shards import read
from pentad.workers.custom.loader import initial_values
from pentad.workers.host_memory import HostMemory
from pentad.workers.linear.amax_history import AmaxHistory
from pentad.workers.parallel.process_groups import ProcessGroups
from pentad.workers.params import spike_filter
from pentad.workers.params.frozen import FrozenWeights, frozen_weights
from pentad.workers.params.host_state import StateStream
from pentad.workers.params.parameters import Parameters, create_parameters, initialize
from pentad.workers.params.sharded_state import (
    READ_BYTES,
    StateRead,
    checkpoint_tensors,
    read_full,
    shard_file,
    state_reads,
)
from pentad.workers.params.spike_filter import SpikeFilter
from pentad.workers.params.weight_shard import WeightShard
from pentad.workers.rank_waits import rank_waits

READERS = 8  # threads that read a checkpoint


class RankState:
    """The parameters and optimizer state of a rank, by parameter shard.

    `version` is the number of steps in them, -1 if they do not hold the state of a step. `frozen` are the weights that
    no step changes. `spikes` is the window of steps that later ones are compared with; `histories` has, by stage, the
    maxima that FP8 operands are scaled by, if the plan asks for them.
    """

    def __init__(self, plan: Plan, rank: int, device: torch.device, previous: RankState | None = None) -> None:
        """Takes over what an earlier generation of this rank has; the rest is zeros until it is read, received or
        initialized."""
        self.plan, self.rank, self.device = plan, rank, device
        self.spikes: SpikeFilter | None = previous.spikes if previous is not None else make_spike_filter(plan, device)
        self.state_stream: StateStream = previous.state_stream if previous is not None else StateStream(device)
        earlier = None if previous is None else (previous.plan, previous.frozen)
        self.frozen: FrozenWeights = frozen_weights(plan, rank, device, earlier)
        found: dict[ParamShard, Parameters] = {}
        if previous is not None and previous.plan.layers == plan.layers:
            found = {key: each for key, each in previous.parameters.items() if _fits(plan, rank, key, each)}
        complete = previous is not None and set(found) >= set(plan.param_shards_of(rank))
        self.version: int = previous.version if previous is not None and complete else -1
        self.parameters: dict[ParamShard, Parameters] = {
            key: found[key] if key in found else _create(plan, key, self.state_stream, rank)
            for key in plan.param_shards_of(rank)
        }
        made = ((stage, AmaxHistory.of(plan, stage, device)) for stage in plan.stages_of(rank))
        self.histories: dict[int, AmaxHistory] = {stage: each for stage, each in made if each is not None}
        for stage, history in self.histories.items():
            held = None if previous is None else previous.histories.get(stage)
            if held is not None and held.names == history.names:
                history.values.copy_(held.values)
                history.restored()

    @property
    def held(self) -> tuple[WeightShard, ...]:
        """All weights that this rank holds, trained and frozen."""
        return *self.parameters.values(), *self.frozen.values()

    def initialize(self) -> None:
        """Sets the state before the first step."""
        for shard, parameters in self.parameters.items():
            for tensor in parameters.state_tensors():
                tensor.zero_()
            initialize(parameters, self.plan.seed, self.device, _custom_values(self.plan, shard))
            if (history := self._history_of(shard)) is not None:
                history.load({})
        if self.spikes is not None:
            self.spikes.load(None)

    def set_version(self, version: int) -> None:
        """Declares the master weights to be those of `version` steps."""
        self.version = version
        for parameters in self.parameters.values():
            parameters.refresh()  # the compute weights may belong to a step that was never committed
        for history in self.histories.values():
            history.restored()

    def read(self, source: Checkpoint, *, optimizer: bool = True, shards: Collection[ParamShard] | None = None) -> None:
        """Reads weights and optimizer state, of these parameter shards or of all, from a verified checkpoint of any
        mesh; without `optimizer`, the optimizer state is zeroed.

        Several pieces are read at a time: of each tensor only the elements that this rank holds if the checkpoint has
        the same tp, else all of them. Raises PentadError if a tensor is missing or has another shape.
        """

        own = {shard: each for shard, each in self.parameters.items() if shards is None or shard in shards}
        reads = list[StateRead]()
        for part in chain.from_iterable(each.state_parts() for each in own.values()):
            if part[0].startswith("optimizer.") and not optimizer:
                part[-1].zero_()
            else:
                reads += state_reads(source, part)
        _execute(reads, self.device)
        for shard, parameters in own.items():
            for name, bias in parameters.router_bias.by_name.items():
                bias.copy_(read_full(source, f"model.{name}", tuple(bias.shape)))
            if (history := self._history_of(shard)) is not None:
                names = history.by_name.keys() & source.tensors.keys() if optimizer else ()
                history.load(read(source, names))
        if self.spikes is not None:
            names = {spike_filter.TENSOR} & source.tensors.keys() if optimizer else ()
            self.spikes.load(read(source, names).get(spike_filter.TENSOR))

    def _history_of(self, shard: ParamShard) -> AmaxHistory | None:
        """The history that goes with a parameter shard."""
        return None if shard.experts else self.histories.get(shard.stage)

    def receive(self, groups: ProcessGroups, sources: Mapping[ShardPart, int]) -> None:
        """Broadcasts these parts of parameter shards from the given ranks of the mesh to their other holders, all of
        which must take part. The spike window, which is the same everywhere, goes with each part."""
        window = [] if self.spikes is None else [self.spikes.window.to(self.device)]
        for param_shard, parameters in sorted(self.parameters.items()):  # DualPipe's mirror ranks differ in order
            part = param_shard, parameters.layout.shard_index
            if part in sources:
                history = self._history_of(param_shard)
                for tensor in (*parameters.state_tensors(), *window, *([] if history is None else [history.values])):
                    group = groups.replicas[param_shard.stage][param_shard.experts]
                    _broadcast(tensor, self.device, sources[part], group)
        if self.spikes is not None:
            self.spikes.window.copy_(window[0])

    def files(self, param_shards: Collection[ParamShard] | None = None) -> dict[str, dict[str, torch.Tensor]]:
        """What this rank writes of a checkpoint, as views of the state, by file and name: an equal part of what it and
        its replicas hold, or everything that it holds of the given parameter shards."""
        found = {}
        for shard, parameters in sorted(self.parameters.items()):
            if param_shards is not None and shard not in param_shards:
                continue
            if param_shards is None:
                holders, same = self.plan.holders(shard), replicas(self.plan, shard, self.rank)
                index, count = holders.index(self.rank), len(holders)
                tensors = checkpoint_tensors(parameters, shard, same.index(self.rank), len(same))
            else:
                index, count = parameters.layout.shard_index, parameters.layout.num_shards
                tensors = checkpoint_tensors(parameters, shard, 0, 1)
            if index == 0 and shard.tp == 0:
                tensors |= {f"model.{name}": bias for name, bias in parameters.router_bias.by_name.items()}
            if self.spikes is not None and shard == ParamShard(stage=0) and index == 0:  # a shard of every checkpoint
                tensors[spike_filter.TENSOR] = self.spikes.window
            if index == 0 and shard.tp == 0 and (history := self._history_of(shard)) is not None:
                tensors |= history.by_name
            if tensors:
                found[shard_file(self.plan, shard, index, count)] = tensors
        return found


def _execute(reads: Sequence[StateRead], device: torch.device) -> None:
    """Executes several reads at a time, into buffers that a GPU copies from at full speed."""
    memory = HostMemory(min(READERS, len(reads)) * READ_BYTES, device, "reading a checkpoint needs")
    buffers = SimpleQueue[torch.Tensor]()
    for buffer in memory.buffer.split(READ_BYTES):
        buffers.put(buffer)

    def execute(read: StateRead) -> None:
        buffer = buffers.get()
        try:
            read(buffer)
        finally:
            buffers.put(buffer)

    try:
        with _all_streams_done(device), ThreadPoolExecutor(READERS) as pool:  # the threads have streams of their own
            for _ in pool.map(execute, reads):
                pass  # raises the errors of the threads
    finally:
        memory.close()


@contextmanager
def _all_streams_done(device: torch.device) -> Iterator[None]:
    """Synchronizes the device before and after the block."""
    synchronize = partial(torch.cuda.synchronize, device) if device.type == "cuda" else (lambda: None)
    synchronize()
    yield
    synchronize()


def _broadcast(tensor: torch.Tensor, device: torch.device, source: int, group: dist.ProcessGroup | None) -> None:
    """Broadcasts from a rank of the mesh; tensors in host memory go through the device in pieces."""
    for piece in [tensor] if tensor.device == device else tensor.split(PIECE_ELEMENTS):
        moved = piece.to(device)
        with rank_waits.abandonable():
            dist.broadcast(moved, source, group=group)
        if moved is not piece:
            piece.copy_(moved)


def make_spike_filter(plan: Plan, device: torch.device) -> SpikeFilter | None:
    """Placed where the step ends: with post-validation on the host, where the norm arrives."""
    if plan.spikes is None:
        return None
    return SpikeFilter(plan.spikes, torch.device("cpu") if has_post_validation(plan.program) else device)


def _create(plan: Plan, param_shard: ParamShard, stream: StateStream, rank: int) -> Parameters:
    return create_parameters(plan, param_shard, stream.device, rank=rank, blank=True, stream=stream)


def _custom_values(plan: Plan, shard: ParamShard) -> dict[str, torch.Tensor] | None:
    """The initial values of a custom model; None if they follow from the plan's seed."""
    custom, layers = plan.model.custom, plan.layers[shard.stage]
    return None if custom is None else initial_values(custom, plan.seed, layers.first, layers.end)


def _fits(plan: Plan, rank: int, param_shard: ParamShard, parameters: Parameters) -> bool:
    """Whether a rank of this plan has the same part of the parameter shard."""
    return param_shard in plan.param_shards_of(rank) and parameters.layout == zero_layout(plan, param_shard, rank)
