"""What the optimizer does with every tensor: plain data, sent to the ranks with the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from pentad.schedules.spec.learning_rate import LearningRate
from pentad.schedules.spec.tensors import Tensor

Method = Literal["adamw", "muon"]
AdjustLrFn = Literal["original", "match_rms_adamw"]
ROUND_ELEMENTS = 2**25  # of the matrices that Muon exchanges at once, for each rank that holds them
PIECE_ELEMENTS = 2**24  # of a shard in host memory that are updated at once; PIECES of these are on the device
PIECES = 3  # one is updated while the next one comes and the one before goes back
STATE_KINDS: dict[Method, tuple[str, ...]] = {"adamw": ("optimizer.m", "optimizer.v"), "muon": ("optimizer.momentum",)}


@dataclass(frozen=True)
class ParamGroup:
    """Settings of the tensors whose names match `pattern` (as in a shell: * also matches dots). A `weight_decay` of
    None stands for the optimizer's."""

    pattern: str
    learning_rate_scale: float = 1.0
    weight_decay: float | None = None


@dataclass(frozen=True)
class SpikeSpec:
    """A step is a spike if its loss or gradient norm is more than `threshold` standard deviations above the mean of the
    last `window` steps, once there are `min_steps` of them."""

    threshold: float
    window: int
    min_steps: int


class UpdateRule(NamedTuple):
    """How the elements of a tensor are updated."""

    method: Method
    learning_rate_scale: float
    weight_decay: float


@dataclass(frozen=True)
class OptimizerSpec:
    """AdamW (arXiv 1711.05101), or Muon (https://kellerjordan.github.io/posts/muon) for the matrices inside layers and
    AdamW for the rest.

    Gradients whose global norm exceeds `clip_norm` are scaled down to it; None: never. `weight_decay` is decoupled and
    of matrices only. If several `groups` match a tensor, the first one counts. Optimizer state has the dtype of master
    weights, or bfloat16 with `bf16_state`. `momentum`, `nesterov` and `adjust_lr_fn` are those of torch.optim.Muon.
    `z_loss` times the mean squared log-sum-exp of the logits is added to the loss (PaLM, arXiv 2204.02311, section 5).
    The moments have seen `moment_offset` more updates than the run counts steps; this is not 0 if only one of the two
    was taken from another run.
    """

    learning_rate: LearningRate
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_norm: float | None
    name: Method = "adamw"
    groups: tuple[ParamGroup, ...] = ()
    bf16_state: bool = False
    momentum: float = 0.95
    nesterov: bool = True
    adjust_lr_fn: AdjustLrFn = "match_rms_adamw"
    z_loss: float = 0.0
    moment_offset: int = 0

    def rule_of(self, tensor: Tensor) -> UpdateRule:
        """Copies of a tensor in other stages have the rule of the original."""
        name = original_name(tensor)
        group = next((each for each in self.groups if fnmatchcase(name, each.pattern)), ParamGroup(""))
        decay = self.weight_decay if is_matrix(tensor) else 0.0
        method: Method = "muon" if self.name == "muon" and is_hidden_matrix(tensor) else "adamw"
        return UpdateRule(
            method, group.learning_rate_scale, decay if group.weight_decay is None else group.weight_decay
        )

    def adjustment(self, rows: int, columns: int) -> float:
        """What Muon multiplies the learning rate of a matrix by: 'original' keeps the update of one row the same for
        all shapes, 'match_rms_adamw' gives the update the root mean square of AdamW's (arXiv 2502.16982, equation 4).
        """
        if self.adjust_lr_fn == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def moment_offset_of(meta: Mapping[str, Any]) -> int:
    """The `moment_offset` of a checkpoint, from the metadata in its manifest."""
    return int(meta.get("moment_offset", 0))


def original_name(tensor: Tensor) -> str:
    return tensor.tied_to or tensor.name


def is_matrix(tensor: Tensor) -> bool:
    """Whether a tensor is a matrix, or a stack of experts' matrices."""
    return len(tensor.shape) - tensor.experts > 1


def is_hidden_matrix(tensor: Tensor) -> bool:
    """Whether Muon updates a tensor: all matrices except embedding, head and routers."""
    is_end = tensor.name in ("embedding", "head") or tensor.tied_to != ""
    return is_matrix(tensor) and not is_end and not tensor.name.endswith(".router")


def fused_rows(tensor: Tensor) -> tuple[int, ...]:
    """The rows of each matrix that is fused into a tensor: queries, keys and values, or gate and up."""
    rows = len(tensor.shape) - 2
    fused = [split.segments for split in tensor.splits if split.axis == "tp" and split.dim == rows]
    return tuple(segment.size for segment in fused[0]) if fused else (tensor.shape[rows],)
