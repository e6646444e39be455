"""Built-in corpora: built once and reused, also when processes race. And sources that vanish."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mixtures import random_corpus

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.data import DataSpec, SourceSpec
from pentad.schedules.spec.plan import BatchSpec
from pentad.workers.data.corpus import open_corpus
from pentad.workers.data.corpus_writer import write_index
from pentad.workers.data.sources import builtin_corpus, open_dataset
from pentad.workers.data.tokenizer import decode, load_tokenizer


@pytest.fixture(scope="module")
def pydoc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return builtin_corpus("pydoc", 512, tmp_path_factory.mktemp("cache"))


def test_pydoc_is_built_once_and_reused(pydoc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("pentad.workers.data.corpus_writer.write_index")

    def times() -> dict[str, int]:
        return {file.name: file.stat().st_mtime_ns for file in pydoc.iterdir()}

    before = times()
    assert builtin_corpus("pydoc", 512, pydoc.parent) == pydoc
    assert times() == before and sorted(before) == [
        "index.json",
        "tokenizer.json",
        "tokens-00000.arrow",
        "tokens-00000.crc32",
    ]


def test_pydoc_holds_the_language_reference(pydoc: Path) -> None:
    corpus = open_corpus(pydoc, verify=True)
    assert corpus.vocab_size == 512 and corpus.documents > 50 and corpus.tokens > 100_000
    text = decode(load_tokenizer(pydoc / "tokenizer.json"), corpus.read(0, 200).tolist())
    assert text.startswith('The "assert" statement')


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(PentadError, match=r"data.path is builtin:wiki: expected one of builtin:pydoc"):
        builtin_corpus("wiki", 512, tmp_path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PentadError, match=r"data.cache is '.*file/pydoc.*', which cannot be written \(.*\)"):
        builtin_corpus("pydoc", 300, tmp_path / "file")


def test_a_vocabulary_smaller_than_the_bytes_names_the_config_key(tmp_path: Path) -> None:
    with pytest.raises(PentadError, match=r"model.vocab is 100: expected at least 257"):
        builtin_corpus("pydoc", 100, tmp_path)


def test_racing_builds_return_the_same_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_written = threading.Barrier(2, timeout=50)

    def write_and_wait(*arguments: Any) -> None:
        write_index(*arguments)
        both_written.wait()

    monkeypatch.setattr("pentad.workers.data.corpus_writer.write_index", write_and_wait)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: builtin_corpus("pydoc", 300, tmp_path), range(2))
    corpus = open_corpus(first, verify=True)
    assert first == second and list(tmp_path.iterdir()) == [corpus.path]
    assert np.all(corpus.read(0, corpus.tokens) < 300)


def test_a_source_that_vanishes_during_a_run_is_named(tmp_path: Path) -> None:
    """What a rank has mapped it keeps; the sentence of any other shard ends the run."""
    path = random_corpus(tmp_path / "corpus", 1, 400, 40)
    dataset = open_dataset(DataSpec((SourceSpec("gone", path),), str(tmp_path)), BatchSpec(4, 8, 1, 1), 300, 0)
    before = dataset.sample(0, 0)
    shutil.rmtree(path)
    assert np.array_equal(dataset.sample(0, 0).inputs, before.inputs)
    with pytest.raises(PentadError, match=r"^shard .*/corpus/tokens-0000\d.arrow is missing: expected a file of"):
        [dataset.sample(0, index) for index in range(30)]
