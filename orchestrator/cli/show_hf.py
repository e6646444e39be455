"""`pentad import-hf`, `export-hf` and `convert`: checkpoints from and to Hugging Face and torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from pentad.orchestrator.config.errors import ConfigError, sentences
from pentad.orchestrator.config.model_section import ModelSection
from pentad.orchestrator.config.sections import Section
from pentad.orchestrator.config.yaml_text import dump_yaml, load_yaml
from pentad.orchestrator.monitoring.runfolder import CONFIG, find_checkpoint, home_of
from pentad.orchestrator.planning.formatting import format_bytes
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import ModelSpec
from pentad.workers.checkpoint.atomic_io import require_empty
from pentad.workers.checkpoint.checkpoint import Checkpoint, open_checkpoint
from pentad.workers.data.corpus_index import INDEX_FILE, parse_index
from pentad.workers.data.sources import corpus_folder
from pentad.workers.data.tokenizer import end_token, load_tokenizer
from pentad.workers.dcp import reader
from pentad.workers.dcp.importer import import_dcp
from pentad.workers.dcp.titan_names import require_family
from pentad.workers.hf.config import parse_config, parse_section
from pentad.workers.hf.exporter import Dtype, Request, export_checkpoint
from pentad.workers.hf.folder import read_config
from pentad.workers.hf.importer import Imported, Target, import_folder
from pentad.workers.hf.kept_files import FOLDER, read_files
from pentad.workers.hf.names import CONFIG as HF_CONFIG
from pentad.workers.hf.names import MODEL_FILE

GIGABYTE = 10**9
Format = Literal["pentad", "hf", "dcp", "torchtitan"]


class Output(NamedTuple):
    """What a command writes: to OUT, in `dtype` (None: as in the source, in float32 for hf), with the optimizer's state
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
    done = import_folder(source, Target(out, dump_yaml, _progress("read")), optimizer=optimizer)
    _print_imported(done, out, as_json=as_json)


def show_export(path: str, output: Output, *, as_json: bool) -> None:
    """Exports a checkpoint, or the newest one of a run, and prints a summary."""
    _check(output)
    _export(find_checkpoint(path, "CHECKPOINT"), output, as_json=as_json)


def show_convert(source: str, output: Output, model: Path | None, *, as_json: bool) -> None:
    """Converts what `source` holds to another format, and prints a summary.

    Anything else than pentad's own checkpoints becomes one first; unless that is the result, in a temporary folder.
    """
    folder, given = Path(source), output.optimizer
    _check(output)
    is_dcp = folder.is_dir() and reader.is_dcp(folder)
    if model is not None and not is_dcp:
        raise PentadError(f"--model is '{model}': expected none, as {source} says what model it is")
    if not is_dcp and not (folder / HF_CONFIG).is_file():
        if output.to == "pentad":
            raise PentadError(f"--to is pentad: expected another format than that of '{source}'")
        return show_export(source, output, as_json=as_json)

    def take(out: Path) -> Imported:
        target = Target(out, dump_yaml, _progress("read"))
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
        done = take(Path(temporary) / "checkpoint")
        return _export(open_checkpoint(done.folder), output, as_json=as_json)


def _check(output: Output) -> None:
    """Raises PentadError for what can be known to fail before anything is read."""
    require_empty(output.out)
    if output.optimizer and output.dtype == "bfloat16":
        raise PentadError("--dtype is bfloat16: expected float32 with --optimizer, as training continues from both")


def _print_imported(done: Imported, out: Path, *, as_json: bool) -> None:
    if as_json:
        summary = {
            "folder": str(out),
            "checkpoint": str(done.folder),
            "step": done.step,
            "family": done.family,
            "parameters": done.parameters,
            "tensors": done.tensors,
            "bytes": done.bytes,
            "model": str(out / MODEL_FILE),
            "kept": list(done.kept),
        }
        print(json.dumps(summary))
        return
    print(f"{done.folder}: {done.family}, {done.parameters:,} parameters, {format_bytes(done.bytes)}")
    print(f"{out / MODEL_FILE}: the model section for a configuration")


def _export(checkpoint: Checkpoint, output: Output, *, as_json: bool) -> None:
    out = output.out
    request = _request(checkpoint, output.dtype or "float32", max(1, round(output.gigabytes * GIGABYTE)))
    request, family = request._replace(optimizer=output.optimizer), request.family
    if output.to == "hf":
        done = export_checkpoint(checkpoint, out, request, _progress("written"))
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
        return *parse_config(read_config(path)), read_files(path)
    if path == source:
        raise PentadError(
            f"SOURCE is '{source}', which has no {HF_CONFIG}: expected --model, which says what model it is"
        )
    if not path.is_file():
        expected = f"a folder with {HF_CONFIG}, or a YAML file with a model section"
        raise PentadError(f"--model is '{path}': expected {expected}")
    raw = load_yaml(path.read_text(encoding="utf-8"), str(path))
    try:
        section = _ModelFile.model_validate({"model": raw.get("model") if isinstance(raw, dict) else None}).model
    except ValidationError as error:
        raise ConfigError(sentences(error, _ModelFile)) from None
    return section.family, section.spec, {}


def _request(checkpoint: Checkpoint, dtype: Dtype, limit: int) -> Request:
    """Completes the manifest from the run's config.yaml or an import's model.yaml, two folders up."""
    home = home_of(checkpoint.folder)
    path = next((home / name for name in (CONFIG, MODEL_FILE) if (home / name).is_file()), None)
    config = load_yaml(path.read_text(encoding="utf-8"), str(path)) if path else {}
    section = checkpoint.meta.get("model") or config.get("model")
    if not isinstance(section, dict):
        raise PentadError(f"CHECKPOINT is '{checkpoint.folder}', whose model is unknown: expected {home / CONFIG}")
    kept, special_tokens = read_files(home / FOLDER), dict[str, int]()
    data, has_tokenizer = config.get("data"), any(name.startswith("tokenizer") for name in kept)
    if not has_tokenizer and isinstance(data, dict) and (file := _corpus_tokenizer(data, section)) is not None:
        files, special_tokens = _tokenizer_files(file)
        kept |= files
    positions = config.get("batch", {}).get("sequence_length", 0)
    return Request(*parse_section(section), positions, kept, special_tokens, dtype, limit)


def _tokenizer_files(file: Path) -> tuple[dict[str, bytes], dict[str, int]]:
    """A corpus's tokenizer in the form that transformers reads, and its special tokens by key of config.json."""
    tokenizer = load_tokenizer(file)
    end = end_token(tokenizer)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.id_to_token(end)}
    files = {"tokenizer.json": file.read_bytes(), "tokenizer_config.json": json.dumps(settings).encode()}
    return files, {"eos_token_id": end}


def _corpus_tokenizer(data: dict[str, Any], section: dict[str, Any]) -> Path | None:
    """The tokenizer of the corpus that a run reads, if the corpus still exists."""
    cache = str(data.get("cache", "~/.cache/pentad"))
    folder = corpus_folder(str(data.get("path", "")), int(section["vocab"]), cache)
    if not (folder / INDEX_FILE).is_file():
        return None
    index = parse_index((folder / INDEX_FILE).read_text(encoding="utf-8"), folder / INDEX_FILE)
    return folder / index.tokenizer.file


def _progress(verb: str) -> Callable[[int, int], None]:
    """Reports every tenth of the bytes on stderr."""
    reported = 0

    def report(done: int, total: int) -> None:
        nonlocal reported
        if 10 * done // total > reported:
            reported = 10 * done // total
            print(f"{verb} {format_bytes(done)} of {format_bytes(total)}", file=sys.stderr)

    return report
