"""Everything that reads what others may have written: YAML, manifests, Arrow files, programs, control messages, folders
of Hugging Face and torch. Each reader has intact content, ways to damage it, and what is done with the result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from corpora import write_corpus
from damage import damaged_bytes, damaged_values
from fuzz_damage import Damage, damaged_chain, damaged_manifest, damaged_tree, large_counts, with_checksums
from fuzz_guard import Read, command
from paths import ROOT
from random_mutants import random_mutants
from small_checkpoint import FILE, save_small

from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.runfolder import METRIC_KEYS, RunFolder
from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.records.hash_chain import linked, read_chain
from pentad.orchestrator.records.verify import replay
from pentad.schedules.compiler import compile_program
from pentad.schedules.generators import torch_csv
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.verify.check import check
from pentad.workers.checkpoint.checkpoint import MANIFEST, folder_of, newest, open_checkpoint
from pentad.workers.checkpoint.safetensors_header import read_header
from pentad.workers.data.corpus import open_corpus
from pentad.workers.data.corpus_index import INDEX_FILE, TOKENIZER_FILE
from pentad.workers.data.tokenizer import encode, end_token, load_tokenizer, train_tokenizer
from pentad.workers.preprocess.readers import Columns, FileSpan, read_rows
from pentad.workers.preprocess.source_files import SourceFile

SIZES = ["model.layers=2", "mesh.pp=2", "schedule.name=1f1b", "schedule.microbatches=2", "batch.global_batch_size=2"]
JSON: tuple[Damage, ...] = (damaged_tree, damaged_tree, damaged_values, damaged_bytes, large_counts)
TEXT: tuple[Damage, ...] = (damaged_values, damaged_bytes)
BINARY: tuple[Damage, ...] = (damaged_bytes,)


class Reader(NamedTuple):
    """`read` is called with one of the `intact` contents after one of the `damages`."""

    intact: tuple[bytes, ...]
    damages: tuple[Damage, ...]
    read: Read

    def case(self, seed: int) -> bytes:
        return self.damages[seed % len(self.damages)](Random(seed).choice(self.intact), seed)


def _written(path: Path, then: Callable[[], object]) -> Read:
    """Writes the content to a new file and calls `then`. Mapped or cached old files keep their bytes."""

    def read(content: bytes) -> object:
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        return then()

    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return read


GIVEN: dict[str, Any] = {
    "run": {"seed": 1, "name": "x", "steps": 4},
    "model": {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 300, "rope_scaling": None},
    "mesh": {"pp": 2},
    "batch": {"global_batch_size": 4, "sequence_length": 16},
    "schedule": {"name": "zb-h1", "microbatches": 4},
    "data": {"path": "builtin:pydoc", "holdout": 0.1},
    "eval": {"every": 2, "data": [{"path": "builtin:pydoc", "name": "a"}]},
    "checkpoint": {"every": 2, "keep_best": "a", "path": "/tmp/x"},
    "optimizer": {"beta2": 0.95, "clip_norm": 1.0},
}
_EXPERTS = {"family": "mixtral", "experts": {"num_experts": 4, "top_k": 2, "intermediate_size": 16}}
MORE: dict[str, Any] = {
    "model": GIVEN["model"] | _EXPERTS,
    "mesh": {"ep": 2},
    "batch": {"global_batch_size": 8, "sequence_length": 16},
    "elastic": {"notice": "/run/x", "replicate_every": 3},
}


@contextmanager
def configurations(folder: Path) -> Iterator[Reader]:
    path = folder / "config.yaml"
    intact = (GIVEN, GIVEN | MORE)
    yield Reader(tuple(json.dumps(each).encode() for each in intact), JSON, _written(path, lambda: load(path)))


@contextmanager
def yaml_texts(folder: Path) -> Iterator[Reader]:
    """The jobs of deploy/, read with the files they include."""
    path = folder / "config.yaml"
    jobs = tuple(each.read_bytes() for each in sorted((ROOT / "deploy" / "jobs").glob("*.yaml")))
    yield Reader(jobs, TEXT, _written(path, lambda: load(path)))


@contextmanager
def planned_configurations(folder: Path) -> Iterator[Reader]:
    path = folder / "config.yaml"
    yield Reader((json.dumps(GIVEN).encode(),), JSON, _written(path, lambda: command("plan", str(path))))


@contextmanager
def manifests(folder: Path) -> Iterator[Reader]:
    root = folder / "checkpoints"
    save_small(folder_of(root, 3), 3, {"seed": 7, "position": {"sample": 320}})
    path = folder_of(root, 3) / MANIFEST

    def read() -> None:
        newest(root)
        open_checkpoint(path.parent)

    yield Reader((path.read_bytes(),), (damaged_manifest, damaged_manifest, *JSON), _written(path, read))


@contextmanager
def shard_headers(folder: Path) -> Iterator[Reader]:
    save_small(folder_of(folder, 3), 3)
    path = folder_of(folder, 3) / FILE

    def read() -> None:
        with path.open("rb") as file:
            read_header(file, path.stat().st_size)

    yield Reader((path.read_bytes(),), TEXT, _written(path, read))


@contextmanager
def audits(folder: Path) -> Iterator[Reader]:
    path, lines, previous = folder / "audit.jsonl", [], ""
    step = {"event": "step", "batch": 0, "samples": 1 << 39, "loss": 1.5, "generation": 1}
    entries: list[dict[str, Any]] = [{"event": "configuration", "yaml": "run: {seed: 1}\n"}]
    entries += [{"event": "rewind", "step": 0}]
    entries += [{**step, "step": number, "batch": number} for number in range(4)]
    entries += [{"event": "checkpoint", "step": 3, "manifest": "0" * 64}, {"event": "rewind", "step": 3}]
    for entry in entries:
        lines.append(linked(entry, previous))
        previous = lines[-1]["hash"]
    intact = "".join(json.dumps(line) + "\n" for line in lines).encode()

    def read(content: bytes) -> None:
        replay(read_chain(content.split(b"\n")[:-1], str(path)), str(path))

    yield Reader((intact,), (damaged_chain, damaged_chain, *TEXT), read)


def _small_corpus(folder: Path) -> Path:
    corpus = folder / "corpus"
    corpus.mkdir()
    write_corpus(corpus, ["one two three " * 9, "four", "", "five " * 40], train_tokenizer(["one two three"], 300))
    return corpus


@contextmanager
def corpus_indices(folder: Path) -> Iterator[Reader]:
    corpus = _small_corpus(folder)
    path = corpus / INDEX_FILE
    yield Reader((path.read_bytes(),), JSON, _written(path, lambda: _read_corpus(corpus)))


@contextmanager
def corpus_shards(folder: Path) -> Iterator[Reader]:
    """Shards with checksums that match the damaged bytes, so that these are read."""
    corpus = _small_corpus(folder)
    path = next(corpus.glob("*.arrow"))

    def read() -> None:
        with_checksums(corpus, path.name)
        _read_corpus(corpus)

    yield Reader((path.read_bytes(),), BINARY, _written(path, read))


def _read_corpus(path: Path) -> None:
    corpus = open_corpus(path, verify=True)
    corpus.read(0, corpus.tokens)
    corpus.loss_mask(0, corpus.tokens)
    corpus.boundaries(0, corpus.tokens)
    for _ in corpus.extents():
        pass


@contextmanager
def run_folders(folder: Path) -> Iterator[Reader]:
    """timeline.arrow of a run, drawn."""
    config = load(None, [*SIZES, "run.name=trial", f"run.folder={folder}"])
    plan = make_plan(config, "cpu")
    costs = costs_of(plan)
    with RunFolder(config, plan) as run:
        run.timelines(Timeline("measured", simulate(plan.program, costs, step=1).spans), costs)
        run.metrics(dict.fromkeys(METRIC_KEYS, 1.5) | {"step": 0, "tokens": 256, "target_tokens": 256, "generation": 1})
    path = run.path / "timeline.arrow"
    yield Reader((path.read_bytes(),), BINARY, _written(path, lambda: command("timeline", str(run.path))))


@contextmanager
def run_statuses(folder: Path) -> Iterator[Reader]:
    """control.json of a run that is no longer live."""
    config = load(None, [*SIZES, "run.name=trial", f"run.folder={folder}"])
    with RunFolder(config, make_plan(config, "cpu")) as run:
        run.event("start", generation=1, mesh="pp2")
    intact = json.dumps({"address": "127.0.0.1:1", "token": "x", "host": ""}).encode()
    words = ("status", str(run.path), "--timeout", "0.1")
    yield Reader((intact,), JSON, _written(run.path / "control.json", lambda: command(*words)))


@contextmanager
def timelines(folder: Path) -> Iterator[Reader]:
    program = compile_program("1f1b", 2, 3)
    sink = pa.BufferOutputStream()
    table = simulate(program, Costs.uniform(program.stages)).to_arrow()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    path = folder / "timeline.arrow"
    yield Reader((sink.getvalue().to_pybytes(),), BINARY, _written(path, lambda: Timeline.load(path)))


@contextmanager
def row_files(folder: Path) -> Iterator[Reader]:
    """Arrow, Parquet, JSONL and CSV that others wrote; the first byte says which."""
    table = pa.table({"text": ["one", "two words", None] * 9, "messages": [[{"role": "user", "content": "x"}]] * 27})
    arrow, parquet = pa.BufferOutputStream(), pa.BufferOutputStream()
    with pa.ipc.new_file(arrow, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    pq.write_table(table, parquet)
    lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()
    intact = (arrow.getvalue().to_pybytes(), parquet.getvalue().to_pybytes(), lines, b'text,messages\na,"b\nc"\nd,e\n')
    columns = Columns((("text", "messages"),))
    kinds = dict(zip((each[:4] for each in intact), ("arrow", "parquet", "jsonl", "csv"), strict=True))

    def read(content: bytes) -> None:
        path = folder / f"rows.{kinds.get(content[:4], 'jsonl')}"
        path.write_bytes(content)
        try:
            for _ in read_rows(FileSpan(SourceFile(str(path), path.stat().st_size, 0)), columns):
                pass
        finally:
            path.unlink()

    yield Reader(intact, (damaged_bytes, damaged_bytes, damaged_values), read)


@contextmanager
def program_files(folder: Path) -> Iterator[Reader]:
    path = folder / "program.arrow"
    made = [compile_program(*size) for size in (("1f1b", 2, 3), ("zb-h1", 3, 5), ("dualpipe", 4, 8))]

    def read() -> None:
        program = Program.load(path)
        check(program)
        simulate(program, Costs.uniform(program.stages))

    yield Reader(tuple(each.to_bytes() for each in made), BINARY, _written(path, read))


@contextmanager
def programs(folder: Path) -> Iterator[Reader]:
    """Programs with other instructions, in files that are intact."""
    made = [compile_program(*size) for size in (("1f1b", 2, 3), ("zb-h2", 3, 6), ("interleaved", 2, 4))]

    def mutant(_: bytes, seed: int) -> bytes:
        changed = made[seed % len(made)]
        for at in range(1 + seed % 2):
            changed = next(random_mutants(changed, f"{seed} {at}", 1))[1]
        return changed.to_bytes()

    def read(content: bytes) -> None:
        program = Program.from_bytes(content)
        check(program)
        simulate(program, Costs.uniform(program.stages))

    yield Reader(tuple(each.to_bytes() for each in made), (mutant,), read)


@contextmanager
def orders(folder: Path) -> Iterator[Reader]:
    """CSV of compute orders, which are compiled."""
    path, names = folder / "order.csv", ("1f1b", "zb-h1", "interleaved")
    intact = tuple(torch_csv.torch_csv(compile_program(name, 2, 4)).encode() for name in names)
    words = ("schedule", str(path), "--ranks", "2", "--microbatches", "4")
    yield Reader(intact, TEXT, _written(path, lambda: command(*words)))


@contextmanager
def tokenizers(folder: Path) -> Iterator[Reader]:
    path = folder / TOKENIZER_FILE
    tokenizer = train_tokenizer(["some text, and some more"], 280)
    tokenizer.save(str(path))

    def read() -> None:
        found = load_tokenizer(folder)
        end_token(found)
        encode(found, ["one text", ""])

    yield Reader((path.read_bytes(),), (*TEXT, damaged_tree), _written(path, read))
