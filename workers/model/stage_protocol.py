"""What a rank asks of a pipeline stage: any model that answers trains under every schedule.

`workers.stage.Stage` runs the models that pentad has; `workers.own_stage.OwnStage` runs layers of the user's own.

The executor calls `begin` before the first F of a step, then for every piece (a microbatch or, where sequences are cut,
a slice of one) `forward`, `backward_input` and `backward_weight`, each once, in an order that the schedule chooses:
F before B before W of a piece, any number of pieces between them. Where a stage recomputes, `recompute` comes between
F and B. T tokens of a piece, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from pentad.workers.model.layer_context import Around
from pentad.workers.parallel.async_ops import Turns
from pentad.workers.parallel.process_groups import Inner
from pentad.workers.params.param_buffers import ParamBuffers
from pentad.workers.params.router_bias import Balance


class StageProtocol(Protocol):
    """`banks` hold its parameters: flat buffers of weights, which it reads, and of main gradients, to which W adds.

    `last` says that it ends in the loss, `is_alone` that no other rank shares its layers; `balance` are biases of
    experts, if it has any. `kept` is, by piece, what F leaves for B; who clears it starts the step again. `reached` is
    the layer that the last W has come down to, -1 when it is done with all: later layers' gradients are whole then.
    `loss_sums` [microbatches], float64, are the sums of tokens' losses of the step that was begun last, a row of `sums`
    [2, microbatches]: the row of the step before may still be on its way to other ranks.
    """

    banks: list[ParamBuffers]
    last: bool
    is_alone: bool
    around: Around
    reached: int
    sums: torch.Tensor
    loss_sums: torch.Tensor

    @property
    def kept(self) -> dict[int, Any]: ...

    @property
    def balance(self) -> Balance | None: ...

    def join(self, inner: Inner) -> None:
        """From here on its layers are shared with these ranks."""

    def bind(self) -> None:
        """A bank's buffers are others, or gone: with ZeRO weights may lie elsewhere in B than they did in F."""

    def begin(self, step: int) -> None:
        """Before the first F of a step: sums of losses begin at zero."""

    def forward(
        self,
        piece: int,
        received: torch.Tensor | None,
        tokens: torch.Tensor | None,
        targets: torch.Tensor | None,
        further: torch.Tensor | None = None,
        starts: Sequence[Sequence[int]] = (),
    ) -> Turns[torch.Tensor | None]:
        """F: the result [T, H] from `received` [T, H], which stays unchanged until B. The first stage gets tokens [T]
        in its place; the last one gets targets [T] besides, adds up their losses and returns nothing. `further`
        [predicted, T] are the tokens behind the targets, `starts` are, by row of packed sequences, where documents
        begin. A generator that yields where operations between ranks are under way (see turns.py), or not at all."""

    def recompute(self, piece: int) -> None:
        """RECOMPUTE: makes, with the same bits, what F did not keep."""

    def backward_input(self, piece: int, dy: torch.Tensor | None) -> Turns[torch.Tensor | None]:
        """B: the gradient of what F received from that of its result, both [T, H]; nothing on the first stage, and from
        nothing on the last one, where every token's loss counts 1 / tokens of the step. Keeps what W needs."""

    def backward_weight(self, piece: int) -> None:
        """W: adds to the main gradients, in their precision. Called in the order of microbatches."""

    def movable(self, piece: int) -> list[torch.UntypedStorage]:
        """What OFFLOAD takes to the host and RELOAD brings back: memory that this piece alone keeps between F and B."""
