"""The whole configuration of a run: YAML and overrides in, complete YAML out, one sentence for every mistake."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError, model_validator
from pydantic_core import ErrorDetails

from pentad.orchestrator.config.custom_model import require_layers, require_plain, shape_of
from pentad.orchestrator.config.model_section import ModelSection
from pentad.orchestrator.config.sections import (
    BatchSection,
    CheckpointSection,
    ClusterSection,
    DataSection,
    ElasticSection,
    MemorySection,
    MeshSection,
    MetricsSection,
    OptimizerSection,
    PrecisionSection,
    RunSection,
    ScheduleSection,
    Section,
    ZeroSection,
)
from pentad.orchestrator.config.yaml_text import dump_yaml, load_yaml
from pentad.schedules.catalogue import CATALOGUE, generate
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.zero import require_room
from pentad.schedules.search.auto import AUTO, refuse_chosen
from pentad.schedules.spec.model import ModelShape
from pentad.schedules.spec.plan import split_layers
from pentad.schedules.spec.schedule_spec import Options
from pentad.schedules.spec.validate import require_fit


class RunConfig(Section):
    """Everything that a run depends on."""

    run: RunSection
    model: ModelSection
    mesh: MeshSection = MeshSection()
    schedule: ScheduleSection
    batch: BatchSection
    data: DataSection
    optimizer: OptimizerSection = OptimizerSection()
    precision: PrecisionSection = PrecisionSection()
    memory: MemorySection = MemorySection()
    zero: ZeroSection = ZeroSection()
    checkpoint: CheckpointSection = CheckpointSection()
    elastic: ElasticSection = ElasticSection()
    metrics: MetricsSection = MetricsSection()
    cluster: ClusterSection = ClusterSection()

    @model_validator(mode="after")
    def _batch_divides(self) -> RunConfig:
        share = self.mesh.dp * self.mesh.ep * self.schedule.microbatches
        if self.batch.global_batch_size % share:
            axes, sizes = "mesh.dp", f"{self.mesh.dp}"
            if self.mesh.ep > 1:
                axes, sizes = "mesh.dp x mesh.ep", f"{self.mesh.dp} x {self.mesh.ep}"
            parts = f"{sizes} x {self.schedule.microbatches} = {share}"
            expected = f"a multiple of {axes} x schedule.microbatches = {parts}"
            raise ValueError(f"batch.global_batch_size is {self.batch.global_batch_size}: expected {expected}")
        return self

    @model_validator(mode="after")
    def _warm_up_ends(self) -> RunConfig:
        warmup = self.optimizer.warmup_steps
        if warmup is not None and warmup > self.run.steps:
            raise ValueError(f"optimizer.warmup_steps is {warmup}: expected at most run.steps = {self.run.steps}")
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> RunConfig:
        schedule = self.schedule
        try:
            if schedule.name == AUTO:  # chosen when the device is known: zb-1p is there for any size and limit
                refuse_chosen(schedule.options)
                asked = Options(memory_limit=schedule.memory_limit)
                program = generate("zb-1p", self.mesh.pp, schedule.microbatches, asked)
            else:
                program = generate(schedule.name, self.mesh.pp, schedule.microbatches, self.options)
            if self.model.custom is not None:
                packed, recompute = self.data.document_mask, self.memory.recompute
                require_plain(self.model.custom, self.mesh.mesh, program.slices, packed=packed, recompute=recompute)
            shape = self.shape()
            require_layers(shape, program.stages)
            split_layers(shape.layers, program.placement)
            if self.zero.max_gathered is not None:
                require_room(program, self.zero.max_gathered)
        except PentadError as error:
            raise ValueError(str(error)) from None
        if self.batch.sequence_length % program.slices:
            expected = f"a divisor of batch.sequence_length = {self.batch.sequence_length}"
            raise ValueError(f"schedule.slices is {program.slices}: expected {expected}")
        self._require_whole_steps(shape, program)
        self.memory.require(program, placed=schedule.name != AUTO)
        try:
            rows = self.batch.global_batch_size // (self.mesh.dp * self.mesh.ep * schedule.microbatches)
            sizes = self.batch.sequence_length, rows, program.slices
            require_fit(shape, self.mesh.mesh, *sizes, self.mesh.cp_method)
        except PentadError as error:
            raise ValueError(str(error)) from None
        return self

    def shape(self, dtype: str = "float32") -> ModelShape:
        """Of the model, in the dtype of compute. Raises PentadError for a user's model that cannot be trained."""
        return (
            self.model.shape if self.model.custom is None else shape_of(self.model, self.batch.sequence_length, dtype)
        )

    def _require_whole_steps(self, shape: ModelShape, program: Program) -> None:
        """What is summed over ranks before the norm, or over a whole sequence, leaves no room for some schedules."""
        experts = shape.experts
        ahead = {
            "model.tie_word_embeddings = true": shape.tie_word_embeddings and program.stages > 1,
            f"model.mtp_layers = {shape.mtp_layers}": shape.mtp_layers and program.stages > 1,
            "model.experts.bias_update_rate > 0": experts is not None and experts.bias_update_rate > 0,
        }
        for name in (name for name, found in ahead.items() if found and self.schedule.post_validation):
            expected = f"false for {name}, which sums over ranks before the norm"
            raise ValueError(f"schedule.post_validation is true: expected {expected}")
        cut = {
            "data.document_mask = true": self.data.document_mask,
            f"model.mtp_layers = {shape.mtp_layers}": shape.mtp_layers,
            "model.experts.aux_loss_coef > 0": experts is not None and experts.aux_loss_coef > 0,
        }
        for name in (name for name, found in cut.items() if found and program.slices > 1):
            raise ValueError(f"schedule.slices is {program.slices}: expected 1 for {name}, which sees whole sequences")

    @property
    def options(self) -> Options:
        """What the schedule is asked for; slices that are left to it are as many as it likes or, where those do not
        divide the sequence, the next fewer that do."""
        asked, found = self.schedule.options, CATALOGUE.get(self.schedule.name)
        if asked.slices is not None or found is None or found.slices == 1:
            return asked
        return asked._replace(slices=next(k for k in range(found.slices, 0, -1) if not self.batch.sequence_length % k))


