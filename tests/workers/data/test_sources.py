"""Built-in corpora are built once and reused, even when processes race; sources that vanish or do not go together."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import write_corpus
from mixtures import random_corpus

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.data import DataSpec, SourceSpec
from pentad.schedules.spec.eval_spec import EvalData
from pentad.schedules.spec.plan import BatchSpec
from pentad.workers.data.corpus import open_corpus
from pentad.workers.data.corpus_writer import write_index
from pentad.workers.data.sources import (
    builtin_corpus,
    count_eval_sequences,
    described,
    open_dataset,
    open_eval_data,
    open_sources,
)
from pentad.workers.data.tokenizer import decode, load_tokenizer, train_tokenizer


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
    """A rank keeps what it has mapped; the first other shard that it reads ends the run with an error."""
    path = random_corpus(tmp_path / "corpus", 1, 400, 40)
    dataset = open_dataset(DataSpec((SourceSpec("gone", path),), str(tmp_path)), BatchSpec(4, 8, 1, 1), 300, 0)
    before = dataset.sample(0, 0)
    shutil.rmtree(path)
    assert np.array_equal(dataset.sample(0, 0).inputs, before.inputs)
    with pytest.raises(PentadError, match=r"^shard .*/corpus/tokens-0000\d.arrow is missing: expected a file of"):
        [dataset.sample(0, index) for index in range(30)]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpora `a` and `b` of one tokenizer, and `c` of another one."""
    folder = tmp_path_factory.mktemp("corpora")
    one, other = (train_tokenizer([text], 270) for text in ("some words to join", "other letters, other pairs"))
    for name, tokenizer in (("a", one), ("b", one), ("c", other)):
        (folder / name).mkdir()
        write_corpus(folder / name, [f"{name} text {number} " * 9 for number in range(30)], tokenizer)
    return folder


def sources(folder: Path, *names: str, **options: Any) -> DataSpec:
    keys = enumerate(names)
    specs = (SourceSpec(name, str(folder / name), f"data.sources[{k}].path", **options) for k, name in keys)
    return DataSpec(tuple(specs), str(folder / "cache"))


def test_a_corpus_is_the_source_of_one_share(three: Path) -> None:
    with pytest.raises(PentadError) as caught:
        open_sources(sources(three, "a", "b", "a"), 300, 16)
    found, earlier = f"data.sources[2].path is {three / 'a'}", "data.sources[0].path"
    assert str(caught.value) == f"{found}, the corpus of {earlier}: expected another one"


def test_sources_have_one_tokenizer(three: Path) -> None:
    assert len(open_sources(sources(three, "a", "b"), 300, 16)) == 2
    hashes = [open_corpus(three / name).tokenizer[:12] for name in ("a", "c")]
    with pytest.raises(PentadError) as caught:
        open_sources(sources(three, "a", "c"), 300, 16)
    found = f"data.sources[1].path is {three / 'c'}, whose tokenizer has sha256 {hashes[1]}"
    assert str(caught.value) == f"{found}: expected {hashes[0]}, the tokenizer of data.sources[0].path"


def test_a_source_gives_at_least_a_sequence(three: Path) -> None:
    data = sources(three, "a", epochs=0.001)
    (source,) = open_sources(data, 300, 16)
    expected = rf"^data.sources\[0\].epochs is 0.001 of {source.cut.sequences} sequences: expected at least one"
    with pytest.raises(PentadError, match=expected):
        described(data, [source])


def test_what_is_held_out_has_at_least_a_sequence(three: Path) -> None:
    """Sequences are counted as they are evaluated; a built-in corpus that is not built yet has an unknown number."""
    path, length = str(three / "a"), 200
    held = EvalData("holdout", path, 0.01)
    with pytest.raises(
        PentadError, match=r"^data.holdout is 0.01, which holds \d+ tokens of '.*/a' out: expected a share"
    ):
        count_eval_sequences(held, 300, length, str(three))
    part = open_eval_data(held._replace(holdout=0.5), 300, length, str(three))
    assert count_eval_sequences(held._replace(holdout=0.5), 300, length, str(three)) == part.windows(length) > 0
    assert count_eval_sequences(EvalData("x", "builtin:pydoc"), 300, length, str(three / "none")) is None
