"""Building a corpus: from any source, complete or not at all, and errors name the user's mistake."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.build import build_corpus, inspect_corpus
from pentad.workers.data.corpus import Corpus, open_corpus
from pentad.workers.data.text_sources import read_chunks
from pentad.workers.data.tokenizer import decode, load_tokenizer, train_tokenizer

POEM = "Über den Bergen,\r\nweit zu wandern,\n\n  say <|endoftext|> people — 山の向こう 🏔\n"


def build(source: Path, **options: object) -> Corpus:
    options = {"tokenizer": None, "vocab": 300, "progress": lambda line: None, **options}
    return build_corpus(source, source.parent / "out", **options)  # type: ignore[arg-type]


def texts(corpus: Corpus) -> list[str]:
    """The text of each document."""
    tokenizer = load_tokenizer(corpus.path / "tokenizer.json")
    starts = [*corpus.boundaries(0, corpus.tokens).tolist(), corpus.tokens]
    return [decode(tokenizer, corpus.read(first, last - first - 1).tolist()) for first, last in pairwise(starts)]


def write_source(folder: Path, suffix: str, rows: Sequence[str | None]) -> Path:
    source = folder / f"source{suffix}"
    if suffix == ".jsonl":
        source.write_text("\n\n".join(json.dumps({"id": 1, "text": row}) for row in rows))
    elif suffix == ".parquet":
        pq.write_table(pa.table({"id": range(len(rows)), "text": rows}), source)
    else:
        source.write_bytes("".join(filter(None, rows)).encode())
    return source


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_are_documents(tmp_path: Path, suffix: str) -> None:
    rows = [POEM, None, "b", "", POEM * 5]
    corpus = build(write_source(tmp_path, suffix, rows))
    assert texts(corpus) == [POEM, "b", POEM * 5]
    assert corpus == open_corpus(corpus.path, verify=True)


@pytest.mark.parametrize("suffix", [".txt", ".md", ".rst", ".TXT"])
def test_a_text_file_is_one_document(tmp_path: Path, suffix: str) -> None:
    assert texts(build(write_source(tmp_path, suffix, [POEM, POEM]))) == [POEM + POEM]


def test_a_folder_is_read_in_path_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/b/c.rst", "ignored.csv", "empty.txt"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("" if "empty" in name else name)
    write_source(tmp_path / "in", ".jsonl", ["one", "two"])
    assert texts(build(tmp_path / "in")) == ["a/b/c.rst", "a/z.md", "b.txt", "one", "two"]


def test_shards_hold_complete_documents_up_to_their_limit(tmp_path: Path) -> None:
    rows = ["x" * 50, "long " * 200, "y" * 49, "z" * 49, *("short",) * 30]
    corpus = build(write_source(tmp_path, ".jsonl", rows), vocab=257, shard_tokens=100)
    shards = json.loads((corpus.path / "index.json").read_text())["shards"]
    assert all(shard["tokens"] <= 100 or shard["documents"] == 1 for shard in shards)
    assert [shard["tokens"] for shard in shards[:3]] == [51, 1001, 100]
    assert texts(corpus) == rows


def test_the_text_field_can_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "hello"}\n')
    assert texts(build(tmp_path / "a.jsonl", field="body")) == ["hello"]


def test_a_given_tokenizer_is_used_and_stored(tmp_path: Path) -> None:
    trained = train_tokenizer(["the cat sat on the mat"] * 9, 270)
    trained.save(str(tmp_path / "t.json"))
    corpus = build(write_source(tmp_path, ".txt", ["the cat sat"]), tokenizer=tmp_path / "t.json", vocab=9999)
    assert corpus.read(0, corpus.tokens).tolist() == [*trained.encode("the cat sat").ids, 0]
    assert load_tokenizer(corpus.path / "tokenizer.json").get_vocab() == trained.get_vocab()


@pytest.mark.parametrize("content", ["file", "folder"])
def test_an_output_folder_with_content_is_not_touched(tmp_path: Path, content: str) -> None:
    out = tmp_path / "out"
    if content == "folder":
        out.mkdir()
    (out / "precious" if content == "folder" else out).write_text("precious")
    with pytest.raises(PentadError, match=r"OUT is '.*out', which exists and is not empty"):
        build(write_source(tmp_path, ".txt", ["a"]))
    assert (out / "precious" if content == "folder" else out).read_text() == "precious"


def test_an_empty_output_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert texts(build(write_source(tmp_path, ".txt", ["a"]))) == ["a"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab": 256}, "--vocab is 256: expected at least 257"),
        ({"vocab": 2**64}, "--vocab is 18446744073709551616: expected at most"),
        ({"shard_tokens": 0}, "shard_tokens is 0: expected at least 1"),
        ({"tokenizer": Path("gone.json")}, "--tokenizer is 'gone.json', which is not a file"),
    ],
)
def test_a_bad_option_is_named(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(PentadError, match=message):
        build(write_source(tmp_path, ".txt", ["a"]), **options)


def test_an_output_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    source = write_source(tmp_path, ".txt", ["a"])
    with pytest.raises(
        PentadError, match=r"OUT is '.*source.txt/out', which cannot be written \(.*\): expected a writable"
    ):
        build_corpus(source, source / "out", tokenizer=None, vocab=300, progress=lambda line: None)


def test_a_source_that_is_neither_file_nor_folder_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(PentadError, match=r"SOURCE is '.*pipe.txt': expected a file that ends in .txt"):
        build(tmp_path / "pipe.txt")


def test_a_source_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(PentadError, match=r"gone.jsonl cannot be read \(No such file or directory\)"):
        list(read_chunks([tmp_path / "gone.jsonl"], "text"))


def test_inspect_describes_the_corpus_as_plain_data(tmp_path: Path) -> None:
    corpus = build(write_source(tmp_path, ".jsonl", ["the cat", "the dog"]))
    found = inspect_corpus(corpus.path, samples=3, length=1000, seed=0)
    assert json.loads(json.dumps(found)) == found
    assert (found["tokens"], found["documents"], found["vocab_size"]) == (corpus.tokens, 2, corpus.vocab_size)
    assert found["samples"] == ["the cat<|endoftext|>the dog<|endoftext|>"]
    assert [shard["tokens"] for shard in found["shards"]] == [corpus.tokens]
    assert len(inspect_corpus(corpus.path, samples=2, length=2, seed=0)["samples"]) == 2


def test_a_build_that_loses_the_race_leaves_the_winners_folder(tmp_path: Path) -> None:
    source = write_source(tmp_path, ".txt", ["a b c"])

    def create_out(line: str) -> None:
        if line.startswith("tokens-"):
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "winner").touch()

    with pytest.raises(PentadError, match="which exists and is not empty"):
        build(source, progress=create_out)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "source.txt"]
