"""The sections of a run's configuration. The text below a key describes it in the reference (docs/configuration.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PrivateAttr,
    model_validator,
)

from pentad.orchestrator.config.errors import (
    Broken,
    RuleErrors,
    mode_or_parts,
    shown,
    within_or_auto,
    without_control_characters,
)
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.recompute import ROW_WISE, LayerPart, config_text, mode_of, recomputed_parts
from pentad.schedules.search.auto import AUTO
from pentad.schedules.spec.batch import BatchSizes, RampupStage
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.schedule_spec import MemoryOptions, ScheduleOptions
from pentad.schedules.spec.tensors import LayerRange

MAX_RANKS = 2**16
MOST = 2**31 - 1  # for any count, so that it fits into 32 bits
Count = Annotated[int, Field(ge=1, le=MOST)]
CountOrZero = Annotated[int, Field(ge=0, le=MOST)]
Port = Annotated[int, Field(ge=0, le=65535)]
Text = Annotated[str, Field(min_length=1), AfterValidator(without_control_characters)]
Recompute = Literal["none", "selective", "attention", "full", "auto"] | list[LayerPart]
Share = Annotated[float | Literal["auto"], BeforeValidator(within_or_auto(0, 1))]


class Section(BaseModel):
    """No unknown keys, no silent conversions, no infinities, no changes after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def rules(self) -> Iterator[Broken | str]:
        """Yields the broken rules that involve several keys, as Broken or as sentences. The smallest section that has
        all of the keys checks a rule."""
        yield from ()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if broken := list(self.rules()):
            raise RuleErrors(self, broken)
        return self


class RunSection(Section):
    """Names, seeds and counts the run."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=100)
    """name of the run and of its folder; starting a run of the same name again resumes it"""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """seed of the initial weights and of the order of samples, the only source of randomness"""
    steps: Count = Field(description="optimizer steps of the run, counted over all resumes")
    folder: Text = Field(default="runs", description="folder that holds the folders of all runs")
    init_from: Text | None = None
    """run, checkpoint or imported model whose weights a new run starts with (docs/stages.md); null: initial values"""
    init_optimizer: bool = Field(default=False, description="start with the optimizer state of run.init_from as well")
    init_step: bool = False
    """count the steps of run.init_from as steps of this run: learning rate and samples continue from there"""

    def rules(self) -> Iterator[Broken | str]:
        for name in ("init_optimizer", "init_step"):
            if getattr(self, name) and self.init_from is None:
                yield Broken(name, "false without run.init_from")
        if self.init_from == self.name:
            yield Broken("init_from", "another run than run.name")
        if "://" in self.folder:
            yield Broken("folder", "a folder of a file system (checkpoint.path may be in a store)")


class MeshSection(Section):
    """The five axes of parallelism. A run has dp x pp x cp x tp x ep ranks, one GPU or CPU process each."""

    dp: Count = Field(default=1, description="data parallel replicas: ranks with different samples")
    pp: int = Field(default=1, ge=1, le=1024, description="pipeline ranks of a replica, which split the layers")
    cp: Count = Field(default=1, description="context parallel ranks, which split each sequence")
    tp: Count = 1
    """tensor parallel ranks, which split the weights of each layer, the vocabulary and, between GEMMs, the tokens"""
    ep: Count = 1
    """expert parallel ranks, which split the experts and have different samples"""
    cp_method: Literal["ring", "all_gather", "ulysses"] = "ring"
    """attention across cp ranks: keys and values travel around a ring, are gathered, or ranks exchange parts of the
    sequence for heads (Ulysses)"""
    ep_capacity: NonNegativeFloat | None = None
    """slots for tokens between ep ranks, as a multiple of what even routing needs; a step that needs more is run again
    with more slots. 0: no slots, and on GPUs each rank receives all tokens of its ep group; null: 1.5 on GPUs if fewer
    rows then travel between hosts, else 0"""
    tp_across_nodes: bool = Field(default=False, description="allow the tp ranks of a layer on more than one node")

    def rules(self) -> Iterator[Broken | str]:
        if self.mesh.size > MAX_RANKS:
            yield f"mesh is {self.mesh}, which has {self.mesh.size} ranks: expected at most {MAX_RANKS}"

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

    name: str
    """a schedule that `pentad schedule --help` lists, auto, FILE.py:FUNCTION, FILE.csv or FILE.arrow"""
    microbatches: Count = Field(description="microbatches that each replica splits its share of a batch into")
    chunks: Count | None = None
    """model chunks of each rank, for interleaved schedules; null: the schedule's default"""
    group: Count | None = None
    """microbatches that an interleaved schedule runs on one chunk before the next chunk; null: mesh.pp"""
    memory_limit: float | None = Field(default=None, ge=1)
    """most activations that auto, zb-1p or zb-2p may save on a rank, in microbatches of all its layers; null: no
    limit"""
    slices: Count | None = None
    """slices of each sequence, for seq-1f1b; null: 4, or fewer if they do not divide it"""
    layers_per_stage: list[Count] | None = None
    """layers of each pipeline stage, in the order of the model; null: as even as possible, with the head counted as the
    layers that it costs"""
    post_validation: bool = False
    """start the next step before the global gradient norm is known, and redo the optimizer step if the norm exceeds
    optimizer.clip_norm or is not finite"""
    replan: bool | None = None
    """search the order of auto once more with the costs measured in the first steps, and change to a faster one with
    the same bits (docs/auto.md); null: true for auto, which alone has a choice"""
    _order: Program | None = PrivateAttr(None)  # the order that a run was re-planned to; in no file

    @property
    def options(self) -> ScheduleOptions:
        return ScheduleOptions(self.chunks, self.group, self.memory_limit, self.slices)

    @property
    def order(self) -> Program | None:
        """The compute order that a run with schedule auto was re-planned to, if it was."""
        return self._order

    def with_order(self, order: Program) -> ScheduleSection:
        changed = self.model_copy()
        changed._order = order
        return changed

    def layer_rules(self, pp: int, stages: int, layers: int) -> Iterator[str]:
        """`stages` are the schedule's; with auto, only its program tells how many there are."""
        sizes = self.layers_per_stage
        if sizes is None:
            return
        is_auto = self.name == AUTO
        fits = len(sizes) % pp == 0 if is_auto else len(sizes) == stages
        if not fits or sum(sizes) != layers:
            count = f"mesh.pp = {pp} numbers, or 2 to 4 times as many," if is_auto else f"{stages} numbers"
            found = f"schedule.layers_per_stage is {shown(sizes)}"
            yield f"{found}: expected {count} with the sum model.layers = {layers}"


