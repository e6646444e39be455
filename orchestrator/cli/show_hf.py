"""`pentad import-hf` and `pentad export-hf`: Hugging Face files to a checkpoint and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from pentad.orchestrator.config.yaml_text import dump_yaml, load_yaml
from pentad.orchestrator.monitoring.runfolder import CHECKPOINTS, CONFIG, resolve_run
from pentad.orchestrator.planning.quantities import size
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import MANIFEST, Checkpoint, newest, open_checkpoint
from pentad.workers.data.corpus_index import INDEX_FILE, parse_index
from pentad.workers.data.tokenizer import end_token, load_tokenizer
from pentad.workers.hf.config import of_section
from pentad.workers.hf.exporter import Dtype, Request, export_checkpoint
from pentad.workers.hf.hf_files import MODEL_FILE, TOKENIZER_FILES
from pentad.workers.hf.importer import import_folder

GIGABYTE = 10**9
_USUAL_POSITIONS = 2048  # where neither files nor a run say how long sequences are


def show_import(source: Path, out: Path, *, as_json: bool) -> None:
    """Makes a checkpoint of the files in `source` and says what is in it."""
    made = import_folder(source, out, render=dump_yaml, progress=_reporter("read"))
    facts = {
        "folder": str(out),
        "checkpoint": str(made.folder),
        "family": made.family,
        "parameters": made.parameters,
        "tensors": made.tensors,
        "bytes": made.bytes,
        "model": str(out / MODEL_FILE),
        "tokenizer": list(made.tokenizer),
    }
    if as_json:
        print(json.dumps(facts))
        return
    print(f"{made.folder}: {made.family}, {made.parameters:,} parameters, {size(made.bytes)} in float32")
    print(f"{out / MODEL_FILE}: the model section for a configuration")


def show_export(path: str, out: Path, dtype: Dtype, gigabytes: float, *, as_json: bool) -> None:
    """Makes Hugging Face files of a checkpoint, or of the newest one of a run, and says what is in them."""
    found = _checkpoint(path)
    known = _known(found)
    family, shape = of_section(known.section)
    request = Request(
        family, shape, known.positions, known.tokens, known.tokenizer, dtype, max(1, round(gigabytes * GIGABYTE))
    )
    done = export_checkpoint(found, out, request, _reporter("written"))
    if as_json:
        facts = {"folder": str(out), "checkpoint": str(found.folder), "step": found.step, "family": family}
        print(json.dumps({**facts, "dtype": dtype, **done._asdict(), "model": asdict(shape)}))
        return
    print(f"{out}: {family} of step {found.step}, {done.tensors} tensors, {size(done.bytes)} in {dtype}")


class _Known(NamedTuple):
    """What is known of a checkpoint beside its tensors."""

    section: dict[str, Any]
    positions: int
    tokens: dict[str, Any]
    tokenizer: dict[str, bytes]


def _known(found: Checkpoint) -> _Known:
    """Of its manifest, of the run's config.yaml or of an import's model.yaml, two folders up."""
    home = found.folder.absolute().parent.parent
    config: dict[str, Any] = {}
    for name in (CONFIG, MODEL_FILE):
        if not config and (home / name).is_file():
            config = load_yaml((home / name).read_text(encoding="utf-8"), str(home / name))
    kept = dict(found.meta.get("hugging_face") or {})
    section = found.meta.get("model") or (config.get("model") if isinstance(config, dict) else None)
    if not isinstance(section, dict):
        raise PentadError(
            f"CHECKPOINT is '{found.folder}', whose model is not known: expected one with {home / CONFIG}"
        )
    positions = kept.pop("max_position_embeddings", None)
    positions = positions or config.get("batch", {}).get("sequence_length", _USUAL_POSITIONS)
    tokenizer = {name: (home / name).read_bytes() for name in TOKENIZER_FILES if (home / name).is_file()}
    if not tokenizer and isinstance(config.get("data"), dict):
        path = _of_corpus(config["data"], section)
        if path is not None:
            loaded = load_tokenizer(path)
            end = end_token(loaded)
            words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": loaded.id_to_token(end)}
            tokenizer = {"tokenizer.json": path.read_bytes(), "tokenizer_config.json": json.dumps(words).encode()}
            kept = {"eos_token_id": end, **kept}
    return _Known(section, positions, kept, tokenizer)


def _of_corpus(data: dict[str, Any], section: dict[str, Any]) -> Path | None:
    """The tokenizer of the corpus that a run reads, if it is still there."""
    path = Path(str(data.get("path", ""))).expanduser()
    if str(path).startswith("builtin:"):
        from pentad.workers.data.builtin import builtin_corpus
        from pentad.workers.data.sources import BUILTIN_VOCAB

        cache = Path(str(data.get("cache", "~/.cache/pentad"))).expanduser()
        path = builtin_corpus(str(path).partition(":")[2], min(int(section["vocab"]), BUILTIN_VOCAB), cache)
    if not (path / INDEX_FILE).is_file():
        return None
    index = parse_index((path / INDEX_FILE).read_text(encoding="utf-8"), path / INDEX_FILE)
    return path / index.tokenizer_file


def _checkpoint(path: str) -> Checkpoint:
    """A checkpoint by its folder, or the newest one of a run's or an import's folder."""
    folder = Path(path)
    if (folder / MANIFEST).exists() or folder.name.startswith("step-"):
        return open_checkpoint(folder)
    home = folder if (folder / CHECKPOINTS).is_dir() else resolve_run(path)
    found = newest(home / CHECKPOINTS).checkpoint
    if found is None:
        raise PentadError(f"CHECKPOINT is '{path}', which has no whole checkpoint: expected one that has")
    return found


def _reporter(verb: str) -> Callable[[int, int], None]:
    """Tells every tenth of the way on stderr."""
    log, told = Console(stderr=True, highlight=False, markup=False), 0

    def report(done: int, total: int) -> None:
        nonlocal told
        if 10 * done // total > told:
            told = 10 * done // total
            log.print(f"{verb} {size(done)} of {size(total)}")

    return report
