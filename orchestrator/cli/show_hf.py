"""`pentad import-hf` and `pentad export-hf`: Hugging Face files to a checkpoint and back."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pentad.orchestrator.config.yaml_text import dump_yaml, load_yaml
from pentad.orchestrator.monitoring.runfolder import CONFIG, find_checkpoint, home_of
from pentad.orchestrator.planning.formatting import format_bytes
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import Checkpoint
from pentad.workers.data.corpus_index import INDEX_FILE, parse_index
from pentad.workers.data.sources import corpus_folder
from pentad.workers.data.tokenizer import end_token, load_tokenizer
from pentad.workers.hf.config import parse_section
from pentad.workers.hf.exporter import Dtype, Request, export_checkpoint
from pentad.workers.hf.importer import import_folder
from pentad.workers.hf.kept_files import FOLDER, read_files
from pentad.workers.hf.names import MODEL_FILE

GIGABYTE = 10**9


def show_import(source: Path, out: Path, *, as_json: bool) -> None:
    """Imports the files in `source` and prints a summary."""
    done = import_folder(source, out, render=dump_yaml, progress=_progress("read"))
    if as_json:
        summary = {
            "folder": str(out),
            "checkpoint": str(done.folder),
            "family": done.family,
            "parameters": done.parameters,
            "tensors": done.tensors,
            "bytes": done.bytes,
            "model": str(out / MODEL_FILE),
            "kept": list(done.kept),
        }
        print(json.dumps(summary))
        return
    print(f"{done.folder}: {done.family}, {done.parameters:,} parameters, {format_bytes(done.bytes)} in float32")
    print(f"{out / MODEL_FILE}: the model section for a configuration")


def show_export(path: str, out: Path, dtype: Dtype, gigabytes: float, *, as_json: bool) -> None:
    """Exports a checkpoint, or the newest one of a run, and prints a summary."""
    checkpoint = find_checkpoint(path, "CHECKPOINT")
    request = _request(checkpoint, dtype, max(1, round(gigabytes * GIGABYTE)))
    done, family = export_checkpoint(checkpoint, out, request, _progress("written")), request.family
    if as_json:
        summary = {"folder": str(out), "checkpoint": str(checkpoint.folder), "step": checkpoint.step, "family": family}
        print(json.dumps({**summary, "dtype": dtype, **done._asdict(), "model": asdict(request.model)}))
        return
    print(f"{out}: {family} of step {checkpoint.step}, {done.tensors} tensors, {format_bytes(done.bytes)} in {dtype}")


def _request(checkpoint: Checkpoint, dtype: Dtype, limit: int) -> Request:
    """Completes the manifest from the run's config.yaml or an import's model.yaml, two folders up."""
    home = home_of(checkpoint.folder)
    path = next((home / name for name in (CONFIG, MODEL_FILE) if (home / name).is_file()), None)
    config = load_yaml(path.read_text(encoding="utf-8"), str(path)) if path else {}
    section = checkpoint.meta.get("model") or config.get("model")
    if not isinstance(section, dict):
        raise PentadError(f"CHECKPOINT is '{checkpoint.folder}', whose model is unknown: expected {home / CONFIG}")
    kept, special_tokens = read_files(home / FOLDER), {}
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
