"""The configuration of a run: YAML and overrides in, complete YAML out, one sentence for every error.

Loading compiles no program: `planning.make_plan` checks what depends on a program or a custom model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ValidationError

from pentad.orchestrator.config import errors, sections
from pentad.orchestrator.config.data_sections import DataSection, EvalSection
from pentad.orchestrator.config.errors import Broken, ConfigError, shown
from pentad.orchestrator.config.includes import Layers, leaves, merged, read_file, with_includes
from pentad.orchestrator.config.loggers_section import LoggersSection, MetricsSection
from pentad.orchestrator.config.lora_section import LoraSection
from pentad.orchestrator.config.model_section import ModelSection, custom_model
from pentad.orchestrator.config.recovery_sections import CheckpointSection, ElasticSection
from pentad.orchestrator.config.training_sections import OptimizerSection, PrecisionSection, SpikesSection, ZeroSection
from pentad.orchestrator.config.yaml_text import dump_yaml, load_yaml
from pentad.schedules.catalogue import CATALOGUE, spec_of
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.recompute import ROW_WISE, config_text, parts_of, recomputed_parts
from pentad.schedules.search.auto import AUTO, check_auto_options
from pentad.schedules.spec.lora import LoraSpec
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import split_layers
from pentad.schedules.spec.schedule_spec import ScheduleOptions
from pentad.schedules.spec.validate import check_divisibility

BFLOAT16_ROUNDING = 2**-8  # relative, at most


class Layout(NamedTuple):
    """Where a schedule places its stages, by pipeline rank, and the number of slices of a sequence."""

    placement: tuple[tuple[int, ...], ...]
    slices: int

    @staticmethod
    def of(program: Program) -> Layout:
        return Layout(program.placement, program.slices)

    @property
    def stages(self) -> int:
        return 1 + max(stage for held in self.placement for stage in held)

    @property
    def has_mirrors(self) -> bool:
        """Whether a stage is on more than one pipeline rank (DualPipe)."""
        return sum(map(len, self.placement)) > self.stages


class RunConfig(sections.Section):
    """Everything that a run depends on."""

    run: sections.RunSection
    model: ModelSection
    mesh: sections.MeshSection = sections.MeshSection()
    schedule: sections.ScheduleSection
    batch: sections.BatchSection
    data: DataSection
    optimizer: OptimizerSection = OptimizerSection()
    lora: LoraSection = LoraSection()
    precision: PrecisionSection = PrecisionSection()
    memory: sections.MemorySection = sections.MemorySection()
    zero: ZeroSection = ZeroSection()
    checkpoint: CheckpointSection = CheckpointSection()
    elastic: ElasticSection = ElasticSection()
    spikes: SpikesSection = SpikesSection()
    metrics: MetricsSection = MetricsSection()
    eval: EvalSection = EvalSection()
    loggers: LoggersSection = LoggersSection()
    cluster: sections.ClusterSection = sections.ClusterSection()

    @property
    def options(self) -> ScheduleOptions:
        """The schedule's options. A sliced schedule without `slices` gets its usual number, or the next smaller one
        that divides the sequence."""
        given, entry = self.schedule.options, CATALOGUE.get(self.schedule.name)
        if given.slices is not None or entry is None or entry.slices == 1:
            return given
        length = self.batch.sequence_length
        return given._replace(slices=next(k for k in range(entry.slices, 0, -1) if length % k == 0))

    @property
    def lora_spec(self) -> LoraSpec | None:
        """The adapters, without the checkpoint that holds the frozen weights; None if all parameters are trained."""
        return self.lora.spec(self.model)

    @property
    def data_sets(self) -> list[str]:
        """The names of the data sets that are evaluated."""
        return [*self.data.held_out, *(each.name for each in self.eval.data or ())]

    def model_spec(self, dtype: str = "float32") -> ModelSpec:
        """The model's sizes. Builds a custom model, in the compute dtype. Raises PentadError if it is invalid."""
        if self.model.custom is None:
            return self.model.spec
        return custom_model(self.model, self.batch.sequence_length, dtype)

    def layout(self) -> Layout | None:
        """Where the schedule places stages; None if only its program shows that (a schedule from a file). The layout of
        zb-1p, which exists for all sizes, stands in for that of 'auto'. Raises PentadError for sizes or options that
        the schedule does not allow."""
        name, options = self.schedule.name, self.options
        if name == AUTO:
            check_auto_options(options)
            name, options = "zb-1p", ScheduleOptions(memory_limit=options.memory_limit)
        spec = spec_of(name, self.mesh.pp, self.schedule.microbatches, options)
        if (entry := CATALOGUE.get(name)) is None:
            return None
        return Layout(tuple(entry.placement(rank, spec) for rank in range(spec.ranks)), spec.slices)

    def check_layout(self, layout: Layout, model: ModelSpec) -> None:
        """Raises ConfigError if a schedule and a model do not fit each other or the mesh. Loading has done so if both
        were known without a program."""
        if found := list(self._layout_rules(layout, model)):
            raise ConfigError(found)

    def rules(self) -> Iterator[Broken | str]:
        sizes = {"mesh.dp": self.mesh.dp, "mesh.ep": self.mesh.ep, "schedule.microbatches": self.schedule.microbatches}
        if self.mesh.ep == 1:
            del sizes["mesh.ep"]
        if self.batch.global_batch_size % math.prod(sizes.values()):
            product = f"{' x '.join(map(str, sizes.values()))} = {math.prod(sizes.values())}"
            yield Broken("batch.global_batch_size", f"a multiple of {' x '.join(sizes)} = {product}")
        else:
            yield from self._rampup_rules(sizes)
        if self.optimizer.decay_steps is None:
            yield from self.optimizer.phase_rules("run.steps", self.run.steps, "optimizer.")
        yield from self._state_rules()
        yield from self.metrics.step_rules(self.run.steps)
        yield from self._eval_rules()
        yield from self._lora_rules()
        if self.spikes.policy == "rollback" and not self.checkpoint.every:
            yield Broken("checkpoint.every", "at least 1 for spikes.policy = rollback, which goes back to such a step")
        if self.elastic.replicate_every and self.mesh.size == 1:
            yield Broken("elastic.replicate_every", "0 with a single rank, whose state no other rank can hold")
        if self.elastic.replicate_every and self.memory.optimizer == "host":
            yield Broken("elastic.replicate_every", "0 with memory.optimizer = host")
        yield from self._bit_check_rules()
        yield from self.zero.mesh_rules(self.mesh, has_experts=self.model.experts is not None)
        if self.schedule.replan and (name := self.schedule.name) != AUTO:
            yield Broken("schedule.replan", f"null or false for schedule.name = {name}, whose order is fixed")
        if self.schedule.name == AUTO and self.memory.recompute_stages:
            found = f"{self.memory.recompute_stages}, but schedule.name auto places them"
            yield Broken("memory.recompute_stages", "null", found)
        try:
            layout = self.layout()
        except PentadError as error:
            is_option = str(error).partition(" is ")[0] in ("microbatches", *ScheduleOptions._fields)
            yield f"schedule.{error}" if is_option else str(error)
            return
        if layout is not None and self.model.custom is None:
            yield from self._layout_rules(layout, self.model.spec)

    def _bit_check_rules(self) -> Iterator[Broken]:
        """Bits are compared only where they should be equal."""
        excluded = {
            "precision.deterministic = false, whose results differ from run to run": not self.precision.deterministic,
            "a single rank, which has no other one to agree with": self.mesh.size == 1,
            "lora.rank and zero.stage = 3": self.lora.rank is not None and self.zero.stage == 3,
        }
        for name, holds in excluded.items():
            if self.elastic.check_every and holds:
                yield Broken("elastic.check_every", f"0 with {name}")

    def _rampup_rules(self, sizes: Mapping[str, int]) -> Iterator[str]:
        """A smaller batch has microbatches of the same size on every replica, in a number that the schedule allows."""
        replicas = {key: size for key, size in sizes.items() if key != "schedule.microbatches"}
        rows = self.batch.global_batch_size // math.prod(sizes.values())
        least = rows * math.prod(replicas.values())
        for number, stage in enumerate(self.batch.rampup or ()):
            key, size = f"batch.rampup[{number}].global_batch_size", stage.global_batch_size
            if size % least:
                product = " x ".join(map(str, [*replicas.values(), rows]))
                expected = f"a multiple of {' x '.join(replicas)} x sequences of a microbatch = {product} = {least}"
                yield f"{key} is {size}: expected {expected}"
            elif self.schedule.name != AUTO:
                spec = self.schedule.name, self.mesh.pp, size // least, self.options
                yield from (f"{key} is {size}, so schedule.{error}" for error in _refusal(spec_of, *spec))

    def _state_rules(self) -> Iterator[Broken]:
        """A bfloat16 moment must change by more than half a unit in the last place when a gradient vanishes."""
        decays = ("momentum", "beta2") if self.optimizer.name == "muon" else ("beta1", "beta2")
        for key in decays if self.precision.optimizer_state == "bfloat16" else ():
            if getattr(self.optimizer, key) > 1 - BFLOAT16_ROUNDING:
                expected = f"at most {1 - BFLOAT16_ROUNDING:g} with precision.optimizer_state bfloat16, whose rounding"
                yield Broken(f"optimizer.{key}", f"{expected} would undo a step's change")

    def _lora_rules(self) -> Iterator[Broken | str]:
        """Adapters belong to the weights of a checkpoint."""
        if self.lora.rank is None:
            return
        yield from self.lora.model_rules(self.model)
        if self.run.init_from is None:
            yield Broken("run.init_from", f"the model that lora.rank = {self.lora.rank} trains adapters for")
        for key in ("init_optimizer", "init_step"):
            if getattr(self.run, key):
                yield Broken(f"run.{key}", "false with lora.rank, whose adapters begin anew")

    def _eval_rules(self) -> Iterator[Broken]:
        """What is evaluated and when, and that the best checkpoint is chosen among evaluated ones."""
        names, best = self.data_sets, self.checkpoint.keep_best
        for key in ("every", "at_start"):
            if getattr(self.eval, key) and not names:
                yield Broken(f"eval.{key}", "data to evaluate on: data.holdout above 0, or eval.data")
        if len(set(names)) < len(names) and self.data.holdout:
            found = f"a list with the name {', '.join(self.data.held_out)}"
            yield Broken("eval.data", "another name than that of what data.holdout holds out", found)
        if best is False:
            return
        if not names or (best is not True and best not in names):
            expected = f"false, true or {', '.join(names)}" if names else "false without data.holdout or eval.data"
            yield Broken("checkpoint.keep_best", expected)
        saved, evaluated = self.checkpoint.every, self.eval.every
        if not saved or not evaluated or saved % evaluated:
            expected = f"a multiple of eval.every = {evaluated}" if evaluated else "eval.every above 0 as well"
            yield Broken("checkpoint.every", f"{expected}, so that checkpoint.keep_best has evaluated checkpoints")

    def _layout_rules(self, layout: Layout, model: ModelSpec) -> Iterator[str]:
        stages, slices, length = layout.stages, layout.slices, self.batch.sequence_length
        recompute_stages = self.memory.recompute_stages or []
        if self.schedule.name != AUTO and max(recompute_stages, default=0) >= stages:
            expected = f"stages 0 to {stages - 1} of schedule {self.schedule.name}"
            yield f"memory.recompute_stages is {recompute_stages}: expected {expected}"
        yield from self.schedule.layer_rules(self.mesh.pp, stages, model.layers)
        yield from self.optimizer.group_rules(model, self.lora_spec)
        if model.custom is not None:
            yield from self._custom_rules(model.custom.text, model.layers, layout)
            return
        yield from self._recompute_rules(model)
        if model.layers < stages:
            yield from _refusal(split_layers, model.layers, layout.placement)
        if length % slices:
            yield f"schedule.slices is {slices}: expected a divisor of batch.sequence_length = {length}"
        yield from self._step_rules(model, layout)
        rows = self.batch.global_batch_size // (self.mesh.dp * self.mesh.ep * self.schedule.microbatches)
        yield from _refusal(check_divisibility, model, self.mesh.mesh, length, rows, slices, self.mesh.cp_method)

    def _recompute_rules(self, model: ModelSpec) -> Iterator[str]:
        """Only parts of layers that the model has may recompute."""
        why = {
            "mlp": "its feed-forward networks are experts",
            "moe": "it has no experts (model.experts)",
            "qkv_linear": "its queries, keys and values come from latents: mla_up_proj",
            "mla_up_proj": "it has no multi-head latent attention (model.mla)",
        }
        given, parts = self.memory.recompute, parts_of(model)
        for part in given if isinstance(given, list) else ():
            if part not in parts:
                yield f"memory.recompute is {shown(given)}: expected no {part} for this model: {why[part]}"
        if self.memory.recompute_fraction == 1:
            return
        found = f"memory.recompute_fraction is {self.memory.recompute_fraction}: expected 1"
        if ROW_WISE.isdisjoint(recomputed_parts(self.memory.mode).intersection(parts)):
            yield f"{found} for this model, of which memory.recompute {config_text(self.memory.mode)} has experts only"
        if self.precision.matmul != "compute":
            yield f"{found} with precision.matmul {self.precision.matmul}, whose scales are of all rows"

    def _step_rules(self, model: ModelSpec, layout: Layout) -> Iterator[str]:
        """Sums over ranks before the norm exclude post-validation; losses of entire sequences exclude slices."""
        experts, mtp = model.experts, f"model.mtp_layers = {model.mtp_layers}"
        sums_before_norm = {
            "model.tie_word_embeddings = true": model.tie_word_embeddings and layout.stages > 1,
            mtp: model.mtp_layers > 0 and layout.stages > 1,
            "model.experts.bias_update_rate > 0": experts is not None and experts.bias_update_rate > 0,
        }
        needs_sequences = {
            "data.document_mask = true": self.data.document_mask,
            mtp: model.mtp_layers > 0,
            "model.experts.aux_loss_coef > 0": experts is not None and experts.aux_loss_coef > 0,
        }
        if self.memory.optimizer == "host":
            for name, holds in {
                "schedule.post_validation = true, which updates weights twice": self.schedule.post_validation,
                "optimizer.name = muon, whose matrices are updated whole": self.optimizer.name == "muon",
            }.items():
                if holds:
                    yield f"memory.optimizer is host: expected device for {name}"
        for name, holds in sums_before_norm.items():
            if self.schedule.post_validation and holds:
                expected = f"false for {name}, which sums over ranks before the norm"
                yield f"schedule.post_validation is true: expected {expected}"
        for name, holds in needs_sequences.items():
            if layout.slices > 1 and holds:
                yield f"schedule.slices is {layout.slices}: expected 1 for {name}, which sees whole sequences"

    def _custom_rules(self, text: str, layers: int, layout: Layout) -> Iterator[str]:
        """What a custom model cannot do, as only the layers of the families can."""
        for axis, why in (("tp", "splits weights"), ("cp", "splits sequences"), ("ep", "splits experts")):
            if (size := getattr(self.mesh, axis)) > 1:
                yield f"mesh.{axis} is {size}: expected 1 for model {text}: nothing defines how it {why}"
        if self.optimizer.z_loss:
            yield f"optimizer.z_loss is {self.optimizer.z_loss:g}: expected 0 for model {text}, whose loss is its own"
        if self.optimizer.name == "muon":
            why = "nothing says which of its matrices are embeddings"
            yield f"optimizer.name is muon: expected adamw for model {text}: {why}"
        if layout.slices > 1:
            yield f"schedule.slices is {layout.slices}: expected 1 for model {text}, which gets whole sequences"
        if self.data.document_mask:
            yield f"data.document_mask is true: expected false for model {text}, which sees no document boundaries"
        if self.memory.mode not in ("none", "full", "auto"):
            yield f"memory.recompute is {config_text(self.memory.mode)}: expected none or full for model {text}"
        if layers < layout.stages:
            found = f"it returns {layers} layer{'s' * (layers > 1)}"
            yield f"model {text}: {found}, but {layout.stages} pipeline stages (mesh.pp) need at least one each"


