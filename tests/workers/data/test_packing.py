"""Packed sequences hold every document once, cut only where one is longer than a sequence."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data import packing
from pentad.workers.data.corpus import Corpus, open_corpus
from pentad.workers.data.corpus_writer import Document, write_index, write_shard
from pentad.workers.data.packing import Packs, is_packed, pack, packed
from pentad.workers.data.samples import sample_of
from pentad.workers.data.tokenizer import train_tokenizer

LENGTH = 8
DTYPE = np.dtype(np.uint16)


def corpus_of(folder: Path, lengths: list[int]) -> Corpus:
    """Documents of 1, 2, 3 ... with 0 at the end, in two shards."""
    folder.mkdir(exist_ok=True)
    documents = [Document(np.append(np.arange(1, length), 0).astype(DTYPE)) for length in lengths]
    half = len(documents) // 2
    shards = [
        write_shard(folder, number, part, DTYPE) for number, part in enumerate((documents[:half], documents[half:]))
    ]
    write_index(folder, train_tokenizer(["a"], 300), shards)
    return open_corpus(folder)


@given(sizes=st.lists(st.integers(1, 20), max_size=40))
def test_every_item_is_in_one_sequence_that_has_room_for_it(sizes: list[int]) -> None:
    found = pack(sizes, 20)
    assert sorted(item for items in found for item in items) == list(range(len(sizes)))
    fills = [sum(sizes[item] for item in items) for items in found]
    assert all(0 < fill <= 20 for fill in fills)
    assert sum(2 * fill <= 20 for fill in fills) <= 1, "two half-empty sequences would have become one"
    assert found == sorted(sorted(items) for items in found)


def test_the_longest_item_goes_first_to_where_it_fits_best() -> None:
    assert pack([4, 8, 1, 4, 2, 1], 10) == [[0, 2, 3, 5], [1, 4]]


@given(lengths=st.lists(st.integers(1, 30), min_size=2, max_size=20), run=st.sampled_from([1, 20, 10**6]))
def test_every_target_of_every_document_is_in_one_sequence(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], run: int
) -> None:
    corpus = corpus_of(tmp_path_factory.mktemp("corpus"), lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "RUN_POSITIONS", run)
        sequences = list(packed(corpus, LENGTH))
    assert all(sum(span.size for span in spans) <= LENGTH for spans in sequences)
    spans = sorted(span for spans in sequences for span in spans)
    edges = [*corpus.boundaries(0, corpus.tokens).tolist(), corpus.tokens]
    covered = [at for span in spans for at in range(span.start, span.start + span.size)]
    assert covered == [at for first, last in pairwise(edges) for at in range(first, last - 1)]
    cut = [span for span in spans if span.start + span.size + 1 not in edges]
    assert all(span.size == LENGTH for span in cut), "only what is longer than a sequence is cut"


def test_positions_without_a_document_have_no_loss(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "corpus", [4, 3, 20])
    packs = Packs(corpus, LENGTH, tmp_path / "cache")
    samples = [sample_of(corpus, packs.spans(number), LENGTH, True) for number in range(packs.sequences)]
    assert [int(sample.is_target.sum()) for sample in samples] == [8, 8, 8]
    assert samples[0].inputs.tolist() == [1, 2, 3, 1, 2, 17, 18, 19]
    assert samples[0].following.tolist() == [2, 3, 0, 2, 0, 18, 19, 0]
    assert samples[0].document_starts == (0, 3, 5)
    short = corpus_of(tmp_path / "short", [4, 1])
    sample = sample_of(short, Packs(short, LENGTH, tmp_path / "cache").spans(0), LENGTH, True)
    assert sample.is_target.tolist() == [True] * 3 + [False] * 5 and sample.document_starts == (0, 3)


def test_a_table_is_made_once_for_a_corpus_and_a_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, cache = corpus_of(tmp_path / "corpus", [4, 3, 20]), tmp_path / "cache"
    assert not is_packed(corpus, LENGTH, cache)
    first = Packs(corpus, LENGTH, cache)
    assert is_packed(corpus, LENGTH, cache) and not is_packed(corpus, LENGTH + 1, cache)
    monkeypatch.delattr(packing, "pack")
    again = Packs(corpus, LENGTH, cache)
    assert [again.spans(n) for n in range(3)] == [first.spans(n) for n in range(3)]
    assert sorted(path.name for path in cache.iterdir()) == [next(cache.glob("packed-8-*")).name]


@pytest.mark.parametrize("damage", ["empty", "cut in its head", "cut", "cut by a sequence", "longer", "a bit"])
def test_a_damaged_table_is_made_again(tmp_path: Path, damage: str) -> None:
    corpus, cache = corpus_of(tmp_path / "c", [5, 3, 9, 2] * 20), tmp_path / "cache"
    packs = Packs(corpus, LENGTH, cache)
    spans = [packs.spans(number) for number in range(packs.sequences)]
    (table,) = cache.glob("packed-*")
    intact = table.read_bytes()
    for content in _damaged(intact, damage):
        table.write_bytes(content)
        again = Packs(corpus, LENGTH, cache)
        assert [again.spans(number) for number in range(again.sequences)] == spans and table.read_bytes() == intact


def _damaged(content: bytes, damage: str) -> list[bytes]:
    kept = {"empty": 0, "cut in its head": 9, "cut": 200, "cut by a sequence": len(content) - 8}
    if damage in kept:
        return [content[: kept[damage]]]
    if damage == "longer":
        return [content + bytes(4)]
    flipped = [bytearray(content) for _ in range(0, len(content), 7)]
    for number, each in enumerate(flipped):
        each[7 * number] ^= 1 << number % 8
    return [bytes(each) for each in flipped]


def test_readers_of_a_table_keep_theirs_when_it_is_made_again(tmp_path: Path) -> None:
    corpus, cache = corpus_of(tmp_path / "c", [5, 3, 9, 2] * 20), tmp_path / "cache"
    packs = Packs(corpus, LENGTH, cache)
    spans = [packs.spans(number) for number in range(packs.sequences)]
    packing._write(corpus, LENGTH, next(cache.glob("packed-*")))
    assert [packs.spans(number) for number in range(packs.sequences)] == spans


def test_a_disk_that_keeps_no_table_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = corpus_of(tmp_path / "c", [4, 3])
    calls = iter(range(9))
    monkeypatch.setattr(packing, "crc32", lambda _: next(calls))
    with pytest.raises(PentadError, match=r"^data.cache is '.*cache', which has another packed-8-\w+ than was written"):
        Packs(corpus, LENGTH, tmp_path / "cache")


def test_a_table_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    corpus, cache = corpus_of(tmp_path / "c", [4, 3]), tmp_path / "cache"
    Packs(corpus, LENGTH, cache)
    (table,) = cache.glob("packed-*")
    table.unlink()
    table.mkdir()
    with pytest.raises(PentadError, match=r"^data.cache has packed-8-\w+, which cannot be read \(Is a directory\)"):
        Packs(corpus, LENGTH, cache)
    (tmp_path / "file").touch()
    with pytest.raises(PentadError, match=r"^data.cache is '.*file', where .* cannot be written \(.*\): expected"):
        Packs(corpus, LENGTH, tmp_path / "file")


def test_a_corpus_of_empty_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PentadError, match=r"data.path is '.*', which has only empty documents: expected one of two"):
        Packs(corpus_of(tmp_path / "corpus", [1, 1]), LENGTH, tmp_path / "cache")
