"""`pentad import-hf`, `export-hf` and `convert`: checkpoints from and to Hugging Face and torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

from pydantic import ValidationError

from pentad.orchestrator.api.exports import export_request
from pentad.orchestrator.checked_folders import checked_folder
from pentad.orchestrator.config.errors import ConfigError, sentences
from pentad.orchestrator.config.includes import read_text
from pentad.orchestrator.config.model_section import ModelSection
from pentad.orchestrator.config.sections import Section
from pentad.orchestrator.config.yaml_text import dump_yaml, load_yaml
from pentad.orchestrator.monitoring.runfolder import find_checkpoint
from pentad.orchestrator.planning.formatting import format_bytes
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import ModelSpec
from pentad.workers.checkpoint.atomic_io import require_empty
from pentad.workers.checkpoint.checkpoint import Checkpoint, open_checkpoint
from pentad.workers.dcp import reader
from pentad.workers.dcp.importer import import_dcp
from pentad.workers.dcp.titan_names import require_family
from pentad.workers.hf.config import parse_config
from pentad.workers.hf.exporter import Dtype, export_checkpoint
from pentad.workers.hf.folder import read_config
from pentad.workers.hf.importer import Imported, Target, import_folder
from pentad.workers.hf.kept_files import read_files
from pentad.workers.hf.names import CONFIG as HF_CONFIG
from pentad.workers.hf.names import MODEL_FILE
from pentad.workers.hf.peft import export_adapter

GIGABYTE = 10**9
Format = Literal["pentad", "hf", "dcp", "torchtitan", "peft"]


class Output(NamedTuple):
    """What a command writes: to OUT, in `dtype` (None: as in the source, or float32 for hf), with the optimizer's state
    if asked."""

    out: Path
    to: Format
    dtype: Dtype | None = None
    gigabytes: float = 5.0
    optimizer: bool = False


class _ModelFile(Section):
    model: ModelSection


def show_import(source: Path, out: Path, *, optimizer: bool, as_json: bool) -> None:
    """Imports the files in `source` and prints a summary."""
    done = import_folder(checked_folder(source), Target(out, dump_yaml, _progress("read")), optimizer=optimizer)
    _print_imported(done, out, as_json=as_json)


def show_export(path: str, output: Output, *, as_json: bool) -> None:
    """Exports a checkpoint, or the newest one of a run, and prints a summary."""
    _check(output)
    _export(find_checkpoint(path, "CHECKPOINT"), output, as_json=as_json)


def show_convert(source: str, output: Output, model: Path | None, *, as_json: bool) -> None:
    """Converts what `source` holds to another format, and prints a summary.

    Anything but pentad's own checkpoints is first converted to one, in a temporary folder unless that is the result.
    """
    folder, given = checked_folder(Path(source)), output.optimizer
    _check(output)
    is_dcp = folder.is_dir() and reader.is_dcp(folder)
    if model is not None and not is_dcp:
        raise PentadError(f"--model is '{model}': expected none, as {source} says what model it is")
    if not is_dcp and not (folder / HF_CONFIG).is_file():
        found = find_checkpoint(source, "SOURCE")
        if output.to == "pentad":
            raise PentadError(f"--to is pentad: expected another format than that of '{source}'")
        return _export(found, output, as_json=as_json)

    def take(out: Path, name: str = "OUT") -> Imported:
        target = Target(out, dump_yaml, _progress("read"), name=name)
        if not is_dcp:
            return import_folder(folder, target, optimizer=given)
        family, spec, kept = _described(model or folder, folder)
        if output.to == "torchtitan":
            require_family(family)
        return import_dcp(folder, family, spec, kept, target, optimizer=given)

    if output.to == "pentad":
        return _print_imported(take(output.out), output.out, as_json=as_json)
    parent = next(path for path in output.out.absolute().parents if path.is_dir())
    with TemporaryDirectory(prefix=".convert-", dir=parent) as temporary:
        done = take(Path(temporary) / "checkpoint", "a temporary folder beside OUT")
        return _export(open_checkpoint(done.folder), output, as_json=as_json)


def _check(output: Output) -> None:
    """Raises PentadError for what is known to fail before anything is read."""
    require_empty(output.out)
    if output.to == "peft" and output.optimizer:
        raise PentadError("--optimizer is set: expected it without --adapter, as PEFT stores weights alone")
    if output.optimizer and output.dtype not in ("float32", None):
        raise PentadError(
            f"--dtype is {output.dtype}: expected float32 with --optimizer, as training continues from both"
        )
    if output.to == "peft" and output.dtype == "fp8":
        raise PentadError("--dtype is fp8: expected bfloat16 or float32 with --adapter")


def _print_imported(done: Imported, out: Path, *, as_json: bool) -> None:
    if as_json:
        facts = {key: getattr(done, key) for key in ("step", "family", "parameters", "tensors", "bytes")}
        places = {"folder": str(out), "checkpoint": str(done.folder), "model": str(out / MODEL_FILE)}
        print(json.dumps({**places, **facts, "kept": list(done.kept)}))
        return
    print(f"{done.folder}: {done.family}, {done.parameters:,} parameters, {format_bytes(done.bytes)}")
    print(f"{out / MODEL_FILE}: the model section for a configuration")


def _export(checkpoint: Checkpoint, output: Output, *, as_json: bool) -> None:
    out = output.out
    request = export_request(checkpoint, output.dtype or "float32", max(1, round(output.gigabytes * GIGABYTE)))
    request, family = request._replace(optimizer=output.optimizer), request.family
    if output.to == "hf":
        done = export_checkpoint(checkpoint, out, request, _progress("written"))
    elif output.to == "peft":
        done = export_adapter(checkpoint, out, request, _progress("written"))
    else:
        from pentad.workers.dcp.exporter import export_dcp  # imports torch.distributed.checkpoint, which takes a second

        titan, dtype = output.to == "torchtitan", output.dtype
        done = export_dcp(checkpoint, out, request, _progress("written"), titan=titan, dtype=dtype)
    if as_json:
        summary = {"folder": str(out), "checkpoint": str(checkpoint.folder), "step": checkpoint.step, "family": family}
        print(json.dumps({**summary, **done._asdict(), "model": asdict(request.model)}))
        return
    what = f"{family} of step {checkpoint.step}, {done.tensors} tensors"
    print(f"{out}: {what}, {format_bytes(done.bytes)} in {done.dtype}")


def _described(path: Path, source: Path) -> tuple[str, ModelSpec, dict[str, bytes]]:
    """(family, model, files that go along), from a config.json, its folder, or a YAML file."""
    path = path.parent if path.name == HF_CONFIG else path
    if path.is_dir() and (path / HF_CONFIG).is_file():
        return *parse_config(read_config(checked_folder(path))), read_files(path)
    if path == source:
        raise PentadError(
            f"SOURCE is '{source}', which has no {HF_CONFIG}: expected --model, which says what model it is"
        )
    if not path.is_file():
        expected = f"a folder with {HF_CONFIG}, or a YAML file with a model section"
        raise PentadError(f"--model is '{path}': expected {expected}")
    raw = load_yaml(read_text(path, "--model"), str(path))
    try:
        section = _ModelFile.model_validate({"model": raw.get("model") if isinstance(raw, dict) else None}).model
    except ValidationError as error:
        raise ConfigError(sentences(error, _ModelFile)) from None
    return section.family, section.spec, {}


def _progress(verb: str) -> Callable[[int, int], None]:
    """Returns a function that reports every tenth of the bytes on stderr."""
    reported = 0

    def report(done: int, total: int) -> None:
        nonlocal reported
        if 10 * done // total > reported:
            reported = 10 * done // total
            print(f"{verb} {format_bytes(done)} of {format_bytes(total)}", file=sys.stderr)

    return report
