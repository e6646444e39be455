"""Special files in each place where a run or a user has a file: a named pipe whose other end nobody opens, a folder,
an empty sparse file of 4 GiB, and links to themselves and to nothing."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from chat_templates import CHATML
from dcp_files import save
from fuzz_guard import Broken, command
from fuzz_models import SMALL, model_folder
from fuzz_readers import GIVEN, Reader, _small_corpus
from page_run import ended_run
from peft_files import ATTENTION, write_adapter
from small_checkpoint import save_small

from pentad.orchestrator.checked_folders import checked_folder
from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.runfolder import RunFolder
from pentad.orchestrator.page.ended_run import EndedRun
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.compiler import compile_program
from pentad.schedules.generators.torch_csv import torch_csv
from pentad.schedules.spec.lora import LoraSpec
from pentad.workers.checkpoint.checkpoint import folder_of
from pentad.workers.data.tokenizer import train_tokenizer
from pentad.workers.hf.exporter import ExportRequest
from pentad.workers.hf.peft import read_adapter

HUGE = 4 << 30
WAITS = 2.0  # seconds for which a reader may wait for the other end of a pipe
FREE = """
import os, sys, time
time.sleep(float(sys.argv[2]))
while True:
    try:
        os.close(os.open(sys.argv[1], os.O_WRONLY | os.O_NONBLOCK))
        print(end="x", flush=True)
    except OSError:  # nobody reads
        pass
    time.sleep(0.05)