class RampupSection(Section):
    """A stage of the batch-size ramp."""

    global_batch_size: Count = Field(description="sequences of a step over all ranks")
    steps: Count = Field(description="steps with this many sequences")


class BatchSection(Section):
    """The samples of an optimizer step."""

    global_batch_size: Count
    """sequences of a step over all ranks, a multiple of mesh.dp x mesh.ep x schedule.microbatches"""
    sequence_length: Count = Field(description="tokens of a sequence")
    rampup: list[RampupSection] | None = None
    """smaller batches of the first steps, in ascending order, with fewer microbatches of the same size; null: none"""

    @property
    def sizes(self) -> BatchSizes:
        stages = (RampupStage(stage.global_batch_size, stage.steps) for stage in self.rampup or ())
        return BatchSizes(self.global_batch_size, tuple(stages))

    def rules(self) -> Iterator[Broken | str]:
        sizes = [*(stage.global_batch_size for stage in self.rampup or ()), self.global_batch_size]
        for number, (size, following) in enumerate(pairwise(sizes)):
            if size >= following:
                key = f"batch.rampup[{number}].global_batch_size"
                yield f"{key} is {size}: expected less than {following}, the size of the batches after it"


class MemorySection(Section):
    """Recomputation and offloading of activations."""

    recompute: Annotated[Recompute, BeforeValidator(mode_or_parts)] = "none"
    """activations that backward recomputes: none; a list of parts of layers, by Megatron-LM's names (docs/memory.md has
    what each is); selective: [mlp, moe], the gate and up products of feed-forward networks; attention: everything but
    the input and the result of attention, so no scores; full: everything but the input of a unit; auto: the planner
    chooses what fits and takes least time"""
    recompute_stages: list[CountOrZero] | None = None
    """pipeline stages that recompute; null: all"""
    recompute_layers: Count | None = None
    """recompute only this many first layers of each stage, rounded up to units; null: all"""
    recompute_fraction: Share = 1.0
    """share of each microbatch's tokens, the last ones, for which mlp, qkv_linear and attn_proj are recomputed; what
    layers make of the other tokens is saved, or goes to the host by offload_fraction. auto, with offload_fraction auto:
    the least with which each rank fits, in all layers"""
    logits: Literal["keep", "recompute", "auto"] = "auto"
    """the logits between the head's forward and its weight gradient. keep: save all of a microbatch; recompute: make
    them in chunks of at most 512 MiB, and again for the weight gradient, and save none; auto: keep if the run then
    fits, else whichever fits and takes least time"""
    unit_layers: Count | None = None
    """layers of a unit, by which stages gather and free weights, reduce gradients, recompute and offload; the embedding
    and the head are units of their own. null: one with recomputation; otherwise all layers of a stage or, if other
    ranks hold the same parameters, as many as have 400 MiB of gradients"""
    max_resident_microbatches: PositiveFloat | None = None
    """most activations that stay on a device, in microbatches of all its layers; the others are offloaded to host
    memory until their backward; null: all stay"""
    offload_fraction: Share = 0.0
    """share of the bytes of every unit's saved activations kept in host memory until the unit's backward; the rest
    stays on the device. What memory.recompute computes again is not saved. auto: the least with which each rank fits,
    with memory.recompute in as few layers as possible"""
    offload_prefetch: Count | None = None
    """units that compute while one is copied to the host, before its memory is used again, and while one is copied
    back, before its backward; null: 1, or with offload_fraction auto in a pipeline whatever takes least time"""
    host_gib: PositiveFloat | None = None
    """memory of a host, in GiB, for what its ranks keep there; null: 90 % of this machine's if the GPUs are here;
    otherwise it is unknown, and nothing is checked"""
    optimizer: Literal["device", "host"] = "device"
    """where master weights and optimizer state are kept. host: in host memory; at the end of a step they pass through
    the device to be updated"""

    def rules(self) -> Iterator[Broken | str]:
        stages, resident = self.recompute_stages, self.max_resident_microbatches
        if stages == []:
            yield Broken("recompute_stages", "at least one stage, or null for all")
        for key, value in (("recompute_stages", stages), ("recompute_layers", self.recompute_layers)):
            if value and self.recompute in ("none", "auto"):
                found = f"{value}, but memory.recompute is {self.recompute}"
                yield Broken(key, "selective, attention, full or a list of parts", found)
        if self.recompute_fraction != 1.0:
            yield from self._row_rules()
        if resident is not None and self.recompute not in ("none", "full", "auto"):
            found = f"{resident:g}, but memory.recompute is {config_text(self.mode)}"
            yield Broken("max_resident_microbatches", "none or full", found)
        if resident is not None and self.offload_fraction:
            found = f"{self.offload_fraction}, but memory.max_resident_microbatches is {resident:g}"
            yield Broken("offload_fraction", "0, or memory.max_resident_microbatches = null", found)

    def _row_rules(self) -> Iterator[Broken]:
        """The rules for recomputing only some rows."""
        if self.mode == "auto" or ROW_WISE.isdisjoint(recomputed_parts(self.mode)) or self.mode == "full":
            found = f"{config_text(self.mode)}, but memory.recompute_fraction is {self.recompute_fraction}"
            yield Broken("recompute", "attention, selective, or a list with mlp, qkv_linear or attn_proj", found)
        if self.recompute_fraction == "auto" and self.offload_fraction != "auto":
            found = f"auto, but memory.offload_fraction is {self.offload_fraction}"
            yield Broken("recompute_fraction", "a share, or memory.offload_fraction = auto", found)
        if self.recompute_fraction == "auto" and self.recompute_layers:
            found = f"{self.recompute_layers}, but memory.recompute_fraction is auto"
            yield Broken("recompute_layers", "null", found)
        if self.recompute_fraction == 0:
            yield Broken("recompute_fraction", "above 0, or memory.recompute = none")

    @property
    def mode(self) -> str:
        """The mode, as in a plan, or auto."""
        return self.recompute if isinstance(self.recompute, str) else mode_of(self.recompute)

    @property
    def by_layer(self) -> bool:
        """Whether units have one layer by default."""
        return self.recompute != "none" or self.offload_fraction != 0

    def fractions(self, layers: Sequence[LayerRange]) -> tuple[float, ...]:
        """The share of saved bytes that each unit offloads, given the units' layers (see Plan); 0 for units of only an
        embedding or a head. Empty if max_resident_microbatches decides."""
        if not self.offload_fraction or self.offload_fraction == "auto":  # the planner replaces auto
            return ()
        return tuple(self.offload_fraction if unit.numbers else 0.0 for unit in layers)

    def modes(self, units: Sequence[int], layers: Sequence[LayerRange]) -> tuple[str, ...]:
        """What each unit recomputes, given the units' layers (see Plan), with `units[s]` units in stage s; empty if
        none does.

        Units of only an embedding or a head recompute nothing, and with `auto` nothing does until the planner has
        chosen.
        """
        if self.recompute in ("none", "auto"):
            return ()
        chosen = range(len(units)) if self.recompute_stages is None else self.recompute_stages
        stage_of = (stage for stage, count in enumerate(units) for _ in range(count))
        modes, before = list[str](), Counter[int]()  # by stage, the number of layers in earlier units
        for stage, unit in zip(stage_of, layers, strict=True):
            is_early = self.recompute_layers is None or before[stage] < self.recompute_layers
            modes.append(self.mode if stage in chosen and is_early and unit.numbers else "none")
            before[stage] += len(unit.numbers)
        return tuple(modes)

    def options(
        self, units: tuple[int, ...], layers: Sequence[LayerRange], fractions: Sequence[float] = ()
    ) -> MemoryOptions:
        """The options of a program whose units have these layers and offload these `fractions`, with `units[s]` units
        in stage s."""
        recompute = frozenset(unit for unit, mode in enumerate(self.modes(units, layers)) if mode != "none")
        is_cut = max(units) > 1
        offload = frozenset(unit for unit, fraction in enumerate(fractions) if fraction)
        resident = self.max_resident_microbatches
        return MemoryOptions(
            recompute=recompute,
            max_resident=resident,
            offload=offload,
            offload_prefetch=self.offload_prefetch or 1,
            units=units if is_cut else (),
            logits_in_w=self.logits == "recompute",
        )


