"""What workers report to the driver: plain data, no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pentad.schedules.simulate.step_profile import RankProfile
from pentad.schedules.simulate.timeline import Span
from pentad.workers.linear.fp8_sample import Fp8Sample, GradientSums


class LossSum(NamedTuple):
    """A sum of token losses, and how many target tokens it is of."""

    loss: float
    target_tokens: int


@dataclass(frozen=True)
class StepResult:
    """One rank's result of one step, which has run this `program` of the plan's programs.

    `losses` are sums over target tokens, by microbatch of a global batch with rows in the order in which they are drawn
    (whatever microbatches they were dealt to); `sources` has them by source of the data; `samples` is the digest of all
    samples whose losses were counted (see `digest_of`). `squared_lse` is the sum of squared log-sum-exps of the logits,
    for a z-loss, and `router_squared_lse` that of all routers' logits. `grad_norm` is the global norm before clipping;
    if it was not finite, or the step a spike, it was `skipped`: no weight changed. `spans` are in seconds of the host's
    monotonic clock, their ranks and peers are ranks of the mesh. The host waited for the step's data for
    `data_wait_seconds` and issued `instructions` in `host_seconds`; `peak_bytes` is the largest GPU memory allocated so
    far, 0 on a CPU. `fp8` are the operands in 8 bits of a step that was sampled, `fp8_gradients` the gradients of one
    that was compared with the compute dtype. On a CPU `layer_waits` are the seconds, by op and stage, that the host
    waited for communication inside layers, and `starved` those that it was ready to run while other processes had the
    cores (HOST: between instructions). `expert_load` has, by layer and in some steps, the visits of this rank's
    tokens to each expert (see LOAD_EVERY); of tensor ranks the first has them. `expert_slots` is the room for tokens
    that it had for each other expert rank (0: without slots). `profile` is that of a step in the plan's
    `profile_steps`.
    """

    step: int
    losses: dict[int, float]
    sources: tuple[LossSum, ...]
    grad_norm: float
    learning_rate: float
    skipped: bool
    spans: tuple[Span, ...]
    data_wait_seconds: float
    host_seconds: float
    instructions: int
    peak_bytes: int
    squared_lse: float = 0.0
    router_squared_lse: float = 0.0
    program: int = 0
    samples: int = 0
    fp8: tuple[Fp8Sample, ...] = ()
    fp8_gradients: tuple[GradientSums, ...] = ()
    layer_waits: tuple[tuple[str, int, float], ...] = ()
    starved: tuple[tuple[str, int, float], ...] = ()
    expert_load: dict[int, tuple[int, ...]] = field(default_factory=dict)
    expert_slots: int = 0
    profile: RankProfile | None = None


@dataclass(frozen=True)
class EvalResult:
    """An evaluation of one data set: the sum of the losses of its `tokens` targets, of `sequences` sequences. The same
    on all ranks."""

    name: str
    loss_sum: float
    tokens: int
    sequences: int


class Evaluation(NamedTuple):
    """One rank's results of an evaluation of weights that have had `step` steps, by data set, which took `seconds`, and
    the spans of its last round, as in StepResult."""

    step: int
    data_sets: tuple[EvalResult, ...]
    spans: tuple[Span, ...] = ()
    seconds: float = 0.0


class WrittenShards(NamedTuple):
    """What a rank has written of a checkpoint: its entries for the manifest; copying its state to host memory took
    `snapshot_seconds`, beside training on a GPU."""

    entries: list[dict[str, Any]]
    snapshot_seconds: float = 0.0


class Committed(NamedTuple):
    """A checkpoint that a rank has committed: the hash of its manifest, and the steps of all that count."""

    manifest: str
    saved: list[int]


@dataclass(frozen=True)
class RankSnapshot:
    """The state of a rank after its generation was aborted.

    Its weights have had `version` steps, the last with this global gradient `norm` and these `losses` (see
    CommittedStep).
    `ready`: the gradients of the next step are complete and lack only their global norm. `results` are of the last
    steps, and `evaluations` the last ones; the driver may have some.
    """

    version: int
    ready: bool
    norm: float
    results: tuple[StepResult, ...]
    losses: tuple[float, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()


def sums_by_source(losses: np.ndarray, row_sources: np.ndarray, target_tokens: Iterable[float]) -> tuple[LossSum, ...]:
    """Added in the order of rows, so that every mesh gets the same bits."""
    tokens = list(map(int, target_tokens))
    sums = np.bincount(row_sources, losses, minlength=len(tokens))
    return tuple(LossSum(*each) for each in zip(sums.tolist(), tokens, strict=True))


def total_load(loads: Iterable[Mapping[int, tuple[int, ...]]]) -> dict[int, tuple[int, ...]]:
    """The visits to each expert, by layer, added up over what was counted."""
    found: dict[int, tuple[int, ...]] = {}
    for layer, load in (item for each in loads for item in each.items()):
        found[layer] = tuple(map(sum, zip(found[layer], load, strict=True))) if layer in found else load
    return dict(sorted(found.items()))


def longest_instruction(calls: Iterable[Sequence[StepResult]]) -> float:
    """Seconds of the longest compute instruction in the newest step of these calls; 0 without one."""
    newest = [call[-1] for call in calls if call][-1:]
    return max((s.end - s.start for each in newest for s in each.spans if s.lane == "compute"), default=0.0)