"""
Do = Callable[[], object]
Make = Callable[[Path], object]


def _huge(path: Path) -> None:
    path.touch()
    os.truncate(path, HUGE)


KINDS: dict[str, Make] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "huge": _huge,
    "loop": lambda path: path.symlink_to(path.name),
    "dangling": lambda path: path.symlink_to("/nowhere/nothing"),
}


class Place(NamedTuple):
    """The path of a file or special file, and what reads it."""

    path: Path
    actions: tuple[Do, ...]
    is_source: bool = False  # may have any size, which takes time to read


def _command(*words: str | Path) -> Do:
    return lambda: command(*map(str, words), statuses=(0, 1, 2))


@contextmanager
def run_places(folder: Path) -> Iterator[Reader]:
    """Files of a run that has ended."""
    run, _, _ = ended_run(folder)
    save_small(folder_of(run / "checkpoints", 3), 3, {"seed": 7})
    (run / "control.json").write_text(json.dumps({"address": "127.0.0.1:1", "token": "x", "host": ""}))
    (run / "eval.jsonl").touch()
    config = load(run / "config.yaml", [])
    plan = make_plan(config, "cpu")

    def resume() -> None:
        with RunFolder(config, plan) as opened:
            opened.event("start", generation=9)
            opened.files.settle()

    def page() -> None:
        served = EndedRun(run)
        served.memory_html()
        served.timeline_html()

    words = [("status", run, "--timeout", "0.1"), ("timeline", run), ("timeline", run, "--explain"), ("verify", run)]
    words += [("curves", run), ("logs", run), ("runs", "--folder", folder), ("plan", run / "config.yaml")]
    words += [("checkpoint", "list", run), ("checkpoint", "verify", run), ("checkpoint", "prune", run, "--dry-run")]
    words += [("timeline", run, "--profile"), ("timeline", run, "--html", folder.parent / "out.html")]
    schedule = _command("schedule", run / "program.arrow", "--ranks", "2", "--microbatches", "8")
    actions = (*(_command(*each) for each in words), schedule, page)
    names = sorted({*(path.relative_to(run) for path in run.rglob("*")), Path("order.arrow"), Path("profiles")})
    with _places([Place(run / name, (*actions, resume)) for name in names], folder) as reader:
        yield reader


@contextmanager
def user_places(folder: Path) -> Iterator[Reader]:
    """Configurations, programs, corpora and their sources."""
    (folder / "config.yaml").write_text(json.dumps(GIVEN | {"include": "base.yaml"}))
    (folder / "base.yaml").write_text("run: {steps: 3}")
    (folder / "order.csv").write_text(torch_csv(compile_program("1f1b", 2, 4)))
    compile_program("1f1b", 2, 4).save(folder / "program.arrow")
    (folder / "own.py").write_text("def own(ranks, microbatches):\n    return ()\n")
    (folder / "template.jinja").write_text(CHATML)
    sources = folder / "sources"
    sources.mkdir()
    (sources / "rows.jsonl").write_text('{"text": "one two"}\n' * 9)
    tokenizer = train_tokenizer(["one two"], 300)
    tokenizer.save(str(folder / "tokenizer.json"))
    corpus = _small_corpus(folder)

    def built(name: str) -> Do:
        def do() -> None:
            try:
                tokenizer = ("--tokenizer", str(folder / "tokenizer.json"), "--workers", "1")
                command("data", "build", str(sources / name), str(sources / "out"), *tokenizer)
            finally:
                shutil.rmtree(sources / "out", ignore_errors=True)

        return do

    sized = ("--ranks", "2", "--microbatches", "4")
    planned = _command("plan", folder / "config.yaml")
    places = [Place(folder / name, (planned,)) for name in ("config.yaml", "base.yaml")]
    for name, shown in {"order.csv": "order.csv", "program.arrow": "program.arrow", "own.py": "own.py:own"}.items():
        places.append(Place(folder / name, (_command("schedule", folder / shown, *sized),)))
    inspect = (_command("data", "inspect", corpus), _command("plan", f"data.path={corpus}"))
    places += [Place(path, inspect) for path in sorted(corpus.iterdir())]
    places.append(Place(folder / "tokenizer.json", (built("rows.jsonl"),)))
    for name in ("rows.jsonl", "rows.csv", "rows.parquet", "rows.arrow", "rows.jsonl.gz", "rows.txt.zst"):
        places.append(Place(sources / name, (built(name),), is_source=True))
    with _places(places, folder) as reader:
        yield reader


@contextmanager
def model_places(folder: Path) -> Iterator[Reader]:
    """Folders of Hugging Face, PEFT and torch.distributed.checkpoint."""
    source = model_folder(folder)
    for name in ("generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"):
        (source / name).write_text("{}") if "index" not in name else None
    train_tokenizer(["one two"], 300).save(str(source / "tokenizer.json"))
    adapter, dcp = write_adapter(folder / "adapter", SMALL), folder / "dcp"
    dcp.mkdir()
    save({"a": torch.randn(3, 4), "step": 7}, dcp)

    def imported() -> None:
        try:
            command("import-hf", str(source), str(folder / "out"))
        finally:
            shutil.rmtree(folder / "out", ignore_errors=True)

    def convert(source: Path) -> Do:
        words = ("convert", str(source), str(folder / "out"), "--to", "pentad", "--model", str(folder / "model"))
        return lambda: command(*words, statuses=(0, 1, 2))

    request, lora = ExportRequest("llama", SMALL, 64), LoraSpec(2, 4.0, ATTENTION)
    init = _command("init", "--model", source, "--gpus", "1")
    names = sorted({*(path.name for path in source.iterdir()), "model.safetensors.index.json"})
    places = [Place(source / name, (imported, init)) for name in names]
    places += [
        Place(path, (lambda: read_adapter(checked_folder(adapter), request, lora),))
        for path in sorted(adapter.iterdir())
    ]
    places += [Place(path, (convert(dcp),)) for path in sorted(dcp.iterdir())]
    with _places(places, folder) as reader:
        yield reader


@contextmanager
def _places(places: list[Place], folder: Path) -> Iterator[Reader]:
    """Each case in turn: a place, what is there instead of a file, and one of the place's actions."""
    cases = [
        (at, kind, do)
        for at, place in enumerate(places)
        for kind in KINDS
        for do in range(len(place.actions))
        if not (place.is_source and kind == "huge")
    ]

    def chosen(_: bytes, seed: int) -> bytes:
        at, kind, do = cases[seed % len(cases)]
        return json.dumps([str(places[at].path.relative_to(folder)), kind, do, at]).encode()

    with TemporaryDirectory(dir=folder.parent) as aside:
        numbers = itertools.count()

        def read(content: bytes) -> None:
            _, kind, do, at = json.loads(content)
            path, kept = places[at].path, Path(aside, str(next(numbers)))
            if existed := os.path.lexists(path):
                path.rename(kept)
            KINDS[kind](path)
            try:
                with _freed(path):
                    places[at].actions[do]()
            finally:
                _remove(path)
                if existed:
                    kept.rename(path)

        yield Reader((chosen(b"", 0),), (chosen,), read)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _freed(path: Path) -> Iterator[None]:
    """Frees readers that wait for the other end of a pipe, and raises Broken. Another process opens it, since some
    readers hold the interpreter's lock while they wait."""
    if not path.is_fifo():
        yield
        return
    helper = subprocess.Popen([sys.executable, "-SEc", FREE, str(path), str(WAITS)], stdout=subprocess.PIPE)
    try:
        yield
    finally:
        helper.kill()
        if helper.communicate()[0]:
            raise Broken(f"it waits for more than {WAITS:g} s for what nobody writes")