class ClusterSection(Section):
    """Where the ranks run (docs/cluster.md)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device of the ranks; auto: GPUs if the cluster has any"""
    gpu: Text | None = None
    """name of the GPU that plans are made for, as CUDA has it (docs/memory.md); null: this machine's, else an H200"""
    rates: Text = "auto"
    """rates that plans are made with (docs/performance.md). auto: those that `pentad calibrate` measured here for that
    GPU, if any, else builtin; builtin: from its data sheet; or the path of a table"""
    transport: Literal["auto", "peer", "nccl"] = "auto"
    """what moves activations, exchanges rows inside layers and runs ZeRO's collectives. auto: peer copies along axes
    whose ranks share a host, NCCL along the others (docs/cluster.md); peer: refuse to run if any of it needs NCCL"""
    cuda_graphs: bool | None = None
    """launch a step's compute on GPUs as it was captured in an earlier step (docs/performance.md); null: if steps
    repeat, the plan's compute would otherwise wait for the host, and GPUs have room for graphs"""
    address: Text = "local"
    """Ray cluster: local starts one here, auto joins the running one, HOST:PORT joins the one there"""
    dashboard: bool = Field(default=True, description="start the Ray dashboard of a local cluster")
    dashboard_port: Port = Field(default=0, description="port of that dashboard; 0: a free one")
    auth: Literal["token", "disabled"] = "token"
    """whether Ray's interfaces ask for an authentication token"""
    stop_timeout_seconds: PositiveFloat = 120.0
    """time that a stopped job has to finish its step and save a checkpoint"""
    start_timeout_seconds: PositiveFloat = 60.0
    """longest wait for ranks to be placed and started"""
    check: bool = False
    """examine nodes before ranks start on them, in some 20 s, and use others if one fails (docs/doctor.md)"""
