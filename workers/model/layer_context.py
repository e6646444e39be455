"""What the halves of a layer are told besides their weights and their input."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from pentad.schedules.spec.model import ModelShape
from pentad.workers.model.sliced_kv_cache import SlicedKVCache
from pentad.workers.model.weight_grad import Deferred
from pentad.workers.parallel.async_ops import Turns
from pentad.workers.parallel.context_parallel import Context, Documents
from pentad.workers.parallel.expert_parallel import ExpertParallelGroup
from pentad.workers.parallel.tensor_parallel import TensorRanks

Views = dict[str, torch.Tensor]


class Around(NamedTuple):
    """The same for all pieces: sizes, and the ranks that a layer is shared with. A token's loss counts `loss_scale`;
    while a stage makes again what it did not keep, its tokens are not `counted` anew."""

    model: ModelShape
    deterministic: bool
    loss_scale: float
    tensor: TensorRanks = TensorRanks()
    context: Context = Context()
    experts: ExpertParallelGroup = ExpertParallelGroup()
    counted: bool = True


class Rotation(NamedTuple):
    """Of the S positions of a rank's part of a sequence, the first of which is `start` where these are slices."""

    start: int
    cos: torch.Tensor  # [S, D/2]
    sin: torch.Tensor


class Place(NamedTuple):
    """Of one piece in one layer: its positions, what it shares with the other slices of its sequences, and where these
    are packed documents, what of them a rank attends to."""

    rotation: Rotation
    past: SlicedKVCache
    documents: Documents | None = None


class Half(Protocol):
    """Half a layer, between a norm and the sum with the residual stream: a module with these functions.

    What B needs of F comes in two: roots, which are dear to make, and leaves, which `leaves` makes of them again, with
    the same bits. `w` are its compute weights, `g` their main gradients. Forward and backward give up their turns where
    they wait for other ranks.
    """

    def weights_of(self, views: Views, at: str) -> Any: ...

    def forward(self, w: Any, around: Around, place: Place, x: torch.Tensor) -> Turns[tuple[torch.Tensor, Any, Any]]:
        """(result, roots, leaves) of the normed stream x; both [T / tp, H]."""

    def leaves(self, w: Any, around: Around, x: torch.Tensor, roots: Any) -> Any:
        """RECOMPUTE."""

    def backward(
        self, w: Any, g: Any, around: Around, place: Place, x: torch.Tensor, roots: Any, leaves: Any, dy: torch.Tensor
    ) -> Turns[tuple[torch.Tensor, list[Deferred]]]:
        """(gradient of x, what W has to do) from that of the result."""
