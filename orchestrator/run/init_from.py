"""`run.init_from`: the checkpoint of another run, or of an imported model, that a new run starts from.

A stage of training is a run that starts from the one before it, with other data, lengths, learning rates or mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pentad.orchestrator.checked_folders import checked_folder
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.config.errors import shown
from pentad.orchestrator.config.model_section import ModelSection
from pentad.orchestrator.config.yaml_text import load_yaml
from pentad.orchestrator.monitoring.runfolder import Changes, changed_keys, find_checkpoint
from pentad.orchestrator.records.checkpoint_places import CONFIG, home_of, path_of, saved_config
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.regular_files import expanded
from pentad.schedules.spec.lora import LoraBase, LoraSpec, lora_of
from pentad.schedules.spec.optimizer import moment_offset_of
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import tensors
from pentad.workers.checkpoint.checkpoint import Checkpoint, Start, fingerprint
from pentad.workers.checkpoint.location import location
from pentad.workers.checkpoint.lora_base import open_base
from pentad.workers.data.corpus_index import TOKENIZER_FILE
from pentad.workers.data.sources import tokenizer_file
from pentad.workers.hf.kept_files import FOLDER, read_files
from pentad.workers.hf.names import MODEL_FILE

if TYPE_CHECKING:
    from pentad.workers.hf.exporter import ExportRequest

# Keys of the model section that do not affect tensor shapes.
_WITHOUT_TENSORS = {
    *("family", "rope_theta", "rope_scaling", "norm_eps", "mtp_loss_weight", "sliding_window", "layer_types"),
    *("rope_local_base_freq", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
}


class Origin(NamedTuple):
    """What a new run starts from, and the configuration keys that differ from the earlier run. With LoRA the checkpoint
    is the `base` with the frozen weights, and the adapters start from the PEFT adapters in the folder `adapter`, or
    from their initial values. The moments have seen `moment_offset` more updates than the run has steps done."""

    start: Start
    changes: Changes
    base: LoraBase | None = None
    adapter: Path | None = None
    moment_offset: int = 0


def origin_of(config: RunConfig) -> Origin:
    """What a run without a checkpoint of its own starts from.

    Reads and verifies the checkpoint of `run.init_from` and the adapters of `lora.init_from`. Raises PentadError if one
    is missing or belongs to a different model.
    """
    run = config.run
    if run.init_from is None:
        return Origin(Start(), {})
    checkpoint = find_checkpoint(run.init_from, "run.init_from", expanded(run.folder))
    if lora_of(checkpoint.meta) is not None:
        expected = "a model: pentad export-hf merges adapters, and import-hf reads the result"
        raise PentadError(f"run.init_from is '{run.init_from}', whose checkpoints are adapters: expected {expected}")
    home = home_of(checkpoint.folder)
    before = _model_of(checkpoint, home)
    if config.lora_spec is not None:  # LoRA leaves out the layers of multi-token prediction
        before = before.model_copy(update={"mtp_layers": config.model.mtp_layers})
    _require_same_tensors(config.model, before, run.init_from)
    step = checkpoint.step if run.init_step else 0
    if step >= run.steps:
        raise PentadError(f"run.steps is {run.steps}: expected more than {step}, the steps of run.init_from")
    if (home / CONFIG).is_file():
        changes = changed_keys(saved_config(home), config)
    else:
        changes = _model_changes(before, config.model)
    folder = checkpoint.folder.absolute()
    if config.lora_spec is not None:
        base = LoraBase(str(folder), fingerprint(folder))
        return Origin(Start(), changes, base, _adapter(config, config.lora_spec, home))
    updates = checkpoint.step + moment_offset_of(checkpoint.meta) if run.init_optimizer else 0
    return Origin(Start(folder, step, run.init_optimizer), changes, moment_offset=updates - step)


def start_notes(config: RunConfig, origin: Origin | None) -> Iterator[str]:
    """Notes on what a user should not overlook in a new run: model keys that differ from those of the weights that it
    starts from, and data not built with their tokenizer. Without an `origin` its own folder may hold an import."""
    if origin is None:
        home, named = path_of(config), f"the import in {path_of(config)}"
        file = home / MODEL_FILE
        before = ModelSection.model_validate(_section(file)) if file.is_file() else config.model
        changes = _model_changes(before, config.model)
    else:
        taken = origin.start.folder if origin.base is None else location(origin.base.folder)
        if taken is None:
            return
        home, named, changes = home_of(taken), f"run.init_from = {config.run.init_from}", origin.changes
    for key, (old, new) in changes.items():
        if key.startswith("model.") and key != "model.head_dim":  # head_dim may be given or follow from other sizes
            yield from _differences(key, old, new, named)
    if note := _other_tokenizer(config, home / FOLDER / TOKENIZER_FILE):
        yield note


def _differences(key: str, old: Any, new: Any, named: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in new:
            yield from _differences(f"{key}.{name}", old.get(name), new[name], named)
    elif old != new:
        yield f"{key} is {shown(new)}, where {named} has {shown(old)}"


def _other_tokenizer(config: RunConfig, file: Path) -> str | None:
    """A note if tokens of the data have other ids, or none, in the tokenizer that came with the weights."""
    from pentad.workers.data.tokenizer import load_tokenizer  # imports tokenizers

    data = config.data.spec
    source = data.sources[0]  # all have the same tokenizer
    corpus = tokenizer_file(source.path, config.model.vocab, data.cache) if file.is_file() else None
    if corpus is None:
        return None
    try:
        ids, known = (load_tokenizer(each).get_vocab() for each in (corpus, file))
    except PentadError:  # perhaps written by a newer version of tokenizers
        return None
    other = sum(known.get(token) != number for token, number in ids.items())
    found = f"{source.key} is {source.path}: {other:,} of its {len(ids):,} tokens are not those of the tokenizer"
    expected = f"expected a corpus built with --tokenizer {path_of(config) / FOLDER}"
    return f"{found} that came with the weights: {expected}" if other else None


def _model_changes(before: ModelSection, now: ModelSection) -> Changes:
    old, new = before.model_dump(), now.model_dump()
    return {f"model.{key}": (old[key], new[key]) for key in new if old[key] != new[key]}


def _adapter(config: RunConfig, lora: LoraSpec, home: Path) -> Path | None:
    """The folder of `lora.init_from`, if set. Raises PentadError unless it has adapters for the model in `home`."""
    if config.lora.init_from is None:
        return None
    from pentad.workers.hf.peft import read_adapter  # imports torch

    folder = checked_folder(expanded(config.lora.init_from))
    read_adapter(folder, adapter_request(config, home), lora)
    return folder


def adapter_request(config: RunConfig, home: Path) -> ExportRequest:
    """What reading an adapter needs to know about its base model; `home` has the files that came with that model."""
    from pentad.workers.hf.exporter import ExportRequest  # imports torch

    return ExportRequest(config.model.family, config.model.spec, 0, read_files(home / FOLDER))


def with_base(plan: Plan, base: LoraBase | None) -> Plan:
    """The plan of a LoRA run with the checkpoint of its frozen weights, which is read and verified; other plans are
    returned unchanged. Raises PentadError if the checkpoint is gone, damaged or a different one."""
    if plan.lora is None or base is None:
        return plan
    open_base(base)
    return replace(plan, lora=replace(plan.lora, base=base))


def _model_of(checkpoint: Checkpoint, home: Path) -> ModelSection:
    """The model section of the run or import that a checkpoint belongs to."""
    section: Any = checkpoint.meta.get("model")
    for name in (CONFIG, MODEL_FILE):
        if section is None and (home / name).is_file():
            section = _section(home / name)
    if section is None:
        raise PentadError(f"run.init_from is '{checkpoint.folder}', whose model is unknown: expected {home / CONFIG}")
    return ModelSection.model_validate(section)


def _section(file: Path) -> Any:
    return load_yaml(file.read_text(encoding="utf-8"), str(file)).get("model")


def _require_same_tensors(now: ModelSection, before: ModelSection, name: str) -> None:
    """Raises PentadError unless the two models have the same tensors; rotary embedding and losses may differ. For
    custom models the ranks compare the tensors."""
    if now.custom == before.custom and (now.custom or _tensor_shapes(now) == _tensor_shapes(before)):
        return
    old, new = before.model_dump(), now.model_dump()
    key = next((key for key in new if new[key] != old[key] and key not in _WITHOUT_TENSORS), "family")
    found, expected = (each[key] if isinstance(each[key], dict) else shown(each[key]) for each in (new, old))
    raise PentadError(f"model.{key} is {found}: expected {expected}, as in run.init_from = {name}")


def _tensor_shapes(section: ModelSection) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors; one entry stands for the routing biases, which are alike in every MoE layer."""
    spec = section.spec
    shapes = {tensor.name: tensor.shape for tensor in tensors(spec)}
    if spec.experts is not None and spec.experts.has_bias:
        shapes["experts.bias"] = (spec.experts.num_experts,)
    return shapes
