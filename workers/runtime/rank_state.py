"""The training state of one rank, and its transfer: from checkpoints, from and to other ranks, to checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.passes.post_validation import has_post_validation
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.schedules.spec.zero_layout import zero_layout
from pentad.workers.checkpoint import checkpoint, shards
from pentad.workers.custom.loader import initial_values
from pentad.workers.parallel.process_groups import ProcessGroups
from pentad.workers.params import spike_filter
from pentad.workers.params.frozen import FrozenWeights, frozen_weights
from pentad.workers.params.parameters import Parameters, create_parameters
from pentad.workers.params.sharded_state import checkpoint_tensors, read_full, shard_file
from pentad.workers.params.spike_filter import SpikeFilter
from pentad.workers.runtime.abort import Fence
from pentad.workers.runtime.zero import gather_state


class RankState:
    """The parameters and optimizer state of a rank, by parameter shard.

    `version` is the number of steps in them, -1 if they hold no step's state. `frozen` are the weights that no step
    changes. `spikes` has the steps that later ones are compared with, if the plan asks for it.
    """

    def __init__(
        self, plan: Plan, rank: int, device: torch.device, previous: RankState | None = None, *, blank: bool = False
    ) -> None:
        """Takes over what an earlier generation of this rank has; the rest is initialized, or left `blank`."""
        self.plan, self.rank, self.device = plan, rank, device
        self.spikes: SpikeFilter | None = previous.spikes if previous is not None else make_spike_filter(plan, device)
        earlier = None if previous is None else (previous.plan, previous.frozen)
        self.frozen: FrozenWeights = frozen_weights(plan, rank, device, earlier)
        found: dict[ParamShard, Parameters] = {}
        if previous is not None and previous.plan.layers == plan.layers:
            found = {key: each for key, each in previous.parameters.items() if _fits(plan, rank, key, each)}
        complete = previous is not None and set(found) >= set(plan.param_shards_of(rank))
        self.version: int = previous.version if previous is not None and complete else -1
        self.parameters: dict[ParamShard, Parameters] = {
            key: found[key] if key in found else _create(plan, key, device, rank, blank)
            for key in plan.param_shards_of(rank)
        }

    def set_version(self, version: int) -> None:
        """Declares the master weights to be those of `version` steps."""
        self.version = version
        for parameters in self.parameters.values():
            parameters.refresh()  # the compute weights may be those of a step that was never committed

    def read(self, folder: Path, *, optimizer: bool = True) -> None:
        """Reads weights and optimizer state from a checkpoint of any mesh; without `optimizer` that state is zero.

        Raises PentadError if a tensor is missing or has another shape.
        """
        source = checkpoint.open_checkpoint(folder)
        for parameters in self.parameters.values():
            for kind, local, span, values in parameters.state_parts():
                if kind.startswith("optimizer.") and not optimizer:
                    values.zero_()
                    continue
                # One tensor at a time: a rank with a shard need not have memory for more.
                full = read_full(source, f"{kind}.{local.tensor.tied_to or local.name}", local.tensor.shape)
                values.copy_(local.slice_of(full).flatten()[span])
            for name, bias in parameters.router_bias.by_name.items():
                bias.copy_(read_full(source, f"model.{name}", tuple(bias.shape)))
        if self.spikes is not None:
            names = {spike_filter.TENSOR} & source.files.keys() if optimizer else ()
            self.spikes.load(shards.read(source, names).get(spike_filter.TENSOR))

    def receive(self, groups: ProcessGroups, sources: Mapping[ParamShard, int]) -> None:
        """Broadcasts parameter shards from the given ranks of the mesh to their other holders, all of which must take
        part; with each shard the window of spikes, which is the same everywhere."""
        window = [] if self.spikes is None else [self.spikes.window.to(self.device)]
        for param_shard, parameters in sorted(self.parameters.items()):  # DualPipe's mirror ranks have another order
            if param_shard in sources:
                for tensor in (*parameters.state_tensors(), *window):
                    group = groups.gradients[param_shard.stage][param_shard.experts]
                    dist.broadcast(tensor, sources[param_shard], group=group)
        if self.spikes is not None:
            self.spikes.window.copy_(window[0])

    def write(
        self, folder: Path, groups: ProcessGroups, fence: Fence, param_shards: tuple[ParamShard, ...] | None
    ) -> list[dict]:
        """Writes the parameter shards that this rank owns, or the given ones; returns the entries of the checkpoint's
        manifest.

        Shares under ZeRO are gathered from all holders, even after a failure to write, which raises PentadError at the
        end.
        """
        written, failures = [], list[PentadError]()
        for param_shard, parameters in sorted(self.parameters.items()):
            owner, is_sharded = self.plan.owner(param_shard), parameters.layout.num_shards > 1
            if param_shards is not None and not is_sharded:
                owner = self.rank if param_shard in param_shards else -1
            with fence.guard() if is_sharded else nullcontext():  # what needs no other rank is saved after an abort too
                group = groups.gradients[param_shard.stage][param_shard.experts]
                state = gather_state(parameters, owner, self.rank, group)
            try:
                if state is not None:
                    tensors = checkpoint_tensors(state, parameters.router_bias, param_shard)
                    if self.spikes is not None and param_shard == ParamShard(stage=0):  # which every checkpoint has
                        tensors[spike_filter.TENSOR] = self.spikes.window
                    written.append(shards.write_shard(folder, shard_file(self.plan, param_shard), tensors).plain())
            except PentadError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return written


def make_spike_filter(plan: Plan, device: torch.device) -> SpikeFilter | None:
    """Where the step ends: on the host with post-validation, which learns the norm there."""
    if plan.spikes is None:
        return None
    return SpikeFilter(plan.spikes, torch.device("cpu") if has_post_validation(plan.program) else device)


def _create(plan: Plan, param_shard: ParamShard, device: torch.device, rank: int, blank: bool) -> Parameters:
    custom, layers = plan.model.custom, plan.layers[param_shard.stage]
    initial = None if custom is None or blank else initial_values(custom, plan.seed, layers.first, layers.end)
    return create_parameters(plan, param_shard, device, rank=rank, blank=blank, initial=initial)


def _fits(plan: Plan, rank: int, param_shard: ParamShard, parameters: Parameters) -> bool:
    """Whether a rank of this plan has the same part of the parameter shard."""
    return param_shard in plan.param_shards_of(rank) and parameters.layout == zero_layout(plan, param_shard, rank)
