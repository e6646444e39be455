"""The sections on how steps train: the optimizer (docs/optimizers.md), spikes, dtypes with FP8 (docs/fp8.md), and
ZeRO (docs/parallelism.md)."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from pentad.orchestrator.config.errors import Broken, shown
from pentad.orchestrator.config.sections import MOST, Count, CountOrZero, MeshSection, Section, Text
from pentad.schedules.spec.learning_rate import DecayShape, LearningRate, ScheduleName
from pentad.schedules.spec.lora import LoraSpec, trained_tensors
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.optimizer import AdjustLrFn, Method, SpikeSpec, original_name

Decay = Annotated[float, Field(ge=0, lt=1)]


class GroupSection(Section):
    """A group of parameters."""

    pattern: Text
    """names of tensors, with * and ? as in a shell"""
    learning_rate_scale: PositiveFloat = 1.0
    """factor of the learning rate"""
    weight_decay: NonNegativeFloat | None = None
    """decoupled weight decay; null: optimizer.weight_decay for matrices, 0 for norms"""


class OptimizerSection(Section):
    """The optimizer and its learning rate (docs/optimizers.md)."""

    name: Method = "adamw"
    """adamw, or muon for the matrices inside layers and adamw for all else"""
    learning_rate: PositiveFloat = Field(default=3e-3, description="peak learning rate")
    min_learning_rate: NonNegativeFloat | None = None
    """learning rate at the end of the schedule; null: a tenth of learning_rate"""
    schedule: ScheduleName = "cosine"
    """how the learning rate goes from its peak to min_learning_rate; wsd: warm-up, stable, decay"""
    warmup_steps: CountOrZero | None = None
    """steps of linear warm-up; null: a tenth of decay_steps, but at most 100"""
    decay_steps: Count | None = None
    """steps of the schedule, warm-up included; null: run.steps when the run first starts, which a resume keeps"""
    stable_steps: CountOrZero | None = None
    """steps at the peak between warm-up and decay, for schedule wsd; null: until a fifth of decay_steps is left"""
    decay_shape: DecayShape | None = None
    """curve of the decay, for schedule wsd; null: linear"""
    cycles: Count | None = None
    """cosines, one after another, for schedule cosine_with_restarts"""
    beta1: Decay = Field(default=0.9, description="decay of the first moment")
    beta2: Decay = Field(default=0.95, description="decay of the second moment")
    eps: PositiveFloat = Field(default=1e-8, description="added to the square root of the second moment")
    weight_decay: float = Field(default=0.1, ge=0, description="decoupled weight decay of matrices")
    groups: list[GroupSection] | None = None
    """tensors with their own learning rate or weight decay, as mappings of pattern, learning_rate_scale and
    weight_decay; the first pattern that matches counts"""
    momentum: Decay = Field(default=0.95, description="decay of Muon's momentum")
    nesterov: bool = Field(default=True, description="Nesterov's momentum in Muon")
    adjust_lr_fn: AdjustLrFn = "match_rms_adamw"
    """Muon's learning rate by a matrix's shape: match_rms_adamw makes updates as large as AdamW's, so that both share
    learning_rate; original is sqrt(max(1, rows / columns))"""
    clip_norm: PositiveFloat | None = 1.0
    """largest global norm of the gradients, which are scaled down to it; null: no clipping"""
    z_loss: NonNegativeFloat = 0.0
    """weight of the mean squared log-sum-exp of the logits, which is added to the loss but logged by itself"""

    def rules(self) -> Iterator[Broken | str]:
        low, peak = self.min_learning_rate, self.learning_rate
        if low is not None and low > peak:
            yield Broken("min_learning_rate", f"at most optimizer.learning_rate = {peak:g}", f"{low:g}")
        if self.schedule != "wsd":
            for key in ("stable_steps", "decay_shape"):
                if getattr(self, key) is not None:
                    yield Broken(key, f"null for optimizer.schedule {self.schedule}: it belongs to wsd")
        if self.schedule == "cosine_with_restarts" and self.cycles is None:
            yield Broken("cycles", "the number of cosines of optimizer.schedule cosine_with_restarts")
        if self.schedule != "cosine_with_restarts" and self.cycles is not None:
            yield Broken("cycles", f"null for optimizer.schedule {self.schedule}: it belongs to cosine_with_restarts")
        if self.name != "muon":
            for key in ("momentum", "nesterov", "adjust_lr_fn"):
                value, default = getattr(self, key), type(self).model_fields[key].default
                if value != default:
                    yield Broken(key, f"{shown(default)} for optimizer.name {self.name}: it belongs to muon")
        if self.decay_steps is not None:
            yield from self.phase_rules("optimizer.decay_steps", self.decay_steps)

    def group_rules(self, model: ModelSpec, lora: LoraSpec | None = None) -> Iterator[str]:
        """Every pattern must match a tensor that is trained."""
        if not self.groups:
            return
        names = sorted({original_name(each) for each in trained_tensors(model, lora)})
        for number, group in enumerate(self.groups):
            if not any(fnmatchcase(name, group.pattern) for name in names):
                near = difflib.get_close_matches(group.pattern, names, n=3, cutoff=0.3) or names[:3]
                expected = f"a pattern that matches a tensor of the model, such as {', '.join(near)}"
                yield f"optimizer.groups[{number}].pattern is {shown(group.pattern)}: expected {expected}"

    def phase_rules(self, name: str, decay_steps: int, prefix: str = "") -> Iterator[Broken]:
        """The phases must fit into a schedule of `decay_steps`, which is the value of the key `name`."""
        curve = self.curve(decay_steps)
        if curve.warmup_steps > decay_steps:
            yield Broken(f"{prefix}warmup_steps", f"at most {name} = {decay_steps}")
        elif curve.warmup_steps + curve.stable_steps > decay_steps:
            expected = f"at most {name} - optimizer.warmup_steps = {decay_steps - curve.warmup_steps}"
            yield Broken(f"{prefix}stable_steps", expected)

    def curve(self, run_steps: int) -> LearningRate:
        """The learning rates of a run that first started with this many steps."""
        steps = self.decay_steps or run_steps
        warmup = min(100, steps // 10) if self.warmup_steps is None else self.warmup_steps
        stable = max(0, steps - steps // 5 - warmup) if self.stable_steps is None else self.stable_steps
        return LearningRate(
            peak=self.learning_rate,
            minimum=self.learning_rate / 10 if self.min_learning_rate is None else self.min_learning_rate,
            warmup_steps=warmup,
            decay_steps=steps,
            schedule=self.schedule,
            stable_steps=stable if self.schedule == "wsd" else 0,
            decay_shape=self.decay_shape or "linear",
            cycles=self.cycles or 1,
        )


class SpikesSection(Section):
    """Steps whose loss or gradient norm is not finite or a spike: far above that of the steps before
    (docs/spikes.md)."""

    policy: Literal["none", "skip", "rollback", "stop"] = "none"
    """skip: such a step changes no weight; stop: the run stops as well; rollback: the run goes back to the last
    checkpoint by steps and leaves out the batches since; none: only a step with a gradient norm that is not finite
    changes no weight"""
    threshold: PositiveFloat = 6.0
    """standard deviations above the window's mean from which on a value is a spike"""
    window: int = Field(default=128, ge=2, le=MOST, description="latest steps that a step is compared with")
    min_steps: int = Field(default=64, ge=2, le=MOST, description="steps in the window before any step can be a spike")
    max_consecutive: Count = 10
    """such steps in a row, or rollbacks to the same checkpoint, after which the run fails"""

    def rules(self) -> Iterator[Broken | str]:
        if self.min_steps > self.window:
            yield Broken("min_steps", f"at most spikes.window = {self.window}")

    @property
    def spec(self) -> SpikeSpec | None:
        """None if ranks need not look for spikes."""
        return None if self.policy == "none" else SpikeSpec(self.threshold, self.window, self.min_steps)


