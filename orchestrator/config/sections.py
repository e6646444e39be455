"""The sections of a run's configuration: small strict models, where every field says what it means.

A rule over several fields lives in the smallest model that sees them all, and its message names the full keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pentad.orchestrator.config.errors import RuleErrors
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.schedule_spec import MemoryOptions, ScheduleOptions

MOST_BUCKETS = 2**14  # of a stage's gradients
Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """No unknown keys, no silent conversions, no infinities, no changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def rules(self) -> Iterator[str]:
        """A sentence for each error that takes several fields to see."""
        yield from ()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if found := list(self.rules()):
            raise RuleErrors(found)
        return self


class RunSection(Section):
    name: str = Field(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=100, description="names the run's folder below run.folder"
    )
    seed: int = Field(
        default=0, ge=0, le=2**63 - 1, description="the only source of randomness: initial weights, order of samples"
    )
    steps: Count = Field(description="optimizer steps of the run, counted over all resumes")
    folder: str = Field(default="runs", min_length=1, description="folder of all runs")


class MeshSection(Section):
    dp: Count = Field(default=1, description="replicas that hold different samples")
    pp: Count = Field(default=1, description="pipeline ranks of a replica")
    cp: Count = Field(default=1, description="ranks that split a sequence")
    tp: Count = Field(default=1, description="ranks that split a layer's heads, ffn and vocabulary, and tokens between")
    ep: Count = Field(default=1, description="ranks that split experts and hold different samples")
    cp_method: Literal["ring", "all_gather", "ulysses"] = Field(
        default="ring",
        description="how cp ranks attend to each other's tokens: keys and values go round, are gathered, or heads for "
        "tokens are exchanged",
    )
    tp_across_nodes: bool = Field(default=False, description="whether tp ranks may be on several nodes")

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.dp, self.pp, self.cp, self.tp, self.ep)

    @property
    def size(self) -> int:
        return self.mesh.size

    @property
    def replicas(self) -> int:
        """Ranks that hold the same dense parameters, mirrors aside."""
        return self.dp * self.cp * self.ep


class ScheduleSection(Section):
    name: str = Field(description="pipeline schedule, as `pentad schedule --help` lists them")
    microbatches: Count = Field(description="parts that a replica's share of a step's batch is cut into")
    chunks: Count | None = Field(
        default=None, description="parts that a rank's layers are cut into; null: as the schedule likes, else if it can"
    )
    group: Count | None = Field(
        default=None, description="microbatches that take turns on the chunks of an interleaved schedule; null: mesh.pp"
    )
    memory_limit: float | None = Field(
        default=None, ge=1, description="activations a rank may keep, in microbatches of a whole rank; null: no limit"
    )

    slices: Count | None = Field(
        default=None, description="parts that sequences are cut into on their way; null: as the schedule likes"
    )
    post_validation: bool = Field(
        default=False,
        description="a step runs ahead of its global norm, and is done again when that is over clip_norm or not finite",
    )

    @property
    def options(self) -> ScheduleOptions:
        return ScheduleOptions(self.chunks, self.group, self.memory_limit, self.slices)


class BatchSection(Section):
    global_batch_size: Count = Field(
        description="sequences a step over the whole mesh, a multiple of dp x microbatches"
    )
    sequence_length: Count = Field(description="tokens a sequence")


class DataSection(Section):
    path: str = Field(min_length=1, description="folder that `pentad data build` wrote, or builtin:pydoc")
    document_mask: bool = Field(default=False, description="whether attention stops at the ends of documents")
    cache: str = Field(default="~/.cache/pentad", min_length=1, description="folder where builtin data is built once")


class OptimizerSection(Section):
    learning_rate: Positive = Field(default=3e-3, description="peak learning rate of AdamW")
    min_learning_rate: float | None = Field(
        default=None, ge=0, description="learning rate after the last step; null: a tenth of learning_rate"
    )
    warmup_steps: int | None = Field(
        default=None, ge=0, description="steps of linear warm-up; null: a tenth of run.steps, at most 100"
    )
    beta1: Share = Field(default=0.9, description="decay of the first moment")
    beta2: Share = Field(default=0.95, description="decay of the second moment")
    eps: Positive = Field(default=1e-8, description="added to the root of the second moment")
    weight_decay: float = Field(default=0.1, ge=0, description="decoupled weight decay, of matrices only")
    clip_norm: Positive = Field(default=1.0, description="largest global norm of a step's gradients")

    def rules(self) -> Iterator[str]:
        low, peak = self.min_learning_rate, self.learning_rate
        if low is not None and low > peak:
            yield f"optimizer.min_learning_rate is {low:g}: expected at most optimizer.learning_rate = {peak:g}"


class PrecisionSection(Section):
    compute: Literal["auto", "bfloat16", "float32", "float64"] = Field(
        default="auto", description="dtype of compute; auto: bfloat16 on GPUs, float32 on CPUs; masters stay float32"
    )
    deterministic: bool = Field(default=True, description="whether two runs must have the same bits, at some speed")


