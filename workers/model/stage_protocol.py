"""What a rank requires of a pipeline stage: any model that implements it trains under every schedule.

`workers.model.stage.Stage` runs pentad's own models, `workers.custom.stage.CustomStage` a user's torch modules.

The executor calls `begin` before the first F of a step. Then, for every slice of a microbatch (the whole microbatch
where sequences are not cut), it calls `forward`, `backward_input` and `backward_weight` once each, in this order, in
any interleaving with other slices that the schedule chooses. Where a stage recomputes, `recompute` comes between the
first two. T tokens of a slice, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pentad.workers.model.layer_context import LayerContext
from pentad.workers.parallel.async_ops import Task
from pentad.workers.parallel.process_groups import LayerGroups
from pentad.workers.params.param_buffers import ParamBuffers
from pentad.workers.params.router_bias import LoadBalancer


class StageProtocol(Protocol):
    """A `slice_index` is microbatch * slices + slice.

    `param_buffers` hold the flat weights that a stage reads and the main gradients that W adds to, those of experts
    separately. `saved` is what F leaves for B, by slice index; clearing it discards the step so far. `wgrad_layer` is
    the layer that the last W has reached, -1 once it has run for all: gradients of later layers are complete.
    `loss_sums` [microbatches], float64, are the summed token losses of the current step: one row of `loss_sum_buffers`
    [2, microbatches], the other of which may still be on its way to other ranks.
    """

    param_buffers: list[ParamBuffers]
    layer_context: LayerContext
    last: bool  # ends in the loss
    is_local: bool  # no other rank shares the layers
    wgrad_layer: int
    loss_sum_buffers: Tensor
    loss_sums: Tensor

    @property
    def saved(self) -> dict[int, Any]: ...

    @property
    def load_balancer(self) -> LoadBalancer | None: ...

    def join(self, groups: LayerGroups) -> None:
        """Shares the layers with these ranks from now on."""

    def bind(self) -> None:
        """Reads the current `param_buffers`: under ZeRO-3, weights may lie elsewhere in B than in F, or nowhere."""

    def begin(self, step: int) -> None:
        """Starts a step: its loss sums are zero."""

    def forward(
        self,
        slice_index: int,
        received: Tensor | None,
        tokens: Tensor | None,
        targets: Tensor | None,
        mtp_targets: Tensor | None = None,
        document_starts: Sequence[Sequence[int]] = (),
    ) -> Task[Tensor | None]:
        """F: the residual stream [T, H], or None on the last stage, which adds to the loss sums instead.

        The first stage reads `tokens` [T], every other one `received` [T, H], which must stay unchanged until B. The
        last one also needs `targets` [T] and `mtp_targets` [mtp_layers, T], the tokens after them. `document_starts` of
        packed sequences are positions, by row of the batch.
        """

    def recompute(self, slice_index: int) -> None:
        """RECOMPUTE: rebuilds the activations that F did not save, with the same bits."""

    def backward_input(self, slice_index: int, dy: Tensor | None) -> Task[Tensor | None]:
        """B: the gradient [T, H] of what F received, or None on the first stage; leaves the rest to W.

        `dy` [T, H] is the gradient of what F returned, None on the last stage, where every token's loss counts
        1 / tokens of the step.
        """

    def backward_weight(self, slice_index: int) -> None:
        """W: adds to the main gradients, in their precision. Called in microbatch order."""

    def offloadable(self, slice_index: int) -> list[torch.UntypedStorage]:
        """Memory that only this slice uses between F and B: OFFLOAD moves it to the host, RELOAD brings it back."""