class PrecisionSection(Section):
    """Dtypes and determinism."""

    compute: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    """dtype of compute; auto: bfloat16 on GPUs and float32 on CPUs. Master weights, gradients and optimizer state are
    float32 (float64 if compute is)"""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """dtype in which gradients are sent to be summed over replicas and ZeRO's shards. float32: that of the main
    gradients; bfloat16: half the bytes, with terms rounded to bfloat16 and summed in float32, in the order of ranks
    (docs/parallelism.md)"""
    optimizer_state: Literal["auto", "bfloat16"] = "auto"
    """dtype of moments and momentum; auto: that of the master weights"""
    matmul: Literal["compute", "fp8-tensor", "fp8-row", "fp8-block"] = "compute"
    """number format of the GEMMs of decoder layers, forward and backward. compute: precision.compute. fp8-...: 8-bit
    floating point with one scale per tensor, one per row or, as in DeepSeek-V3, one per 128 values of activations and
    per 128 x 128 block of weights; emulated on CPUs. Embedding, norms, routers, projections to latents (MLA) and the
    core of attention stay in precision.compute"""
    fp8_gradients: Literal["e4m3", "e5m2"] = "e4m3"
    """8-bit format of the gradients of activations: e5m2 has more range and less precision; weights and activations are
    e4m3"""
    fp8_power_of_two_scales: bool = False
    """round scales up to powers of two, so that scaling changes only the exponent"""
    fp8_scaling: Literal["current", "delayed"] = "current"
    """absolute maximum by which fp8-tensor scales activations and gradients. current: the tensor's own; delayed: that
    of the step before, over all microbatches and ranks, so that a cast takes one pass and larger values saturate.
    Weights always use their own"""
    fp8_skip_first_layers: CountOrZero = 0
    """decoder layers at the start of the model that multiply in precision.compute"""
    fp8_skip_last_layers: CountOrZero = 0
    """decoder layers at the end of the model that multiply in precision.compute"""
    fp8_experts: Literal["auto", "always", "never"] = "auto"
    """whether the GEMMs of experts use FP8 too, with fp8-block; auto: if that is faster, by cluster.rates"""
    fp8_head: bool = False
    """whether the GEMMs of the output head use FP8 too; those of multi-token prediction with it do not"""
    fp8_sample_every: CountOrZero = 100
    """steps between samples of all FP8 operands: absolute maximum, saturated and underflowed values; 0: never. Other
    steps cost nothing"""
    compare_every: CountOrZero = 0
    """steps between comparisons of FP8's gradients with those in precision.compute: such a step runs twice; 0: never"""
    deterministic: bool = True
    """use kernels whose results are bit-identical in every run, at some cost in speed"""

    kernels: Literal["auto", "torch", "triton", "cudnn"] = "auto"
    """implementations that GPUs run (docs/performance.md). auto: the fastest as measured by `pentad calibrate CONFIG`,
    otherwise those that usually are; torch: the slow references that kernels are tested against, to tell a kernel's
    fault from a model's; triton: pentad's own kernels wherever there is one; cudnn: cuDNN's attention, if it serves all
    of the run's"""

    def rules(self) -> Iterator[Broken]:
        if self.fp8_scaling == "delayed" and self.matmul != "fp8-tensor":
            found = f"delayed with precision.matmul = {self.matmul}"
            yield Broken("fp8_scaling", "current, or matmul = fp8-tensor, which has a scale per tensor", found)
        if self.matmul == "compute" and self.fp8_head:
            yield Broken("fp8_head", "false, or a matmul in FP8", "true with precision.matmul = compute")
        if self.matmul == "compute" and self.fp8_experts == "always":
            found = "always with precision.matmul = compute"
            yield Broken("fp8_experts", "auto or never, or matmul = fp8-block", found)

    @property
    def bf16_reduce(self) -> bool:
        return self.reduce == "bfloat16"


