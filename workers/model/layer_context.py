"""What a layer needs besides its weights and its input: sizes, parallel groups, positions, the KV cache."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.kernels.attention.rope_tables import rope_tables
from pentad.schedules.spec.cp_layout import CP_LAYOUTS, positions
from pentad.schedules.spec.model import LayerKind, ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.workers.linear.linear import Axes, Linear
from pentad.workers.linear.weight_grad import Wgrad
from pentad.workers.parallel.async_ops import Task
from pentad.workers.parallel.context_parallel import ContextParallelGroup
from pentad.workers.parallel.document_mask import DocumentMask
from pentad.workers.parallel.expert_parallel import ExpertParallelGroup
from pentad.workers.parallel.row_split import RowSplit
from pentad.workers.parallel.sliced_kv_cache import SlicedKVCache
from pentad.workers.parallel.tensor_parallel import TensorParallelGroup


class LayerContext(NamedTuple):
    """Common to all layers and microbatches of a stage."""

    model: ModelSpec
    deterministic: bool
    loss_scale: float  # the weight of each target token's loss: 1 / target tokens of the step
    aux_loss_scale: float  # the weight of each token in the balancing losses: 1 / tokens of a step
    tp: TensorParallelGroup = TensorParallelGroup()
    cp: ContextParallelGroup = ContextParallelGroup()
    ep: ExpertParallelGroup = ExpertParallelGroup()
    pool: dist.ProcessGroup | None = None  # for data-aware groups
    lora_scale: float = 0.0  # alpha / rank
    router_squared_lse: Tensor | None = None  # a float64 scalar that routers add to in F, for their z-loss
    first_pass: bool = True  # False when RECOMPUTE repeats a forward, whose tokens all sums already include
    logit_rows: int = 0  # rows of a chunk of logits; 0: F keeps all logits
    count_load: bool = False  # whether routers count the visits to each expert in this step

    @property
    def axes(self) -> Axes:
        return Axes(self.tp, self.cp)


class RotaryTable(NamedTuple):
    """The angles of the `length` = S positions that a rank holds of a sequence slice, which begins at position `start`
    of the rank's part: [S, D / 2], or [T, D / 2] if sequences have positions of their own."""

    start: int
    length: int
    cos: Tensor
    sin: Tensor

    def rest(self, split: RowSplit, tokens: int) -> RotaryTable:
        """The angles of the rest of the rows, one for each, of `tokens` tokens of all sequences."""
        repeats = tokens // len(self.cos)
        return RotaryTable(
            self.start, self.length, *(split.rest(each.repeat(repeats, 1)) for each in (self.cos, self.sin))
        )


class SequenceContext(NamedTuple):
    """For one layer: the positions of a forward or backward in its sequences, and the ranks that share these."""

    cp: ContextParallelGroup
    rotary: RotaryTable
    kv_cache: SlicedKVCache
    window: int = 0  # tokens that a token attends to, including itself; 0: all before it
    documents: DocumentMask | None = None  # of packed sequences
    expert_tokens: tuple[int, ...] = ()  # of each rank of the ep group; empty: equally many
    counted: Tensor | None = None  # [T] bool: tokens that router losses and expert loads count; None: all


class Sublayer(Protocol):
    """Half of a layer, between a norm and the addition to the residual stream, with its parameters.

    Besides the input x, B needs two kinds of activations: saved ones, and `recomputable` ones, which can be rebuilt
    from the others bit for bit, such as the gate and up products of a feed-forward network. Forward and backward are
    tasks that yield while they wait for other ranks.
    """

    @property
    def caster(self) -> Linear | None:
        """The product that alone reads the normed stream, in 8 bits, so that the norm may cast it; None if the sublayer
        reads it in the compute dtype."""

    def only_w_reads(self, context: LayerContext) -> bool:
        """Whether `backward` passes x on to W unread, so that x may be filled after it has returned."""

    def forward(self, context: LayerContext, sequence: SequenceContext, x: Any) -> Task[tuple[Tensor, Any, Any]]:
        """(result, saved, recomputable) from the normed stream x; result and x are [T / tp, H]."""

    def backward(
        self, context: LayerContext, sequence: SequenceContext, x: Any, saved: Any, recomputable: Any, dy: Tensor
    ) -> Task[tuple[Tensor, list[Wgrad]]]:
        """(gradient of x, work for W) from the gradient of the result."""


def local_positions(plan: Plan, rank: int) -> Tensor:
    """The positions [S / cp], int64, that a rank holds of every sequence, in its order."""
    cp_rank, length = plan.mesh.coordinates(rank).cp, plan.batch.sequence_length
    return torch.from_numpy(positions(length, plan.mesh.cp, cp_rank, CP_LAYOUTS[plan.cp_method]))


def rotary_tables(
    plan: Plan, rank: int, kind: LayerKind, device: torch.device, dtype: torch.dtype
) -> list[RotaryTable]:
    """One table for each of a rank's sequence slices, for layers of a kind."""
    tables = full_tables(plan, kind, device, dtype)
    local = local_positions(plan, rank).to(device)
    cos, sin = (table[local] for table in tables)
    size = len(local) // plan.program.slices
    starts = range(0, len(local), size)
    return [RotaryTable(start, size, cos[start : start + size], sin[start : start + size]) for start in starts]


def full_tables(plan: Plan, kind: LayerKind, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) [S, D / 2] of all positions of a sequence."""
    length, width = plan.batch.sequence_length, plan.model.rotary_width
    return rope_tables(length, width, kind.rope_theta, device, dtype, kind.rope_scaling)