def load(path: Path | None, overrides: list[str]) -> RunConfig:
    """The configuration in a YAML file (None: the quickstart) with `section.key=value` overrides put in.

    Raises PentadError: one sentence with the dotted key, the value found and the value expected.
    """
    raw = load_yaml(_text(path), str(path or "quickstart.yaml"))
    if not isinstance(raw, dict):
        found = "nothing" if raw is None else _shown(raw)
        raise PentadError(f"{path} holds {found}: expected a mapping of the sections {', '.join(SECTIONS)}")
    for override in overrides:
        _put(raw, override)
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        # An unknown key explains a missing one, so it comes first.
        mistakes = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
        more = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
        raise PentadError(_sentence(mistakes[0]) + more) from None


def dump(config: RunConfig) -> str:
    """Complete YAML, a line a section, that loads back to an equal configuration."""
    return dump_yaml(config.model_dump())


def keys() -> Iterator[tuple[str, str]]:
    """(dotted key, what it means) of every field."""
    for section, model in SECTIONS.items():
        yield from _keys_of(section, model)


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation for name, field in RunConfig.model_fields.items() if isinstance(field.annotation, type)
}


def _keys_of(at: str, section: type[Section]) -> Iterator[tuple[str, str]]:
    for name, field in section.model_fields.items():
        yield f"{at}.{name}", field.description or ""
        for inner in get_args(field.annotation):
            if isinstance(inner, type) and issubclass(inner, Section):
                yield from _keys_of(f"{at}.{name}", inner)


def _text(path: Path | None) -> str:
    if path is None:
        return (files("pentad.orchestrator.config") / "quickstart.yaml").read_text(encoding="utf-8")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PentadError(f"{path} is not UTF-8 text (byte {error.start}): expected a YAML file") from None
    except OSError as error:
        raise PentadError(
            f"CONFIG is '{path}', which cannot be read ({error.strerror}): expected a YAML file"
        ) from None


