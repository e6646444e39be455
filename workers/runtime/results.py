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
    """A sum of token losses and the number of target tokens in it."""

    loss: float
    target_tokens: int


@dataclass(frozen=True)
class StepResult:
    """One rank's result of one step, which ran program `program` of the plan.

    `losses` are sums over target tokens, by microbatch of a global batch whose rows are in the order drawn (whatever
    microbatches they were dealt to), and `sources` the same by data source. `samples` is the digest of all samples
    whose losses were counted (see `digest_of`). `squared_lse` is the sum of squared log-sum-exps of the logits, for a
    z-loss, and `router_squared_lse` that of all routers' logits. `grad_norm` is the global norm before clipping; if it
    was not finite, or the step was a spike, the step was `skipped`: no weight changed. `spans` are in seconds of the
    host's monotonic clock; their ranks and peers are ranks of the mesh. The host waited `data_wait_seconds` for the
    step's data and issued `instructions` in `host_seconds`. `peak_bytes` is the peak of allocated GPU memory so far, 0
    on a CPU. `fp8` are the operands in 8 bits of a sampled step, `fp8_gradients` the gradients of a step compared with
    the compute dtype. On a CPU, `layer_waits` are the seconds, by op and stage, that the host waited for communication
    inside layers, and `starved` the seconds that it was ready to run while other processes had the cores (HOST: between
    instructions). `expert_load` has, by layer and in some steps (see LOAD_EVERY), the visits of this rank's tokens to
    each expert; only the first tp rank reports it. `expert_slots` is the room for tokens to each other expert rank (0:
    without slots). `profile` is set in the plan's `profile_steps`.
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
    """An evaluation of one data set: the sum of the losses of its `tokens` targets in `sequences` sequences. The same
    on all ranks."""

    name: str
    loss_sum: float
    tokens: int
    sequences: int


class Evaluation(NamedTuple):
    """One rank's results, by data set, of evaluating the weights after `step` steps, which took `seconds`. `spans` are
    those of the last round, as in StepResult."""

    step: int
    data_sets: tuple[EvalResult, ...]
    spans: tuple[Span, ...] = ()
    seconds: float = 0.0


class WrittenShards(NamedTuple):
    """What a rank has written of a checkpoint: its entries for the manifest. Copying its state to host memory took
    `snapshot_seconds`; on a GPU, training continued meanwhile."""

    entries: list[dict[str, Any]]
    snapshot_seconds: float = 0.0


class Committed(NamedTuple):
    """A checkpoint that a rank has committed: the hash of its manifest, and the steps of all committed checkpoints."""

    manifest: str
    saved: list[int]


@dataclass(frozen=True)
class RankSnapshot:
    """The state of a rank after its generation was aborted.

    Its weights have had `version` steps, the last with global gradient norm `norm` and losses `losses` (see
    CommittedStep). `ready`: the gradients of the next step are complete and lack only their global norm. `results` and
    `evaluations` are the most recent ones; the driver may already have some.
    """

    version: int
    ready: bool
    norm: float
    results: tuple[StepResult, ...]
    losses: tuple[float, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()


def sums_by_source(losses: np.ndarray, row_sources: np.ndarray, target_tokens: Iterable[float]) -> tuple[LossSum, ...]:
    """The losses summed by data source, in the order of rows, so that every mesh gets the same bits."""
    tokens = list(map(int, target_tokens))
    sums = np.bincount(row_sources, losses, minlength=len(tokens))
    return tuple(LossSum(*each) for each in zip(sums.tolist(), tokens, strict=True))


def total_load(loads: Iterable[Mapping[int, tuple[int, ...]]]) -> dict[int, tuple[int, ...]]:
    """The visits to each expert, by layer, summed over `loads`."""
    found: dict[int, tuple[int, ...]] = {}
    for layer, load in (item for each in loads for item in each.items()):
        found[layer] = tuple(map(sum, zip(found[layer], load, strict=True))) if layer in found else load
    return dict(sorted(found.items()))


def longest_instruction(calls: Iterable[Sequence[StepResult]]) -> float:
    """Seconds of the longest compute instruction in the newest step of these calls; 0 if there is none."""
    newest = [call[-1] for call in calls if call][-1:]
    return max((s.end - s.start for each in newest for s in each.spans if s.lane == "compute"), default=0.0)
