"""A remote corpus is read like a local one, and each block is fetched at most once."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from checkpoints import flip
from mixtures import DTYPE

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.corpus import Corpus, open_corpus
from pentad.workers.data.corpus_index import CHECKED
from pentad.workers.data.corpus_writer import Document, write_index, write_shard
from pentad.workers.data.storage import Folder
from pentad.workers.data.tokenizer import train_tokenizer

TOKENS = (np.arange(300_000) % 257).astype(DTYPE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "bucket" / "corpus"
    made.mkdir(parents=True)
    halves = TOKENS[:200_000], TOKENS[200_000:]
    shards = [write_shard(made, number, [Document(half)], DTYPE) for number, half in enumerate(halves)]
    write_index(made, train_tokenizer(["a"], 300), shards)
    return made


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(file, first byte, bytes) of every partial read of a remote file."""
    found, read_at = [], Folder.read_at

    def counted(self: Folder, file: str, at: int, size: int | None) -> bytes:
        if size is not None:
            found.append((file, at, size))
        return read_at(self, file, at, size)

    monkeypatch.setattr(Folder, "read_at", counted)
    return found


def remote(folder: Path, verify: bool = False) -> Corpus:
    return open_corpus(f"file://{folder}", verify, cache=str(folder.parent.parent / "cache"))


def test_a_uri_is_read_as_the_folder_is(folder: Path) -> None:
    corpus, local = remote(folder, verify=True), open_corpus(folder)
    assert corpus.fingerprint == local.fingerprint
    assert np.array_equal(corpus.read(150_000, 100_000), TOKENS[150_000:250_000])
    assert np.array_equal(corpus.boundaries(0, 300_000), local.boundaries(0, 300_000))


def test_what_was_read_once_is_not_fetched_again(folder: Path, fetched: list) -> None:
    corpus = remote(folder)
    assert not fetched
    corpus.read(90_000, 50_000)
    assert fetched == [("tokens-00000.arrow", 2 * CHECKED, 3 * CHECKED)]
    corpus.read(90_000, 50_000)
    remote(folder).read(95_000, 40_000)
    assert len(fetched) == 1


def test_a_copy_that_is_damaged_is_fetched_again(folder: Path, fetched: list) -> None:
    remote(folder).read(0, 100)
    (copy,) = folder.parent.parent.glob("cache/*/tokens-00000.arrow")
    flip(copy, 1000)
    assert np.array_equal(remote(folder).read(0, 100), TOKENS[:100])
    assert len(fetched) == 2


def test_a_copy_that_is_cut_while_it_is_mapped_is_named_and_made_again(folder: Path) -> None:
    corpus = remote(folder)
    corpus.read(0, 100)
    (copy,) = folder.parent.parent.glob("cache/*/tokens-00000.arrow")
    size = copy.stat().st_size
    os.truncate(copy, 5)
    with pytest.raises(PentadError, match=rf"shard {copy} has 5 bytes: expected {size} \(start again"):
        corpus.read(0, 100)
    assert np.array_equal(remote(folder).read(0, 100), TOKENS[:100])


def test_damage_at_the_source_is_named(folder: Path) -> None:
    flip(folder / "tokens-00001.arrow", CHECKED + 5)
    corpus = remote(folder)
    message = r"shard file://.*/corpus/tokens-00001.arrow is damaged at bytes 65536 to 131072: expected a copy"
    with pytest.raises(PentadError, match=message):
        corpus.read(240_000, 10_000)
    assert np.array_equal(corpus.read(0, 200_000), TOKENS[:200_000])


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("nope://bucket/corpus", r"data.path is 'nope://.*', which cannot be reached \(.*\): expected a folder"),
        (
            "file:///nowhere/corpus",
            r"data.path is 'file:///nowhere/.*', which cannot be read \(.*\): expected a corpus",
        ),
    ],
)
def test_a_uri_that_leads_nowhere_is_named(uri: str, message: str) -> None:
    with pytest.raises(PentadError, match=message) as raised:
        open_corpus(uri)
    assert "\n" not in str(raised.value)


def test_a_cache_that_cannot_be_written_is_named(folder: Path) -> None:
    (folder.parent.parent / "cache").touch()
    with pytest.raises(PentadError, match=r"data.cache is '.*', where .* cannot be written \(.*\): expected a folder"):
        remote(folder).read(0, 1)


def test_a_shard_that_vanishes_is_named(folder: Path) -> None:
    corpus = remote(folder)
    (folder / "tokens-00001.arrow").unlink()
    with pytest.raises(PentadError, match=r"file://.*/tokens-00001.arrow cannot be read"):
        corpus.read(210_000, 10)
    with pytest.raises(PentadError, match=r"shard file://.*/tokens-00001.arrow is missing: expected a file of"):
        remote(folder)