def _put(raw: dict[str, Any], override: str) -> None:
    key, _, text = override.partition("=")
    if key in SECTIONS:
        raise PentadError(f"{override} sets a whole section: expected a single key such as {_first_key(key)}=VALUE")
    if key not in dict(keys()):
        raise PentadError(_unknown(key))
    *sections, name = key.split(".")
    value = load_yaml(text, f"override {override}")
    if isinstance(value, dict):
        raise PentadError(f"{key} is {_shown(value)}: expected a single value (quotes make text of it)")
    for section in sections:
        if raw.get(section) is None:
            raw[section] = {}
        raw = raw[section]
        if not isinstance(raw, dict):  # refused with the file's other mistakes
            return
    raw[name] = value


def _sentence(error: ErrorDetails) -> str:
    key, found = ".".join(map(str, error["loc"])), error["input"]
    match error["type"]:
        case "value_error":
            return str(error["ctx"]["error"])
        case "missing" if key in SECTIONS:
            return f"section {key} is missing: expected one with keys such as {_first_key(key)}"
        case "missing":
            return f"{key} is missing: expected a value: {dict(keys())[key]}"
        case "invalid_key":
            return _unknown(key)
        case "extra_forbidden":
            alone = "." not in key and isinstance(found, dict) and len(found) == 1
            inner = f".{next(iter(found))}" if alone else ""
            return _unknown(key + inner)
        case _:
            return f"{key} is {_shown(found)}: expected {_expected(error)}"


def _expected(error: ErrorDetails) -> str:
    limits = error.get("ctx", {})
    match error["type"]:
        case "int_type":
            return "a whole number"
        case "float_type" | "finite_number":
            return "a finite number"
        case "string_type":
            return "text (in quotes, should it look like something else)"
        case "bool_type":
            return "true or false"
        case "model_type":
            return f"a mapping with keys such as {_first_key(str(error['loc'][0]))}"
        case "list_type":
            return "a list such as [0, 1]"
        case "string_pattern_mismatch":
            return "letters, digits, '_', '-' and '.', the first no '-' or '.'"
        case "string_too_long":
            return f"at most {limits['max_length']} characters"
        case "literal_error":
            return f"one of {limits['expected']}".replace("'", "")
        case "greater_than_equal":
            return f"at least {limits['ge']}"
        case "greater_than":
            return f"more than {limits['gt']}"
        case "less_than_equal":
            return f"at most {limits['le']}"
        case "less_than":
            return f"less than {limits['lt']}"
        case _:
            message = error["msg"]
            return message[:1].lower() + message[1:]


def _unknown(key: str) -> str:
    key = key or "''"
    section, _, name = key.partition(".")
    near = _nearest(key, [*dict(keys()), *SECTIONS]) if section not in SECTIONS else None
    if section in SECTIONS:
        here = _nearest(name, SECTIONS[section].model_fields)
        elsewhere = [known for known, _ in keys() if known.endswith(f".{name}")]
        near = f"{section}.{here}" if here else next(iter(elsewhere), None)
    if near:
        return f"{key} is unknown; did you mean {near}?"
    if section in SECTIONS:
        return f"{key} is unknown: expected one of {section}.{{{', '.join(SECTIONS[section].model_fields)}}}"
    return f"{key} is unknown: expected a key in one of the sections {', '.join(SECTIONS)}"


def _nearest(text: str, known: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(text, list(known), n=1, cutoff=0.6)), None)


def _first_key(section: str) -> str:
    """An example of a section's keys: its first required one if there is any."""
    fields = SECTIONS[section].model_fields
    return f"{section}.{next((name for name, field in fields.items() if field.is_required()), next(iter(fields)))}"


def _shown(value: object) -> str:
    """A value as a reader of YAML would write it, cut to one line."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case _:
            text = repr(value)
            return text if len(text) <= 60 else f"{text[:57]}..."
