"""The sections of a run's configuration, whose descriptions are its reference (docs/configuration.md).

A rule over several fields is in the smallest section that has them all, and its sentence names full keys.
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

MAX_BUCKETS = 2**14  # of a stage's gradients
Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
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
    """Names, seeds and counts the run."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$",
        max_length=100,
        description="name of the run and of its folder; starting a run of the same name again resumes it",
    )
    seed: int = Field(
        default=0,
        ge=0,
        le=2**63 - 1,
        description="seed of the initial weights and of the order of samples, the only source of randomness",
    )
    steps: Count = Field(description="optimizer steps of the run, counted over all resumes")
    folder: str = Field(default="runs", min_length=1, description="folder that holds the folders of all runs")


class MeshSection(Section):
    """The five axes of parallelism. A run has dp x pp x cp x tp x ep ranks, one GPU or CPU process each."""

    dp: Count = Field(default=1, description="data parallel replicas: ranks with different samples")
    pp: Count = Field(default=1, description="pipeline ranks of a replica, which split the layers")
    cp: Count = Field(default=1, description="context parallel ranks, which split each sequence")
    tp: Count = Field(
        default=1,
        description="tensor parallel ranks, which split the weights of a layer and the vocabulary, and between "
        "products the tokens",
    )
    ep: Count = Field(
        default=1, description="expert parallel ranks, which split the experts and have different samples"
    )
    cp_method: Literal["ring", "all_gather", "ulysses"] = Field(
        default="ring",
        description="attention across cp ranks: keys and values travel around a ring, are gathered, or ranks exchange "
        "parts of the sequence for heads (Ulysses)",
    )
    tp_across_nodes: bool = Field(default=False, description="allow the tp ranks of a layer on more than one node")

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
    """The pipeline schedule (docs/schedules.md)."""

    name: str = Field(
        description="a schedule that `pentad schedule --help` lists, auto, FILE.py:FUNCTION, FILE.csv or FILE.arrow"
    )
    microbatches: Count = Field(description="microbatches that each replica splits its share of a batch into")
    chunks: Count | None = Field(
        default=None, description="model chunks of each rank, for interleaved schedules; null: the schedule's default"
    )
    group: Count | None = Field(
        default=None,
        description="microbatches that an interleaved schedule runs on one chunk before the next chunk; null: mesh.pp",
    )
    memory_limit: float | None = Field(
        default=None,
        ge=1,
        description="most activations that auto, zb-1p or zb-2p may save on a rank, in microbatches of all its layers; "
        "null: no limit",
    )
    slices: Count | None = Field(
        default=None, description="slices of each sequence, for seq-1f1b; null: 4, or fewer if they do not divide it"
    )
    post_validation: bool = Field(
        default=False,
        description="start the next step before the global gradient norm is known, and redo the optimizer step if the "
        "norm exceeds optimizer.clip_norm or is not finite",
    )

    @property
    def options(self) -> ScheduleOptions:
        return ScheduleOptions(self.chunks, self.group, self.memory_limit, self.slices)


class BatchSection(Section):
    """The samples of an optimizer step."""

    global_batch_size: Count = Field(
        description="sequences of a step over all ranks, a multiple of mesh.dp x mesh.ep x schedule.microbatches"
    )
    sequence_length: Count = Field(description="tokens of a sequence")


class DataSection(Section):
    """The corpus."""

    path: str = Field(min_length=1, description="folder that `pentad data build` wrote, or builtin:pydoc")
    document_mask: bool = Field(
        default=False, description="attend only within a document where a sequence holds several"
    )
    cache: str = Field(
        default="~/.cache/pentad", min_length=1, description="folder in which built-in corpora are built"
    )


class OptimizerSection(Section):
    """AdamW with linear warm-up and cosine decay."""

    learning_rate: Positive = Field(default=3e-3, description="peak learning rate")
    min_learning_rate: float | None = Field(
        default=None, ge=0, description="learning rate after the last step; null: a tenth of learning_rate"
    )
    warmup_steps: int | None = Field(
        default=None, ge=0, description="steps of linear warm-up; null: a tenth of run.steps, but at most 100"
    )
    beta1: Decay = Field(default=0.9, description="decay of the first moment")
    beta2: Decay = Field(default=0.95, description="decay of the second moment")
    eps: Positive = Field(default=1e-8, description="added to the square root of the second moment")
    weight_decay: float = Field(default=0.1, ge=0, description="decoupled weight decay of matrices")
    clip_norm: Positive = Field(
        default=1.0, description="largest global norm of the gradients; larger ones are clipped"
    )

    def rules(self) -> Iterator[str]:
        low, peak = self.min_learning_rate, self.learning_rate
        if low is not None and low > peak:
            yield f"optimizer.min_learning_rate is {low:g}: expected at most optimizer.learning_rate = {peak:g}"


class PrecisionSection(Section):
    """Dtypes and determinism."""

    compute: Literal["auto", "bfloat16", "float32", "float64"] = Field(
        default="auto",
        description="dtype of compute; auto: bfloat16 on GPUs and float32 on CPUs. Master weights, gradients and "
        "optimizer state are float32 (float64 if compute is)",
    )
    deterministic: bool = Field(
        default=True, description="use kernels whose results are bit-identical in every run, at some cost in speed"
    )