class ZeroSection(Section):
    """ZeRO. Shards are over all ranks that hold the same parameters: dp, cp, ep (for all
    but experts), and the mirrored ranks of DualPipe; or over groups of them."""

    stage: int = Field(default=0, ge=0, le=3)
    """what is sharded: 0: nothing; 1: master weights and optimizer state; 2: gradients too; 3: weights too"""
    shards: Annotated[int, Field(ge=2, le=MOST)] | None = None
    """number of ranks that the state is divided over (docs/parallelism.md): that many consecutive ranks with the same
    parameters form a group, and each group holds all shards, so that weights can be gathered within a host; null: all
    of them"""
    max_gathered: Count | Literal["auto"] | None = None
    """most units whose gathered weights a rank holds at once, with zero.stage 3; null: 2, or all if stages are not
    divided into units; auto: 2, or all units of a rank, gathered once a step, if those fit and take less time"""
    prefetch: CountOrZero = 1
    """forward and backward passes between the start of an all-gather of weights and their first use"""
    reduce: Literal["step", "microbatch"] | None = None
    """when gradients are reduced, with zero.stage 2 or 3. step: at the end of a step; microbatch: after every
    microbatch, so that a rank holds full gradients of only two units; null: microbatch if more than two units would
    hold them at once"""

    def rules(self) -> Iterator[Broken | str]:
        stage = f"with zero.stage = {self.stage}"
        if self.shards is not None and not self.stage:
            yield Broken("shards", "null, since nothing is sharded", f"{self.shards} {stage}")
        if self.max_gathered is not None and self.stage < 3:
            expected = "null, since weights are sharded only with zero.stage = 3"
            yield Broken("max_gathered", expected, f"{self.max_gathered} {stage}")
        if self.reduce == "microbatch" and self.stage < 2:
            expected = "null or step, since gradients are sharded only with zero.stage = 2 or 3"
            yield Broken("reduce", expected, f"microbatch {stage}")
        if self.prefetch != 1 and self.stage < 3:
            expected = "1, since weights are gathered before their use only with zero.stage = 3"
            yield Broken("prefetch", expected, f"{self.prefetch} {stage}")

    def mesh_rules(self, mesh: MeshSection, *, has_experts: bool) -> Iterator[Broken]:
        """Ranks that hold the same experts must fill groups; so those that hold the same other parameters do too."""
        holders = _holders(mesh, has_experts=has_experts)
        if self.shards is not None and holders % self.shards:
            fitting = [str(count) for count in range(2, holders + 1) if holders % count == 0]
            held = "experts" if has_experts else "parameters"
            expected = " or ".join((", ".join(fitting), "null")) if fitting else "null"
            yield Broken("zero.shards", f"{expected}, since {holders} ranks hold the same {held}")

    def shards_on(self, mesh: MeshSection, *, has_experts: bool) -> int | None:
        """`shards` on another mesh: if they do not fit, the next larger number, so that no rank needs more memory."""
        if self.shards is None:
            return None
        holders = _holders(mesh, has_experts=has_experts)
        return next((count for count in range(self.shards, holders + 1) if holders % count == 0), None)


def _holders(mesh: MeshSection, *, has_experts: bool) -> int:
    """The number of ranks that hold the same parameters, mirrors aside: of experts if there are any, as these have the
    fewest."""
    return mesh.replicas // mesh.ep if has_experts else mesh.replicas
