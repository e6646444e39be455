"""A corpus on disk: reads return what was written, and errors name what is damaged."""

from __future__ import annotations

import errno
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import psutil
import pyarrow as pa
import pytest
from checkpoints import flip
from corpora import write_corpus
from tokenizers import Tokenizer, models, pre_tokenizers

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.corpus import open_corpus
from pentad.workers.data.corpus_writer import Document, write_index, write_shard
from pentad.workers.data.tokenizer import decode, encode, load_tokenizer, train_tokenizer

DOCUMENTS = [f"Document {number}: " + "the quick brown fox\n" * (number % 7) + "é" * number for number in range(40)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(DOCUMENTS, 300)


@pytest.fixture
def folder(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    out = tmp_path / "corpus"
    out.mkdir()
    write_corpus(out, DOCUMENTS, tokenizer, shard_tokens=250)
    return out


@pytest.fixture
def flat(tokenizer: Tokenizer) -> np.ndarray:
    return np.concatenate([[*ids, 0] for ids in encode(tokenizer, DOCUMENTS)])


def test_a_window_across_shards_is_the_concatenation(folder: Path, flat: np.ndarray) -> None:
    corpus = open_corpus(folder, verify=True)
    assert (corpus.tokens, corpus.documents, corpus.vocab_size) == (len(flat), len(DOCUMENTS), 300)
    assert len(list(folder.glob("*.arrow"))) > 3
    for start, count in [
        (0, len(flat)),
        (0, 0),
        (len(flat), 0),
        *((start, 300) for start in range(0, len(flat) - 300, 13)),
    ]:
        window = corpus.read(start, count)
        assert window.dtype == np.int64 and np.array_equal(window, flat[start : start + count])


def test_the_shards_of_a_corpus_that_nothing_refers_to_are_closed_at_once(folder: Path) -> None:
    process = psutil.Process()
    gc.collect()
    gc.disable()
    try:
        corpus, before = open_corpus(folder), process.num_fds()
        corpus.read(0, corpus.tokens)
        assert process.num_fds() > before
        del corpus
        assert process.num_fds() == before
    finally:
        gc.enable()


def test_every_document_decodes_to_its_text_and_an_end_token(folder: Path) -> None:
    corpus = open_corpus(folder, verify=False)
    text = decode(load_tokenizer(folder / "tokenizer.json"), corpus.read(0, corpus.tokens).tolist())
    assert text == "".join(document + "<|endoftext|>" for document in DOCUMENTS)


def test_boundaries_are_the_positions_after_end_tokens(folder: Path, flat: np.ndarray) -> None:
    corpus = open_corpus(folder, verify=False)
    starts = np.concatenate([[0], np.flatnonzero(flat == 0)[:-1] + 1])
    for start, count in [(0, len(flat)), (1, 300), (380, 50), (int(starts[7]), 1), (int(starts[7]) + 1, 1), (5, 0)]:
        expected = starts[(starts >= start) & (starts < start + count)] - start
        assert np.array_equal(corpus.boundaries(start, count), expected)


def test_a_shard_is_an_arrow_column_with_one_row_per_document(folder: Path) -> None:
    with pa.memory_map(str(folder / "tokens-00000.arrow")) as source:
        table = pa.ipc.open_file(source).read_all()
    assert table.schema == pa.schema([("tokens", pa.large_list(pa.uint16()))])
    assert table["tokens"][3].as_py()[-1] == 0
    assert len(table) == json.loads((folder / "index.json").read_text())["shards"][0]["documents"]


def test_a_corpus_opens_from_its_index_and_maps_a_shard_when_it_is_read(folder: Path) -> None:
    corpus = open_corpus(folder)
    mapped = corpus.shards.map
    assert mapped.cache_info().currsize == 0
    corpus.read(0, 10)
    assert mapped.cache_info().currsize == 1
    assert not mapped(0).content.flags.owndata and not mapped(0).content.flags.writeable


def test_few_shards_are_mapped_at_a_time(folder: Path, flat: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pentad.workers.data.corpus.SHARDS_OPEN", 2)
    corpus = open_corpus(folder)
    for start in (0, 400, 100, 300):
        assert np.array_equal(corpus.read(start, 400), flat[start : start + 400])
        assert corpus.shards.map.cache_info().currsize <= 2


def test_loss_masks_are_read_with_their_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokens = [np.arange(1, 1 + length, dtype=np.uint16) for length in (5, 1, 90, 30, 7)]
    masks = [(each % 3 > 0).astype(np.uint8) for each in tokens]
    documents = [Document(*each) for each in zip(tokens, masks, strict=True)]
    shards = [
        write_shard(tmp_path, 0, documents[:3], tokens[0].dtype),
        write_shard(tmp_path, 1, documents[3:], tokens[0].dtype),
    ]
    write_index(tmp_path, tokenizer, shards)
    corpus = open_corpus(tmp_path, verify=True)
    assert corpus.has_loss_mask and (corpus.tokens, corpus.documents) == (133, 5)
    assert np.array_equal(corpus.loss_mask(2, 120), np.concatenate(masks)[2:122] != 0)
    with pa.memory_map(str(tmp_path / "tokens-00001.arrow")) as source:
        table = pa.ipc.open_file(source).read_all()
    assert table["loss_mask"].type == pa.large_list(pa.uint8())
    assert table["loss_mask"][1].as_py() == masks[4].tolist()


def test_without_loss_masks_every_token_counts(folder: Path) -> None:
    corpus = open_corpus(folder)
    assert not corpus.has_loss_mask and corpus.loss_mask(3, 300).tolist() == [True] * 300


@pytest.mark.quiet
@pytest.mark.slow
def test_a_terabyte_opens_within_two_seconds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5e11 tokens in 7,450 shards of 16 record batches each."""
    shard = json.loads((folder / "index.json").read_text())["shards"][0]
    tokens, documents = 2**22, 8000
    at = 8 * (documents + 1)
    rows = [[tokens, documents, at + number * 2**24, number * 2**24, 0] for number in range(16)]
    shard |= {"tokens": 16 * tokens, "documents": 16 * documents, "bytes": 2**28, "batches": rows}
    shards = [shard | {"file": f"tokens-{number:05d}.arrow"} for number in range(7450)]
    total = {"tokens": 7450 * 16 * tokens, "documents": 7450 * 16 * documents}
    _rewrite(folder, lambda index: index.update(**total, shards=shards))
    for number in range(7450):
        with (folder / f"tokens-{number:05d}.arrow").open("wb") as file:
            file.truncate(2**28)  # sparse
    gc.freeze()  # leftovers of earlier tests, which a new process would not have to traverse
    began, before = time.process_time(), psutil.Process().memory_info().rss
    corpus = open_corpus(folder)
    seconds = time.process_time() - began
    gc.unfreeze()
    assert seconds < 2 and corpus.tokens == total["tokens"]
    assert psutil.Process().memory_info().rss - before < 2**28


def test_a_large_vocabulary_is_stored_in_four_bytes_a_token(tmp_path: Path) -> None:
    vocab = {"<|endoftext|>": 0, **{f"w{number}": number for number in range(1, 70_000)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    write_corpus(tmp_path, ["w69999 w1"], tokenizer)
    corpus = open_corpus(tmp_path, verify=True)
    assert corpus.shards.dtype == np.uint32
    assert corpus.read(0, 3).tolist() == [69_999, 1, 0]


def test_the_fingerprint_depends_on_content_only(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prints = []
    for name, text in (("a", "the fox"), ("b", "the fox"), ("c", "the box")):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name, [text], tokenizer)
        prints.append(open_corpus(tmp_path / name, verify=True).fingerprint)
    assert prints[0] == prints[1] != prints[2]


def _rewrite(folder: Path, change: Callable[[dict], object]) -> None:
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no index": (lambda f: (f / "index.json").unlink(), "data.path is '.*', which has no readable index.json"),
    "not JSON": (lambda f: (f / "index.json").write_text("tokens"), "index.json is not JSON"),
    "a list": (lambda f: (f / "index.json").write_text("[]"), "holds a list"),
    "foreign": (lambda f: (f / "index.json").write_text('{"weight_map": {}}'), "has no version: expected the int"),
    "newer": (lambda f: _rewrite(f, lambda i: i.update(version=4)), "has version 4: expected 3 "),
    "a text for a count": (lambda f: _rewrite(f, lambda i: i.update(tokens="9")), "tokens = '9': expected the int"),
    "negative": (lambda f: _rewrite(f, lambda i: i.update(tokens=-9)), "tokens = -9: expected a count"),
    "other sum": (lambda f: _rewrite(f, lambda i: i.update(documents=9)), "has documents = 9: expected 40"),
    "outside": (
        lambda f: _rewrite(f, lambda i: i["shards"][1].update(file="../x")),
        r"shards\[1\].file = '../x': expected the name",
    ),
    "half a surrogate pair": (
        lambda f: _rewrite(f, lambda i: i["shards"][1].update(file="\ud800")),
        r"shards\[1\].file = '\\ud800': expected the name",
    ),
    "empty": (
        lambda f: _rewrite(f, lambda i: i.update(shards=[], tokens=0, documents=0)),
        "holds 0 tokens: expected at least 1",
    ),
    "shard gone": (lambda f: (f / "tokens-00001.arrow").unlink(), "tokens-00001.arrow is missing: expected a file of"),
    "shard cut": (
        lambda f: (f / "tokens-00001.arrow").write_bytes(b"ARROW1"),
        r"00001.arrow has 6 bytes: expected \d+",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_even_without_verify(folder: Path, damage: str) -> None:
    apply, message = DAMAGE[damage]
    apply(folder)
    with pytest.raises(PentadError, match=message):
        open_corpus(folder, verify=False)


def test_a_missing_folder_is_named_with_its_argument(tmp_path: Path) -> None:
    with pytest.raises(PentadError, match=r"PATH is '.*nowhere', which is not a folder: expected a corpus"):
        open_corpus(tmp_path / "nowhere", verify=True, argument="PATH")
    with pytest.raises(PentadError, match=r"PATH is 'x*', which is not a folder: expected a corpus"):
        open_corpus("x" * 5000, argument="PATH")


@pytest.mark.parametrize("file", ["tokens-00002.crc32", "tokenizer.json"])
def test_one_flipped_bit_is_refused_by_verify(folder: Path, file: str) -> None:
    flip(folder / file, (folder / file).stat().st_size // 2)
    open_corpus(folder)
    with pytest.raises(PentadError, match=rf"{file} is damaged: sha256 is [0-9a-f]{{64}}: expected [0-9a-f]{{64}}$"):
        open_corpus(folder, verify=True)


def test_a_damaged_block_is_named_when_it_is_read_first(tokenizer: Tokenizer, tmp_path: Path) -> None:
    document = Document(np.arange(200_000, dtype=np.uint16) % 300)
    write_index(tmp_path, tokenizer, [write_shard(tmp_path, 0, [document], document.tokens.dtype)])
    flip(tmp_path / "tokens-00000.arrow", 3 * 2**16 + 5)
    corpus = open_corpus(tmp_path)
    assert np.array_equal(corpus.read(0, 60_000), document.tokens[:60_000])
    message = r"shard .*tokens-00000.arrow is damaged at bytes 196608 to 262144: expected"
    for _ in range(2):
        with pytest.raises(PentadError, match=message):
            corpus.read(90_000, 20_000)
    with pytest.raises(PentadError, match=message):
        open_corpus(tmp_path, verify=True)


@pytest.mark.parametrize("change", [-(2**16), 1])
def test_a_shard_whose_size_changes_while_it_is_mapped_is_named_when_it_is_read(
    tokenizer: Tokenizer, tmp_path: Path, change: int
) -> None:
    document = Document(np.arange(200_000, dtype=np.uint16) % 300)
    shard = write_shard(tmp_path, 0, [document], document.tokens.dtype)
    write_index(tmp_path, tokenizer, [shard])
    corpus = open_corpus(tmp_path)
    assert len(corpus.read(0, corpus.tokens)) == corpus.tokens
    os.truncate(tmp_path / shard.file, shard.bytes + change)  # reading a page beyond the end raises SIGBUS
    message = rf"shard .*{shard.file} has {shard.bytes + change} bytes: expected {shard.bytes} \(build"
    for read in (corpus.read, corpus.boundaries):
        with pytest.raises(PentadError, match=message):
            read(0, corpus.tokens)
    with pytest.raises(PentadError, match=message):
        corpus.verify()


def test_a_mapped_shard_that_its_server_has_dropped_is_named(folder: Path) -> None:
    corpus = open_corpus(folder)
    mapped, stale = corpus.shards.map(0), OSError(errno.ESTALE, "Stale file handle")
    mapped = mapped._replace(memory=Mock(size=Mock(side_effect=stale)))
    with pytest.raises(PentadError, match=r"00000.arrow cannot be read \(.*Stale.*\): expected a readable file"):
        corpus.shards.files[0].check(mapped, 0, 1)


def test_a_token_beyond_the_vocabulary_is_refused_by_verify(folder: Path) -> None:
    _rewrite(folder, lambda index: index.update(vocab_size=200))
    with pytest.raises(PentadError, match=r"tokens-00000.arrow holds token \d+: expected ids below 200"):
        open_corpus(folder, verify=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda shard: shard.update(tokens=shard["tokens"] + 1),
            r"shards\[0\].tokens = \d+: expected \d+, the sum over",
        ),
        (lambda shard: shard["batches"][0].__setitem__(2, 10**9), r"shards\[0\].batches beyond byte \d+"),
        (lambda shard: shard.update(bytes=2**62), r"shards\[0\].bytes = \d+: expected at most \d+"),
        (lambda shard: shard["batches"][0].pop(), r"shards\[0\].batches of another form: expected 5 counts each"),
        (lambda shard: shard["batches"][0].__setitem__(0, "9"), r"shards\[0\].batches of another form"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(
    folder: Path, change: Callable[[dict], object], message: str
) -> None:
    def apply(index: dict) -> None:
        change(index["shards"][0])
        index["tokens"] = sum(shard["tokens"] for shard in index["shards"])

    _rewrite(folder, apply)
    with pytest.raises(PentadError, match=message):
        open_corpus(folder)


@pytest.mark.parametrize("depth", [900, 100_000])
def test_an_index_of_deep_lists_is_refused_in_a_short_sentence(folder: Path, depth: int) -> None:
    (folder / "index.json").write_text(f'{{"version": 3, "vocab_size": {"[" * depth}{"]" * depth}}}')
    with pytest.raises(PentadError, match=r"index.json (is not JSON|has vocab_size = )") as found:
        open_corpus(folder)
    assert len(str(found.value)) < 300


def test_verify_finds_a_shard_that_was_built_of_other_documents(folder: Path) -> None:
    def move_one(index: dict) -> None:
        index["shards"][0]["batches"][0][1] -= 1
        index["shards"][0]["documents"] -= 1
        index["documents"] -= 1

    _rewrite(folder, move_one)
    with pytest.raises(PentadError, match=r"tokens-00000.arrow has other documents than index.json says"):
        open_corpus(folder, verify=True)