class MemorySection(Section):
    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="what is computed again instead of kept; selective: norms and the widest product; full: all of F",
    )
    recompute_stages: list[NonNegative] | None = Field(
        default=None, description="pipeline stages that recompute; null: all"
    )
    max_resident_microbatches: Positive | None = Field(
        default=None,
        description="activations that stay on a device, in microbatches of a whole rank; others wait on the host; "
        "null: all stay",
    )

    def rules(self) -> Iterator[str]:
        stages, resident = self.recompute_stages, self.max_resident_microbatches
        if stages == []:
            yield "memory.recompute_stages is []: expected at least one stage, or null for all"
        elif stages is not None and self.recompute == "none":
            yield f"memory.recompute_stages is {stages}, but memory.recompute is none: expected selective or full"
        if resident is not None and self.recompute == "selective":
            found = f"memory.max_resident_microbatches is {resident:g}, but memory.recompute is selective"
            yield f"{found}: expected none or full"

    def modes(self, stages: int) -> tuple[str, ...]:
        """What each of so many stages recomputes (see Plan); empty if none does."""
        if self.recompute == "none":
            return ()
        chosen = range(stages) if self.recompute_stages is None else self.recompute_stages
        return tuple(self.recompute if stage in chosen else "none" for stage in range(stages))

    def options(self, stages: int) -> MemoryOptions:
        """The options of a program of so many stages."""
        recompute = frozenset(stage for stage, mode in enumerate(self.modes(stages)) if mode != "none")
        return MemoryOptions(recompute=recompute, max_resident=self.max_resident_microbatches)


class ZeroSection(Section):
    stage: int = Field(
        default=0,
        ge=0,
        le=3,
        description="what replicas and mirrors keep a shard of each: 1 master weights and optimizer state, "
        "2 gradients too, 3 compute weights too; a rank whose stages no other holds keeps all",
    )
    max_gathered: Count | None = Field(
        default=None, description="pipeline stages whose weights a rank has whole at once, with stage 3; null: all"
    )
    prefetch: NonNegative = Field(
        default=1, description="forwards and backwards that a gather of weights begins before its stage's turn"
    )
    bucket_mib: Positive | None = Field(
        default=400.0,
        description="MiB of gradients that are reduced at once, also with stage 0, while the backward pass makes those "
        "of earlier layers; null: a pipeline stage's in one",
    )

    def buckets(self, gradients: Sequence[int]) -> tuple[int, ...]:
        """In how many parts each stage's gradients are reduced, of so many bytes; empty where that is one. Raises
        PentadError for more than MOST_BUCKETS."""
        if self.bucket_mib is None:
            return ()
        found = tuple(max(1, math.ceil(size / (self.bucket_mib * 2**20))) for size in gradients)
        if max(found) > MOST_BUCKETS:
            least = max(gradients) / MOST_BUCKETS / 2**20
            text = f"zero.bucket_mib is {self.bucket_mib:g}: expected at least {least:.3g}"
            raise PentadError(f"{text}: a stage's gradients in at most {MOST_BUCKETS} parts")
        return found if max(found) > 1 else ()

    def rules(self) -> Iterator[str]:
        if self.max_gathered is not None and self.stage < 3:
            expected = "expected null, since only with zero.stage = 3 are weights ever not whole"
            yield f"zero.max_gathered is {self.max_gathered} with zero.stage = {self.stage}: {expected}"
        if self.prefetch != 1 and self.stage < 3:
            expected = "expected 1, since only with zero.stage = 3 do gathers wait for their turn"
            yield f"zero.prefetch is {self.prefetch} with zero.stage = {self.stage}: {expected}"


class CheckpointSection(Section):
    every: NonNegative = Field(default=0, description="steps between checkpoints; 0: only at the end or at a stop")
    keep: Count = Field(default=2, description="newest checkpoints kept")


class ElasticSection(Section):
    max_failures: NonNegative = Field(default=100, description="faults that a run survives; 0: the first one ends it")
    min_ranks: Count | None = Field(
        default=None, description="fewest ranks to go on with when places are missing; null: all of the mesh"
    )
    wait_seconds: float = Field(
        default=30.0, ge=0, description="wait for a lost rank's place before the mesh is made smaller or the run ends"
    )
    hang_seconds: Positive = Field(
        default=10.0, description="least time without any progress after which the rank that causes it counts as hung"
    )


class MetricsSection(Section):
    port: int = Field(default=0, ge=0, le=65535, description="the Prometheus exporter's port; 0: a free one")
    host: str = Field(
        default="127.0.0.1", min_length=1, description="address the exporter and the control service listen on"
    )
    control_port: int = Field(default=0, ge=0, le=65535, description="the control service's port; 0: a free one")
    timeline_steps: NonNegative = Field(default=5, description="last steps whose measured timeline is kept")


class ClusterSection(Section):
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="where ranks run; auto: GPUs if there")
    transport: Literal["auto", "peer", "nccl"] = Field(
        default="auto", description="what moves activations between GPUs; auto: peer copies inside one host, else nccl"
    )
    address: str = Field(
        default="local", min_length=1, description="Ray cluster: local starts one, auto joins one, or HOST:PORT"
    )
    dashboard: bool = Field(default=True, description="whether a local cluster has a Ray dashboard")
    dashboard_port: int = Field(default=0, ge=0, le=65535, description="the dashboard's port; 0: a free one")
    auth: Literal["token", "disabled"] = Field(default="token", description="whether Ray's interfaces demand a token")
    stop_timeout_seconds: Positive = Field(
        default=120.0, description="longest time that a submitted job gets to finish its step and checkpoint"
    )
    start_timeout_seconds: Positive = Field(default=60.0, description="longest wait for ranks to be placed and started")