class MemorySection(Section):
    """Recomputation and offloading of activations."""

    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="activations that backward recomputes: none; selective: norms and the wide products of "
        "feed-forward networks; full: everything but the input of a stage",
    )
    recompute_stages: list[NonNegative] | None = Field(
        default=None, description="pipeline stages that recompute; null: all"
    )
    max_resident_microbatches: Positive | None = Field(
        default=None,
        description="most activations that stay on a device, in microbatches of all its layers; the others are "
        "offloaded to host memory until their backward; null: all stay",
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
    """ZeRO and the reduction of gradients. Shards are over all ranks that hold the same parameters: dp, cp, ep (for all
    but experts), and the mirrored ranks of DualPipe."""

    stage: int = Field(
        default=0,
        ge=0,
        le=3,
        description="what is sharded: 0: nothing; 1: master weights and optimizer state; 2: gradients too; 3: weights "
        "too",
    )
    max_gathered: Count | None = Field(
        default=None,
        description="most pipeline stages whose weights a rank has gathered at once, with zero.stage 3; null: all",
    )
    prefetch: NonNegative = Field(
        default=1,
        description="forward and backward passes between the start of an all-gather of weights and their first use",
    )
    bucket_mib: Positive | None = Field(
        default=400.0,
        description="MiB of gradients that are reduced in one operation, with any zero.stage, while backward goes on; "
        "null: all of a stage in one",
    )

    def buckets(self, gradients: Sequence[int]) -> tuple[int, ...]:
        """The number of buckets for the gradients of each stage, given in bytes; empty if all have one. Raises
        PentadError for more than MAX_BUCKETS."""
        if self.bucket_mib is None:
            return ()
        found = tuple(max(1, math.ceil(size / (self.bucket_mib * 2**20))) for size in gradients)
        if max(found) > MAX_BUCKETS:
            least = max(gradients) / MAX_BUCKETS / 2**20
            text = f"zero.bucket_mib is {self.bucket_mib:g}: expected at least {least:.3g}"
            raise PentadError(f"{text} (a stage's gradients in at most {MAX_BUCKETS} buckets)")
        return found if max(found) > 1 else ()

    def rules(self) -> Iterator[str]:
        if self.max_gathered is not None and self.stage < 3:
            expected = "expected null, since weights are sharded only with zero.stage = 3"
            yield f"zero.max_gathered is {self.max_gathered} with zero.stage = {self.stage}: {expected}"
        if self.prefetch != 1 and self.stage < 3:
            expected = "expected 1, since weights are gathered before their use only with zero.stage = 3"
            yield f"zero.prefetch is {self.prefetch} with zero.stage = {self.stage}: {expected}"


class CheckpointSection(Section):
    """When checkpoints are saved (docs/recovery.md)."""

    every: NonNegative = Field(default=0, description="steps between checkpoints; 0: only at the end or when stopped")
    keep: Count = Field(default=2, description="newest checkpoints to keep; older ones are deleted")


class ElasticSection(Section):
    """What happens when ranks fail (docs/recovery.md)."""

    max_failures: NonNegative = Field(default=100, description="failures that a run survives; 0: the first one ends it")
    min_ranks: Count | None = Field(
        default=None, description="fewest ranks to continue with if lost ones cannot be replaced; null: all of the mesh"
    )
    wait_seconds: float = Field(
        default=30.0, ge=0, description="wait for a replacement before the mesh shrinks or the run ends"
    )
    hang_seconds: Positive = Field(
        default=10.0, description="time without progress after which a rank counts as hung, at the least"
    )


class MetricsSection(Section):
    """Metrics, timelines and remote control (docs/observability.md)."""

    port: int = Field(default=0, ge=0, le=65535, description="port of the Prometheus exporter; 0: a free one")
    host: str = Field(
        default="127.0.0.1", min_length=1, description="address on which the exporter and the control service listen"
    )
    control_port: int = Field(default=0, ge=0, le=65535, description="port of the control service; 0: a free one")
    timeline_steps: NonNegative = Field(default=5, description="last steps of which the measured timeline is kept")


class ClusterSection(Section):
    """Where the ranks run (docs/cluster.md)."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="device of the ranks; auto: GPUs if the cluster has any"
    )
    transport: Literal["auto", "peer", "nccl"] = Field(
        default="auto",
        description="how activations move between GPUs; auto: peer copies if all ranks are on one host, else NCCL",
    )
    address: str = Field(
        default="local",
        min_length=1,
        description="Ray cluster: local starts one here, auto joins the running one, HOST:PORT joins the one there",
    )
    dashboard: bool = Field(default=True, description="start the Ray dashboard of a local cluster")
    dashboard_port: int = Field(default=0, ge=0, le=65535, description="port of that dashboard; 0: a free one")
    auth: Literal["token", "disabled"] = Field(
        default="token", description="whether Ray's interfaces ask for an authentication token"
    )
    stop_timeout_seconds: Positive = Field(
        default=120.0, description="time that a stopped job has to finish its step and save a checkpoint"
    )
    start_timeout_seconds: Positive = Field(default=60.0, description="longest wait for ranks to be placed and started")
