"""The parameters of one stage: flat buffers, the tensors in them by name, reproducible initial values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from pentad.kernels.fp8.fp8_tensor import Recipe
from pentad.kernels.optimizer.param_remainders import SplitFloat32, nearest
from pentad.schedules.passes.post_validation import has_post_validation
from pentad.schedules.spec.optimizer import STATE_KINDS
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.schedules.spec.zero_layout import ZeroLayout, zero_layout
from pentad.workers.params.fp8_shard import Fp8Shard
from pentad.workers.params.host_state import HostShard, StateStream
from pentad.workers.params.local_tensor import LocalTensor, local_tensors
from pentad.workers.params.param_init import initial_values
from pentad.workers.params.router_bias import router_biases
from pentad.workers.params.update_layout import UpdateLayout, update_layout
from pentad.workers.params.weight_shard import WeightShard, shard_of

StatePart = tuple[str, LocalTensor, slice, torch.Tensor]  # see Parameters.state_parts
PIECE = 2**24  # elements cast at a time
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Parameters(WeightShard):
    """What a rank holds of a stage's parameters, experts separately from all others, in the order of `local_tensors`.

    `gradient` and `m` are its ZeRO shard, [part] ([size] without ZeRO). `m` holds first moments, or Muon's momentum,
    and `v` [num_adamw] second moments; `updates` says which elements have which. Both have the optimizer state's dtype;
    `master` [compute_part] and `gradient` are float32 (float64 if compute is). `compute` is `master` itself, the upper
    halves of its numbers or, if it `is_apart`, a copy in the compute dtype. The last elements, which are gathered
    `in_8_bits`, have their master weights there and no `compute`. Layers read `full_weights` and add to
    `full_gradients`, both flat; `compute` and `gradient` are views of them. They are None if stages share buffers
    (workers/runtime/zero.py). `master`, `m` and `v` may be in `host` memory. The `router_bias` of a model that LoRA
    freezes is kept with the frozen weights.
    """

    updates: UpdateLayout
    master: torch.Tensor
    gradient: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    full_gradients: torch.Tensor | None
    host: HostShard | None = None
    in_8_bits: Fp8Shard | None = None

    @property
    def is_apart(self) -> bool:
        """Whether `compute` has its own memory, which a step writes in addition to the master weights."""
        return self.compute is not self.master and not isinstance(self.master, SplitFloat32)

    def master_weights(self, where: slice) -> torch.Tensor:
        """The master weights of elements of the shard, either all or none of which are in `compute`."""
        border = self.layout.compute_part
        if self.in_8_bits is None or where.start < border:
            return self.master[where]
        return self.in_8_bits.master[where.start - border : where.stop - border]

    def master_parts(self) -> Iterator[tuple[LocalTensor, slice, torch.Tensor]]:
        """`shard_parts` of the master weights."""
        return ((local, span, self.master_weights(where)) for local, where, span in self.shard_spans())

    def state_parts(self) -> Iterator[StatePart]:
        """Everything that a checkpoint holds, kind by kind, tensor by tensor: the kind ('model', 'optimizer.m', ...),
        the tensor, which of its elements in C order, their values."""
        for local, span, values in self.master_parts():
            yield "model", local, span, values
        for method, kinds in STATE_KINDS.items():
            for kind in kinds:
                for part in self.updates.parts:
                    if part.rule.method == method:
                        values = self.v[part.place] if kind == "optimizer.v" else self.m[part.where]
                        yield kind, part.local, part.span, values

    def state_tensors(self) -> list[torch.Tensor]:
        """Everything that another rank needs to continue with the same parameters."""
        found = [self.master]
        if isinstance(self.master, SplitFloat32):
            found = [self.master.high, self.master.low.view(torch.uint8)]  # process groups cannot send int16
        found += [] if self.in_8_bits is None else [self.in_8_bits.master]
        return [*found, self.m, self.v, *([self.router_bias.values] if self.router_bias.layers else [])]

    def refresh(self) -> None:
        """Writes the compute copy from the master weights; marks the 8-bit copy as stale, as casting it needs the other
        holders."""
        if self.is_apart:
            for out, given in zip(self.compute.split(PIECE), self.master.split(PIECE), strict=True):
                out.copy_(nearest(given.to(out.device), out.dtype))
        if self.in_8_bits is not None:
            self.in_8_bits.is_stale = True


def create_parameters(
    plan: Plan,
    shard: ParamShard,
    device: torch.device,
    *,
    rank: int = 0,
    blank: bool = False,
    initial: Mapping[str, torch.Tensor] | None = None,
    stream: StateStream | None = None,
) -> Parameters:
    """The buffers of a parameter shard on a rank. State in host memory is updated through `stream`.

    Initial values depend only on the seed and the tensors' names; full tensors in `initial` override them. `blank`
    buffers are zeros, for state that comes from a checkpoint or another rank.
    """
    layout = zero_layout(plan, shard, rank)
    local, narrow = local_tensors(plan, shard), DTYPES[plan.dtype]
    wide = torch.float64 if narrow is torch.float64 else torch.float32
    state, updates = torch.bfloat16 if plan.optimizer.bf16_state else wide, update_layout(plan.optimizer, local, layout)

    def zeros(*shape: int, dtype: torch.dtype = wide) -> torch.Tensor:
        return torch.zeros(shape or (layout.part,), dtype=dtype, device=device)

    unsharded = layout.num_shards == 1
    full_weights = zeros(layout.padded_size, dtype=narrow) if unsharded or plan.zero < 3 else None
    full_gradients = zeros(layout.padded_size) if unsharded or plan.zero < 2 else None
    compute = zeros(layout.compute_part, dtype=narrow) if full_weights is None else shard_of(layout, full_weights)
    host = None
    if plan.host_optimizer:
        shapes = [(layout.part, wide), (layout.part, state), (updates.num_adamw, state)]
        host = HostShard(shapes, stream or StateStream(device))
    master = host.tensors[0] if host else _master(plan, compute, wide)
    parameters = Parameters(
        local_tensors=local,
        layout=layout,
        updates=updates,
        master=master,
        compute=compute,
        gradient=zeros() if full_gradients is None else shard_of(layout, full_gradients),
        m=host.tensors[1] if host else zeros(dtype=state),
        v=host.tensors[2] if host else zeros(updates.num_adamw, dtype=state),
        full_weights=full_weights,
        full_gradients=full_gradients,
        host=host,
        in_8_bits=_in_8_bits(plan, local, layout, compute, wide),
        router_bias=router_biases(plan, shard, wide, device),
    )
    if not blank:
        initialize(parameters, plan.seed, device, initial)
    return parameters


def _master(plan: Plan, compute: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """The master weights of `compute`. With post-validation `compute` may be a step ahead, so they do not share
    memory."""
    if has_post_validation(plan.program):
        return torch.zeros_like(compute, dtype=wide)
    return compute if compute.dtype is wide else SplitFloat32(compute, torch.zeros_like(compute, dtype=torch.int16))


def _in_8_bits(
    plan: Plan, local: tuple[LocalTensor, ...], layout: ZeroLayout, compute: torch.Tensor, wide: torch.dtype
) -> Fp8Shard | None:
    if plan.fp8 is None or not layout.in_8_bits:
        return None
    recipe = Recipe(plan.fp8.scaling, plan.fp8.gradients, plan.fp8.power_of_two)
    return Fp8Shard(
        recipe, compute.dtype, local, layout, compute.new_zeros(layout.part - layout.compute_part, dtype=wide)
    )


def initialize(
    parameters: Parameters, seed: int, device: torch.device, initial: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Sets the initial values: computed on the device from seed and names, or taken from `initial` tensors."""
    for part, span, values in parameters.master_parts():
        if initial is not None:
            value = part.slice_of(initial[part.name])
        else:
            value = initial_values(part.tensor, seed, part.ranges, device)
        values.copy_(value.flatten()[span])
    parameters.refresh()