def load(
    source: Path | Mapping[str, Any] | RunConfig | None,
    overrides: Iterable[str] = (),
    sections: Mapping[str, Any] = MappingProxyType({}),
) -> RunConfig:
    """The configuration in a YAML file, including the files that it includes, or in a mapping (None: the quickstart),
    with `sections` merged into it and `section.key=value` overrides applied.

    Raises PentadError if a file cannot be read or has no sections, and ConfigError listing all mistakes.
    """
    values, origins = _layers(source)
    raw = merged(values, sections)
    found_errors: list[str] = []
    for override in overrides:
        try:
            raw = merged(raw, _section_of(override))
        except PentadError as error:
            found_errors.append(str(error))
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        given = {*leaves(sections), *(override.partition("=")[0] for override in overrides)}
        from_files = {key: file for key, file in origins.items() if key not in given}
        found_errors += (_with_origin(sentence, from_files) for sentence in errors.sentences(error, RunConfig))
    if found_errors:
        raise ConfigError(found_errors)
    return config


def unchecked(source: Path | None, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The sections that `load` would check. Raises PentadError for a file or an override that cannot be read."""
    raw = _layers(source).values
    for override in overrides:
        raw = merged(raw, _section_of(override))
    return raw


def dump(config: RunConfig) -> str:
    """Complete YAML, a line a section, that loads back to an equal configuration."""
    return dump_yaml(config.model_dump())


def _layers(source: Path | Mapping[str, Any] | RunConfig | None) -> Layers:
    if isinstance(source, Path):
        return read_file(source)
    if isinstance(source, RunConfig):
        return Layers(source.model_dump(), {})
    if source is not None:
        return with_includes(source, Path("CONFIG"))
    text = (files("pentad.orchestrator.config") / "quickstart.yaml").read_text(encoding="utf-8")
    return Layers(load_yaml(text, "quickstart.yaml"), {})


def _with_origin(sentence: str, origins: Mapping[str, str]) -> str:
    """An error, preceded by the file that its key comes from if files are included."""
    file = origins.get(sentence.partition(" is ")[0])
    return f"{file}: {sentence}" if file else sentence


def _section_of(override: str) -> dict[str, Any]:
    """An override as a mapping to merge over the file's. Raises PentadError if there is no such key."""
    key, _, text = override.partition("=")
    if key in RunConfig.model_fields:
        example = errors.example_key(key, RunConfig)
        raise PentadError(f"{override} sets a whole section: expected a single key such as {example}=VALUE")
    if not errors.is_key(key, RunConfig):
        raise PentadError(errors.unknown_key(key, RunConfig))
    value = load_yaml(text, f"override {override}" if len(override) <= 60 else f"override {override[:57]}...")
    if isinstance(value, dict):
        raise PentadError(f"{key} is {errors.shown(value)}: expected {errors.no_mapping(key, RunConfig)}")
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def _refusal(check: Callable[..., object], *arguments: object) -> Iterator[str]:
    """The message of a check that raises PentadError."""
    try:
        check(*arguments)
    except PentadError as error:
        yield str(error)
