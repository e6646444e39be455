"""The training state of one rank, and its transfer: from checkpoints, from and to other ranks, to checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.workers.checkpoint import checkpoint, shards
from pentad.workers.custom.loader import initial_values
from pentad.workers.parallel.process_groups import ProcessGroups
from pentad.workers.params.parameters import Parameters, create_parameters, zero_layout
from pentad.workers.params.sharded_state import checkpoint_tensors, read_full, shard_file
from pentad.workers.runtime.abort import Fence
from pentad.workers.runtime.zero import gather_state


class RankState:
    """The parameters and optimizer state of a rank, by share.

    `version` is the number of steps in them, -1 if they hold no step's state.
    """

    def __init__(
        self, plan: Plan, rank: int, device: torch.device, previous: RankState | None = None, *, blank: bool = False
    ) -> None:
        """Takes over what an earlier generation of this rank has; the rest is initialized, or left `blank`."""
        self.plan, self.rank = plan, rank
        found: dict[ParamShard, Parameters] = {}
        if previous is not None and previous.plan.layers == plan.layers:
            found = {share: each for share, each in previous.parameters.items() if _fits(plan, rank, share, each)}
        complete = previous is not None and set(found) >= set(plan.param_shards_of(rank))
        self.version: int = previous.version if previous is not None and complete else -1
        self.parameters: dict[ParamShard, Parameters] = {
            share: found[share] if share in found else _create(plan, share, device, rank, blank)
            for share in plan.param_shards_of(rank)
        }

    def set_version(self, version: int) -> None:
        """Declares the master weights to be those of `version` steps."""
        self.version = version
        for parameters in self.parameters.values():
            parameters.refresh()  # the compute weights may be those of a step that was never committed

    def read(self, folder: Path) -> None:
        """Reads weights and optimizer state from a checkpoint of any mesh.

        Raises PentadError if a tensor is missing or has another shape.
        """
        source = checkpoint.open_checkpoint(folder)
        for parameters in self.parameters.values():
            for kind, shard in parameters.state().items():
                for local, span, values in parameters.shard_parts(shard):
                    # One tensor at a time: a rank with a shard need not have memory for more.
                    full = read_full(source, f"{kind}.{local.tensor.tied_to or local.name}", local.tensor.shape)
                    values.copy_(local.slice_of(full).flatten()[span])
            for name, bias in parameters.router_bias.by_name.items():
                bias.copy_(read_full(source, f"model.{name}", tuple(bias.shape)))

    def receive(self, groups: ProcessGroups, sources: Mapping[ParamShard, int]) -> None:
        """Broadcasts shares from the given ranks of the mesh to their other holders, all of which must take part."""
        for share, parameters in sorted(self.parameters.items()):  # DualPipe's mirror ranks have another order
            if share in sources:
                for tensor in parameters.state_tensors():
                    dist.broadcast(tensor, sources[share], group=groups.gradients[share.stage][share.experts])

    def write(
        self, folder: Path, groups: ProcessGroups, fence: Fence, shares: tuple[ParamShard, ...] | None
    ) -> list[dict]:
        """Writes the shares that this rank owns, or the given ones; returns the entries of the checkpoint's manifest.

        Shares under ZeRO are gathered from all holders, even after a failure to write, which raises PentadError at the
        end.
        """
        written, failures = [], list[PentadError]()
        for share, parameters in sorted(self.parameters.items()):
            owner, is_sharded = self.plan.owner(share), parameters.layout.num_shards > 1
            if shares is not None and not is_sharded:
                owner = self.rank if share in shares else -1
            with fence.guard() if is_sharded else nullcontext():  # what needs no other rank is saved after an abort too
                group = groups.gradients[share.stage][share.experts]
                state = gather_state(parameters, owner, self.rank, group)
            try:
                if state is not None:
                    tensors = checkpoint_tensors(parameters, state, share)
                    written.append(shards.write_shard(folder, shard_file(self.plan, share), tensors).plain())
            except PentadError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return written


def _create(plan: Plan, share: ParamShard, device: torch.device, rank: int, blank: bool) -> Parameters:
    custom = plan.model.custom
    initial = None if custom is None or blank else initial_values(custom, plan.seed, *plan.layers[share.stage])
    return create_parameters(plan, share, device, rank=rank, blank=blank, initial=initial)


def _fits(plan: Plan, rank: int, share: ParamShard, parameters: Parameters) -> bool:
    """Whether a rank of this plan has the same part of the share."""
    return share in plan.param_shards_of(rank) and parameters.layout == zero_layout(plan, share, rank)
