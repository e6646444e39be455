"""What an export needs besides a checkpoint: its model, and the files that go along with the weights."""

from __future__ import annotations

import json
from pathlib import Path

from pentad.orchestrator.config.yaml_text import load_yaml
from pentad.orchestrator.records.checkpoint_places import CONFIG, home_of
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import Checkpoint
from pentad.workers.data.sources import tokenizer_file
from pentad.workers.data.tokenizer import end_token, load_tokenizer
from pentad.workers.hf.config import parse_section
from pentad.workers.hf.exporter import Dtype, ExportRequest
from pentad.workers.hf.kept_files import FOLDER, read_files
from pentad.workers.hf.names import MODEL_FILE


def export_request(checkpoint: Checkpoint, dtype: Dtype, limit: int) -> ExportRequest:
    """Completes the manifest from the run's config.yaml or an import's model.yaml, two folders above the checkpoint."""
    home = home_of(checkpoint.folder)
    path = next((home / name for name in (CONFIG, MODEL_FILE) if (home / name).is_file()), None)
    config = load_yaml(path.read_text(encoding="utf-8"), str(path)) if path else {}
    section = checkpoint.meta.get("model") or config.get("model")
    if not isinstance(section, dict):
        raise PentadError(f"CHECKPOINT is '{checkpoint.folder}', whose model is unknown: expected {home / CONFIG}")
    kept, special_tokens = read_files(home / FOLDER), dict[str, int]()
    data, has_tokenizer = config.get("data"), any(name.startswith("tokenizer") for name in kept)
    if not has_tokenizer and isinstance(data, dict):
        path = data.get("path") or data["sources"][0]["path"]  # sources share a tokenizer
        cache = str(data.get("cache", "~/.cache/pentad"))
        if file := tokenizer_file(str(path), int(section["vocab"]), cache):
            files, special_tokens = _tokenizer_files(file)
            kept |= files
    positions = config.get("batch", {}).get("sequence_length", 0)
    return ExportRequest(*parse_section(section), positions, kept, special_tokens, dtype, limit)


def _tokenizer_files(file: Path) -> tuple[dict[str, bytes], dict[str, int]]:
    """A corpus's tokenizer in the form that transformers reads, and its special tokens by key of config.json."""
    tokenizer = load_tokenizer(file)
    end = end_token(tokenizer)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.id_to_token(end)}
    files = {"tokenizer.json": file.read_bytes(), "tokenizer_config.json": json.dumps(settings).encode()}
    return files, {"eos_token_id": end}
