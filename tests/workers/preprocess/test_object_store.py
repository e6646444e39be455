"""Corpora in object stores are built and read there, and errors say what is wrong in a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import build
from object_store import BUCKET, ObjectStore, served, served_google
from pyarrow import fs

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.corpus import Corpus, open_corpus
from pentad.workers.data.tokenizer import train_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FIRST_PORT = 21_360


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with served(tmp_path_factory, FIRST_PORT, named=False) as store:
        yield store


@pytest.fixture(scope="module")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """The URI of a path in a store that speaks the protocol of Google's."""
    with served_google(tmp_path_factory, FIRST_PORT + 9) as uri:
        yield uri


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the rows of a corpus of some 20 MB and a tokenizer."""
    folder = tmp_path_factory.mktemp("source")
    noise = np.random.default_rng(1)
    with (folder / "rows.jsonl").open("w") as rows:
        for _ in range(500):
            rows.write(json.dumps({"text": "".join(map(chr, noise.integers(97, 123, 20_000)))}) + "\n")
    train_tokenizer(["a"], 300).save(str(folder / "t.json"))
    return folder


@pytest.fixture(scope="module")
def local(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return build(**options(source, tmp_path_factory.mktemp("local") / "corpus"))


def options(source: Path, out: Path | str) -> dict[str, Any]:
    names = {"source": source / "rows.jsonl", "tokenizer": source / "t.json", "shard_tokens": 2**18}
    return names | {"out": out, "staging": source / "staging"}


@pytest.fixture(scope="module")
def uri(store: ObjectStore, source: Path) -> str:
    """The URI of the corpus in the store."""
    made = store.uri(f"{BUCKET}/first")
    build(**options(source, made))
    return made


def test_what_was_built_in_the_store_is_the_local_corpus(uri: str, local: Corpus, tmp_path: Path) -> None:
    corpus = open_corpus(uri, verify=True, cache=str(tmp_path))
    assert corpus.fingerprint == local.fingerprint
    assert np.array_equal(corpus.read(0, corpus.tokens), local.read(0, local.tokens))


def test_a_corpus_and_checkpoints_in_the_store_of_google_are_those_of_a_folder(
    google: Callable[[str], str], source: Path, tmp_path: Path
) -> None:
    """Both are small: this server reads an entire file for every part of it."""
    rows = (source / "rows.jsonl").read_text().splitlines(keepends=True)[:10]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    few = {"source": tmp_path / "rows.jsonl", "staging": tmp_path / "staging"}
    uri, local = google(f"{BUCKET}/first"), build(**options(source, tmp_path / "local") | few)
    build(**options(source, uri) | few)
    corpus = open_corpus(uri, verify=True, cache=str(tmp_path))
    assert corpus.fingerprint == local.fingerprint
    small = ["model.layers=2", "model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.ffn=128"]
    stored = f"checkpoint.path={google(f'{BUCKET}/runs')}"
    for steps in (2, 4):
        words = [*small, f"run.steps={steps}"]
        found = losses("store", uri, tmp_path, *words, stored)
        assert found == losses("local", str(local.path), tmp_path, *words) and len(found) == steps
    events = [json.loads(row) for row in (tmp_path / "runs/store/journal.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "start"] == [0, 2]


def losses(name: str, corpus: str, folder: Path, *overrides: str) -> list[float]:
    """All losses of a run of four steps, or as many as `overrides` say, including those of earlier calls."""
    words = [f"data.path={corpus}", f"data.cache={folder}/cache", f"run.name={name}", "run.steps=4", "mesh.pp=2"]
    words += ["model.vocab=300", "schedule.name=1f1b", "schedule.microbatches=4"]
    words.append("cluster.start_timeout_seconds=250")
    command = [sys.executable, "-m", "pentad.orchestrator.cli.cli", "train", *words, *overrides]
    subprocess.run(command, cwd=folder, check=True, timeout=400, stdout=subprocess.DEVNULL)
    rows = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["loss"] for row in rows]


def test_sources_in_the_store_are_those_of_a_folder(store: ObjectStore, source: Path, tmp_path: Path) -> None:
    system, rows = store.filesystem(), (source / "rows.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "crawl").mkdir()
    for name, some in ("a.jsonl", rows[:9]), ("b.jsonl", rows[9:20]), ("c.txt", rows[20:21]):
        (tmp_path / "crawl" / name).write_bytes(b"".join(some))
        with system.open_output_stream(f"{BUCKET}/crawl/{name}") as sink:
            sink.write(b"".join(some))
    for pattern, documents in ("", 21), ("/*.jsonl", 20):
        sources = f"{tmp_path}/crawl{pattern}", store.uri(f"{BUCKET}/crawl{pattern}")
        both = [
            build(path, tokenizer=source / "t.json", out=tmp_path / f"{documents}-{number}")
            for number, path in enumerate(sources)
        ]
        assert both[0].fingerprint == both[1].fingerprint and both[0].documents == documents


def test_a_build_that_is_killed_while_it_uploads_continues(store: ObjectStore, source: Path, local: Corpus) -> None:
    uri, path = store.uri(f"{BUCKET}/killed"), f"{BUCKET}/killed"
    code = f"from corpora import build; from pathlib import Path; build(**{options(source, uri)!r})".replace(
        "PosixPath", "Path"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)})
    system = store.filesystem()
    folder = fs.FileSelector(path, allow_not_found=True)
    while not any(info.base_name.endswith(".arrow") for info in system.get_file_info(folder)):
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()
    process.wait()
    names = {info.base_name for info in system.get_file_info(folder)}
    assert "index.json" not in names and len(names) < 80
    with pytest.raises(PentadError, match=r"which cannot be read .*expected a corpus"):
        open_corpus(uri)
    assert build(**options(source, uri)).fingerprint == local.fingerprint


def test_training_reads_the_store_and_has_the_losses_of_the_local_corpus(
    uri: str, local: Corpus, tmp_path: Path
) -> None:
    found = losses("store", uri, tmp_path)
    assert found == losses("local", str(local.path), tmp_path) and len(found) == 4


@pytest.mark.parametrize(("path", "key"), [("no-such-bucket/corpus", "someone"), (f"{BUCKET}/denied", "stranger")])
def test_what_the_store_refuses_is_one_sentence(store: ObjectStore, source: Path, path: str, key: str) -> None:
    with pytest.raises(PentadError, match=rf"^OUT is 's3://{path}', which cannot be written \(.*\): expected") as built:
        build(**options(source, store.uri(path, key)))
    with pytest.raises(
        PentadError, match=rf"^data.path is 's3://{path}', which cannot be read \(.*\): expected"
    ) as read:
        open_corpus(store.uri(path, key))
    for error in (built, read):
        assert "\n" not in str(error.value) and "something" not in str(error.value)


def test_a_store_that_goes_away_is_named_and_reading_goes_on_when_it_is_back(
    store: ObjectStore, uri: str, local: Corpus, tmp_path: Path
) -> None:
    corpus = open_corpus(uri, cache=str(tmp_path))
    corpus.read(0, 1000)
    store.stop()
    began = time.monotonic()
    assert np.array_equal(corpus.read(0, 1000), local.read(0, 1000))
    with pytest.raises(PentadError, match=r"^s3://corpora/first/tokens-.* cannot be read \(.*\): expected") as raised:
        corpus.read(corpus.tokens - 1000, 1000)
    assert "\n" not in str(raised.value) and time.monotonic() - began < 120
    store.start()
    assert np.array_equal(corpus.read(corpus.tokens - 1000, 1000), local.read(corpus.tokens - 1000, 1000))
